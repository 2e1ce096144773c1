"""An evaluation as JSON, as a table in the terminal, and as the same table in plain text."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from draftsmith.eval.metrics import AcceptanceSummary
from draftsmith.eval.results import EvaluationResult, GroupSummary, PromptResult, TurnResult

TEXT_WIDTH = 120
"""Columns of the plain text copy."""

DEFINITIONS = {
    "accepted_length": "tokens emitted in rounds / rounds: the target's own token of each round "
    "included, the token from prefill excluded, cut at the end of the text, mean over all rounds",
    "accepted_draft_tokens": "drafted tokens in the text / rounds (the target's own excluded)",
    "joint_acceptance": "by draft position i: share of rounds that drafted i tokens and kept all i",
    "conditional_acceptance": "the same among rounds that kept the first i - 1",
    "macro_accepted_length": "mean over prompts of each prompt's accepted length",
    "accepted_length_vllm": "1 + accepted drafts / rounds with drafts, not cut at the end of text",
    "accepted_length_spec_bench": "mean over rounds of 1 + drafted tokens in the text",
    "tokens_per_second": "generated token ids / wall-clock seconds, prefill included",
    "timed": "both speeds on the answers that were decoded both ways, alternating in one run",
    "repetitive_answers": "answers of which one loop of up to 16 tokens covers at least half",
    "prompt_lookup": "rounds that transformers' prompt lookup needs for the same greedy answers",
}
"""Written into every results.json."""


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _positions(values: list[float | None]) -> str:
    """Whole percentages, by draft position."""
    return " ".join("-" if value is None else f"{value:.0%}"[:-1] for value in values) or "-"


def _speeds(summary: GroupSummary) -> tuple[str, str, str]:
    if summary.timed is None:
        return _number(summary.tokens_per_second, 1), "-", "-"
    timed = summary.timed
    return (
        _number(timed.tokens_per_second, 1),
        _number(timed.plain_tokens_per_second, 1),
        f"{timed.speed_up:.2f}x",
    )


def _lossless_cell(summary: GroupSummary) -> str:
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
            name,
            str(summary.num_prompts),
            _number(summary.acceptance.accepted_length),
            _positions(summary.acceptance.joint_acceptance),
            *_speeds(summary),
            _lossless_cell(summary),
            end_section=name == list(groups)[-1],
        )
    return table


def _title(result: EvaluationResult) -> str:
    sampling = result.settings.sampling
    mode = (
        "greedy"
        if sampling.greedy
        else f"temperature {sampling.temperature}, top_k {sampling.top_k}, top_p {sampling.top_p}"
    )
    draft = result.draft or "no draft model"
    drafts = f", {result.settings.num_draft_tokens} draft tokens" if result.draft else ""
    return f"{draft} on {result.target}: {mode}{drafts}"


def _acceptance_line(name: str, acceptance: AcceptanceSummary) -> str:
    return (
        f"{name}: accepted length {_number(acceptance.accepted_length, 3)} "
        f"({_number(acceptance.accepted_draft_tokens, 3)} of them drafted), "
        f"{acceptance.num_rounds} rounds"
    )


def make_notes(result: EvaluationResult) -> list[str]:
    """The lines below the table: verdict, other conventions, time, conditions."""
    summary = result.overall
    acceptance = summary.acceptance
    notes = [_acceptance_line("all prompts", acceptance)]
    if result.draft is not None:
        notes.append(
            "  drafts kept by position, all before kept (joint): "
            f"{_positions(acceptance.joint_acceptance)} %; given those before (conditional): "
            f"{_positions(acceptance.conditional_acceptance)} %"
        )
        notes.append(
            f"  other conventions: mean over prompts {_number(summary.macro_accepted_length, 3)}, "
            f"vLLM {_number(acceptance.accepted_length_vllm, 3)}, "
            f"Spec-Bench {_number(acceptance.accepted_length_spec_bench, 3)}"
        )
    if summary.prompt_lookup is not None:
        notes.append(_acceptance_line("prompt lookup, same answers", summary.prompt_lookup))
    notes.append(f"verdict: {summary.lossless.text}")
    if summary.repetitive_answers:
        notes.append(
            f"repetitive: {summary.repetitive_answers} of {summary.num_answers} answers run in a "
            "loop, which is easy to draft; accepted length without them "
            f"{_number(summary.accepted_length_without_repetitive, 3)}"
        )
    total = sum(summary.seconds.values())
    shares = ", ".join(f"{name} {part / total:.0%}" for name, part in summary.seconds.items())
    notes.append(f"time: {total:.1f} s ({shares}); warm-up: {result.warm_up}")
    conditions = result.environment
    template = dict(result.settings.template_kwargs) or "none"
    notes.append(
        f"conditions: {conditions['dtype']}, {conditions['device']}, {conditions['threads']} "
        f"threads, max_new_tokens {result.settings.max_new_tokens}, seed {result.settings.seed}, "
        f"template settings: {template}"
    )
    return notes


def _turn_json(turn: TurnResult) -> dict[str, Any]:
    generation = turn.generation
    return {
        "prompt_tokens": len(turn.prompt_ids),
        "text": turn.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "rounds": [[r.proposed, r.accepted, r.emitted] for r in generation.rounds],
        "seconds": generation.seconds,
        "prefill_seconds": generation.prefill_seconds,
        "plain_seconds": None if turn.plain is None else turn.plain.seconds,
        "repetition": asdict(turn.repetition),
        "checked": turn.checked,
        "divergence": None if turn.divergence is None else asdict(turn.divergence),
    }


def _prompt_json(result: PromptResult) -> dict[str, Any]:
    summary = result.acceptance
    return {
        "id": result.prompt.id,
        "category": result.prompt.category,
        "accepted_length": summary.accepted_length,
        "histogram": summary.histogram,
        "turns": [_turn_json(turn) for turn in result.turns],
    }


def _group_json(summary: GroupSummary) -> dict[str, Any]:
    found = asdict(summary)
    found["lossless"]["text"] = summary.lossless.text
    if summary.timed is not None:
        found["timed"]["speed_up"] = summary.timed.speed_up
    return found


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """Everything that was found, with the definitions of the numbers; JSON types only."""
    settings = asdict(result.settings)
    settings["template_kwargs"] = dict(result.settings.template_kwargs)
    return {
        "target": result.target,
        "draft": result.draft,
        "settings": settings,
        "environment": result.environment,
        "warm_up": result.warm_up,
        "definitions": DEFINITIONS,
        "overall": _group_json(result.overall),
        "by_category": {name: _group_json(one) for name, one in result.by_category.items()},
        "prompts": [_prompt_json(one) for one in result.prompts],
    }


def render(result: EvaluationResult) -> Group:
    """Table and notes, for any rich console."""
    return Group(make_table(result), *(Text(note) for note in make_notes(result)))


def write_report(result: EvaluationResult, folder: Path, console: Console) -> None:
    """Prints the table and writes results.json and results.txt into `folder`.

    Args:
        result: what `evaluate` found.
        folder: made if missing; files of an earlier evaluation are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paper = StringIO()
    Console(file=paper, width=TEXT_WIDTH, color_system=None).print(render(result))
    found = json.dumps(to_json(result), indent=1, ensure_ascii=False)
    for name, text in (("results.json", found), ("results.txt", paper.getvalue())):
        aside = folder / f"{name}.tmp"
        aside.write_text(text, encoding="utf-8")
        aside.replace(folder / name)
    console.print(render(result))
    console.print(f"written: {folder / 'results.json'}, {folder / 'results.txt'}", highlight=False)
