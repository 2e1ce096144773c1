"""The prefix scheduler: what it may read, what it finds, and that the text keeps the target's law.

METHODS: DSpark, algorithm 1, section 5.2 and appendix A. The enumeration adds up every draft of
every request, the lengths that a scheduler gives, and every decision of verification, with the
functions that `verify_chain` is made of. A scheduler that lets a token's own continuation decide
its admission must fail the same sums.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from operator import mul
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from verify_support import Table, joint_law, random_table

from draftsmith.inference.scheduler import (
    fixed_length,
    schedule,
    schedule_async,
    search_capacity,
    static_threshold,
    survival_from_confidences,
)
from draftsmith.inference.verify import acceptance_probabilities, replacement_probs

Chains = list[list[float]]
Lengths = Callable[[Chains], list[int]]
"""Survivals of every request -> how many tokens of each are verified."""

# Few distinct values, so that ties are common; certainty and impossibility among them.
CHANCES = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.8, 0.9, 1.0]) | st.floats(0.0, 1.0)
TAIL = st.lists(CHANCES, max_size=3)
CONFIDENCES = st.lists(st.lists(CHANCES, max_size=5), min_size=1, max_size=5)


@st.composite
def workloads(draw: st.DrawFn, *, convex: bool = False) -> tuple[Chains, list[float]]:
    """Survivals of some requests and a curve that may end anywhere past one token each."""
    survival = survival_from_confidences(draw(CONFIDENCES))
    longest = len(survival) + sum(map(len, survival)) + 2
    length = draw(st.integers(len(survival), longest))
    if not convex:
        return survival, draw(st.lists(st.floats(0.01, 100.0), min_size=length, max_size=length))
    # Step times with growing increments, from a flat start (memory-bound) on.
    increments = sorted(draw(st.lists(st.floats(0.0, 2.0), min_size=length, max_size=length)))
    seconds = itertools.accumulate(increments, initial=draw(st.floats(0.1, 5.0)))
    return survival, [1.0 / one for one in itertools.islice(seconds, length)]


def throughput(survival: Chains, lengths: Sequence[int], curve: Sequence[float]) -> float:
    tokens = len(survival) + sum(lengths)
    admitted = sum(sum(chain[:length]) for chain, length in zip(survival, lengths, strict=True))
    return (len(survival) + admitted) * curve[tokens - 1]


def all_lengths(survival: Chains, curve: Sequence[float]) -> list[tuple[int, ...]]:
    """Every choice of lengths that the curve reaches."""
    choices = itertools.product(*(range(len(chain) + 1) for chain in survival))
    return [lengths for lengths in choices if len(survival) + sum(lengths) <= len(curve)]


# ---- what it does ---------------------------------------------------------------------------


def test_admits_by_survival_until_a_token_no_longer_pays() -> None:
    """Two requests by hand: 0.9, 0.81 | 0.5; rates of 2 to 5 tokens."""
    survival = [[0.9, 0.81], [0.5]]
    # 2 * 10 = 20; 2.9 * 9 = 26.1; 3.71 * 8 = 29.68; 4.21 * 7 = 29.47: the third does not pay.
    assert schedule(survival, [11.0, 10.0, 9.0, 8.0, 7.0]) == [2, 0]
    assert schedule(survival, [11.0, 10.0, 9.0, 8.0, 7.5]) == [2, 1]
    assert schedule(survival, [11.0, 10.0, 6.0, 9.0, 9.0]) == [0, 0]  # Stops at the first drop.
    assert schedule(survival, [11.0, 10.0, 9.0]) == [1, 0]  # The curve ends.
    assert schedule([], [1.0]) == []


def test_equal_throughput_is_no_reason_to_admit() -> None:
    assert schedule([[0.5]], [3.0, 2.0]) == [0]
    assert schedule([[0.0, 0.0]], [1.0, 1.0, 1.0]) == [0]
    assert search_capacity([[0.5]], 1, [3.0, 2.0]) == 0


def test_equal_survival_goes_to_the_earlier_position_then_to_the_earlier_request() -> None:
    survival = [[1.0, 1.0], [1.0, 1.0]]
    flat = [1.0] * 6
    found = [schedule(survival, flat[:tokens]) for tokens in range(2, 7)]
    assert found == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_admitted_prefixes_fit_the_chains_and_the_curve(work: tuple[Chains, list[float]]) -> None:
    survival, curve = work
    for lengths in (schedule(survival, curve), schedule_async(survival, survival, curve)):
        assert all(0 <= n <= len(chain) for n, chain in zip(lengths, survival, strict=True))
        assert len(survival) + sum(lengths) <= len(curve)
        rest = [a for n, chain in zip(lengths, survival, strict=True) for a in chain[n : n + 1]]
        last = [chain[n - 1] for n, chain in zip(lengths, survival, strict=True) if n]
        # Nothing left out survives better than what is in.
        assert not rest or not last or max(rest) <= min(last)


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_every_admitted_token_raises_the_throughput(work: tuple[Chains, list[float]]) -> None:
    survival, curve = work
    admitted = schedule(survival, curve)
    values = []
    for tokens in range(len(survival), len(survival) + sum(admitted) + 1):
        lengths = schedule(survival, curve[:tokens])
        assert sum(lengths) == tokens - len(survival), "a shorter curve only ends it earlier"
        values.append(throughput(survival, lengths, curve))
    assert all(b > a * (1 - 1e-12) for a, b in itertools.pairwise(values))


@settings(max_examples=60, deadline=None)
@given(workloads(convex=True))
def test_no_choice_of_lengths_is_better_when_step_times_are_convex(
    work: tuple[Chains, list[float]],
) -> None:
    survival, curve = work
    best = max(throughput(survival, lengths, curve) for lengths in all_lengths(survival, curve))
    assert throughput(survival, schedule(survival, curve), curve) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_capacity_is_the_best_on_any_curve(work: tuple[Chains, list[float]]) -> None:
    survival, curve = work
    best = max(throughput(survival, lengths, curve) for lengths in all_lengths(survival, curve))
    lengths = schedule_async(survival, survival, curve)
    assert throughput(survival, lengths, curve) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(workloads(), CONFIDENCES)
def test_async_takes_the_best_current_tokens_up_to_the_old_capacity(
    work: tuple[Chains, list[float]], confidences: Chains
) -> None:
    survival, curve = work
    old = survival_from_confidences(confidences)
    found = schedule_async(old, survival, curve)
    chances = sorted(itertools.chain(*old), reverse=True)
    values = [
        (len(survival) + sum(chances[:count])) * curve[len(survival) + count - 1]
        for count in range(min(len(chances), len(curve) - len(survival)) + 1)
    ]
    capacity = search_capacity(old, len(survival), curve)
    assert values[capacity] == pytest.approx(max(values), rel=1e-9)
    assert sum(found) == min(capacity, sum(map(len, survival)))
    kept = sum(sum(chain[:n]) for n, chain in zip(found, survival, strict=True))
    best = sorted(itertools.chain(*survival), reverse=True)[: sum(found)]
    assert kept == pytest.approx(sum(best))


@settings(max_examples=60, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_order_of_requests_matters_only_among_equals(
    work: tuple[Chains, list[float]], random: object
) -> None:
    survival, curve = work
    order = list(range(len(survival)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = [survival[index] for index in order]
    for scheduler in (schedule, lambda a, sps: schedule_async(a, a, sps)):
        found, other = scheduler(survival, curve), scheduler(shuffled, curve)
        assert sum(found) == sum(other)
        values = list(itertools.chain(*survival))
        if len(set(values)) == len(values):
            assert [found[index] for index in order] == other


@settings(max_examples=60, deadline=None)
@given(workloads(), CONFIDENCES, st.data())
def test_nothing_beyond_the_next_token_is_read(
    work: tuple[Chains, list[float]], confidences: Chains, data: st.DataObject
) -> None:
    """Whatever follows the first token that was left out, the lengths are the same."""
    survival, curve = work
    old = survival_from_confidences(confidences)
    for scheduler in (schedule, lambda a, sps: schedule_async(old, a, sps)):
        lengths = scheduler(survival, curve)
        changed = []
        for chain, length in zip(survival, lengths, strict=True):
            known = chain[: length + 1]
            if len(known) > length:
                tail = itertools.accumulate([known[-1], *data.draw(TAIL)], mul)
                known = [*known[:-1], *tail]
            changed.append(known)
        assert scheduler(changed, curve) == lengths


def test_static_choices() -> None:
    confidences = [[0.9, 0.5, 0.95], [], [0.2, 0.9]]
    assert static_threshold(confidences, 0.0) == [3, 0, 2]
    assert static_threshold(confidences, 0.5) == [3, 0, 0]
    assert static_threshold(confidences, 0.8) == [1, 0, 0]
    assert fixed_length(confidences, 2) == [2, 0, 2]
    assert survival_from_confidences([[0.5, 0.5, 0.0], []]) == [[0.5, 0.25, 0.0], []]


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at 1 tokens, but 2 requests"):
        schedule([[0.5], [0.5]], [1.0])
    with pytest.raises(ValueError, match="ends at 1 tokens, but 2 requests"):
        schedule_async([], [[0.5], [0.5]], [1.0])
    with pytest.raises(ValueError, match="must be a positive number"):
        schedule([[0.5]], [1.0, 0.0])
    with pytest.raises(ValueError, match="must be a positive number"):
        schedule([[0.5]], [1.0, float("nan")])
    with pytest.raises(ValueError, match=r"request 0 rises from 0\.5 to 0\.6 at draft position 2"):
        schedule([[0.5, 0.6]], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"Request 1 has confidence 1\.5 at draft position 1"):
        survival_from_confidences([[0.5], [1.5]])


def test_thousands_of_requests_are_scheduled_at_once() -> None:
    """O(n log n): a quadratic search would need minutes."""
    generator = torch.Generator().manual_seed(0)
    confidences = torch.rand(4_000, 7, generator=generator).tolist()
    survival = survival_from_confidences(confidences)
    flat = [1.0] * 32_000
    assert sum(schedule(survival, flat)) == 28_000
    assert sum(schedule_async(survival, survival, flat)) == 28_000


# ---- that the text keeps its law ------------------------------------------------------------


class Request:
    """One request's target, draft model and confidences, each a table over prefixes."""

    def __init__(self, target: Table, proposal: Table, confidence: dict[tuple[int, ...], float]):
        self.target, self.proposal, self.confidence = target, proposal, confidence
        self.vocab = len(target[()])
        self._settled: dict[tuple[tuple[int, ...], tuple[int, ...]], list] = {}

    def drafts(self, text: tuple[int, ...], gamma: int) -> list[tuple[tuple[int, ...], float]]:
        """(drafted tokens, their probability) after a text."""
        found = []
        for drafted in itertools.product(range(self.vocab), repeat=gamma):
            weight = 1.0
            for place, token in enumerate(drafted):
                weight *= float(self.proposal[text + drafted[:place]][token])
            found.append((drafted, weight))
        return found

    def confidences(self, text: tuple[int, ...], drafted: tuple[int, ...]) -> list[float]:
        """Of every drafted token; each depends on the tokens before it alone."""
        return [self.confidence[text + drafted[:place]] for place in range(len(drafted))]

    def settle(
        self, text: tuple[int, ...], drafted: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], float]]:
        """(emitted tokens, probability): every outcome of verifying `drafted` after a text."""
        if (text, drafted) not in self._settled:
            p = torch.stack([self.target[text + drafted[:i]] for i in range(len(drafted) + 1)])
            if drafted:
                rows = [self.proposal[text + drafted[:i]] for i in range(len(drafted))]
                q = torch.stack(rows)
            else:
                q = p[:0]
            tokens = torch.tensor(drafted, dtype=torch.long)
            chances = acceptance_probabilities(tokens, q, p).tolist()
            outcomes = []
            for accepted in range(len(drafted) + 1):
                weight = 1.0 - chances[accepted] if accepted < len(drafted) else 1.0
                for chance in chances[:accepted]:
                    weight *= chance
                added = replacement_probs(q, p, torch.tensor(accepted)).tolist()
                outcomes += [
                    ((*drafted[:accepted], token), weight * chance)
                    for token, chance in enumerate(added)
                    if weight * chance > 0.0
                ]
            self._settled[text, drafted] = outcomes
        return self._settled[text, drafted]


