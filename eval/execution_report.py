"""The report of executed loads: execute.json, execute.txt and execute.html."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from draftsmith.conf.schema_serving import SimulateConfig
from draftsmith.eval.charts import plain_number
from draftsmith.eval.markup import element
from draftsmith.eval.plain_page import number_table, render_plain_page
from draftsmith.eval.report import as_text, number, write_aside
from draftsmith.eval.simulate import DEFINITIONS as LOAD_DEFINITIONS
from draftsmith.eval.simulate import load_charts

DEFINITIONS = LOAD_DEFINITIONS | {
    "tokens_per_second": "tokens that rounds emitted / seconds, prompts and the host's time "
    "included; closed loop: while all slots were taken",
    "request_tokens_per_second": "median over requests of tokens that rounds emitted / seconds "
    "from entering to the whole answer",
    "first_token_s": "seconds from arrival (closed loop: from entering) to the first token",
    "shares": "of the seconds: reading prompts, drafting (with the length policy), the target's "
    "forwards, the rest",
    "round_tokens_per_second": "tokens_per_second without the time of reading prompts",
    "expected": "the simulation of the same requests: recorded rounds, measured curve, measured "
    "time of drafting; prompts, growing contexts and the host's time left out",
    "of_expected": "round_tokens_per_second / tokens_per_second that the simulation expects",
    "draft_seconds": "median time of drafting in a step with all slots taken",
    "texts": "answers equal to plain decoding's, different at a near tie, clearly different",
}

HEADS = (
    "loop", "load", "policy", "tok/s", "of best", "sim.", "of best", "request", "50 %", "90 %",
    "99 %", "read", "sim.", "length", "texts",
)  # fmt: skip
HEADS_NOTE = (
    "tok/s of all requests, measured and as simulated (sim.), each beside its share of the best "
    "fixed length's; request: tok/s of the median request; 50, 90, 99 %: latency; read: drafted "
    "tokens verified per request and step, and as simulated; length: accepted length; texts: equal "
    "to plain decoding's"
)

SHARE_HEADS = (
    "loop", "load", "policy", "reading prompts", "drafting", "target", "host",
    "first token, median", "90 %", "tok/s in rounds", "of expected",
)  # fmt: skip


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the first table, below HEADS."""
    expected, texts = row["expected"], row["texts"]
    return [
        row["loop"],
        plain_number(row["load"]),
        row["policy"],
        number(row["tokens_per_second"], 1),
        f"{row['of_best_fixed']:.0%}",
        number(expected["tokens_per_second"], 1),
        f"{expected['of_best_fixed']:.0%}",
        number(row["request_tokens_per_second"], 1),
        *(f"{seconds:.1f} s" for seconds in row["latency_s"].values()),
        number(row["verified_per_round"]),
        number(expected["verified_per_round"]),
        number(row["accepted_length"]),
        f"{texts['equal']}/{sum(texts.values())}",
    ]


