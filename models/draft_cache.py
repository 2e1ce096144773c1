"""The key/value cache of a draft model for one sequence: committed entries, then speculative ones.

Rolling back is moving an end mark: what lies behind the committed entries is overwritten by the
next round. Buffers grow by doubling, so a decoding step copies nothing but its own entries.

Axes: kv_heads, heads, capacity and total (cached positions), new (rows being read), head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_CAPACITY = 64
"""Positions of the first allocation (our choice)."""


@dataclass
class DraftCache:
    """Keys and values per layer, [kv_heads, capacity, head_dim] each, and the end mark."""

    keys: list[Tensor]
    values: list[Tensor]
    committed: int = 0
    """Positions whose entries are final."""

    @classmethod
    def empty(cls, num_layers: int, *, kv_heads: int, head_dim: int, like: Tensor) -> DraftCache:
        """No entries, in the dtype and on the device of `like`."""
        shape = (kv_heads, 0, head_dim)
        return cls(
            [like.new_empty(shape) for _ in range(num_layers)],
            [like.new_empty(shape) for _ in range(num_layers)],
        )

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return self.keys[0].shape[1]

    def reserve(self, positions: int, *, limit: int) -> bool:
        """Grows to hold `positions` positions, ahead of need up to `limit`; True if it grew."""
        old = self.capacity
        if positions <= old:
            return False
        grown = max(positions, min(max(2 * old, MIN_CAPACITY), limit))
        for cached in (self.keys, self.values):
            for layer, entries in enumerate(cached):
                cached[layer] = entries.new_zeros(entries.shape[0], grown, entries.shape[2])
                cached[layer][:, :old] = entries
        return True

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [new, kv_heads, head_dim] at `start` and returns views on all up to there."""
        stop = start + len(key)
        self.keys[layer][:, start:stop] = key.transpose(0, 1)
        self.values[layer][:, start:stop] = value.transpose(0, 1)
        return self.keys[layer][:, :stop], self.values[layer][:, :stop]


def cached_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the newest rows over a cache that includes them.

    Args:
        query: [new, heads, head_dim].
        keys: [kv_heads, total, head_dim], the last `new` of them the queries' own.
        values: The same shape.

    Returns:
        [new, heads, head_dim].
    """
    new, heads, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    if new == total and new > 1:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    # Grouped by key head instead of repeating the whole cache for every query head.
    grouped = query.reshape(new, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    scores = (grouped @ keys.transpose(1, 2)) * head_dim**-0.5  # [kv_heads, new * groups, total]
    if new > 1:
        unseen = torch.ones(new, total, dtype=torch.bool, device=query.device)
        unseen = unseen.triu(total - new + 1).repeat_interleave(heads // kv_heads, 0)
        scores = scores.masked_fill(unseen, float("-inf"))
    probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    out = (probs.to(query.dtype) @ values).unflatten(1, (new, -1))
    return out.transpose(0, 1).flatten(1, 2)  # [new, kv_heads * groups, head_dim]
