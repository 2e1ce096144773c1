"""MTP modules in checkpoints: round trips of every layout, and what is read as what."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent))

import mtp_support as support

from draftsmith.models.export import export_draft
from draftsmith.models.format_mtp import (
    LAYOUTS,
    Place,
    find_place,
    fuse_experts,
    native_layout,
    read_native,
    split_experts,
    stored_names,
)
from draftsmith.models.format_mtp_read import read_mtp
from draftsmith.models.format_mtp_write import modules_for_target
from draftsmith.models.formats import read_foreign, recognise_foreign
from draftsmith.models.import_checkpoint import import_checkpoint
from draftsmith.models.load import load_draft
from draftsmith.models.mtp import MtpConfig, MtpDraft
from draftsmith.models.mtp_native import NativeMtpConfig
from draftsmith.models.mtp_native_match import same_function


def named(folder: Path) -> Any:
    return SimpleNamespace(name_or_path=str(folder), trust_remote_code=False, revision=None)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`work(family)`: target, draft, draft folder and stitched folder; made once; read only."""
    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            target = support.save_target(folder / "target", family)
            draft = support.make_draft(target, family)
            draft.save_pretrained(folder / "draft")
            support.stitched(
                folder / "draft", target, folder / "out", layout=support.FAMILIES[family].layout
            )
            made[family] = SimpleNamespace(
                target=target, draft=draft, folder=folder / "draft", out=folder / "out"
            )
        return made[family]

    return make


@pytest.mark.parametrize("family", support.FAMILIES)
def test_modules_come_back_from_a_stitched_target_bit_equal(work: Any, family: str) -> None:
    one = work(family)
    assert native_layout(one.target) is None
    assert native_layout(one.out) == support.FAMILIES[family].layout
    found = read_foreign(one.out)
    wanted = one.draft.state_dict()
    assert found.tensors.keys() == wanted.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.items())
    assert found.config.num_modules == support.FAMILIES[family].num_modules
    assert found.config.concat == LAYOUTS[support.FAMILIES[family].layout].concat


@pytest.mark.parametrize("family", support.FAMILIES)
def test_names_of_the_block_are_those_of_the_targets_layers(work: Any, family: str) -> None:
    one, layout = work(family), LAYOUTS[support.FAMILIES[family].layout]
    stored = stored_names(one.out)
    count = AutoConfig.from_pretrained(one.target).num_hidden_layers
    own, block = find_place(stored, count, "").prefixes(layout, 0)
    layer = f"model.layers.{count - 1}."
    parts = tuple(f"{own}{part}." for part in (*layout.names, *layout.copies))
    added = {
        n.removeprefix(block) for n in stored if n.startswith(block) and not n.startswith(parts)
    }
    assert added == {n.removeprefix(layer) for n in stored if n.startswith(layer)}
    assert {f"{own}{part}.weight" for part in layout.names} <= stored.keys()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "model.layers.3.shared_head.norm.weight"),
        ("hy3", "model.layers.3.final_layernorm.weight"),
        ("qwen3_next", "mtp.pre_fc_norm_embedding.weight"),
        ("qwen3_5", "mtp.layers.0.self_attn.q_norm.weight"),
        ("mimo", "model.mtp_layers.0.token_layernorm.weight"),
    ],
)
def test_published_names(work: Any, family: str, name: str) -> None:
    assert name in stored_names(work(family).out)


def test_qwen_norms_are_stored_minus_one(work: Any) -> None:
    """The factor that a module's norm applies is its stored weight plus one, as in the trunk."""
    one = work("qwen3_5")
    stored = load_file(stored_names(one.out)["mtp.norm.weight"])["mtp.norm.weight"]
    states = torch.randn(3, 32)
    scaled = one.draft.norm[0](states) / (states / states.pow(2).mean(-1, keepdim=True).sqrt())
    assert torch.allclose(scaled, (1 + stored).expand(3, -1), atol=1e-4)


def test_a_target_and_a_draft_of_ours_are_not_taken_for_drafts_of_others(work: Any) -> None:
    one = work("glm4_moe")
    assert recognise_foreign(one.out) is None  # It is a language model first.
    assert native_layout(one.folder) is None
    assert native_layout(one.folder / "nothing") is None


