"""A number whose gradients are known before anybody asks for them.

Where all weights of a loss are known beforehand, its gradients can be computed while the forward
pass visits a part, and the part be forgotten. Used by the chunks of an objective
(train/objective_chunks.py) and by the pieces of a block draft's training (models/block_pieces.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        needed = ctx.needs_input_grad[2:]
        known = zip(ctx.saved_tensors, ctx.dtypes, needed, strict=True)
        # None where nobody asks for it: it was not computed either.
        found = [
            (gradient * scale).to(dtype) if is_needed else None
            for gradient, dtype, is_needed in known
        ]
        return None, None, *found


def with_known_gradients(
    value: Tensor, gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]
) -> Tensor:
    """`value` in a graph: its gradient towards `tensors[i]` is `gradients[i]`.

    Args:
        value: [] the number.
        gradients: One per tensor, of its shape; None where it requires none.
        tensors: What the number was computed from.
    """
    found: Tensor = _KnownGradients.apply(value, tuple(gradients), *tensors)
    return found
