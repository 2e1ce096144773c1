"""Who decides how many drafted tokens are verified: one object per way, asked once per step.

    policy = PrefixScheduler(curve.rates(context_length=512))
    lengths = policy.lengths(confidences)  # one per request

The decisions themselves are the pure functions of `draftsmith.inference.scheduler`; what is kept
here is what they need from earlier steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftsmith.inference.scheduler import (
    Chains,
    fixed_length,
    schedule,
    schedule_async,
    static_threshold,
    survival_from_confidences,
)

ASYNC_DELAY = 2
"""Steps between the confidences and the forward whose size they decide (DSpark, section 5.2)."""
PAUSE_STEPS = 16
"""Steps without drafting, and drafted steps that are looked back on (our choice)."""


class LengthPolicy(Protocol):
    """Decides the verification lengths of a step."""

    @property
    def name(self) -> str:
        """As reports call it."""

    @property
    def drafts(self) -> bool:
        """Whether the draft model has to run in the coming step; confidences are empty if not."""

    @property
    def longest(self) -> int | None:
        """The longest length that it ever chooses: more need not be drafted. None: any."""

    @property
    def reads_confidences(self) -> bool:
        """Whether their values matter, and not only how many there are."""

    def lengths(self, confidences: Chains) -> list[int]:
        """Verified tokens of every request, given the confidences of what it has drafted."""


@dataclass(frozen=True)
class FixedLength:
    """The same length always; 0 is decoding without a draft model."""

    length: int
    """Tokens."""
    reads_confidences = False

    @property
    def name(self) -> str:
        return f"fixed {self.length}" if self.length else "no draft"

    @property
    def drafts(self) -> bool:
        return self.length > 0

    @property
    def longest(self) -> int:
        return self.length

    def lengths(self, confidences: Chains) -> list[int]:
        return fixed_length(confidences, self.length)


@dataclass(frozen=True)
class StaticThreshold:
    """As far as the confidence is high, whatever the load."""

    threshold: float
    """A probability; 0 verifies everything."""
    drafts = True
    longest = None
    reads_confidences = True

    @property
    def name(self) -> str:
        return f"threshold {self.threshold:g}"

    def lengths(self, confidences: Chains) -> list[int]:
        return static_threshold(confidences, self.threshold)


@dataclass(frozen=True)
class PrefixScheduler:
    """DSpark's algorithm 1."""

    steps_per_second: Sequence[float]
    """[tokens] monotone; see `schedule`."""
    name = "scheduler"
    drafts = True
    longest = None
    reads_confidences = True

    def lengths(self, confidences: Chains) -> list[int]:
        return schedule(survival_from_confidences(confidences), self.steps_per_second)


@dataclass
class AsyncPrefixScheduler:
    """Capacity from confidences ASYNC_DELAY steps old, the best tokens of now up to there.

    The first steps have no old confidences and use algorithm 1.
    """

    steps_per_second: Sequence[float]
    """[tokens] monotone or not."""
    name = "scheduler-async"
    drafts = True
    longest = None
    reads_confidences = True
    _recent: deque[list[list[float]]] = field(default_factory=lambda: deque(maxlen=ASYNC_DELAY))

    def lengths(self, confidences: Chains) -> list[int]:
        survival = survival_from_confidences(confidences)
        if len(self._recent) < ASYNC_DELAY:
            found = schedule(survival, self.steps_per_second)
        else:
            found = schedule_async(self._recent[0], survival, self.steps_per_second)
        self._recent.append(survival)
        return found


@dataclass
class PausingDrafts:
    """Leaves drafting out for a while when it has not paid, which no choice of lengths can.

    Not in the paper: verifying nothing still costs the time of drafting. When the last PAUSE_STEPS
    drafted steps together were expected to emit no more tokens per second than plain decoding
    would have, the next PAUSE_STEPS steps do without, and a single drafted step then asks again.
    Only drafts that are decided already are looked at, so the text keeps its law.
    """

    policy: LengthPolicy
    """Decides the lengths of drafted steps."""
    steps_per_second: Sequence[float]
    """[tokens] rates of steps that draft."""
    plain_steps_per_second: Sequence[float]
    """[tokens] rates of steps that do not."""
    reads_confidences = True
    _pause: int = 0
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PAUSE_STEPS))
    """Of drafted steps: expected tokens, and those of plain decoding in the same time."""

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def drafts(self) -> bool:
        return self._pause == 0

    @property
    def longest(self) -> int | None:
        return self.policy.longest

    def lengths(self, confidences: Chains) -> list[int]:
        if self._pause:
            self._pause -= 1
            return [0] * len(confidences)
        found = self.policy.lengths(confidences)
        survival = survival_from_confidences(confidences)
        admitted = sum(sum(chain[:count]) for chain, count in zip(survival, found, strict=True))
        requests = len(found)
        seconds = 1.0 / self.steps_per_second[requests + sum(found) - 1]
        plain = requests * self.plain_steps_per_second[requests - 1] * seconds
        self._recent.append((requests + admitted, plain))
        full = len(self._recent) == PAUSE_STEPS
        if full and sum(one[0] for one in self._recent) <= sum(one[1] for one in self._recent):
            self._pause = PAUSE_STEPS
        return found
