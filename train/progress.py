"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def as_line(row: Mapping[str, Any], total_steps: int, seconds_left: float) -> str:
    """One row of metrics as text, for example

    step 20/300  loss 2.1034  accepted length 1.84 greedy, 1.71 sampled  5210 tokens/s  3:20 left
    """
    minutes, seconds = divmod(round(seconds_left), 60)
    return (
        f"step {row['step']}/{total_steps}  loss {row['loss']:.4f}  {_lengths(row, '')}"
        f"  {row['tokens_per_second']:.0f} tokens/s  {minutes}:{seconds:02d} left"
    )


def as_validation_line(row: Mapping[str, Any]) -> str:
    """One row of validation metrics as text."""
    lengths = _lengths(row, "validation_")
    return f"step {row['step']}  validation loss {row['validation_loss']:.4f}  {lengths}"


def _lengths(row: Mapping[str, Any], prefix: str) -> str:
    name = f"{prefix}simulated_accepted_length"
    greedy, sampled = row[f"{name}_greedy"], row[f"{name}_sampled"]
    return f"accepted length {greedy:.2f} greedy, {sampled:.2f} sampled (simulated)"


class ProgressDisplay:
    """A rich bar on a terminal; elsewhere one plain line per record. Writes to stderr."""

    def __init__(self, total_steps: int, *, done: int, is_shown: bool) -> None:
        """Starts the display.

        Args:
            total_steps: optimizer steps of the run.
            done: steps that a resumed run has behind it.
            is_shown: False for all but the main process.
        """
        self._total = total_steps
        self._is_shown = is_shown
        self._bar: Progress | None = None
        if is_shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                "training", total=total_steps, completed=done, numbers=""
            )
            self._bar.start()

    def advance(self) -> None:
        """One optimizer step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def show(self, row: Mapping[str, Any], seconds_left: float) -> None:
        """Shows a row of training metrics."""
        if self._bar is not None:
            numbers = (
                f"loss {row['loss']:.3f}  {row['tokens_per_second']:.0f} tokens/s  accepted "
                f"{row['simulated_accepted_length_greedy']:.2f}"
            )
            self._bar.update(self._task, numbers=numbers)
        elif self._is_shown:
            self.say(as_line(row, self._total, seconds_left))

    def say(self, text: str) -> None:
        """Prints one line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._is_shown:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def finish(self) -> None:
        """Takes the bar down."""
        if self._bar is not None:
            self._bar.stop()
