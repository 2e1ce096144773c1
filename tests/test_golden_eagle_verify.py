"""Tree verification against rounds recorded from EAGLE (see DRAFTSMITH_GOLDEN).

Every number is read from the folder; node i of ours is the recorded node i + 1 (0 is the root).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.inference.sampling import target_probs
from draftsmith.inference.verify import tree_chances, tree_residual, verify_tree_greedy
from draftsmith.models.protocols import Draft, SamplingSettings

pytestmark = pytest.mark.golden


def found_cases(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """All recorded sets of trees; an empty folder must not pass for a success."""
    cases = sorted(folder.glob("eagle/eagle*-tree"))
    assert cases, f"no eagle/eagle*-tree in {folder}"
    return [(json.loads((case / "golden.json").read_text()), case) for case in cases]


def recorded_draft(tensors: dict[str, Tensor], name: str) -> Draft:
    """The recorded tree, its parents read from the mask: the nearest of the visible ancestors."""
    tokens = tensors[f"{name}.draft_tokens"].flatten()
    mask = tensors[f"{name}.tree_mask"].view(len(tokens), len(tokens)).bool()
    depths = tensors[f"{name}.tree_position_ids"].flatten()
    parents = [
        int(torch.where(mask[i] & (depths == depths[i] - 1))[0]) - 1 for i in range(1, len(tokens))
    ]
    draft = Draft(tokens[1:], parents=parents)
    assert draft.depths == depths[1:].tolist()
    return draft


def test_greedy_verdicts_equal_eagle(golden_folder: Path) -> None:
    for record, folder in found_cases(golden_folder):
        tensors = load_file(folder / "decode.safetensors")
        rounds = 0
        for number, case in enumerate(record["decode"]["cases"]):
            for turn, verdict in enumerate(case["rounds"]):
                name = f"case{number}.round{turn}"
                draft = recorded_draft(tensors, name)
                choices = tensors[f"{name}.node_logits"].flatten(0, -2).argmax(-1)
                path, next_token = verify_tree_greedy(draft, choices)
                assert [0, *(node + 1 for node in path)] == verdict["accepted_nodes"]
                assert draft.tokens[path].tolist() == verdict["accepted_tokens"][1:]
                assert len(path) == verdict["accept_length"]
                assert next_token == verdict["bonus"]
                rounds += 1
        assert rounds > 10


def walk(draft: Draft, chances: Tensor, uniforms: list[float]) -> list[int]:
    """EAGLE draws one number per tested node, we one per node: spends the recorded ones in turn."""
    path, last, numbers = [], -1, iter(uniforms)
    for node, parent in enumerate(draft.parent_list):
        if parent == last and next(numbers) <= float(chances[node]):
            path.append(node)
            last = node
    assert not list(numbers), "EAGLE tested more nodes"
    return path


def test_sampled_verdicts_and_residuals_equal_eagle(golden_folder: Path) -> None:
    for record, folder in found_cases(golden_folder):
        tensors = load_file(folder / "decode.safetensors")
        recorded = load_file(folder / "sampling.safetensors")
        rows = record["sampling"]["rows"]
        assert {row["accept_length"] for row in rows} >= {0, 1, 2}
        for number, row in enumerate(rows):
            name = f"case{row['case']}.round{row['round']}"
            draft = recorded_draft(tensors, name)
            logits = tensors[f"{name}.node_logits"].flatten(0, -2)
            probs = target_probs(logits, SamplingSettings(temperature=row["temperature"]))
            path = walk(draft, tree_chances(draft, probs), row["uniforms"])
            assert [0, *(node + 1 for node in path)] == row["accepted_nodes"]
            assert len(path) == row["accept_length"]
            left = tree_residual(draft, probs, path[-1] + 1 if path else 0)
            torch.testing.assert_close(
                left, recorded[f"s{number}.sample_p"].flatten(), rtol=2e-5, atol=1e-7
            )
