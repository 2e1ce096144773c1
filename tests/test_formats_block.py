"""Checkpoint formats of block drafts (DFlash, DSpark): exact names and keys, both key levels, there
and back, what is recognised, asked for and refused.

X.. and T.. are rows of the collection of faults that users of other toolkits met.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

sys.path.append(str(Path(__file__).parent))

from format_support import (
    HIDDEN,
    LAYERS,
    LLAMA3,
    VOCAB,
    dflash_config,
    dspark_config,
    eagle3_config,
    export,
    make_draft,
    read_back,
    target_facts,
    written,
)

from draftsmith.models.block_draft import BlockDraftConfig
from draftsmith.models.format_keys import TRAINING_FIELDS
from draftsmith.models.formats import read_foreign, recognise_foreign, to_format

LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
BACKBONE = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in LAYER}
BACKBONE |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
HEADS = {
    "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
    "confidence_head.proj.weight", "confidence_head.proj.bias",
}  # fmt: skip
TARGETS = {"embed_tokens.weight", "lm_head.weight"}
FLAT_KEYS = {
    "architectures", "attention_bias", "attention_dropout", "block_size", "bos_token_id",
    "dflash_config", "draft_vocab_size", "dtype", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "layer_types", "mask_token_id",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "num_target_layers", "pad_token_id",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sample_from_anchor",
    "sliding_window", "target_hidden_size", "target_layer_ids", "tie_word_embeddings",
    "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
BLOCK_FORMATS = ("vllm", "sglang", "transformers", "deepspec", "speculators")


def rewritten(folder: Path, **keys: Any) -> Path:
    """Changes keys of a written config in place; None at the end of a name deletes it."""
    raw = json.loads((folder / "config.json").read_text())
    for name, value in keys.items():
        node, _, inner = name.partition("__")
        where, key = (raw[node], inner) if inner else (raw, node)
        if value == "absent":
            where.pop(key, None)
        else:
            where[key] = value
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# Names and keys.


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_x01_a_flat_dflash_folder_has_exactly_these_tensors_and_keys(format: str) -> None:
    foreign = export(dflash_config(), format)
    assert foreign.tensors.keys() == BACKBONE
    config = foreign.config
    assert config.keys() == FLAT_KEYS
    expected = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "head_dim": 16, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_hidden_layers": 2,
        "tie_word_embeddings": False, "dtype": "float32", "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * 2, "sliding_window": None,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert foreign.tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert "causal" not in config["dflash_config"], "in vLLM it would override the layer types"
    assert "auto_map" not in config
    assert not foreign.warnings


def test_x01_a_dspark_folder_has_the_heads_and_their_keys() -> None:
    foreign = export(dspark_config(), "sglang")
    assert foreign.tensors.keys() == BACKBONE | HEADS
    own = {
        "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
        "num_anchors",
    }  # fmt: skip
    assert foreign.config.keys() == FLAT_KEYS | own
    assert foreign.config["architectures"] == ["Qwen3DSparkModel"]
    assert foreign.config["markov_head_type"] == "vanilla"
    deepspec = export(dspark_config(), "deepspec")
    assert deepspec.tensors.keys() == BACKBONE | HEADS | TARGETS
    assert torch.equal(deepspec.tensors["lm_head.weight"], target_facts().head)


@pytest.mark.parametrize("config", [dflash_config(), dspark_config()])
@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_x06_the_blocks_keys_stand_at_both_levels(config: BlockDraftConfig, format: str) -> None:
    """X06: vLLM and SGLang look below dflash_config first, DeepSpec at the top only."""
    raw = export(config, format).config
    for name in ("block_size", "mask_token_id", "sample_from_anchor", "target_layer_ids"):
        assert raw[name] == raw["dflash_config"][name], name
    assert raw["target_layer_ids"] == [1, 3, 4], "outputs of 0-based layers: engines add one"
    if config.model_type == "draftsmith_dspark":
        for name in ("markov_rank", "markov_head_type", "enable_confidence_head"):
            assert raw[name] == raw["dflash_config"][name], name


@pytest.mark.parametrize(("config", "tokens"), [(dflash_config(), 5), (dspark_config(), 4)])
def test_x11_the_layout_is_always_written_and_the_number_of_tokens_follows(
    config: BlockDraftConfig, tokens: int
) -> None:
    """X11: block_size - 1 tokens, or block_size where the anchor's slot predicts too."""
    for format in ("vllm", "sglang", "speculators"):
        raw = export(config, format).config
        assert raw["sample_from_anchor"] is (tokens == config.block_size)
        assert raw["block_size"] == config.block_size
    proposal = raw["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == tokens
    with pytest.raises(ValueError, match=rf"proposes {tokens} tokens.*Leave num_draft_tokens out"):
        to_format(
            config, make_draft(config), format="vllm", target=target_facts(), num_draft_tokens=3
        )


def test_x01_a_speculators_folder_counts_layers_run_and_holds_the_targets_tensors() -> None:
    for config, kind in ((dflash_config(), "dflash"), (dspark_config(), "dspark")):
        foreign = export(config, "speculators")
        heads = HEADS if kind == "dspark" else set()
        assert foreign.tensors.keys() == BACKBONE | heads | TARGETS
        raw = foreign.config
        assert "model_type" not in raw, "vLLM would take the folder for a flat one"
        assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"] == kind
        assert raw["aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert raw["transformer_layer_config"]["model_type"] == "qwen3"
        # Absent or false, vLLM would serve full layers as causal ones.
        assert raw["sliding_window_non_causal"] is True
    assert raw["markov_rank"] == 6
    assert export(dflash_config(**SLIDING), "speculators").config["sliding_window_non_causal"] is (
        False
    )


def test_transformers_reads_the_flat_configs_with_every_key(tmp_path: Path) -> None:
    for format, name in (("vllm", "Qwen3Config"), ("transformers", "MuseGlimmerAssistantConfig")):
        for settings in ({"rope_parameters": LLAMA3}, SLIDING if format == "vllm" else {}):
            folder = tmp_path / f"{format}-{len(settings)}"
            written(folder, dflash_config(**settings), format)
            raw = json.loads((folder / "config.json").read_text())
            config = AutoConfig.from_pretrained(folder)
            assert type(config).__name__ == name
            renamed = {"architectures", "dtype", "torch_dtype", "rope_theta", "rope_scaling",
                       "use_cache"}  # fmt: skip
            for key in FLAT_KEYS - renamed:
                assert getattr(config, key) == raw[key], key
            assert format == "vllm" or raw["eos_token_id"] == 2, "its class takes one id"


# There and back.


DFLASH = {
    "plain": {},
    "own_layers": {"aux_layer_ids": [0, 2, 3, 5, 6]},
    "scaled_rope": {"rope_parameters": LLAMA3},
    "sliding": SLIDING,
    "mixed": MIXED,
    "attention_bias": {"attention_bias": True},
    "no_qk_norm": {"qk_norm": False},
    "embeddings": {"aux_layer_ids": [-1, 2]},
    "last_layer": {"aux_layer_ids": [1, LAYERS - 1]},
}
DFLASH_REFUSED = {
    "vllm": {"no_qk_norm", "embeddings"},
    "sglang": {"no_qk_norm", "embeddings", "last_layer"},
    "transformers": {
        "no_qk_norm", "embeddings", "last_layer", "sliding", "mixed", "attention_bias",
    },
    "deepspec": set(DFLASH),
    "speculators": {"no_qk_norm", "mixed"},
}  # fmt: skip
DSPARK = {
    "plain": {},
    "gated": {"sequential_head": "gated"},
    "rnn": {"sequential_head": "rnn"},
    "none": {"sequential_head": "none", "confidence_with_markov": False},
    "apart": {"confidence_with_markov": False},
    "no_confidence": {"confidence_head": False},
    "temperatures": {"confidence_temperatures": [1.0, 0.9, 1.25, 2.0]},
    "not_anchor_first": {"sample_from_anchor": False},
    "mixed": MIXED,
}
DSPARK_REFUSED = {
    "vllm": {"gated", "rnn", "none"},
    "sglang": {"none"},
    "transformers": set(DSPARK),
    "deepspec": {"not_anchor_first", "mixed"},
    "speculators": set(),
}
CASES = [
    *((dflash_config, "dflash", name, DFLASH[name], DFLASH_REFUSED) for name in DFLASH),
    *((dspark_config, "dspark", name, DSPARK[name], DSPARK_REFUSED) for name in DSPARK),
]


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize(("make", "kind", "name", "settings", "refused"), CASES)
def test_a_block_draft_comes_back_bit_for_bit_or_is_refused(
    make: Any, kind: str, name: str, settings: Any, refused: Any, format: str, tmp_path: Path
) -> None:
    config = make(**settings)
    if name in refused[format]:
        with pytest.raises(ValueError, match=rf"cannot be exported as format={format}:\n  - "):
            export(config, format)
        return
    draft = read_back(written(tmp_path, config, format))
    own = make_draft(config)
    assert own.keys() == draft.tensors.keys(), kind
    assert all(torch.equal(own[name], draft.tensors[name]) for name in own)
    wanted, found = architecture_of(config), architecture_of(draft.config)
    if format == "transformers":
        assert (wanted.pop("eos_token_id"), found.pop("eos_token_id")) == ([2, 3], 2)
    assert found == wanted
    window = config.sliding_window is not None and format == "speculators"
    assert len(draft.remarks) == int(window), "speculators counts its window from the anchor"


def architecture_of(config: Any) -> dict[str, Any]:
    """What a config says of the draft itself."""
    dropped = TRAINING_FIELDS | ({"markov_rank"} if config.__dict__.get("sequential_head") == "none"
                                 else set())  # fmt: skip
    return {name: v for name, v in config.to_dict().items() if name not in dropped}


def test_eagles_form_is_for_eagle_drafts_and_block_forms_are_not() -> None:
    for config in (dflash_config(), dspark_config()):
        with pytest.raises(ValueError, match=r"SafeAILab's code, which has no block drafts"):
            export(config, "eagle")
    with pytest.raises(ValueError, match="format=transformers is for block drafts"):
        export(eagle3_config(), "transformers")


def test_a_target_that_a_folder_cannot_speak_for_is_refused() -> None:
    """Its embeddings are scaled, or its logits more than a product."""
    scaled = export(dflash_config(), "vllm", scales_embeddings=True)
    assert torch.equal(scaled.tensors["embed_tokens.weight"], target_facts().embeddings)
    for format in ("sglang", "transformers"):
        with pytest.raises(ValueError, match="the target scales its embeddings"):
            export(dflash_config(), format, scales_embeddings=True)
    capped = export(dflash_config(), "vllm", head_is_plain=False)
    assert any("bare matrix" in warning for warning in capped.warnings)
    with pytest.raises(ValueError, match="adds the correction to the bare product"):
        export(dspark_config(), "vllm", head_is_plain=False)
    with pytest.raises(ValueError, match="copy of its head cannot hold"):
        export(dflash_config(), "speculators", head_is_plain=False)
    for format in ("speculators", "deepspec"):
        with pytest.raises(ValueError, match=r"give target.name_or_path=..."):
            to_format(dspark_config(), make_draft(dspark_config()), format=format, target=None)


def test_x13_windows_are_written_and_what_ignores_them_is_said() -> None:
    """X13: an engine that drops the window drafts well up to its length, and badly behind."""
    foreign = export(dflash_config(**SLIDING), "vllm")
    assert foreign.config["layer_types"] == SLIDING["layer_types"]
    assert foreign.config["sliding_window"] == 16
    # A Qwen3 config drops its window without this.
    assert foreign.config["use_sliding_window"] is True
    assert any("ignore the window" in warning for warning in foreign.warnings)
    mixed = export(dflash_config(**MIXED), "vllm")
    assert any("VLLM_USE_V2_MODEL_RUNNER=1" in warning for warning in mixed.warnings)
    assert not export(dflash_config(), "vllm").warnings


def test_temperatures_of_the_confidence_head_go_along() -> None:
    temperatures = [1.0, 0.9, 1.25, 2.0]
    foreign = export(dspark_config(confidence_temperatures=temperatures), "sglang")
    assert foreign.config["confidence_temperatures"] == temperatures
    assert any("--speculative-dspark-confidence-sts-path" in one for one in foreign.warnings)
    assert "confidence_temperatures" not in export(dspark_config(), "sglang").config


# Layers read.


@pytest.mark.parametrize("ids", [[1, 1, 2], [3, 1], [], None, [-1, 2], [1, 20]])
@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_x05_layers_that_are_not_named_rightly_are_refused_at_export(
    ids: list[int] | None, format: str
) -> None:
    """X05: duplicate, descending, missing, negative, beyond the target."""
    config = dflash_config()
    config.aux_layer_ids = ids
    with pytest.raises(ValueError, match="target layer"):
        to_format(config, make_draft(dflash_config()), format=format, target=target_facts())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 1, 2], "not distinct and ascending"),
        ([4, 3, 1], "not distinct and ascending"),
        ([-1, 2, 3], "A negative id is DeepSpec's for the embeddings"),
        ([1, 3, 20], "beyond the target's 8 layers"),
        ([1, 3], "fc reads 3 target layers, but 2 are named"),
        ("absent", "does not say which 3 target layers"),
    ],
)
def test_x05_and_at_import(ids: Any, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path, dflash_config(), "vllm")
    rewritten(folder, target_layer_ids=ids, dflash_config__target_layer_ids=ids)
    with pytest.raises(ValueError, match=message):
        read_back(folder)
    config = read_back(folder, aux_layer_ids=[1, 3, 4]).config
    assert isinstance(config, BlockDraftConfig)
    assert config.aux_layer_ids == [1, 3, 4]


