"""The matrix products that a training step consists of, from the equations of each method.

bench/train_step.py times them beside the step. What is counted:

    all methods   every projection, the MLPs, the target's head once per place that teaches, the
                  draft's head per prediction, forward and backward (no gradient towards features,
                  none towards a frozen head)
    chains        (EAGLE) scores and values of the causal block and of the own entries, per step
    blocks        (DFlash, DSpark) q, k, v, o and the MLP of all slots; k and v of the context up to
                  the last anchor of each row; scores and values of each slot with the context
                  before its anchor and with its own block; DSpark's W2 and confidence head

`plain` attention multiplies every query with every key of its row, as a plain implementation does;
the other one only those that are needed.

Axes of the products: rows, inputs, outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.block_anchors import BlockPlan
from draftsmith.models.ttt_slots import SlotPlan

AUX_LAYERS = (0, 1, 3)
FORWARD, BOTH_WAYS = ("output",), ("output", "input", "weight")
FROZEN = ("output", "input")
CAUSAL_PIECE = 128
"""Queries of a chain that are counted with the keys up to the last one's."""


@dataclass(frozen=True)
class Case:
    """What is trained on what: a narrow draft over a small vocabulary."""

    name: str
    method: str = "eagle3"
    threads: int = 1
    dtype: str = "float32"
    """bfloat16: under autocast."""
    supervised: float = 1.0
    """Share of each row's tokens, at its end, that is supervised."""
    steps: int = 7
    vocab: int = 8000
    draft_vocab: int = 8000
    checkpoint_steps: bool = False
    layers: int = 1
    anchors: int = 0
    """Blocks of the whole batch."""
    block: int = 0
    """Slots of a block."""
    rank: int = 64
    """Of DSpark's sequential head."""
    memory_only: bool = False
    batch: int = 2
    seq: int = 512
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512

    @property
    def is_block(self) -> bool:
        """Whether blocks are trained, not chains."""
        return self.method in ("dflash", "dspark")


@dataclass(frozen=True)
class Product:
    """[rows, inputs] x [inputs, outputs] and the products of its gradients, in a batch of such."""

    rows: int
    inputs: int
    outputs: int
    sides: tuple[str, ...] = BOTH_WAYS
    """What is computed: the output, the gradients towards the input and towards the weight."""
    batch: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inputs * self.outputs * len(self.sides)


def chain_products(case: Case, plan: SlotPlan) -> list[Product]:
    """All projections, MLPs and heads of a step, from the equations of the method."""
    size, width, kv_width = case.hidden, case.heads * case.head_dim, case.kv_heads * case.head_dim
    pairs, active, rows = len(plan.pairs), len(plan.active), len(plan.places)
    reads = 2 * size if case.method == "eagle3" else size
    products = [Product(rows, size, case.vocab, FORWARD)]  # The target's head teaches.
    if case.method == "eagle3":  # No gradient towards the features.
        products.append(Product(pairs, len(AUX_LAYERS) * size, size, ("output", "weight")))
    head_sides = BOTH_WAYS if case.method == "eagle3" else ("output", "input")  # Frozen in EAGLE-1.
    for step in range(case.steps):
        entered = active if step else pairs
        if case.method == "eagle1":
            sides = BOTH_WAYS if step else ("output", "weight")
            products.append(Product(entered, 2 * size, size, sides))
        products += [
            Product(active, reads, width),
            *[Product(entered, reads, kv_width)] * 2,
            Product(active, width, size),
            *[Product(active, size, case.intermediate)] * 2,
            Product(active, case.intermediate, size),
            Product(rows, size, case.draft_vocab, head_sides),
        ]
    return products


