"""Joint training through the loop: lambda 0, schedules, resuming, processes, and what is saved."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parent))

import train_support as support

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy
from draftsmith.models.load import load_drafter
from draftsmith.models.mtp_joint import JointMtpMethod
from draftsmith.models.protocols import Predictions, TrainOutput
from draftsmith.models.target import TargetModel, fingerprint_target
from draftsmith.train.config import TrainConfig

JOINT = {"_target_": "draftsmith.models.mtp_joint.JointMtpMethod", "num_steps": 2}


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny, family="llama_tied")


def compose(inputs: support.Inputs, *overrides: str, **method: Any) -> TrainConfig:
    words = ["features=tokens", "features.cache=null", f"data.prepared={inputs.prepared}"]
    return support.compose(
        inputs, *words, "data.validation_share=0.2", *overrides, method=JOINT | method
    )


@pytest.fixture(scope="module")
def finished(inputs: support.Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps whose weight changes after the fifth; a checkpoint after each third."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    settings = compose(
        inputs,
        "train.max_steps=9",
        "train.save_every=3",
        "train.eval_every=3",
        "train.keep_last=3",
        mtp_weight=[[0.0, 0.3], [0.55, 0.1]],
    )
    support.run_in_process(settings, run_dir)
    return run_dir


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def without_timings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


# --- lambda 0 -------------------------------------------------------------------------------------


class PlainModel(nn.Module):
    """A language model without any modules, as a draft of the loop: the main loss alone."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.trunk = target.model.requires_grad_(True)
        self.config = target.config
        self._head = (target.head(),)

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:
        pass

    def normaliser(self, batch: Any) -> Tensor:
        return batch.supervised_mask[:, 1:].sum().double()

    def forward(self, batch: Any, *, target_head: nn.Module, objective: Any) -> TrainOutput:  # noqa: ARG002
        hidden = self.trunk.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        places = torch.zeros_like(batch.supervised_mask)
        places[:, :-1] = batch.supervised_mask[:, 1:]
        taught = hidden[places]
        every = torch.ones(1, len(taught))
        output = objective(
            Predictions(
                draft_hidden=taught[None],
                draft_head_weight=self._head[0].weight,
                target_hidden=taught.detach(),
                supervised=every.bool(),
                weights=every,
                draft_to_target=None,
                labels=batch.input_ids.roll(-1, dims=1)[places],
                shares_target_head=True,
            ),
            self._head[0],
        )
        nothing = torch.zeros(1, dtype=torch.float64)
        names = ("loss", "supervised", "in_vocabulary", "correct", "acceptance")
        names += ("greedy_joint", "sampled_joint")
        return TrainOutput(output.loss_sum, dict.fromkeys(names, nothing) | {"chains": nothing[0]})

    def saved_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        names = {name: name.removeprefix("trunk.") for name in weights if "lm_head" not in name}
        return self.config, {short: weights[name] for name, short in names.items()}

    def save_beside(self, folder: Path) -> None:
        pass


@dataclass
class PlainMethod(JointMtpMethod):
    """Loads the target as the joint method does, and makes no modules."""

    def build(self, *_: Any, target: Any) -> Any:  # type: ignore[override]
        own = dict(target) | {"device": "cpu", "dtype": "float32"}
        return PlainModel(TargetModel.load(**own))


