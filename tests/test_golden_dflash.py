"""DFlash and DSpark against the published implementations, in float32.

Sets of tests/golden (its README says how they were recorded): specforge/dflash_sdpa_g7 and
dspark_sdpa_g4_{vanilla,gated,rnn} (SpecForge a6b6b02: losses, all gradients), deepspec/dspark-*
(DeepSpec afdfa7c: logits, confidences, loss terms, greedy proposals), transformers/dflash-llama
(transformers 5.24.0 and z-lab: a block's states, whole greedy runs).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.dflash import DFlashConfig, DFlashDraft
from draftsmith.models.dspark import DSparkConfig, DSparkDraft
from draftsmith.models.formats import read_foreign
from draftsmith.models.protocols import DraftContext, Predictions, SamplingSettings, TrainBatch
from draftsmith.models.target import TargetHead, TargetModel
from draftsmith.models.target_source import Fingerprint
from draftsmith.models.target_structure import find_structure
from draftsmith.train.objectives import make_objective

pytestmark = pytest.mark.golden
TOLERANCE = 1e-5
SPECFORGE_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "aux_layer_ids": [0, 1, 3],
    "mask_token_id": 999,
}


class Recording:
    """An objective that keeps what it was given and what it found."""

    predictions: Predictions

    def __init__(self, **settings: Any) -> None:
        self.objective = make_objective(**settings)

    def __call__(self, predictions: Predictions, target_head: Any) -> Any:
        self.predictions = predictions
        self.output = self.objective(predictions, target_head)
        return self.output


def close(found: Tensor, wanted: Tensor) -> bool:
    scale = float(wanted.abs().max().clamp_min(1e-3))
    return float((found - wanted).detach().abs().max()) <= TOLERANCE * scale


def head_of(embeddings: Tensor, head: Tensor) -> TargetHead:
    """A target's head made of two recorded matrices."""
    config = LlamaConfig(
        vocab_size=len(head),
        hidden_size=head.shape[1],
        num_attention_heads=2,
        intermediate_size=8,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.embed_tokens.weight.copy_(embeddings)
    model.lm_head.weight.copy_(head)
    return TargetHead(model, find_structure(model))


def batch_of(ids: Tensor, mask: Tensor, aux: Tensor, final: Tensor) -> TrainBatch:
    return TrainBatch(
        input_ids=ids,
        supervised_mask=mask.bool(),
        keep_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        aux_hidden_states=aux,
        final_hidden_states=final,
    )


def flat_anchors(anchors: Tensor, keep: Tensor, seq: int) -> Callable[[TrainBatch], Tensor]:
    """The recorded anchors in place of drawn ones; the dropped blocks are not there at all."""
    flat = anchors + torch.arange(len(anchors))[:, None] * seq
    return lambda _batch: flat[keep.bool()]


def check_specforge(
    draft: Any, out: dict[str, Tensor], recorded: dict[str, Any], objective: Recording
) -> Any:
    """Loads the weights, runs the batch, and compares loss and all gradients."""
    weights = {name[2:]: tensor for name, tensor in out.items() if name.startswith("w.")}
    draft.load_state_dict(weights, strict=True)
    head = head_of(out["in.embed"], out["in.lm_head"])
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    ids = out["in.input_ids"]
    batch = batch_of(ids, out["in.loss_mask"], out["in.aux_hidden"], out["in.last_hidden"])
    draft.choose_anchors = flat_anchors(out["in.anchors"], out["in.keep"], ids.shape[1])
    draft.train()
    divisor = draft.normaliser(batch)
    result = draft(batch, target_head=head, objective=objective)
    loss = result.loss_sum / divisor
    assert float(loss.detach()) == pytest.approx(recorded["loss"], rel=TOLERANCE)
    loss.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert close(parameter.grad, out[f"g.{name}"]), name
    return result


def test_dflash_losses_and_gradients_equal_specforges(golden_folder: Path) -> None:
    path = golden_folder / "specforge" / "dflash_sdpa_g7"
    out, recorded = load_file(f"{path}.safetensors"), json.loads(Path(f"{path}.json").read_text())
    draft = DFlashDraft(DFlashConfig(**SPECFORGE_SIZES, block_size=8, decay=7.0))
    result = check_specforge(draft, out, recorded, Recording(name="ce"))
    assert float(result.sums["supervised"].sum()) == recorded["metrics"]["accuracy_denom"]


def dflash_of(folder: Path) -> DFlashDraft:
    """A draft as z-lab publishes it, through the importer."""
    found = read_foreign(folder)
    draft = DFlashDraft(found.config)
    draft.load_state_dict(found.tensors, strict=True)
    return draft.eval()


def test_a_dflash_block_equals_transformers_and_zlabs(
    golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = golden_folder / "transformers" / "dflash-llama"
    out = load_file(folder / "golden.safetensors")
    draft = dflash_of(folder)
    head = head_of(out["in.embed_tokens.weight"], out["in.lm_head.weight"])
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    found: list[Tensor] = []
    monkeypatch.setattr(draft.norm, "forward", keeping(draft.norm.forward, found))
    aux = out["in.context_hidden_states"]
    context = DraftContext(out["in.input_ids"], aux, aux[..., :0])
    (block,) = draft.propose(
        [context],
        [draft.start(64)],
        num_draft_tokens=[5],
        sampling=[SamplingSettings()],
        generators=[None],
    )
    assert close(found[0], out["out.hidden"][0])
    assert close(head(found[0][1:]), out["out.logits"][0])
    assert torch.equal(block.tokens, out["out.logits"][0].argmax(-1))


def keeping(function: Callable[..., Tensor], found: list[Tensor]) -> Callable[..., Tensor]:
    def call(*arguments: Any) -> Tensor:
        found.append(function(*arguments))
        return found[-1]

    return call


@pytest.mark.parametrize("case", range(4))
def test_greedy_dflash_runs_equal_transformers_round_by_round(
    golden_folder: Path, case: int
) -> None:
    folder = golden_folder / "transformers" / "dflash-llama"
    out = load_file(folder / "golden.safetensors")
    recorded = json.loads((folder / "golden.json").read_text())["decode"]["cases"][case]
    target = target_of(folder / "target")
    draft = dflash_of(folder)
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    proposals: list[Any] = []
    propose = draft.propose
    draft.propose = lambda *a, **k: proposals.append(propose(*a, **k)) or proposals[-1]  # type: ignore[method-assign, func-returns-value]
    prompt = out[f"case{case}.prompt"][0].tolist()
    request = Request(prompt, max_new_tokens=recorded["max_new_tokens"])
    (made,) = Engine(target, draft, ChainPolicy(5)).run([request])
    assert prompt + made.token_ids == out[f"case{case}.output_ids"][0].tolist()
    assert [one.accepted for one in made.rounds] == recorded["n_matches"]
    assert [one.emitted for one in made.rounds] == [
        len(one["new_tokens"]) for one in recorded["rounds"]
    ]
    found = [block.tokens.tolist() for blocks in proposals for block in blocks]
    assert len(found) >= len(made.rounds) - 1
    for tokens, wanted in zip(found, recorded["rounds"], strict=False):
        # Near the end of the text ours are as many as can still be used.
        assert tokens
        assert tokens == wanted["drafted"][: len(tokens)]


def target_of(folder: Path) -> TargetModel:
    """The recorded target; its tokenizer has one word per token."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = {f"w{token}": token for token in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    )
    fingerprint = Fingerprint(weights="golden", tokenizer="golden", chat_template="golden")
    return TargetModel(model, tokenizer, name_or_path=str(folder), fingerprint=fingerprint)


# --- DSpark ---------------------------------------------------------------------------------------

HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
"""Published name -> ours."""


@pytest.mark.parametrize("kind", HEADS)
def test_dspark_losses_and_gradients_equal_specforges(golden_folder: Path, kind: str) -> None:
    path = golden_folder / "specforge" / f"dspark_sdpa_g4_{kind}"
    out, recorded = load_file(f"{path}.safetensors"), json.loads(Path(f"{path}.json").read_text())
    draft = DSparkDraft(
        DSparkConfig(**SPECFORGE_SIZES, block_size=7, markov_rank=16, sequential_head=HEADS[kind])
    )
    objective = Recording(name="ce_l1")
    result = check_specforge(draft, out, recorded, objective)
    metrics, sums = recorded["metrics"], result.sums
    counts = sums["supervised"]
    assert float(counts.sum()) == metrics["accuracy_denom"]
    weights = draft.step_weights.double()  # SpecForge reports the weighted mean.
    error = (weights * sums["confidence_error"]).sum() / (weights * counts).sum()
    assert float(error) == pytest.approx(metrics["confidence_abs_error"], rel=1e-5)
    length = 1 + sums["sampled_joint"].sum() / sums["chains"]
    assert float(length) == pytest.approx(metrics["tau_probabilistic"], rel=1e-5)
    weights = objective.predictions.weights
    distance = (weights * 2 * (1 - objective.output.acceptance)).sum() / weights.sum()
    assert float(distance) == pytest.approx(metrics["l1_loss"], rel=1e-5)


class DeepSpecCase:
    """A checkpoint that DeepSpec saved, the batch it was run on, and what came out."""

    def __init__(self, folder: Path) -> None:
        found = read_foreign(folder)
        assert found.source == "DSpark, DeepSpec"
        assert found.embed_tokens is not None
        assert found.target_head is not None
        self.out = load_file(folder / "golden.safetensors")
        self.recorded = json.loads((folder / "golden.json").read_text())
        self.head = head_of(found.embed_tokens, found.target_head.weight)
        self.has_confidence = found.config.confidence_head
        self.draft = DSparkDraft(found.config)
        self.draft.load_state_dict(found.tensors, strict=True)
        self.draft.attach_target(embed_tokens=self.head.embed_tokens, head=self.head)
        out = self.out
        self.batch = batch_of(
            out["input_ids"],
            out["loss_mask"],
            out["target_hidden_states"],
            out["target_last_hidden_states"],
        )
        self.draft.choose_anchors = flat_anchors(  # type: ignore[method-assign]
            out["anchor_positions"], out["block_keep_mask"], out["input_ids"].shape[1]
        )


@pytest.fixture(params=["none", "vanilla", "gated", "rnn"])
def deepspec(request: pytest.FixtureRequest, golden_folder: Path) -> DeepSpecCase:
    return DeepSpecCase(golden_folder / "deepspec" / f"dspark-{request.param}")


def test_dspark_logits_confidences_and_losses_equal_deepspecs(
    deepspec: DeepSpecCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, out, recorded = deepspec.draft, deepspec.out, deepspec.recorded
    confidences: list[Tensor] = []
    if deepspec.has_confidence:
        head = draft.confidence_head
        monkeypatch.setattr(head, "forward", keeping(head.forward, confidences))
    objective = Recording(name="ce_l1")
    divisor = draft.normaliser(deepspec.batch)
    result = draft(deepspec.batch, target_head=deepspec.head, objective=objective)
    counted = out["eval_mask"].bool()  # [rows, anchors, block]
    made = objective.predictions
    logits = deepspec.head(made.draft_hidden[0])
    if made.correction is not None:
        logits = logits + made.correction.hidden[0] @ made.correction.weight.T
    assert close(logits, out["draft_logits"][counted])
    assert close(deepspec.head(made.target_hidden), out["aligned_target_logits"][counted])
    assert made.labels is not None
    assert torch.equal(made.labels, out["target_ids"][counted])
    metrics = recorded["metrics"]
    assert float(result.loss_sum.detach() / divisor) == pytest.approx(recorded["loss"], rel=1e-5)
    rates = result.sums["acceptance"] / result.sums["supervised"]
    for step, rate in enumerate(rates.tolist()):
        assert rate == pytest.approx(metrics[f"accept_rate@{step}"], rel=1e-5)
    if deepspec.has_confidence:
        assert close(confidences[0], out["confidence_logits"][counted])


def test_dspark_proposes_what_deepspec_proposes(
    deepspec: DeepSpecCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, out = deepspec.draft.eval(), deepspec.out
    row, anchor = (
        deepspec.recorded["proposal"]["batch_row"],
        deepspec.recorded["proposal"]["anchor"],
    )
    states: list[Tensor] = []
    monkeypatch.setattr(draft.norm, "forward", keeping(draft.norm.forward, states))
    batch = deepspec.batch
    context = DraftContext(
        batch.input_ids[row : row + 1, : anchor + 1],
        batch.aux_hidden_states[row : row + 1, :anchor],
        batch.final_hidden_states[row : row + 1, :anchor],
    )
    (block,) = draft.propose(
        [context],
        [draft.start(64)],
        num_draft_tokens=[5],
        sampling=[SamplingSettings()],
        generators=[None],
    )
    assert close(states[0], out["proposal_hidden"][0])
    assert torch.equal(block.tokens, out["proposal_tokens"][0])
    assert block.token_probs is not None
    probs = out["proposal_logits"][0].softmax(-1).gather(-1, block.tokens[:, None])
    assert close(block.token_probs, probs[:, 0])
    if deepspec.has_confidence:
        assert block.confidences is not None
        assert close(block.confidences, out["proposal_confidence_logits"][0].sigmoid())
    else:
        assert block.confidences is None
