"""Checkpoint formats: exact names and keys, what each engine reads, there and back, refusals.

X.. are rows of the collection of faults that users of other toolkits met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).parent))

from format_support import (
    DRAFT_VOCAB,
    EAGLE3_VARIANTS,
    HIDDEN,
    LAYERS,
    LLAMA3,
    POSITIONS,
    VOCAB,
    eagle1_config,
    eagle3_config,
    export,
    make_draft,
    read_back,
    target_facts,
    written,
)

from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.format_keys import TRAINING_FIELDS
from draftsmith.models.formats import read_foreign, to_format

LAYER = (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj",
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
MIDLAYER_NAMES = {f"midlayer.{name}.weight" for name in LAYER}
REST = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
EAGLE1_NAMES = {f"layers.0.{name}.weight" for name in LAYER[2:]} | {"fc.weight"}

FLAT_KEYS = {
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "draft_vocab_size",
    "dtype", "eagle_aux_hidden_state_layer_ids", "eagle_config", "eos_token_id", "fc_norm",
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "layer_types", "max_position_embeddings", "mlp_bias", "model_type", "norm_before_fc",
    "norm_before_residual", "norm_output", "num_attention_heads", "num_aux_hidden_states",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "pretraining_tp", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "target_hidden_size",
    "tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
}  # fmt: skip


# Names and keys.


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle"])
def test_x01_a_flat_eagle3_folder_has_exactly_these_tensors_and_keys(format: str) -> None:
    foreign = export(eagle3_config(), format)
    assert foreign.tensors.keys() == MIDLAYER_NAMES | REST
    assert foreign.config.keys() == FLAT_KEYS
    architecture = "LlamaForCausalLM" if format == "eagle" else "LlamaForCausalLMEagle3"
    expected = {
        "architectures": [architecture], "model_type": "llama", "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1, "head_dim": 8, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    assert {name: foreign.config[name] for name in expected} == expected
    shapes = {name: list(tensor.shape) for name, tensor in foreign.tensors.items()}
    assert shapes["fc.weight"] == [HIDDEN, 3 * HIDDEN]
    assert shapes["midlayer.self_attn.q_proj.weight"] == [4 * 8, 2 * HIDDEN]
    assert shapes["midlayer.self_attn.v_proj.weight"] == [2 * 8, 2 * HIDDEN]
    assert shapes["lm_head.weight"] == [DRAFT_VOCAB, HIDDEN]
    assert shapes["d2t"] == [DRAFT_VOCAB]
    assert shapes["t2d"] == [VOCAB]


def test_x01_a_speculators_folder_has_every_tensor_and_no_top_level_model_type() -> None:
    foreign = export(eagle3_config(), "speculators")
    layer = {f"layers.0.{name}.weight" for name in LAYER}
    assert foreign.tensors.keys() == layer | REST | {"embed_tokens.weight"}
    config = foreign.config
    assert "model_type" not in config, "vLLM would take the folder for a flat one"
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    inner = config["transformer_layer_config"]
    assert (inner["model_type"], inner["vocab_size"], inner["head_dim"]) == ("llama", VOCAB, 8)
    assert inner["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    # speculators takes a missing norm_before_residual for false, vLLM for true.
    assert config["norm_before_residual"] is False


@pytest.mark.parametrize(
    ("format", "architecture", "extra"),
    [
        ("vllm", "LlamaForCausalLM", set()),
        ("sglang", "LlamaForCausalLMEagle", {"fc.bias"}),
        ("eagle", "LlamaForCausalLM", {"fc.bias", "embed_tokens.weight"}),
    ],
)
def test_x01_an_eagle1_folder_has_what_its_engine_loads(
    format: str, architecture: str, extra: set[str]
) -> None:
    foreign = export(eagle1_config(), format)
    assert foreign.tensors.keys() == EAGLE1_NAMES | extra
    assert foreign.config["architectures"] == [architecture]
    assert "bias" not in foreign.config, "engines would give the attention biases"
    # vLLM 0.32 looks its layer up there by a number after all of the target's.
    assert "layer_types" not in foreign.config
    if "fc.bias" in extra:
        assert torch.equal(foreign.tensors["fc.bias"], torch.zeros(HIDDEN))


def test_transformers_reads_the_flat_config_with_every_key(tmp_path: Path) -> None:
    folder = written(tmp_path, eagle3_config(rope_parameters=LLAMA3), "vllm")
    raw = json.loads((folder / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__name__ == "LlamaConfig"
    for name in FLAT_KEYS - {"architectures", "dtype", "torch_dtype", "rope_theta", "rope_scaling"}:
        assert getattr(config, name) == raw[name], name
    assert config.dtype == torch.float32


# There and back.


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle", "speculators"])
@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_an_eagle3_draft_comes_back_bit_for_bit_or_is_refused(
    variant: str, format: str, tmp_path: Path
) -> None:
    refused = {
        "vllm": {"qk_norm"},
        "sglang": {"qk_norm", "norm_before_residual", "attention_bias"},
        "eagle": set(EAGLE3_VARIANTS) - {"plain", "full_vocabulary", "own_head_dim"},
        "speculators": set(),
    }[format]
    config = eagle3_config(**EAGLE3_VARIANTS[variant])
    if variant in refused:
        with pytest.raises(ValueError, match=rf"cannot be exported as format={format}"):
            export(config, format)
        return
    draft = read_back(written(tmp_path, config, format))
    own = make_draft(config)
    assert own.keys() == draft.tensors.keys()
    assert all(torch.equal(own[name], draft.tensors[name]) for name in own)
    assert architecture_of(draft.config) == architecture_of(config)
    assert not draft.remarks


def architecture_of(config: Any) -> dict[str, Any]:
    """What a config says of the draft itself."""
    return {name: v for name, v in config.to_dict().items() if name not in TRAINING_FIELDS}


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle"])
@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_layers": 2}, {"attention_bias": True}, {"fc_bias": True}]
)
def test_an_eagle1_draft_comes_back_bit_for_bit_or_is_refused(
    options: dict[str, Any], format: str, tmp_path: Path
) -> None:
    config = eagle1_config(**options)
    refused = {"vllm": {"fc_bias"}, "sglang": set(), "eagle": {"attention_bias"}}[format]
    if refused & options.keys():
        with pytest.raises(ValueError, match=rf"cannot be exported as format={format}"):
            export(config, format)
        return
    draft = read_back(written(tmp_path, config, format))
    own = make_draft(config)
    assert own.keys() == draft.tensors.keys()
    assert all(torch.equal(own[name], draft.tensors[name]) for name in own)
    assert architecture_of(draft.config) == architecture_of(config)


def test_m01_head_dim_is_its_own_number() -> None:
    """M01: hidden 32 with 4 heads of 16."""
    config = export(eagle3_config(head_dim=16), "vllm").config
    assert (config["hidden_size"], config["num_attention_heads"]) == (32, 4)
    assert config["head_dim"] == 16


def test_m02_scaled_rotary_settings_stand_in_both_spellings(tmp_path: Path) -> None:
    """M02: llama3 scaling, and the angles at a far position are the target's."""
    folder = written(tmp_path, eagle3_config(rope_parameters=LLAMA3), "vllm")
    raw = json.loads((folder / "config.json").read_text())
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    assert raw["rope_theta"] == LLAMA3["rope_theta"]
    assert raw["rope_scaling"] == scaling
    assert raw["rope_parameters"] == LLAMA3
    at = torch.tensor([[300]])
    expected = LlamaRotaryEmbedding(eagle3_config(rope_parameters=LLAMA3))(torch.zeros(1), at)
    for name in ("rope_parameters", "rope_scaling"):  # A reader of either sees the same.
        partial = {key: value for key, value in raw.items() if key != name}
        (folder / "config.json").write_text(json.dumps(partial))
        config = read_back(folder).config
        found = LlamaRotaryEmbedding(config)(torch.zeros(1), at)
        assert torch.equal(found[0], expected[0])


