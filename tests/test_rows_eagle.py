"""What users of EAGLE-1 and EAGLE-3 ran into at a terminal; rows of faults that no other file has.

Two processes draw different noise (T23); a setting that the chosen method lacks is answered from
the methods (T28); heads that fit no layer are refused before a layer is built (M01).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent))

import train_support as support
from format_support import eagle3_config, export

from draftsmith.conf.entry import compose_settings
from draftsmith.conf.schema import ExportConfig, TargetConfig
from draftsmith.models.eagle import EagleMethod
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.export import export_draft
from draftsmith.train.config import build_method


def compose_method(*overrides: str) -> Any:
    """The method that a command line chooses."""
    common = ["target.name_or_path=x", "features.cache=x"]
    return build_method(compose_settings("train", support.SCHEMA, [*common, *overrides]).method)


# Settings.


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("method.feature_nosie=none", r"Did you mean method\.feature_noise"),
        ("method.norm_output=true", r"method\.norm_output is a setting of method=eagle3 only"),
        ("method.objective.kl_scale=2", r"\+method\.objective\.kl_scale="),
    ],
)
def test_t28_a_setting_that_the_method_lacks_is_answered_from_the_methods(
    override: str, answer: str
) -> None:
    with pytest.raises(ValueError, match=answer) as refused:
        compose_method("method=eagle", override)
    for other in ("features", "optimizer"):  # What the whole schema holds that is spelt alike.
        assert f"Did you mean {other}" not in str(refused.value)


def test_a_key_that_resembles_none_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match="zzzzz") as refused:
        compose_method("method=eagle", "method.zzzzz=1")
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("word", ["true", '"true"'])
def test_step_tokens_are_written_as_the_page_says(word: str) -> None:
    """A bare true reaches the method as a truth value."""
    method = compose_method("method.num_steps=3", f"method.step_tokens=[{word},own,own]")
    assert isinstance(method, Eagle3Method)
    assert method.step_tokens == ["true", "own", "own"]
    with pytest.raises(ValueError, match="the first one true"):
        compose_method("method.num_steps=2", "method.step_tokens=[false,own]")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_key_value_heads": 3}, r"4 query heads on 3 key/value heads.*num_key_value_heads"),
        ({"head_dim": 7}, r"7 wide.*method\.head_dim"),
    ],
)
def test_m01_heads_that_fit_no_layer_are_refused_with_what_to_set(
    tiny_target: Callable[..., Any], settings: dict[str, int], message: str
) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=message):
        EagleMethod(**settings).build(target.head(), None, [])


# Export.


def test_a_target_too_shallow_for_eagles_own_layers_is_said_so() -> None:
    with pytest.raises(ValueError, match="has no three layers to read of a target with 5 layers"):
        export(eagle3_config(aux_layer_ids=[1, 3, 4]), "eagle", num_layers=5)


def test_refusals_name_the_program_not_the_format() -> None:
    with pytest.raises(ValueError, match="SafeAILab's code does not know it"):
        export(eagle3_config(norm_before_residual=True), "eagle")


# Two processes.


def same_chats(path: Path, *, rows: int, seed: int = 0) -> Path:  # noqa: ARG001
    """One conversation, `rows` times."""
    answer = "the cat sat on the mat and the dog ran to the door"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * rows)
    return path


@pytest.mark.slow
def test_t23_two_processes_draw_different_noise_and_start_from_the_same_weights(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes read the same text: equal noise would give exactly one process's loss."""
    monkeypatch.setattr(support, "write_chats", same_chats)
    inputs = support.make_inputs(tmp_path, tiny, rows=4)
    common = ["train.max_steps=2", "train.micro_batch_size=1", "data.validation_share=0"]
    common += ["train.eval_every=null"]

    def first_loss(name: str, noise: str, *launch: str) -> float:
        run_dir = tmp_path / name
        words = ["method=eagle", f"method.feature_noise={noise}", "method.noise_amplitude=1.0"]
        words += [*inputs.overrides, *common, *launch, f"run_dir={run_dir}"]
        command = [sys.executable, "-P", "-m", "draftsmith.train", *words]
        done = support.run_command(command, tmp_path)
        assert done.returncode == 0, done.stderr
        return support.losses(support.read_metrics(run_dir))[0]

    two = ("launch=ddp", "launch.num_processes=2")
    still = first_loss("still", "none")
    assert first_loss("still_two", "none", *two) == pytest.approx(still, abs=1e-6)
    alone, both = first_loss("alone", "gaussian"), first_loss("both", "gaussian", *two)
    assert abs(both - alone) > 1e-3
    assert first_loss("again", "gaussian", *two) == both


# Warm starts.


EAGLE = {"_target_": "draftsmith.models.eagle.EagleMethod"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> tuple[support.Inputs, Path]:
    """A tiny target's inputs and an EAGLE-1 run of one step on them."""
    inputs = support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)
    run_dir = tmp_path_factory.mktemp("run") / "first"
    support.run_in_process(support.compose(inputs, "train.max_steps=1", method=EAGLE), run_dir)
    return inputs, run_dir


def start_from(folder: Path, inputs: support.Inputs, run_dir: Path) -> None:
    """One step from a checkpoint."""
    settings = support.compose(inputs, "train.max_steps=1", f"init_from={folder}", method=EAGLE)
    support.run_in_process(settings, run_dir)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 400), ("hidden_act", "gelu")])
def test_a_start_whose_tensors_fit_but_mean_something_else_is_refused(
    finished: tuple[support.Inputs, Path], tmp_path: Path, name: str, value: Any
) -> None:
    """EAGLE-1 holds no tensor of the vocabulary's size, so shapes say nothing of its target."""
    inputs, run_dir = finished
    other = tmp_path / "other"
    shutil.copytree(run_dir / "draft", other)
    config = json.loads((other / "config.json").read_text())
    for key in {name, "draft_vocab_size"} if name == "vocab_size" else {name}:
        config[key] = value
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"was trained with {name}="):
        start_from(other, inputs, tmp_path / "run")


def test_a_start_from_trained_embeddings_is_refused(
    finished: tuple[support.Inputs, Path], tmp_path: Path
) -> None:
    """Its layer reads embeddings that this run would not give it."""
    inputs, run_dir = finished
    foreign = tmp_path / "foreign"
    export_draft(
        ExportConfig(
            draft=str(run_dir),
            format="eagle",
            output=str(foreign),
            target=TargetConfig(name_or_path=str(inputs.target)),
        )
    )
    start_from(foreign, inputs, tmp_path / "same")
    tensors = load_file(foreign / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].roll(1, 0)
    save_file(tensors, foreign / "model.safetensors")
    with pytest.raises(ValueError, match="embeddings of its own"):
        start_from(foreign, inputs, tmp_path / "other")
