"""The attention of the training-time test against a loop over slots, on both of its paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.ttt_attention import (
    dense_attention,
    fused_attention,
    has_fused_attention,
    ttt_attention,
)

BATCH, HEADS, KV_HEADS, SEQ, HEAD_DIM = 2, 4, 2, 6, 8
SLOTS = [0, 1, 3, 4, 6, 8, 11]
"""Flat slots: 0, 1, 3, 4 of the first row and 0, 2, 5 of the second."""
Inputs = dict[str, Any]


def make_inputs(
    steps: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Inputs:
    """Random queries, keys and values for a step with `steps` own entries per slot."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    rows = len(SLOTS)
    return {
        "query": draw(rows, HEADS, HEAD_DIM),
        "block_key": draw(BATCH, KV_HEADS, SEQ, HEAD_DIM),
        "block_value": draw(BATCH, KV_HEADS, SEQ, HEAD_DIM),
        "chain_keys": [draw(rows, KV_HEADS, HEAD_DIM) for _ in range(steps)],
        "chain_values": [draw(rows, KV_HEADS, HEAD_DIM) for _ in range(steps)],
    }


def leaves(inputs: Inputs) -> list[Tensor]:
    """All tensors that take a gradient."""
    first = [inputs["query"], inputs["block_key"], inputs["block_value"]]
    return [*first, *inputs["chain_keys"], *inputs["chain_values"]]


def attention_by_slot(inputs: Inputs) -> Tensor:
    """The definition as a loop: one softmax over keys 0..t of the row and the own entries."""
    out = []
    for row, slot in enumerate(SLOTS):
        batch, t = divmod(slot, SEQ)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            keys = [inputs["block_key"][batch, kv, s] for s in range(t + 1)]
            values = [inputs["block_value"][batch, kv, s] for s in range(t + 1)]
            keys += [own[row, kv] for own in inputs["chain_keys"]]
            values += [own[row, kv] for own in inputs["chain_values"]]
            scores = torch.stack(keys) @ inputs["query"][row, head] * HEAD_DIM**-0.5
            out.append(scores.softmax(0) @ torch.stack(values))
    return torch.stack(out).view(len(SLOTS), HEADS, HEAD_DIM)


def gradients(out: Tensor, inputs: Inputs) -> list[Tensor]:
    """Gradients of a fixed weighted sum of the output."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return list(torch.autograd.grad((out.flatten() * weights).sum(), leaves(inputs)))


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("path", [dense_attention, fused_attention])
def test_values_and_gradients_equal_a_loop_over_slots(
    path: Callable[..., Tensor], steps: int
) -> None:
    inputs = make_inputs(steps)
    expected = attention_by_slot(inputs)
    found = path(**inputs, slots=torch.tensor(SLOTS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_fused_gradients_pass_gradcheck_in_float64() -> None:
    inputs = make_inputs(2, dtype=torch.float64)
    slots = torch.tensor(SLOTS)

    def run(query: Tensor, key: Tensor, value: Tensor, *chain: Tensor) -> Tensor:
        return fused_attention(query, key, value, chain[:2], chain[2:], slots=slots)

    assert torch.autograd.gradcheck(run, leaves(inputs))


def test_a_slot_sees_its_own_past_and_its_own_chain_only() -> None:
    inputs = make_inputs(1)
    row = SLOTS.index(3)
    for path in (dense_attention, fused_attention):
        out = path(**inputs, slots=torch.tensor(SLOTS))[row]
        values = [inputs["block_value"], inputs["chain_values"][0]]
        block, own = torch.autograd.grad(out.abs().sum(), values)
        seen = [[s for s in range(SEQ) if bool(block[b, :, s].any())] for b in range(BATCH)]
        assert seen == [[0, 1, 2, 3], []]
        assert [r for r in range(len(SLOTS)) if bool(own[r].any())] == [row]


def test_keys_behind_every_query_get_exactly_no_gradient() -> None:
    inputs = make_inputs(2)
    out = fused_attention(**inputs, slots=torch.tensor(SLOTS))
    _, d_key, d_value, *_ = gradients(out, inputs)
    assert not d_key[0, :, 5].any()
    assert not d_value[0, :, 5].any()
    assert d_key[1, :, 5].any()


def test_no_query_at_all_gives_zero_gradients() -> None:
    inputs = make_inputs(1)
    for name in ("chain_keys", "chain_values"):
        inputs[name] = [inputs[name][0].detach()[:0].requires_grad_()]
    inputs["query"] = inputs["query"].detach()[:0].requires_grad_()
    out = fused_attention(**inputs, slots=torch.tensor([], dtype=torch.int64))
    assert out.shape == (0, HEADS, HEAD_DIM)
    assert not any(gradient.any() for gradient in gradients(out, inputs))


def test_half_precision_stays_close_to_float32() -> None:
    exact = attention_by_slot(make_inputs(3, dtype=torch.float64))
    inputs = make_inputs(3, dtype=torch.bfloat16)
    found = fused_attention(**inputs, slots=torch.tensor(SLOTS))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0.03, atol=0.03)


def test_the_path_follows_the_device_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert has_fused_attention(torch.zeros(1, 1, 8))
    assert not has_fused_attention(torch.zeros(1, 1, 8, device="meta"))
    inputs = make_inputs(0, seed=1)
    with caplog.at_level("INFO", logger="draftsmith.models.ttt_attention"):
        from draftsmith.models import ttt_attention as module

        module._log_choice.cache_clear()
        for _ in range(2):
            out = ttt_attention(**inputs, slots=torch.tensor(SLOTS))
    assert torch.equal(out, fused_attention(**inputs, slots=torch.tensor(SLOTS)))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["Training-time test uses fused_attention on cpu."]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_cuda_attention_equals_the_definition(dtype: torch.dtype) -> None:
    exact = make_inputs(3, dtype=torch.float64)
    inputs = make_inputs(3, dtype=dtype, device="cuda")
    expected = attention_by_slot(exact)
    found = fused_attention(**inputs, slots=torch.tensor(SLOTS, device="cuda"))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    pairs = zip(gradients(found, inputs), gradients(expected, exact), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.double().cpu(), other, rtol=tolerance, atol=tolerance)
