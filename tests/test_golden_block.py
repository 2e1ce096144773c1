"""Block drafts that published programs wrote, read by the importer.

speculators' DFlash and DSpark, both with a reduced vocabulary: logits, losses and confidences come
out. z-lab's DFlash and DeepSpec's DSpark go through the importer in tests/test_golden_dflash.py.
Written again in the same format, the folders have the same tensors and the same values under every
key they had.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.models.foreign_files import read_tensors
from draftsmith.models.format_keys import TargetFacts
from draftsmith.models.formats import ForeignDraft, new_draft, read_foreign, to_format
from draftsmith.models.import_checkpoint import check_embeddings
from draftsmith.models.protocols import DraftContext, SamplingSettings
from draftsmith.models.target import TargetHead

pytestmark = pytest.mark.golden
RELATIVE = 1e-5
DECAY = 4.0
"""Of speculators' position weights."""


def facts_of(folder: Path, found: ForeignDraft | None = None) -> TargetFacts:
    """Facts about a recorded target, with what a checkpoint holds of it."""
    config = json.loads((folder / "config.json").read_text())
    return TargetFacts(
        name_or_path=folder.name,
        source=folder.name,
        architectures=config["architectures"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=None,
        embeddings=None if found is None else found.embed_tokens,
        head=None if found is None or found.target_head is None else found.target_head.weight,
    )


@dataclass
class Block:
    """What our draft makes of one recorded anchor."""

    hidden: Tensor
    """[slots, hidden] after the last norm."""
    tokens: Tensor
    """[slots] of the text, from the anchor on."""
    counted: Tensor
    """[slots] bool, which predictions teach."""
    teacher: Tensor
    """[slots, rows] the target's logits."""


class Recorded:
    """A checkpoint of speculators, its batch, and our draft on it."""

    def __init__(self, golden: Path, name: str) -> None:
        folder, target = golden / "speculators" / name, golden / "speculators" / "target-qwen3"
        self.found = read_foreign(folder, target=facts_of(target))
        self.head = TargetHead.load(str(target), dtype="float32")
        check_embeddings(self.found, self.head, "target-qwen3")
        self.draft = new_draft(self.found.config).float().eval()
        self.draft.load_state_dict(self.found.tensors, strict=True)
        self.draft.attach_target(embed_tokens=self.head.embed_tokens, head=self.head)
        rows = self.found.target_head
        assert rows is not None
        assert rows.ids is not None, "this set has a reduced vocabulary"
        self.ids = rows.ids
        self.batch = {key: one[0] for key, one in load_file(folder / "batch.safetensors").items()}
        self.trace = load_file(folder / "trace.safetensors")
        self.result = json.loads((folder / "result.json").read_text())
        self.norm = load_file(target / "model.safetensors")["model.norm.weight"]

    @torch.no_grad()
    def block(self, anchor: int) -> Block:
        """The block at an anchor of the packed row, as the decoder would run it."""
        batch, config = self.batch, self.draft.config
        first = anchor - int(batch["position_ids"][anchor])
        states = batch["hidden_states"][None, first:anchor]
        found: list[Tensor] = []
        hook = self.draft.norm.register_forward_hook(lambda *call: found.append(call[2]))
        self.draft.propose(
            [DraftContext(batch["input_ids"][None, first : anchor + 1], states, states[..., :0])],
            [self.draft.start(256)],
            num_draft_tokens=[config.num_steps],
            sampling=[SamplingSettings()],
            generators=[None],
        )
        hook.remove()
        slots = torch.arange(config.block_size)
        place = anchor + slots
        counted = batch["loss_mask"][place].bool()
        if not config.sample_from_anchor:
            counted = counted & (slots > 0)
        taught = place if config.sample_from_anchor else place - 1
        last = batch["verifier_last_hidden_states"][taught]
        normed = last * (last.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.norm
        teacher = normed @ self.head.weight[self.ids].T
        return Block(found[0], batch["input_ids"][place], counted, teacher)

    def blocks(self) -> list[Block]:
        pairs = zip(self.trace["choice_a"].tolist(), self.trace["choice_b"].tolist(), strict=True)
        return [self.block(anchor) for anchor, valid in pairs if valid]

    def base_logits(self, block: Block) -> Tensor:
        """[slots, rows] of the reduced head, before any correction."""
        return block.hidden @ self.head.weight[self.ids].T


def mean_weighted(losses: Sequence[Tensor], blocks: Sequence[Block], first: int) -> float:
    """speculators' reduction: weighted by slot, divided by the plain count."""
    total = torch.zeros((), dtype=torch.float64)
    for loss, block in zip(losses, blocks, strict=True):
        weight = torch.exp(-(torch.arange(len(loss)) - first) / DECAY)
        total += (loss * weight * block.counted).double().sum()
    return float(total / sum(int(block.counted.sum()) for block in blocks))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_speculators_blocks_give_their_recorded_logits(name: str, golden_folder: Path) -> None:
    recorded = Recorded(golden_folder, name)
    assert recorded.draft.aux_layer_ids == (0, 1, 2)
    assert recorded.draft.config.sample_from_anchor == (name == "dspark")
    wanted = recorded.trace["head_logits_0"][0].unflatten(0, (16, 8))
    blocks = recorded.blocks()
    assert len(blocks) == int(recorded.trace["choice_b"].sum()) > 8
    assert bool(recorded.trace["choice_b"][: len(blocks)].all())
    for block, logits in zip(blocks, wanted, strict=False):
        found = recorded.base_logits(block)
        assert float((found - logits).abs().max() / logits.abs().max()) < RELATIVE


def test_speculators_dflash_gives_its_recorded_loss(golden_folder: Path) -> None:
    recorded = Recorded(golden_folder, "dflash")
    blocks = recorded.blocks()
    losses = [
        F.kl_div(
            recorded.base_logits(block).log_softmax(-1),
            block.teacher.log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        for block in blocks
    ]
    assert mean_weighted(losses, blocks, 1) == pytest.approx(recorded.result["loss"], rel=RELATIVE)


@torch.no_grad()
def test_speculators_dspark_gives_its_recorded_loss_through_both_heads(golden_folder: Path) -> None:
    recorded = Recorded(golden_folder, "dspark")
    draft, blocks = recorded.draft, recorded.blocks()
    losses = []
    for block in blocks:
        embedded = draft._embedded_before(block.tokens)
        read = draft.markov_head(block.hidden[None], embedded[None])[0]
        correction = (read @ draft.markov_head.markov_w2.weight.T)[:, recorded.ids]
        logits = recorded.base_logits(block) + correction
        p, q = block.teacher.softmax(-1), logits.softmax(-1)
        distance = 1 - torch.minimum(p, q).sum(-1)
        loss = 0.1 * F.cross_entropy(logits, p.argmax(-1), reduction="none") + 0.9 * distance
        confidence = draft._confidence_logits(block.hidden, embedded)
        losses.append(
            loss + F.binary_cross_entropy_with_logits(confidence, 1 - distance, reduction="none")
        )
    assert mean_weighted(losses, blocks, 0) == pytest.approx(recorded.result["loss"], rel=RELATIVE)
    outside = torch.ones(1000, dtype=torch.bool).index_fill(0, recorded.ids, False)
    assert not draft.markov_head.markov_w2.weight[outside].any(), "no correction is known there"


@pytest.mark.parametrize(
    ("name", "target", "format"),
    [
        ("transformers/dflash-llama", "transformers/dflash-llama/target", "vllm"),
        ("deepspec/dspark-vanilla", None, "deepspec"),
        ("deepspec/dspark-gated", None, "deepspec"),
        ("deepspec/dspark-rnn", None, "deepspec"),
        ("deepspec/dspark-none", None, "deepspec"),
    ],
)
def test_written_again_the_folder_is_the_one_that_was_read(
    name: str, target: str | None, format: str, golden_folder: Path
) -> None:
    folder = golden_folder / name
    found = read_foreign(folder)
    raw = json.loads((folder / "config.json").read_text())
    facts = TargetFacts("t", "t", [], raw["num_target_layers"], found.config.hidden_size,
                        found.config.vocab_size, None) if target is None else (
        facts_of(golden_folder / target))  # fmt: skip
    facts = TargetFacts(
        **(vars(facts) | {"embeddings": found.embed_tokens, "max_positions": None}),
    )
    if found.target_head is not None:
        facts = TargetFacts(**(vars(facts) | {"head": found.target_head.weight}))
    found.config.num_anchors = raw.get("num_anchors", found.config.num_anchors)
    foreign = to_format(found.config, found.tensors, format=format, target=facts)
    stored = read_tensors(folder)
    assert foreign.tensors.keys() == stored.keys()
    assert all(torch.equal(foreign.tensors[key], stored[key]) for key in stored)
    raw.pop("transformers_version", None)
    raw.pop("max_window_layers")  # Means nothing beside layer_types.
    assert_holds(foreign.config, raw)


def assert_holds(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every key of `expected` is in `found` with its value."""
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_holds(found[key], value)
        else:
            assert found[key] == value, key
