"""The report of an evaluation: the table in the terminal, and the files beside it.

results.json (draftsmith.eval.report_json) holds everything, results.txt what the terminal shows,
report.html is the page (draftsmith.eval.page); spec_bench.jsonl and spec_bench_plain.jsonl are
answer files for Spec-Bench's own scripts (draftsmith.eval.spec_bench).
"""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.eval.cautions import cautions
from draftsmith.eval.metrics import AcceptanceSummary
from draftsmith.eval.page import write_page
from draftsmith.eval.report_json import DEFINITIONS, to_json
from draftsmith.eval.results import EvaluationResult, GroupSummary
from draftsmith.eval.settings import describe_sampling
from draftsmith.eval.spec_bench import (
    answer_lines,
    plain_answer_lines,
    spec_bench_groups,
    to_jsonl,
)

__all__ = ["DEFINITIONS", "make_notes", "make_table", "render", "to_json", "write_report"]

TEXT_WIDTH = 120
"""Columns of the plain text copy."""


def number(value: float | None, digits: int = 2) -> str:
    """A rounded number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def positions(values: list[float | None]) -> str:
    """Whole percentages, by draft position."""
    return " ".join("-" if value is None else f"{value:.0%}"[:-1] for value in values) or "-"


def _speeds(summary: GroupSummary) -> tuple[str, str, str]:
    if summary.timed is None:
        return number(summary.tokens_per_second, 1), "-", "-"
    timed = summary.timed
    return (
        number(timed.tokens_per_second, 1),
        number(timed.plain_tokens_per_second, 1),
        f"{timed.speed_up:.2f}x",
    )


def lossless_cell(summary: GroupSummary) -> str:
    """Answers equal / compared, marked where some are not; fits a terminal of 80 columns."""
    verdict = summary.lossless
    if verdict.status == "by_construction":
        return "sampled"
    if verdict.status == "not_checked":
        return "-"
    mark = {"equal": "", "near_ties": "~", "different": "NO "}[verdict.status]
    return f"{mark}{verdict.equal}/{verdict.checked}"


def make_table(result: EvaluationResult) -> Table:
    """One row per category and one for all prompts."""
    table = Table(title=_title(result), title_justify="left", box=box.SIMPLE, padding=0)
    table.add_column("category", no_wrap=True)
    for name in ("prompts", "accepted\nlength", "kept to\n1, 2.. %"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tok/s", "plain\ntok/s", "speed\nup", "lossless"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = result.by_category
    for name, summary in [*groups.items(), ("(all)", result.overall)]:
        table.add_row(
            Text(name),
            str(summary.num_prompts),
            number(summary.acceptance.accepted_length),
            positions(summary.acceptance.joint_acceptance),
            *_speeds(summary),
            lossless_cell(summary),
            end_section=name == list(groups)[-1],
        )
    return table


def _title(result: EvaluationResult) -> Text:
    draft = result.draft or "no draft model"
    policy = f", {result.settings.drafting_name}" if result.draft else ""
    sampling = describe_sampling(result.settings.sampling)
    return Text(f"{draft} on {result.target}: {sampling}{policy}")


def _acceptance_line(name: str, acceptance: AcceptanceSummary) -> str:
    return (
        f"{name}: accepted length {number(acceptance.accepted_length, 3)} "
        f"({number(acceptance.accepted_draft_tokens, 3)} of them drafted), "
        f"{acceptance.num_rounds} rounds"
    )


def _draft_notes(result: EvaluationResult) -> list[str]:
    """What only a draft model has: positions, nodes, other conventions."""
    summary = result.overall
    acceptance = summary.acceptance
    total = acceptance.num_rounds or 1
    shares = ", ".join(
        f"{emitted}: {count / total:.0%}" for emitted, count in acceptance.histogram.items()
    )
    notes = [
        f"  tokens per round, share of rounds: {shares or '-'}; drafted tokens verified per round: "
        f"{number(acceptance.verified_nodes)}",
        "  drafts kept by position, all before kept (joint): "
        f"{positions(acceptance.joint_acceptance)} %; given those before (conditional): "
        f"{positions(acceptance.conditional_acceptance)} %",
        f"  other conventions: mean over prompts {number(summary.macro_accepted_length, 3)}, "
        f"vLLM {number(acceptance.accepted_length_vllm, 3)} (positions "
        f"{positions(list(acceptance.joint_acceptance_vllm))} %), "
        f"Spec-Bench {number(acceptance.accepted_length_spec_bench, 3)}",
    ]
    groups = spec_bench_groups(result.prompts)
    if "mt_bench" in groups:
        listed = ", ".join(
            f"{name} {number(one.mean_accepted_tokens)}"
            f"{'' if one.speed_up is None else f' (x{one.speed_up:.2f})'}"
            for name, one in groups.items()
        )
        notes.append(f"  Spec-Bench's groups, mean accepted tokens (speed-up): {listed}")
    return notes


def _time_note(result: EvaluationResult) -> str:
    summary = result.overall
    total = sum(summary.seconds.values())
    shares = ", ".join(f"{name} {part / total:.0%}" for name, part in summary.seconds.items())
    overhead = summary.round_overhead
    cost = "" if overhead is None else f"; a round costs {overhead:.1%} beyond its forwards"
    return f"time: {total:.1f} s ({shares}){cost}; warm-up: {result.warm_up}"


def make_notes(result: EvaluationResult) -> list[str]:
    """The lines below the table: verdict, other conventions, time, conditions, warnings."""
    summary = result.overall
    notes = [_acceptance_line("all prompts", summary.acceptance)]
    if result.draft is not None:
        notes += _draft_notes(result)
    if summary.prompt_lookup is not None:
        notes.append(_acceptance_line("prompt lookup, same answers", summary.prompt_lookup))
    notes.append(f"verdict: {summary.lossless.text}")
    notes.append(
        f"texts: {summary.distinct_ratio:.0%} distinct tokens on average, longest loop "
        f"{summary.longest_loop} tokens"
    )
    notes.append(_time_note(result))
    conditions, settings = result.environment, result.settings
    versions = ", ".join(f"{name} {one}" for name, one in conditions["versions"].items())
    batch = f", batches of {settings.batch_size}" if settings.batch_size > 1 else ""
    template = dict(settings.template_kwargs) or "none"
    notes.append(
        f"conditions: {conditions['dtype']}, {conditions['device']}, {conditions['threads']} "
        f"threads, {conditions['processes']} process(es){batch}, max_new_tokens "
        f"{settings.max_new_tokens}, seed {settings.seed}, {versions}"
    )
    notes.append(f"prompts as {result.template}, template settings: {template}")
    return [*notes, *(f"WARNING: {text}" for text in cautions(result))]


def render(result: EvaluationResult) -> Group:
    """Table and notes, for any rich console."""
    return Group(make_table(result), *(Text(note) for note in make_notes(result)))


def report_console() -> Console:
    """Standard output; TEXT_WIDTH columns wide where it is a file or a pipe, which have no width of
    their own (rich would take 80 and cut numbers)."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = TEXT_WIDTH
    return console


