"""Evaluation from prompts to the written report, on tiny targets with untrained EAGLE-3 drafts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.conf.schema import DraftingConfig, EvaluateConfig, TargetConfig
from draftsmith.eval import lanes as lanes_module
from draftsmith.eval.cautions import cautions
from draftsmith.eval.evaluate import check_target, evaluate, load_draft_for, run
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import to_json, write_report
from draftsmith.eval.results import EvaluationResult, PromptResult, describe_answer, summarise
from draftsmith.eval.settings import EvaluationSettings, make_settings
from draftsmith.eval.simulated import SimulatedAcceptance
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.plain import GreedyAnswers
from draftsmith.inference.policies import (
    ChainPolicy,
    DynamicTreePolicy,
    Policy,
    SampledTreePolicy,
    StaticTreePolicy,
)
from draftsmith.inference.records import Generation, RoundRecord, TokenOrigin
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import SamplingSettings

PROMPTS = [
    Prompt("chat-1", "chat", ("the cat sat", "and the dog?")),
    Prompt("chat-2", "chat", ("user asks",)),
    Prompt("code-1", "code", ("def add(a, b):",)),
]
SETTINGS = EvaluationSettings(
    max_new_tokens=12, policy=ChainPolicy(3), baseline_prompts_per_category=1
)
TREE = DynamicTreePolicy(total_tokens=9, depth=2, top_k=3)


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


@pytest.mark.lossless
@pytest.mark.parametrize("policy", [TREE, StaticTreePolicy(), SampledTreePolicy((2, 2))])
def test_trees_are_measured_and_lossless(target: Any, policy: Policy) -> None:
    found = evaluate(
        target, untrained_draft(target), PROMPTS, replace(SETTINGS, policy=policy), draft_name="d"
    )
    acceptance = found.overall.acceptance
    assert found.overall.lossless.status == "equal"
    assert acceptance.verified_nodes is not None
    assert acceptance.verified_nodes > policy.max_depth
    assert len(acceptance.joint_acceptance) == policy.max_depth
    assert policy.name in words_of(found)
    assert to_json(found)["settings"]["policy"]["name"] == policy.name


class ScriptedEngine:
    """Writes texts that are given, round by round, after `delay` seconds each."""

    script: dict[str, list[list[int]]]
    """Last user text -> tokens of prefill and of each round."""
    delays: list[float]

    def __init__(self, target: Any, draft: Any, *_: Any, **__: Any) -> None:
        self.target, self.draft = target, draft

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Generation:
        text = self.target.tokenizer.decode(request.input_ids)
        blocks = next(
            blocks for key, blocks in self.script.items() if f"user\n{key}<" in text[-60:]
        )
        tokens = [token for block in blocks for token in block]
        seconds = self.delays.pop(0) if self.delays else 0.001
        time.sleep(seconds)
        if self.draft is None:
            blocks = [[token] for token in tokens]
        records = [
            RoundRecord(4, 4, len(block) - 1, len(block), 0.1, 0.2, 0.03) for block in blocks[1:]
        ]
        origins = [TokenOrigin(0, None, 0.5) for _ in tokens]
        return Generation(tokens, "length", records, seconds, 0.0, origins)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedEngine]:
    monkeypatch.setattr(lanes_module, "Engine", ScriptedEngine)
    ScriptedEngine.script, ScriptedEngine.delays = {}, []
    return ScriptedEngine


def test_all_turns_count_and_later_prompts_contain_earlier_answers(
    target: Any, scripted: type[ScriptedEngine]
) -> None:
    """E04: two turns of 4 and 6 rounds make 10 rounds."""
    words = target.tokenizer("the mat and the door", add_special_tokens=False).input_ids
    scripted.script = {
        "first?": [[words[0]], *([token] for token in words[1:5])],
        "second?": [[words[0]], *([9, 9] for _ in range(6))],
    }
    prompts = [Prompt("p", "c", ("first?", "second?"))]
    settings = replace(SETTINGS, check_lossless=False)
    found = evaluate(target, untrained_draft(target), prompts, settings, draft_name="d")
    first, second = found.prompts[0].turns
    assert [len(turn.generation.rounds) for turn in (first, second)] == [4, 6]
    assert found.overall.acceptance.num_rounds == 10
    assert found.overall.acceptance.accepted_length == pytest.approx((4 + 12) / 10)
    text = target.tokenizer.decode(second.prompt_ids)
    assert text.index("first?") < text.index(first.text) < text.index("second?")
    assert len(first.text) > 3


def test_given_messages_and_system_text_reach_the_model(target: Any) -> None:
    given = (
        (
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "the dog?"},
            {"role": "assistant", "content": "it ran"},
        ),
    )
    found = evaluate(target, None, [Prompt("p", "c", ("and then?",), given)], SETTINGS)
    text = target.tokenizer.decode(found.prompts[0].turns[0].prompt_ids)
    order = [text.index(part) for part in ("be brief", "the dog?", "it ran", "and then?")]
    assert order == sorted(order)
    assert to_json(found)["prompts"][0]["given"][0][2]["content"] == "it ran"


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


def test_warm_up_is_not_counted_and_stated(target: Any, scripted: type[ScriptedEngine]) -> None:
    """E14: the first call is 10 times slower, on either side."""
    scripted.script = {turn: [[5], [6, 7]] for prompt in PROMPTS for turn in prompt.turns}
    scripted.delays = [0.5, 0.5]
    settings = replace(SETTINGS, check_lossless=False)
    found = evaluate(target, untrained_draft(target), PROMPTS, settings)
    assert found.overall.num_answers == 4
    slowest = max(max(turn.seconds, turn.plain_seconds) for turn in found.turns)
    assert slowest < 0.5
    assert "8 tokens of the first prompt both ways, not counted" in found.warm_up
    assert "warm-up: 8 tokens" in words_of(found)


def test_warm_up_grows_a_whole_tree(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """E14: a policy that is first used in full after the warm-up would be timed cold."""
    depths: list[list[int]] = []
    run_engine = Engine.run

    def noted(self: Engine, requests: Sequence[Request]) -> list[Generation]:
        generations = run_engine(self, requests)
        depths.append([record.depth for one in generations for record in one.rounds])
        return generations

    monkeypatch.setattr(Engine, "run", noted)
    deep = replace(SETTINGS, max_new_tokens=20, policy=ChainPolicy(11))
    found = evaluate(target, untrained_draft(target), PROMPTS[1:2], deep)
    assert max(depths[0]) == 11
    assert "13 tokens" in found.warm_up


def test_an_answer_that_is_not_the_targets_is_called_not_lossless(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_engine = Engine.run

    def wrong(self: Engine, requests: Sequence[Request]) -> list[Generation]:
        generations = run_engine(self, requests)
        for one in generations:
            if self.draft is not None and len(one.token_ids) > 5:
                one.token_ids[5] = (one.token_ids[5] + 1) % 300
        return generations

    monkeypatch.setattr(Engine, "run", wrong)
    found = evaluate(target, untrained_draft(target), PROMPTS, SETTINGS, draft_name="d")
    verdict = found.overall.lossless
    assert verdict.status == "different"
    assert verdict.equal < verdict.checked == 4
    assert "NOT LOSSLESS" in printed(found)
    assert "NOT LOSSLESS" in to_json(found)["warnings"][0]
    divergence = found.prompts[0].turns[0].divergence
    assert divergence is not None
    assert divergence.position == 5


@pytest.mark.lossless
def test_a_repetition_penalty_is_checked_against_plain_decoding_with_it(target: Any) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(repetition_penalty=1.5))
    found = evaluate(target, untrained_draft(target), PROMPTS, settings, draft_name="d")
    assert found.overall.lossless.status == "equal"
    assert found.overall.lossless.checked == 4
    without = evaluate(target, None, PROMPTS, SETTINGS)
    assert [turn.text for turn in found.turns] != [turn.text for turn in without.turns]
    assert "greedy, repetition_penalty 1.5" in words_of(found)


def test_a_difference_under_a_penalty_is_found(target: Any, scripted: type[ScriptedEngine]) -> None:
    scripted.script = {"user asks": [[5], [6, 7], [8]]}
    settings = replace(
        SETTINGS,
        sampling=SamplingSettings(repetition_penalty=1.5),
        baseline_prompts_per_category=0,
    )
    found = evaluate(target, untrained_draft(target), PROMPTS[1:2], settings, draft_name="d")
    assert found.overall.lossless.status == "different"
    divergence = found.turns[0].divergence
    assert divergence is not None
    assert divergence.position == 0
    assert divergence.margin > 0


def printed(found: EvaluationResult, folder: Path | None = None) -> str:
    from draftsmith.eval.report import render

    paper = StringIO()
    console = Console(file=paper, width=120)
    if folder is None:
        console.print(render(found))
    else:
        write_report(found, folder, console)
    return paper.getvalue()


def words_of(found: EvaluationResult) -> str:
    """What is printed, without line breaks."""
    return " ".join(printed(found).split())


def test_sampled_answers_repeat_with_the_seed_and_are_labelled(target: Any) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(1.0, 0, 0.9, min_p=0.01))
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
    assert "temperature 1, top_p 0.9, min_p 0.01" in words_of(first)


def test_no_draft_model_measures_plain_decoding(target: Any) -> None:
    found = evaluate(target, None, PROMPTS, SETTINGS)
    assert found.overall.acceptance.accepted_length == 1.0
    assert found.overall.timed is None
    assert "no draft model" in words_of(found)


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
    target: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is found inside the folder of a training run."""
    monkeypatch.delenv("COLUMNS", raising=False)  # A width that somebody asked for is kept.
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
            drafting=DraftingConfig(num_draft_tokens=2),
        )
    )
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert found["overall"]["lossless"]["status"] == "equal"
    assert found["environment"]["dtype"] == "float32"
    assert found["settings"]["policy"] == {
        "name": ChainPolicy(2).name,
        "kind": "chain",
        "num_draft_tokens": 2,
    }
    rounds = [
        counts for one in found["prompts"] for turn in one["turns"] for counts in turn["rounds"]
    ]
    histogram = found["overall"]["acceptance"]["histogram"]
    assert sum(histogram.values()) == len(rounds)
    mean = sum(emitted for _, _, emitted, _ in rounds) / len(rounds)
    assert found["overall"]["acceptance"]["accepted_length"] == pytest.approx(mean)
    table = (tmp_path / "out" / "results.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    shown = capsys.readouterr().out
    assert table in shown, "a pipe is as wide as the file: nothing is cut at 80 columns"
    for text in (table, shown):
        assert "chat" in text
        assert " 4/4" in text
        assert "verdict: lossless" in text
        assert "prompts as chat template of the tokenizer" in text
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!")
    assert len((tmp_path / "out" / "spec_bench.jsonl").read_text().splitlines()) == 3
    assert len((tmp_path / "out" / "spec_bench_plain.jsonl").read_text().splitlines()) == 3


def test_every_token_has_its_text_origin_and_round(result: EvaluationResult, target: Any) -> None:
    for one in to_json(result)["prompts"]:
        for turn in one["turns"]:
            tokens = turn["tokens"]
            assert {len(column) for column in tokens.values()} == {len(turn["token_ids"])}
            assert "".join(tokens["texts"]) == target.tokenizer.decode(turn["token_ids"])
            assert tokens["rounds"][0] == 0
            emitted = [emitted for _, _, emitted, _ in turn["rounds"]]
            expected = [n for n, count in enumerate(emitted, start=1) for _ in range(count)]
            assert tokens["rounds"][1:] == expected
            for depth, draft_prob, target_prob in zip(
                tokens["depths"], tokens["draft_probs"], tokens["target_probs"], strict=True
            ):
                assert (draft_prob is None) == (depth == 0)
                assert 0.0 < target_prob <= 1.0


def test_the_targets_own_generation_config_can_be_followed(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama", num_hidden_layers=6)
    config = target.model.generation_config
    for name, value in {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}.items():
        monkeypatch.setattr(config, name, value)
    wanted = EvaluateConfig(output="x", use_generation_config=True)
    assert make_settings(wanted, target).sampling == SamplingSettings(0.6, 20, 0.95)
    monkeypatch.setattr(config, "no_repeat_ngram_size", 3)
    with pytest.raises(ValueError, match="no_repeat_ngram_size"):
        make_settings(wanted, target)
    with pytest.raises(ValueError, match="Set one or the other"):
        EvaluateConfig(output="x", use_generation_config=True, top_p=0.9)


@pytest.mark.lossless
def test_batches_give_the_same_texts_and_rounds_and_a_throughput(
    target: Any, result: EvaluationResult
) -> None:
    settings = replace(SETTINGS, batch_size=4)
    batched = evaluate(target, untrained_draft(target), PROMPTS, settings, draft_name="d")
    assert [turn.text for turn in batched.turns] == [turn.text for turn in result.turns]
    assert batched.overall.acceptance == result.overall.acceptance
    assert batched.overall.lossless.status == "equal"
    # All prompts are decoded plainly too: one per category would not fill a batch of four.
    assert batched.overall.timed is not None
    assert batched.overall.timed.answers == 4
    # The seconds of a batch are shared out: they add up to the time that its waves took.
    first = batched.by_category["chat"]
    tokens = sum(len(t.generation.token_ids) for one in batched.prompts[:2] for t in one.turns)
    seconds = sum(turn.seconds for one in batched.prompts[:2] for turn in one.turns)
    assert first.tokens_per_second == pytest.approx(tokens / seconds)
    assert "throughput" in words_of(batched)
    for one in to_json(batched)["prompts"]:
        assert all(turn["plain_seconds"] is None for turn in one["turns"])


def test_a_folder_without_a_draft_is_named(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_draft_for(str(tmp_path), target)


def hand_made(
    tokens: list[int], seconds: float, rounds: list[tuple[int, int, int]], plain: float | None
) -> PromptResult:
    records = [
        RoundRecord(proposed, proposed, accepted, emitted, 0.1, 0.2, 0.03)
        for proposed, accepted, emitted in rounds
    ]
    ours = Generation(tokens, "length", records, seconds, 0.5)
    turn = describe_answer([1], ours, "")
    if plain is not None:
        turn.plain = Generation(tokens, "length", [], plain, 0.5)
        turn.plain_seconds = plain
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


def test_both_sides_count_generated_ids_and_not_text(
    target: Any, scripted: type[ScriptedEngine]
) -> None:
    """E05: the text of these ids is encoded again as fewer of them."""
    letters = [target.tokenizer.convert_tokens_to_ids(letter) for letter in "thecat"]
    text = target.tokenizer.decode(letters)
    assert len(target.tokenizer(text).input_ids) < len(letters)
    scripted.script = {"user asks": [[letters[0]], letters[1:3], letters[3:]]}
    settings = replace(SETTINGS, check_lossless=False)
    found = evaluate(target, untrained_draft(target), PROMPTS[1:2], settings)
    turn, timed = found.turns[0], found.overall.timed
    assert timed is not None
    assert timed.tokens_per_second == pytest.approx(6 / turn.seconds)
    assert timed.plain_tokens_per_second == pytest.approx(6 / turn.plain_seconds)


def test_a_block_counts_its_tokens_and_not_one(target: Any, scripted: type[ScriptedEngine]) -> None:
    """E13: a chunk of three tokens is three tokens (nothing is streamed here)."""
    scripted.script = {"user asks": [[5], [6, 7, 8]]}
    settings = replace(SETTINGS, check_lossless=False)
    found = evaluate(target, untrained_draft(target), PROMPTS[1:2], settings)
    assert found.overall.new_tokens == 4
    assert found.overall.tokens_per_second == pytest.approx(4 / found.turns[0].seconds)


def test_what_a_round_costs_beyond_its_forwards_is_shown(result: EvaluationResult) -> None:
    found = replace(result, prompts=[hand_made([1, 2, 3], 1.0, [(3, 0, 1)] * 2, plain=None)])
    assert found.overall.round_overhead == pytest.approx(0.06 / 0.6)
    assert "a round costs 10.0% beyond its forwards" in words_of(found)


def test_draft_time_is_the_median_of_rounds_that_draft(result: EvaluationResult) -> None:
    one = hand_made([1] * 4, 1.0, [(3, 0, 1)] * 3 + [(0, 0, 1)], plain=None)
    rounds = one.turns[0].generation.rounds
    times = zip(rounds, (0.01, 0.02, 0.9, 0.0), strict=True)
    one.turns[0].generation.rounds = [replace(r, draft_seconds=seconds) for r, seconds in times]
    found = replace(result, prompts=[one])
    assert found.overall.draft_ms == pytest.approx(20.0)
    plain = hand_made([1], 1.0, [(0, 0, 1)], plain=None)
    assert replace(result, prompts=[plain]).overall.draft_ms is None


def test_looping_answers_are_pointed_out(result: EvaluationResult) -> None:
    """E11: great acceptance on a text that repeats itself."""
    stuck = hand_made([7] * 40, 1.0, [(3, 3, 4)] * 9, plain=None)
    fine = hand_made(list(range(40)), 1.0, [(3, 0, 1)] * 9, plain=None)
    found = replace(result, prompts=[stuck, fine])
    assert found.overall.repetitive_answers == 1
    assert found.overall.accepted_length_without_repetitive == 1.0
    assert found.overall.acceptance.accepted_length == 2.5
    assert found.overall.longest_loop == 40
    assert found.overall.distinct_ratio == pytest.approx((1 / 40 + 1) / 2)
    said = words_of(found)
    assert "1 of 2 answers run in a loop" in said
    assert "p turn 1: 40 of 40 tokens in one loop, 2% distinct" in said
    assert "longest loop 40 tokens" in said


def test_a_large_gap_to_the_simulated_length_is_a_warning(result: EvaluationResult) -> None:
    """E10: training simulated 1 + .9 + .72 + .5, decoding kept .25 of the first drafts."""
    simulated = SimulatedAcceptance((0.9, 0.8, 0.7), "metrics.jsonl, step 5, held-out rows")
    poor = hand_made(list(range(9)), 1.0, [(3, 0, 1)] * 3 + [(3, 1, 2)], plain=None)
    found = replace(result, prompts=[poor], simulated=simulated)
    (said,) = [text for text in cautions(found) if "far below training" in text]
    assert "simulated an accepted length of 3.12" in said
    assert "decoding reached 1.25" in said
    assert "WARNING: measured far below training" in words_of(found)
    # 2.5 of 3.12: other prompts and texts of the model's own explain that much.
    good = hand_made(list(range(9)), 1.0, [(3, 2, 3), (3, 1, 2)] * 2, plain=None)
    assert not cautions(replace(found, prompts=[good]))
    itself = cautions(replace(found, prompts=[good], target="x/tiny", draft="x/./tiny/"))
    assert len(itself) == 1
    assert "the draft model is the whole target" in itself[0]
    # A chain of one is held against one step, not against all that were simulated.
    short = hand_made(list(range(9)), 1.0, [(1, 1, 2)] * 3 + [(1, 0, 1)], plain=None)
    assert not cautions(replace(found, prompts=[short]))
    sampled = replace(found.settings, sampling=SamplingSettings(1.0))
    assert not cautions(replace(found, settings=sampled))


def test_a_reloaded_draft_gives_the_same_numbers(target: Any, tmp_path: Path) -> None:
    """E10: the decoder on the model in memory and on the one that was saved and loaded."""
    draft = untrained_draft(target)
    draft.attach_target(embed_tokens=target.embed_tokens)
    draft.save_pretrained(tmp_path / "draft")
    found = [
        evaluate(target, one, PROMPTS, SETTINGS)
        for one in (draft, load_draft_for(str(tmp_path), target))
    ]
    assert found[0].overall.acceptance == found[1].overall.acceptance


def test_template_settings_and_definitions_are_in_the_report(
    result: EvaluationResult, tmp_path: Path
) -> None:
    """E08."""
    settings = replace(result.settings, template_kwargs={"enable_thinking": False})
    found = replace(result, settings=settings)
    assert "enable_thinking" in printed(found, tmp_path)
    written = to_json(found)
    assert written["settings"]["template_kwargs"] == {"enable_thinking": False}
    assert written["template"] == "chat template of the tokenizer"
    assert "prefill excluded" in written["definitions"]["accepted_length"]
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))


def test_the_template_mode_of_a_base_model_is_plain_text(tiny_target: Callable[..., Any]) -> None:
    """E08."""
    target = tiny_target("llama", chat_template=None)
    assert "prompts as plain text" in words_of(evaluate(target, None, PROMPTS[1:2], SETTINGS))
