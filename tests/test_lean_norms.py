"""Norm and rotation by hand: the values of transformers, gradients by gradcheck and by autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from draftsmith.models.lean_norms import Rope, rms_norm, rotated

EPS = 1e-3
"""Large, so that an error in its place is seen."""


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def rope(rows: int, head_dim: int, dtype: torch.dtype = torch.float64) -> Rope:
    angles = drawn(rows, 1, head_dim // 2, dtype=dtype)
    table = torch.cat([angles, angles], dim=-1)
    return table.cos(), table.sin()


def norm_of(weight: Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), EPS).to(weight.dtype)
    norm.weight.data = weight
    return norm


def slow_rotation(states: Tensor, tables: Rope, weight: Tensor | None) -> Tensor:
    if weight is not None:
        states = norm_of(weight)(states)
    return states * tables[0] + rotate_half(states) * tables[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    weight = 1.0 + 0.1 * drawn(8).to(dtype)
    states = drawn(5, 3, 8).to(dtype)
    tables = tuple(table.to(dtype) for table in rope(5, 8))
    torch.testing.assert_close(rms_norm(states, weight, EPS), norm_of(weight)(states))
    for chosen in (weight, None):
        found = rotated(states, (tables[0], tables[1]), chosen, EPS)
        wanted = slow_rotation(states, (tables[0], tables[1]), chosen)
        assert found.dtype == dtype
        # In half precision both products are rounded there, one here.
        tolerance = 1e-6 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_pass_gradcheck(normed: bool) -> None:
    states, tables = drawn(4, 3, 6).requires_grad_(), rope(4, 6)
    weight = (1.0 + 0.3 * drawn(6)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (states, weight))
    if normed:
        assert torch.autograd.gradcheck(lambda x, w: rotated(x, tables, w, EPS), (states, weight))
    else:
        assert torch.autograd.gradcheck(lambda x: rotated(x, tables, None, EPS), (states,))


def test_gradients_in_half_precision_are_those_of_autograd() -> None:
    weight = (1.0 + 0.1 * drawn(8)).bfloat16().requires_grad_()
    states = drawn(16, 2, 8).bfloat16().requires_grad_()
    upstream = drawn(16, 2, 8).flip(0).bfloat16()

    def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(states, weight), (states, weight), upstream)

    norm = norm_of(weight.detach())
    wanted = torch.autograd.grad(norm(states), (states, norm.weight), upstream)
    for one, other in zip(gradients(lambda x, w: rms_norm(x, w, EPS)), wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
