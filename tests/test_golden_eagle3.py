"""EAGLE-3 against numbers recorded from SpecForge, DeepSpec and EAGLE (see DRAFTSMITH_GOLDEN).

Every number is read from the folder; a set of the same kind may take the place of any of these.
The recorded trainings align the mask to the feature and divide by batch x sequence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.inference.policies import ChainPolicy, DraftRequest
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Method
from draftsmith.models.protocols import (
    DraftContext,
    ObjectiveOutput,
    Predictions,
    SamplingSettings,
    TrainBatch,
)
from draftsmith.models.vocabulary_map import check_vocabulary_buffers
from draftsmith.train.objectives import make_objective

pytestmark = pytest.mark.golden

RELATIVE = 1e-5
"""Of the tensor's largest absolute value, in float32 (golden/README.md)."""
DECAY = Eagle3Method().step_decay
SIZES = (
    "hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
)
"""What the recorded configs call the sizes, as ours does."""
OBJECTIVES = {"none": "kl", "lambda": "lk_lambda"}
"""How SpecForge's cases are named -> our objectives."""


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compares relative to the largest expected value."""
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < RELATIVE, f"{what}: relative error {error:.2e}"


class RecordingObjective:
    """Passes on to an objective and keeps what went in and came out."""

    def __init__(self, name: str, **options: Any) -> None:
        self.objective = make_objective(name, **options)

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        self.predictions = predictions
        self.output = self.objective(predictions, target_head)
        return self.output

    def logits_by_slot(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """[steps, batch, seq, draft_vocab] logits at their slots, and where there are any."""
        made = self.predictions
        logits = made.draft_hidden @ made.draft_head_weight.T
        places = (batch.supervised_mask[:, :-1] & batch.keep_mask[:, 1:]).nonzero() + torch.tensor(
            [0, 1]
        )
        grid = logits.new_zeros(len(logits), *batch.input_ids.shape, logits.shape[-1])
        known = torch.zeros(grid.shape[:-1], dtype=torch.bool)
        for step, supervised in enumerate(made.supervised):
            row, place = places[supervised].unbind(-1)
            grid[step, row, place - 1 - step] = logits[step, supervised].detach()
            known[step, row, place - 1 - step] = True
        return grid, known


def make_draft(
    config: dict[str, Any], weights: dict[str, Tensor], aux_layer_ids: list[int], num_steps: int
) -> Eagle3Draft:
    """A draft with published weights; the first layer is called midlayer in some files."""
    weights = {
        name.replace("midlayer.", "layers.0."): value.clone() for name, value in weights.items()
    }
    embedding = weights.pop("embed_tokens.weight")
    settings = {name: config[name] for name in SIZES if name in config}
    if "rope_theta" in config:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    draft = Eagle3Draft(
        Eagle3Config(
            **settings,
            aux_layer_ids=aux_layer_ids,
            qk_norm="layers.0.self_attn.q_norm.weight" in weights,
            step_weights=[DECAY**step for step in range(num_steps)],
            mask_alignment="feature",
            normalisation="batch_tokens",
        )
    )
    draft.load_state_dict(weights, strict=True)
    check_vocabulary_buffers(draft)
    draft.attach_target(embed_tokens=nn.Embedding.from_pretrained(embedding))
    return draft


def make_batch(
    input_ids: Tensor,
    loss_mask: Tensor,
    attention_mask: Tensor,
    aux_hidden_states: Tensor,
    final_hidden_states: Tensor,
) -> TrainBatch:
    """A batch whose positions count from 0 in every row."""
    return TrainBatch(
        input_ids=input_ids,
        supervised_mask=loss_mask.bool(),
        keep_mask=attention_mask.bool(),
        position_ids=torch.arange(input_ids.shape[1]).expand_as(input_ids),
        aux_hidden_states=aux_hidden_states,
        final_hidden_states=final_hidden_states,
    )


def plain_head(weight: Tensor) -> nn.Module:
    """A target head that is one matrix product."""
    head = nn.Linear(*reversed(weight.shape), bias=False)
    head.load_state_dict({"weight": weight})
    return head.requires_grad_(False)


def found_cases(folder: Path, pattern: str) -> list[Path]:
    """All recorded cases of a kind; an empty folder must not pass for a success."""
    cases = sorted(folder.glob(pattern))
    assert cases, f"no {pattern} in {folder}"
    return cases


def check_losses_and_gradients(
    draft: Eagle3Draft,
    batch: TrainBatch,
    head: nn.Module,
    objective: RecordingObjective,
    case: dict[str, Any],
    gradients: dict[str, Tensor],
) -> None:
    """Step losses, their total, and the gradient of every trained tensor."""
    output = draft(batch, target_head=head, objective=objective)
    divisor = draft.normaliser(batch)
    assert int(divisor) == batch.input_ids.numel()
    step_losses = output.sums["loss"] / torch.tensor(draft.step_weights).double() / divisor
    assert_close(step_losses, torch.tensor(case["plosses"]), "step losses")
    loss = output.loss_sum / divisor
    assert_close(loss.detach(), torch.tensor(case["loss"]), "loss")
    loss.backward()
    found = {name: parameter.grad for name, parameter in draft.named_parameters()}
    expected = {name.replace("midlayer.", "layers.0."): g for name, g in gradients.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}")


def split(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}


def test_losses_gradients_and_acceptance_equal_specforge(golden_folder: Path) -> None:
    for path in found_cases(golden_folder, "specforge/eagle3_*.json"):
        case = json.loads(path.read_text())
        tensors = load_file(path.with_suffix(".safetensors"))
        given, out = split(tensors, "in."), split(tensors, "out.")
        draft = make_draft(
            case["draft_config"], split(tensors, "w."), case["layer_ids"], case["length"]
        )
        batch = make_batch(
            given["input_ids"],
            given["loss_mask"],
            given["attention_mask"],
            given["aux_hidden"],
            given["last_hidden"],
        )
        name = OBJECTIVES[path.stem.rsplit("_", 1)[-1]]
        options = {"divisor": batch.input_ids.numel()} if name == "lk_lambda" else {}
        objective = RecordingObjective(name, **options)
        check_losses_and_gradients(
            draft, batch, plain_head(given["lm_head"]), objective, case, split(tensors, "g.")
        )
        made, statistics = objective.predictions, objective.output
        counted = made.supervised & statistics.in_vocabulary
        acceptance = (statistics.acceptance * counted).sum(-1) / counted.sum(-1)
        assert_close(acceptance, out["acceptance"], f"{path.stem}: acceptance")
        assert torch.equal(statistics.correct.sum(-1).float(), out["correct"])
        assert torch.equal(made.supervised.sum(-1).float(), out["denom"])
        assert_close(out["correct"] / out["denom"] + 1, out["acc"] + 1, f"{path.stem}: accuracy")


def test_losses_and_logits_equal_deepspec(golden_folder: Path) -> None:
    for folder in found_cases(golden_folder, "deepspec/eagle3-*"):
        config = json.loads((folder / "config.json").read_text())
        case = json.loads((folder / "golden.json").read_text())
        given = load_file(folder / "golden.safetensors")
        weights = load_file(folder / "model.safetensors")
        steps = case["ttt_length"]
        draft = make_draft(config, weights, config["target_layer_ids"], steps)
        head = plain_head(weights["lm_head.weight"])
        states = given["target_hidden_states"], given["target_last_hidden_states"]
        batch = make_batch(given["input_ids"], given["loss_mask"], given["attention_mask"], *states)
        objective = RecordingObjective("kl")
        output = draft(batch, target_head=head, objective=objective)
        divisor = draft.normaliser(batch)
        assert_close(
            output.loss_sum.detach() / divisor, torch.tensor(case["loss"]), f"{folder.name}: loss"
        )
        sums, metrics = output.sums, case["metrics"]
        assert case["step_loss_decay"] == DECAY
        for step, weight in enumerate(draft.step_weights):
            expected = metrics[f"ploss_{step}"]
            assert float(sums["loss"][step] / weight / divisor) == pytest.approx(expected, rel=1e-5)
            count = metrics[f"valid_tokens@{step}"]
            assert float(sums["supervised"][step]) == count
            accepted = float(sums["acceptance"][step]) / count
            assert accepted == pytest.approx(metrics[f"accept_rate@{step}"], rel=1e-5)
            correct = float(sums["correct"][step]) / count
            assert correct == pytest.approx(metrics[f"accuracy@{step}"], abs=1e-6)
        everything = make_batch(
            given["input_ids"], given["attention_mask"], given["attention_mask"], *states
        )
        draft(everything, target_head=head, objective=objective)
        check_logits(objective, everything, given, "draft_logits_step")


def check_logits(
    objective: RecordingObjective, batch: TrainBatch, recorded: dict[str, Tensor], name: str
) -> None:
    """Compares the logits of every slot and step that exists."""
    logits, known = objective.logits_by_slot(batch)
    for step in range(len(logits)):
        found, expected = logits[step][known[step]], recorded[f"{name}{step}"][known[step]]
        assert_close(found, expected, f"logits of step {step}")


def test_training_time_test_equals_eagle(golden_folder: Path) -> None:
    for folder in found_cases(golden_folder, "eagle/eagle3-ttt*"):
        config = json.loads((folder / "config.json").read_text())
        case = json.loads((folder / "golden.json").read_text())
        tensors = load_file(folder / "golden.safetensors")
        given = split(tensors, "in.")
        weights = load_file(folder / "model.safetensors")
        weights["embed_tokens.weight"] = given["embed_tokens.weight"]
        layers = [after - 1 for after in case["aux_states_after_layers"]]
        draft = make_draft(config, weights, layers, case["length"])
        assert case["step_loss_decay"] == DECAY
        # Recorded are the target's logits, moved one to the left; they stand in for its states.
        logits = tensors["batch.target_logits"].roll(1, 1)
        batch = make_batch(
            given["input_ids"],
            given["loss_mask"],
            given["attention_mask"],
            given["aux_hidden_states"],
            logits,
        )
        objective = RecordingObjective("kl")
        check_losses_and_gradients(
            draft, batch, nn.Identity(), objective, case, split(tensors, "g.")
        )
        correct = objective.output.correct.sum(-1)
        accuracy = correct / (objective.predictions.supervised.sum(-1) + 1e-6)
        assert torch.allclose(accuracy, torch.tensor(case["acc"]), atol=1e-6)
        everything = make_batch(
            given["input_ids"],
            given["attention_mask"],
            given["attention_mask"],
            given["aux_hidden_states"],
            logits,
        )
        draft(everything, target_head=nn.Identity(), objective=objective)
        check_logits(objective, everything, tensors, "out.logits_step")


def record_states(draft: Eagle3Draft) -> dict[str, list[Tensor]]:
    """Collects every fed-back state (what the norm reads) and every row of logits from now on."""
    seen: dict[str, list[Tensor]] = {"hidden": [], "logits": []}
    draft.norm.register_forward_pre_hook(lambda _, given: seen["hidden"].append(given[0]))
    draft.lm_head.register_forward_hook(lambda _, __, made: seen["logits"].append(made))
    return seen


def test_cached_forward_and_greedy_chain_equal_eagle(golden_folder: Path) -> None:
    for folder in found_cases(golden_folder, "eagle/eagle3-forward*"):
        config = json.loads((folder / "config.json").read_text())
        case = json.loads((folder / "golden.json").read_text())
        given = load_file(folder / "golden.safetensors")
        weights = load_file(folder / "model.safetensors")
        weights["embed_tokens.weight"] = given["in.embed_tokens.weight"]
        draft = make_draft(config, weights, [n - 1 for n in case["aux_states_after_layers"]], 1)
        seen = record_states(draft)
        chain_ids = given["chain.target_ids"]
        steps = chain_ids.shape[1]
        for row, input_ids in enumerate(given["in.input_ids"]):
            features = given["in.aux_hidden_states"][row]
            state, pairs = draft.start(len(input_ids)), len(features)
            for pair in range(pairs):  # One by one through the cache; the last call drafts on.
                context = DraftContext(
                    input_ids[None, : pair + 2],
                    features[None, pair : pair + 1],
                    features[None, pair : pair + 1, :0],
                )
                count = steps if pair + 1 == pairs else 1
                request = DraftRequest(
                    context, state, count, SamplingSettings(), None, config["vocab_size"]
                )
                (made,) = ChainPolicy(count).draft(draft, [request])
            assert torch.equal(made.tokens, chain_ids[row])
            assert made.probs is None
            for name, values in seen.items():
                read = torch.cat(values)
                assert_close(read[:pairs], given[f"out.{name}"][row], name)
                assert_close(read[pairs - 1 :], given[f"chain.{name}"][row], f"chain {name}")
                values.clear()