def test_x06_either_level_is_read_and_contradictions_are_refused(tmp_path: Path) -> None:
    names = ("block_size", "mask_token_id", "sample_from_anchor", "target_layer_ids")
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head",
             "confidence_head_with_markov")  # fmt: skip
    for config, own in ((dflash_config(), names), (dspark_config(), names + heads)):
        for level in ("{}", "dflash_config__{}"):
            folder = tmp_path / f"{config.model_type}-{level[:3]}"
            written(folder, config, "vllm")
            rewritten(folder, **{level.format(name): "absent" for name in own})
            assert architecture_of(read_back(folder).config) == architecture_of(config)
    for name, value in (("block_size", 8), ("mask_token_id", 3), ("target_layer_ids", [0, 3, 4])):
        folder = written(tmp_path / name, dflash_config(), "vllm")
        with pytest.raises(ValueError, match=rf"says {name} .* at the top and .* in dflash_config"):
            read_back(rewritten(folder, **{name: value}))


def test_a_folder_for_another_target_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, dflash_config(), "vllm")
    with pytest.raises(ValueError, match="num_target_layers 8, but org/target has 12 layers"):
        read_foreign(folder, target=target_facts(num_layers=12))
    with pytest.raises(ValueError, match="made for a vocabulary of 40"):
        read_foreign(folder, target=target_facts(vocab_size=64))


