"""Which blocks a batch is trained on, what each slot predicts, and what it may look at.

A *block* starts at an anchor: a position a whose token the target wrote, as it did the next one.
While drafting the anchor is the last committed token; context are the positions before it.

    step  j = 0, 1, ...     predicts token a+1+j, taught by the target's logits at place a+j
    slot  j                 with `sample_from_anchor` (DSpark): the anchor's slot predicts too
    slot  j + 1             without (DFlash): slot k predicts the token of its own position a+k

While training anchors are drawn from all candidates of a batch, so that the work of a step does not
depend on the length of its rows; a validation takes every candidate. A block that runs over the end
of its row has slots there, as it has while drafting, but they are not supervised. With `cumulative`
supervision (DSpark) the first unsupervised label ends a block, without (DFlash) later slots still
count.

Differs from the published code (SpecForge a6b6b02, DeepSpec afdfa7c): a number of anchors per
batch, not per row, and no empty blocks where a row has fewer.

Check: tests/test_dflash.py and tests/test_dspark.py write the pairs out on readable ids.

Axes: batch, seq, blocks, steps, context (positions that some block sees). Flat indices are
batch_index * seq + position.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.protocols import ObjectiveOutput, TrainBatch
from draftsmith.models.simulated_rounds import simulated_rounds

GROUP_BLOCKS = 8
"""Neighbouring blocks that attend together, over the context up to their last anchor (our
choice): larger groups compute more scores that are masked, smaller ones more small products."""


@dataclass(frozen=True)
class BlockGroup:
    """Neighbouring blocks of one row."""

    blocks: slice
    """In the order of the plan."""
    row_start: int
    """Where position 0 of their row is in `BlockPlan.context`."""
    first_anchor: int
    last_anchor: int


@dataclass
class BlockPlan:
    """Index tensors for one batch; blocks are sorted by row, then by anchor."""

    anchors: Tensor
    """[blocks] flat positions."""
    positions: Tensor
    """[blocks] the same within the row."""
    context: Tensor
    """[context] flat positions before the last anchor of each row, row after row."""
    groups: list[BlockGroup]
    places: Tensor
    """[blocks, steps] flat position whose final hidden state teaches; clamped to the row's end."""
    labels: Tensor
    """[blocks, steps] the token that the step predicts, -1 where the text has ended."""
    supervised: Tensor
    """[blocks, steps] bool."""
    masks: dict[str, Any] = field(default_factory=dict)
    """What an attention derived from the plan, for all layers."""

    def row_starts(self) -> Tensor:
        """[blocks] where position 0 of each block's row is in `context`."""
        counts = [group.blocks.stop - group.blocks.start for group in self.groups]
        starts = torch.tensor([group.row_start for group in self.groups], dtype=torch.long)
        starts = starts.repeat_interleave(torch.tensor(counts, dtype=torch.long))
        return starts.to(self.anchors.device)

    def pieces(self, num_slots: int, slots: int) -> list[BlockPlan]:
        """The plan in runs of whole groups; context and row starts stay those of the whole.

        Args:
            num_slots: Slots of a piece, to the nearest whole group.
            slots: Of a block.
        """
        found: list[list[BlockGroup]] = [[]]
        count = 0
        for group in self.groups:
            own = (group.blocks.stop - group.blocks.start) * slots
            if found[-1] and count + own / 2 > num_slots:
                found.append([])
                count = 0
            found[-1].append(group)
            count += own
        return [self] if len(found) == 1 else [self._part(groups) for groups in found]

    def _part(self, groups: list[BlockGroup]) -> BlockPlan:
        first = groups[0].blocks.start
        blocks = slice(first, groups[-1].blocks.stop)
        moved = [
            replace(group, blocks=slice(group.blocks.start - first, group.blocks.stop - first))
            for group in groups
        ]
        names = ("anchors", "positions", "places", "labels", "supervised")
        own = {name: getattr(self, name)[blocks] for name in names}
        return BlockPlan(**own, context=self.context, groups=moved)


def anchor_candidates(batch: TrainBatch) -> Tensor:
    """[candidates] flat positions, ascending: the target wrote this token and the next one."""
    written = batch.supervised_mask & batch.keep_mask
    candidates = torch.zeros_like(written)
    candidates[:, :-1] = written[:, :-1] & written[:, 1:]
    return candidates.flatten().nonzero().squeeze(-1)


def draw_anchors(candidates: Tensor, num_anchors: int) -> Tensor:
    """[blocks] `num_anchors` of the candidates, ascending; all of them where there are fewer.

    Draws without replacement from torch's generator of the CPU, which the training loop seeds for
    every micro-batch.

    Args:
        candidates: [candidates] flat positions, ascending.
        num_anchors: Blocks of a batch.
    """
    count = len(candidates)
    if count <= num_anchors:
        return candidates
    chosen = torch.randperm(count)[:num_anchors].sort().values
    return candidates[chosen.to(candidates.device)]


