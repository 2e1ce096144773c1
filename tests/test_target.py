"""States, logits and rollback of the target adapter against the models' own forward passes.

Faults covered: USER-PAIN C02, C04, C05, I08, I09, I15, I16, M01, M05-M09, M13, V05.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, Gemma3Config

from draftsmith.models.target import (
    TargetHead,
    TargetModel,
    default_aux_layer_ids,
    validate_aux_layer_ids,
)

ATTENTION_FAMILIES = (
    "llama",
    "llama_tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "granite",
    "phi",
    "gpt_neox",
    "gpt2",
    "qwen3_moe",
)
RECURRENT_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
FAMILIES = ATTENTION_FAMILIES + RECURRENT_FAMILIES
SCALED_LOGITS = {"gemma2", "gemma3", "granite"}

Make = Callable[..., Any]


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))


def own_outputs(target: TargetModel, input_ids: Tensor) -> Any:
    with torch.no_grad():
        return target.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)


def test_the_list_of_families_is_that_of_tiny(tiny: Any) -> None:
    assert set(FAMILIES) == set(tiny.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_final_state_is_the_models_own_logits(tiny_target: Make, family: str) -> None:
    target = tiny_target(family)
    input_ids = random_ids(1, 40)
    expected = own_outputs(target, input_ids).logits
    output = target.forward(input_ids, logits="all")
    torch.testing.assert_close(output.logits, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    again = target.logits(output.final_hidden_states[0])  # [seq, hidden]: any leading shape
    assert torch.equal(again.argmax(-1), expected[0].argmax(-1))
    last = target.forward(input_ids, logits="last")
    torch.testing.assert_close(last.logits, expected[:, -1:], atol=1e-5, rtol=1e-5)
    assert target.forward(input_ids).logits is None


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_ids_count_outputs_of_layers_from_zero(tiny_target: Make, family: str) -> None:
    target = tiny_target(family)
    input_ids = random_ids(2, 12)
    own = own_outputs(target, input_ids).hidden_states
    output = target.forward(input_ids, aux_layer_ids=(-1, 0, 2))
    expected = torch.cat([own[0], own[1], own[3]], dim=-1)
    torch.testing.assert_close(output.aux_hidden_states, expected, atol=1e-6, rtol=1e-6)
    fewer = target.forward(input_ids, aux_layer_ids=(2,))  # The hooks of other layers stay silent.
    assert torch.equal(fewer.aux_hidden_states, output.aux_hidden_states[..., -32:])
    assert target.forward(input_ids).aux_hidden_states.shape == (2, 12, 0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_states_of_single_rows(
    tiny_target: Make, family: str, side: str
) -> None:
    target = tiny_target(family)
    rows = [random_ids(length, seed=length) for length in (3, 13, 5)]
    batch = torch.zeros(3, 13, dtype=torch.long)
    mask = torch.zeros(3, 13, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(13 - len(row), 13) if side == "left" else slice(0, len(row))
        batch[index, place] = row
        mask[index, place] = 1
    together = target.forward(batch, attention_mask=mask, aux_layer_ids=(0, 2), logits="all")
    assert together.final_hidden_states.isfinite().all()
    for index, row in enumerate(rows):
        alone = target.forward(row[None], aux_layer_ids=(0, 2), logits="all")
        kept = mask[index].bool()
        for name in ("aux_hidden_states", "final_hidden_states", "logits"):
            expected = getattr(alone, name)[0]
            # Rounding is relative to the largest numbers in a sum, and differs between CPUs (most
            # where a state sums over the whole text); what padding that is seen does to a state is
            # as large as the state.
            torch.testing.assert_close(
                getattr(together, name)[index, kept],
                expected,
                atol=(1e-4 if target.mixers else 2e-5) * float(expected.abs().max()),
                rtol=1e-4,
            )


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_rollback_is_exact_beyond_the_sliding_window(tiny_target: Make, family: str) -> None:
    """Window 8, prompt 6, 30 tokens, three rejected tokens in every round."""
    target = tiny_target(family)
    tokens = random_ids(1, 6)
    cache = target.new_cache()
    output = target.forward(tokens, cache=cache, logits="last")
    for step in range(30):
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
        rejected = random_ids(1, 3, seed=step)
        output = target.forward(
            torch.cat([chosen, rejected], dim=1), cache=cache, aux_layer_ids=(1,), logits="all"
        )
        cache.crop(-3)
        assert cache.get_seq_length() == tokens.shape[1]
        expected = target.forward(tokens, aux_layer_ids=(1,), logits="last")
        torch.testing.assert_close(output.logits[:, :1], expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            output.aux_hidden_states[:, :1],
            expected.aux_hidden_states[:, -1:],
            atol=1e-4,
            rtol=1e-4,
        )
        output.logits = output.logits[:, :1]


def test_a_sliding_cache_layer_would_have_lost_its_entries(tiny_target: Make) -> None:
    """The negative control of the test above: transformers' own cache refuses the rollback."""
    from transformers import DynamicCache

    target = tiny_target("gemma2")
    cache = DynamicCache(config=target.config)
    target.forward(random_ids(1, 20), cache=cache)
    with pytest.raises(RuntimeError, match="past"):
        cache.crop(-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", *RECURRENT_FAMILIES])
def test_left_padded_batches_decode_with_a_cache(tiny_target: Make, family: str) -> None:
    target = tiny_target(family)
    rows = [random_ids(length, seed=length) for length in (4, 9)]
    batch, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for index, row in enumerate(rows):
        batch[index, 9 - len(row) :] = row
        mask[index, 9 - len(row) :] = 1
    cache = target.new_cache()
    output = target.forward(batch, attention_mask=mask, cache=cache, logits="last")
    for _ in range(8):
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
        rows = [torch.cat([row, token]) for row, token in zip(rows, chosen, strict=True)]
        mask = torch.cat([mask, torch.ones_like(chosen)], dim=1)
        output = target.forward(chosen, attention_mask=mask, cache=cache, logits="last")
        for index, row in enumerate(rows):
            alone = target.forward(row[None], logits="last").logits
            torch.testing.assert_close(output.logits[index], alone[0], atol=1e-4, rtol=1e-4)


def test_a_mask_of_four_axes_is_passed_through(tiny_target: Make) -> None:
    """Two continuations of one prefix in one forward, each blind to the other."""
    target = tiny_target("llama")
    prefix, pair = random_ids(1, 5), random_ids(1, 2, seed=1)
    cache = target.new_cache()
    target.forward(prefix, cache=cache)
    keep_mask = torch.ones(1, 1, 2, 7, dtype=torch.bool)
    keep_mask[0, 0, 0, 6] = keep_mask[0, 0, 1, 5] = False
    output = target.forward(
        pair,
        attention_mask=keep_mask,
        position_ids=torch.full((1, 2), 5),
        cache=cache,
        logits="all",
    )
    for branch in range(2):
        alone = torch.cat([prefix, pair[:, branch : branch + 1]], dim=1)
        expected = target.forward(alone, logits="last").logits[0, 0]
        torch.testing.assert_close(output.logits[0, branch], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_alone_equals_the_whole_target(
    tiny_folder: Make, tiny_target: Make, family: str, shard_size: str
) -> None:
    folder = tiny_folder(family, max_shard_size=shard_size)
    assert len(list(folder.glob("*.safetensors"))) > (0 if shard_size == "1GB" else 1)
    target = tiny_target(family, max_shard_size=shard_size)
    head = TargetHead.load(str(folder), dtype="float32")
    states = target.forward(random_ids(1, 40), aux_layer_ids=(-1,))
    logits = target.logits(states.final_hidden_states)
    torch.testing.assert_close(head(states.final_hidden_states), logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(head.weight, target.head().weight)
    assert (head.bias is None) == (family != "phi")
    assert head.vocab_size == 320
    assert head.hidden_size == 32
    assert head.config.num_hidden_layers == 4
    assert head.is_plain == (family not in SCALED_LOGITS)
    assert torch.equal(head.final_norm_weight, target.head().final_norm_weight)
    ids = random_ids(2, 7)
    assert torch.equal(head.embed_tokens(ids), target.embed_tokens(ids))
    # Nothing of the decoder layers: at most table, head, bias, positions, norm.
    assert sum(p.numel() for p in head.parameters()) <= 2 * 320 * 32 + 320 + 512 * 32 + 64
    assert not any(p.requires_grad for p in head.parameters())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_embed_tokens_gives_what_the_first_layer_reads(tiny_target: Make, family: str) -> None:
    target = tiny_target(family)
    input_ids = random_ids(2, 9)
    read = target.forward(input_ids, aux_layer_ids=(-1,)).aux_hidden_states
    assert torch.equal(target.embed_tokens(input_ids), read)


def test_learned_positions_are_not_part_of_the_embeddings(tiny_target: Make) -> None:
    target = tiny_target("gpt2")
    input_ids = random_ids(1, 9)
    assert torch.equal(target.embed_tokens(input_ids), target.model.transformer.wte(input_ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_embedding_scale_is_found_exactly_in_every_dtype(tiny_folder: Make, dtype: str) -> None:
    folder = str(tiny_folder("granite"))
    assert TargetModel.load(folder, dtype=dtype).embed_tokens.scale == 3.0
    assert TargetHead.load(folder, dtype=dtype).embed_tokens.scale == 3.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2"])
def test_the_final_norms_weight_is_the_factor_it_acts_with(
    tiny_folder: Make, family: str, dtype: str
) -> None:
    target = TargetModel.load(str(tiny_folder(family)), dtype=dtype)
    base = target.model.base_model
    norm = next(
        m for name, m in base.named_children() if name in ("norm", "final_layer_norm", "ln_f")
    )
    expected = norm.weight + 1.0 if family == "gemma2" else norm.weight
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(
        target.head().final_norm_weight, expected.detach(), atol=tolerance, rtol=tolerance
    )


def test_soft_capping_is_applied_to_cached_states(tiny_target: Make) -> None:
    head = tiny_target("gemma2").head()  # final_logit_softcapping = 2
    found = head.transform(torch.tensor([[-10.0, 0.0, 10.0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.9998, 0.0, 1.9998]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_transform_of_the_matrix_product_gives_the_logits(tiny_target: Make, family: str) -> None:
    head = tiny_target(family).head()
    hidden = 5.0 * torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0))
    raw = torch.nn.functional.linear(hidden, head.weight, head.bias)
    logits = head(hidden)
    torch.testing.assert_close(head.transform(raw), logits, atol=1e-5, rtol=1e-5)
    some = torch.tensor([5, 17, 300])
    torch.testing.assert_close(
        head.transform(raw[0][:, some]), logits[0][:, some], atol=1e-5, rtol=1e-5
    )
    if family in SCALED_LOGITS:
        assert not torch.allclose(raw, logits, atol=1e-2)


def test_gradients_reach_the_states_through_a_soft_capped_head(tiny_target: Make) -> None:
    head = tiny_target("gemma2").head()
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    head(hidden).logsumexp(-1).sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().sum()) > 0
    assert head.weight.grad is None


def test_states_can_be_saved_for_a_backward_pass(tiny_target: Make) -> None:
    """Live features feed a trained draft: inference tensors would raise here."""
    states = tiny_target("llama").forward(random_ids(1, 6)).final_hidden_states
    weight = torch.randn(32, 4, requires_grad=True)
    (states @ weight).sum().backward()
    assert weight.grad is not None


def test_forward_works_under_inference_mode(tiny_target: Make) -> None:
    target = tiny_target("gemma2")
    with torch.inference_mode():
        cache = target.new_cache()
        target.forward(random_ids(1, 6), cache=cache, logits="last", aux_layer_ids=(0,))
        output = target.forward(random_ids(1, 2), cache=cache, logits="all", aux_layer_ids=(0,))
    assert output.logits.shape == (1, 2, 320)


def test_the_target_is_frozen_and_in_eval_mode(tiny_target: Make) -> None:
    target = tiny_target("qwen3_moe")
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_sizes_come_from_the_weights_and_the_configuration(tiny_target: Make) -> None:
    target = tiny_target("qwen3")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 320)
    assert target.max_positions == 512
    assert target.config.head_dim == 16  # Not hidden / heads.
    assert len(target.tokenizer) == 312  # The head is padded beyond it, which is fine.
    assert target.dtype == torch.float32
    assert target.device == torch.device("cpu")


def test_an_unknown_dtype_lists_the_choices(tiny_llama_folder: Path) -> None:
    with pytest.raises(ValueError, match="bfloat16, float16, float32.*mean 'bfloat16'"):
        TargetModel.load(str(tiny_llama_folder), dtype="bfloat")


def test_every_loadable_dtype_keeps_the_argmax_of_its_own_model(tiny_folder: Make) -> None:
    for dtype in ("bfloat16", "float16"):
        target = TargetModel.load(str(tiny_folder("gemma3")), dtype=dtype)
        input_ids = random_ids(1, 12)
        expected = own_outputs(target, input_ids).logits
        assert torch.equal(target.forward(input_ids, logits="all").logits, expected)


def test_a_nested_text_config_is_read(tiny: Any, tmp_path: Path) -> None:
    text = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "sliding_window": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": 3,
    }
    # As many vision layers as text layers: they must not be taken for the decoder's.
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=310
    )
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    target = TargetModel.load(str(tmp_path), dtype="float32")
    head = TargetHead.load(str(tmp_path), dtype="float32")
    input_ids = random_ids(1, 12)
    expected = own_outputs(target, input_ids).logits
    output = target.forward(input_ids, logits="all", aux_layer_ids=(-1,))
    assert torch.equal(output.logits, expected)
    assert torch.equal(head(output.final_hidden_states), expected)
    assert torch.equal(head.embed_tokens(input_ids), output.aux_hidden_states)
    assert (target.num_layers, target.max_positions, head.config.num_hidden_layers) == (2, 128, 2)


@pytest.mark.parametrize("loader", [TargetModel, TargetHead])
def test_a_checkpoint_without_its_head_is_refused(
    tiny_llama_folder: Path, tmp_path: Path, loader: Any
) -> None:
    """transformers would draw the missing matrix at random."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 tensors.*lm_head\.weight"):
        loader.load(str(folder), dtype="float32")


def test_a_weight_file_that_is_cut_short_is_named_as_such(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_llama_folder, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        TargetModel.load(str(folder), dtype="float32")


def test_a_model_that_is_no_decoder_is_refused(tiny: Any, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertLMHeadModel: .* not supported"):
        TargetModel.load(str(tmp_path), dtype="float32")


def test_attention_that_does_not_exist_is_replaced_with_a_warning(
    tiny_folder: Make, caplog: pytest.LogCaptureFixture
) -> None:
    target = TargetModel.load(str(tiny_folder("gemma2")), dtype="float32")
    assert "attn_implementation=eager" in caplog.text
    assert target.model.config._attn_implementation == "eager"


def test_end_tokens_are_the_union_of_all_three_places(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "eos"
    shutil.copytree(tiny_llama_folder, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [1, 6]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    target = TargetModel.load(str(folder), dtype="float32")
    assert target.eos_token_ids == (1, 3, 6)
    generation["eos_token_id"] = [1, 400]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=r"400 of generation_config\.json is outside"):
        TargetModel.load(str(folder), dtype="float32")


@pytest.mark.parametrize(("layers", "expected"), [(36, (1, 17, 32)), (30, (1, 14, 26))])
def test_default_layers_are_early_middle_and_late(
    layers: int, expected: tuple[int, int, int]
) -> None:
    assert default_aux_layer_ids(layers) == expected


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_ask_for_layer_ids(layers: int) -> None:
    with pytest.raises(ValueError, match=rf"only {layers} layers.*Set method\.aux_layer_ids"):
        default_aux_layer_ids(layers)


@pytest.mark.parametrize("layers", range(7, 100))
def test_default_layers_are_valid_for_every_deeper_target(layers: int) -> None:
    assert validate_aux_layer_ids(default_aux_layer_ids(layers), layers)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((0, 1, 3), "has 3, the last layer"),
        ((0, 40), r"has \[40\], but the target has 4 layers"),
        ((-2, 0), r"has \[-2\]"),
        ((1, 1), r"not distinct and ascending.*\(1,\)"),
        ((2, 0), r"not distinct and ascending.*\(0, 2\)"),
    ],
)
def test_wrong_layer_ids_are_explained(ids: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        validate_aux_layer_ids(ids, 4)


def test_right_layer_ids_are_returned_as_a_tuple() -> None:
    assert validate_aux_layer_ids([-1, 0, 2], 4) == (-1, 0, 2)


def test_asking_for_a_layer_that_does_not_exist_is_an_error(tiny_target: Make) -> None:
    with pytest.raises(ValueError, match="Layer id 4 asked of a target with 4 layers"):
        tiny_target("llama").forward(random_ids(1, 3), aux_layer_ids=(4,))
