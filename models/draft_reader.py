"""Draft layers over key/value caches: new rows of several sequences in one pass, chains and trees.

Shared by the draft models that are made of `DraftLayer`s. Projections and MLPs run on all rows at
once; attention looks at each sequence by itself, over its own cache.

Axes: rows (new ones of all sequences), new (of one), hidden, head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.draft_rows import DraftRows
from draftsmith.models.sequence_cache import SequenceCache, cached_attention


@dataclass
class DraftState:
    """One sequence's cache, what depends on its length, and the rows of the current round."""

    cache: SequenceCache
    rope: Rope
    """[capacity, 1, head_dim] each."""
    rows: DraftRows = field(default_factory=DraftRows)
    hidden: Tensor | None = None
    """[rows, hidden] fed-back state of the root and of every drafted row read in this round."""


@dataclass
class RowsToRead:
    """New rows of one sequence."""

    state: DraftState
    tokens: Tensor
    """[new] target ids."""
    start: int
    """Where their entries go in the cache."""
    new: int

    def rope(self) -> Rope:
        """cos and sin of the rows' positions; a drafted row's is the root's plus its depth."""
        cos, sin = self.state.rope
        if self.state.rows.depths is None:
            return cos[self.start : self.start + self.new], sin[self.start : self.start + self.new]
        depths = self.state.rows.new_depths(self.new, self.tokens.device)
        at = self.state.cache.committed - 1 + depths
        return cos[at], sin[at]

    def keep_mask(self) -> Tensor | None:
        """[new, cached] bool, what each row sees; None: all before it."""
        ancestors = self.state.rows.new_ancestors(self.new)
        if ancestors is None:
            return None
        return F.pad(ancestors, (self.state.cache.committed, 0), value=True)


def run_layers(
    layers: Sequence[DraftLayer],
    reads: Sequence[RowsToRead],
    hidden: Tensor,
    tokens: Tensor,
    *,
    ends_only: bool,
) -> Tensor:
    """Runs new rows of several sequences through the layers.

    Args:
        layers: the first one may read tokens.
        reads: what each sequence reads; its cache's entries at these places are overwritten.
        hidden: [rows, hidden] features, or the fed-back states of the rows' parents.
        tokens: [rows, any] what the first layer reads of the embeddings.
        ends_only: only each sequence's last row is wanted (committed rows, which form a chain).

    Returns:
        [rows or sequences, hidden] output of the last layer.
    """
    rope = _joined_rope(reads)
    counts = [read.new for read in reads]
    for index, layer in enumerate(layers):
        inputs, residual = layer.enter(hidden)
        key, value = layer.self_attn.keys_values(inputs, rope, tokens)
        keys, values = key.split(counts), value.split(counts)
        asked = counts
        if ends_only and index + 1 == len(layers):
            # Of the last layer only the newest row's output is ever used.
            ends = torch.tensor(counts, device=hidden.device).cumsum(0) - 1
            inputs, residual, tokens = inputs[ends], residual[ends], tokens[ends]
            rope = rope[0][ends], rope[1][ends]
            asked = [1] * len(reads)
        queries = layer.self_attn.queries(inputs, rope, tokens).split(asked)
        attended = []
        for read, own_query, own_key, own_value in zip(reads, queries, keys, values, strict=True):
            seen = read.state.cache.write(
                index, read.start, own_key.transpose(0, 1), own_value.transpose(0, 1)
            )
            mask = None if ends_only else read.keep_mask()
            attended.append(cached_attention(own_query, *seen, keep_mask=mask))
        hidden = layer.finish(residual, attended[0] if len(reads) == 1 else torch.cat(attended))
    return hidden


def _joined_rope(reads: Sequence[RowsToRead]) -> Rope:
    ropes = [read.rope() for read in reads]
    if len(ropes) == 1:
        return ropes[0]
    return torch.cat([cos for cos, _ in ropes]), torch.cat([sin for _, sin in ropes])