def plan_blocks(
    batch: TrainBatch, anchors: Tensor, *, num_steps: int, cumulative: bool
) -> BlockPlan:
    """Lays out the blocks of a batch.

    Args:
        batch: Of which tokens and masks are read.
        anchors: [blocks] flat positions, ascending.
        num_steps: Tokens that a block predicts.
        cumulative: The first unsupervised label ends a block.
    """
    seq = batch.input_ids.shape[1]
    positions = anchors % seq
    steps = torch.arange(num_steps, device=anchors.device)
    label_positions = positions[:, None] + 1 + steps  # [blocks, steps]
    within = label_positions < seq
    flat = (anchors[:, None] + 1 + steps).where(within, anchors[:, None])
    real = within & batch.keep_mask.flatten()[flat]
    supervised = real & batch.supervised_mask.flatten()[flat]
    if cumulative:
        supervised = supervised.cumprod(-1).bool()
    context, groups = _group(anchors, seq)
    return BlockPlan(
        anchors=anchors,
        positions=positions,
        context=context,
        groups=groups,
        places=(anchors[:, None] + steps).where(within, anchors[:, None]),
        labels=batch.input_ids.flatten()[flat].where(real, -1),
        supervised=supervised,
    )


def _group(anchors: Tensor, seq: int) -> tuple[Tensor, list[BlockGroup]]:
    """The context that blocks see, and the groups in which they look at it."""
    flat = anchors.tolist()
    groups: list[BlockGroup] = []
    context: list[Tensor] = []
    row_start, first = 0, 0
    while first < len(flat):
        row = flat[first] // seq
        stop = first
        while stop < len(flat) and flat[stop] // seq == row:
            stop += 1
        for start in range(first, stop, GROUP_BLOCKS):
            blocks = slice(start, min(start + GROUP_BLOCKS, stop))
            ends = flat[blocks.start] - row * seq, flat[blocks.stop - 1] - row * seq
            groups.append(BlockGroup(blocks, row_start, *ends))
        length = flat[stop - 1] - row * seq
        context.append(torch.arange(row * seq, row * seq + length, device=anchors.device))
        row_start += length
        first = stop
    return torch.cat(context) if context else anchors.new_empty(0), groups


def by_step(plan: BlockPlan, values: Tensor) -> Tensor:
    """[rows] of the supervised predictions -> [blocks, steps] float64, 0 elsewhere."""
    spread = torch.zeros_like(plan.supervised, dtype=torch.float64)
    spread[plan.supervised] = values.double()
    return spread


def accepted_by_place(batch: TrainBatch, plan: BlockPlan, output: ObjectiveOutput) -> Tensor:
    """[batch * seq] right leading predictions of the block that is anchored at each position."""
    found = torch.zeros(batch.input_ids.numel(), dtype=torch.float64, device=plan.anchors.device)
    found[plan.anchors] = by_step(plan, output.correct[0]).cumprod(1).sum(1)
    return found


def rounds_of(batch: TrainBatch, accepted: Tensor) -> dict[str, Tensor]:
    """The sums `rounds` and `round_tokens` of a batch (models/simulated_rounds.py).

    Args:
        batch: Of which every candidate was an anchor.
        accepted: [batch * seq] of `accepted_by_place`, added over all of them.
    """
    starts = torch.zeros(batch.input_ids.numel(), dtype=torch.bool, device=accepted.device)
    starts[anchor_candidates(batch)] = True
    starts = starts.view(batch.input_ids.shape)
    # The walk passes over the first place of an answer, from where prefill writes its first token;
    # that token is the first anchor.
    starts[:, :-1] |= starts[:, 1:].clone()
    return simulated_rounds(starts, accepted.view(starts.shape))


def block_sums(plan: BlockPlan, output: ObjectiveOutput, weights: Tensor) -> dict[str, Tensor]:
    """The sums of `TrainOutput`: per step, and joint along each block.

    Args:
        plan: Of the batch.
        output: Of one step, [1, rows]: a row per supervised prediction, block after block.
        weights: [steps] of the loss.
    """
    assert output.losses is not None, "objectives report the loss of each prediction"
    taught = by_step(plan, output.in_vocabulary)
    correct = by_step(plan, output.correct[0])
    acceptance = by_step(plan, output.acceptance[0])
    return {
        "loss": (by_step(plan, output.losses[0]) * taught * weights.double()).sum(0),
        "supervised": plan.supervised.sum(0).double(),
        "in_vocabulary": taught.sum(0),
        "correct": correct.sum(0),
        "acceptance": acceptance.sum(0),
        "chains": plan.supervised[:, 0].sum().double(),
        # Zero where a step is not supervised, so that the products end there.
        "greedy_joint": correct.cumprod(1).sum(0),
        "sampled_joint": acceptance.cumprod(1).sum(0),
    }
