"""The report of draftsmith-prepare: counts by reason, and some rows as the draft model learns them.

In the terminal the supervised text is coloured; in report.txt it stands in [[double brackets]].
A person who reads three rows sees a wrong mask at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from draftsmith.data.row_encoder import DroppedRow

if TYPE_CHECKING:
    from draftsmith.data.prepare import PrepareInfo

EXAMPLES_PER_REASON = 3
SHOWN_ROWS = 3
_SHOWN_CHARACTERS = 700
"""Longer stretches are shown by their two ends."""
SUPERVISED_STYLE = "bold green"


def share(part: float, whole: float) -> str:
    """A part as a percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def marked_row(tokenizer: Any, input_ids: Sequence[int], loss_mask: Sequence[int]) -> Text:
    """One row decoded; supervised stretches are in brackets and coloured.

    Args:
        tokenizer: of the target.
        input_ids: [tokens].
        loss_mask: [tokens] 1 where the target wrote the token.
    """
    shown = Text()
    pairs = zip(input_ids, loss_mask, strict=True)
    for supervised, group in groupby(pairs, key=lambda pair: bool(pair[1])):
        ids = [token_id for token_id, _ in group]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if len(text) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            text = f"{text[:half]} ... ({len(ids)} tokens) ... {text[-half:]}"
        if supervised:
            shown.append(f"[[{text}]]", style=SUPERVISED_STYLE)
        else:
            shown.append(text, style="dim")
    return shown


def dropped_lines(
    dropped: Mapping[str, int], examples: Mapping[str, Sequence[DroppedRow]]
) -> list[str]:
    """Reasons by frequency, each with the first rows that it hit."""
    lines = []
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        lines.append(f"  {count} x {reason}")
        lines += [f"      {row.origin}: {row.detail}" for row in examples.get(reason, ())]
    return lines


def report_text(
    info: PrepareInfo,
    tokenizer: Any,
    *,
    examples: Mapping[str, Sequence[DroppedRow]],
    end_counts: Mapping[int, int],
    rows: Sequence[Mapping[str, Any]],
) -> Text:
    """The whole report.

    Args:
        info: the counts.
        tokenizer: of the target.
        examples: reason -> the first rows dropped for it.
        end_counts: last supervised token of an answer -> how many answers.
        rows: some rows of the prepared dataset (id, input_ids, loss_mask).
    """
    taught = f"{info.supervised_tokens} ({share(info.supervised_tokens, info.tokens)})"
    lines = [
        f"target            {info.target}",
        f"rows read         {info.rows_read}",
        f"rows kept         {info.rows_kept} ({share(info.rows_kept, info.rows_read)})",
        f"training rows     {info.training_rows}",
        f"tokens            {info.tokens}",
        f"supervised tokens {taught}",
    ]
    if info.answers:
        lines.append(
            f"cut answers       {info.cut_answers} of {info.answers} "
            f"({share(info.cut_answers, info.answers)}); their end of turn is not supervised"
        )
    if end_counts:
        total = sum(end_counts.values())
        ends = sorted(end_counts.items(), key=lambda item: -item[1])[:5]
        shown = (
            f"{tokenizer.decode([i], skip_special_tokens=False)!r} ({i}) {share(n, total)}"
            for i, n in ends
        )
        lines.append(f"answers end with  {', '.join(shown)}")
    lines.append(f"rows dropped      {info.rows_read - info.rows_kept}")
    lines += dropped_lines(info.dropped, examples)
    if info.notes:
        lines.append("worth knowing")
        lines += [f"  {n} x {what}" for what, n in sorted(info.notes.items(), key=lambda i: -i[1])]
    report = Text("\n".join(lines) + "\n")
    report.append(f"\n{len(rows)} of the rows; [[supervised]] is what the draft model learns:\n")
    for row in rows:
        report.append(f"\n--- {row['id']} ({len(row['input_ids'])} tokens) ---\n", style="cyan")
        report.append_text(marked_row(tokenizer, row["input_ids"], row["loss_mask"]))
        report.append("\n")
    return report


def show(report: Text) -> None:
    """Prints the report on the terminal; no markup of the data is interpreted."""
    Console(highlight=False, soft_wrap=True).print(report)


def show_line(line: str) -> None:
    """Prints one line of plain text."""
    show(Text(line))
