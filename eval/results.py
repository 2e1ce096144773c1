"""What an evaluation found, and the numbers drawn from it for one category or for all prompts.

Both sides of a speed-up are counted alike: generated token ids over wall-clock seconds, prefill
included, on the same prompts in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.eval.metrics import (
    AcceptanceSummary,
    Repetition,
    accepted_length,
    emitted_histogram,
    macro_accepted_length,
    measure_repetition,
    summarise_rounds,
)
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.eval.simulated import SimulatedAcceptance
from draftsmith.inference.plain import Divergence
from draftsmith.inference.records import Generation, RoundRecord


@dataclass
class TurnResult:
    """One answer."""

    prompt_ids: list[int]
    generation: Generation
    text: str
    """The answer without special tokens."""
    repetition: Repetition
    token_texts: list[str]
    """The text of each generated token; joined, the answer with its special tokens."""
    seconds: float
    """What counts for this answer's speed: its own wall-clock time; in a batch, its share by tokens
    of the time that the batch took."""
    plain: Generation | None = None
    """Plain decoding of the same prompt, where it was timed."""
    plain_seconds: float = 0.0
    """As `seconds`, of the plain run."""
    plain_text: str = ""
    """As `text`, of the plain run."""
    checked: bool = False
    """Compared with the target's own greedy answer."""
    divergence: Divergence | None = None
    """Where it differs from that answer; None when equal or not checked."""
    prompt_lookup_rounds: list[RoundRecord] | None = None
    """Rounds that prompt lookup would have needed (greedy only)."""


@dataclass
class PromptResult:
    """All turns of one prompt."""

    prompt: Prompt
    turns: list[TurnResult] = field(default_factory=list)

    @property
    def rounds(self) -> list[RoundRecord]:
        """Of all turns."""
        return [record for turn in self.turns for record in turn.generation.rounds]

    @property
    def acceptance(self) -> AcceptanceSummary:
        return summarise_rounds(self.rounds)


LosslessStatus = Literal["equal", "near_ties", "different", "by_construction", "not_checked"]

LOSSLESS_TEXT: dict[LosslessStatus, str] = {
    "equal": "lossless: every answer is the target's own greedy answer, token for token",
    "near_ties": "differs from plain greedy decoding only at near ties of the target's logits, "
    "which rounding decides (evaluate with target.dtype=float32 for an exact comparison)",
    "different": "NOT LOSSLESS: answers differ from the target's own greedy answers",
    "by_construction": "sampled: lossless by construction (exact speculative sampling); texts of "
    "two runs are not comparable token for token",
    "not_checked": "not checked",
}


@dataclass(frozen=True)
class Losslessness:
    """The verdict on some answers."""

    status: LosslessStatus
    checked: int
    """Answers compared."""
    equal: int
    """Of these, equal to the target's own."""

    @property
    def text(self) -> str:
        counts = f" ({self.equal} of {self.checked} answers equal)" if self.checked else ""
        return LOSSLESS_TEXT[self.status] + counts


@dataclass(frozen=True)
class TimedComparison:
    """Speed on the answers that were decoded both ways."""

    answers: int
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class GroupSummary:
    """The numbers of one category, or of all prompts."""

    num_prompts: int
    num_answers: int
    new_tokens: int
    """Tokens generated, the ones from prefill included."""
    acceptance: AcceptanceSummary
    macro_accepted_length: float | None
    """Mean over prompts of each prompt's accepted length."""
    tokens_per_second: float
    """Over all answers, prefill included."""
    timed: TimedComparison | None
    seconds: dict[str, float]
    """prefill, draft, verify and other, summed."""
    round_overhead: float | None
    """other / (draft + verify): what a round costs beyond its forwards."""
    draft_ms: float | None
    """Milliseconds of drafting, median over the rounds with drafted tokens."""
    verify_ms: float | None
    """Milliseconds of the target's forward, median over the same rounds."""
    lossless: Losslessness
    repetitive_answers: int
    distinct_ratio: float
    """Mean over answers of different tokens / tokens."""
    longest_loop: int
    """Longest loop of any answer, in tokens."""
    accepted_length_without_repetitive: float | None
    prompt_lookup: AcceptanceSummary | None


def judge(turns: Sequence[TurnResult], *, greedy: bool) -> Losslessness:
    """The losslessness verdict on some answers."""
    checked = [turn for turn in turns if turn.checked]
    found = [turn.divergence for turn in checked if turn.divergence is not None]
    status: LosslessStatus
    if not greedy:
        status = "by_construction"
    elif not checked:
        status = "not_checked"
    elif not found:
        status = "equal"
    else:
        status = "near_ties" if all(one.near_tie for one in found) else "different"
    return Losslessness(status, len(checked), len(checked) - len(found))


