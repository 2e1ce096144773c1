"""Attention of a draft block: the context before its anchor and all slots of its own.

Papers: DFlash (arXiv 2602.06036) and DSpark (DeepSpec): keys and values of every layer come from
[context features ; block states]. A slot sees the context strictly before the anchor and every slot
of its own block, those behind it too; never another block. In a sliding layer a slot at position p
sees positions p - window + 1 .. p only, so that it is causal inside the block (as engines read
`sliding_attention`).

Neighbouring blocks of a row attend together (models/block_anchors.py), over the context up to
their last anchor and their own slots, with one softmax over both parts. No score is computed
between rows, between blocks, or, but for the spread of a group, behind an anchor.

Differs from published code: no [all queries, all contexts and slots] scores (their eager and sdpa
variants), and no compiled kernel is needed (their flex_attention).

Check: tests/test_dflash.py compares with the definition, all scores in memory.

Axes: blocks, slots (of a block), context, heads, kv_heads, groups (heads of a kv_head), head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.models.block_anchors import BlockGroup, BlockPlan


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    plan: BlockPlan,
    window: int | None = None,
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

    Returns:
        [blocks, slots, heads, head_dim].
    """
    if not plan.groups:
        # Nothing to attend from; every weight stays in the graph, as data-parallel wrappers expect.
        return query + 0.0 * (key.sum() + value.sum() + context_key.sum() + context_value.sum())
    query = query * query.shape[-1] ** -0.5
    attended = []
    for group in plan.groups:
        first = 0 if window is None else max(group.first_anchor - window + 1, 0)
        seen = slice(group.row_start + first, group.row_start + group.last_anchor)
        anchors = plan.positions[group.blocks]
        attended.append(
            _attend(
                query[group.blocks],
                key[group.blocks],
                value[group.blocks],
                context_key[seen],
                context_value[seen],
                hidden_context=_hidden_context(group, anchors, first, query.shape[1], window),
                hidden_slots=slots_hidden(query.shape[1], window, query.device),
            )
        )
    return torch.cat(attended)


def _hidden_context(
    group: BlockGroup, anchors: Tensor, first: int, slots: int, window: int | None
) -> Tensor:
    """[blocks, slots or 1, context] bool, True where a slot does not see a position."""
    positions = torch.arange(first, group.last_anchor, device=anchors.device)
    hidden = positions >= anchors[:, None, None]
    if window is not None:
        own = anchors[:, None] + torch.arange(slots, device=anchors.device)  # [blocks, slots]
        hidden = hidden | (positions <= own[..., None] - window)
    return hidden


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


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    hidden_context: Tensor,
    hidden_slots: Tensor | None,
) -> Tensor:
    """One group; arguments as in `block_attention`, the query scaled."""
    blocks, slots, heads, head_dim = query.shape
    kv_heads, seen = key.shape[2], len(context_key)
    groups = heads // kv_heads
    # A key head's queries side by side: [kv_heads, blocks, slots * groups, head_dim].
    by_head = query.unflatten(2, (kv_heads, groups)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    outer = by_head.flatten(1, 2) @ context_key.permute(1, 2, 0)  # [kv_heads, rows, context]
    inner = by_head @ key.permute(2, 0, 3, 1)  # [kv_heads, blocks, slots * groups, slots]
    shape = (kv_heads, blocks, slots, groups)
    scores = torch.cat([outer.view(*shape, seen), inner.view(*shape, slots)], dim=-1)
    # Written in place: the products' own results are needed by nobody else.
    scores[..., :seen].masked_fill_(hidden_context[:, :, None], float("-inf"))
    if hidden_slots is not None:
        scores[..., seen:].masked_fill_(hidden_slots[:, None], float("-inf"))
    probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    probs = probs.to(value.dtype)
    out = probs[..., :seen].flatten(1, 3) @ context_value.transpose(0, 1)
    own = probs[..., seen:].flatten(2, 3) @ value.permute(2, 0, 1, 3)
    out = out.view(*shape, head_dim) + own.view(*shape, head_dim)
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3)
