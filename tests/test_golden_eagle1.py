"""EAGLE-1 against the published training script: features, logits, losses, gradients, a chain.

Sets eagle1-bias and eagle1-nobias (SafeAILab/EAGLE, branch v1, 4a9cf3a; see golden/README.md).
float32, noise off; the published loss mask stays with the feature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.models.eagle import EagleConfig, EagleDraft
from draftsmith.models.protocols import DraftContext, Frontier, Predictions, TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.train.objectives import make_objective

pytestmark = pytest.mark.golden
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)
TOLERANCE = 1e-5


class Recording:
    """The KL objective; keeps what it was given."""

    predictions: Predictions

    def __call__(self, predictions: Predictions, target_head: Any) -> Any:
        self.predictions = predictions
        self.output = make_objective("kl")(predictions, target_head)
        return self.output


@pytest.fixture(params=["eagle1-bias", "eagle1-nobias"])
def case(request: pytest.FixtureRequest, golden_folder: Path) -> dict[str, Any]:
    """The draft of a set, its batch, recorded tensors and losses."""
    folder = golden_folder / "eagle" / request.param
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    tensors = load_file(folder / "golden.safetensors")
    head = TargetHead.load(str(golden_folder / "eagle" / "target"), dtype="float32")
    assert torch.equal(head.weight, tensors["in.lm_head.weight"])
    embedding = weights.pop("embed_tokens.weight")
    draft = EagleDraft(
        EagleConfig(
            **{name: config[name] for name in SIZES},
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            fc_bias="fc.bias" in weights,
            feature_loss="smooth_l1",
            feature_weight=1.0,
            objective_weight=0.1,
            feature_noise="none",
            mask_alignment="feature",
        )
    )
    draft.load_state_dict(weights, strict=True)
    assert torch.equal(head.embed_tokens(torch.arange(config["vocab_size"])), embedding)
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    ids = tensors["in.input_ids"]
    batch = TrainBatch(
        input_ids=ids,
        supervised_mask=tensors["in.loss_mask"].bool(),
        keep_mask=tensors["in.attention_mask"].bool(),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        aux_hidden_states=torch.empty(*ids.shape, 0),
        final_hidden_states=tensors["in.hidden_states"],
    )
    recorded = json.loads((folder / "golden.json").read_text())
    return {"draft": draft, "batch": batch, "head": head, "out": tensors, "golden": recorded}


def close(found: Tensor, wanted: Tensor) -> bool:
    scale = float(wanted.abs().max().clamp_min(1e-3))
    return float((found - wanted).detach().abs().max()) <= TOLERANCE * scale


def test_features_logits_losses_and_gradients_equal_the_published_ones(
    case: dict[str, Any],
) -> None:
    draft, out, golden = case["draft"].train(), case["out"], case["golden"]
    objective = Recording()
    result = draft(case["batch"], target_head=case["head"], objective=objective)
    made = objective.predictions
    slots = out["batch.loss_mask"].bool()  # The published mask is one of slots.
    assert int(slots.sum()) == golden["loss_mask_sum"] == made.draft_hidden.shape[1]
    assert close(made.draft_hidden[0], out["out.predict"][slots])
    assert close(case["head"](made.draft_hidden[0]), out["out.logits"][slots])
    assert torch.equal(made.target_hidden, out["batch.target"][slots])
    divisor = golden["loss_mask_sum"] + 1e-5
    assert float(draft.normaliser(case["batch"])) == golden["loss_mask_sum"]
    regression = F.smooth_l1_loss(made.draft_hidden[0], made.target_hidden, reduction="none")
    assert float(regression.mean(-1).sum()) / divisor == pytest.approx(golden["loss"]["reg"], 1e-5)
    assert float(objective.output.loss_sum) / divisor == pytest.approx(golden["loss"]["cls"], 1e-5)
    loss = result.loss_sum / divisor
    assert float(loss) == pytest.approx(golden["loss"]["total"], 1e-5)
    # The sums of the report: the whole loss, and the mean feature error.
    assert float(result.sums["loss"][0]) / divisor == pytest.approx(float(loss), 1e-5)
    loss.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None
        assert close(parameter.grad, out[f"g.{name}"]), name


def test_a_cached_greedy_chain_equals_the_published_one(case: dict[str, Any]) -> None:
    draft, out, golden = case["draft"], case["out"], case["golden"]
    pairs, row = golden["chain"]["prefix_pairs"], golden["chain"]["row"]
    ids = case["batch"].input_ids[row : row + 1, : pairs + 1]
    features = case["batch"].final_hidden_states[row : row + 1, :pairs]
    state = draft.start(64)
    logits = draft.read([DraftContext(ids, features[..., :0], features)], [state])
    for step, token in enumerate(out["chain.tokens"]):
        assert close(state.hidden[-1], out["chain.features"][step])
        assert int(logits[-1].argmax()) == int(token)
        frontier = Frontier(token[None], torch.tensor([step]), is_chain=True)
        logits = draft.extend([state], [frontier])
    assert close(state.hidden[-1], out["chain.features"][-1])
