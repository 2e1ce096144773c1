"""The accepted length that training simulated, found beside a draft model.

Training writes RUN/metrics.jsonl (train/loop.py): the simulated acceptance of each draft step,
teacher-forced on the validation rows. A draft model that lies in its run folder (RUN/draft,
RUN/best, RUN/checkpoints/step-.../draft) can be held against it; one that was copied elsewhere
cannot. Real decoding far below the simulation means that the model is served differently from how
it was trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
VALIDATION = "validation_"
"""Prefix of the numbers of held-out rows."""
CONDITIONAL = "acceptance_greedy"
"""By draft step: share of the chains alive before it that the step keeps."""
LENGTH = "simulated_accepted_length_greedy"
STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class SimulatedAcceptance:
    """What training recorded about a draft model, greedy."""

    conditional: tuple[float, ...]
    """By draft step, given that the steps before were accepted."""
    source: str
    """File, step and rows that the numbers come from."""

    def accepted_length(self, depth: int) -> float:
        """With drafts of at most `depth` tokens: 1 + sum_i prod_{j <= i} conditional_j."""
        return 1.0 + sum(accumulate(self.conditional[:depth], mul))


def find_simulated(draft_folder: str | Path) -> SimulatedAcceptance | None:
    """The numbers of the step that a draft model was saved at; None where none are recorded.

    Args:
        draft_folder: RUN/draft, RUN/best or RUN/checkpoints/step-.../draft.
    """
    folder = Path(draft_folder).resolve()
    step = STEP_FOLDER.fullmatch(folder.parent.name)
    run = folder.parents[2] if step is not None and len(folder.parents) > 2 else folder.parent
    path = run / METRICS
    if not path.is_file():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    if step is not None:
        rows = [row for row in rows if row.get("step", 0) <= int(step.group(1))]
    for prefix, kind in ((VALIDATION, "held-out"), ("", "training")):
        known = [row for row in rows if prefix + CONDITIONAL in row]
        if known:
            row = _best(known, prefix) if folder.name == "best" else known[-1]
            return SimulatedAcceptance(
                tuple(row[prefix + CONDITIONAL]), f"{METRICS}, step {row['step']}, {kind} rows"
            )
    return None


def _best(rows: Sequence[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """The row that RUN/best was saved at: the first of the highest lengths."""
    return max(rows, key=lambda row: row[prefix + LENGTH])