def law_of_one_step(requests: Sequence[Request], gamma: int, lengths_of: Lengths) -> Tensor:
    """The joint law of the first gamma + 1 tokens of all requests: one scheduled step, then plain.

    Returns:
        [vocab] * ((gamma + 1) * requests).
    """
    plains = [joint_law(one.target, one.vocab, gamma + 1) for one in requests]
    law = torch.zeros([one.vocab for one in requests for _ in range(gamma + 1)]).double()
    for combination in itertools.product(*(one.drafts((), gamma) for one in requests)):
        survival = survival_from_confidences(
            [
                one.confidences((), drafted)
                for one, (drafted, _) in zip(requests, combination, strict=True)
            ]
        )
        lengths = lengths_of(survival)
        joint = torch.ones((), dtype=torch.float64)
        for one, plain, (drafted, weight), length in zip(
            requests, plains, combination, lengths, strict=True
        ):
            own = torch.zeros_like(plain)
            for emitted, chance in one.settle((), drafted[:length]):
                own[emitted] += chance * plain[emitted] / plain[emitted].sum()
            joint = torch.tensordot(joint, weight * own, dims=0)
        law += joint
    return law


def independent_law(requests: Sequence[Request], length: int) -> Tensor:
    law = torch.ones((), dtype=torch.float64)
    for one in requests:
        law = torch.tensordot(law, joint_law(one.target, one.vocab, length), dims=0)
    return law


