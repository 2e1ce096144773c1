"""Evaluation from prompts to the written report, on tiny targets with untrained EAGLE-3 drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.conf.schema import EvaluateConfig, TargetConfig
from draftsmith.eval import evaluate as evaluate_module
from draftsmith.eval.evaluate import check_target, evaluate, load_draft_for, run
from draftsmith.eval.prompt_lookup import replay_prompt_lookup
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import to_json, write_report
from draftsmith.eval.results import (
    EvaluationResult,
    EvaluationSettings,
    PromptResult,
    describe_answer,
    summarise,
)
from draftsmith.inference.decode import Generation, RoundRecord, generate
from draftsmith.inference.plain import GreedyAnswers
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import SamplingSettings

PROMPTS = [
    Prompt("chat-1", "chat", ("the cat sat", "and the dog?")),
    Prompt("chat-2", "chat", ("user asks",)),
    Prompt("code-1", "code", ("def add(a, b):",)),
]
SETTINGS = EvaluationSettings(
    max_new_tokens=12, num_draft_tokens=3, baseline_prompts_per_category=1
)


@pytest.fixture
def target(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", num_hidden_layers=6)


def untrained_draft(target: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle3Method().build(target.head(), None, (1, 2, 4)).eval()


@pytest.fixture
def result(target: Any) -> EvaluationResult:
    return evaluate(target, untrained_draft(target), PROMPTS, SETTINGS, draft_name="untrained")


@pytest.mark.lossless
def test_an_untrained_draft_is_measured_and_lossless(result: EvaluationResult) -> None:
    overall = result.overall
    assert overall.lossless.status == "equal"
    assert overall.lossless.checked == overall.lossless.equal == overall.num_answers == 4
    assert overall.acceptance.accepted_length is not None
    assert 1.0 <= overall.acceptance.accepted_length < 2.0
    answers = [turn.generation for one in result.prompts for turn in one.turns]
    assert overall.new_tokens == sum(len(answer.token_ids) for answer in answers)
    in_rounds = sum(emitted * n for emitted, n in overall.acceptance.histogram.items())
    assert in_rounds == overall.new_tokens - overall.num_answers


def test_later_turns_contain_earlier_answers_and_all_turns_count(
    result: EvaluationResult, target: Any
) -> None:
    """E04."""
    first, second = result.prompts[0].turns
    text = target.tokenizer.decode(second.prompt_ids)
    assert "the cat sat" in text
    assert first.text in text
    assert len(result.prompts[0].rounds) == sum(
        len(turn.generation.rounds) for turn in (first, second)
    )


def test_categories_and_the_pooled_numbers_are_both_given(result: EvaluationResult) -> None:
    """E09."""
    groups = result.by_category
    assert list(groups) == ["chat", "code"]
    assert groups["chat"].num_prompts == 2
    pooled = sum(group.acceptance.num_rounds for group in groups.values())
    assert result.overall.acceptance.num_rounds == pooled


def test_plain_runs_are_timed_for_some_prompts_of_every_category(result: EvaluationResult) -> None:
    timed = {
        one.prompt.id for one in result.prompts for turn in one.turns if turn.plain is not None
    }
    assert timed == {"chat-1", "code-1"}
    for group in (*result.by_category.values(), result.overall):
        assert group.timed is not None
        assert group.timed.speed_up > 0


def test_warm_up_is_not_counted_and_stated(target: Any, monkeypatch: Any) -> None:
    """E14."""
    calls: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Generation:
        calls.append(kwargs["max_new_tokens"])
        return generate(*args, **kwargs)

    monkeypatch.setattr(evaluate_module, "generate", noted)
    settings = replace(SETTINGS, baseline_prompts_per_category=0)
    found = evaluate(target, untrained_draft(target), PROMPTS, settings)
    assert calls == [8, 12, 12, 12, 12]
    assert found.overall.num_answers == 4
    assert "8 tokens of the first prompt" in found.warm_up


def test_an_answer_that_is_not_the_targets_is_called_not_lossless(
    target: Any, monkeypatch: Any
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Generation:
        found = generate(*args, **kwargs)
        if len(found.token_ids) > 5:
            found.token_ids[5] = (found.token_ids[5] + 1) % 300
        return found

    monkeypatch.setattr(evaluate_module, "generate", wrong)
    settings = replace(SETTINGS, baseline_prompts_per_category=0)
    found = evaluate(target, untrained_draft(target), PROMPTS, settings)
    verdict = found.overall.lossless
    assert verdict.status == "different"
    assert verdict.equal < verdict.checked == 4
    assert "NOT LOSSLESS" in printed(found)
    divergence = found.prompts[0].turns[0].divergence
    assert divergence is not None
    assert divergence.position == 5


def printed(found: EvaluationResult, folder: Path | None = None) -> str:
    from draftsmith.eval.report import render

    paper = StringIO()
    console = Console(file=paper, width=120)
    if folder is None:
        console.print(render(found))
    else:
        write_report(found, folder, console)
    return paper.getvalue()


def test_sampled_answers_repeat_with_the_seed_and_are_labelled(target: Any) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(1.0, 0, 0.9))
    draft = untrained_draft(target)
    first, again = (evaluate(target, draft, PROMPTS, settings) for _ in range(2))
    other = evaluate(target, draft, PROMPTS, replace(settings, seed=1))
    # The seed of an answer does not depend on which other prompts are evaluated.
    alone = evaluate(target, draft, PROMPTS[2:], settings)
    texts = [[turn.text for one in found.prompts for turn in one.turns] for found in (first, again)]
    assert texts[0] == texts[1]
    assert texts[0] != [turn.text for one in other.prompts for turn in one.turns]
    assert alone.prompts[0].turns[0].text == first.prompts[2].turns[0].text
    assert first.overall.lossless.status == "by_construction"
    assert first.overall.prompt_lookup is None
    assert "lossless by construction" in printed(first)


def test_no_draft_model_measures_plain_decoding(target: Any) -> None:
    found = evaluate(target, None, PROMPTS, SETTINGS)
    assert found.overall.acceptance.accepted_length == 1.0
    assert found.overall.timed is None
    assert "no draft model" in printed(found)


def test_answers_are_shared_between_evaluations(target: Any) -> None:
    answers = GreedyAnswers(target, max_new_tokens=12)
    for seed in (0, 1):
        draft = untrained_draft(target, seed)
        found = evaluate(target, draft, PROMPTS, SETTINGS, answers=answers)
        assert found.overall.lossless.status == "equal"
    with pytest.raises(ValueError, match="max_new_tokens 12, but the evaluation uses 5"):
        evaluate(target, None, PROMPTS, replace(SETTINGS, max_new_tokens=5), answers=answers)
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(target, None, [], SETTINGS)


def test_a_prompt_that_fills_the_target_is_named(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama", max_position_embeddings=24)
    long = Prompt("long-1", "chat", ("the cat sat on the mat " * 20,))
    with pytest.raises(ValueError, match=r"Prompt long-1, turn 1: .*24 positions"):
        evaluate(target, None, [Prompt("s", "chat", ("a",)), long], SETTINGS)


def test_a_draft_of_another_target_is_refused(target: Any) -> None:
    own = asdict(target.fingerprint)
    check_target(own, target)
    check_target(None, target)
    with pytest.raises(ValueError, match=r"another target: tokenizer, chat_template differ"):
        check_target(own | {"tokenizer": "x", "chat_template": "y"}, target)


def test_the_verb_writes_json_and_a_table(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft is found inside the folder of a training run."""
    draft = untrained_draft(target)
    draft.config.target_fingerprint = asdict(target.fingerprint)
    draft.save_pretrained(tmp_path / "run" / "draft")
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(asdict(prompt)) for prompt in PROMPTS), encoding="utf-8")
    run(
        EvaluateConfig(
            target=TargetConfig(name_or_path=target.name_or_path, dtype="float32", device="cpu"),
            draft=str(tmp_path / "run"),
            prompts=str(path),
            output=str(tmp_path / "out"),
            max_new_tokens=8,
            num_draft_tokens=2,
        )
    )
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert found["overall"]["lossless"]["status"] == "equal"
    assert found["environment"]["dtype"] == "float32"
    assert found["settings"]["num_draft_tokens"] == 2
    rounds = [
        counts for one in found["prompts"] for turn in one["turns"] for counts in turn["rounds"]
    ]
    histogram = found["overall"]["acceptance"]["histogram"]
    assert sum(histogram.values()) == len(rounds)
    mean = sum(emitted for _, _, emitted in rounds) / len(rounds)
    assert found["overall"]["acceptance"]["accepted_length"] == pytest.approx(mean)
    table = (tmp_path / "out" / "results.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    for text in (table, capsys.readouterr().out):
        assert "chat" in text
        assert " 4/4" in text
        assert "verdict: lossless" in text


def test_a_folder_without_a_draft_is_named(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has a config\.json"):
        load_draft_for(str(tmp_path), target)


def hand_made(
    tokens: list[int], seconds: float, rounds: list[tuple[int, int, int]], plain: float | None
) -> PromptResult:
    records = [RoundRecord(*counts, 0.1, 0.2, 0.05) for counts in rounds]
    ours = Generation(tokens, "length", records, seconds, 0.5)
    reference = None if plain is None else Generation(tokens, "length", [], plain, 0.5)
    turn = describe_answer([1], ours, "", reference)
    return PromptResult(Prompt("p", "c", ("x",)), [turn])


def test_speeds_count_the_same_tokens_of_the_same_answers() -> None:
    """E05: one answer was not decoded plainly and must not enter the comparison."""
    timed = hand_made(list(range(20)), 2.0, [(3, 3, 4)], plain=4.0)
    untimed = hand_made(list(range(20)), 10.0, [(3, 0, 1)], plain=None)
    summary = summarise([timed, untimed], greedy=True)
    assert summary.timed is not None
    assert summary.timed.answers == 1
    assert summary.timed.tokens_per_second == 10.0
    assert summary.timed.plain_tokens_per_second == 5.0
    assert summary.timed.speed_up == 2.0
    assert summary.tokens_per_second == pytest.approx(40 / 12)
    assert summary.lossless.status == "not_checked"


def test_looping_answers_are_pointed_out(result: EvaluationResult) -> None:
    """E11: great acceptance on a text that repeats itself."""
    stuck = hand_made([7] * 40, 1.0, [(3, 3, 4)] * 9, plain=None)
    fine = hand_made(list(range(40)), 1.0, [(3, 0, 1)] * 9, plain=None)
    found = replace(result, prompts=[stuck, fine])
    assert found.overall.repetitive_answers == 1
    assert found.overall.accepted_length_without_repetitive == 1.0
    assert found.overall.acceptance.accepted_length == 2.5
    assert "1 of 2 answers run in a loop" in " ".join(printed(found).split())


def test_template_settings_and_definitions_are_in_the_report(
    result: EvaluationResult, tmp_path: Path
) -> None:
    """E08."""
    settings = replace(result.settings, template_kwargs={"enable_thinking": False})
    found = replace(result, settings=settings)
    assert "enable_thinking" in printed(found, tmp_path)
    written = to_json(found)
    assert written["settings"]["template_kwargs"] == {"enable_thinking": False}
    assert "prefill excluded" in written["definitions"]["accepted_length"]
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 10])
@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_replayed_prompt_lookup_has_the_rounds_of_a_real_run(
    tiny_target: Callable[..., Any], monkeypatch: Any, num_draft_tokens: int, family: str
) -> None:
    target = tiny_target(family)
    matches: list[int] = []

    def note(_self: Any, _ids: Any, _scores: Any, num_matches: Any) -> None:
        matches.append(int(num_matches))

    monkeypatch.setattr(PromptLookupCandidateGenerator, "update_candidate_strategy", note)
    found_any = 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(4, 300, (6,), generator=generator).tolist() * 2
        ids = torch.tensor([prompt])
        matches.clear()
        output = target.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            prompt_lookup_num_tokens=num_draft_tokens,
            eos_token_id=list(target.eos_token_ids),
        )
        rounds = replay_prompt_lookup(
            prompt,
            output[0, len(prompt) :].tolist(),
            num_draft_tokens=num_draft_tokens,
            max_length=len(prompt) + 40,
            stop_token_ids=target.eos_token_ids,
        )
        assert [record.emitted for record in rounds] == [count + 1 for count in matches]
        found_any += sum(matches)
    assert found_any > 0, "these texts never repeat: the comparison would be empty"