@pytest.mark.parametrize(
    ("family", "kind"),
    [("glm4_moe", NativeMtpConfig), ("mimo", NativeMtpConfig), ("hy3", MtpConfig),
     ("qwen3_moe", MtpConfig)],
)  # fmt: skip
def test_the_block_is_a_llama_type_one_exactly_where_that_computes_the_same(
    work: Any, family: str, kind: type
) -> None:
    assert type(read_mtp(work(family).out).config) is kind


def test_a_half_rotated_head_is_not_taken_for_a_whole_one(work: Any) -> None:
    """Same names and shapes, other function."""
    one = work("hy3")
    read = read_mtp(one.out)
    tensors = read.tensors
    native = NativeMtpConfig(**one.draft.config.to_dict())
    assert same_function(native, read.config, tensors)
    assert native.block is not None
    native.block["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    assert not same_function(native, read.config, tensors)


def test_import_gives_a_draft_that_loads_and_checks_the_copies(work: Any, tmp_path: Path) -> None:
    one = work("glm4_moe")
    settings: Any = SimpleNamespace(
        checkpoint=str(one.out), output=str(tmp_path / "in"), target=named(one.out),
        aux_layer_ids=None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.models.import_checkpoint.read_fingerprint", _fingerprint)
        import_checkpoint(settings)
        draft = load_draft(tmp_path / "in")
        assert all(torch.equal(draft.state_dict()[n], t) for n, t in one.draft.state_dict().items())
        # Trained embeddings in a module are not the target's.
        spoilt = tmp_path / "spoilt"
        support.stitched(one.folder, one.target, spoilt, layout="deepseek", link=False)
        shard = spoilt / "model-mtp.safetensors"
        tensors = load_file(shard)
        tensors["model.layers.3.embed_tokens.weight"] += torch.randn(320, 32)
        save_file(tensors, shard, metadata={"format": "pt"})
        settings.checkpoint, settings.output = str(spoilt), str(tmp_path / "again")
        with pytest.raises(ValueError, match="embeddings of its own"):
            import_checkpoint(settings)


def _fingerprint(_target: Any) -> Any:
    from draftsmith.models.target import Fingerprint

    return Fingerprint(weights="w", tokenizer="t", chat_template="c")


def test_columns_move_where_the_family_reads_the_state_first(work: Any) -> None:
    one = work("mimo")
    own = one.draft.state_dict()
    (module,) = modules_for_target(
        one.draft.config, own, AutoConfig.from_pretrained(one.target), concat="embedding_first"
    )
    first, second = own["eh_proj.0.weight"].chunk(2, dim=1)
    assert torch.equal(module["eh_proj.weight"], torch.cat([second, first], dim=1))
    assert torch.equal(module["enorm.weight"], own["enorm.0.weight"])


def test_a_llama_type_draft_is_refused_by_a_target_of_another_kind(work: Any) -> None:
    one = work("hy3")
    read = read_mtp(one.out)
    text = AutoConfig.from_pretrained(one.target)
    assert modules_for_target(read.config, read.tensors, text, concat="embedding_first")
    other = AutoConfig.from_pretrained(work("mimo").target)
    with pytest.raises(ValueError, match="not the target's own layer"):
        modules_for_target(read.config, read.tensors, other, concat="embedding_first")
    native = one.draft
    with pytest.raises(ValueError, match="built for a target with other"):
        modules_for_target(native.config, native.state_dict(), other, concat="embedding_first")


def test_experts_split_and_fuse() -> None:
    fused = {
        "block.mlp.experts.gate_up_proj": torch.randn(12, 6, 4),
        "block.mlp.experts.down_proj": torch.randn(12, 4, 3),
        "block.mlp.gate.weight": torch.randn(12, 4),
    }
    split = split_experts(fused)
    assert len(split) == 37
    assert split["block.mlp.experts.11.gate_proj.weight"].shape == (3, 4)
    back = fuse_experts(split)
    assert back.keys() == fused.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in fused.items())


@pytest.mark.parametrize("fault", ["norm", "block"])
def test_a_module_that_is_not_whole_is_refused(work: Any, tmp_path: Path, fault: str) -> None:
    one = work("qwen3_5")
    support.stitched(one.folder, one.target, tmp_path / "x", layout="qwen", link=False)
    shard = tmp_path / "x" / "model-mtp.safetensors"
    tensors = load_file(shard)
    del tensors["mtp.norm.weight" if fault == "norm" else "mtp.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no MTP modules|is missing"):
        read_mtp(tmp_path / "x")


def test_another_count_in_the_config_is_refused(work: Any, tmp_path: Path) -> None:
    one = work("mimo")
    support.stitched(one.folder, one.target, tmp_path / "x", layout="mimo", link=False)
    config = tmp_path / "x" / "config.json"
    text = config.read_text()
    assert '"num_nextn_predict_layers": 1' in text
    config.write_text(
        text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 2')
    )
    with pytest.raises(ValueError, match="there are 1 MTP modules"):
        read_native(tmp_path / "x")


def test_the_list_of_layers_is_the_one_of_the_configs_length() -> None:
    names = [f"model.layers.{i}.x" for i in range(4)] + ["vision.layers.0.x", "mtp.layers.0.x"]
    assert find_place(names, 3, "") == Place("model.layers", 3)
    with pytest.raises(ValueError, match="Expected exactly one list"):
        find_place(names, 9, "")


# speculators.


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe", "hy3"])
def test_speculators_folders_read_back(work: Any, tmp_path: Path, family: str) -> None:
    one = work(family)
    settings: Any = SimpleNamespace(
        draft=str(one.folder), format="speculators", output=str(tmp_path / "x"),
        target=named(one.target), full_vocabulary=False, num_draft_tokens=None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.models.export.read_fingerprint", lambda _: SimpleNamespace(
            weights=(one.draft.config.target_fingerprint or {})["weights"]))  # fmt: skip
        exported = export_draft(settings)
    assert exported.config["transformer_layer_config"]["model_type"]
    assert recognise_foreign(exported.folder) == "MTP, speculators"
    found = read_foreign(exported.folder).tensors
    assert all(torch.equal(found[name], t) for name, t in one.draft.state_dict().items())
    names = load_file(exported.folder / "model.safetensors")
    assert "mtp_layers.0.input_proj.weight" in names
    settings.format, settings.output = "vllm", str(tmp_path / "y")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.models.export._check_fingerprint", lambda *_: None)
        with pytest.raises(ValueError, match="draftsmith-stitch"):
            export_draft(settings)