def chain_attention(case: Case, plan: SlotPlan, *, piece: int | None) -> list[Product]:
    """Scores and values of the block of step 0 and of the own entries, for all steps.

    Args:
        case: Gives the sizes.
        plan: Gives the slots.
        piece: Queries at a time, each piece with the keys up to its end only: what causality
            leaves to do. None: every query with every key of its row.
    """
    queries = -(-len(plan.active) // case.batch)  # Per row, at its end.
    first = case.seq - queries
    piece = piece or queries
    batch = case.batch * case.heads
    products = []
    for start in range(first, case.seq, piece):
        stop = min(start + piece, case.seq)
        products.append(Product(stop - start, case.head_dim, stop, batch=batch))  # Scores.
        products.append(Product(stop - start, stop, case.head_dim, batch=batch))  # Values.
    products = products * case.steps
    own = len(plan.active) * case.kv_heads
    for step in range(1, case.steps):
        groups = case.heads // case.kv_heads
        products.append(Product(groups, case.head_dim, step, batch=own))
        products.append(Product(groups, step, case.head_dim, batch=own))
    return products


def block_products(case: Case, plan: BlockPlan) -> list[Product]:
    """All projections, MLPs and heads of a step on blocks, from the equations of the method."""
    size, width, kv_width = case.hidden, case.heads * case.head_dim, case.kv_heads * case.head_dim
    slots, context = len(plan.anchors) * case.block, len(plan.context)
    rows = int(plan.supervised.sum())
    taught = len(plan.places[plan.supervised].unique())
    layer = [
        Product(slots, size, width),
        *[Product(slots, size, kv_width)] * 2,
        *[Product(context, size, kv_width)] * 2,
        Product(slots, width, size),
        *[Product(slots, size, case.intermediate)] * 2,
        Product(slots, case.intermediate, size),
    ]
    products = [
        Product(taught, size, case.vocab, FORWARD),  # The target's head teaches.
        Product(context, len(AUX_LAYERS) * size, size, ("output", "weight")),
        *layer * case.layers,
        Product(rows, size, case.vocab, FROZEN),
    ]
    if case.method == "dspark":
        products += [Product(rows, case.rank, case.vocab), Product(rows, size + case.rank, 1)]
    return products


def block_attention_products(case: Case, plan: BlockPlan, *, plain: bool) -> list[Product]:
    """Scores and values of all layers: the context before each anchor, and the own block.

    Args:
        case: Gives the sizes.
        plan: Gives the blocks.
        plain: Every slot with the whole row and the slots of all its blocks.
    """
    rows = case.block * case.heads // case.kv_heads  # A key head's queries, of one block.
    anchors = plan.positions.tolist()
    products = []
    if plain:
        per_row = case.block * len(anchors) // case.batch
        for count in (case.seq, per_row):
            batch = case.batch * case.heads
            products.append(Product(per_row, case.head_dim, count, batch=batch))
            products.append(Product(per_row, count, case.head_dim, batch=batch))
        return products * case.layers
    for anchor in anchors:
        if anchor:
            products.append(Product(rows, case.head_dim, anchor, batch=case.kv_heads))
            products.append(Product(rows, anchor, case.head_dim, batch=case.kv_heads))
    own = len(anchors) * case.kv_heads
    products.append(Product(rows, case.head_dim, case.block, batch=own))
    products.append(Product(rows, case.block, case.head_dim, batch=own))
    return products * case.layers


def products_of(case: Case, plan: Any) -> dict[str, list[Product]]:
    """`linear`, and the attention `plain` and `needed`, by method."""
    if case.is_block:
        return {
            "linear": block_products(case, plan),
            "plain": block_attention_products(case, plan, plain=True),
            "needed": block_attention_products(case, plan, plain=False),
        }
    return {
        "linear": chain_products(case, plan),
        "plain": chain_attention(case, plan, piece=None),
        "needed": chain_attention(case, plan, piece=CAUSAL_PIECE),
    }


class Floor:
    """Runs products in buffers of their shapes."""

    def __init__(self, products: list[Product], dtype: str) -> None:
        self.products = products
        self.dtype = getattr(torch, dtype)
        self.buffers: dict[tuple[Any, ...], Tensor] = {}

    def run(self) -> None:
        for product in self.products:
            batch = (product.batch,) if product.batch > 1 else ()
            multiply = torch.bmm if batch else torch.mm
            shapes = {
                "input": (*batch, product.rows, product.inputs),
                "weight": (*batch, product.outputs, product.inputs),
                "output": (*batch, product.rows, product.outputs),
            }
            x, w, y = (self._buffer("in", shape) for shape in shapes.values())
            factors = {"output": (x, w.mT), "input": (y, w), "weight": (y.mT, x)}
            for side in product.sides:
                multiply(*factors[side], out=self._buffer("out", shapes[side]))

    def _buffer(self, use: str, shape: tuple[int, ...]) -> Tensor:
        if (use, shape) not in self.buffers:
            self.buffers[use, shape] = torch.randn(shape).to(self.dtype)
        return self.buffers[use, shape]
