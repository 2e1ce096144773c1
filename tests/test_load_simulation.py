"""Load simulation: small cases by hand, and what the scheduler is worth on convex curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from draftsmith.eval.load_simulation import (
    DraftRound,
    LoadResult,
    OfferedRequest,
    percentile,
    poisson_arrivals,
    simulate_closed_loop,
    simulate_open_loop,
    synthetic_rounds,
    with_draft_time,
)
from draftsmith.inference.length_policies import (
    PAUSE_STEPS,
    AsyncPrefixScheduler,
    FixedLength,
    LengthPolicy,
    PausingDrafts,
    PrefixScheduler,
    StaticThreshold,
)
from draftsmith.inference.scheduler import schedule, schedule_async, survival_from_confidences

CURVE = [10.0, 8.0, 5.0, 4.0, 2.0]
"""Steps of 0.1, 0.125, 0.2, 0.25 and 0.5 seconds."""
ROUNDS = [DraftRound((0.9, 0.8, 0.3), 2), DraftRound((0.6, 0.5, 0.5), 0)]


def test_one_request_by_hand() -> None:
    """6 tokens by 3 drafts: 3 of 4 tokens read, 1 of 3 (only 2 can be drafted), then 2 of 2."""
    result = simulate_closed_loop([OfferedRequest(6, ROUNDS)], FixedLength(3), CURVE, num_slots=1)
    assert [(step.verified, step.emitted) for step in result.steps] == [(3, 3), (2, 1), (1, 2)]
    assert result.seconds == pytest.approx(0.25 + 0.2 + 0.125)
    assert result.tokens_per_second == pytest.approx(6 / 0.575)
    assert result.request_tokens_per_second == pytest.approx(6 / 0.575)
    assert result.latency(0.5) == pytest.approx(0.575)
    assert result.verified_per_round == 2.0
    assert result.emitted_per_round == 2.0
    (served,) = result.served
    assert (served.num_tokens, served.num_rounds, served.verified) == (6, 3, 6)


def test_closed_loop_refills_and_ends_with_the_last_full_step() -> None:
    """Slots of 1 and 3 tokens; the third request follows the first; then a slot stays empty."""
    requests = [OfferedRequest(count, ROUNDS) for count in (1, 3, 5)]
    result = simulate_closed_loop(requests, FixedLength(0), CURVE, num_slots=2)
    assert [step.num_requests for step in result.steps] == [2, 2, 2]
    assert result.tokens_per_second == pytest.approx(2 * 8.0)
    assert [one.num_tokens for one in result.served] == [1, 3]
    assert [one.finished_s for one in result.served] == pytest.approx([0.125, 0.375])


def test_open_loop_waits_for_arrivals_and_for_a_slot() -> None:
    """Plain decoding, one slot: 0.1 s a token. The second waits, the third finds nobody."""
    requests = [OfferedRequest(2, ROUNDS, arrival_s=at) for at in (5.0, 5.1, 9.0)]
    result = simulate_open_loop(requests, FixedLength(0), CURVE, num_slots=1)
    assert [one.arrival_s for one in result.served] == pytest.approx([0.0, 0.1, 4.0])
    assert [one.admitted_s for one in result.served] == pytest.approx([0.0, 0.2, 4.0])
    assert [one.finished_s for one in result.served] == pytest.approx([0.2, 0.4, 4.2])
    assert [one.latency_s for one in result.served] == pytest.approx([0.2, 0.3, 0.2])
    assert result.seconds == pytest.approx(4.2)
    assert result.tokens_per_second == pytest.approx(6 / 4.2)
    assert result.request_tokens_per_second == pytest.approx(10.0)
    together = simulate_open_loop(requests, FixedLength(0), CURVE, num_slots=2)
    assert [step.num_requests for step in together.steps] == [1, 2, 1, 1, 1]


def test_drafting_takes_time_only_where_there_is_a_draft() -> None:
    request = [OfferedRequest(1, ROUNDS)]
    plain = simulate_closed_loop(request, FixedLength(0), CURVE, num_slots=1, draft_seconds=0.05)
    drafted = simulate_closed_loop(
        request, StaticThreshold(0.5), CURVE, num_slots=1, draft_seconds=0.05
    )
    assert plain.seconds == pytest.approx(0.1)
    assert drafted.seconds == pytest.approx(0.15)
    assert with_draft_time(CURVE[:2], 0.05) == pytest.approx([1 / 0.15, 1 / 0.175])


def test_policies_ask_the_scheduler_and_async_looks_two_steps_back() -> None:
    chains = [[[0.9, 0.9]], [[0.1, 0.1]], [[0.8, 0.5]], [[0.7, 0.2]]]
    survival = [survival_from_confidences(one) for one in chains]
    policy = AsyncPrefixScheduler(CURVE)
    found = [policy.lengths(one) for one in chains]
    assert found[:2] == [schedule(one, CURVE) for one in survival[:2]]
    assert found[2] == schedule_async(survival[0], survival[2], CURVE)
    assert found[3] == schedule_async(survival[1], survival[3], CURVE)
    assert found[2] != found[3]
    assert PrefixScheduler(CURVE).lengths(chains[0]) == schedule(survival[0], CURVE)
    assert StaticThreshold(0.7).lengths(chains[2]) == [1]
    names = [one.name for one in (FixedLength(0), FixedLength(3), StaticThreshold(0.7), policy)]
    assert names == ["no draft", "fixed 3", "threshold 0.7", "scheduler-async"]


def test_drafting_pauses_where_it_does_not_pay_and_is_asked_again() -> None:
    """One request, steps of 0.1 s without and 0.2 s with drafting: a survival of 1 breaks even."""
    plain, drafting = [10.0, 10.0], [5.0, 5.0]
    policy = PausingDrafts(PrefixScheduler(drafting), drafting, plain)
    found = []
    for step in range(2 * PAUSE_STEPS + 2):
        found.append(policy.drafts)
        assert policy.lengths([[0.9]] if policy.drafts else [[]]) == [int(found[-1])], step
    assert found == [True] * PAUSE_STEPS + [False] * PAUSE_STEPS + [True, False]
    paying = PausingDrafts(PrefixScheduler(drafting), drafting, [4.0, 4.0])
    for _ in range(3 * PAUSE_STEPS):
        assert paying.drafts
        paying.lengths([[0.9]])


def test_synthetic_confidences_are_calibrated() -> None:
    rounds = synthetic_rounds(8000, num_draft_tokens=3, acceptance=0.7, certainty=0.4, seed=0)
    first = [one.confidences[0] for one in rounds]
    assert sum(first) / len(first) == pytest.approx(0.7, abs=0.015)
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 0.9), (0.9, 1.0)):
        inside = [one for one in rounds if low <= one.confidences[0] < high]
        mean = sum(one.confidences[0] for one in inside) / len(inside)
        stayed = sum(one.accepted >= 1 for one in inside) / len(inside)
        assert stayed == pytest.approx(mean, abs=0.05)
    expected = sum(survival_from_confidences([one.confidences])[0][2] for one in rounds)
    assert sum(one.accepted == 3 for one in rounds) == pytest.approx(expected, rel=0.06)


def test_arrivals_are_poisson() -> None:
    times = poisson_arrivals(4000, requests_per_second=5.0, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert sum(gaps) / 4000 == pytest.approx(0.2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / 4000 == pytest.approx(0.3679, abs=0.03)


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.9) == pytest.approx(3.7)
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="No request was served"):
        percentile([], 0.5)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="1 requests cannot keep 2 slots busy"):
        simulate_closed_loop([OfferedRequest(1, ROUNDS)], FixedLength(0), CURVE, num_slots=2)
    with pytest.raises(ValueError, match="fixed 3 has 8 tokens, .* ends at 5"):
        simulate_closed_loop([OfferedRequest(9, ROUNDS)] * 2, FixedLength(3), CURVE, num_slots=2)
    with pytest.raises(ValueError, match="nothing to simulate"):
        simulate_open_loop([], FixedLength(0), CURVE, num_slots=2)


# ---- what the scheduler is worth ------------------------------------------------------------

GAMMA = 5


def roofline(
    tokens: int, *, flat: int, floor_s: float = 0.02, token_s: float = 4e-4
) -> list[float]:
    """Memory-bound up to `flat` tokens, then linear: a convex step time."""
    return [1.0 / (floor_s + token_s * max(0, count - flat)) for count in range(1, tokens + 1)]


def workload(num_slots: int, *, acceptance: float, certainty: float) -> list[OfferedRequest]:
    """Requests of 40 to 120 tokens, each with its own rounds."""
    count = max(3 * num_slots, 40)
    rounds = synthetic_rounds(
        120 * 8, num_draft_tokens=GAMMA, acceptance=acceptance, certainty=certainty, seed=num_slots
    )
    return [
        OfferedRequest(40 + 13 * index % 81, rounds[(37 * index) % 800 :]) for index in range(count)
    ]


def closed(
    policy: LengthPolicy, requests: Sequence[OfferedRequest], curve: Sequence[float], slots: int
) -> LoadResult:
    return simulate_closed_loop(requests, policy, curve, num_slots=slots)


@pytest.mark.parametrize("num_slots", [1, 4, 24, 96])
@pytest.mark.parametrize(("acceptance", "certainty"), [(0.6, 0.2), (0.8, 0.6)])
def test_scheduler_is_never_much_worse_than_the_best_fixed_length(
    num_slots: int, acceptance: float, certainty: float
) -> None:
    curve = roofline(num_slots * (GAMMA + 1), flat=32)
    requests = workload(num_slots, acceptance=acceptance, certainty=certainty)
    fixed = [
        closed(FixedLength(length), requests, curve, num_slots).tokens_per_second
        for length in range(GAMMA + 1)
    ]
    for policy in (PrefixScheduler(curve), AsyncPrefixScheduler(curve)):
        found = closed(policy, requests, curve, num_slots).tokens_per_second
        assert found >= 0.97 * max(fixed), (policy.name, found, fixed)


def test_no_fixed_length_is_best_at_every_load_and_budgets_fall_as_load_rises() -> None:
    best, budgets = [], []
    for num_slots in (1, 16, 96):
        curve = roofline(num_slots * (GAMMA + 1), flat=16)
        requests = workload(num_slots, acceptance=0.7, certainty=0.4)
        fixed = [
            closed(FixedLength(length), requests, curve, num_slots).tokens_per_second
            for length in range(GAMMA + 1)
        ]
        best.append(fixed.index(max(fixed)))
        found = closed(PrefixScheduler(curve), requests, curve, num_slots)
        budgets.append(found.verified_per_round)
        if num_slots > 1:
            assert found.tokens_per_second > max(fixed), "it chooses among tokens, not lengths"
    assert best[0] == GAMMA
    assert best[-1] < GAMMA
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 2 * budgets[-1]


def test_open_loop_beyond_capacity_waits_longer_without_the_scheduler() -> None:
    """An arrival rate that plain decoding cannot serve, and drafting with the scheduler can."""
    curve = roofline(32 * (GAMMA + 1), flat=32)
    times = poisson_arrivals(200, requests_per_second=25.0, seed=2)
    requests = [
        replace(one, arrival_s=at)
        for one, at in zip(workload(70, acceptance=0.8, certainty=0.4)[:200], times, strict=True)
    ]
    plain = simulate_open_loop(requests, FixedLength(0), curve, num_slots=32)
    scheduled = simulate_open_loop(requests, PrefixScheduler(curve), curve, num_slots=32)
    assert len(plain.served) == len(scheduled.served) == 200
    assert scheduled.latency(0.9) < 0.7 * plain.latency(0.9)
    assert scheduled.latency(0.5) <= scheduled.latency(0.9) <= scheduled.latency(0.99)


@pytest.mark.parametrize("num_slots", [1, 16, 64, 200])
def test_scheduler_keeps_up_with_plain_decoding_though_drafting_takes_time(num_slots: int) -> None:
    """Drafting takes a tenth of the shortest step; best fixed lengths include none at all."""
    curve = roofline(num_slots * (GAMMA + 1), flat=32)
    requests = workload(num_slots, acceptance=0.6, certainty=0.3)
    rates = with_draft_time(curve, 0.002)

    def found(policy: LengthPolicy) -> float:
        return simulate_closed_loop(
            requests, policy, curve, num_slots=num_slots, draft_seconds=0.002
        ).tokens_per_second

    best = max(found(FixedLength(length)) for length in range(GAMMA + 1))
    assert found(PausingDrafts(PrefixScheduler(rates), rates, curve)) >= 0.97 * best


@pytest.mark.parametrize("num_slots", [2, 6, 12, 24, 48, 96, 384])
def test_schedulers_stay_within_3_percent_of_the_best_fixed_length_at_every_load(
    num_slots: int,
) -> None:
    """Across the whole range, drafting time included, the best length chosen anew at each load."""
    curve = roofline(num_slots * (GAMMA + 1), flat=48)
    requests = workload(num_slots, acceptance=0.7, certainty=0.4)
    rates = with_draft_time(curve, 0.002)

    def found(policy: LengthPolicy) -> float:
        return simulate_closed_loop(
            requests, policy, curve, num_slots=num_slots, draft_seconds=0.002
        ).tokens_per_second

    best = max(found(FixedLength(length)) for length in range(GAMMA + 1))
    for policy in (PrefixScheduler(rates), AsyncPrefixScheduler(rates)):
        assert found(PausingDrafts(policy, rates, curve)) >= 0.97 * best, policy.name


def test_tens_of_thousands_of_requests_are_simulated() -> None:
    """20,000 short answers, 4,000 in flight: far beyond the flat part, plain decoding is best."""
    curve = roofline(4000 * 3, flat=512)
    rounds = synthetic_rounds(5000, num_draft_tokens=2, acceptance=0.6, certainty=0.4, seed=0)
    requests = [
        OfferedRequest(4 + index % 5, rounds[index % 4000 :][:10]) for index in range(20_000)
    ]
    plain = simulate_closed_loop(requests, FixedLength(0), curve, num_slots=4000)
    policy = PausingDrafts(PrefixScheduler(curve), curve, curve)
    scheduled = simulate_closed_loop(requests, policy, curve, num_slots=4000)
    assert len(plain.served) >= 16_000
    assert scheduled.tokens_per_second >= 0.97 * plain.tokens_per_second
    assert scheduled.verified_per_round < 0.5