@pytest.mark.golden
@torch.no_grad()
def test_speculators_own_checkpoint_gives_its_logits(golden_folder: Path) -> None:
    folder = golden_folder / "speculators"
    read = read_mtp(folder / "mtp")
    assert type(read.config) is MtpConfig
    assert read.config.qk_norm
    target = AutoModelForCausalLM.from_pretrained(folder / "target-qwen3", dtype=torch.float32)
    draft = MtpDraft(read.config)
    draft.load_state_dict(read.tensors, strict=True)
    out = load_file(folder / "mtp" / "trace.safetensors")
    batch = load_file(folder / "mtp" / "batch.safetensors")
    length = int((batch["document_ids"][0] == 0).sum()) - 4
    found = _logits(draft, target, batch, length)
    wanted = out["head_logits_0"][:, :length]
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def _logits(draft: MtpDraft, target: Any, batch: dict[str, Tensor], length: int) -> Tensor:
    """[1, length, vocab] of the first depth in the first document, on speculators' states."""
    from draftsmith.models.draft_layer import Rope
    from draftsmith.models.sequence_cache import cached_attention

    tokens = draft._token_part(0, target.get_input_embeddings()(batch["input_ids"][0, 1:]))
    hidden = tokens[:length] + draft._state_part(0, batch["hidden_states"][0, :length])
    layer = draft.layers[0]
    inputs, residual = layer.enter(hidden)
    rope: Rope = draft._table(length)
    keys, values = layer.self_attn.keys_values(inputs, rope)
    attended = cached_attention(
        layer.self_attn.queries(inputs, rope), keys.transpose(0, 1), values.transpose(0, 1)
    )
    return target.lm_head(draft.norm[0](layer.finish(residual, attended)))[None]
