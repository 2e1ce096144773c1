"""The slack cache must be indistinguishable from transformers' own cache, also after rollback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from draftsmith.models.kv_cache import SLACK_TOKENS, SlackCache, SlackLayer, drop_last


def random_states(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, length, 4), torch.randn(batch, 2, length, 3)


def test_entries_equal_plain_concatenation_over_growth_and_rollback() -> None:
    torch.manual_seed(0)
    layer, keys, values = SlackLayer(), torch.empty(2, 2, 0, 4), torch.empty(2, 2, 0, 3)
    for length, dropped in [(5, 0), (1, 0), (SLACK_TOKENS, 3), (4, 4), (1, 0), (200, 150), (1, 0)]:
        new_keys, new_values = random_states(length)
        keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
        held_keys, held_values = layer.update(new_keys, new_values)
        assert torch.equal(held_keys, keys)
        assert torch.equal(held_values, values)
        if dropped:
            layer.crop(-dropped)
            keys, values = keys[:, :, :-dropped], values[:, :, :-dropped]
        assert layer.get_seq_length() == keys.shape[2]


def test_a_decoding_step_writes_in_place() -> None:
    layer = SlackLayer()
    layer.update(*random_states(7))
    buffer = layer.key_buffer.data_ptr()
    for _ in range(SLACK_TOKENS):
        layer.update(*random_states(1))
    assert layer.key_buffer.data_ptr() == buffer
    layer.update(*random_states(1))
    assert layer.key_buffer.data_ptr() != buffer


def test_rolling_back_to_nothing_starts_afresh() -> None:
    layer = SlackLayer()
    layer.update(*random_states(3))
    layer.crop(-3)
    keys, values = random_states(2)
    held_keys, held_values = layer.update(keys, values)
    assert torch.equal(held_keys, keys)
    assert torch.equal(held_values, values)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "qwen3_moe"])
def test_logits_after_a_rollback_equal_a_cacheless_forward(
    family: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model(family)
    torch.manual_seed(1)
    ids = torch.randint(4, 64, (1, 30))
    wrong = torch.randint(4, 64, (1, 3))
    cache = SlackCache()
    with torch.inference_mode():
        model(ids[:, :12], past_key_values=cache, use_cache=True)
        # Each round reads three wrong tokens, forgets them, and reads three right ones; the tiny
        # Gemma's window of 8 has long filled by then.
        for start in range(12, 30, 3):
            model(wrong, past_key_values=cache, use_cache=True)
            drop_last(cache, 3)
            step = model(ids[:, start : start + 3], past_key_values=cache, use_cache=True).logits
            full = model(ids[:, : start + 3], use_cache=False).logits[:, start : start + 3]
            torch.testing.assert_close(step, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_class", [SlackCache, DynamicCache])
def test_dropping_more_than_there_is_is_refused(cache_class: type) -> None:
    cache = cache_class()
    cache.update(*random_states(4), 0)
    drop_last(cache, 2)
    assert cache.get_seq_length() == 2
    with pytest.raises(ValueError, match="Cannot drop 3 tokens from a cache that holds 2"):
        drop_last(cache, 3)
