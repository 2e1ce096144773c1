"""Comparing draft models and ways to decode: interleaved, shared references, table and page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.conf.entry import compose_settings
from draftsmith.conf.schema import CompareConfig
from draftsmith.eval import evaluate as evaluate_module
from draftsmith.eval.compare import compare, run
from draftsmith.eval.comparison import Comparison
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.plain import GreedyAnswers
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy
from draftsmith.inference.records import Generation
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import SamplingSettings

PROMPTS = [
    Prompt("chat-1", "chat", ("the cat sat", "and the dog?")),
    Prompt("chat-2", "chat", ("user asks",)),
    Prompt("code-1", "code", ("def add(a, b):",)),
]
BASE = EvaluationSettings(max_new_tokens=6, baseline_prompts_per_category=1)
SETTINGS = {
    "chain2": replace(BASE, policy=ChainPolicy(2)),
    "tree": replace(BASE, policy=DynamicTreePolicy(total_tokens=6, depth=1, top_k=2)),
    "warm": replace(BASE, policy=ChainPolicy(2), sampling=SamplingSettings(1.0)),
}
SCHEMA = "draftsmith.conf.schema:CompareConfig"


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", num_hidden_layers=6)


def untrained_draft(target: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3Method().build(target.head(), None, (1, 2, 4)).eval()
    draft.attach_target(embed_tokens=target.embed_tokens)
    return draft


@pytest.fixture(scope="module")
def comparison(target: Any) -> Comparison:
    drafts = {"a": untrained_draft(target), "b": untrained_draft(target, 1), "plain": None}
    return compare(target, drafts, SETTINGS, PROMPTS)


@pytest.mark.lossless
def test_each_draft_meets_each_setting_and_plain_decoding_each_way_to_sample(
    comparison: Comparison,
) -> None:
    pairs = [(lane.draft, lane.setting) for lane in comparison.lanes]
    assert pairs == [
        *((draft, setting) for draft in "ab" for setting in SETTINGS),
        ("plain", "greedy"),
        ("plain", "temperature 1"),
    ]
    for lane in comparison.lanes:
        overall = lane.result.overall
        assert overall.num_answers == 4
        if lane.is_plain:
            assert (lane.accepted_length, lane.speed_up) == (1.0, 1.0)
        elif lane.setting == "warm":
            assert overall.lossless.status == "by_construction"
        else:
            assert overall.lossless.status == "equal"
        # With plain decoding in the comparison every answer is timed both ways.
        if not lane.is_plain:
            assert overall.timed is not None
            assert overall.timed.answers == 4


def test_a_lane_finds_what_an_evaluation_of_its_own_finds(
    comparison: Comparison, target: Any
) -> None:
    alone = evaluate(target, untrained_draft(target, 1), PROMPTS, SETTINGS["tree"])
    lane = comparison.lane("b", "tree")
    assert lane.result.overall.acceptance == alone.overall.acceptance
    assert [turn.text for turn in lane.result.turns] == [turn.text for turn in alone.turns]
    sampled = evaluate(target, untrained_draft(target), PROMPTS, SETTINGS["warm"])
    lane = comparison.lane("a", "warm")
    assert [turn.text for turn in lane.result.turns] == [turn.text for turn in sampled.turns]


def test_lanes_take_turns_and_share_the_plain_runs(target: Any, monkeypatch: Any) -> None:
    runs: list[tuple[str, str]] = []
    run_engine = Engine.run

    def noted(self: Engine, requests: Sequence[Request]) -> list[Generation]:
        who = "plain" if self.draft is None else self.policy.name
        for request in requests:
            runs.append((who, target.tokenizer.decode(request.input_ids)[-40:]))
        return run_engine(self, requests)

    monkeypatch.setattr(Engine, "run", noted)
    settings = {name: replace(SETTINGS[name], check_lossless=False) for name in ("chain2", "tree")}
    compare(target, {"a": untrained_draft(target)}, settings, PROMPTS)
    names = [settings[name].policy.name for name in settings]
    timed = [who for who, _ in runs[3:]]  # after one warm-up each
    # chat-1 has two turns and is timed, chat-2 is not, code-1 is; the order rotates.
    assert timed == [
        *["plain", *names] * 2,
        *names,
        *[names[1], "plain", names[0]],
    ]
    # Greedy answers are equal, so that the plain run of a turn serves both lanes.
    plain = [text for who, text in runs[3:] if who == "plain"]
    assert len(plain) == len(set(plain)) == 3


def test_greedy_references_are_decoded_once_for_all_lanes(target: Any) -> None:
    class Counting(GreedyAnswers):
        decoded = 0

        def decode(self, prompts: Sequence[Sequence[int]]) -> None:
            self.decoded += len({tuple(prompt) for prompt in prompts} - set(self._answers))
            super().decode(prompts)

    answers = Counting(target, max_new_tokens=6)
    settings = {name: SETTINGS[name] for name in ("chain2", "tree")}
    found = compare(target, {"a": untrained_draft(target)}, settings, PROMPTS, answers=answers)
    assert [lane.result.overall.lossless.status for lane in found.lanes] == ["equal"] * 2
    # Three of the four answers were timed plainly and serve as they are.
    assert answers.decoded == 1


def test_nothing_to_compare_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(target, {}, SETTINGS, PROMPTS)


def test_the_command_line_names_drafts_and_settings() -> None:
    config: CompareConfig = compose_settings(
        "compare",
        SCHEMA,
        [
            "target=smollm2",
            "output=out",
            "drafts={eagle3: runs/a/draft, student: runs/b, plain: none}",
            "settings={chain2: {num_draft_tokens: 2}, "
            "tree: {policy: dynamic_tree, total_tokens: 16, depth: 4, top_k: 4, temperature: 0.7}}",
        ],
    )
    assert config.drafts == {"eagle3": "runs/a/draft", "student": "runs/b", "plain": "none"}
    assert list(config.settings) == ["chain2", "tree"]
    assert config.settings["tree"].temperature == 0.7
    defaults = compose_settings("compare", SCHEMA, ["target=smollm2", "drafts.a=x", "output=out"])
    assert defaults.settings == {}
    assert {one.policy for one in defaults.default_settings.values()} == {"chain", "dynamic_tree"}
    assert any(one.temperature > 0 for one in defaults.default_settings.values())
    for override, message in (
        ("settings={a: {polcy: chain}}", "polcy"),
        ("settings={a: {policy: chian}}", "chian"),
        ("settings={a: {temperature: -1}}", "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_settings(
                "compare", SCHEMA, ["target=smollm2", "drafts.a=x", "output=out", override]
            )
    with pytest.raises(ValueError, match="drafts is empty"):
        compose_settings("compare", SCHEMA, ["target=smollm2", "output=out"])


class Outline(HTMLParser):
    """Tags of a page and its visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002 (the parser's own)
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_verb_writes_table_json_and_a_self_contained_page(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        untrained_draft(target, seed).save_pretrained(tmp_path / name / "draft")
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"category": "<script>alert(1)</script>", "prompt": "the cat"}\n{"prompt": "the dog"}\n',
        encoding="utf-8",
    )
    run(
        compose_settings(
            "compare",
            SCHEMA,
            [
                "target=local",
                f"target.name_or_path={target.name_or_path}",
                "target.dtype=float32",
                "target.device=cpu",
                f"prompts={path}",
                f"drafts={{a: {tmp_path}/a, b: {tmp_path}/b, plain: none}}",
                f"output={tmp_path}/out",
                "max_new_tokens=6",
                "settings={c1: {num_draft_tokens: 1}, c2: {num_draft_tokens: 2}, "
                "w: {temperature: 1}}",
            ],
        )
    )
    table = (tmp_path / "out" / "compare.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    for text in (table, capsys.readouterr().out):
        assert re.search(r"a +c1 ", text)
        assert re.search(r"plain +temperature 1", text)
        assert "2/2" in text
        assert "1.00x" in text
        assert "c2: chain of 2, greedy" in text
    found = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))
    rows = {(row["draft"], row["setting"]): row for row in found["rows"]}
    assert len(rows) == 8
    row = rows["b", "c2"]
    assert row["path"] == f"{tmp_path}/b"
    assert row["lossless"] == "equal"
    assert row["settings"]["policy"]["num_draft_tokens"] == 2
    assert row["accepted_length"] == row["overall"]["acceptance"]["accepted_length"]
    assert row["speed_up"] == row["overall"]["timed"]["speed_up"]
    assert rows["plain", "greedy"]["path"] is None
    page = (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(page)
    assert "script" not in outline.tags
    assert "<script>alert(1)</script>" in outline.text
    assert outline.tags.count("figure") >= 4
    assert f"{row['accepted_length']:.2f}" in outline.text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_a_draft_that_cannot_be_loaded_is_named(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module.TargetModel, "load", lambda **_: target)
    config = compose_settings(
        "compare", SCHEMA, ["target=smollm2", f"drafts.bad={tmp_path}", f"output={tmp_path}/out"]
    )
    with pytest.raises(ValueError, match=r"drafts\.bad: .*has no config\.json"):
        run(config)


def test_more_drafts_than_a_chart_can_tell_apart_get_more_charts(target: Any) -> None:
    from draftsmith.eval.compare_page import render_comparison

    one = compare(
        target, {"a": untrained_draft(target)}, {"chain2": SETTINGS["chain2"]}, PROMPTS[1:2]
    )
    lanes = [replace(one.lanes[0], draft=f"d{number}") for number in range(6)]
    page = render_comparison(Comparison(one.target, lanes), ["draft"], [], [])
    outline = Outline()
    outline.feed(page)
    single = Outline()
    single.feed(render_comparison(one, ["draft"], [], []))
    assert outline.tags.count("figure") == 2 * single.tags.count("figure")