def global_search(curve: Sequence[float]) -> Lengths:
    """The biased scheduler: the best point anywhere on the curve, from current confidences."""
    return lambda survival: schedule_async(survival, survival, curve)


PAPER_CURVE = [1.0, 0.5, 0.45]


def paper_request() -> Request:
    """Appendix A: target (.7, .3), draft (.5, .5), c_1 = .8, c_2 = .9 after A and 0 after B."""
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(2), repeat=n)]
    target = dict.fromkeys(prefixes, torch.tensor([0.7, 0.3], dtype=torch.float64))
    proposal = dict.fromkeys(prefixes, torch.tensor([0.5, 0.5], dtype=torch.float64))
    return Request(target, proposal, {(): 0.8, (0,): 0.9, (1,): 0.0})


def chance_of_a(lengths_of: Lengths) -> float:
    """How often the first token of the counterexample is A."""
    return float(law_of_one_step([paper_request()], 2, lengths_of)[0].sum())


@pytest.mark.lossless
def test_counterexample_of_the_paper_shows_the_global_search_biased() -> None:
    after_a, after_b = survival_from_confidences([[0.8, 0.9], [0.8, 0.0]])
    assert schedule_async([after_a], [after_a], PAPER_CURVE) == [2]
    assert schedule_async([after_b], [after_b], PAPER_CURVE) == [0]
    assert chance_of_a(global_search(PAPER_CURVE)) == pytest.approx(0.85, abs=1e-12)


