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
    unverified: int = 0
    """Further drafted tokens, which the length policy did not let the target read."""
    confidences: tuple[float, ...] = ()
    """What was known of each verified token's chance to stay, where a length policy asked."""

    @property
    def drafted(self) -> int:
        """Drafted tokens, verified or not."""
        return self.proposed + self.unverified


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
    waited_seconds: float = 0.0
    """From arriving to entering."""
    first_token_seconds: float = 0.0
    """From arriving until the first token was known, waiting included."""

    @property
    def latency_seconds(self) -> float:
        """From arriving to leaving."""
        return self.waited_seconds + self.seconds


@dataclass(frozen=True)
class EngineStep:
    """One step of the engine: prompts that were read, or a round of all active requests."""

    num_requests: int
    """That took part."""
    reads_prompts: bool
    """Prompts were read, and each gave the first token of its text; else a round."""
    drafted: int
    """Tokens that the draft model proposed, all requests' together; so are the next two."""
    verified: int
    """Of these, tokens that the target read."""
    emitted: int
    """Tokens added to the texts."""
    draft_seconds: float
    """As in `RoundRecord`, but not divided; so are the next two."""
    verify_seconds: float
    """A step that reads prompts takes all its time here."""
    other_seconds: float
    finished: dict[int, Generation] = field(default_factory=dict)
    """Requests whose texts ended with this step, by number."""

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.other_seconds


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

    def restart(self) -> None:
        """Forgets what was marked: this moment is the first mark."""
        self._events.clear()
        self._times.clear()
        self.mark()

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
