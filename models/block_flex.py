"""The attention of draft blocks by flex_attention: one kernel for all blocks of a batch.

Queries are the slots of all blocks, keys the context of all rows and behind it the slots. Which
entry a slot sees (`seen_by_blocks`) is a function of two indices, from which torch makes a list of
the tiles that have to be computed; the others are skipped. On a CPU flex_attention has a forward
pass without gradients only, uncompiled here, for comparison.

Both sides are padded to a multiple of 128: a slot behind the end sees the last block's entries and
gets no gradient, an entry behind the end is seen by nobody.

Not measured: no CUDA device has run it yet. tests/test_block_flex.py compares the mask with the
definition and its CPU forward with the other paths, and on a GPU (marker `gpu`) values and
gradients.

Axes: blocks, slots (of a block), context, heads, kv_heads, head_dim, entries (context and slots).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftsmith.models.block_anchors import BlockPlan
from draftsmith.models.ttt_flex import BLOCK, WIDE_HEAD_DIM, WIDE_OPTIONS, compiled


def seen_by_blocks(
    plan: BlockPlan, slots: int, window: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Which entry a slot sees, for any two index tensors that broadcast.

    Args:
        plan: Of the batch.
        slots: Of a block.
        window: Of a sliding layer, in positions; None: full attention.

    Returns:
        A function of the slot (block * slots + its place) and the entry (an index of
        `plan.context`, or the context's length + a slot) that gives a bool tensor, True: seen.
    """
    context, blocks = len(plan.context), len(plan.anchors)
    anchors, row_starts = plan.positions, plan.row_starts()

    def seen(slot: Tensor, entry: Tensor) -> Tensor:
        block = (slot // slots).clamp_max(blocks - 1)
        position = entry - row_starts[block]  # Of an entry of the context, within its row.
        before = (entry < context) & (position >= 0) & (position < anchors[block])
        own_slot = entry - context
        own = (own_slot >= 0) & (own_slot // slots == block)
        if window is not None:
            place, other = slot - block * slots, own_slot - block * slots
            before = before & (position > anchors[block] + place - window)
            own = own & (other <= place) & (other > place - window)
        return before | own

    return seen


def block_mask(plan: BlockPlan, slots: int, window: int | None) -> BlockMask:
    """The tiles that have to be computed, of queries and entries padded to multiples of BLOCK."""
    seen = seen_by_blocks(plan, slots, window)
    queries = len(plan.anchors) * slots

    def mask(_batch: Tensor, _head: Tensor, slot: Tensor, entry: Tensor) -> Tensor:
        return seen(slot, entry)

    return create_block_mask(
        mask,
        None,
        None,
        _padded(queries),
        _padded(len(plan.context) + queries),
        device=str(plan.anchors.device),
    )


def _padded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


def flex_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    plan: BlockPlan,
    window: int | None = None,
) -> Tensor:
    """Arguments and result as in `block_attention`."""
    slots, head_dim = query.shape[1], query.shape[-1]
    name = f"flex {slots} {window}"
    if name not in plan.masks:  # The same in every layer.
        plan.masks[name] = block_mask(plan, slots, window)

    def by_head(*parts: Tensor) -> Tensor:
        """[..., heads, head_dim] parts -> [1, heads, padded, head_dim]."""
        joined = torch.cat(parts).transpose(0, 1)[None]
        return F.pad(joined, (0, 0, 0, _padded(joined.shape[2]) - joined.shape[2]))

    attend: Any = compiled() if query.device.type == "cuda" else flex_attention
    attended = attend(
        by_head(query.flatten(0, 1)),
        by_head(context_key, key.flatten(0, 1)),
        by_head(context_value, value.flatten(0, 1)),
        block_mask=plan.masks[name],
        enable_gqa=True,
        kernel_options=WIDE_OPTIONS if head_dim > WIDE_HEAD_DIM else None,
    )
    rows = query.shape[0] * slots
    return attended[0, :, :rows].transpose(0, 1).unflatten(0, (-1, slots))
