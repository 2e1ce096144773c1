"""Reading prompts and turning conversations into token ids."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.prompts import encode_turn, load_prompts


def test_bundled_prompts_are_eight_categories_of_twelve() -> None:
    prompts = load_prompts("bundled")
    assert len({prompt.id for prompt in prompts}) == 96
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) == 8
    assert set(counts.values()) == {12}
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def test_limit_keeps_the_first_of_every_category() -> None:
    limited = load_prompts("bundled", limit_per_category=2)
    assert set(Counter(prompt.category for prompt in limited).values()) == {2}
    assert [p for p in load_prompts("bundled") if p in limited] == limited


def test_plain_and_benchmark_rows_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Say hello."},
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": []},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    plain, benchmark = load_prompts(str(path))
    assert (plain.id, plain.category, plain.turns) == ("line-1", "all", ("Say hello.",))
    assert (benchmark.id, benchmark.category) == ("81", "writing")
    assert benchmark.turns == ("One?", "Two?")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "line 1: keys text; expected 'prompt'"),
        ('{"turns": []}', "expected 'prompt'"),
        ('{"turns": ["a", 3]}', "empty or not text"),
        ("[1]", "found list"),
        ("{oops", "not JSON"),
        ("", "has no prompts"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "used twice"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match="No prompt file at nowhere.jsonl"):
        load_prompts("nowhere.jsonl")


def test_second_prompt_contains_the_first_answer(tiny_tokenizer: Any) -> None:
    """E04."""
    ids = encode_turn(tiny_tokenizer, ["the cat?", "the dog?"], ["on the mat"], template_kwargs={})
    text = tiny_tokenizer.decode(ids)
    assert text == (
        "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\non the mat<|im_end|>\n"
        "<|im_start|>user\nthe dog?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_settings_reach_the_template(tiny_tokenizer: Any) -> None:
    """E08: a thinking switch changes the prompt."""
    tiny_tokenizer.chat_template += "{% if thinking %}think{% endif %}"
    plain = encode_turn(tiny_tokenizer, ["a"], [], template_kwargs={"thinking": False})
    thinking = encode_turn(tiny_tokenizer, ["a"], [], template_kwargs={"thinking": True})
    assert tiny_tokenizer.decode(thinking) == tiny_tokenizer.decode(plain) + "think"


def test_a_base_model_gets_plain_text(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = None
    ids = encode_turn(tiny_tokenizer, ["one", "two"], ["answer"], template_kwargs={})
    assert tiny_tokenizer.decode(ids) == "one\n\nanswer\n\ntwo"
    with pytest.raises(ValueError, match="no chat template"):
        encode_turn(tiny_tokenizer, ["one"], [], template_kwargs={"thinking": True})
