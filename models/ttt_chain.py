"""The training-time test: draft layers unrolled over their own states, step after step.

Paper: EAGLE-3 (arXiv 2503.01840), section 3.1. models/ttt_slots.py says which slot does what,
models/ttt_attention.py what a slot sees.

Memory: with `checkpoint_steps` a step keeps its input state and its own keys and values only; what
lies between (norms, MLP, attention) is computed again in the backward pass.

Axes: batch, seq, hidden, heads, kv_heads, head_dim, rows (any gathered slots), pairs, active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.ttt_attention import ttt_attention
from draftsmith.models.ttt_slots import SlotPlan

StepInput = tuple[Tensor, Tensor]
"""[rows, hidden] into the first layer, and what it reads of the tokens, [rows, any]."""


@dataclass
class _Chain:
    """One layer's step-0 block and its slots' own entries, one per further step."""

    layer: DraftLayer
    block_key: Tensor | None = None
    """[batch, kv_heads, seq, head_dim]; the values too."""
    block_value: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    """[active, kv_heads, head_dim] each."""
    values: list[Tensor] = field(default_factory=list)


def unroll(
    layers: Sequence[DraftLayer],
    plan: SlotPlan,
    rope: Rope,
    positions: Tensor,
    *,
    grid: torch.Size,
    num_steps: int,
    first_input: Callable[[], StepInput],
    next_input: Callable[[int, Tensor], StepInput],
    feed_back: Callable[[Tensor], Tensor],
    checkpoint_steps: bool = False,
) -> list[Tensor]:
    """The fed-back states of all steps.

    Args:
        layers: the first one may read tokens.
        plan: which slots there are.
        rope: [positions, 1, head_dim] cos and sin, long enough for the last step.
        positions: [batch * seq] position of each slot.
        grid: (batch, seq).
        num_steps: steps to unroll.
        first_input: what all pairs read at step 0.
        next_input: (step, fed-back states of the step before) -> what the active slots read.
        feed_back: [active, hidden] out of the last layer -> the state that is fed back.
        checkpoint_steps: recompute each step in the backward pass.

    Returns:
        One [active, hidden] per step.
    """
    chains = [_Chain(layer) for layer in layers]

    def call(function: Callable[..., Any], *tensors: Tensor) -> Any:
        if checkpoint_steps:
            return checkpoint(function, *tensors, use_reentrant=False)
        return function(*tensors)

    def first_step() -> tuple[Tensor, ...]:
        at = positions[plan.pairs]
        hidden, blocks = causal_step(
            layers, plan, first_input(), (rope[0][at], rope[1][at]), grid=grid
        )
        return feed_back(hidden), *blocks

    state, *blocks = call(first_step)
    for index, chain in enumerate(chains):
        chain.block_key, chain.block_value = blocks[2 * index : 2 * index + 2]
    states = [state]
    for step in range(1, num_steps):
        at = positions[plan.active] + step
        step_rope = rope[0][at], rope[1][at]
        before = [(list(chain.keys), list(chain.values)) for chain in chains]

        def one_step(
            state: Tensor,
            step: int = step,
            step_rope: Rope = step_rope,
            before: list[tuple[list[Tensor], list[Tensor]]] = before,
        ) -> tuple[Tensor, ...]:
            hidden, entries = _step(chains, plan, next_input(step, state), step_rope, before)
            return feed_back(hidden), *entries

        state, *entries = call(one_step, states[-1])
        for index, chain in enumerate(chains):
            chain.keys.append(entries[2 * index])
            chain.values.append(entries[2 * index + 1])
        states.append(state)
    return states


def causal_step(
    layers: Sequence[DraftLayer],
    plan: SlotPlan,
    entered: StepInput,
    rope: Rope,
    *,
    grid: torch.Size,
) -> tuple[Tensor, list[Tensor]]:
    """Step 0: keys of all pairs, queries of the last layer only where a slot is unrolled.

    Args:
        layers: the first one may read tokens.
        plan: its `pairs`, `active` and `active_pairs` are read.
        entered: of the pairs.
        rope: of the pairs.
        grid: (batch, seq).

    Returns:
        [active, hidden], and the block's keys and values of each layer in turn.
    """
    hidden, tokens = entered
    blocks: list[Tensor] = []
    for layer in layers:
        attention = layer.self_attn
        inputs, residual = layer.enter(hidden)
        key, value = (
            rows.new_zeros(grid.numel(), *rows.shape[1:])
            .index_copy(0, plan.pairs, rows)
            .unflatten(0, grid)
            .transpose(1, 2)
            for rows in attention.keys_values(inputs, rope, tokens)
        )
        blocks += [key, value]
        slots = plan.pairs
        if layer is layers[-1]:
            slots, at = plan.active, plan.active_pairs
            inputs, residual, tokens = (
                part.index_select(0, at) for part in (inputs, residual, tokens)
            )
            rope = rope[0].index_select(0, at), rope[1].index_select(0, at)
        query = attention.queries(inputs, rope, tokens)
        attended = ttt_attention(query, key, value, [], [], slots=slots)
        hidden = layer.finish(residual, attended)
    return hidden, blocks


def _step(
    chains: list[_Chain],
    plan: SlotPlan,
    entered: StepInput,
    rope: Rope,
    before: list[tuple[list[Tensor], list[Tensor]]],
) -> tuple[Tensor, list[Tensor]]:
    """One step >= 1: [active, hidden], and each layer's new key and value in turn.

    `before` holds the entries of the earlier steps: a recomputed step must see no later ones.
    """
    hidden, tokens = entered
    entries: list[Tensor] = []
    for chain, (keys, values) in zip(chains, before, strict=True):
        attention = chain.layer.self_attn
        inputs, residual = chain.layer.enter(hidden)
        key, value = attention.keys_values(inputs, rope, tokens)
        entries += [key, value]
        query = attention.queries(inputs, rope, tokens)
        assert chain.block_key is not None, "set by step 0"
        assert chain.block_value is not None, "set by step 0"
        attended = ttt_attention(
            query,
            chain.block_key,
            chain.block_value,
            [*keys, key],
            [*values, value],
            slots=plan.active,
        )
        hidden = chain.layer.finish(residual, attended)
    return hidden, entries
