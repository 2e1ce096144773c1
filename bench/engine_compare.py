"""What `make engine-check` compares: rounds by vLLM's rules, totals, and complaints about them.

The rounds must be the same ones. vLLM drafts all its tokens in every round and cuts the text
afterwards; our decoder drafts no token that could not reach the text. So our answers are decoded
with room for a whole draft behind the last token, and rounds that begin behind it are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.inference.records import RoundRecord

TIE = 1e-3
"""Logits. Two float32 implementations of a model differ by less; texts that part there are ties."""
LENGTH_TOLERANCE = 0.03
"""Relative, between vLLM's accepted length and ours."""
EQUAL_PROMPTS = 0.75
"""Share of the prompts whose rounds must be the very same. A near tie in the draft's logits changes
a prompt's; another model changes nearly all: with every target layer off by one, SmolLM2-135M kept
2 of 8, though the accepted length fell by 1.9 % only."""
LOSS_TOLERANCE = 1e-4
"""Relative, between speculators' loss of a step and ours."""


@dataclass(frozen=True)
class Answer:
    """What one program made of a prompt, with its rounds counted by vLLM's rules."""

    token_ids: list[int]
    num_drafts: int
    """Rounds with drafted tokens."""
    accepted_by_position: list[int]
    """Rounds that accepted the token at each draft position."""
    matches: list[int] = field(default_factory=list)
    """Per round, the text's new tokens but the target's own; of our side only."""


@dataclass(frozen=True)
class Totals:
    """vLLM's numbers over some prompts."""

    prompts: int
    drafts: int
    accepted: int
    accepted_length: float
    """1 + accepted / drafts; nan without drafts."""
    by_position: list[float]
    """Accepted at each position / drafts."""


@dataclass
class Parting:
    """Where a text leaves another."""

    prompt: int
    token: int
    logit_gap: float
    """Between the two tokens, as the target sees them; inf where one text simply ends."""


def rounds_until(rounds: Sequence[RoundRecord], limit: int) -> list[RoundRecord]:
    """The rounds that begin while the text is shorter than `limit`; prefill wrote one token."""
    kept, length = [], 1
    for record in rounds:
        if length >= limit:
            break
        kept.append(record)
        length += record.emitted
    return kept


def rounds_with_limit(rounds: Sequence[RoundRecord], limit: int) -> list[RoundRecord]:
    """What the same rounds are when no token is drafted that cannot reach a text of `limit`.

    Args:
        rounds: of a chain, decoded with room for whole drafts, see `rounds_until`.
        limit: tokens of the text.
    """
    changed, length = [], 1
    for record in rounds:
        depth = min(record.depth, limit - length - 1)
        accepted = min(record.accepted, depth)
        emitted = min(record.emitted, limit - length)
        new = {"proposed": depth, "depth": depth, "accepted": accepted, "emitted": emitted}
        changed.append(dataclasses.replace(record, **new))
        length += emitted
    return changed


def add_up(answers: Sequence[Answer]) -> Totals:
    """vLLM's numbers over some prompts."""
    drafts = sum(answer.num_drafts for answer in answers)
    rows = [answer.accepted_by_position for answer in answers]
    by_position = [sum(column) for column in zip(*rows, strict=True)]
    return Totals(
        prompts=len(answers),
        drafts=drafts,
        accepted=sum(by_position),
        accepted_length=1 + sum(by_position) / drafts if drafts else float("nan"),
        by_position=[count / drafts for count in by_position] if drafts else [],
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs or that one of them lacks; None for equal texts."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def text_problems(what: str, partings: Sequence[Parting]) -> list[str]:
    """Complaints about texts that part where the target has no near tie."""
    return [
        f"{what}: prompt {one.prompt} parts from our plain text at token {one.token}, where the "
        f"target's logits of the two tokens are {one.logit_gap:.2g} apart (a tie is below {TIE})."
        for one in partings
        if not one.logit_gap < TIE
    ]


def equal_counts(ours: Sequence[Answer], theirs: Sequence[Answer]) -> int:
    """How many prompts have the same number of drafts, accepted at the same positions."""
    return sum(
        (a.num_drafts, a.accepted_by_position) == (b.num_drafts, b.accepted_by_position)
        for a, b in zip(ours, theirs, strict=True)
    )


def count_problems(what: str, ours: Totals, theirs: Totals, equal: int) -> list[str]:
    """Complaints about counts that do not agree, or that say nothing; `equal` prompts have the very
    same ones."""
    if not ours.prompts:
        return [f"{what}: every text parts from ours, so there is nothing to count."]
    if not ours.drafts or not theirs.drafts:
        return [f"{what}: {ours.drafts} drafts here, {theirs.drafts} in vLLM; nothing was drafted."]
    problems = []
    difference = theirs.accepted_length / ours.accepted_length - 1
    if abs(difference) > LENGTH_TOLERANCE:
        problems.append(
            f"{what}: accepted length {theirs.accepted_length:.3f} in vLLM, "
            f"{ours.accepted_length:.3f} here ({difference:+.1%}, allowed {LENGTH_TOLERANCE:.0%}); "
            f"by position {shares(theirs.by_position)} and {shares(ours.by_position)}."
        )
    if equal < EQUAL_PROMPTS * ours.prompts:
        problems.append(
            f"{what}: only {equal} of {ours.prompts} prompts have the same drafts and accepted "
            f"tokens in vLLM as here (expected: {EQUAL_PROMPTS:.0%}). The engine runs another draft"
            " than was trained, however near the totals are."
        )
    return problems


def loss_problems(
    what: str, ours: Sequence[float], theirs: Sequence[float], counts: Sequence[int], expected: int
) -> list[str]:
    """Complaints about losses per step that do not agree, or cover other predictions."""
    problems = [
        f"{what}, speculators: step {step} counts {count} predictions, ours {expected}."
        for step, count in enumerate(counts)
        if count != expected
    ]
    return problems + [
        f"{what}, speculators: step {step} has loss {b:.6f}, ours is {a:.6f} ({b / a - 1:+.1e} "
        f"relative, allowed {LOSS_TOLERANCE})."
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if not abs(b - a) <= LOSS_TOLERANCE * abs(a)
    ]


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
