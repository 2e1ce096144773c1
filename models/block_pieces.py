"""Trains on the blocks of a batch in pieces, so that memory does not grow with their number.

Blocks share the context's keys and values and nothing else, and the weights of the loss are known
beforehand. So the gradient of a piece is taken right behind its forward pass, its activations are
forgotten, and only sums are kept: towards the parameters, and towards the context's entries, from
where the ordinary backward pass goes on.

A piece also stays nearer to the cache than the whole (docs/training_speed.md).

Check: tests/test_block_pieces.py compares with the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.models.block_anchors import BlockPlan
from draftsmith.models.known_gradients import with_known_gradients
from draftsmith.models.protocols import TrainOutput

PIECE_SLOTS = {"cpu": 192}
"""Slots of a piece: more of them keep more activations, fewer add up gradients more often (measured
in docs/training_speed.md)."""
PIECE_SLOTS_ACCELERATOR = 2**13
"""512 blocks of 16 in one piece (our choice): adding up gradients is dear there."""

PieceLoss = Callable[[BlockPlan, Sequence[Tensor]], TrainOutput]
"""Loss and sums of some blocks, given the context's entries."""


def train_in_pieces(
    plan: BlockPlan,
    shared: Sequence[Tensor],
    parameters: Sequence[Tensor],
    evaluate: PieceLoss,
    *,
    slots: int,
) -> TrainOutput:
    """Sums `evaluate` over the pieces of a plan.

    Args:
        plan: Of the batch.
        shared: The context's entries, in the graph.
        parameters: What `evaluate` may read besides.
        evaluate: See `PieceLoss`.
        slots: Of a block.
    """
    device = plan.anchors.device.type
    pieces = plan.pieces(PIECE_SLOTS.get(device, PIECE_SLOTS_ACCELERATOR), slots)
    if len(pieces) == 1:
        return evaluate(plan, shared)
    if not torch.is_grad_enabled():
        return _sum([evaluate(piece, shared) for piece in pieces])
    leaves = [one.detach().requires_grad_(one.requires_grad) for one in shared]
    outer = [one for one in (*shared, *parameters) if one.requires_grad]
    inner = [one for one in (*leaves, *parameters) if one.requires_grad]
    # Made before the pieces: in the gaps between activations they would leave holes in the heap.
    # In float32 at least: bf16 would lose what a further piece adds.
    totals = [
        torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in inner
    ]
    read = set()
    outputs = []
    for piece in pieces:
        output = evaluate(piece, leaves)
        with torch.autocast(device, enabled=False):  # As in every backward pass.
            found = torch.autograd.grad(output.loss_sum, inner, allow_unused=True)
        outputs.append(TrainOutput(output.loss_sum.detach(), output.sums))
        for index, gradient in enumerate(found):
            if gradient is not None:
                totals[index].add_(gradient)
                read.add(index)
        del output, found, gradient  # Not kept while the next piece is at its peak.
    # What no piece reads has its gradient through `shared`, or none.
    summed, order = _sum(outputs), sorted(read)
    loss = with_known_gradients(
        summed.loss_sum, [totals[index] for index in order], [outer[index] for index in order]
    )
    return TrainOutput(loss, summed.sums)


def _sum(outputs: Sequence[TrainOutput]) -> TrainOutput:
    loss = torch.stack([output.loss_sum for output in outputs]).sum()
    names = outputs[0].sums
    sums = {name: torch.stack([output.sums[name] for output in outputs]).sum(0) for name in names}
    return TrainOutput(loss, sums)
