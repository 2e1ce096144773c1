"""Chains that are cut at a confidence, from the setting to the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.conf.schema import DraftingConfig
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import write_report
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.eagle3 import Eagle3Method

PROMPTS = [
    Prompt("chat-1", "chat", ("the cat sat", "and the dog?")),
    Prompt("code-1", "code", ("def add(a, b):",)),
]
SETTINGS = EvaluationSettings(
    max_new_tokens=12, policy=ChainPolicy(3), baseline_prompts_per_category=1
)
THRESHOLD = 0.08
"""Some probabilities of untrained drafts are above it, some below."""


@pytest.fixture
def target(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", num_hidden_layers=6)


def untrained_draft(target: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Eagle3Method().build(target.head(), None, (1, 2, 4)).eval()


@pytest.mark.lossless
def test_a_confidence_threshold_cuts_chains_and_stands_in_every_report(
    target: Any, tmp_path: Path
) -> None:
    whole = evaluate(target, untrained_draft(target), PROMPTS, SETTINGS)
    thresholds = [0.0, THRESHOLD, 1.0]
    found = [
        evaluate(
            target,
            untrained_draft(target),
            PROMPTS,
            replace(SETTINGS, confidence_threshold=threshold),
            draft_name="cut",
        )
        for threshold in thresholds
    ]
    verified = [one.overall.acceptance.verified_nodes for one in found]
    assert verified[0] == whole.overall.acceptance.verified_nodes
    assert verified[0] > verified[1] > verified[2] == 0.0
    assert found[2].overall.acceptance.accepted_length == 1.0
    assert all(one.overall.lossless.status == "equal" for one in found)
    console = Console(file=StringIO(), width=200)
    write_report(found[1], tmp_path, console)
    words = f"{SETTINGS.policy.name} cut at confidence {THRESHOLD:g}"
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in (tmp_path / name).read_text() for name in ("results.txt", "report.html"))
    assert (
        json.loads((tmp_path / "results.json").read_text())["settings"]["confidence_threshold"]
        == THRESHOLD
    )


def test_a_threshold_of_trees_or_beyond_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dynamic_tree: only chains are cut"):
        DraftingConfig(policy="dynamic_tree", confidence_threshold=0.5)
    with pytest.raises(ValueError, match=r"confidence_threshold is 1\.5; expected a probability"):
        DraftingConfig(confidence_threshold=1.5)
