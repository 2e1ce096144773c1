"""draftsmith-regenerate: the target's own answers, resumable, cut answers marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.conf.schema import RegenerateConfig, TargetConfig
from draftsmith.data.regenerate import read_prompts, row_seed, run

PROMPTS = [
    {"id": "a", "category": "chat", "turns": ["the cat sat"]},
    {"id": "b", "category": "chat", "turns": ["count one two three", "and four five"]},
    {"id": "c", "category": "code", "turns": ["def add(a, b):"]},
]


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture
def settings(tmp_path: Path, tiny_llama_folder: Path) -> Callable[..., RegenerateConfig]:
    def make(**changes: Any) -> RegenerateConfig:
        values: dict[str, Any] = {
            "target": TargetConfig(name_or_path=str(tiny_llama_folder), dtype="float32"),
            "prompts": str(write_prompts(tmp_path)),
            "output": str(tmp_path / "answers.jsonl"),
            "max_new_tokens": 24,
            "batch_size": 2,
        }
        return RegenerateConfig(**(values | changes))

    return make


def rows_by_key(output: str) -> dict[tuple[str, int], dict[str, Any]]:
    lines = Path(output).read_text().splitlines()
    return {(row["id"], row["sample"]): row for row in map(json.loads, lines)}


def test_answers_are_the_targets_own_greedy_ones(
    settings: Callable[..., RegenerateConfig], tiny_target: Callable[..., Any]
) -> None:
    config = settings()
    run(config)
    rows, target = rows_by_key(config.output), tiny_target("llama")
    assert set(rows) == {("a", 0), ("b", 0), ("c", 0)}
    for row in rows.values():
        assert len(row["messages"]) == 2 * len(row["finish_reasons"])
        for turn, reason in enumerate(row["finish_reasons"]):
            history = row["messages"][: 2 * turn + 1]
            prompt = target.tokenizer.apply_chat_template(
                history, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            generated = target.model.generate(
                **prompt,
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=list(target.eos_token_ids),
                pad_token_id=0,
            )[0, prompt["input_ids"].shape[1] :]
            stopped = generated[-1].item() in target.eos_token_ids
            assert reason == ("stop" if stopped else "length")
            text = target.tokenizer.decode(generated, skip_special_tokens=True)
            assert row["messages"][2 * turn + 1] == {"role": "assistant", "content": text}


def test_a_cut_answer_ends_its_conversation(settings: Callable[..., RegenerateConfig]) -> None:
    config = settings(max_new_tokens=2)
    run(config)
    row = rows_by_key(config.output)[("b", 0)]
    assert row["finish_reasons"] == ["length"]
    assert len(row["messages"]) == 2


def test_a_stopped_run_is_continued_and_nothing_is_written_twice(
    settings: Callable[..., RegenerateConfig],
) -> None:
    config = settings(temperature=1.0, samples_per_prompt=2)
    run(config)
    whole = rows_by_key(config.output)
    lines = Path(config.output).read_text().splitlines(keepends=True)
    assert len(lines) == 6
    # The writer was killed while it wrote its third line.
    Path(config.output).write_text("".join(lines[:2]) + lines[2][:20])
    run(config)
    again = Path(config.output).read_text().splitlines(keepends=True)
    assert again[:2] == lines[:2]
    assert len(again) == 6
    assert rows_by_key(config.output) == whole
    untouched = Path(config.output).stat().st_mtime_ns
    run(config)
    assert rows_by_key(config.output) == whole
    assert Path(config.output).stat().st_mtime_ns >= untouched


def test_other_settings_do_not_mix_into_an_output(
    settings: Callable[..., RegenerateConfig],
) -> None:
    run(settings())
    with pytest.raises(ValueError, match=r"max_new_tokens=24 \(now 25\)"):
        run(settings(max_new_tokens=25))


def test_samples_of_one_prompt_differ(settings: Callable[..., RegenerateConfig]) -> None:
    config = settings(temperature=1.0, samples_per_prompt=2)
    run(config)
    rows = rows_by_key(config.output)
    assert any(rows[(i, 0)]["messages"] != rows[(i, 1)]["messages"] for i in "abc")
    assert row_seed(0, ("a", 0), 0) != row_seed(0, ("a", 1), 0)


def test_a_target_without_chat_template_is_refused(
    settings: Callable[..., RegenerateConfig], tiny_folder: Callable[..., Path]
) -> None:
    base = str(tiny_folder("llama", chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        run(settings(target=TargetConfig(name_or_path=base, dtype="float32")))


def test_more_samples_need_a_temperature() -> None:
    with pytest.raises(ValueError, match="Set temperature above 0"):
        RegenerateConfig(output="x", samples_per_prompt=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": []}\n', r"line 2: expected \"turns\""),
        ('{"turns": ["a"]}\n\n{"turns": [\n', "line 3: not JSON"),
        ('{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n', "line 2: the id 'x'"),
    ],
)
def test_a_bad_prompt_line_is_located(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(path))


def test_bundled_prompts_are_many_and_varied() -> None:
    prompts = read_prompts("bundled")
    assert len(prompts) >= 400
    categories = {prompt.category for prompt in prompts}
    assert len(categories) == 8
    for category in categories:
        assert sum(prompt.category == category for prompt in prompts) >= 40
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)
    assert sum(len(prompt.turns) > 1 for prompt in prompts) >= 40
    assert torch.tensor([len(p.turns[0].split()) for p in prompts]).float().std() > 5
