"""Folders that the published programs wrote, read by the importer: the recorded logits come out.

Sets of SafeAILab/EAGLE, DeepSpec and speculators (see DRAFTSMITH_GOLDEN). Every logit is made by
the draft's own `read` and `extend`, as the decoder calls them. Written again in the same format,
the folders have the same tensors and the same values under every key they had.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))

from format_support import target_facts

from draftsmith.models.chain_draft import ChainDraft
from draftsmith.models.formats import ForeignDraft, new_draft, read_foreign, to_format
from draftsmith.models.protocols import DraftContext, Frontier
from draftsmith.models.target import TargetHead

pytestmark = pytest.mark.golden

RELATIVE = 1e-5
"""Of the largest recorded value, float32 (golden/README.md)."""


def imported(folder: Path, *, head: TargetHead | None = None, **options: Any) -> ChainDraft:
    """The folder's draft, attached to its own embeddings or to the target's head."""
    found = read_foreign(folder, **options)
    draft = new_draft(found.config).float().eval()
    draft.load_state_dict(found.tensors, strict=True)
    embed_tokens = head.embed_tokens if head is not None else embeddings_of(found)
    draft.attach_target(embed_tokens=embed_tokens, head=head)
    return draft


def embeddings_of(found: ForeignDraft) -> nn.Module:
    """The embeddings in the folder."""
    assert found.embed_tokens is not None, "this set carries its embeddings"
    return nn.Embedding.from_pretrained(found.embed_tokens)


@torch.no_grad()
def chain_logits(
    draft: ChainDraft, tokens: Tensor, states: Tensor, final: Tensor, steps: int
) -> list[list[Tensor]]:
    """Logits [step][pair] of chains that read the true tokens, below every pair of one text.

    Args:
        draft: Attached to its target.
        tokens: [pairs + 1]; pair t is (states of position t, token t + 1).
        states: [pairs, features] of the target's layers.
        final: [pairs, hidden] final hidden states.
        steps: Logits per pair; the text's end cuts them short.
    """
    logits: list[list[Tensor]] = [[] for _ in range(steps)]
    state, pairs = draft.start(len(tokens)), len(tokens) - 1
    for pair in range(pairs):
        one = slice(pair, pair + 1)
        context = DraftContext(tokens[None, : pair + 2], states[None, one], final[None, one])
        logits[0].append(draft.read([context], [state])[0])
        for step in range(1, min(steps, pairs - pair)):
            read = tokens[pair + 1 + step : pair + 2 + step]
            frontier = Frontier(read, torch.tensor([step - 1]), is_chain=True)
            logits[step].append(draft.extend([state], [frontier])[0])
    return logits


def assert_logits(found: Sequence[Sequence[Tensor]], recorded: Sequence[Tensor]) -> int:
    """Compares [step][pair] with recorded [pairs, draft_vocab] per step; returns how many."""
    for step, (rows, expected) in enumerate(zip(found, recorded, strict=True)):
        error = (torch.stack(list(rows)) - expected[: len(rows)]).abs().max()
        relative = float(error / expected.abs().max())
        assert relative < RELATIVE, f"step {step}: relative error {relative:.2e}"
    return sum(len(rows) for rows in found)


@pytest.mark.parametrize("name", ["eagle1-bias", "eagle1-nobias"])
def test_eagle1_of_safeailab_gives_its_recorded_logits(name: str, golden_folder: Path) -> None:
    folder = golden_folder / "eagle" / name
    head = TargetHead.load(str(golden_folder / "eagle" / "target"), dtype="float32")
    draft = imported(folder, head=head)
    assert draft.config.fc_bias == (name == "eagle1-bias")
    given = load_file(folder / "golden.safetensors")
    seen: list[Tensor] = []
    count = 0
    for row, length in enumerate(given["in.attention_mask"].sum(-1).tolist()):
        tokens = given["in.input_ids"][row, :length]
        final = given["in.hidden_states"][row, : length - 1]
        logits = chain_logits(draft, tokens, final[:, :0], final, 1)
        count += assert_logits(logits, [given["out.logits"][row]])
        seen += logits[0]
    assert count == int(given["in.attention_mask"].sum()) - len(given["in.attention_mask"])
    assert len({int(row.argmax()) for row in seen}) > 5, "the logits say something"


def test_eagle3_of_safeailab_gives_its_recorded_logits(golden_folder: Path) -> None:
    folder = golden_folder / "eagle" / "eagle3-forward"
    after = json.loads((folder / "golden.json").read_text())["aux_states_after_layers"]
    given = load_file(folder / "golden.safetensors")
    with pytest.raises(ValueError, match=r"aux_layer_ids=\[1,3,4\]"):
        read_foreign(folder, target=golden_target(golden_folder))
    draft = imported(
        folder,
        head=TargetHead.load(str(golden_folder / "eagle" / "target"), dtype="float32"),
        aux_layer_ids=[count - 1 for count in after],
    )
    for row, tokens in enumerate(given["in.input_ids"]):
        states = given["in.aux_hidden_states"][row]
        logits = chain_logits(draft, tokens, states, states[:, :0], 1)
        assert assert_logits(logits, [given["out.logits"][row]]) == len(states)
        # A greedy chain below the last pair: draft ids, and target ids by the map.
        whole = DraftContext(tokens[None], states[None], states[None, :, :0])
        state = draft.start(len(tokens) + 4)
        logits_now = draft.read([whole], [state])
        assert draft.draft_to_target is not None
        for step, chosen in enumerate(given["chain.draft_ids"][row]):
            found = logits_now.argmax(-1)
            assert int(found) == int(chosen)
            target_id = draft.draft_to_target[found]
            assert int(target_id) == int(given["chain.target_ids"][row, step])
            frontier = Frontier(target_id, torch.tensor([step]), is_chain=True)
            logits_now = draft.extend([state], [frontier])


def golden_target(golden_folder: Path) -> Any:
    """Facts about the target of the EAGLE sets."""
    config = json.loads((golden_folder / "eagle" / "target" / "config.json").read_text())
    return target_facts(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        embeddings=None,
    )


def test_deepspec_with_five_layers_gives_its_recorded_logits(golden_folder: Path) -> None:
    folder = golden_folder / "deepspec" / "eagle3-qwen3-5layers"
    draft = imported(folder)
    assert draft.aux_layer_ids == (1, 2, 3, 4, 6)
    assert draft.config.qk_norm
    assert draft.draft_to_target is None
    given = load_file(folder / "golden.safetensors")
    steps = json.loads((folder / "golden.json").read_text())["ttt_length"]
    count = 0
    for row, length in enumerate(given["attention_mask"].sum(-1).tolist()):
        tokens = given["input_ids"][row, :length]
        states = given["target_hidden_states"][row, : length - 1]
        recorded = [given[f"draft_logits_step{step}"][row] for step in range(steps)]
        logits = chain_logits(draft, tokens, states, states[:, :0], steps)
        count += assert_logits(logits, recorded)
    lengths = given["attention_mask"].sum(-1).tolist()
    assert count == sum(length - 1 - step for length in lengths for step in range(steps))


@pytest.mark.parametrize("name", ["eagle3", "eagle3-plain"])
def test_speculators_gives_its_recorded_logits(name: str, golden_folder: Path) -> None:
    folder = golden_folder / "speculators" / name
    draft = imported(folder)
    assert draft.aux_layer_ids == (0, 1, 2)
    switched = name == "eagle3"
    switches = ("norm_before_fc", "norm_before_residual", "norm_output")
    assert [getattr(draft.config, switch) for switch in switches] == [switched] * 3
    batch = load_file(folder / "batch.safetensors")
    trace = load_file(folder / "trace.safetensors")
    documents = batch["document_ids"][0]
    count = expected = 0
    for document in documents.unique().tolist():
        if document < 0:
            continue  # Padding.
        slots = (documents == document).nonzero().squeeze(-1)
        # Slot s holds the states of position t, token t + 1 and the position of the token.
        assert torch.equal(batch["position_ids"][0, slots], torch.arange(1, len(slots) + 1))
        tokens = torch.cat([torch.zeros(1, dtype=torch.long), batch["input_ids"][0, slots]])
        states = batch["hidden_states"][0, slots]
        recorded = [trace[f"head_logits_{step}"][0, slots] for step in range(len(trace))]
        logits = chain_logits(draft, tokens, states, states[:, :0], len(trace))
        count += assert_logits(logits, recorded)
        expected += sum(len(slots) - step for step in range(len(trace)))
    assert count == expected > 400


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("eagle/eagle1-bias", "eagle"),
        ("eagle/eagle3-forward", "eagle"),
        ("speculators/eagle3", "speculators"),
        ("speculators/eagle3-plain", "speculators"),
    ],
)
def test_written_again_the_folder_is_the_one_that_was_read(
    name: str, format: str, golden_folder: Path
) -> None:
    folder = golden_folder / name
    ids = [1, 3, 4] if name == "eagle/eagle3-forward" else None
    found = read_foreign(folder, aux_layer_ids=ids)
    target = target_facts(
        hidden_size=found.config.hidden_size,
        vocab_size=found.config.vocab_size,
        max_positions=None,
        embeddings=found.embed_tokens,
    )
    foreign = to_format(found.config, found.tensors, format=format, target=target)
    stored = load_file(folder / "model.safetensors")
    assert foreign.tensors.keys() == stored.keys()
    assert all(torch.equal(foreign.tensors[key], stored[key]) for key in stored)
    config = json.loads((folder / "config.json").read_text())
    # Not facts about the draft: versions, the name of the target, a link to code.
    for key in ("transformers_version", "speculators_version", "auto_map", "speculators_config"):
        config.pop(key, None)
    if "target_hidden_size" in config:  # null there: the draft's own.
        config["target_hidden_size"] = found.config.hidden_size
    assert_holds(foreign.config, config)


def assert_holds(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every key of `expected` is in `found` with its value."""
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_holds(found[key], value)
        else:
            assert found[key] == value, key