# What is recognised.


def test_folders_are_recognised_by_config_and_names(tmp_path: Path) -> None:
    sources = {
        "vllm": ("DFlash, as z-lab, vLLM and SGLang read it", "DSpark, a flat folder"),
        "speculators": ("DFlash, speculators", "DSpark, speculators"),
        "transformers": ("DFlash, transformers' assistant", None),
        "deepspec": (None, "DSpark, DeepSpec"),
    }
    for format, pair in sources.items():
        for source, config in zip(pair, (dflash_config(), dspark_config()), strict=True):
            if source is not None:
                folder = written(tmp_path / f"{format}-{config.model_type}", config, format)
                assert read_back(folder).source == recognise_foreign(folder) == source


def test_a_published_dflash_folder_without_newer_keys_is_read(tmp_path: Path) -> None:
    """z-lab's and SpecForge's: the block's keys nested, no layout, links to code."""
    folder = written(tmp_path, dflash_config(), "vllm")
    absent = ("mask_token_id", "sample_from_anchor", "target_layer_ids", "draft_vocab_size",
              "target_hidden_size", "dflash_config__sample_from_anchor",
              "dflash_config__block_size")  # fmt: skip
    rewritten(folder, **dict.fromkeys(absent, "absent"), auto_map={"AutoModel": "dflash.DFlash"})
    found = read_back(folder)
    assert architecture_of(found.config) == architecture_of(dflash_config())


