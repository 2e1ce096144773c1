"""The quickstart: every stage for real, on a tiny target; the packaged one in the slow suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.conf.schema import DraftingConfig, QuickstartConfig, TargetConfig
from draftsmith.data.chat_template import encode_prompt
from draftsmith.data.regenerate import read_prompts
from draftsmith.eval import quickstart

ANSWERS = Path(__file__).resolve().parent.parent / "data" / quickstart.ANSWERS


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Callable[..., Path]) -> QuickstartConfig:
    target = tiny_folder("llama", num_hidden_layers=8)
    return QuickstartConfig(
        target=TargetConfig(name_or_path=str(target), dtype="float32", device="cpu"),
        output=str(tmp_path / "quickstart"),
        recipe="eagle3_quickstart",
        compare_recipes=["eagle_quickstart"],
        compare_prompts_per_category=1,
        train_overrides=[
            "method.draft_vocab_size=128",
            "method.num_steps=2",
            "train.max_steps=2",
            "train.eval_every=null",
            "train.precision=fp32",
        ],
        answer_tokens=8,
        limit_answers=12,
        limit_per_category=1,
        max_new_tokens=6,
        drafting=DraftingConfig(num_draft_tokens=2),
        baseline_prompts_per_category=1,
    )


def test_all_stages_run_and_a_second_run_keeps_what_is_there(
    config: QuickstartConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.run(config)
    summary = json.loads((Path(config.output) / "summary.json").read_text())
    assert summary["target"] == config.target.name_or_path
    assert summary["method"] == "eagle3"
    assert summary["lossless"] is True
    assert set(summary["accepted_length_by_category"]) == {
        "chat",
        "code",
        "maths",
        "multi_turn",
        "question_answering",
        "summarising",
        "translation",
        "writing",
    }
    assert 1.0 <= summary["accepted_length"] <= 1 + config.drafting.num_draft_tokens
    assert summary["policy"]["num_draft_tokens"] == 2
    assert summary["prompt_lookup_accepted_length"] >= 1.0
    assert summary["tokens_per_second"] > 0
    assert summary["baseline_tokens_per_second"] > 0
    assert 0 < summary["train_supervised_tokens"] < summary["train_tokens"]
    rows = summary["comparison"]
    assert [(row["draft"], row["setting"]) for row in rows] == [
        (draft, setting)
        for draft in ("eagle3_quickstart", "eagle_quickstart")
        for setting in ("chain", "static_tree", "dynamic_tree")
    ]
    assert all(row["accepted_length"] >= 1.0 and row["lossless"] == "equal" for row in rows)
    report = (Path(config.output) / "evaluation" / "report.html").read_text(encoding="utf-8")
    assert report.startswith("<!doctype html>")
    said = capsys.readouterr().err
    for command in ("regenerate", "prepare", "cache", "train", "evaluate", "compare"):
        assert f"$ draftsmith-{command}" in said
    weights = Path(config.output) / "train" / "draft" / "model.safetensors"
    trained_at = weights.stat().st_mtime_ns
    quickstart.run(config)
    assert weights.stat().st_mtime_ns == trained_at
    again = json.loads((Path(config.output) / "summary.json").read_text())
    assert again["accepted_length"] == summary["accepted_length"]


def test_a_failed_training_stops_the_quickstart(config: QuickstartConfig) -> None:
    config.train_overrides = ["train.epoch=1"]
    with pytest.raises(ValueError, match="training failed"):
        quickstart.run(config)


def test_bundled_answers_belong_to_the_bundled_prompts() -> None:
    rows = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    prompts = {prompt.id: prompt for prompt in read_prompts("bundled")}
    assert len({(row["id"], row["sample"]) for row in rows}) == len(rows)
    assert {row["id"] for row in rows} == set(prompts)
    for row in rows:
        users = [m["content"] for m in row["messages"] if m["role"] == "user"]
        assert users == prompts[row["id"]].turns[: len(users)]
        assert len(row["messages"]) == 2 * len(row["finish_reasons"])


def test_held_out_prompts_are_not_trained_on() -> None:
    from draftsmith.eval.prompts import load_prompts

    trained = {turn for prompt in read_prompts("bundled") for turn in prompt.turns}
    held_out = load_prompts("bundled")
    assert len(held_out) >= 80
    assert sum(len(prompt.turns) > 1 for prompt in held_out) >= 10
    assert not [prompt.id for prompt in held_out if prompt.turns[0] in trained]


@pytest.mark.slow
def test_the_packaged_target_would_write_its_bundled_greedy_answers_again() -> None:
    pytest.importorskip("gguf")
    from draftsmith.models.target import TargetModel

    target = TargetModel.load(quickstart.ANSWERS_TARGET, dtype="float32")
    rows = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    greedy = [row for row in rows if row["sample"] == 0]
    agreeing = total = 0
    for row in greedy[:: len(greedy) // 6]:
        prompt = encode_prompt(target.tokenizer, row["messages"][:1])
        answer = target.tokenizer(row["messages"][1]["content"], add_special_tokens=False)
        ids = torch.tensor([prompt + answer["input_ids"]])
        chosen = target.forward(ids, logits="all").logits[0, len(prompt) - 1 : -1].argmax(-1)
        # Written in bfloat16, read back in float32: near ties may fall the other way.
        agreeing += int((chosen == ids[0, len(prompt) :]).sum())
        total += len(answer["input_ids"])
    assert total > 300
    assert agreeing / total > 0.97


def test_untrained_draft_has_the_vocabulary_but_not_the_weights(
    tiny_target: Callable[..., Any],
) -> None:
    from draftsmith.models.eagle3 import Eagle3Method
    from draftsmith.models.vocabulary_map import draft_to_target

    target = tiny_target("llama", num_hidden_layers=8)

    class Vocabulary:
        draft_to_target = torch.arange(3, 320, 5)

    draft = Eagle3Method(draft_vocab_size=64).build(target.head(), Vocabulary(), (1, 3, 4)).eval()
    fresh = quickstart.untrained_like(draft)
    ids, own = draft_to_target(fresh), draft_to_target(draft)
    assert ids is not None
    assert own is not None
    assert torch.equal(ids, own)
    assert not torch.equal(fresh.fc.weight, draft.fc.weight)