@pytest.fixture
def plain_method(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a method node for `PlainMethod`."""
    module = ModuleType("plain_lm")
    module.PlainMethod = PlainMethod  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plain_lm", module)
    return "plain_lm.PlainMethod"


def test_lambda_zero_trains_the_weights_of_a_plain_model_bit_for_bit(
    inputs: support.Inputs, plain_method: str, tmp_path: Path
) -> None:
    words = ("train.max_steps=5", "train.eval_every=4")
    joint = support.run_in_process(compose(inputs, *words, mtp_weight=0), tmp_path / "joint")
    settings = compose(inputs, *words, _target_=plain_method)
    plain = support.run_in_process(settings, tmp_path / "plain")
    assert support.losses(joint) == support.losses(plain)
    assert [row["grad_norm"] for row in joint if "loss" in row] == [
        row["grad_norm"] for row in plain if "loss" in row
    ]
    trained = weights_of(tmp_path / "joint" / "model")
    assert_same(trained, weights_of(tmp_path / "plain" / "draft"))
    assert trained["model.embed_tokens.weight"].shape[0] == 320
    # Nothing was learnt by the modules, and the control: with a weight all of it differs.
    other = support.run_in_process(compose(inputs, *words, mtp_weight=0.3), tmp_path / "on")
    assert support.losses(other)[1:] != support.losses(plain)[1:]
    assert "mtp_loss" not in joint[0]
    assert [row["validation_mtp_loss"][0] > 0 for row in joint if "validation_loss" in row]


# --- the loop -------------------------------------------------------------------------------------


def test_main_and_mtp_losses_are_logged_apart_and_make_up_the_loss(finished: Path) -> None:
    rows = [row for row in support.read_metrics(finished) if "loss" in row]
    assert [row["mtp_weight"] for row in rows] == pytest.approx([0.3] * 5 + [0.1] * 4)
    assert len(rows[0]["mtp_loss"]) == 2
    assert rows[-1]["main_loss"] < rows[0]["main_loss"]
    for row in rows:
        # Depth k lacks k + 1 predictions of a text here and there: close, not equal.
        joint = row["main_loss"] + row["mtp_weight"] * sum(row["mtp_loss"]) / 2
        assert row["loss"] == pytest.approx(joint, rel=0.05)
    last = support.read_metrics(finished)[-1]
    assert {"validation_main_loss", "validation_mtp_loss"} <= last.keys()
    assert last["validation_simulated_accepted_length_rounds"] >= 1.0


@pytest.mark.parametrize("until", [3, 6])
def test_a_resumed_run_follows_the_schedule_and_ends_with_the_same_weights(
    until: int, finished: Path, tmp_path: Path
) -> None:
    # The weight changes between steps 5 and 6: before and behind both checkpoints.
    from draftsmith.train.worker import train_run_folder

    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > until:
            shutil.rmtree(folder)
    for name in ("draft", "model"):
        shutil.rmtree(run_dir / name)
    train_run_folder(run_dir)
    assert without_timings(support.read_metrics(run_dir)) == without_timings(
        support.read_metrics(finished)
    )
    for name in ("draft", "model"):
        assert_same(weights_of(run_dir / name), weights_of(finished / name))


def test_micro_batches_add_up_to_the_step(inputs: support.Inputs, tmp_path: Path) -> None:
    whole = compose(inputs, "train.batch_tokens=100000", "train.max_steps=3")
    split = compose(
        inputs, "train.micro_batch_size=8", "train.gradient_accumulation=10", "train.max_steps=3"
    )
    one = support.run_in_process(whole, tmp_path / "whole")
    many = support.run_in_process(split, tmp_path / "split")
    assert support.losses(one) == pytest.approx(support.losses(many), abs=1e-4)
    for key in ("main_loss", "mtp_loss", "grad_norm"):
        for first, second in zip(one, many, strict=True):
            if "loss" in first:
                assert first[key] == pytest.approx(second[key], rel=1e-3), key


def test_what_a_method_needs_and_what_features_give_must_fit(inputs: support.Inputs) -> None:
    from draftsmith.train.preflight import check_before_start

    with pytest.raises(ValueError, match=r"JointMtpMethod trains the target.*features=tokens"):
        check_before_start(support.compose(inputs, method=JOINT))
    settings = compose(inputs)
    settings.method = {"_target_": "draftsmith.models.eagle.EagleMethod"}
    with pytest.raises(ValueError, match=r"features=tokens has no states.*EagleMethod reads"):
        check_before_start(settings)
    with pytest.raises(ValueError, match=r"features=tokens needs data\.prepared"):
        support.compose(inputs, "features=tokens", "features.cache=null")
    with pytest.raises(ValueError, match=r"no states to round"):
        compose(inputs, "features.dtype=bfloat16")


# --- what is saved --------------------------------------------------------------------------------


def test_the_trained_model_is_an_ordinary_folder_and_the_draft_knows_it(
    finished: Path, inputs: support.Inputs
) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = AutoModelForCausalLM.from_pretrained(inputs.target)
    assert not torch.equal(model.model.norm.weight, before.model.norm.weight)
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert tokenizer.chat_template
    assert json.loads((finished / "model" / "generation_config.json").read_text())
    config = json.loads((finished / "draft" / "config.json").read_text())
    fingerprint = asdict(fingerprint_target(str(finished / "model")))
    assert config["target_fingerprint"] == fingerprint
    assert config["target_name_or_path"] == str(finished / "model")
    assert config["target_fingerprint"] != asdict(fingerprint_target(str(inputs.target)))
    assert not [name for name in weights_of(finished / "draft") if "trunk" in name]
    checkpoint = finished / "checkpoints" / "step-000009"
    assert_same(weights_of(checkpoint / "model"), weights_of(finished / "model"))
    assert_same(weights_of(checkpoint / "draft"), weights_of(finished / "draft"))
    earlier = json.loads((checkpoint.with_name("step-000003") / "draft/config.json").read_text())
    assert earlier["target_fingerprint"]["weights"] != fingerprint["weights"]
    assert earlier["target_name_or_path"] == str(checkpoint.with_name("step-000003") / "model")
    # Accepted lengths for different targets do not compare, so none of them is the best.
    assert not (finished / "best").exists()


def test_a_pair_is_trained_further_from_its_two_folders(
    finished: Path, inputs: support.Inputs, tmp_path: Path
) -> None:
    words = [f"target.name_or_path={finished / 'model'}", f"init_from={finished / 'draft'}"]
    settings = compose(inputs, *words, "train.max_steps=1", "train.lr=1e-12")
    support.run_in_process(settings, tmp_path)
    for name in ("draft", "model"):
        before, after = weights_of(finished / name), weights_of(tmp_path / name)
        for key in before:
            torch.testing.assert_close(before[key], after[key], atol=1e-9, rtol=0)


def test_the_saved_pair_decodes_what_its_model_writes(finished: Path) -> None:
    target = TargetModel.load(str(finished / "model"), dtype="float32")
    draft = load_drafter(finished, target)
    text = "<|im_start|>user\nthe cat sat on<|im_end|>\n<|im_start|>assistant\n"
    prompt = target.tokenizer(text, return_tensors="pt").input_ids
    plain = generate(target, None, prompt, max_new_tokens=16)
    for policy in (ChainPolicy(2), DynamicTreePolicy(total_tokens=8, depth=2, top_k=2)):
        made = generate(target, draft, prompt, max_new_tokens=16, policy=policy)
        assert made.token_ids == plain.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["0", "[[0.0,0.0],[0.5,0.3]]"])
def test_two_processes_take_the_steps_of_one(
    weight: str, inputs: support.Inputs, tmp_path: Path
) -> None:
    # Modules that never run, and modules whose weight is 0 at first: DDP waits for neither.
    common = ["train.max_steps=4", "train.eval_every=2", "train.micro_batch_size=4"]
    settings = compose(
        inputs, "train.gradient_accumulation=2", *common, mtp_weight=json.loads(weight)
    )
    single = support.run_in_process(settings, tmp_path / "single")
    words = ["method=mtp_joint", "method.num_steps=2", f"method.mtp_weight={weight}"]
    words += ["features=tokens", "features.cache=null", f"data.prepared={inputs.prepared}"]
    words += ["data.validation_share=0.2", "launch=ddp", "launch.num_processes=2", *common]
    run_dir = tmp_path / "double"
    command = [sys.executable, "-P", "-m", "draftsmith.train", *inputs.overrides, *words]
    done = support.run_command([*command, f"run_dir={run_dir}"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = support.read_metrics(run_dir)
    assert [row["step"] for row in found] == [row["step"] for row in single]
    for one, other in zip(single, found, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"tokens_per_second"}:
            assert one[key] == pytest.approx(other[key], abs=1e-4), (one["step"], key)
    assert (run_dir / "model" / "model.safetensors").is_file()
