"""The report of a calibration: the table in the terminal, and the files beside it.

calibration.json holds everything, calibration.txt what the terminal shows, calibration.html the
reliability diagrams; rounds.jsonl has the rounds of the reported half with their calibrated
confidences, as draftsmith-simulate reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from draftsmith.eval.calibrate_fit import GRID, Observations, ObservedRound, PositionQuality
from draftsmith.eval.calibration_metrics import ReliabilityBin
from draftsmith.eval.charts import Curve, Series, grouped_bar_chart, line_chart
from draftsmith.eval.markup import Markup, element
from draftsmith.eval.plain_page import number_table, render_plain_page
from draftsmith.eval.report import as_text, number, write_aside

DEFINITIONS = {
    "reached": "rounds in which every drafted token before this position stayed",
    "conditional": "the confidence of a token, given that all before it stayed; judged where it "
    "was reached",
    "cumulative": "the product of the confidences up to a position, as the chance that all these "
    "tokens stay; judged in every round that is so deep",
    "error": "expected calibration error: sum over bins of equal width of share of observations "
    "times |mean confidence - share that stayed|",
    "cumulative_error_by_chance": "the error that exact products would show on average with so "
    "few rounds",
    "auc": "chance that a token that stayed has a higher confidence than one that did not",
    "brier": "mean of (confidence - outcome)^2",
    "before, after": "temperatures 1, and the fitted ones; on prompts that were not fitted on",
}


@dataclass
class Calibration:
    """What a calibration found."""

    draft: str
    target: str
    temperatures: list[float]
    previous: list[float] | None
    """Those that the draft had before; the fit does not depend on them."""
    fitted_steps: int
    """Positions with a temperature of their own."""
    positions: list[PositionQuality]
    """Each position of the block, then all together."""
    fit: tuple[int, int]
    """Prompts and rounds that were fitted on."""
    report: tuple[int, int]
    """Prompts and rounds of `positions`."""
    report_rounds: list[ObservedRound]
    fit_prompt_ids: list[str]
    sampling: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    stored_in: str | None = None

    @property
    def overall(self) -> PositionQuality:
        """All positions together."""
        return self.positions[-1]


def to_json(found: Calibration) -> dict[str, Any]:
    """Everything but the rounds; JSON types only."""
    entries = {
        name: value
        for name, value in vars(found).items()
        if name not in ("positions", "fit", "report", "report_rounds")
    }
    return entries | {
        "definitions": DEFINITIONS,
        "num_fit_prompts": found.fit[0],
        "num_fit_rounds": found.fit[1],
        "num_report_prompts": found.report[0],
        "num_report_rounds": found.report[1],
        "positions": [asdict(one) for one in found.positions[:-1]],
        "overall": asdict(found.overall),
    }


HEADS = (
    "position", "rounds", "reached", "stayed %", "temp.", "cond. ECE %", "AUC", "Brier",
    "cumul. ECE %", "by chance %",
)  # fmt: skip


def _arrow(before: float | None, after: float | None, *, scale: float = 1.0, digits: int) -> str:
    told = [None if one is None else one * scale for one in (before, after)]
    return " > ".join(number(one, digits) for one in told)


def quality_rows(positions: Sequence[PositionQuality]) -> Iterator[list[str]]:
    """The table below HEADS."""
    for one in positions:
        before, after = one.before, one.after
        chance = after.cumulative_error_by_chance
        yield [
            "all" if one.position is None else str(one.position),
            str(one.num_rounds),
            str(one.num_reached),
            number(100 * one.num_held / one.num_reached if one.num_reached else None, 1),
            number(one.temperature, 3),
            _arrow(before.error, after.error, scale=100.0, digits=2),
            _arrow(before.auc, after.auc, digits=3),
            _arrow(before.brier, after.brier, digits=4),
            _arrow(before.cumulative_error, after.cumulative_error, scale=100.0, digits=2),
            number(None if chance is None else 100 * chance, 2),
        ]


def make_notes(found: Calibration) -> list[str]:
    """The lines below the table: data, conditions, warnings."""
    conditions = found.environment
    versions = ", ".join(f"{name} {one}" for name, one in conditions["versions"].items())
    notes = [
        f"before > after, on {found.report[0]} prompts ({found.report[1]} rounds) that were not "
        f"fitted on; fitted on {found.fit[0]} others ({found.fit[1]} rounds), {found.sampling}",
        "cumul. ECE: of the product of all confidences up to a position; by chance: what exact "
        "products would show on average with so few rounds",
        f"{found.settings['num_bins']} bins of equal width; max_new_tokens "
        f"{found.settings['max_new_tokens']}, prompts {found.settings['prompts']}",
        f"conditions: {conditions['dtype']}, {conditions['device']}, {versions}",
    ]
    if found.fitted_steps < len(found.temperatures):
        notes.append(
            f"WARNING: positions from {found.fitted_steps + 1} on were reached fewer than "
            f"{found.settings['min_observations']} times in a half: they have the temperature of "
            f"position {found.fitted_steps}"
        )
    lowest, highest = float(GRID.min()), float(GRID.max())
    edges = [
        str(place + 1)
        for place, one in enumerate(found.temperatures[: found.fitted_steps])
        if not lowest * 1.001 < one < highest * 0.999
    ]
    if edges:
        notes.append(
            f"WARNING: the temperature of position {', '.join(edges)} lies at the end of the "
            f"grid ({lowest:g} to {highest:g}): no temperature describes this position well"
        )
    notes.append(
        "not stored: store=false"
        if found.stored_in is None
        else f"stored as confidence_temperatures in {found.stored_in} (null there undoes it)"
    )
    return notes


def render(found: Calibration) -> Group:
    """Table and notes, for any rich console."""
    table = Table(
        title=Text(f"confidences of {found.draft} on {found.target}"),
        title_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for head in HEADS:
        table.add_column(head.replace(" ", "\n", 1), justify="right", no_wrap=True)
    rows = list(quality_rows(found.positions))
    for row in rows:
        table.add_row(*map(Text, row), end_section=row is rows[-2])
    return Group(table, *map(Text, make_notes(found)))


def _curve(name: str, bins: Sequence[ReliabilityBin]) -> list[Curve]:
    points = [
        (one.confidence, one.rate)
        for one in bins
        if one.confidence is not None and one.rate is not None
    ]
    return [Curve(name, points)] if points else []


def reliability_chart(
    title: str, before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin]
) -> Markup:
    """Mean confidence of each bin against the share that stayed; empty bins have no point."""
    return line_chart(
        title,
        [
            *_curve("before", before),
            *_curve("after", after),
            Curve("perfect", [(0.0, 0.0), (1.0, 1.0)]),
        ],
        x_label="mean confidence of the bin",
        y_label="share that stayed",
        x_format=lambda value: f"{value:.2f}",
        y_max=1.0,
    )


def _charts(found: Calibration) -> Iterator[Markup]:
    positions = found.positions[:-1]
    for title, name in (
        ("Cumulative calibration error by position", "cumulative_error"),
        ("Conditional calibration error by position", "error"),
    ):
        yield grouped_bar_chart(
            title,
            [str(one.position) for one in positions],
            [
                Series("before", [getattr(one.before, name) for one in positions]),
                Series("after", [getattr(one.after, name) for one in positions]),
            ],
            x_label="drafted position",
            y_label="expected calibration error",
            value_format=lambda value: f"{value:.1%}",
        )
    for one in [found.overall, *positions]:
        where = "all positions" if one.position is None else f"position {one.position}"
        before, after = one.before, one.after
        yield reliability_chart(
            f"Product of confidences, {where}", before.cumulative_bins, after.cumulative_bins
        )
        if one.num_reached:
            yield reliability_chart(f"Conditional confidence, {where}", before.bins, after.bins)


def render_calibration(found: Calibration) -> str:
    """calibration.html."""
    return render_plain_page(
        "draftsmith calibrate",
        f"Confidences of {found.draft}",
        number_table("All numbers", HEADS, list(quality_rows(found.positions))),
        *(element("p", note, class_="soft") for note in make_notes(found)),
        element("h2", "Reliability"),
        element("div", *_charts(found), class_="charts"),
    )


def round_lines(found: Calibration) -> str:
    """rounds.jsonl: the reported rounds with calibrated confidences."""
    rounds = found.report_rounds
    said = Observations(rounds, len(found.temperatures)).confidences(found.temperatures).tolist()
    lines = [
        json.dumps({"confidences": row[: len(one.logits)], "accepted": one.accepted})
        for one, row in zip(rounds, said, strict=True)
    ]
    return "\n".join(lines) + "\n"


def write_calibration(found: Calibration, folder: Path, console: Console) -> None:
    """Prints the table and writes the files that the module docstring lists into `folder`.

    Args:
        found: what `calibrate` found.
        folder: made if missing; files of an earlier calibration are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "calibration.json": json.dumps(to_json(found), indent=1),
        "calibration.txt": as_text(render(found)),
        "calibration.html": render_calibration(found),
        "rounds.jsonl": round_lines(found),
    }
    written = [write_aside(folder, name, text) for name, text in texts.items()]
    console.print(render(found))
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
