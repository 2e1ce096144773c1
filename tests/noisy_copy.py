"""A draft model that is right about as often as asked: the target's own logits plus noise.

Slow and without caches: every call runs the target on whole texts. Which noise a text gets depends
on the text alone, so drafting in a batch and drafting alone see the same. Tests load this file by
its path.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.protocols import DraftContext, Frontier


@dataclass
class CopyState:
    """The committed text, and each row's path below it (row 0 is the root)."""

    text: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    """What the decoder said was kept, round by round, as tokens."""


class NoisyCopy:
    """Implements `AutoregressiveDraft`."""

    aux_layer_ids = ()
    draft_to_target = None

    def __init__(self, target: Any, noise: float, *, last_position: int = 10_000) -> None:
        self.target, self.noise, self.last_position = target, noise, last_position
        self.states: list[CopyState] = []
        self.known: dict[tuple[int, ...], Tensor] = {}

    def start(self, max_length: int) -> CopyState:  # noqa: ARG002
        self.states.append(CopyState())
        return self.states[-1]

    def max_depth(self, length: int) -> int:
        return max(self.last_position - length, 0)

    def read(self, contexts: Sequence[DraftContext], states: Sequence[CopyState]) -> Tensor:
        for context, state in zip(contexts, states, strict=True):
            kept = [state.paths[row][-1] for row in context.kept_rows]
            before = len(state.text)
            state.text = context.token_ids[0].tolist()
            assert kept == state.text[before : before + len(kept)], "kept rows are committed"
            state.kept.append(kept)
            state.paths = [[]]
        return torch.stack([self.logits(state.text) for state in states])

    def extend(self, states: Sequence[CopyState], frontiers: Sequence[Frontier]) -> Tensor:
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            before = len(state.paths)
            for token, parent in zip(
                frontier.tokens.tolist(), frontier.parents.tolist(), strict=True
            ):
                assert parent < before, "a parent was read before"
                state.paths.append([*state.paths[parent], token])
            rows += [self.logits(state.text + path) for path in state.paths[before:]]
        return torch.stack(rows)

    def logits(self, text: list[int]) -> Tensor:
        """[vocab] of one text."""
        key = tuple(text)
        if key not in self.known:
            logits = self.target.model(input_ids=torch.tensor([text]), use_cache=False).logits[
                0, -1
            ]
            seed = zlib.crc32(str(text).encode())
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
            self.known[key] = logits + self.noise * noise
        return self.known[key]
