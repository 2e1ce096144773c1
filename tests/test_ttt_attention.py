"""The attention of the training-time test against a loop over slots, on each of its paths."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models import ttt_attention as module
from draftsmith.models import ttt_flex
from draftsmith.models.ttt_attention import (
    choose_path,
    dense_attention,
    flex_attention,
    fused_attention,
    has_fused_attention,
    ttt_attention,
)

BATCH, HEADS, KV_HEADS, SEQ, HEAD_DIM = 2, 4, 2, 6, 8
SLOTS = [0, 1, 3, 4, 6, 8, 11]
"""Flat slots: 0, 1, 3, 4 of the first row and 0, 2, 5 of the second."""
Inputs = dict[str, Any]


def make_inputs(
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    head_dim: int = HEAD_DIM,
) -> Inputs:
    """Random queries, keys and values for a step with `steps` own entries per slot."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    rows = len(SLOTS)
    return {
        "query": draw(rows, HEADS, head_dim),
        "block_key": draw(BATCH, KV_HEADS, SEQ, head_dim),
        "block_value": draw(BATCH, KV_HEADS, SEQ, head_dim),
        "chain_keys": [draw(rows, KV_HEADS, head_dim) for _ in range(steps)],
        "chain_values": [draw(rows, KV_HEADS, head_dim) for _ in range(steps)],
    }


def leaves(inputs: Inputs) -> list[Tensor]:
    """All tensors that take a gradient."""
    first = [inputs["query"], inputs["block_key"], inputs["block_value"]]
    return [*first, *inputs["chain_keys"], *inputs["chain_values"]]


def attention_by_slot(inputs: Inputs) -> Tensor:
    """The definition as a loop: one softmax over keys 0..t of the row and the own entries."""
    out = []
    head_dim = inputs["query"].shape[-1]
    for row, slot in enumerate(SLOTS):
        batch, t = divmod(slot, SEQ)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            keys = [inputs["block_key"][batch, kv, s] for s in range(t + 1)]
            values = [inputs["block_value"][batch, kv, s] for s in range(t + 1)]
            keys += [own[row, kv] for own in inputs["chain_keys"]]
            values += [own[row, kv] for own in inputs["chain_values"]]
            scores = torch.stack(keys) @ inputs["query"][row, head] * head_dim**-0.5
            out.append(scores.softmax(0) @ torch.stack(values))
    return torch.stack(out).view(len(SLOTS), HEADS, head_dim)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 2, 4])
def test_rows_in_pieces_give_what_whole_rows_give(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(2, dtype=dtype)
    slots = torch.tensor(SLOTS)
    whole = fused_attention(**inputs, slots=slots)
    monkeypatch.setattr(module, "CPU_PIECE", piece)
    assert len(module._cpu_pieces(inputs["block_key"])) == -(-SEQ // piece)
    pieces = fused_attention(**inputs, slots=slots)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(pieces, whole, rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients(pieces, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(module, "CPU_PIECES_UP_TO", SEQ - 1)
    assert len(module._cpu_pieces(inputs["block_key"])) == 1


UNCOMPILED = "ignore:flex_attention called without torch.compile"
"""The CPU forward is here for comparison only."""


@pytest.mark.filterwarnings(UNCOMPILED)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("block", [128, 4])
def test_the_flex_forward_equals_the_definition(
    block: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt_flex, "BLOCK", block)  # Rows of 6 slots are padded to 128, and to 8.
    inputs = make_inputs(steps)
    slots = torch.tensor(SLOTS)
    with torch.no_grad():
        found = flex_attention(**inputs, slots=slots)
        torch.testing.assert_close(found, attention_by_slot(inputs), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, dense_attention(**inputs, slots=slots))


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


@pytest.mark.filterwarnings(UNCOMPILED)
def test_a_path_can_be_chosen_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(1, seed=1)
    slots = torch.tensor(SLOTS)
    module._log_choice.cache_clear()
    with caplog.at_level("INFO", logger="draftsmith.models.ttt_attention"), torch.no_grad():
        for _ in range(2):
            by_itself = ttt_attention(**inputs, slots=slots)
        chosen = {path: ttt_attention(**inputs, slots=slots, path=path) for path in module.PATHS}
        assert torch.equal(by_itself, fused_attention(**inputs, slots=slots))
        assert torch.equal(chosen["dense"], dense_attention(**inputs, slots=slots))
        assert torch.equal(chosen["flex"], flex_attention(**inputs, slots=slots))
    assert [record.getMessage() for record in caplog.records] == [
        "Training-time test uses fused attention on cpu.",
        "Training-time test uses dense attention on cpu.",
        "Training-time test uses flex attention on cpu.",
    ]
    with pytest.raises(ValueError, match="path is 'flash', expected one of dense, fused, flex"):
        ttt_attention(**inputs, slots=slots, path="flash")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "expected"),
    [
        ("cpu", torch.float32, 64, None, "fused"),
        ("cpu", torch.float64, 20, None, "fused"),
        ("cuda", torch.bfloat16, 128, (8, 0), "fused"),
        ("cuda", torch.float32, 256, (8, 0), "fused"),
        ("cuda", torch.bfloat16, 512, (9, 0), "flex"),
        ("cuda", torch.bfloat16, 20, (9, 0), "flex"),
        ("cuda", torch.bfloat16, 512, (7, 5), "dense"),
        ("cuda", torch.float64, 64, (9, 0), "dense"),
        ("cuda", torch.float32, 12, (9, 0), "dense"),
        ("mps", torch.float32, 64, None, "dense"),
    ],
)
def test_the_path_follows_device_dtype_and_width(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int] | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(ttt_flex.importlib.util, "find_spec", lambda name: name)  # Has triton.
    query: Any = SimpleNamespace(
        device=SimpleNamespace(type=device), dtype=dtype, shape=(7, HEADS, head_dim)
    )
    assert choose_path(query) == expected
    assert has_fused_attention(query) == (expected == "fused")


def assert_cuda_equals_the_definition(
    path: Callable[..., Tensor], dtype: torch.dtype, head_dim: int
) -> None:
    """Values and gradients."""
    exact = make_inputs(3, dtype=torch.float64, head_dim=head_dim)
    inputs = make_inputs(3, dtype=dtype, device="cuda", head_dim=head_dim)
    expected = attention_by_slot(exact)
    found = path(**inputs, slots=torch.tensor(SLOTS, device="cuda"))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    pairs = zip(gradients(found, inputs), gradients(expected, exact), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.double().cpu(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_cuda_attention_equals_the_definition(dtype: torch.dtype) -> None:
    assert_cuda_equals_the_definition(fused_attention, dtype, HEAD_DIM)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [20, 64, 320, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_cuda_attention_equals_the_definition(dtype: torch.dtype, head_dim: int) -> None:
    assert_cuda_equals_the_definition(flex_attention, dtype, head_dim)