def compare_speed(turns: Sequence[TurnResult]) -> TimedComparison | None:
    """Tokens per second both ways, over the answers with a plain run; None without any."""
    ours = [(turn.generation, turn.seconds) for turn in turns if turn.plain is not None]
    plain = [(turn.plain, turn.plain_seconds) for turn in turns if turn.plain is not None]
    if not ours:
        return None
    return TimedComparison(len(ours), throughput(ours), throughput(plain))


def throughput(timed: Sequence[tuple[Generation, float]]) -> float:
    """Generated tokens / wall-clock seconds, prefill included."""
    tokens = sum(len(generation.token_ids) for generation, _ in timed)
    return tokens / sum(seconds for _, seconds in timed)


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1000.0 * statistics.median(seconds) if seconds else None


def summarise(results: Sequence[PromptResult], *, greedy: bool) -> GroupSummary:
    """Draws the numbers of at least one prompt together."""
    turns = [turn for result in results for turn in result.turns]
    generations = [turn.generation for turn in turns]
    rounds = [record for result in results for record in result.rounds]
    lookup = [turn.prompt_lookup_rounds for turn in turns if turn.prompt_lookup_rounds is not None]
    varied = [
        record
        for turn in turns
        if not turn.repetition.repetitive
        for record in turn.generation.rounds
    ]
    seconds = {
        "prefill": sum(generation.prefill_seconds for generation in generations),
        "draft": sum(record.draft_seconds for record in rounds),
        "verify": sum(record.verify_seconds for record in rounds),
        "other": sum(record.other_seconds for record in rounds),
    }
    forwards = seconds["draft"] + seconds["verify"]
    return GroupSummary(
        num_prompts=len(results),
        num_answers=len(turns),
        new_tokens=sum(len(generation.token_ids) for generation in generations),
        acceptance=summarise_rounds(rounds),
        macro_accepted_length=macro_accepted_length(result.rounds for result in results),
        tokens_per_second=throughput([(turn.generation, turn.seconds) for turn in turns]),
        timed=compare_speed(turns),
        seconds=seconds,
        round_overhead=seconds["other"] / forwards if forwards else None,
        draft_ms=_median_ms([record.draft_seconds for record in rounds if record.proposed]),
        verify_ms=_median_ms([record.verify_seconds for record in rounds if record.proposed]),
        lossless=judge(turns, greedy=greedy),
        repetitive_answers=sum(turn.repetition.repetitive for turn in turns),
        distinct_ratio=sum(turn.repetition.distinct_ratio for turn in turns) / len(turns),
        longest_loop=max(turn.repetition.longest_loop for turn in turns),
        accepted_length_without_repetitive=accepted_length(emitted_histogram(varied)),
        prompt_lookup=summarise_rounds(r for rounds in lookup for r in rounds) if lookup else None,
    )


@dataclass
class EvaluationResult:
    """Everything one evaluation found."""

    settings: EvaluationSettings
    target: str
    draft: str | None
    prompts: list[PromptResult]
    environment: dict[str, Any]
    """Versions, device, dtype, threads and processes."""
    warm_up: str
    """What ran before the clock counted."""
    template: str
    """How prompts became text, see `template_mode`."""
    simulated: SimulatedAcceptance | None = None
    """What training recorded, where it is known."""

    @property
    def turns(self) -> list[TurnResult]:
        """All answers."""
        return [turn for result in self.prompts for turn in result.turns]

    @property
    def overall(self) -> GroupSummary:
        return summarise(self.prompts, greedy=self.settings.sampling.greedy)

    @property
    def by_category(self) -> dict[str, GroupSummary]:
        """Category -> its numbers, in the order of the prompts."""
        groups: dict[str, list[PromptResult]] = {}
        for result in self.prompts:
            groups.setdefault(result.prompt.category, []).append(result)
        greedy = self.settings.sampling.greedy
        return {name: summarise(group, greedy=greedy) for name, group in groups.items()}


def describe_answer(
    prompt_ids: list[int],
    generation: Generation,
    text: str,
    *,
    token_texts: Sequence[str] = (),
    seconds: float | None = None,
) -> TurnResult:
    """A fresh `TurnResult`, its repetition measured; `seconds` None takes the generation's own."""
    return TurnResult(
        prompt_ids,
        generation,
        text,
        measure_repetition(generation.token_ids),
        list(token_texts),
        generation.seconds if seconds is None else seconds,
    )