def test_a_deepspec_folder_brings_the_targets_tensors_apart(tmp_path: Path) -> None:
    folder = written(tmp_path, dspark_config(), "deepspec")
    rewritten(folder, dflash_config="absent", sample_from_anchor="absent")
    found = read_back(folder)
    assert found.config.sample_from_anchor, "DeepSpec's blocks are anchor-first"
    assert found.holds_target
    assert torch.equal(found.embed_tokens, target_facts().embeddings)
    assert torch.equal(found.target_head.weight, target_facts().head)
    assert found.target_head.ids is None


def test_a_reduced_vocabulary_is_left_out_with_a_note(tmp_path: Path) -> None:
    """speculators: the head's rows are the target's; the sequential head has none for the rest."""
    kept = torch.tensor([token for token in range(VOCAB) if token % 3])

    def reduce(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        raw["draft_vocab_size"] = len(kept)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][kept]
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)

    folder = written(tmp_path / "a", dspark_config(), "speculators", change=reduce)
    found = read_back(folder)
    assert any("can propose any token" in remark for remark in found.remarks)
    assert torch.equal(found.target_head.ids, kept)
    own = make_draft(dspark_config())["markov_head.markov_w2.weight"]
    rows = found.tensors["markov_head.markov_w2.weight"]
    assert torch.equal(rows[kept], own[kept])
    assert not rows[::3].any()

    def without_map(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        reduce(raw, tensors)
        del tensors["d2t"]

    with pytest.raises(ValueError, match="has no d2t: nobody can know which"):
        read_back(written(tmp_path / "b", dspark_config(), "speculators", change=without_map))


def test_transformers_class_leaves_the_vocabulary_to_the_target(tmp_path: Path) -> None:
    folder = written(tmp_path, dflash_config(), "transformers")
    rewritten(folder, vocab_size="absent", draft_vocab_size="absent")
    assert read_back(folder).config.vocab_size == VOCAB
    with pytest.raises(ValueError, match="vocabulary, which is the target's"):
        read_foreign(folder)


# What is refused.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_size": "absent", "dflash_config__block_size": "absent"}, "lacks block_size"),
        ({"mask_token_id": "absent", "dflash_config__mask_token_id": "absent"},
         "lacks mask_token_id"),
        ({"hidden_size": "absent"}, "lacks hidden_size"),
        ({"model_type": "gemma4"}, "family 'gemma4'"),
        ({"use_gemma_norm": True}, "use_gemma_norm True"),
        ({"is_neox_style": False}, "is_neox_style False"),
        ({"dflash_config__input_embedding_scale": 2.0}, "input_embedding_scale 2.0"),
        ({"dflash_config__causal": True}, "causal attention is set to True"),
        ({"is_causal": True}, "causal attention is set to True"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding layers, but sliding_window None"),
        ({"layer_types": "absent", "use_sliding_window": True}, "which layers slide"),
        ({"target_hidden_size": 64}, "its target's 64"),
    ],
)  # fmt: skip
def test_what_draftsmith_has_no_counterpart_of_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = rewritten(written(tmp_path, dflash_config(), "vllm"), **keys)
    with pytest.raises(ValueError, match=message):
        read_back(folder)


