"""EAGLE-2's dynamic trees and whole decoding runs, against what SafeAILab/EAGLE recorded.

Sets eagle2-tree (an EAGLE-1 draft) and eagle3-tree of main, cb7e084; see golden/README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import DraftRequest, DynamicTreePolicy
from draftsmith.models.chain_draft import ChainDraft
from draftsmith.models.eagle import EagleConfig, EagleDraft
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings
from draftsmith.models.target import Fingerprint, TargetModel

pytestmark = pytest.mark.golden
SETS = ["eagle2-tree", "eagle3-tree"]
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)


class RecordingPolicy(DynamicTreePolicy):
    """Notes the root and the tree of every round."""

    drafted: list[tuple[int, Draft]]

    def draft(self, model: Any, requests: Any) -> list[Draft]:
        found = super().draft(model, requests)
        self.drafted.append((int(requests[0].context.token_ids[0, -1]), found[0]))
        return found


@pytest.fixture(scope="module")
def target(golden_folder: Path) -> TargetModel:
    """The 8-layer Llama of all eagle sets; its tokenizer has one word per token."""
    folder = golden_folder / "eagle" / "target"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = {f"w{token}": token for token in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    )
    fingerprint = Fingerprint(weights="golden", tokenizer="golden", chat_template="golden")
    return TargetModel(model, tokenizer, name_or_path=str(folder), fingerprint=fingerprint)


def load_case(
    golden_folder: Path, name: str, target: TargetModel
) -> tuple[ChainDraft, dict[str, Any]]:
    """The draft model of a set, and its golden.json."""
    folder = golden_folder / "eagle" / name
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    settings: dict[str, Any] = {key: config[key] for key in SIZES if key in config}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    draft: ChainDraft
    if name == "eagle2-tree":
        weights.pop("embed_tokens.weight")  # The target's.
        draft = EagleDraft(EagleConfig(**settings))
    else:
        weights = {name.replace("midlayer.", "layers.0."): one for name, one in weights.items()}
        draft = Eagle3Draft(Eagle3Config(**settings, aux_layer_ids=[1, 3, 4]))
    draft.load_state_dict(weights, strict=True)
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    return draft.eval(), json.loads((folder / "golden.json").read_text())


def context_of(ids: Tensor, features: Tensor) -> DraftContext:
    """EAGLE-1 reads final states, EAGLE-3 several layers: both find theirs."""
    return DraftContext(ids, features, features)


def tree_mask(draft: Draft) -> Tensor:
    """[nodes + 1, nodes + 1] bool with the root first, as EAGLE records it."""
    mask = torch.eye(len(draft.tokens) + 1, dtype=torch.bool)
    mask[:, 0] = True
    for node, parent in enumerate(draft.parent_list, start=1):
        mask[node] |= mask[parent + 1]
    return mask


def leaf_paths(draft: Draft) -> set[tuple[int, ...]]:
    """Every root-to-leaf path, the root being 0."""
    parents = draft.parent_list
    paths: list[tuple[int, ...]] = [(0,)]
    for node, parent in enumerate(parents, start=1):
        paths.append((*paths[parent + 1], node))
    return {path for node, path in enumerate(paths) if node - 1 not in parents}


def compare(draft: Draft, root: int, given: dict[str, Tensor], prefix: str) -> None:
    expected = given[f"{prefix}draft_tokens"].flatten()
    assert [root, *draft.tokens.tolist()] == expected.tolist()
    assert torch.equal(tree_mask(draft), given[f"{prefix}tree_mask"].bool())
    assert [0, *draft.depths] == given[f"{prefix}tree_position_ids"].tolist()
    recorded = {
        tuple(node for node in row if node >= 0)
        for row in given[f"{prefix}retrieve_indices"].tolist()
    }
    assert leaf_paths(draft) == recorded


@pytest.mark.parametrize("name", SETS)
def test_trees_equal_eagles(golden_folder: Path, name: str, target: TargetModel) -> None:
    """Tokens, mask, positions, paths and scores for 3 contexts x 8 settings."""
    model, _ = load_case(golden_folder, name, target)
    given = load_file(golden_folder / "eagle" / name / "trees.safetensors")
    prefixes = sorted({key.rsplit(".", 1)[0] for key in given if ".t" in key})
    assert len(prefixes) == 24
    for prefix in prefixes:
        context, setting = prefix.split(".")
        tokens, depth, top_k = (int(part[1:]) for part in setting.split("_"))
        ids, features = given[f"{context}.input_ids"], given[f"{context}.features"]
        state = model.start(64)
        request = DraftRequest(
            context_of(ids, features), state, 99, SamplingSettings(), None, target.vocab_size
        )
        (draft,) = DynamicTreePolicy(tokens, depth, top_k).draft(model, [request])
        compare(draft, int(ids[0, -1]), given, f"{prefix}.")
        scores = []
        assert draft.token_probs is not None
        for node, parent in enumerate(draft.parent_list):
            above = 0.0 if parent < 0 else scores[parent]
            scores.append(above + float(draft.token_probs[node].log()))
        found = torch.tensor([0.0, *scores])
        assert (found - given[f"{prefix}.cumulative_logprob"]).abs().max() < 1e-4


@pytest.mark.parametrize("name", SETS)
def test_decoding_runs_equal_eagles_round_by_round(
    golden_folder: Path, name: str, target: TargetModel
) -> None:
    """Drafted trees, accepted paths and text of four greedy runs, caches and all."""
    model, case = load_case(golden_folder, name, target)
    given = load_file(golden_folder / "eagle" / name / "decode.safetensors")
    for number, run in enumerate(case["decode"]["cases"]):
        prompt = given[f"case{number}.prompt"][0].tolist()
        policy = DynamicTreePolicy(run["total_tokens"], run["depth"], run["top_k"])
        recording = RecordingPolicy(policy.total_tokens, policy.depth, policy.top_k)
        object.__setattr__(recording, "drafted", [])
        # Room to spare: near its end a text allows less depth, and EAGLE's runs do not stop there.
        room = run["new_token"] + policy.max_depth + 2
        answer = Engine(target, model, recording).run([Request(prompt, room)])[0]
        expected = given[f"case{number}.output_ids"][0].tolist()[len(prompt) :]
        assert answer.token_ids[: len(expected)] == expected
        assert len(run["rounds"]) >= 6
        for index, recorded in enumerate(run["rounds"]):
            root, draft = recording.drafted[index]
            assert root == recorded["root"]
            compare(draft, root, given, f"case{number}.round{index}.")
            assert answer.rounds[index].accepted == recorded["accept_length"]
