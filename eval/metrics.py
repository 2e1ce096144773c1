"""What the trace of a decoding run says: the one definition of accepted length, and its relatives.

*accepted_length* (the tau of the EAGLE papers): tokens emitted in rounds / rounds. The target's own
token of each round (bonus or correction) is included; the token that comes from prefill belongs to
no round; what lies after the end of the text is no part of it; all rounds of all prompts count
alike (micro mean). It is derived from a histogram (tokens emitted per round -> rounds), which is
kept.

*accepted_draft_tokens*: drafted tokens in the text / rounds, the target's own token excluded.

*acceptance by position* i (from 1), over rounds whose draft reaches depth i (a tree's deepest
node): joint, the share that kept i tokens or more; conditional, that share among rounds that kept
the first i - 1.

*verified nodes*: drafted tokens that the target read, per round: all nodes of a tree.

The same trace in the conventions of other tools (see `AcceptanceSummary`) shows that their numbers
differ by definition, not by decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.inference.records import RoundRecord

MAX_LOOP_TOKENS = 16
"""Longest repeated phrase that the repetition guard looks for, in tokens (our choice)."""
LOOP_SHARE = 0.5
"""A text is called repetitive when one loop covers this share of it (our choice) ..."""
MIN_LOOP_TOKENS = 16
"""... and at least this many tokens, so that a short list or a refrain is not."""


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance over some rounds. Means are None where there is nothing to average."""

    num_rounds: int
    histogram: dict[int, int]
    """Tokens emitted per round -> number of rounds."""
    accepted_length: float | None
    accepted_draft_tokens: float | None
    verified_nodes: float | None
    """Drafted tokens that the target read / rounds."""
    joint_acceptance: list[float | None]
    """By draft position, of the rounds that reach it."""
    conditional_acceptance: list[float | None]
    """By draft position, given that all positions before were accepted."""
    accepted_length_vllm: float | None
    """1 + accepted drafts / rounds with drafts, not cut at the end of the text (vLLM)."""
    joint_acceptance_vllm: list[float]
    """By draft position, of all rounds with drafts, not cut at the end of the text (vLLM)."""
    accepted_length_spec_bench: float | None
    """Mean over rounds of 1 + accepted drafts in the text. Spec-Bench's EAGLE entries: the 1 is the
    round's root, so that the token from prefill counts and the last bonus token does not."""


def emitted_histogram(rounds: Iterable[RoundRecord]) -> dict[int, int]:
    """Tokens emitted per round -> number of rounds, ascending."""
    return dict(sorted(Counter(record.emitted for record in rounds).items()))


def accepted_length(histogram: Mapping[int, int]) -> float | None:
    """Tokens emitted in rounds / rounds; None without rounds."""
    num_rounds = sum(histogram.values())
    if num_rounds == 0:
        return None
    return sum(emitted * count for emitted, count in histogram.items()) / num_rounds


def drafts_in_text(record: RoundRecord) -> tuple[int, int]:
    """(depth, accepted) of a round, without the drafts that lie after the end of the text."""
    if record.emitted <= record.accepted:
        return record.emitted, record.emitted
    return record.depth, record.accepted


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def acceptance_by_position(
    rounds: Iterable[RoundRecord],
) -> tuple[list[float | None], list[float | None]]:
    """(joint, conditional) acceptance by draft position, as the module docstring defines them."""
    pairs = [drafts_in_text(record) for record in rounds]
    joint: list[float | None] = []
    conditional: list[float | None] = []
    for position in range(1, max((depth for depth, _ in pairs), default=0) + 1):
        reached = [accepted for depth, accepted in pairs if depth >= position]
        kept = sum(accepted >= position for accepted in reached)
        joint.append(_ratio(kept, len(reached)))
        conditional.append(_ratio(kept, sum(accepted >= position - 1 for accepted in reached)))
    return joint, conditional


def summarise_rounds(rounds: Iterable[RoundRecord]) -> AcceptanceSummary:
    """All acceptance numbers of some rounds (of one prompt, one category, or everything)."""
    rounds = list(rounds)
    histogram = emitted_histogram(rounds)
    in_text = sum(drafts_in_text(record)[1] for record in rounds)
    joint, conditional = acceptance_by_position(rounds)
    mean_drafts = _ratio(in_text, len(rounds))
    drafting = [record for record in rounds if record.proposed > 0]
    verified = _ratio(sum(record.accepted for record in drafting), len(drafting))
    deepest = max((record.depth for record in drafting), default=0)
    return AcceptanceSummary(
        num_rounds=len(rounds),
        histogram=histogram,
        accepted_length=accepted_length(histogram),
        accepted_draft_tokens=mean_drafts,
        verified_nodes=_ratio(sum(record.proposed for record in rounds), len(rounds)),
        joint_acceptance=joint,
        conditional_acceptance=conditional,
        accepted_length_vllm=None if verified is None else 1.0 + verified,
        joint_acceptance_vllm=[
            sum(record.accepted >= position for record in drafting) / len(drafting)
            for position in range(1, deepest + 1)
        ],
        accepted_length_spec_bench=None if mean_drafts is None else 1.0 + mean_drafts,
    )


def macro_accepted_length(prompts: Iterable[Sequence[RoundRecord]]) -> float | None:
    """Mean over prompts of each prompt's accepted length; prompts without rounds are left out."""
    lengths = [accepted_length(emitted_histogram(rounds)) for rounds in prompts]
    known = [length for length in lengths if length is not None]
    return _ratio(sum(known), len(known))


@dataclass(frozen=True)
class Repetition:
    """How repetitive a text is: looping text is easy to draft and says little of a draft model."""

    distinct_ratio: float
    """Different tokens / tokens."""
    longest_loop: int
    """Tokens of the longest stretch that repeats one phrase of at most MAX_LOOP_TOKENS tokens."""
    repetitive: bool
    """One loop covers at least LOOP_SHARE of the text, and MIN_LOOP_TOKENS tokens."""


def measure_repetition(token_ids: Sequence[int]) -> Repetition:
    """Finds the longest loop of a text: a phrase of 1 to MAX_LOOP_TOKENS tokens, back to back."""
    longest = 0
    for period in range(1, MAX_LOOP_TOKENS + 1):
        run = 0
        for index in range(period, len(token_ids)):
            run = run + 1 if token_ids[index] == token_ids[index - period] else 0
            # The phrase itself counts once it has come twice in full.
            if run >= period:
                longest = max(longest, run + period)
    covers = max(MIN_LOOP_TOKENS, LOOP_SHARE * len(token_ids))
    return Repetition(
        distinct_ratio=len(set(token_ids)) / len(token_ids) if token_ids else 1.0,
        longest_loop=longest,
        repetitive=longest >= covers,
    )
