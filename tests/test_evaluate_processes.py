"""One evaluation by several processes: the numbers and texts of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
import torch

from draftsmith.eval.lanes import Lane, LaneRunner, plan_prompts
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.results import PromptResult
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.eval.sharding import Lanes, gather_lanes, merge_lanes, own_share
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import SamplingSettings

PROMPTS = [
    Prompt("chat-1", "chat", ("the cat sat", "and the dog?")),
    Prompt("chat-2", "chat", ("user asks",)),
    Prompt("code-1", "code", ("def add(a, b):",)),
    Prompt("code-2", "code", ("count one two",)),
    Prompt("code-3", "code", ("return a + b",)),
]


def untrained_draft(target: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = Eagle3Method().build(target.head(), None, (1, 2, 4)).eval()
    draft.attach_target(embed_tokens=target.embed_tokens)
    return draft


def test_shares_of_the_prompts_merge_to_the_results_of_one_process(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama", num_hidden_layers=6)
    settings = EvaluationSettings(
        max_new_tokens=6,
        policy=ChainPolicy(2),
        sampling=SamplingSettings(1.0),
        baseline_prompts_per_category=1,
    )
    lanes = [Lane(untrained_draft(target), settings, "a"), Lane(None, settings)]
    planned = plan_prompts(PROMPTS, settings)
    shares = [own_share(planned, index, 2) for index in range(2)]
    assert [len(share) for share in shares] == [3, 2]
    runs = [LaneRunner(target, lanes).run(share) for share in shares]
    whole = LaneRunner(target, lanes).run(planned)
    for merged, alone in zip(merge_lanes(runs), merge_lanes([whole]), strict=True):
        assert [one.prompt for one in merged] == PROMPTS
        for ours, theirs in zip(merged, alone, strict=True):
            assert [t.generation.token_ids for t in ours.turns] == [
                t.generation.token_ids for t in theirs.turns
            ]
            assert ours.acceptance == theirs.acceptance
            # The same prompts are timed, however they are shared.
            assert [t.plain is None for t in ours.turns] == [t.plain is None for t in theirs.turns]


def test_more_processes_than_prompts_leave_some_without_work() -> None:
    done: Lanes = [[(0, PromptResult(PROMPTS[0]))]]
    idle: Lanes = [[]]
    assert own_share([1], 3, 4) == []
    assert [one.prompt.id for one in merge_lanes([done, idle])[0]] == ["chat-1"]


@pytest.mark.parametrize("is_main", [True, False])
def test_a_mistake_in_one_process_ends_all_with_one_message(
    monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    """A process that waited for results that never come would hang."""
    monkeypatch.setattr(
        accelerate.utils, "gather_object", lambda own: [*own, ([], "Prompt x: too long")]
    )
    state: Any = SimpleNamespace(num_processes=2, is_main_process=is_main)
    if is_main:
        with pytest.raises(ValueError, match="Prompt x: too long"):
            gather_lanes(lambda: [[]], state)
    else:
        with pytest.raises(SystemExit) as left:
            gather_lanes(lambda: [[]], state)
        assert left.value.code == 2


def run_module(module: str, *arguments: str, processes: int = 1) -> Any:
    launcher = [] if processes == 1 else ["torch.distributed.run", "--nproc_per_node", "2", "-m"]
    return subprocess.run(
        [sys.executable, "-P", "-m", *launcher, module, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on the number of processes."""
    acceptance = {
        name: group["acceptance"]
        for name, group in [("all", found["overall"]), *found["by_category"].items()]
    }
    answers = [
        {name: turn[name] for name in ("text", "token_ids", "rounds", "finish_reason", "checked")}
        for prompt in found["prompts"]
        for turn in prompt["turns"]
    ]
    return {
        "acceptance": acceptance,
        "answers": answers,
        "ids": [p["id"] for p in found["prompts"]],
    }


@pytest.mark.slow
def test_torchrun_with_two_processes_reports_what_one_does(
    tmp_path: Path, tiny_target: Callable[..., Any]
) -> None:
    target = tiny_target("llama", num_hidden_layers=6)
    untrained_draft(target).save_pretrained(tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    rows = [asdict(prompt) for prompt in PROMPTS]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = [
        "target=local", f"target.name_or_path={target.name_or_path}", "target.dtype=float32",
        f"prompts={prompts}", "max_new_tokens=8",
    ]  # fmt: skip
    evaluation = [*settings, f"draft={tmp_path / 'draft'}", "drafting=dynamic_tree"]
    evaluation += ["drafting.total_tokens=8", "drafting.depth=2", "drafting.top_k=2"]
    found = []
    for processes in (1, 2):
        output = tmp_path / f"evaluated-{processes}"
        done = run_module(
            "draftsmith.eval.evaluate", *evaluation, f"output={output}", processes=processes
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("verdict: lossless") == 1, "one process writes the report"
        found.append(json.loads((output / "results.json").read_text(encoding="utf-8")))
    assert without_times(found[0]) == without_times(found[1])
    assert [one["environment"]["processes"] for one in found] == [1, 2]
    assert any("2 processes" in text for text in found[1]["warnings"])
    # The second prompt is the second process's.
    rows[1]["turns"] = ["the cat sat on the mat " * 200]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    bad = run_module("draftsmith.eval.evaluate", *evaluation, f"output={tmp_path}/x", processes=2)
    assert bad.returncode != 0
    assert bad.stderr.count("Prompt chat-2, turn 1: The prompt has") == 1
    prompts.write_text("\n".join(map(json.dumps, rows[2:])), encoding="utf-8")
    compared = run_module(
        "draftsmith.eval.compare",
        *settings,
        f"drafts={{a: {tmp_path / 'draft'}, plain: none}}",
        "settings={c: {num_draft_tokens: 2}}",
        f"output={tmp_path / 'compared'}",
        processes=2,
    )
    assert compared.returncode == 0, compared.stderr
    table = json.loads((tmp_path / "compared" / "compare.json").read_text(encoding="utf-8"))
    assert [row["lossless"] for row in table["rows"]][0] == "equal"