@pytest.mark.lossless
def test_algorithm_1_is_exact_on_the_counterexample() -> None:
    for confidences in ([0.8, 0.9], [0.8, 0.0]):
        assert schedule(survival_from_confidences([confidences]), PAPER_CURVE) == [0]
    found = chance_of_a(lambda survival: schedule(survival, PAPER_CURVE))
    assert found == pytest.approx(0.70, abs=1e-12)


@pytest.mark.lossless
@pytest.mark.parametrize("old", [[], [[0.8, 0.72]], [[0.8, 0.0]], [[1.0, 1.0]]])
def test_old_confidences_are_exact_on_the_counterexample(old: Chains) -> None:
    found = chance_of_a(lambda survival: schedule_async(old, survival, PAPER_CURVE))
    assert found == pytest.approx(0.70, abs=1e-12)


def random_request(vocab: int, depth: int, seed: int) -> Request:
    """Random tables; confidences are mostly high or low, so that they decide something."""
    generator = torch.Generator().manual_seed(seed)
    proposal = random_table(vocab, depth, seed + 500, sharpness=1.0)
    sure = {prefix: torch.rand(2, generator=generator).tolist() for prefix in proposal}
    confidence = {prefix: a**0.1 if b < 0.6 else a**3 for prefix, (a, b) in sure.items()}
    return Request(random_table(vocab, depth, seed, sharpness=1.0), proposal, confidence)


