"""Spec-Bench's conventions: its answer file, and the numbers that its scripts print.

Spec-Bench (Xia et al., arXiv 2401.07851; github.com/hemingkx/Spec-Bench, evaluation/) keeps one
JSON line per question; its speed.py and equal.py read them. Read at commit 132ba4c and written from
its format, not from its code. The conventions of its EAGLE entries:

    accept_lengths   one entry per step, of all turns in a row: 1 + drafted tokens in the text. The
                     1 is the root of the step, so that a text has sum(accept_lengths) tokens before
                     its last bonus token. Plain decoding: 1 per token.
    new_tokens, wall_time, decoding_steps   one entry per turn; ours count generated ids, seconds
                     with prefill, and rounds
    turns            texts without special tokens

Its numbers: mean accepted tokens, the mean over all steps; tokens per second, the mean over
questions of each question's tokens / time (for plain decoding it counts the re-tokenised text minus
one token instead; here both sides count generated ids); speed-up, the ratio of the two means. The
eight categories of MT-Bench count as one group, mt_bench.

Check: tests/test_spec_bench.py reads the files back by these rules.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.metrics import drafts_in_text
from draftsmith.eval.results import PromptResult, TurnResult
from draftsmith.inference.records import Generation

MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""Categories that Spec-Bench reports as one, `mt_bench`."""


@dataclass(frozen=True)
class SpecBenchNumbers:
    """What Spec-Bench's speed.py prints for one group; None where nothing was decoded plainly."""

    num_questions: int
    mean_accepted_tokens: float | None
    tokens_per_second: float
    """Mean over all questions."""
    num_timed: int
    """Questions of which all turns were decoded plainly too."""
    timed_tokens_per_second: float | None
    """Mean over these questions ..."""
    plain_tokens_per_second: float | None
    """... and their mean when decoded plainly."""
    speed_up: float | None


def accept_lengths(generation: Generation) -> list[int]:
    """One entry per round: 1 + drafted tokens in the text."""
    return [1 + drafts_in_text(record)[1] for record in generation.rounds]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _is_timed(result: PromptResult) -> bool:
    return all(turn.plain is not None for turn in result.turns)


def _plain(turn: TurnResult) -> Generation:
    assert turn.plain is not None, "timed questions were decoded plainly"
    return turn.plain


def _speed(result: PromptResult) -> float:
    tokens = sum(len(turn.generation.token_ids) for turn in result.turns)
    return tokens / sum(turn.seconds for turn in result.turns)


def _plain_speed(result: PromptResult) -> float:
    tokens = sum(len(_plain(turn).token_ids) for turn in result.turns)
    return tokens / sum(turn.plain_seconds for turn in result.turns)


def _numbers(results: Sequence[PromptResult]) -> SpecBenchNumbers:
    steps = [
        length
        for result in results
        for turn in result.turns
        for length in accept_lengths(turn.generation)
    ]
    timed = [result for result in results if _is_timed(result)]
    ours = _mean([_speed(result) for result in timed])
    plain = _mean([_plain_speed(result) for result in timed])
    speeds = [_speed(result) for result in results]
    return SpecBenchNumbers(
        num_questions=len(results),
        mean_accepted_tokens=_mean(steps),
        tokens_per_second=sum(speeds) / len(speeds),
        num_timed=len(timed),
        timed_tokens_per_second=ours,
        plain_tokens_per_second=plain,
        speed_up=None if ours is None or plain is None else ours / plain,
    )


def spec_bench_groups(results: Iterable[PromptResult]) -> dict[str, SpecBenchNumbers]:
    """Group -> its numbers: mt_bench, every other category, and overall."""
    groups: dict[str, list[PromptResult]] = {}
    everything = list(results)
    for result in everything:
        category = result.prompt.category
        groups.setdefault("mt_bench" if category in MT_BENCH else category, []).append(result)
    found = {name: _numbers(group) for name, group in groups.items()}
    return found | {"overall": _numbers(everything)}


def _line(
    result: PromptResult, model_id: str, choice: dict[str, Any], now: float
) -> dict[str, Any]:
    identity = result.prompt.id
    digest = hashlib.sha256(f"{model_id}/{identity}".encode()).hexdigest()
    return {
        # Spec-Bench sorts the lines by it, as numbers where they are numbers.
        "question_id": int(identity) if identity.isdecimal() else identity,
        "category": result.prompt.category,
        "answer_id": digest[:22],
        "model_id": model_id,
        "choices": [{"index": 0} | choice],
        "tstamp": now,
    }


def answer_lines(results: Iterable[PromptResult], model_id: str) -> list[dict[str, Any]]:
    """Lines of the answer file of the draft model (or of plain decoding without one)."""
    now = time.time()
    return [
        _line(
            result,
            model_id,
            {
                "turns": [turn.text.strip() for turn in result.turns],
                "decoding_steps": [len(turn.generation.rounds) for turn in result.turns],
                "new_tokens": [len(turn.generation.token_ids) for turn in result.turns],
                "wall_time": [turn.seconds for turn in result.turns],
                "accept_lengths": [
                    length for turn in result.turns for length in accept_lengths(turn.generation)
                ],
            },
            now,
        )
        for result in results
    ]


def plain_answer_lines(results: Iterable[PromptResult], model_id: str) -> list[dict[str, Any]]:
    """Lines of the answer file of plain decoding, for the questions that were decoded plainly."""
    now = time.time()
    lines = []
    for result in results:
        if not _is_timed(result):
            continue
        counts = [len(_plain(turn).token_ids) for turn in result.turns]
        choice = {
            "turns": [turn.plain_text.strip() for turn in result.turns],
            "decoding_steps": counts,
            "new_tokens": counts,
            "wall_time": [turn.plain_seconds for turn in result.turns],
            "accept_lengths": [1] * sum(counts),
        }
        lines.append(_line(result, model_id, choice, now))
    return lines


def to_jsonl(lines: Iterable[dict[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