def as_text(shown: RenderableType) -> str:
    """What a console shows, without colours, TEXT_WIDTH columns wide."""
    paper = StringIO()
    Console(file=paper, width=TEXT_WIDTH, color_system=None).print(shown)
    return paper.getvalue()


def write_aside(folder: Path, name: str, text: str) -> Path:
    """Writes a file under another name and puts it in the place of an older one."""
    aside = folder / f"{name}.tmp"
    aside.write_text(text, encoding="utf-8")
    return aside.replace(folder / name)


def write_report(result: EvaluationResult, folder: Path, console: Console) -> None:
    """Prints the table and writes the files that the module docstring lists into `folder`.

    Args:
        result: what `evaluate` found.
        folder: made if missing; files of an earlier evaluation are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = to_json(result)
    name = result.draft or "plain"
    texts = {
        "results.json": json.dumps(found, indent=1, ensure_ascii=False),
        "results.txt": as_text(render(result)),
        "spec_bench.jsonl": to_jsonl(answer_lines(result.prompts, name)),
        "spec_bench_plain.jsonl": to_jsonl(plain_answer_lines(result.prompts, "plain")),
    }
    written = [write_aside(folder, file, text) for file, text in texts.items() if text]
    if not texts["spec_bench_plain.jsonl"]:
        # One of an earlier evaluation would not belong to the others.
        (folder / "spec_bench_plain.jsonl").unlink(missing_ok=True)
    # From the very text that was written: the page shows what the file holds.
    page = folder / "report.html"
    write_page(json.loads(texts["results.json"]), page)
    console.print(render(result))
    names = ", ".join(str(path) for path in [page, *written])
    console.print(f"written: {names}", highlight=False, soft_wrap=True)
