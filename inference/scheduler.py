"""How many drafted tokens of each request are worth verifying, given what a forward costs.

DSpark's hardware-aware prefix scheduler (DSpark: confidence-scheduled speculative decoding with
semi-autoregressive generation, DeepSeek-AI 2026, section 3.2 and algorithm 1) and its asynchronous
variant (section 5.2), as pure functions, with the static choices they are compared with.

    survival = survival_from_confidences(confidences)  # a_1 >= a_2 >= ... of every request
    lengths = schedule(survival, steps_per_second)

Why it stays lossless. Verification is exact when the decision to verify token j is taken without
knowledge of token j: a discarded token is then replaced by a draw from the target, whatever it was.
The confidence of token j may depend on tokens 1 .. j - 1, so a_(j+1) tells about token j, and a
search that looks at the whole chain lets a token's own continuation decide whether it is admitted
(the paper's appendix A: one token comes out with probability 0.85 instead of 0.70). `schedule`
admits in descending order of survival and stops at the first token that does not raise the expected
throughput. It holds only the next token of every request, so it cannot read further ahead than one
token beyond what it admits. The asynchronous variant may search everywhere, because its capacity
comes from confidences of drafts that are long decided; it takes the best tokens of now up to there.

What the caller must keep: a confidence may depend on the tokens before its own, never on its own;
and drafts are not drawn again because of what was scheduled.

How to check: tests/test_scheduler.py enumerates every draft and every decision, with the biased
search as a control.

Axes: requests; tokens, 1 and up (`steps_per_second[i]` is the rate of a forward of i + 1 tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, islice, takewhile
from operator import mul

Chains = Sequence[Sequence[float]]
"""One number per drafted token of every request; requests may have drafted different lengths."""


def survival_from_confidences(confidences: Chains) -> list[list[float]]:
    """a_j = c_1 ... c_j: the chance that tokens 1 to j all stay.

    Args:
        confidences: chance of each token to stay given that all before it do, in [0, 1].

    Returns:
        The same shape, non-increasing for each request.

    Raises:
        ValueError: a confidence outside [0, 1], or not a number.
    """
    for request, chain in enumerate(confidences):
        for position, chance in enumerate(chain, start=1):
            if not 0.0 <= chance <= 1.0:
                raise ValueError(
                    f"Request {request} has confidence {chance} at draft position {position}; "
                    "expected a probability."
                )
    return [list(accumulate(chain, mul)) for chain in confidences]


def schedule(survival: Chains, steps_per_second: Sequence[float]) -> list[int]:
    """Algorithm 1: verification lengths that raise the expected tokens per second, step by step.

    A forward of B tokens, one root per request and the admitted drafts, is expected to emit
    tau = requests + (sum of admitted survivals) tokens and runs SPS(B) times a second. The token
    with the highest survival is admitted while tau * SPS(B) grows; the first that does not raise
    it ends the search. O(requests + admitted * log(requests)).

    On a curve whose step time 1 / SPS(B) is convex, no choice of lengths does better; on a jagged
    curve the search may end early (give it the monotone envelope, or use `schedule_async`).

    Args:
        survival: non-increasing for each request; see `survival_from_confidences`.
        steps_per_second: [tokens] rates, at least one per request. Where it ends, admission ends.

    Returns:
        One length per request, 0 up to the number of its drafted tokens.

    Raises:
        ValueError: the curve ends before one token per request or has a rate that is not positive;
            a survival that rises along its chain.
    """
    lengths = [0] * len(survival)
    if not survival:
        return lengths
    _check_curve(steps_per_second, len(survival))
    expected = float(len(survival))
    best = expected * steps_per_second[len(survival) - 1]
    rates = islice(steps_per_second, len(survival), None)
    for rate, (request, chance) in zip(rates, _descending(survival), strict=False):
        expected += chance
        if not expected * rate > best:
            break
        best = expected * rate
        lengths[request] += 1
    return lengths


def schedule_async(
    old_survival: Chains, survival: Chains, steps_per_second: Sequence[float]
) -> list[int]:
    """The asynchronous variant: how many from old confidences, which ones from the current.

    The number of drafted tokens K is known two steps ahead, so that the forward can be laid out
    while confidences are still being computed. The search for K is over the whole curve, however
    jagged: it reads nothing of the drafts that it decides on.

    Args:
        old_survival: survivals of an earlier step (DSpark: two steps old). They need not belong to
            the same requests: what has left stands for what came in its place.
        survival: current survivals; non-increasing for each request.
        steps_per_second: see `schedule`.

    Returns:
        One length per request; their sum is K, or less where less was drafted.

    Raises:
        ValueError: as `schedule`.
    """
    lengths = [0] * len(survival)
    if not survival:
        return lengths
    capacity = search_capacity(old_survival, len(survival), steps_per_second)
    for request, _ in islice(_descending(survival), capacity):
        lengths[request] += 1
    return lengths


def search_capacity(survival: Chains, num_requests: int, steps_per_second: Sequence[float]) -> int:
    """The number of drafted tokens with the highest expected throughput, anywhere on the curve.

    Safe only where `survival` tells nothing about the drafts that are decided on; the smallest of
    equally good numbers is taken.

    Args:
        survival: see `schedule_async`.
        num_requests: requests that share the forward, at least 1.
        steps_per_second: see `schedule`.

    Raises:
        ValueError: as `schedule`.
    """
    _check_curve(steps_per_second, num_requests)
    chances = (chance for _, chance in _descending(survival))
    expected = accumulate(chances, initial=float(num_requests))
    rates = steps_per_second[num_requests - 1 :]
    throughputs = [tokens * rate for tokens, rate in zip(expected, rates, strict=False)]
    return throughputs.index(max(throughputs))


def static_threshold(confidences: Chains, threshold: float) -> list[int]:
    """Verify while the confidence is at least `threshold`, whatever the load (DSpark, offline).

    Args:
        confidences: chance of each token to stay given that all before it do.
        threshold: 0 verifies everything.
    """
    return [len(list(takewhile(lambda c: c >= threshold, chain))) for chain in confidences]


def fixed_length(chains: Chains, length: int) -> list[int]:
    """The same number of drafted tokens for every request, or all that it has."""
    return [min(length, len(chain)) for chain in chains]


def _descending(survival: Chains) -> Iterator[tuple[int, float]]:
    """(request, survival) of drafted tokens, the likeliest first; a token comes after those before.

    Equal ones: the earlier draft position first, then the earlier request. Only the next token of
    each request is looked at.
    """
    heads = [(-chain[0], 1, request) for request, chain in enumerate(survival) if len(chain)]
    heapify(heads)
    while heads:
        negative, position, request = heads[0]
        yield request, -negative
        chain = survival[request]
        if position == len(chain):
            heappop(heads)
            continue
        following = chain[position]
        if not following <= -negative:
            raise ValueError(
                f"The survival of request {request} rises from {-negative} to {following} at draft "
                f"position {position + 1}. Give the chance that all tokens up to there stay: "
                "survival_from_confidences(confidences)."
            )
        heapreplace(heads, (-following, position + 1, request))


def _check_curve(steps_per_second: Sequence[float], num_requests: int) -> None:
    if len(steps_per_second) < num_requests:
        raise ValueError(
            f"The steps-per-second curve ends at {len(steps_per_second)} tokens, but "
            f"{num_requests} requests need one each. Measure it further (draftsmith-profile "
            "token_counts=...), or decode fewer requests at a time."
        )
    if not all(rate > 0.0 for rate in steps_per_second):
        worst = next(rate for rate in steps_per_second if not rate > 0.0)
        raise ValueError(
            f"The steps-per-second curve has {worst}; every rate must be a positive number."
        )