def share_cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the second table, below SHARE_HEADS."""
    return [
        row["loop"],
        plain_number(row["load"]),
        row["policy"],
        *(f"{row['shares'][name]:.0%}" for name in ("prompts", "draft", "target", "other")),
        *(f"{row['first_token_s'][share]:.2f} s" for share in ("0.5", "0.9")),
        number(row["round_tokens_per_second"], 1),
        f"{row['of_expected']:.0%}",
    ]


def describe_texts(rows: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]) -> str:
    """The verdict on all texts of a run."""
    every = [*(row["texts"] for row in rows), recorded["texts"]]
    total = {name: sum(one[name] for one in every) for name in every[0]}
    said = (
        f"texts: {total['equal']} of {sum(total.values())} equal plain decoding, whatever the "
        "policy and the load"
    )
    if total["near_ties"]:
        said += f"; {total['near_ties']} differ at a near tie of the target's logits"
    if total["different"]:
        said += f"; {total['different']} DIFFER CLEARLY: not lossless"
    return said


def make_notes(
    rows: Sequence[Mapping[str, Any]],
    config: SimulateConfig,
    *,
    recorded: Mapping[str, Any],
    curve: Mapping[str, Any],
    conditions: Mapping[str, Any],
) -> list[str]:
    """What was run, and where the expectation comes from."""
    draft = {row["load"]: 1000 * row["draft_seconds"] for row in rows}
    measured = f"measured to {curve['max_tokens']} tokens"
    if curve["max_tokens"] < curve["tokens_needed"]:
        measured += " and continued as it ends"
    return [
        HEADS_NOTE,
        f"{conditions['target']} in {conditions['dtype']} with {config.execute.draft}; "
        f"{conditions['device']}, {conditions['threads']} threads",
        describe_texts(rows, recorded),
        f"recorded: {recorded['rounds']} rounds of {recorded['draft_tokens']} drafted tokens on "
        f"{recorded['prompts']} prompts, {recorded['mean_accepted']:.2f} accepted on average",
        "drafting: "
        + ", ".join(f"{ms:.1f} ms at load {plain_number(load)}" for load, ms in draft.items()),
        f"curve: {config.target_profile} at a context of {curve['context_length']:.0f}, {measured}",
        f"{config.requests_per_slot} requests per slot, {config.execute.repeats} run(s) of every "
        f"policy in turns, answers of up to {config.num_tokens} tokens on average; seed "
        f"{config.seed}; the simulation leaves out prompts, growing contexts and the host's time",
    ]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE, padding=0)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place in (0, 2) else "right", no_wrap=place == 2)
    for place, cells in enumerate(rows):
        ends = place + 1 < len(rows) and rows[place + 1][:2] != cells[:2]
        table.add_row(*map(Text, cells), end_section=ends)
    return table


def render(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Group:
    """Both tables and the notes, for any rich console."""
    return Group(
        _table(HEADS, [row_cells(row) for row in rows]),
        _table(SHARE_HEADS, [share_cells(row) for row in rows]),
        *map(Text, notes),
    )


def write_execution(
    rows: Sequence[dict[str, Any]],
    config: SimulateConfig,
    *,
    folder: Path,
    console: Console,
    conditions: Mapping[str, Any],
    recorded: Mapping[str, Any],
    curve: Mapping[str, Any],
) -> None:
    """Prints the tables and writes the files that the module docstring lists.

    Args:
        rows: see `execute_load`.
        config: what was run.
        folder: made if missing; files of an earlier run are replaced.
        console: where the tables are shown.
        conditions: target and machine.
        recorded: about the recorded rounds.
        curve: about the steps-per-second curve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = make_notes(rows, config, recorded=recorded, curve=curve, conditions=conditions)
    expected = [row["expected"] for row in rows]
    page = render_plain_page(
        "draftsmith execution",
        "Verification policies under load, served for real",
        element("p", describe_texts(rows, recorded)),
        element("div", *load_charts(rows), class_="charts"),
        element("h2", "As simulated"),
        element("div", *load_charts(expected), class_="charts"),
        element("h2", "All numbers"),
        number_table("All numbers", HEADS, [row_cells(row) for row in rows]),
        element("h2", "Where the time goes"),
        number_table("Where the time goes", SHARE_HEADS, [share_cells(row) for row in rows]),
        *(element("p", note, class_="soft") for note in notes),
    )
    found = {
        "settings": asdict(config),
        "conditions": dict(conditions),
        "definitions": DEFINITIONS,
        "recorded": dict(recorded),
        "curve": dict(curve),
        "rows": list(rows),
    }
    texts = {
        "execute.json": json.dumps(found, indent=1),
        "execute.txt": as_text(render(rows, notes)),
        "execute.html": page,
    }
    written = [write_aside(folder, name, text) for name, text in texts.items()]
    console.print(render(rows, notes))
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)
