"""RMS norm, and the norm and rotation of queries and keys, with backward passes written by hand.

The values are those of transformers' `LlamaRMSNorm` and of half-split rotary embeddings. Autograd
runs about twenty elementwise passes over a tensor to get back through both, and keeps four copies
of it; by hand it is eight and one (docs/training_speed.md). Sums over rows are products of a vector
and a matrix.

    norm      y = w * n,   n = x r,   r = (mean x^2 + eps)^(-1/2)
    backward  dw = sum over rows of g n,   dx = r g w - x r^3 <g w, x> / width
    rotation  y = m cos + swap(m) sin,   swap([a ; b]) = [-b ; a];   dm = g cos - swap(g sin)

Check: tests/test_lean_norms.py compares with transformers and by gradcheck.

Axes: rows (any leading ones), width; for the rotation heads and head_dim too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]
"""cos and sin, [rows, 1, head_dim] each."""


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., width] -> [..., width] normed, times `weight` [width]."""
    found: Tensor = _RmsNorm.apply(states, weight, eps)
    return found


def rotated(states: Tensor, rope: Rope, weight: Tensor | None, eps: float) -> Tensor:
    """[rows, heads, head_dim] -> the same, normed where a weight [head_dim] is given, and rotated.

    Args:
        states: Queries or keys.
        rope: Of the rows.
        weight: Of the norm; None: there is no norm.
        eps: Of the norm.
    """
    found: Tensor = _Rotated.apply(states, *rope, weight, eps)
    return found


def _wide(states: Tensor) -> Tensor:
    """In float32 at least, as transformers' norm computes."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _reciprocal_norms(states: Tensor, eps: float) -> Tensor:
    """[..., 1] r of [..., width]."""
    norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return norms.square_().div_(states.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    gradient: Tensor, states: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [rows, width] and w [width]."""
    product = gradient * states
    d_weight = (scale.T @ product).squeeze(0)
    projection = (product @ weight)[:, None]
    d_states = (gradient * weight).mul_(scale)
    share = projection.mul_(scale.pow(3)).div_(states.shape[-1])
    return d_states.addcmul_(states, share, value=-1.0), d_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(states)
        scale = _reciprocal_norms(wide, eps)
        ctx.save_for_backward(states, weight, scale)
        return weight * (wide * scale).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, scale = ctx.saved_tensors
        wide = _wide(states).flatten(0, -2)
        gradient = grad_outputs[0].flatten(0, -2).to(wide.dtype)
        d_states, d_weight = _norm_backward(
            gradient, wide, weight.to(wide.dtype), scale.flatten(0, -2)
        )
        return d_states.view(states.shape).to(states.dtype), d_weight.to(weight.dtype), None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        wide, scale = _wide(states), None
        if weight is not None:
            scale = _reciprocal_norms(wide, eps)
            wide = weight * (wide * scale).to(states.dtype)
        ctx.save_for_backward(states, cos, sin, weight, scale)
        return _turn(wide, cos, sin, 1.0).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        states, cos, sin, weight, scale = ctx.saved_tensors
        wide = _wide(states).flatten(0, -2)
        # The tables turn by an angle; the transposed turn is that by its opposite.
        gradient = _turn(grad_outputs[0].to(wide.dtype), cos, sin, -1.0)
        if weight is None:
            return gradient.to(states.dtype), None, None, None, None
        d_states, d_weight = _norm_backward(
            gradient.flatten(0, -2), wide, weight.to(wide.dtype), scale.flatten(0, -2)
        )
        d_states = d_states.view(states.shape).to(states.dtype)
        return d_states, None, None, d_weight.to(weight.dtype), None


def _turn(states: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """[rows, heads, head_dim] turned by the tables' angles, or by their opposite (direction -1).

    Both halves of a table are equal, as half-split rotary embeddings have them.
    """
    half = states.shape[-1] // 2
    turned = states * cos
    first, second = states[..., :half], states[..., half:]
    turned[..., :half].addcmul_(second, sin[..., :half], value=-direction)
    turned[..., half:].addcmul_(first, sin[..., half:], value=direction)
    return turned
