"""A comparison as a table in the terminal, as JSON and as a page of plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from draftsmith.eval.cautions import cautions
from draftsmith.eval.compare_page import render_comparison
from draftsmith.eval.comparison import ComparedLane, Comparison
from draftsmith.eval.report import as_text, lossless_cell, number, write_aside
from draftsmith.eval.report_json import DEFINITIONS, group_json
from draftsmith.eval.settings import describe_sampling, describe_settings

COMPARE_DEFINITIONS = {
    name: DEFINITIONS[name]
    for name in (
        "accepted_length",
        "verified_nodes",
        "joint_acceptance",
        "conditional_acceptance",
        "tokens_per_second",
        "timed",
        "draft_ms",
        "verify_ms",
        "round_overhead",
        "accepted_length_vllm",
        "accepted_length_spec_bench",
    )
}


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def lane_cells(lane: ComparedLane) -> list[str]:
    """One row, below HEADS."""
    overall = lane.result.overall
    timed, overhead = overall.timed, overall.round_overhead
    return [
        lane.draft,
        lane.setting,
        number(lane.accepted_length),
        number(overall.acceptance.verified_nodes, 1),
        number(lane.tokens_per_second, 1),
        number(None if timed is None else timed.plain_tokens_per_second, 1),
        _speed(lane.speed_up),
        "-" if lane.is_plain else lossless_cell(overall),
        number(overall.draft_ms, 1),
        "-" if overhead is None or lane.is_plain else f"{overhead:.1%}",
    ]


HEADS = (
    "draft",
    "setting",
    "accepted\nlength",
    "nodes /\nround",
    "tok/s",
    "plain\ntok/s",
    "speed\nup",
    "lossless",
    "draft\nms",
    "over-\nhead",
)


def make_table(comparison: Comparison) -> Table:
    """One row per draft model and setting."""
    table = Table(
        title=Text(f"draft models on {comparison.target}"),
        title_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for place, head in enumerate(HEADS):
        table.add_column(head, justify="left" if place < 2 else "right", overflow="fold")
    for place, lane in enumerate(comparison.lanes):
        after = comparison.lanes[place + 1 : place + 2]
        ends = bool(after) and after[0].draft != lane.draft
        table.add_row(*(Text(cell) for cell in lane_cells(lane)), end_section=ends)
    return table


def make_notes(comparison: Comparison) -> list[str]:
    """The lines below the table: what the settings are, conditions, warnings."""
    notes = []
    for setting in comparison.settings:
        settings = comparison.lane(comparison.drafts[0], setting).result.settings
        notes.append(f"{setting}: {settings.drafting_name}, {describe_sampling(settings.sampling)}")
    first = comparison.lanes[0].result
    conditions, settings = first.environment, first.settings
    versions = ", ".join(f"{name} {one}" for name, one in conditions["versions"].items())
    notes.append(
        f"conditions: {conditions['dtype']}, {conditions['device']}, {conditions['threads']} "
        f"threads, {conditions['processes']} process(es), {first.overall.num_prompts} prompts "
        f"({first.overall.num_answers} answers) as {first.template}, max_new_tokens "
        f"{settings.max_new_tokens}, seed {settings.seed}, {versions}"
    )
    notes.append(
        "all of them decoded one after the other for each prompt, in rotating order; warm-up: "
        f"{first.warm_up}"
    )
    for lane in comparison.lanes:
        notes += [f"WARNING, {lane.draft} {lane.setting}: {text}" for text in cautions(lane.result)]
    return notes


def _lane_json(lane: ComparedLane, path: str | None) -> dict[str, Any]:
    result = lane.result
    simulated = result.simulated
    return {
        "draft": lane.draft,
        "path": path,
        "setting": lane.setting,
        "settings": describe_settings(result.settings),
        "accepted_length": lane.accepted_length,
        "verified_nodes": result.overall.acceptance.verified_nodes,
        "tokens_per_second": lane.tokens_per_second,
        "speed_up": lane.speed_up,
        "lossless": result.overall.lossless.status,
        "draft_ms": result.overall.draft_ms,
        "verify_ms": result.overall.verify_ms,
        "round_overhead": result.overall.round_overhead,
        "overall": group_json(result.overall),
        "by_category": {name: group_json(one) for name, one in result.by_category.items()},
        "simulated_accepted_length": None
        if simulated is None
        else simulated.accepted_length(len(simulated.conditional)),
        "warnings": cautions(result),
    }


def comparison_json(comparison: Comparison, paths: Mapping[str, str | None]) -> dict[str, Any]:
    """Everything but the answers; JSON types only.

    Args:
        comparison: what `compare` found.
        paths: draft name -> where the draft model was loaded from; None for plain decoding.
    """
    first = comparison.lanes[0].result
    return {
        "target": comparison.target,
        "environment": first.environment,
        "template": first.template,
        "warm_up": first.warm_up,
        "definitions": COMPARE_DEFINITIONS,
        "rows": [_lane_json(lane, paths.get(lane.draft)) for lane in comparison.lanes],
    }


def render(comparison: Comparison) -> Group:
    """Table and notes, for any rich console."""
    return Group(make_table(comparison), *(Text(note) for note in make_notes(comparison)))


def write_comparison(
    comparison: Comparison, paths: Mapping[str, str | None], folder: Path, console: Console
) -> None:
    """Prints the table and writes compare.json, compare.txt and compare.html into `folder`.

    Args:
        comparison: what `compare` found.
        paths: see `comparison_json`.
        folder: made if missing; files of an earlier comparison are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = comparison_json(comparison, paths)
    rows = [lane_cells(lane) for lane in comparison.lanes]
    heads = [head.replace("-\n", "").replace("\n", " ") for head in HEADS]
    page = render_comparison(comparison, heads, rows, make_notes(comparison))
    texts = {
        "compare.json": json.dumps(found, indent=1, ensure_ascii=False),
        "compare.txt": as_text(render(comparison)),
        "compare.html": page,
    }
    written = [write_aside(folder, name, text) for name, text in texts.items()]
    console.print(render(comparison))
    names = ", ".join(map(str, written))
    console.print(f"written: {names}", highlight=False, soft_wrap=True)
