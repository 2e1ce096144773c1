"""Settings of block drafts (DFlash, DSpark): a safe mask token, the layers read, wrong values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.models.block_method import choose_mask_token, spread_feature_layers
from draftsmith.models.dflash import DFlashConfig, DFlashDraft, DFlashMethod
from draftsmith.models.dspark import DSparkMethod


def chosen(wanted: int | None, vocab_size: int, tokenizer: Any) -> int:
    config = SimpleNamespace(eos_token_id=[3, 9], bos_token_id=1, pad_token_id=0)
    return choose_mask_token(wanted, vocab_size=vocab_size, text_config=config, tokenizer=tokenizer)


def test_the_mask_token_is_one_that_no_text_contains(tiny_tokenizer: Any) -> None:
    """T11."""
    assert chosen(None, 320, tiny_tokenizer) == 312  # The first behind the tokenizer.
    assert chosen(315, 320, tiny_tokenizer) == chosen(315, 320, None) == 315
    tiny_tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert chosen(None, 320, tiny_tokenizer) == tiny_tokenizer.mask_token_id == 312


@pytest.mark.parametrize(
    ("wanted", "vocab_size", "message"),
    [
        (70, 64, "mask_token_id is 70, but the target has embeddings for the ids 0 to 63"),
        (None, 312, "no unused id"),
        (3, 320, "eos_token_id"),
        (9, 320, "eos_token_id"),
        (0, 320, "pad_token_id"),
        (1, 320, "bos_token_id"),
        (2, 320, r"'<\|im_start\|>', which the chat template writes"),
        (40, 320, "the ordinary token"),
    ],
)
def test_an_unsafe_mask_token_is_refused(
    tiny_tokenizer: Any, wanted: int | None, vocab_size: int, message: str
) -> None:
    """T11."""
    with pytest.raises(ValueError, match=message):
        chosen(wanted, vocab_size, tiny_tokenizer)


def test_a_mask_token_is_not_guessed_without_a_tokenizer(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="without the target's tokenizer"):
        chosen(None, 320, None)
    tiny_tokenizer.add_tokens(["<reserved>"], special_tokens=True)
    with pytest.raises(ValueError, match=r"for example 312 \(<reserved>\)"):
        chosen(3, 320, tiny_tokenizer)


def test_the_layers_that_are_read_are_the_published_ones() -> None:
    assert spread_feature_layers(36) == [1, 9, 17, 25, 33]  # Qwen3-4B and -8B.
    assert spread_feature_layers(28) == [1, 7, 13, 19, 25]
    assert spread_feature_layers(4) == [1]
    method = DFlashMethod()
    method.validate(36, 151936)
    assert method.aux_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "method.block_size"),
        ({"decay": 0.0}, "method.decay"),
        ({"num_anchors": 0}, "method.num_anchors"),
        ({"layer_types": ["full_attention"]}, "expected 5"),
        ({"layer_types": ["full_atention"] * 5}, "Did you mean 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 5}, "set the window"),
        ({"layer_types": ["full_attention"] * 5, "sliding_window": 8}, "set the window"),
        ({"objective": "ce"}, "method.objective"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashMethod(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aux_layer_ids": [1, 1, 2]}, "distinct and ascending"),
        ({"aux_layer_ids": None}, "aux_layer_ids is None"),
        ({"mask_token_id": 64}, "mask_token_id is 64"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"block_size": 1}, "no slot is left"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window is None"),
    ],
)
def test_a_config_that_leaves_something_open_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    """X05, T11: nothing is guessed at load."""
    usual: dict[str, Any] = {"aux_layer_ids": [1, 2], "mask_token_id": 63, "vocab_size": 64}
    config = DFlashConfig(**(usual | {"hidden_size": 32, "num_attention_heads": 4} | settings))
    with pytest.raises(ValueError, match=message):
        DFlashDraft(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequential_head": "markof"}, "Did you mean 'markov'"),
        ({"sequential_head": "none"}, "no embedding to read"),
        ({"markov_rank": 0}, "method.markov_rank"),
        ({"confidence_weight": 0.0}, "method.confidence_weight"),
        ({"confidence_head": 1}, "method.confidence_head"),
    ],
)
def test_wrong_settings_of_the_heads_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DSparkMethod(**settings)