def random_curve(length: int, num_requests: int, seed: int) -> list[float]:
    """A step down at the first drafted token, nearly flat after it: what tempts to look ahead."""
    generator = torch.Generator().manual_seed(seed)
    rates = 1.0 - 0.05 * torch.rand(length, generator=generator, dtype=torch.float64)
    rates[num_requests] = 0.65 - 0.2 * float(torch.rand((), generator=generator))
    return rates.cumprod(0).tolist()


def worst_errors(scheduler: Callable[[Sequence[float]], Lengths]) -> list[float]:
    """Largest errors of the joint law: two requests that compete, and one with three drafts."""
    errors = []
    for seed in range(12):
        requests = [random_request(2, 3, 10 * seed), random_request(2, 3, 10 * seed + 1)]
        law = law_of_one_step(requests, 2, scheduler(random_curve(6, 2, seed)))
        errors.append(float((law - independent_law(requests, 3)).abs().max()))
        requests = [random_request(3, 4, 10 * seed + 2)]
        law = law_of_one_step(requests, 3, scheduler(random_curve(4, 1, seed + 100)))
        errors.append(float((law - independent_law(requests, 4)).abs().max()))
    return errors


@pytest.mark.lossless
def test_joint_law_of_competing_requests_is_the_targets() -> None:
    def algorithm_1(curve: Sequence[float]) -> Lengths:
        return lambda survival: schedule(survival, curve)

    assert max(worst_errors(algorithm_1)) < 1e-12


@pytest.mark.lossless
def test_anticipating_schedulers_are_seen_by_the_enumeration() -> None:
    errors = worst_errors(global_search)
    assert sum(error > 1e-3 for error in errors) >= 4
    assert max(errors) > 1e-2

    def drops_unlikely_chains(_: Sequence[float]) -> Lengths:
        """All or nothing by the survival of the whole chain."""
        return lambda survival: [len(a) if a[-1] > 0.1 else 0 for a in survival]

    assert max(worst_errors(drops_unlikely_chains)) > 1e-2


def law_of_steps(
    request: Request, gamma: int, length: int, lengths_of: Callable[[list[Chains], Chains], int]
) -> Tensor:
    """The law of `length` tokens over as many scheduled steps as they take.

    Args:
        request: its tables reach as deep as `length` tokens and a draft.
        gamma: drafted tokens per step.
        length: of the text, in tokens.
        lengths_of: (survivals of the steps before, survivals now) -> verified tokens.
    """
    law = torch.zeros([request.vocab] * length, dtype=torch.float64)

    def walk(text: tuple[int, ...], past: list[Chains], weight: float) -> None:
        if len(text) >= length:
            law[text[:length]] += weight
            return
        for drafted, chance in request.drafts(text, gamma):
            survival = survival_from_confidences([request.confidences(text, drafted)])
            verified = drafted[: lengths_of(past, survival)]
            for emitted, probability in request.settle(text, verified):
                walk(text + emitted, [*past, survival], weight * chance * probability)

    walk((), [], 1.0)
    return law


@pytest.mark.lossless
@pytest.mark.parametrize("delay", [2, 1, 0])
def test_capacity_from_earlier_steps_is_exact_over_several_steps(delay: int) -> None:
    """Confidences of drafts that are decided are safe, also of rejected ones; those of now are not.

    Four tokens take two to four steps, so that a capacity of two steps ago is really used.
    """
    request = random_request(2, 6, 7)
    # Sure after token 0, doubtful after token 1.
    request.confidence = {prefix: 0.1 if prefix[-1:] == (1,) else 0.95 for prefix in request.target}
    curve = [1.0, 0.45, 0.4]
    used = set()

    def length_now(past: list[Chains], survival: Chains) -> int:
        known = [*past, survival]
        old = known[-1 - delay] if len(known) > delay else []
        (length,) = schedule_async(old, survival, curve)
        if len(known) > delay:
            used.add(length)
        return length

    error = law_of_steps(request, 2, 4, length_now) - joint_law(request.target, 2, 4)
    assert len(used) > 1, "the capacity must vary, or nothing is tested"
    if delay:
        assert error.abs().max() < 1e-12
    else:
        assert error.abs().max() > 1e-3
