"""draftsmith-export and draftsmith-import of block drafts as a user runs them: written, checked,
there and back, and a run that starts from the folder.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent))

import train_support
from format_support import dflash_config, dspark_config, make_draft

from draftsmith.conf.entry import compose_settings
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.export import check_export, export_draft, random_logits, run
from draftsmith.models.foreign_files import read_tensors
from draftsmith.models.formats import to_format
from draftsmith.models.import_checkpoint import import_checkpoint
from draftsmith.models.load import load_draft, load_drafter
from draftsmith.models.protocols import DraftContext, SamplingSettings
from draftsmith.models.target import fingerprint_target

IDS = (0, 2)
"""Layers read; the tests' targets have four."""
MASK = 319
METHODS: dict[str, Any] = {
    "dflash": lambda **options: DFlashMethod(**({"block_size": 6} | options)),
    "dspark": lambda **options: DSparkMethod(**({"block_size": 4, "markov_rank": 6} | options)),
}
PAIRS = [
    ("dflash", "vllm"), ("dflash", "sglang"), ("dflash", "transformers"), ("dflash", "speculators"),
    ("dspark", "vllm"), ("dspark", "deepspec"), ("dspark", "speculators"),
]  # fmt: skip


def settings_of(root: str, schema: str, **settings: Any) -> Any:
    """Settings as a command line makes them."""
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return compose_settings(root, f"draftsmith.conf.schema:{schema}", overrides)


def export(draft: Path, format: str, output: Path, **settings: Any) -> Any:
    return export_draft(
        settings_of("export", "ExportConfig", draft=draft, format=format, output=output, **settings)
    )


def bring_back(checkpoint: Path, target: Path, output: Path) -> Any:
    named = {"target.name_or_path": target, "checkpoint": checkpoint, "output": output}
    return import_checkpoint(settings_of("import", "ImportConfig", **named))


@pytest.fixture
def make_saved(
    tiny_target: Callable[..., Any], tiny_folder: Callable[..., Path], tmp_path: Path
) -> Callable[..., Path]:
    """Factory: a block draft saved as training saves it."""

    def make(method: str, *, family: str = "llama", **options: Any) -> Path:
        target = str(tiny_folder(family))
        usual = {"num_hidden_layers": 2, "mask_token_id": MASK, "head_dim": 16}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            made = METHODS[method](**(usual | options))
            draft = made.build(tiny_target(family).head(), None, IDS)
            for parameter in draft.parameters():
                if parameter.ndim == 1:
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
        draft.config.target_fingerprint = dataclasses.asdict(fingerprint_target(target))
        draft.config.target_name_or_path = target
        folder = tmp_path / f"run-{method}-{family}" / "draft"
        draft.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(("method", "format"), PAIRS)