def test_m02_yarn_keeps_its_original_length_when_positions_are_raised() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = eagle3_config(rope_parameters=yarn, max_position_embeddings=128)
    found = export(config, "sglang").config
    assert found["max_position_embeddings"] == POSITIONS
    assert found["rope_parameters"]["original_max_position_embeddings"] == 128


# Vocabulary.


def test_v03_a_reduced_vocabulary_has_its_map_and_a_full_one_none() -> None:
    """V03: int64 offsets and a bool mask; vLLM raises on a map of a full vocabulary."""
    for format in ("vllm", "sglang", "eagle", "speculators"):
        reduced = export(eagle3_config(), format).tensors
        assert reduced["d2t"].dtype == torch.int64
        assert reduced["t2d"].dtype == torch.bool
        kept = reduced["t2d"].nonzero().squeeze(-1)
        assert torch.equal(kept, torch.arange(DRAFT_VOCAB) + reduced["d2t"])
        full = export(eagle3_config(draft_vocab_size=VOCAB), format)
        assert not {"d2t", "t2d"} & full.tensors.keys()
        assert full.config["draft_vocab_size"] == VOCAB


# Which target layers.


def test_x03_any_number_of_layers_is_counted_in_the_config() -> None:
    """X03: engines that find no count assume three."""
    ids = [0, 2, 4, 6]
    foreign = export(eagle3_config(aux_layer_ids=ids), "vllm")
    assert foreign.config["num_aux_hidden_states"] == 4
    assert list(foreign.tensors["fc.weight"].shape) == [HIDDEN, 4 * HIDDEN]
    assert any("4 target layers" in warning for warning in foreign.warnings)
    nested = export(eagle3_config(aux_layer_ids=ids), "speculators").config
    assert nested["transformer_layer_config"]["num_aux_hidden_states"] == 4
    with pytest.raises(ValueError, match=r"always reads \[1, 3, 4\] of a target with 8 layers"):
        export(eagle3_config(aux_layer_ids=ids), "eagle")
    with pytest.raises(ValueError, match="SGLang skips fc"):
        export(eagle3_config(aux_layer_ids=[2]), "sglang")


