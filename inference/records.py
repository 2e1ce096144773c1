"""What decoding leaves behind: the text, its rounds, and where each token came from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class RoundRecord:
    """One round: what was drafted, what stayed, what reached the text, and the time it took.

    In a batch, a round's time is shared equally by the sequences that took part.
    """

    proposed: int
    """Drafted tokens that the target verified: the nodes of the tree, or of the chain."""
    depth: int
    """Deepest drafted position; equal to `proposed` for a chain."""
    accepted: int
    """Drafted tokens that passed, counted before the text was cut at a stop token or the limit."""
    emitted: int
    """Tokens added to the text, the target's own included, after that cut. At least 1."""
    draft_seconds: float
    """Inside the draft model and its policy."""
    verify_seconds: float
    """The target's forward."""
    other_seconds: float
    """Acceptance, rollback, bookkeeping."""


@dataclass(frozen=True)
class TokenOrigin:
    """Who wrote a token, and how likely it was to both models."""

    depth: int
    """k: the draft model's, accepted at depth k. 0: the target's own (prefill, correction or bonus
    token)."""
    draft_prob: float | None
    """The draft model's probability of a drafted token, where it reports one."""
    target_prob: float
    """The target's probability of it: of the distribution that is sampled from, or the softmax of
    the logits when decoding is greedy."""


@dataclass
class Generation:
    """The new tokens of one prompt and how they came about."""

    token_ids: list[int]
    """New tokens: the first comes from prefill, the others from rounds."""
    finish_reason: FinishReason
    rounds: list[RoundRecord]
    seconds: float
    """Wall-clock time from entering to leaving, prefill included. In a batch this is a latency."""
    prefill_seconds: float
    """Of that, reading the prompt and choosing the first token."""
    origins: list[TokenOrigin] = field(default_factory=list)
    """One per token."""


class Stopwatch:
    """Seconds between marks, without making the device wait.

    On CUDA the marks are events on the stream, read at the end of a round, when the verdict has
    come to the host anyway; elsewhere they are the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Notes this moment."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def read(self) -> list[float]:
        """Returns the seconds between successive marks, and forgets all but the last mark."""
        if self._on_cuda:
            self._events[-1].synchronize()
            spans = [a.elapsed_time(b) / 1000.0 for a, b in pairwise(self._events)]
        else:
            spans = [b - a for a, b in pairwise(self._times)]
        del self._events[:-1], self._times[:-1]
        return spans


def cut_block(
    block: Sequence[int], *, room: int, stop_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """What of a verified block belongs to the text, and whether the text ends with it.

    The stop scan comes before the limit: a stop token that still fits ends the text as "stop", also
    in the very last place; one that does not fit was never part of the text.

    Args:
        block: accepted tokens and the target's own.
        room: tokens that the text may still take, at least 1.
        stop_ids: tokens that end a text (and stay in it).
    """
    for index, token in enumerate(block[:room]):
        if token in stop_ids:
            return list(block[: index + 1]), "stop"
    if len(block) >= room:
        return list(block[:room]), "length"
    return list(block), None