def test_a_block_draft_goes_out_comes_back_and_drafts_the_same(
    method: str,
    format: str,
    make_saved: Callable[..., Path],
    tiny_target: Callable[..., Any],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = make_saved(method)
    exported = export(folder.parent, format, tmp_path / "out")  # A run folder is taken too.
    assert not exported.remarks or format == "speculators"
    found = bring_back(exported.folder, tiny_folder("llama"), tmp_path / "back")
    assert found.holds_target == (format in ("speculators", "deepspec"))
    assert any("head is the target's" in one for one in found.remarks) == found.holds_target
    own, back = load_draft(folder), load_draft(tmp_path / "back")
    assert back.config.target_fingerprint == own.config.target_fingerprint
    mine, theirs = own.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    target = tiny_target("llama")
    tokens = torch.arange(5, 17)[None]
    states = target.forward(tokens[:, :-1], aux_layer_ids=IDS)
    context = DraftContext(tokens, states.aux_hidden_states, states.final_hidden_states)
    drafted = []
    for path in (folder, tmp_path / "back"):
        draft = load_drafter(path, target)
        (block,) = draft.propose(
            [context],
            [draft.start(40)],
            num_draft_tokens=[9],
            sampling=[SamplingSettings()],
            generators=[None],
        )
        drafted.append(block.tokens.tolist())
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == own.config.num_steps


def test_a_target_that_scales_its_embeddings_or_caps_its_logits(
    make_saved: Callable[..., Path], tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    """gemma3 does both: vLLM gets the embeddings as the draft reads them, the rest is refused."""
    target = tiny_target("gemma3")
    scaled = target.embed_tokens(torch.arange(target.vocab_size))
    folder = make_saved("dflash", family="gemma3")
    exported = export(folder, "vllm", tmp_path / "a")
    stored = load_file(exported.folder / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], scaled)
    assert any("bare matrix" in remark for remark in exported.remarks)
    with pytest.raises(ValueError, match="copy of its head cannot hold"):
        export(folder, "speculators", tmp_path / "b")
    with pytest.raises(ValueError, match="the target scales its embeddings"):
        export(folder, "sglang", tmp_path / "c")


def test_a_head_or_embeddings_that_are_not_the_targets_are_refused(
    make_saved: Callable[..., Path], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """No norm forgives a factor: the slots' embeddings are the first layer's residual."""
    exported = export(make_saved("dspark"), "deepspec", tmp_path / "out").folder
    other = tiny_folder("llama", seed=1)
    with pytest.raises(ValueError, match="has embeddings of its own"):
        bring_back(exported, other, tmp_path / "a")
    tensors = load_file(exported / "model.safetensors")
    target = tiny_folder("llama")
    for name, said in (("embed_tokens", "embeddings of its own"), ("lm_head", "head of its own")):
        changed = tensors | {f"{name}.weight": 2.0 * tensors[f"{name}.weight"]}
        save_file(changed, exported / "model.safetensors")
        with pytest.raises(ValueError, match=said):
            bring_back(exported, target, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, exported / "model.safetensors")
    bring_back(exported, target, tmp_path / "c")


# The check.


def test_x02_the_check_finds_what_is_missing_or_changed(
    make_saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_saved("dspark")
    config, tensors = load_draft(folder).config, read_tensors(folder)
    foreign = to_format(config, tensors, format="vllm", target=None)
    exported = export(folder, "vllm", tmp_path / "out").folder
    check_export(exported, config, tensors, foreign=foreign, target=None)
    whole = read_tensors(exported)
    name = "markov_head.markov_w2.weight"
    for changed, message in (
        ({n: t for n, t in whole.items() if n != name}, f"{name} is missing"),
        (whole | {name: whole[name] + 1e-3}, f"{name} differs"),
    ):
        save_file(changed, exported / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_export(exported, config, tensors, foreign=foreign, target=None)
    save_file(whole, exported / "model.safetensors")
    text = (exported / "config.json").read_text()
    for key, value in (("block_size", 5), ("mask_token_id", 7), ("sample_from_anchor", False)):
        raw = json.loads(text)
        raw[key] = raw["dflash_config"][key] = value
        (exported / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=rf"{key} is {value}, the draft has"):
            check_export(exported, config, tensors, foreign=foreign, target=None)


def test_the_logits_of_the_check_depend_on_every_tensor_and_setting() -> None:
    generator = torch.Generator().manual_seed(0)
    cases = [dflash_config(attention_bias=True)]
    cases += [dspark_config(sequential_head=head) for head in ("markov", "gated", "rnn")]
    for config in cases:
        tensors = make_draft(config)
        before = random_logits(config, tensors)
        assert before.shape == (2 * config.num_steps, 41)
        assert torch.equal(before, random_logits(config, tensors))
        for name, tensor in tensors.items():
            noise = 0.5 * torch.randn(tensor.shape, generator=generator)
            difference = (random_logits(config, tensors | {name: tensor + noise}) - before).abs()
            assert float(difference.max()) > 1e-4, f"{config.model_type}: {name}"
    tensors = make_draft(dflash_config())
    before = random_logits(dflash_config(), tensors)
    for settings in (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rms_norm_eps": 0.5},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
        {"block_size": 7},
    ):
        other = random_logits(dflash_config(**settings), tensors)
        same = other.shape == before.shape and torch.allclose(other, before, atol=1e-3)
        assert not same, settings


def test_the_verbs_say_what_they_did(
    make_saved: Callable[..., Path],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from draftsmith.models import import_checkpoint as importing

    out = tmp_path / "out"
    folder = make_saved("dflash")
    run(settings_of("export", "ExportConfig", draft=folder, format="vllm", output=out))
    said = capsys.readouterr().out
    assert "25 tensors (float32) for vllm, architecture DFlashDraftModel" in said
    named = {"target.name_or_path": tiny_folder("llama"), "checkpoint": out}
    importing.run(settings_of("import", "ImportConfig", **named, output=tmp_path / "back"))
    said = capsys.readouterr().out
    assert "blocks of 6 slots that propose 5 tokens, mask token 319" in said
    assert "reads the outputs of layers [0, 2] (0-based)" in said


# Warm starts.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> train_support.Inputs:
    return train_support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


STEP = ("train.max_steps=1", "schedule=constant", "train.lr=1e-9", "schedule.warmup_steps=0")


@pytest.mark.parametrize(
    ("method", "formats"),
    [("dflash", ("transformers",)), ("dspark", ("deepspec",))],
)
def test_another_programs_block_draft_starts_a_run(
    method: str,
    formats: tuple[str, ...],
    inputs: train_support.Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = {
        "_target_": f"draftsmith.models.{method}.{type(METHODS[method]()).__name__}",
        "num_hidden_layers": 1, "block_size": 4, "num_anchors": 8, "aux_layer_ids": [0, 1, 2],
    }  # fmt: skip
    first = train_support.compose(inputs, "train.max_steps=2", method=node)
    train_support.run_in_process(first, tmp_path / "first")
    before = load_draft(tmp_path / "first" / "draft")
    for format in formats:
        exported = export(
            tmp_path / "first",
            format,
            tmp_path / format,
            **{"target.name_or_path": inputs.target},
        )
        words = (*STEP, f"init_from={exported.folder}")
        again = train_support.compose(inputs, *words, method=node)
        train_support.run_in_process(again, tmp_path / f"run-{format}")
        after = load_draft(tmp_path / f"run-{format}" / "draft")
        for name, weight in before.named_parameters():
            torch.testing.assert_close(after.get_parameter(name), weight, rtol=0, atol=1e-6)
    other = train_support.compose(inputs, *words, method=node | {"block_size": 5})
    with pytest.raises(ValueError, match="was trained with block_size=4"):
        train_support.run_in_process(other, tmp_path / "other")
    assert f"Starting from {exported.folder}" in capsys.readouterr().out