def test_neutral_switches_of_other_programs_are_read(tmp_path: Path) -> None:
    folder = written(tmp_path, dflash_config(), "vllm")
    rewritten(folder, is_causal=False, dflash_config__causal=False, use_gemma_norm=False)
    assert architecture_of(read_back(folder).config) == architecture_of(dflash_config())
    sliding = written(tmp_path / "sliding", dflash_config(**SLIDING), "vllm")
    with pytest.raises(ValueError, match="causal attention is set to False"):
        read_back(rewritten(sliding, dflash_config__causal=False))
    nested = written(tmp_path / "nested", dflash_config(**SLIDING), "speculators")
    with pytest.raises(ValueError, match="causal attention is set to False"):
        read_back(rewritten(nested, sliding_window_non_causal=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"markov_rank": "absent"}, "lacks markov_rank"),
        ({"markov_rank": 0}, "says that there is no markov_head"),
        ({"markov_head_type": "bigram"}, "markov_head_type 'bigram', expected one of vanilla"),
        ({"enable_confidence_head": "absent"}, "lacks enable_confidence_head"),
        ({"enable_confidence_head": False}, "says that there is no confidence_head"),
        ({"confidence_head_with_markov": "absent"}, "lacks confidence_head_with_markov"),
    ],
)
def test_heads_must_be_described(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path, dspark_config(), "vllm")
    nested = {f"dflash_config__{name}": value for name, value in keys.items()}
    with pytest.raises(ValueError, match=message):
        read_back(rewritten(folder, **keys, **nested))


def test_a_layout_that_readers_guess_differently_is_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path, dspark_config(), "speculators")
    with pytest.raises(ValueError, match="lacks sample_from_anchor"):
        read_back(rewritten(folder, sample_from_anchor="absent"))


def test_t11_a_mask_token_that_texts_contain_is_said(tmp_path: Path) -> None:
    """T11: other programs fall back to padding or end of text; never silently here."""
    found = read_back(written(tmp_path, dflash_config(mask_token_id=0), "vllm"))
    assert any("is its pad_token_id" in remark for remark in found.remarks)


def test_x02_a_missing_or_unknown_tensor_is_refused(tmp_path: Path) -> None:
    def drop(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["layers.1.self_attn.k_norm.weight"]

    def add(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.self_attn.attention_sink_bias"] = torch.ones(4)

    def domino(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["prefix_gru.weight_hh_l0"] = torch.ones(4)

    for number, (change, message) in enumerate(
        ((drop, "k_norm.weight is missing"), (add, "is not known"), (domino, "a Domino draft"))
    ):
        folder = written(tmp_path / str(number), dflash_config(), "vllm", change=change)
        with pytest.raises(ValueError, match=message):
            read_back(folder)
