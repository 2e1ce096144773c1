"""flex_attention for blocks: which entries a slot sees, and its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.block_anchors import BlockPlan, plan_blocks
from draftsmith.models.block_attention import block_attention
from draftsmith.models.block_flex import block_mask, seen_by_blocks
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.ttt_flex import BLOCK

SEQ, SLOTS = 20, 3


def make_plan() -> BlockPlan:
    """An anchor without context, a row without blocks, more blocks than one group holds."""
    ids = torch.zeros(3, SEQ, dtype=torch.long)
    whole = torch.ones_like(ids, dtype=torch.bool)
    batch = TrainBatch(ids, whole, whole, ids, ids[..., None].float(), ids[..., None].float())
    anchors = torch.tensor([0, 4, 5, 17, *range(40, 52)])
    return plan_blocks(batch, anchors, num_steps=SLOTS, cumulative=False)


def defined(plan: BlockPlan, window: int | None) -> Tensor:
    """[slots of all blocks, entries] bool, entry by entry."""
    context, blocks = len(plan.context), len(plan.anchors)
    found = torch.zeros(blocks * SLOTS, context + blocks * SLOTS, dtype=torch.bool)
    for block, flat in enumerate(plan.anchors.tolist()):
        for slot in range(SLOTS):
            own = flat + slot
            row = found[block * SLOTS + slot]
            for index, place in enumerate(plan.context.tolist()):
                near = window is None or place > own - window
                row[index] = place // SEQ == flat // SEQ and place < flat and near
            for other in range(SLOTS):
                near = window is None or slot - window < other <= slot
                row[context + block * SLOTS + other] = near
    return found


@pytest.mark.parametrize("window", [None, 2, 9])
def test_the_mask_is_the_definition(window: int | None) -> None:
    plan = make_plan()
    wanted = defined(plan, window)
    slot, entry = (torch.arange(count) for count in wanted.shape)
    found = seen_by_blocks(plan, SLOTS, window)(slot[:, None], entry)
    assert torch.equal(found, wanted)
    # A piece's blocks see the same entries of the whole context.
    first, second = plan.pieces(SLOTS * 12, SLOTS)
    cut = len(first.anchors) * SLOTS
    context = len(plan.context)
    for piece, rows in ((first, slice(0, cut)), (second, slice(cut, None))):
        count = len(piece.anchors) * SLOTS
        part = seen_by_blocks(piece, SLOTS, window)(
            torch.arange(count)[:, None], torch.arange(context + count)
        )
        assert torch.equal(part[:, :context], wanted[rows, :context])
        assert torch.equal(part[:, context:], wanted[rows, context:][:, rows])


def test_every_entry_that_is_seen_lies_in_a_tile_that_is_computed() -> None:
    plan = make_plan()
    tiles = block_mask(plan, SLOTS, None).to_dense()[0, 0]  # [query tiles, entry tiles]
    wanted = defined(plan, None)
    spread = tiles.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1).bool()
    assert bool(spread[: wanted.shape[0], : wanted.shape[1]][wanted].all())


def parts_of(plan: BlockPlan, head_dim: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    blocks, context = len(plan.anchors), len(plan.context)
    shapes = [(blocks, SLOTS, 4), (blocks, SLOTS, 2), (blocks, SLOTS, 2), (context, 2)]
    return [
        torch.randn(*shape, head_dim, generator=generator)
        .to(device, dtype)
        .requires_grad_(device != "cpu")
        for shape in (*shapes, shapes[-1])
    ]


@pytest.mark.parametrize("window", [None, 2])
def test_its_forward_on_a_cpu_equals_the_other_paths(window: int | None) -> None:
    plan = make_plan()
    parts = parts_of(plan, 16, "cpu", torch.float32)
    found = {
        path: block_attention(*parts, plan=plan, window=window, path=path)
        for path in ("dense", "grouped", "flex")
    }
    torch.testing.assert_close(found["flex"], found["dense"])
    torch.testing.assert_close(found["grouped"], found["dense"])
    assert len(plan.masks) == 2, "made once for all layers by each of the last two"


def test_an_unknown_path_is_refused() -> None:
    plan = make_plan()
    parts = parts_of(plan, 16, "cpu", torch.float32)
    with pytest.raises(ValueError, match="expected one of dense, grouped, flex"):
        block_attention(*parts, plan=plan, path="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("head_dim", [64, 320])
def test_values_and_gradients_on_a_gpu_equal_the_dense_ones(
    window: int | None, head_dim: int
) -> None:
    plan = make_plan()
    for name in ("anchors", "positions", "context"):
        setattr(plan, name, getattr(plan, name).cuda())
    results: dict[str, list[Any]] = {}
    for path in ("dense", "flex"):
        parts = parts_of(plan, head_dim, "cuda", torch.float32)
        found = block_attention(*parts, plan=plan, window=window, path=path)
        weights = torch.linspace(-1, 1, found.numel(), device="cuda").view(found.shape)
        results[path] = [found, *torch.autograd.grad((found * weights).sum(), parts)]
    for one, other in zip(results["flex"], results["dense"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
