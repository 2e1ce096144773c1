"""Spec-Bench's answer file: read back by the rules of its speed.py and equal.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.eval.prompts import Prompt
from draftsmith.eval.results import PromptResult, TurnResult, describe_answer
from draftsmith.eval.spec_bench import (
    MT_BENCH,
    accept_lengths,
    answer_lines,
    plain_answer_lines,
    spec_bench_groups,
    to_jsonl,
)
from draftsmith.inference.records import Generation, RoundRecord


def answer(
    rounds: list[tuple[int, int]], seconds: float, plain_seconds: float | None = None
) -> TurnResult:
    """Rounds of (accepted, emitted) with 4 drafted tokens each, after one token from prefill."""
    records = [RoundRecord(4, 4, accepted, emitted, 0.0, 0.0, 0.0) for accepted, emitted in rounds]
    count = 1 + sum(emitted for _, emitted in rounds)
    turn = describe_answer([1], Generation([5] * count, "stop", records, seconds, 0.0), " text ")
    if plain_seconds is not None:
        turn.plain = Generation([5] * count, "stop", [], plain_seconds, 0.0)
        turn.plain_seconds, turn.plain_text = plain_seconds, " text\n"
    return turn


def question(identity: str, category: str, *turns: TurnResult) -> PromptResult:
    return PromptResult(Prompt(identity, category, ("x",) * len(turns)), list(turns))


RESULTS = [
    # 8 tokens in 2 s, plainly in 4 s: a last round that is cut after 2 of its 4 drafts.
    question("81", "writing", answer([(4, 5), (4, 2)], 2.0, 4.0)),
    # Two turns of 3 and 4 tokens in 1 s together, plainly in 2 s.
    question("101", "reasoning", answer([(1, 2)], 0.5, 1.0), answer([(2, 3)], 0.5, 1.0)),
    # 6 tokens in 3 s, not decoded plainly.
    question("161", "translation", answer([(4, 5)], 3.0)),
]


def read_back(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_answer_file_has_the_keys_and_conventions_that_its_scripts_read() -> None:
    lines = read_back(to_jsonl(answer_lines(RESULTS, "eagle3")))
    for line in lines:
        assert set(line) == {
            "question_id",
            "category",
            "answer_id",
            "model_id",
            "choices",
            "tstamp",
        }
        assert set(line["choices"][0]) == {
            "index",
            "turns",
            "decoding_steps",
            "new_tokens",
            "wall_time",
            "accept_lengths",
        }
    assert [line["question_id"] for line in lines] == [81, 101, 161], "numbers, as it sorts by them"
    assert len({line["answer_id"] for line in lines}) == 3
    first, second = lines[0]["choices"][0], lines[1]["choices"][0]
    assert first["accept_lengths"] == [5, 3]
    assert first["decoding_steps"] == [2]
    assert first["new_tokens"] == [8]
    assert second["accept_lengths"] == [2, 3], "both turns in a row"
    assert (second["new_tokens"], second["wall_time"]) == ([3, 4], [0.5, 0.5])
    assert second["turns"] == ["text", "text"]


def test_steps_count_their_root_so_that_only_the_last_bonus_token_is_missing() -> None:
    whole = answer([(2, 3), (0, 1), (4, 5)], 1.0)
    assert sum(accept_lengths(whole.generation)) == len(whole.generation.token_ids) - 1
    # The text ends with a drafted token: no bonus token is missing.
    cut = answer([(2, 3), (4, 2)], 1.0)
    assert sum(accept_lengths(cut.generation)) == len(cut.generation.token_ids)


def test_the_plain_file_holds_the_questions_that_were_timed() -> None:
    lines = read_back(to_jsonl(plain_answer_lines(RESULTS, "plain")))
    assert [line["question_id"] for line in lines] == [81, 101]
    choice = lines[1]["choices"][0]
    assert choice["accept_lengths"] == [1] * 7, "one per token"
    assert choice["decoding_steps"] == choice["new_tokens"] == [3, 4]
    assert choice["wall_time"] == [1.0, 1.0]
    # What equal.py compares: the texts of a question, as a list.
    ours = {line["question_id"]: line for line in answer_lines(RESULTS, "eagle3")}
    for line in lines:
        assert str(line["choices"][0]["turns"]) == str(
            ours[line["question_id"]]["choices"][0]["turns"]
        )


def speed_of_lines(lines: list[dict[str, Any]], task: str) -> tuple[float, float]:
    """(mean accepted tokens, mean over questions of tokens / time), as Spec-Bench computes them."""
    chosen = [
        line["choices"][0]
        for line in lines
        if task == "overall" or line["category"] in (MT_BENCH if task == "mt_bench" else (task,))
    ]
    steps = [length for choice in chosen for length in choice["accept_lengths"]]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in chosen]
    return sum(steps) / len(steps), sum(speeds) / len(speeds)


def test_our_numbers_are_those_of_its_scripts_on_our_file() -> None:
    groups = spec_bench_groups(RESULTS)
    assert list(groups) == ["mt_bench", "translation", "overall"]
    lines = read_back(to_jsonl(answer_lines(RESULTS, "eagle3")))
    plain = read_back(to_jsonl(plain_answer_lines(RESULTS, "plain")))
    for name, found in groups.items():
        mean, speed = speed_of_lines(lines, name)
        assert found.mean_accepted_tokens == pytest.approx(mean)
        assert found.tokens_per_second == pytest.approx(speed)
    bench = groups["mt_bench"]
    assert (bench.num_questions, bench.num_timed) == (2, 2)
    assert bench.mean_accepted_tokens == pytest.approx((5 + 3 + 2 + 3) / 4)
    _, plain_speed = speed_of_lines(plain, "mt_bench")
    assert bench.plain_tokens_per_second == pytest.approx(plain_speed)
    assert bench.speed_up == pytest.approx((8 / 2 + 7 / 1) / (8 / 4 + 7 / 2))
    # The question that was not decoded plainly is on neither side of the ratio.
    assert groups["overall"].speed_up == pytest.approx(bench.speed_up)
    assert groups["translation"].speed_up is None
