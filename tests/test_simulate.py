"""draftsmith-simulate: curves and recorded rounds by hand, and the verb from settings to page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftsmith.conf.entry import compose_settings
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.load_simulation import DraftRound
from draftsmith.eval.simulate import (
    Workload,
    continued_curve,
    made_up_curve,
    read_rounds,
    run,
    simulate,
)

SCHEMA = "draftsmith.conf.schema_serving:SimulateConfig"
SMALL = ["num_tokens=12", "num_draft_tokens=2", "fixed_lengths=[1,2]", "requests_per_slot=4"]


def test_curves_by_hand() -> None:
    flat = made_up_curve(4, floor_s=0.1, flat_tokens=2, token_s=0.05)
    assert [1 / rate for rate in flat] == pytest.approx([0.1, 0.1, 0.15, 0.2])
    # From the middle of what was measured on, a token costs 0.05 s.
    longer = continued_curve(flat, 6)
    assert [1 / rate for rate in longer] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.25, 0.3])
    assert continued_curve(flat, 3) == flat[:3]
    assert continued_curve([8.0], 3) == [8.0] * 3


def test_recorded_rounds_are_read_and_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"confidences": [0.5, 1], "accepted": 1}\n', encoding="utf-8")
    assert read_rounds(path) == [DraftRound((0.5, 1.0), 1)]
    for text, message in (
        ('{"confidences": [0.5]}', "line 1: expected"),
        ("nothing", "line 1: expected"),
        ('{"confidences": [0.5], "accepted": 2}', "line 1: 2 accepted of 1 drafted"),
        ("", "has no rounds"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_rounds(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_rounds(tmp_path / "missing")


def test_settings_are_checked() -> None:
    for override, message in (
        ("num_slots=[]", "name at least one load"),
        ("num_slots=[0]", "at least 1"),
        ("acceptance=1.0", "between 0 and 1"),
        ("certainty=0", "between 0 and 1"),
        ("fixed_lengths=[0]", "fixed_lengths is 0"),
        ("floor_ms=0", "above 0"),
        ("requests_per_second=[0.0]", "above 0"),
        ("draft_ms=-1", "at least 0"),
        ("slots=[1]", "num_slots"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_settings("simulate", SCHEMA, ["output=out", override])


def test_recorded_rounds_and_a_measured_curve_drive_the_numbers(tmp_path: Path) -> None:
    """Every round keeps 1 of 2 drafts; a step of 1 to 3 tokens takes 0.1 s, and drafting 0.1 s."""
    (tmp_path / "rounds").write_text('{"confidences": [1, 0], "accepted": 1}\n', encoding="utf-8")
    curve = StepsPerSecond([1, 3], [8], [[[0.1], [0.1]]], [1, 1])
    (tmp_path / "curve").write_text(json.dumps(curve.to_json()), encoding="utf-8")
    settings = [
        f"target_profile={tmp_path}/curve", f"rounds={tmp_path}/rounds", "context_length=8",
        "num_slots=[1]", "thresholds=[0.5]", "draft_ms=100", "output=out", *SMALL,
    ]  # fmt: skip
    rows = {
        row["policy"]: row
        for row in simulate(Workload(compose_settings("simulate", SCHEMA, settings)))
    }
    assert rows["no draft"]["tokens_per_second"] == pytest.approx(10.0)
    # Two tokens in 0.2 s, but for the last round of an answer of odd length.
    for name in ("fixed 1", "fixed 2", "threshold 0.5"):
        assert 9.0 < rows[name]["tokens_per_second"] <= 10.0
    assert rows["fixed 2"]["verified_per_round"] > rows["threshold 0.5"]["verified_per_round"]
    assert rows["threshold 0.5"]["verified_per_round"] <= 1.0
    assert rows["no draft"]["of_best_fixed"] == 1.0


def test_the_verb_writes_table_numbers_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "num_slots=[1,4,8]", "requests_per_second=[3.0]", "thresholds=[0.5,0.9]",
        "flat_tokens=8", f"output={tmp_path}/out", *SMALL,
    ]  # fmt: skip
    run(compose_settings("simulate", SCHEMA, settings))
    found = json.loads((tmp_path / "out" / "simulate.json").read_text(encoding="utf-8"))
    rows = found["rows"]
    names = ["no draft", "fixed 1", "fixed 2", "threshold 0.5", "threshold 0.9"]
    names += ["scheduler", "scheduler-async"]
    assert [row["policy"] for row in rows] == names * 4
    assert [row["load"] for row in rows[::7]] == [1, 4, 8, 3.0]
    assert set(found["definitions"]) <= {*rows[0]}
    for start in range(0, len(rows), 7):
        fixed = [row["tokens_per_second"] for row in rows[start : start + 3]]
        for row in rows[start : start + 7]:
            assert row["of_best_fixed"] == pytest.approx(row["tokens_per_second"] / max(fixed))
    table = (tmp_path / "out" / "simulate.txt").read_text(encoding="utf-8")
    assert max(map(len, table.splitlines())) <= 120
    for text in (table, capsys.readouterr().out):
        assert "scheduler-async" in text
        assert "made up: 20 ms up to 8 tokens" in text
    page = (tmp_path / "out" / "simulate.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 6
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_steps_take_what_was_measured_and_algorithm_1_reads_the_envelope(tmp_path: Path) -> None:
    """A dent at 2 tokens: 0.3 s, but 0.2 s for 3."""
    curve = StepsPerSecond([1, 2, 3], [8], [[[0.1], [0.3], [0.2]]], [1, 1, 1])
    (tmp_path / "curve").write_text(json.dumps(curve.to_json()), encoding="utf-8")
    settings = [f"target_profile={tmp_path}/curve", "context_length=8", "num_slots=[1]"]
    config = compose_settings("simulate", SCHEMA, [*settings, "output=out", "draft_ms=0", *SMALL])
    work = Workload(config)
    assert work.rates == pytest.approx([10.0, 1 / 0.3, 5.0])
    assert work.envelope == pytest.approx([10.0, 5.0, 5.0])
    *_, scheduler, asynchronous = work.policies()
    assert scheduler.lengths([[1.0, 1.0]]) == [0], "two tokens in 0.2 s are no more than one in 0.1"
    assert asynchronous.policy.steps_per_second == pytest.approx(work.rates)
