"""draftsmith-export and draftsmith-import as a user runs them: written, checked, there and back."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from format_support import EAGLE3_VARIANTS, eagle1_config, eagle3_config, make_draft

from draftsmith.conf.entry import compose_settings
from draftsmith.models.eagle import EagleMethod
from draftsmith.models.eagle3 import Eagle3Draft, Eagle3Method
from draftsmith.models.export import check_export, export_draft, random_logits, run
from draftsmith.models.foreign_files import read_tensors
from draftsmith.models.formats import to_format
from draftsmith.models.import_checkpoint import import_checkpoint
from draftsmith.models.load import load_draft, load_drafter
from draftsmith.models.target import fingerprint_target

IDS = (1, 3, 4)
"""EAGLE-3's default for the eight layers of the tests' target."""
DRAFT_VOCAB = 50


def settings_of(root: str, schema: str, **settings: Any) -> Any:
    """Settings as a command line makes them."""
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return compose_settings(root, f"draftsmith.conf.schema:{schema}", overrides)


def export(draft: Path, format: str, output: Path, **settings: Any) -> Any:
    """Runs the export."""
    return export_draft(
        settings_of("export", "ExportConfig", draft=draft, format=format, output=output, **settings)
    )


def bring_back(checkpoint: Path, target: Path, output: Path, **settings: Any) -> Any:
    """Runs the import."""
    named = {"target.name_or_path": target, "checkpoint": checkpoint, "output": output}
    return import_checkpoint(settings_of("import", "ImportConfig", **named, **settings))


@pytest.fixture
def deep_target(tiny_folder: Callable[..., Path]) -> Path:
    """A saved target with eight layers."""
    return tiny_folder("llama", num_hidden_layers=8)


@pytest.fixture
def make_saved(
    tiny_target: Callable[..., Any], tiny_folder: Callable[..., Path], tmp_path: Path
) -> Callable[..., Path]:
    """Factory: a draft saved as training saves it, for a target with eight layers."""

    def make(
        method: str = "eagle3",
        *,
        family: str = "llama",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Path:
        target = str(tiny_folder(family, num_hidden_layers=8))
        head = tiny_target(family, num_hidden_layers=8).head()
        size = options.get("draft_vocab_size", DRAFT_VOCAB if method == "eagle3" else None)
        kept = None
        if size is not None:
            kept = SimpleNamespace(draft_to_target=torch.arange(size) * 3)
        kind = Eagle3Method if method == "eagle3" else EagleMethod
        with torch.random.fork_rng():
            torch.manual_seed(3)
            draft = kind(**({"draft_vocab_size": size} | options)).build(head, kept, IDS)
            for parameter in draft.parameters():
                if parameter.ndim == 1:
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
        draft.config.target_fingerprint = dataclasses.asdict(fingerprint_target(target))
        draft.config.target_name_or_path = target
        draft.config.training = {"lr": 1e-3}
        folder = tmp_path / f"run-{method}" / "draft"
        draft.to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle", "speculators"])
def test_a_draft_goes_out_and_comes_back_with_equal_logits(
    format: str, make_saved: Callable[..., Path], deep_target: Path, tmp_path: Path
) -> None:
    folder = make_saved()
    exported = export(folder.parent, format, tmp_path / "out")  # A run folder is taken too.
    assert not exported.remarks or format == "speculators"
    bring_back(exported.folder, deep_target, tmp_path / "back")
    own, back = load_draft(folder), load_draft(tmp_path / "back")
    assert own.config.aux_layer_ids == back.config.aux_layer_ids == list(IDS)
    assert back.config.target_fingerprint == own.config.target_fingerprint
    mine, theirs = own.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    logits = [random_logits(draft.config, draft.state_dict()) for draft in (own, back)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    assert logits[0].shape == (5, DRAFT_VOCAB)


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle"])
def test_an_eagle1_draft_goes_out_and_comes_back(
    format: str, make_saved: Callable[..., Path], deep_target: Path, tmp_path: Path
) -> None:
    folder = make_saved("eagle1")
    exported = export(folder, format, tmp_path / "out")
    stored = load_file(exported.folder / "model.safetensors")
    assert ("embed_tokens.weight" in stored) == (format == "eagle")
    bring_back(exported.folder, deep_target, tmp_path / "back")
    own, back = load_draft(folder), load_draft(tmp_path / "back")
    mine, theirs = own.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_import_drafts_for_its_target(
    make_saved: Callable[..., Path],
    tiny_target: Callable[..., Any],
    deep_target: Path,
    tmp_path: Path,
    draft_chain: Callable[..., Any],
) -> None:
    target = tiny_target("llama", num_hidden_layers=8)
    folder = make_saved()
    export(folder, "vllm", tmp_path / "out")
    bring_back(tmp_path / "out", deep_target, tmp_path / "back")
    from draftsmith.models.protocols import DraftContext

    tokens = torch.arange(5, 15)[None]
    states = target.forward(tokens[:, :-1], aux_layer_ids=IDS)
    context = DraftContext(tokens, states.aux_hidden_states, states.final_hidden_states)
    made = [
        draft_chain(load_drafter(path, target), context, 4) for path in (folder, tmp_path / "back")
    ]
    assert torch.equal(made[0].tokens, made[1].tokens)
    assert len(made[0].tokens) == 4


def test_a_speculators_folder_holds_the_targets_embeddings(
    make_saved: Callable[..., Path], tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    exported = export(make_saved(), "speculators", tmp_path / "out", num_draft_tokens=5)
    stored = load_file(exported.folder / "model.safetensors")
    target = tiny_target("llama", num_hidden_layers=8)
    assert torch.equal(stored["embed_tokens.weight"], target.embed_tokens.weight)
    assert {"lm_head.weight", "d2t", "t2d"} <= stored.keys()
    proposal = exported.config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 5
    assert any("a path on this machine" in remark for remark in exported.remarks)


@pytest.mark.parametrize(("position", "format"), [("feature", "speculators"), ("token", "vllm")])
def test_where_positions_are_counted_from_is_not_compared(
    position: str,
    format: str,
    make_saved: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """speculators counts from the token, engines from the feature: equal but for rounding, which a
    trained draft can magnify beyond what the check allows."""
    offsets: list[int] = []

    def recorded(config: Any, tensors: Any) -> Tensor:
        offsets.append(config.rope_offset)
        return random_logits(config, tensors)

    monkeypatch.setattr("draftsmith.models.export.random_logits", recorded)
    export(make_saved(rope_position=position), format, tmp_path / "out")
    assert offsets == [int(position == "token")] * 2


def test_v08_a_draft_of_a_tied_target_is_untied(
    make_saved: Callable[..., Path], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """V08: its head has another size than the embeddings, and comes back bit for bit."""
    folder = make_saved(family="llama_tied")
    target = tiny_folder("llama_tied", num_hidden_layers=8)
    for format in ("vllm", "speculators"):
        exported = export(folder, format, tmp_path / format)
        assert exported.config["tie_word_embeddings"] is False
        inner = exported.config.get("transformer_layer_config", exported.config)
        assert inner["tie_word_embeddings"] is False
        bring_back(exported.folder, target, tmp_path / f"{format}-back")
        back = load_draft(tmp_path / f"{format}-back")
        assert torch.equal(back.lm_head.weight, load_draft(folder).lm_head.weight)


def test_m07_a_target_that_scales_its_embeddings(
    make_saved: Callable[..., Path],
    tiny_folder: Callable[..., Path],
    tiny_target: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """M07: an export holds the embeddings as the draft reads them, or is refused."""
    target = tiny_target("gemma3", num_hidden_layers=8)
    scaled = target.embed_tokens(torch.arange(target.vocab_size))
    assert not torch.equal(scaled, target.embed_tokens.weight)
    exported = export(make_saved(family="gemma3"), "speculators", tmp_path / "a")
    stored = load_file(exported.folder / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], scaled)
    bring_back(exported.folder, tiny_folder("gemma3", num_hidden_layers=8), tmp_path / "back")
    first = make_saved("eagle1", family="gemma3")
    exported = export(first, "vllm", tmp_path / "b")
    stored = load_file(exported.folder / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], scaled)
    with pytest.raises(ValueError, match="the target scales its embeddings"):
        export(first, "sglang", tmp_path / "c")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_on_disk_is_the_drafts(
    dtype: torch.dtype, make_saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_saved(dtype=dtype)
    exported = export(folder, "vllm", tmp_path / "out")
    assert exported.config["torch_dtype"] == str(dtype).removeprefix("torch.")
    stored, own = read_tensors(exported.folder), read_tensors(folder)
    assert stored["fc.weight"].dtype == dtype
    assert torch.equal(stored["fc.weight"], own["fc.weight"])


# The check.


def test_x02_the_check_finds_what_is_missing_extra_empty_or_changed(
    make_saved: Callable[..., Path], tmp_path: Path
) -> None:
    """X02: a damaged export never passes for a good one."""
    folder = make_saved()
    config, tensors = load_draft(folder).config, read_tensors(folder)
    foreign = to_format(config, tensors, format="vllm", target=None)
    exported = export(folder, "vllm", tmp_path / "out").folder
    whole = read_tensors(exported)
    check_export(exported, config, tensors, foreign=foreign, target=None)

    def damaged(change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
        broken = dict(whole)
        change(broken)
        save_file(broken, exported / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_export(exported, config, tensors, foreign=foreign, target=None)

    damaged(lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing")
    damaged(lambda t: t.update(extra=torch.ones(1)), "extra is too much")
    damaged(lambda t: t.update({"norm.weight": torch.ones(0)}), "norm.weight differs")
    damaged(lambda t: t.update({"norm.weight": t["norm.weight"] + 1e-3}), "norm.weight differs")
    damaged(lambda t: t.update({"norm.weight": t["norm.weight"].half()}), "norm.weight differs")
    save_file(whole, exported / "model.safetensors")

    def changed(name: str, value: Any, message: str) -> None:
        text = (exported / "config.json").read_text()
        (exported / "config.json").write_text(json.dumps(json.loads(text) | {name: value}))
        with pytest.raises(ValueError, match=message):
            check_export(exported, config, tensors, foreign=foreign, target=None)
        (exported / "config.json").write_text(text)

    changed("rms_norm_eps", 0.1, "rms_norm_eps is 0.1")
    changed("norm_output", True, "norm_output is True, the draft has False")
    changed("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}, "rope_theta")
    changed("eagle_aux_hidden_state_layer_ids", [1, 2, 3], "They name different layers")


def test_the_logits_of_the_check_depend_on_every_tensor_and_switch() -> None:
    for variant in ("two_draft_layers", "norm_before_fc", "fc_norm", "attention_bias", "qk_norm"):
        config = eagle3_config(**EAGLE3_VARIANTS[variant])
        tensors = make_draft(config)
        before = random_logits(config, tensors)
        assert torch.equal(before, random_logits(config, tensors))
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            changed = tensors | {name: tensor + 0.5 * torch.randn_like(tensor)}
            difference = (random_logits(config, changed) - before).abs().max()
            assert difference > 1e-4, f"{variant}: {name}"
    plain, tensors = eagle3_config(), make_draft(eagle3_config())
    for switch in ("norm_output", "norm_before_residual"):
        other = random_logits(eagle3_config(**{switch: True}), tensors)
        assert not torch.allclose(other, random_logits(plain, tensors), atol=1e-3)
    first = eagle1_config()
    weights = make_draft(first)
    for name, tensor in weights.items():
        changed = weights | {name: tensor + 0.5 * torch.randn_like(tensor)}
        assert not torch.allclose(random_logits(first, changed), random_logits(first, weights))


def test_an_export_is_whole_or_not_there(
    make_saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = make_saved(), tmp_path / "out"
    monkeypatch.setattr(
        "draftsmith.models.export.check_export",
        lambda *_, **__: (_ for _ in ()).throw(ValueError("the check says no")),
    )
    with pytest.raises(ValueError, match="the check says no"):
        export(folder, "vllm", output)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-eagle3"]
    output.mkdir()  # Empty: fine.
    export(folder, "vllm", output)
    written = sorted(path.name for path in output.iterdir())
    assert written == ["config.json", "model.safetensors"]
    modes = {(output / name).stat().st_mode for name in written}
    assert len(modes) == 1, "whoever may read the config may read the weights"
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(folder, "sglang", output)
    with pytest.raises(ValueError, match="exists and is not empty"):
        bring_back(output, Path(load_draft(folder).config.target_name_or_path), output)


# The target.


def test_another_target_is_refused_and_a_missing_one_remarked(
    make_saved: Callable[..., Path], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_saved()
    other = tiny_folder("llama", num_hidden_layers=8, seed=1)
    with pytest.raises(ValueError, match="was trained for another target"):
        export(folder, "vllm", tmp_path / "a", **{"target.name_or_path": other})
    with pytest.raises(ValueError, match="there is no such folder"):
        export(folder, "vllm", tmp_path / "b", **{"target.name_or_path": tmp_path / "none"})
    config = json.loads((folder / "config.json").read_text())
    gone = config | {"target_name_or_path": str(tmp_path / "gone")}
    (folder / "config.json").write_text(json.dumps(gone))
    exported = export(folder, "vllm", tmp_path / "c")
    assert any("is not here" in remark for remark in exported.remarks)
    for format in ("speculators", "eagle"):
        with pytest.raises(ValueError, match=r"give target.name_or_path=..."):
            export(folder, format, tmp_path / "d")
    del config["target_name_or_path"]
    (folder / "config.json").write_text(json.dumps(config))
    exported = export(folder, "sglang", tmp_path / "e")
    assert any("Not compared with the target" in remark for remark in exported.remarks)


def test_the_vocabulary_of_eagle1_is_left_out_only_when_asked(
    make_saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_saved("eagle1", draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(ValueError, match="full_vocabulary=true"):
        export(folder, "vllm", tmp_path / "out")
    exported = export(folder, "vllm", tmp_path / "out", full_vocabulary="true")
    assert not {"d2t", "t2d"} & load_file(exported.folder / "model.safetensors").keys()
    with pytest.raises(ValueError, match="full_vocabulary is for EAGLE-1"):
        export(make_saved(), "vllm", tmp_path / "other", full_vocabulary="true")


def test_only_drafts_of_ours_are_exported(
    deep_target: Path, make_saved: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        export(tmp_path / "none", "vllm", tmp_path / "out")
    with pytest.raises(ValueError, match="was not saved by draftsmith"):
        export(deep_target, "vllm", tmp_path / "out")
    folder = make_saved()
    config = json.loads((folder / "config.json").read_text())
    config["draftsmith_class"] = "draftsmith.models.other.OtherDraft"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"holds a draftsmith.models.other.OtherDraft"):
        export(folder, "vllm", tmp_path / "out")
    with pytest.raises(ValueError, match="choose one of vllm, sglang, eagle, speculators"):
        export(folder, "trt", tmp_path / "out")


# Imports.


def test_embeddings_that_are_not_the_targets_are_refused(
    make_saved: Callable[..., Path],
    deep_target: Path,
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    exported = export(make_saved(), "speculators", tmp_path / "out").folder
    other = tiny_folder("llama", num_hidden_layers=8, seed=1)
    with pytest.raises(ValueError, match="has embeddings of its own"):
        bring_back(exported, other, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    tensors = load_file(exported / "model.safetensors")
    # In bfloat16, and times a constant, which the norm behind them takes out again.
    for factor, name in ((1.0, "b"), (5.0, "c")):
        table = (tensors["embed_tokens.weight"] * factor).bfloat16()
        save_file(tensors | {"embed_tokens.weight": table}, exported / "model.safetensors")
        bring_back(exported, deep_target, tmp_path / name)


def test_a_draft_without_a_head_gets_the_targets(
    make_saved: Callable[..., Path],
    deep_target: Path,
    tiny_target: Callable[..., Any],
    tmp_path: Path,
) -> None:
    exported = export(make_saved(draft_vocab_size=None), "sglang", tmp_path / "out").folder
    tensors = load_file(exported / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, exported / "model.safetensors")
    config = json.loads((exported / "config.json").read_text()) | {"draft_vocab_size": None}
    (exported / "config.json").write_text(json.dumps(config))
    draft = bring_back(exported, deep_target, tmp_path / "back")
    assert any("the target's was copied" in remark for remark in draft.remarks)
    weight = tiny_target("llama", num_hidden_layers=8).head().weight
    assert torch.equal(load_draft(tmp_path / "back").lm_head.weight, weight)


def test_an_import_for_a_target_of_another_size_is_refused(
    make_saved: Callable[..., Path], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    exported = export(make_saved(), "vllm", tmp_path / "out").folder
    wide = tiny_folder("llama", hidden_size=64, num_hidden_layers=8)
    with pytest.raises(ValueError, match="hidden size of 32, but .* has 320 and 64"):
        bring_back(exported, wide, tmp_path / "back")
    with pytest.raises(ValueError, match="beyond the target's 4 layers"):
        bring_back(exported, tiny_folder("llama"), tmp_path / "back")


def test_the_verbs_say_what_they_did(
    make_saved: Callable[..., Path],
    deep_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from draftsmith.models import import_checkpoint as importing

    folder, out = make_saved(), tmp_path / "out"
    run(settings_of("export", "ExportConfig", draft=folder, format="vllm", output=out))
    said = capsys.readouterr().out
    assert "15 tensors (float32) for vllm, architecture LlamaForCausalLMEagle3" in said
    assert "logits are equal" in said
    named = {"target.name_or_path": deep_target, "checkpoint": out, "output": tmp_path / "back"}
    importing.run(settings_of("import", "ImportConfig", **named))
    said = capsys.readouterr().out
    assert "reads the outputs of layers [1, 3, 4] (0-based)" in said
    assert f"draft vocabulary {DRAFT_VOCAB} of 320" in said


def test_a_draft_of_ours_needs_no_import(
    make_saved: Callable[..., Path], deep_target: Path, tmp_path: Path
) -> None:
    folder = make_saved()
    assert isinstance(load_draft(folder), Eagle3Draft)
    with pytest.raises(ValueError, match="it needs no import"):
        bring_back(folder, deep_target, tmp_path / "back")