@pytest.mark.parametrize("ids", [[1, 3, 4], [0, 2, 5], [-1, 1, 6]])
def test_x04_each_engine_reads_the_states_that_the_draft_was_trained_on(
    ids: list[int], tiny_target: Callable[..., Any]
) -> None:
    """X04: what the engines would capture, by their own rules, are the states of our layer ids."""
    target = tiny_target("llama", num_hidden_layers=LAYERS)
    tokens = torch.arange(1, 9)[None]
    ours = target.forward(tokens, aux_layer_ids=ids).aux_hidden_states
    states = target.model(tokens, output_hidden_states=True).hidden_states
    config = export(eagle3_config(aux_layer_ids=ids), "vllm").config
    # vLLM: top-level key first, id L = the states after L layers. SGLang: nested key, one more.
    vllm = [states[layer] for layer in config["eagle_aux_hidden_state_layer_ids"]]
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    sglang = [states[layer + 1] for layer in nested]
    inside = export(eagle3_config(aux_layer_ids=ids), "speculators").config
    speculators = [states[layer] for layer in inside["eagle_aux_hidden_state_layer_ids"]]
    for captured in (vllm, sglang, speculators):
        assert torch.equal(torch.cat(captured, dim=-1), ours)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 1, 2], "not distinct and ascending"),
        ([4, 1, 2], "not distinct and ascending"),
        ([-2, 1, 2], "below -1"),
        ([1, 2, LAYERS], f"beyond the target's {LAYERS} layers"),
    ],
)
def test_x05_layer_ids_that_cannot_be_are_refused_both_ways(
    ids: list[int], message: str, tmp_path: Path
) -> None:
    """X05: at export and at load, never served with guessed ones."""
    with pytest.raises(ValueError, match=message):
        export(eagle3_config(aux_layer_ids=ids), "vllm")

    def change(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in ids]
        raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    with pytest.raises(ValueError, match=message):
        read_back(written(tmp_path, eagle3_config(), "vllm", change=change))


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle", "speculators"])
def test_x14_layer_ids_are_written_even_where_they_are_the_default(format: str) -> None:
    """X14: an engine that finds none guesses (2, N / 2, N - 3)."""
    config = export(eagle3_config(aux_layer_ids=[1, 3, 4]), format).config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    own = export(eagle3_config(aux_layer_ids=[1, 3]), "vllm", num_layers=6).config
    assert own["eagle_aux_hidden_state_layer_ids"] == [2, 4]
    assert own["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3]


def test_x10_the_last_layer_is_refused_for_sglang() -> None:
    """X10: SGLang captures a layer's output as the next one's input, and there is no next one."""
    ids = [1, 3, LAYERS - 1]
    with pytest.raises(ValueError, match="SGLang cannot capture its output"):
        export(eagle3_config(aux_layer_ids=ids), "sglang")
    assert export(eagle3_config(aux_layer_ids=ids), "vllm").config["num_aux_hidden_states"] == 3


# Switches, types, sizes.


@pytest.mark.parametrize(
    ("switch", "tensors"),
    [
        ("norm_before_fc", {"input_norm.weight"}),
        ("fc_norm", {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}),
        ("norm_output", set()),
    ],
)
def test_x07_a_norm_switch_and_its_tensors_are_both_there(
    switch: str, tensors: set[str], tmp_path: Path
) -> None:
    """X07: a switch without its tensors, or tensors without the switch, is an error."""
    for format in ("vllm", "sglang", "speculators"):
        foreign = export(eagle3_config(**{switch: True}), format)
        assert foreign.config[switch] is True
        assert tensors <= foreign.tensors.keys()
        others = {"norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"} - {switch}
        assert not any(foreign.config[name] for name in others)
    if not tensors:
        return

    def unset(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw[switch] = False

    def drop(_: dict[str, Any], found: dict[str, Tensor]) -> None:
        for name in tensors:
            del found[name]

    config = eagle3_config(**{switch: True})
    with pytest.raises(ValueError, match=rf"{switch}: false, but the checkpoint has"):
        read_back(written(tmp_path / "a", config, "vllm", change=unset))
    with pytest.raises(ValueError, match=rf"{switch}: true, but the checkpoint lacks"):
        read_back(written(tmp_path / "b", config, "vllm", change=drop))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x08_the_config_names_the_type_of_the_tensors(dtype: torch.dtype) -> None:
    """X08: read from the tensors, not from the config of the draft."""
    config = eagle3_config()
    config.dtype = torch.float16  # Wrong on purpose.
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in make_draft(config).items()
    }
    for format in ("vllm", "speculators"):
        foreign = to_format(config, tensors, format=format, target=target_facts())
        assert foreign.config["dtype"] == str(dtype).removeprefix("torch.")
        floats = {t.dtype for t in foreign.tensors.values() if t.is_floating_point()}
        assert floats == {dtype}
    mixed = tensors | {"norm.weight": tensors["norm.weight"].half()}
    with pytest.raises(ValueError, match="of 2 types"):
        to_format(config, mixed, format="vllm", target=None)


def test_x09_a_draft_of_another_width_than_its_target_is_refused(tmp_path: Path) -> None:
    """X09: both sizes are written, and compared with the target and with the weights."""
    config = export(eagle3_config(), "vllm").config
    assert (config["hidden_size"], config["target_hidden_size"]) == (HIDDEN, HIDDEN)
    with pytest.raises(ValueError, match=r"hidden size of 32, but org/target has 40 and 64"):
        export(eagle3_config(), "vllm", hidden_size=64)

    def wider(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["target_hidden_size"] = 48

    def longer(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["intermediate_size"] = 50

    def foreign(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["target_hidden_size"] = 50

    ids = {"aux_layer_ids": [1, 3]}
    with pytest.raises(ValueError, match="hidden_size is 32, but the target's is 48"):
        read_back(written(tmp_path / "a", eagle3_config(), "vllm", change=wider), **ids)
    with pytest.raises(
        ValueError, match=r"mlp.down_proj.weight is \[32, 48\], expected \[32, 50\]"
    ):
        read_back(written(tmp_path / "b", eagle3_config(), "vllm", change=longer))
    with pytest.raises(ValueError, match="fc reads 96 numbers, not a multiple"):
        read_back(written(tmp_path / "c", eagle3_config(), "vllm", change=foreign))


def test_x13_full_attention_is_said_and_a_window_is_respected(tmp_path: Path) -> None:
    """X13: layer_types and sliding_window are written; a draft with a window stays within it."""
    for format in ("vllm", "sglang"):
        config = export(eagle3_config(num_hidden_layers=2), format).config
        assert config["layer_types"] == ["full_attention", "full_attention"]
        assert config["sliding_window"] is None
        assert config["use_sliding_window"] is False

    def slide(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        inner = raw["transformer_layer_config"]
        inner["layer_types"], inner["sliding_window"] = ["sliding_attention"], 64

    draft = read_back(written(tmp_path, eagle3_config(), "speculators", change=slide))
    assert draft.config.max_position_embeddings == 64
    assert any("see 64 tokens back" in remark for remark in draft.remarks)


def test_x15_every_architectural_field_reaches_the_config() -> None:
    """X15: each key set to something else than its default is found in config.json."""
    values = {
        "hidden_act": "gelu", "rms_norm_eps": 3e-4, "head_dim": 16, "num_key_value_heads": 4,
        "intermediate_size": 56, "attention_bias": True, "mlp_bias": True, "norm_output": True,
        "norm_before_residual": True, "norm_before_fc": True, "draft_vocab_size": 24,
        "num_hidden_layers": 2, "rope_parameters": LLAMA3, "bos_token_id": 7, "eos_token_id": 8,
        "pad_token_id": 9, "initializer_range": 0.1, "max_position_embeddings": 600,
    }  # fmt: skip
    config = eagle3_config(**values)
    defaults = Eagle3Config().to_dict()
    assert all(defaults[name] != value for name, value in values.items())
    found = export(config, "vllm").config
    assert {name: found[name] for name in values} == values
    nested = export(config, "speculators").config
    both = nested["transformer_layer_config"] | nested
    assert {name: both[name] for name in values} == values
    # And nothing else in our config is architecture: a new field has to be placed somewhere.
    placed = found.keys() | TRAINING_FIELDS | {"aux_layer_ids", "qk_norm", "draftsmith_class"}
    assert not config.to_dict().keys() - placed - INHERITED


INHERITED = {
    "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict",
}  # fmt: skip
"""Fields that every transformers config has and no draft reads."""


def test_positions_reach_as_far_as_the_target(tmp_path: Path) -> None:
    short = eagle3_config(max_position_embeddings=128)
    assert export(short, "sglang").config["max_position_embeddings"] == POSITIONS
    unknown = to_format(short, make_draft(short), format="sglang", target=None)
    assert unknown.config["max_position_embeddings"] == 128

    def shorten(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["max_position_embeddings"] = 128

    folder = written(tmp_path, eagle3_config(), "sglang", change=shorten)
    draft = read_back(folder)
    assert draft.config.max_position_embeddings == POSITIONS
    assert any("raised to the target's 512" in remark for remark in draft.remarks)
    assert read_foreign(folder).config.max_position_embeddings == 128


# Several layers, EAGLE-1's own traps.


def test_further_layers_carry_their_norm_under_both_engines_names(tmp_path: Path) -> None:
    config = eagle3_config(num_hidden_layers=2)
    tensors = export(config, "vllm").tensors
    ours, theirs = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
    assert torch.equal(tensors[ours], tensors[theirs])
    assert "layers.0.hidden_norm.weight" in tensors
    folder = written(tmp_path / "a", config, "sglang", change=lambda _, t: t.pop(ours))
    assert torch.equal(read_back(folder).tensors[ours], tensors[ours])

    def differ(_: dict[str, Any], found: dict[str, Tensor]) -> None:
        found[theirs] = found[theirs] + 1

    with pytest.raises(ValueError, match="so the checkpoint means two things"):
        read_back(written(tmp_path / "b", config, "sglang", change=differ))


def test_a_bias_on_fc_is_kept_where_it_is_served_and_refused_for_vllm() -> None:
    config = eagle1_config(fc_bias=True)
    tensors = make_draft(config)
    for format in ("sglang", "eagle"):
        foreign = to_format(config, tensors, format=format, target=target_facts())
        assert torch.equal(foreign.tensors["fc.bias"], tensors["fc.bias"])
    with pytest.raises(ValueError, match=r"non-zero fc.bias: vLLM's fc has no bias"):
        to_format(config, tensors, format="vllm", target=target_facts())
    zero = tensors | {"fc.bias": torch.zeros(HIDDEN)}
    foreign = to_format(config, zero, format="vllm", target=target_facts())
    assert "fc.bias" not in foreign.tensors


@pytest.mark.parametrize("format", ["vllm", "sglang", "eagle"])
def test_an_eagle1_draft_vocabulary_is_refused_with_the_way_out(format: str) -> None:
    with pytest.raises(ValueError, match="full_vocabulary=true leaves the restriction out"):
        export(eagle1_config(draft_vocab_size=DRAFT_VOCAB), format)


def test_speculators_has_no_eagle1_and_no_engine_its_qk_norms() -> None:
    with pytest.raises(ValueError, match="speculators has no such draft"):
        export(eagle1_config(), "speculators")
    with pytest.raises(ValueError, match="qk_norm"):
        export(eagle1_config(qk_norm=True), "vllm")


def test_all_that_an_engine_cannot_serve_is_said_at_once() -> None:
    config = eagle3_config(qk_norm=True, norm_before_residual=True, attention_bias=True)
    with pytest.raises(ValueError, match=r"(?s)qk_norm.*norm_before_residual.*attention_bias"):
        export(config, "sglang")


def test_m07_scaled_embeddings_are_explicit() -> None:
    """M07: EAGLE-1 reads the embeddings bare, so a target that scales them must hand them over."""
    with pytest.raises(ValueError, match="the target scales its embeddings"):
        export(eagle1_config(), "sglang", scales_embeddings=True)
    foreign = export(eagle1_config(), "vllm", scales_embeddings=True)
    assert torch.equal(foreign.tensors["embed_tokens.weight"], target_facts().embeddings)


def test_qk_norms_make_a_qwen3_draft_in_speculators(tmp_path: Path) -> None:
    folder = written(tmp_path, eagle3_config(qk_norm=True), "speculators")
    inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert inner["model_type"] == "qwen3"
    assert "mlp_bias" not in inner
    assert read_back(folder).config.qk_norm


def test_a_local_target_in_a_speculators_folder_is_remarked() -> None:
    folder = str(Path(__file__).parent)
    assert any("a path on this machine" in w for w in export(
        eagle3_config(), "speculators", source=folder
    ).warnings)  # fmt: skip
    assert not export(eagle3_config(), "speculators").warnings
