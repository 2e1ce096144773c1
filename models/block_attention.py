"""Attention of a draft block: the context before its anchor and all slots of its own.

Papers: DFlash (arXiv 2602.06036) and DSpark (DeepSpec): keys and values of every layer come from
[context features ; block states]. A slot sees the context strictly before the anchor and every slot
of its own block, those behind it too; never another block. In a sliding layer a slot at position p
sees positions p - window + 1 .. p only, so that it is causal inside the block (as engines read
`sliding_attention`).

Three paths, equal up to rounding:

    dense    written from the definition, the scores of all slots with all context in memory.
    grouped  neighbouring blocks of a row together (models/block_anchors.py), over the context up to
             their last anchor and their own slots, with one softmax over both parts. No score is
             computed between rows, between blocks, or, but for the spread of a group, behind an
             anchor. Its backward pass is written by hand: autograd would write a gradient as long
             as the whole context for every group.
    flex     flex_attention on CUDA (models/block_flex.py).

Differs from published code: no [all queries, all contexts and slots] scores (their eager and sdpa
variants).

Check: tests/test_dflash.py compares with the definition, all scores in memory.

Axes: blocks, slots (of a block), context, heads, kv_heads, groups (heads of a kv_head), head_dim,
rows (blocks * slots * groups).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.block_anchors import BlockGroup, BlockPlan
from draftsmith.models.block_flex import flex_blocks, seen_by_blocks
from draftsmith.models.ttt_flex import has_flex_attention

logger = logging.getLogger(__name__)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    plan: BlockPlan,
    window: int | None = None,
    path: str | None = None,
) -> Tensor:
    """Attends from all slots of all blocks.

    Args:
        query: [blocks, slots, heads, head_dim], rotated.
        key: [blocks, slots, kv_heads, head_dim], rotated.
        value: The same shape.
        context_key: [context, kv_heads, head_dim] of `plan.context`, rotated.
        context_value: The same shape.
        plan: Of the batch.
        window: Of a sliding layer, in positions; None: full attention.
        path: "dense", "grouped" or "flex"; None: flex where the device compiles it, else grouped.

    Returns:
        [blocks, slots, heads, head_dim].

    Raises:
        ValueError: there is no such path.
    """
    if not plan.groups:
        # Nothing to attend from; every weight stays in the graph, as data-parallel wrappers expect.
        return query + 0.0 * (key.sum() + value.sum() + context_key.sum() + context_value.sum())
    if path is None:
        path = "flex" if has_flex_attention(query) else "grouped"
    if path not in PATHS:
        raise ValueError(f"path is {path!r}, expected one of {', '.join(PATHS)}, or None.")
    _log_choice(path, query.device.type)
    return PATHS[path](query, key, value, context_key, context_value, plan=plan, window=window)


@functools.cache
def _log_choice(path: str, device: str) -> None:
    logger.info("Training of blocks uses %s attention on %s.", path, device)


def dense_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    plan: BlockPlan,
    window: int | None = None,
) -> Tensor:
    """The definition, with all scores in memory. Arguments as in `block_attention`."""
    groups = query.shape[2] // key.shape[2]
    keys, values = (
        torch.cat(parts).repeat_interleave(groups, dim=1)
        for parts in (
            (context_key, key.flatten(0, 1)),
            (context_value, value.flatten(0, 1)),
        )
    )
    rows = query.flatten(0, 1) * query.shape[-1] ** -0.5
    scores = rows.transpose(0, 1) @ keys.permute(1, 2, 0)  # [heads, blocks * slots, entries]
    seen = seen_by_blocks(plan, query.shape[1], window)
    entry = torch.arange(len(keys), device=query.device)
    slot = torch.arange(len(rows), device=query.device)[:, None]
    scores = scores.masked_fill(~seen(slot, entry), float("-inf"))
    # Softmax in float32 at least, as the fused kernels do.
    probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    attended = probs.to(values.dtype) @ values.transpose(0, 1)
    return attended.transpose(0, 1).unflatten(0, query.shape[:2])


def grouped_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    plan: BlockPlan,
    window: int | None = None,
) -> Tensor:
    """Group by group. Arguments as in `block_attention`."""
    with torch.autocast(query.device.type, enabled=False):  # The dtype is that of the entries.
        found: Tensor = _GroupedBlocks.apply(
            query, key, value, context_key, context_value, plan, window
        )
    return found


PATHS: dict[str, Callable[..., Tensor]] = {
    "dense": dense_blocks,
    "grouped": grouped_blocks,
    "flex": flex_blocks,
}


def slots_hidden(slots: int, window: int | None, device: torch.device) -> Tensor | None:
    """[slots, slots] bool, True where a slot (first axis) does not see another; None: it sees all.

    Args:
        slots: Of a block.
        window: Of a sliding layer, in positions; None: full attention.
        device: Where to make it.
    """
    if window is None:
        return None
    place = torch.arange(slots, device=device)
    distance = place[:, None] - place
    return (distance < 0) | (distance >= window)


class _GroupedBlocks(torch.autograd.Function):
    """All groups of a plan; what is kept for the backward pass are their probabilities.

    The products with the own slots are done for all blocks at once, those with the context group by
    group, into one matrix of scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        plan: BlockPlan,
        window: int | None,
    ) -> Tensor:
        rows = _by_head(query, key.shape[2], query.shape[-1] ** -0.5)
        own_scores = rows @ _own(key).mT  # [kv_heads, blocks, rows, slots]
        hidden_slots = slots_hidden(query.shape[1], window, query.device)
        if hidden_slots is not None:
            by_slot = own_scores.unflatten(2, (query.shape[1], -1))
            by_slot.masked_fill_(hidden_slots[:, None], float("-inf"))
        own_probs, attended = torch.empty_like(own_scores), torch.empty_like(rows)
        shapes = _score_shapes(plan, own_scores, window)
        kept = rows.new_empty(sum(map(math.prod, shapes)))
        room = rows.new_empty(max(map(math.prod, shapes), default=0))
        for group, hidden, probs in zip(
            plan.groups,
            _hidden(plan, query.shape[1], window),
            _parts(kept, shapes),
            strict=True,
        ):
            seen, blocks = _seen(group, window), group.blocks
            scores = room[: probs.numel()].view(probs.shape)
            _scores(rows[:, blocks], context_key[seen], own_scores[:, blocks], out=scores)
            by_slot = scores.unflatten(1, (-1, query.shape[1], rows.shape[2] // query.shape[1]))
            count = seen.stop - seen.start
            by_slot[..., count - hidden.shape[-1] : count].masked_fill_(
                hidden[:, :, None], float("-inf")
            )
            _softmax(scores, out=probs)
            _into(attended[:, blocks], probs[..., :count], context_value[seen].transpose(0, 1))
            own_probs[:, blocks] = probs[..., count:].unflatten(1, (-1, rows.shape[2]))
        attended.flatten(0, 1).baddbmm_(own_probs.flatten(0, 1), _own(value).flatten(0, 1))
        ctx.save_for_backward(query, key, value, context_key, context_value, kept)
        ctx.plan, ctx.window = plan, window
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        _by_slot(out, key.shape[2]).copy_(attended.unflatten(2, (query.shape[1], -1)))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context_key, context_value, kept = ctx.saved_tensors
        kv_heads, scale = key.shape[2], query.shape[-1] ** -0.5
        rows, upstream = _by_head(query, kv_heads, scale), _by_head(grad_outputs[0], kv_heads, 1.0)
        d_own = upstream @ _own(value).mT  # [kv_heads, blocks, rows, slots]
        own_probs, d_own_scores = torch.empty_like(d_own), torch.empty_like(d_own)
        d_rows = torch.empty_like(rows)
        d_context_key, d_context_value = (
            torch.zeros_like(one) for one in (context_key, context_value)
        )
        shapes = _score_shapes(ctx.plan, d_own, ctx.window)
        room = rows.new_empty(2, max(map(math.prod, shapes), default=0))
        for group, probs in zip(ctx.plan.groups, _parts(kept, shapes), strict=True):
            seen, blocks = _seen(group, ctx.window), group.blocks
            count = seen.stop - seen.start
            d_probs, d_scores = (one[: probs.numel()].view(probs.shape) for one in room)
            _scores(upstream[:, blocks], context_value[seen], d_own[:, blocks], out=d_probs)
            torch._softmax_backward_data(d_probs, probs, -1, probs.dtype, grad_input=d_scores)
            _into(d_rows[:, blocks], d_scores[..., :count], context_key[seen].transpose(0, 1))
            for total, entries, by_row in (
                (d_context_key, d_scores, rows),
                (d_context_value, probs, upstream),
            ):
                total[seen].transpose(0, 1).baddbmm_(
                    entries[..., :count].mT, by_row[:, blocks].flatten(1, 2)
                )
            own_probs[:, blocks] = probs[..., count:].unflatten(1, (-1, rows.shape[2]))
            d_own_scores[:, blocks] = d_scores[..., count:].unflatten(1, (-1, rows.shape[2]))
        d_rows.flatten(0, 1).baddbmm_(d_own_scores.flatten(0, 1), _own(key).flatten(0, 1))
        d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        torch.mul(d_rows.unflatten(2, (query.shape[1], -1)), scale, out=_by_slot(d_query, kv_heads))
        d_key, d_value = (
            (entries.mT @ by_row).permute(1, 2, 0, 3)
            for entries, by_row in ((d_own_scores, rows), (own_probs, upstream))
        )
        return d_query, d_key, d_value, d_context_key, d_context_value, None, None


def _by_slot(states: Tensor, kv_heads: int) -> Tensor:
    """[blocks, slots, heads, head_dim] -> a view [kv_heads, blocks, slots, groups, head_dim]."""
    return states.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)


def _by_head(states: Tensor, kv_heads: int, scale: float) -> Tensor:
    """[blocks, slots, heads, head_dim] -> [kv_heads, blocks, slots * groups, head_dim], scaled."""
    arranged = _by_slot(states, kv_heads)
    found = torch.mul(arranged, scale, out=states.new_empty(arranged.shape))
    return found.flatten(2, 3)


def _own(states: Tensor) -> Tensor:
    """[blocks, slots, kv_heads, head_dim] -> [kv_heads, blocks, slots, head_dim]."""
    return states.permute(2, 0, 1, 3).contiguous()


def _seen(group: BlockGroup, window: int | None) -> slice:
    """The entries of `BlockPlan.context` that some slot of the group sees."""
    first = 0 if window is None else max(group.first_anchor - window + 1, 0)
    return slice(group.row_start + first, group.row_start + group.last_anchor)


def _hidden(plan: BlockPlan, slots: int, window: int | None) -> list[Tensor]:
    """Per group [blocks, slots or 1, positions] bool: a slot does not see this position.

    The positions are the last ones up to the group's last anchor. In full attention those before
    its first anchor are left out: all of its blocks see them.
    """
    name = f"grouped {slots} {window}"
    if name not in plan.masks:  # The same in every layer.
        plan.masks[name] = [
            _hidden_from(group, plan.positions[group.blocks], slots, window)
            for group in plan.groups
        ]
    found: list[Tensor] = plan.masks[name]
    return found


def _hidden_from(group: BlockGroup, anchors: Tensor, slots: int, window: int | None) -> Tensor:
    first = group.first_anchor if window is None else max(group.first_anchor - window + 1, 0)
    positions = torch.arange(first, group.last_anchor, device=anchors.device)
    hidden = positions >= anchors[:, None, None]
    if window is None:
        return hidden
    own = anchors[:, None] + torch.arange(slots, device=anchors.device)  # [blocks, slots]
    return hidden | (positions <= own[..., None] - window)


def _score_shapes(plan: BlockPlan, own: Tensor, window: int | None) -> list[tuple[int, int, int]]:
    """[kv_heads, rows, entries] of each group's scores: its context, then the slots of a block.

    Args:
        own: [kv_heads, blocks, rows, slots].
    """
    kv_heads, _, rows, slots = own.shape
    found = []
    for group in plan.groups:
        seen = _seen(group, window)
        blocks = group.blocks.stop - group.blocks.start
        found.append((kv_heads, blocks * rows, seen.stop - seen.start + slots))
    return found


def _parts(kept: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """One tensor for all groups, because many of odd sizes would leave gaps in the heap."""
    parts = kept.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _scores(rows: Tensor, context: Tensor, own: Tensor, *, out: Tensor) -> None:
    """out [kv_heads, rows, entries] = rows times the context's entries, and behind them `own`.

    Args:
        rows: [kv_heads, blocks, rows, head_dim].
        context: [seen, kv_heads, head_dim].
        own: [kv_heads, blocks, rows, slots].
        out: Where to.
    """
    count = len(context)
    torch.bmm(rows.flatten(1, 2), context.permute(1, 2, 0), out=out[..., :count])
    out[..., count:] = own.flatten(1, 2)


def _softmax(scores: Tensor, *, out: Tensor) -> None:
    """In float32 at least, as the fused kernels do."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if dtype == out.dtype:
        torch.softmax(scores, -1, out=out)
    else:
        out.copy_(scores.softmax(-1, dtype=dtype))


def _into(out: Tensor, entries: Tensor, context: Tensor) -> None:
    """out [kv_heads, blocks, rows, dim] = entries [kv_heads, blocks * rows, seen] @ context."""
    torch.bmm(entries, context, out=out.flatten(1, 2))
