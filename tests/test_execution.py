"""Loads served for real: what is counted, what is expected, and the verb from settings to page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.conf.entry import compose_settings
from draftsmith.conf.schema import TargetConfig
from draftsmith.conf.schema_serving import ExecuteConfig, SimulateConfig
from draftsmith.eval import execution
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.execution import Asked, Execution, serve_closed_loop, serve_open_loop
from draftsmith.eval.simulate import read_rounds, run
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.length_policies import FixedLength, StaticThreshold
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.dspark import DSparkMethod
from draftsmith.train.checkpoint import save_draft

SCHEMA = "draftsmith.conf.schema_serving:SimulateConfig"


def dspark(target: Any) -> Any:
    return support.make_draft(DSparkMethod, target, block_size=4, markov_rank=6).eval()


def curve() -> StepsPerSecond:
    """1 ms a forward, and 0.1 ms a token."""
    counts = [1, 4, 16]
    return StepsPerSecond(counts, [8], [[[1e-3 + 1e-4 * count] for count in counts]], [1, 1, 4])


def settings(folder: Path, *more: str) -> list[str]:
    return [
        f"target.name_or_path={folder}", "target.dtype=float32", "execute.draft=drafts",
        "target_profile=curve.json", "num_tokens=8", "requests_per_slot=2", "num_draft_tokens=4",
        "fixed_lengths=[2]", "thresholds=[0.5]", "output=out", *more,
    ]  # fmt: skip


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [20, 21], [30, 31, 32, 33]]


def asked(limits: list[int]) -> tuple[list[Asked], list[Request]]:
    made = [Asked(number % 4, limit) for number, limit in enumerate(limits)]
    return made, [Request(PROMPTS[one.prompt], one.limit) for one in made]


def test_a_closed_loop_counts_full_steps_only(tiny_target: Callable[..., Any]) -> None:
    """Limits of 3, 9, 4 tokens on two slots: the third follows the first, then a slot is empty."""
    target = tiny_target("llama")
    known, requests = asked([3, 9, 4])
    engine = Engine(target, dspark(target), ChainPolicy(4), batch_size=2, lengths=FixedLength(1))
    found = serve_closed_loop(engine, requests, known, name="fixed 1")
    result = found.result
    assert {step.num_requests for step in result.steps} == {2}
    assert sorted(one.limit for one, _ in found.texts) == [3, 4, 9], "the rest is answered too"
    assert [one.num_tokens for one in result.served][:1] == [2]
    assert len(result.served) == 2, "a slot stays empty when the second request has its answer"
    assert len(found.first_token_s) == 2
    emitted = sum(step.emitted for step in result.steps)
    assert emitted >= sum(one.num_tokens for one in result.served)
    assert 0 < found.prefill_s + found.draft_s + found.verify_s < result.seconds
    assert all(one.finished_s > one.admitted_s == one.arrival_s for one in result.served)


def test_an_open_loop_serves_from_the_arrival_on(tiny_target: Callable[..., Any]) -> None:
    """One slot: the second comes with the first and waits; the third comes to nobody."""
    target = tiny_target("llama")
    known, requests = asked([6, 6, 6])
    engine = Engine(target, None, ChainPolicy())
    found = serve_open_loop(engine, requests, known, [1.0, 1.0, 2.5], name="no draft")
    first, second, third = found.result.served
    assert (first.arrival_s, second.arrival_s, third.arrival_s) == (0.0, 0.0, 1.5)
    assert second.admitted_s >= first.finished_s
    assert third.admitted_s >= 1.5
    assert found.result.seconds >= 1.5, "idle time counts"
    assert {step.num_requests for step in found.result.steps} == {1}


@pytest.fixture
def work(tiny_target: Callable[..., Any], tiny_folder: Callable[..., Path]) -> Execution:
    config = compose_settings("simulate", SCHEMA, settings(tiny_folder("llama")))
    target = tiny_target("llama")
    return Execution(config, target, dspark(target), PROMPTS, curve())


def test_recorded_rounds_are_whole_and_feed_the_simulation(work: Execution) -> None:
    recorded = work.record()
    assert work.check([recorded]) == {"equal": 4, "near_ties": 0, "different": 0}
    assert {len(one.confidences) for one in work.all_rounds} == {4}
    offered = work.offered(work.asked, [0.0] * len(work.asked))
    for one, request in zip(work.asked, offered, strict=True):
        assert request.num_tokens == len(work.expected_text(one)) - 1
        assert request.rounds == (work.rounds[one.prompt] or work.all_rounds)
    mean = sum(len(work.prompts[one.prompt]) for one in work.asked) / len(work.asked)
    assert min(mean, 8) <= work.context_length <= 8, "as far as the curve goes"


def test_a_text_that_is_not_the_targets_own_is_seen(work: Execution) -> None:
    """The control of the verdict."""
    recorded = work.record()
    one, text = recorded.texts[0]
    wrong = [*text[:-1], (text[-1] + 1) % 300]
    recorded.texts[0] = (one, wrong)
    assert work.check([recorded]) == {"equal": 3, "near_ties": 0, "different": 1}
    # A shorter limit ends the text earlier, and that is the same text.
    recorded.texts[0] = (Asked(one.prompt, 3), text[:3])
    assert work.check([recorded])["equal"] == 4


def test_the_time_of_drafting_is_measured_with_all_slots_taken(work: Execution) -> None:
    assert 0.0 < work.draft_seconds(2) < 10.0
    engine = work.engine(2, StaticThreshold(0.0))
    assert (engine.batch_size, engine.policy.max_depth) == (2, 4)


@pytest.fixture
def in_folder(
    tiny_target: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft, curve and prompts in the current folder."""
    monkeypatch.chdir(tmp_path)
    draft = dspark(tiny_target("llama"))
    save_draft(draft, draft.state_dict(), Path("drafts"), dtype=torch.float32)
    Path("curve.json").write_text(json.dumps(curve().to_json()), encoding="utf-8")
    lines = [json.dumps({"prompt": text}) for text in ("the cat", "the dog sat", "one two")]
    Path("prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.usefixtures("in_folder")
def test_a_run_that_is_stopped_keeps_the_loads_that_are_done(
    tiny_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = execution.execute_load

    def stopped(work: Execution, load: Any, done: Callable[[str], None]) -> list[dict[str, Any]]:
        if load.load == 2:
            raise KeyboardInterrupt
        return whole(work, load, done)

    monkeypatch.setattr(execution, "execute_load", stopped)
    more = ["execute.prompts=prompts.jsonl", "execute.num_slots=[1,2]"]
    with pytest.raises(KeyboardInterrupt):
        run(compose_settings("simulate", SCHEMA, settings(tiny_folder("llama"), *more)))
    rows = json.loads(Path("out/execute.json").read_text(encoding="utf-8"))["rows"]
    assert {row["load"] for row in rows} == {1}
    assert "scheduler" in Path("out/execute.txt").read_text(encoding="utf-8")
    assert "scheduler" not in capsys.readouterr().out, "tables are shown once, in the end"


@pytest.mark.usefixtures("in_folder")
def test_the_verb_executes_records_and_reports(
    tiny_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = [
        "execute.prompts=prompts.jsonl", "execute.num_slots=[1,2]", "execute.repeats=2",
        "execute.requests_per_second=[200]", "execute.record_rounds=made/rounds.jsonl",
    ]  # fmt: skip
    run(compose_settings("simulate", SCHEMA, settings(tiny_folder("llama"), *more)))
    found = json.loads(Path("out/execute.json").read_text(encoding="utf-8"))
    rows = found["rows"]
    names = ["no draft", "fixed 2", "threshold 0.5", "scheduler", "scheduler-async"]
    assert [row["policy"] for row in rows] == names * 3
    assert [(row["loop"], row["load"]) for row in rows[::5]] == [
        ("closed", 1), ("closed", 2), ("open", 200.0)
    ]  # fmt: skip
    for row in rows:
        assert row["texts"]["equal"] == 2 * (2 if row["load"] == 1 else 4)
        assert row["texts"]["near_ties"] == row["texts"]["different"] == 0
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert row["expected"]["policy"] == row["policy"]
        assert set(row) <= {*found["definitions"], "loop", "policy", "served", "steps"}
    assert rows[0]["verified_per_round"] == 0.0
    assert rows[0]["shares"]["draft"] < rows[1]["shares"]["draft"]
    assert 1.0 < rows[1]["verified_per_round"] <= 2.0
    assert found["recorded"]["draft_tokens"] == 4
    assert len(read_rounds(Path("made/rounds.jsonl"))) == found["recorded"]["rounds"]
    table = Path("out/execute.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    for text in (table, capsys.readouterr().out):
        assert "equal plain decoding, whatever the policy and the load" in text
        assert "DIFFER" not in text
    page = Path("out/execute.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 6 * 2
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_settings_that_do_not_fit_are_refused() -> None:
    target = TargetConfig(name_or_path="target")
    drafted = ExecuteConfig(draft="draft")
    for made, message in (
        (lambda: SimulateConfig(execute=drafted), "but no target"),
        (lambda: SimulateConfig(execute=drafted, target=target), "no target_profile"),
        (
            lambda: SimulateConfig(
                execute=drafted, target=target, target_profile="curve", rounds="rounds"
            ),
            "records rounds of its own",
        ),
        (lambda: SimulateConfig(target=target), "nothing is executed"),
        (lambda: SimulateConfig(execute=ExecuteConfig(record_rounds="r")), "nothing is executed"),
        (lambda: ExecuteConfig(num_slots=[]), "execute.num_slots is 0"),
        (lambda: ExecuteConfig(repeats=0), "execute.repeats is 0"),
        (lambda: ExecuteConfig(requests_per_second=[0.0]), "must be above 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            made()
    assert SimulateConfig(execute=drafted, target=target, target_profile="curve").rounds is None
