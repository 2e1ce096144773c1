"""Blocks in pieces: the same loss, gradients and sums as all blocks at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.models import block_pieces
from draftsmith.models.block_anchors import BlockPlan, plan_blocks
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective

KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dflash": (DFlashMethod, {"block_size": 4}, "ce"),
    "sliding": (DFlashMethod, {"block_size": 4, "sliding_window": 6}, "kl"),
    "markov": (DSparkMethod, {"block_size": 4, "markov_rank": 6}, "ce_l1"),
    "rnn": (DSparkMethod, {"block_size": 4, "markov_rank": 6, "sequential_head": "rnn"}, "ce_l1"),
}


@pytest.fixture
def llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama")


def in_pieces_of(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_pieces.PIECE_SLOTS, "cpu", slots)


class Counting:
    """An objective that counts its calls."""

    def __init__(self, name: str) -> None:
        self.objective = make_objective(name)
        self.couples_predictions = getattr(self.objective, "couples_predictions", False)
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.objective(*arguments)


def results(draft: Any, target: TargetModel, batch: TrainBatch, objective: Any) -> list[Tensor]:
    """Loss, all sums by name, and the gradients of weights and features."""
    batch.aux_hidden_states = batch.aux_hidden_states.detach().requires_grad_()
    output = draft(batch, target_head=target.head(), objective=objective)
    inputs = [*draft.parameters(), batch.aux_hidden_states]
    gradients = torch.autograd.grad(output.loss_sum * 3.0, inputs)
    return [output.loss_sum.detach(), *(output.sums[n] for n in sorted(output.sums)), *gradients]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_pieces_add_up_to_the_whole(
    kind: str, training: bool, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, settings, name = KINDS[kind]
    draft = support.make_draft(method, llama, **settings).train(training)
    batch = support.make_batch(llama)
    found = []
    for slots, calls in ((10_000, 1), (40, 3), (1, 5)):
        in_pieces_of(slots, monkeypatch)
        objective = Counting(name)
        found.append(results(draft, llama, batch, objective))
        assert objective.calls == calls
    for whole, *cut in zip(*found, strict=True):
        for parts in cut:
            torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_without_gradients_the_sums_are_those_of_the_whole(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = support.make_draft(DSparkMethod, llama, block_size=4).eval()
    batch, objective = support.make_batch(llama), make_objective("ce_l1")
    found = []
    for slots in (10_000, 40):
        in_pieces_of(slots, monkeypatch)
        with torch.no_grad():
            found.append(draft(batch, target_head=llama.head(), objective=objective))
    torch.testing.assert_close(found[0].loss_sum, found[1].loss_sum)
    torch.testing.assert_close(found[0].sums, found[1].sums)


def test_an_objective_that_couples_predictions_gets_them_in_one_call(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = support.make_draft(DFlashMethod, llama, block_size=4)
    in_pieces_of(40, monkeypatch)
    objective = Counting("lk_lambda")
    results(draft, llama, support.make_batch(llama), objective)
    assert objective.calls == 1


def test_gradients_under_autocast_are_those_of_the_whole(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = support.make_draft(DFlashMethod, llama, block_size=4)
    batch = support.make_batch(llama)
    found = []
    for slots in (10_000, 40):
        in_pieces_of(slots, monkeypatch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = draft(batch, target_head=llama.head(), objective=make_objective("ce"))
        output.loss_sum.backward()
        found.append([parameter.grad for parameter in draft.parameters()])
        draft.zero_grad()
    for whole, parts in zip(*found, strict=True):
        assert parts is not None
        assert parts.dtype == torch.float32
        scale = float(whole.abs().max())
        torch.testing.assert_close(parts, whole, rtol=0.0, atol=0.03 * scale)


def test_a_piece_is_a_run_of_whole_groups(llama: Any) -> None:
    batch = support.make_batch(llama, (24, 24))
    anchors = torch.tensor([5, 6, 7, *range(24 + 5, 24 + 22)])
    plan = plan_blocks(batch, anchors, num_steps=3, cumulative=False)
    assert [group.blocks for group in plan.groups] == [
        slice(0, 3), slice(3, 11), slice(11, 19), slice(19, 20),
    ]  # fmt: skip
    pieces = plan.pieces(4 * 11, 4)
    assert [len(piece.anchors) for piece in pieces] == [11, 9]
    assert torch.equal(torch.cat([piece.anchors for piece in pieces]), anchors)
    for piece in pieces:
        check_groups(piece)
    # To the nearest whole group: 3 + 8 blocks, and half of the next group's or less.
    assert [len(piece.anchors) for piece in plan.pieces(4 * 14, 4)] == [11, 9]
    assert [len(piece.anchors) for piece in plan.pieces(4 * 15, 4)] == [19, 1]
    assert plan.pieces(4 * 20, 4) == [plan]
    assert [len(piece.anchors) for piece in plan.pieces(1, 4)] == [3, 8, 8, 1]


def check_groups(piece: BlockPlan) -> None:
    """Groups cover the piece's blocks, and name their ends and rows."""
    covered = [block for group in piece.groups for block in range(*group.blocks.indices(99))]
    assert covered == list(range(len(piece.anchors)))
    for group in piece.groups:
        positions = piece.positions[group.blocks].tolist()
        assert (group.first_anchor, group.last_anchor) == (positions[0], positions[-1])
        starts = piece.row_starts()[group.blocks].tolist()
        assert starts == [group.row_start] * len(positions)
        flat = piece.anchors[group.blocks]
        assert torch.equal(piece.context[group.row_start] + piece.positions[group.blocks], flat)


@pytest.mark.parametrize(("padding", "read"), [(0, 24), (1, 21)])
def test_what_padding_holds_is_never_read(llama: Any, padding: int, read: int) -> None:
    """Nearly all positions are context, so features are gathered only where something pads."""
    draft = support.make_draft(DFlashMethod, llama, block_size=4)
    batch = support.make_batch(llama, (24,))
    batch.supervised_mask = torch.ones_like(batch.supervised_mask)
    batch.aux_hidden_states = batch.aux_hidden_states.clone()
    if padding:
        batch.keep_mask[:, -padding:] = False
        batch.aux_hidden_states[:, -padding:] = float("nan")
    places: list[int] = []
    draft.fc.register_forward_pre_hook(lambda _, inputs: places.append(len(inputs[0])))
    draft.choose_anchors = lambda _batch: torch.arange(4, 23 - padding)
    loss = draft(batch, target_head=llama.head(), objective=make_objective("ce")).loss_sum
    gradients = torch.autograd.grad(loss, [draft.fc.weight, draft.layers[0].mlp.gate_proj.weight])
    assert all(bool(one.isfinite().all()) for one in gradients)
    assert places == [read]
