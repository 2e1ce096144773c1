"""Serving under load as a simulation: requests, slots, and steps that take what a curve says.

    requests = [OfferedRequest(256, rounds) for _ in range(4 * 64)]
    result = simulate_closed_loop(requests, PrefixScheduler(rates), rates, num_slots=64)
    result.tokens_per_second

What DSpark's scheduler is worth depends on how many requests share a forward, and most numbers of
them do not fit on the machine at hand. Here a step of B tokens takes 1 / SPS(B) seconds (measured
by draftsmith-profile, or given), and a request's rounds are recorded or drawn: the confidences of
its drafted tokens, and how many the target would accept if it read all of them. Verifying fewer
changes only how many of these count, so every policy is judged on the same rounds.

Closed loop: all slots are always taken, a finished request is followed by the next at once; it ends
when there is none left, so that only full steps count. Open loop: requests arrive at their times
and wait for a slot.

Left out: reading prompts, the growth of contexts, and the host's own time. Drafting takes the same
`draft_seconds` in every step of a policy that drafts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from draftsmith.inference.length_policies import LengthPolicy


@dataclass(frozen=True)
class DraftRound:
    """One block of drafted tokens, as if all of it were verified."""

    confidences: tuple[float, ...]
    """Chance of each token to stay given that all before it do."""
    accepted: int
    """How many stay."""


@dataclass(frozen=True)
class OfferedRequest:
    """One answer to be written."""

    num_tokens: int
    """Tokens that its rounds emit, at least 1 (the token of prefill is not counted)."""
    rounds: Sequence[DraftRound]
    """What it drafts, round by round; from the start again when they run out."""
    arrival_s: float = 0.0
    """Open loop: when it comes."""


@dataclass(frozen=True)
class StepRecord:
    """One forward of the target."""

    seconds: float
    num_requests: int
    verified: int
    """Drafted tokens in it."""
    emitted: int


@dataclass(frozen=True)
class ServedRequest:
    """A request that got its whole answer; times in seconds from the start."""

    num_tokens: int
    arrival_s: float
    """Closed loop: the same as admitted_s."""
    admitted_s: float
    finished_s: float
    num_rounds: int
    verified: int
    """Drafted tokens that the target read for it."""

    @property
    def latency_s(self) -> float:
        """Waiting included."""
        return self.finished_s - self.arrival_s

    @property
    def tokens_per_second(self) -> float:
        """While it had its slot."""
        return self.num_tokens / (self.finished_s - self.admitted_s)


@dataclass
class LoadResult:
    """What a simulation found."""

    policy: str
    num_slots: int
    steps: list[StepRecord] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)
    """In the order in which they finished."""
    seconds: float = 0.0
    """From the start (open loop: the first arrival) to the end of the last step."""

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return sum(step.emitted for step in self.steps) / self.seconds

    @property
    def request_tokens_per_second(self) -> float:
        """Median over the served requests."""
        return percentile([one.tokens_per_second for one in self.served], 0.5)

    @property
    def verified_per_round(self) -> float:
        """Mean drafted tokens that the target reads per request and step."""
        rounds = sum(step.num_requests for step in self.steps)
        return sum(step.verified for step in self.steps) / rounds

    @property
    def emitted_per_round(self) -> float:
        """Accepted length: mean tokens per request and step."""
        rounds = sum(step.num_requests for step in self.steps)
        return sum(step.emitted for step in self.steps) / rounds

    def latency(self, share: float) -> float:
        """Seconds within which this share of the served requests had their answers."""
        return percentile([one.latency_s for one in self.served], share)


@dataclass
class _Active:
    """A request in its slot."""

    request: OfferedRequest
    arrival_s: float
    admitted_s: float
    written: int = 0
    num_rounds: int = 0
    verified: int = 0

    @property
    def round(self) -> DraftRound:
        return self.request.rounds[self.num_rounds % len(self.request.rounds)]

    @property
    def confidences(self) -> tuple[float, ...]:
        """Of the drafted tokens that can reach the text: the target adds one of its own."""
        return self.round.confidences[: self.request.num_tokens - self.written - 1]

    def settle(self, length: int) -> int:
        """Counts a round of `length` verified tokens; returns how many it emitted."""
        emitted = min(length, self.round.accepted) + 1
        self.written += emitted
        self.verified += length
        self.num_rounds += 1
        return emitted


def simulate_closed_loop(
    requests: Sequence[OfferedRequest],
    policy: LengthPolicy,
    steps_per_second: Sequence[float],
    *,
    num_slots: int,
    draft_seconds: float = 0.0,
) -> LoadResult:
    """Serves with all slots taken until there is no request left to take a free one.

    Args:
        requests: the order in which slots are filled; several times as many as slots, or the end
            weighs much. Requests that are unfinished then are not among the served.
        policy: decides the verification lengths.
        steps_per_second: [tokens] rates of the target's forward.
        num_slots: requests that are served at a time.
        draft_seconds: of drafting, per step.

    Raises:
        ValueError: fewer requests than slots, or a step with more tokens than the curve has.
    """
    if not 1 <= num_slots <= len(requests):
        raise ValueError(
            f"{len(requests)} requests cannot keep {num_slots} slots busy; give at least as many."
        )
    result = LoadResult(policy.name, num_slots)
    waiting = deque(requests)
    active = [_Active(waiting.popleft(), 0.0, 0.0) for _ in range(num_slots)]
    while len(active) == num_slots:
        active = _step(active, policy, steps_per_second, draft_seconds, result)
        while waiting and len(active) < num_slots:
            active.append(_Active(waiting.popleft(), result.seconds, result.seconds))
    return result


def simulate_open_loop(
    requests: Sequence[OfferedRequest],
    policy: LengthPolicy,
    steps_per_second: Sequence[float],
    *,
    num_slots: int,
    draft_seconds: float = 0.0,
) -> LoadResult:
    """Serves requests from their arrival on, first come first served, until all have answers.

    Time starts with the first arrival; arguments and errors as of `simulate_closed_loop`.
    """
    if not requests or num_slots < 1:
        raise ValueError(f"{len(requests)} requests in {num_slots} slots: nothing to simulate.")
    result = LoadResult(policy.name, num_slots)
    waiting = deque(sorted(requests, key=lambda one: one.arrival_s))
    first = waiting[0].arrival_s
    active: list[_Active] = []
    while waiting or active:
        if not active:
            result.seconds = max(result.seconds, waiting[0].arrival_s - first)
        while (
            waiting and len(active) < num_slots and waiting[0].arrival_s - first <= result.seconds
        ):
            one = waiting.popleft()
            active.append(_Active(one, one.arrival_s - first, result.seconds))
        active = _step(active, policy, steps_per_second, draft_seconds, result)
    return result


def _step(
    active: list[_Active],
    policy: LengthPolicy,
    steps_per_second: Sequence[float],
    draft_seconds: float,
    result: LoadResult,
) -> list[_Active]:
    """One forward for all active requests; returns those that go on."""
    drafts = policy.drafts
    lengths = policy.lengths([one.confidences if drafts else () for one in active])
    verified = sum(lengths)
    tokens = len(active) + verified
    if tokens > len(steps_per_second):
        raise ValueError(
            f"A step of {policy.name} has {tokens} tokens, but the steps-per-second curve ends at "
            f"{len(steps_per_second)}. Measure or extend it that far."
        )
    seconds = 1.0 / steps_per_second[tokens - 1] + (draft_seconds if drafts else 0.0)
    emitted = sum(one.settle(length) for one, length in zip(active, lengths, strict=True))
    result.seconds += seconds
    result.steps.append(StepRecord(seconds, len(active), verified, emitted))
    going_on = []
    for one in active:
        if one.written < one.request.num_tokens:
            going_on.append(one)
            continue
        result.served.append(
            ServedRequest(
                one.written,
                one.arrival_s,
                one.admitted_s,
                result.seconds,
                one.num_rounds,
                one.verified,
            )  # fmt: skip
        )
    return going_on


def with_draft_time(steps_per_second: Sequence[float], draft_seconds: float) -> list[float]:
    """The curve that a scheduler should get where every step also drafts for `draft_seconds`."""
    return [1.0 / (1.0 / rate + draft_seconds) for rate in steps_per_second]


def synthetic_rounds(
    count: int, *, num_draft_tokens: int, acceptance: float, certainty: float, seed: int
) -> list[DraftRound]:
    """Rounds with calibrated confidences: a token stays with exactly the chance it was given.

    Args:
        count: of rounds.
        num_draft_tokens: per round.
        acceptance: mean confidence, in (0, 1).
        certainty: in (0, 1); near 0 all confidences are near their mean, near 1 each is near 0 or
            near 1 (a Beta distribution with this intraclass correlation).
        seed: of the draws.
    """
    source = random.Random(seed)
    weight = (1.0 - certainty) / certainty
    rounds = []
    for _ in range(count):
        confidences = tuple(
            source.betavariate(weight * acceptance, weight * (1.0 - acceptance))
            for _ in range(num_draft_tokens)
        )
        stays = [source.random() < chance for chance in confidences]
        rounds.append(DraftRound(confidences, (*stays, False).index(False)))
    return rounds


def poisson_arrivals(count: int, *, requests_per_second: float, seed: int) -> list[float]:
    """[count] ascending arrival times in seconds: independent, exponential gaps."""
    source = random.Random(seed)
    return list(accumulate(source.expovariate(requests_per_second) for _ in range(count)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, interpolated linearly.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("No request was served; simulate more of them.")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
