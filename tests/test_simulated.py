"""Finding what training simulated beside a draft model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.eval.simulated import find_simulated


def test_the_simulated_length_is_read_from_the_run_folder(tmp_path: Path) -> None:
    """E10."""
    rows = [
        {"step": 5, "acceptance_greedy": [0.1]},
        {"step": 10, "validation_acceptance_greedy": [0.5, 0.4]}
        | {"validation_simulated_accepted_length_greedy": 1.7},
        {"step": 20, "validation_acceptance_greedy": [0.3, 0.3]}
        | {"validation_simulated_accepted_length_greedy": 1.39},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    last = find_simulated(tmp_path / "draft")
    assert last is not None
    assert last.accepted_length(2) == pytest.approx(1 + 0.3 + 0.09)
    assert last.accepted_length(1) == pytest.approx(1.3)
    best = find_simulated(tmp_path / "best")
    assert best is not None
    assert best.conditional == (0.5, 0.4)
    middle = find_simulated(tmp_path / "checkpoints" / "step-000010" / "draft")
    assert middle is not None
    assert "step 10, held-out rows" in middle.source
    early = find_simulated(tmp_path / "checkpoints" / "step-000005" / "draft")
    assert early is not None
    assert "step 5, training rows" in early.source
    assert find_simulated(tmp_path / "elsewhere" / "draft") is None
