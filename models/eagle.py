"""EAGLE-1: predicts the target's next feature from the last one and the next token.

Paper: EAGLE (arXiv 2401.15077), sections 3 and 4.2; published code SafeAILab/EAGLE, branch v1.

    f_t     = the target's final hidden state of position t (after its final norm)
    z_t     = fc([embedding of token t+1 ; f_t])
    p_{t+1} = layer(z)_t                      one Llama layer without input norm; residual z
    logits  = the target's own head on p_{t+1}, frozen                           for token t+2
    next    : p takes the place of f

    loss = feature_weight * |p_{t+1} - f_{t+1}|  +  objective_weight * KL(target || draft)

where |.| is the mean over the hidden size of the squared error (`mse`) or of the smooth L1 distance
with a corner at 1 (`smooth_l1`, the published code), both summed over supervised predictions.

In training the features that are read carry noise, against the draft's own errors, which it will
read when it drafts: U(-a, a) in the paper (`uniform`, a = 0.1); the published code scales it by 512
/ length of the sample (`uniform_by_length`). The published recipe trains one step only; `num_steps`
unrolls more, as EAGLE-3 does, so that the draft meets its own features.

Differs from the published code: fc has no bias by default (vLLM drops it, SGLang wants it: exports
write zeros), the loss mask is aligned to the label (option: as published), the objective is any of
train/objectives.py, and `draft_vocab_size` limits the head to the most frequent tokens, which saves
most of a small draft's time.

Check: tests/test_golden_eagle1.py (recorded features, logits, losses, gradients),
tests/test_eagle.py.

Axes: batch, seq, hidden, steps, draft_vocab, vocab, rows (any gathered slots).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from draftsmith.models.chain_draft import ChainDraft, ChainDraftConfig
from draftsmith.models.chain_method import ChainMethod, HasDraftToTarget
from draftsmith.models.draft_layer import QUIET, DraftLayer
from draftsmith.models.method_options import check_choice, check_flag, check_list, check_number
from draftsmith.models.protocols import (
    DraftContext,
    ObjectiveOutput,
    Predictions,
    TrainBatch,
    TrainOutput,
)
from draftsmith.models.target import TargetHead
from draftsmith.models.vocabulary_map import has_reduced_vocabulary, set_draft_vocabulary

FEATURE_LOSSES = ("mse", "smooth_l1")
FEATURE_NOISES = ("none", "uniform", "uniform_by_length", "gaussian")
SMALL = 0.1
"""Scale of what the layer adds at the start (our choice)."""
NOISE_LENGTH = 512
"""`uniform_by_length`: samples of this length get the paper's noise, longer ones less."""


@strict
class EagleConfig(ChainDraftConfig):
    """What EAGLE-1 adds to a chain draft's settings."""

    model_type = "draftsmith_eagle"

    fc_bias: bool = False
    """Whether `fc` has a bias (early published checkpoints)."""
    feature_loss: str = "mse"
    feature_weight: float = 1.0
    objective_weight: float = 0.1
    """The two terms of the loss, see the module text."""
    feature_noise: str = "uniform"
    noise_amplitude: float = 0.1
    """Training only; see `EagleMethod`."""
    draftsmith_class: str = "draftsmith.models.eagle.EagleDraft"

    @staticmethod
    def default_step_weights() -> list[float]:
        """EAGLE-1 trains a single step."""
        return [1.0]


class EagleDraft(ChainDraft):
    """The draft model. It predicts with the target's head, which `attach_target` brings."""

    config_class = EagleConfig
    config: EagleConfig
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: EagleConfig) -> None:
        layers = [
            DraftLayer(config, reads_tokens=False, input_norm=index > 0)
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.post_init()

    @torch.no_grad()
    def start_at_the_feature(self) -> None:
        """Starts as the guess that the next feature is like the last one.

        fc passes the feature on, the layer adds little at first, and attention looks at everything
        alike. Measured on SmolLM2-135M, three steps, 200 updates of 512 tokens: simulated accepted
        length 1.234 -> 1.284, mean squared feature error 2.11 -> 1.71 (one seed).
        """
        size = self.config.hidden_size
        self.fc.weight[:, size:] = torch.eye(size)
        for layer in self.layers:
            layer.self_attn.q_proj.weight *= QUIET
            layer.self_attn.k_proj.weight *= QUIET
            layer.self_attn.o_proj.weight *= SMALL
            layer.mlp.down_proj.weight *= SMALL

    def _features(self, source: TrainBatch | DraftContext) -> Tensor:
        features = source.final_hidden_states
        if self.training and isinstance(source, TrainBatch):
            return features + self._noise(source)
        return features

    def _noise(self, batch: TrainBatch) -> Tensor:
        """[batch, seq, hidden] of the torch generator's numbers, as the setting says."""
        like, amplitude = batch.final_hidden_states, self.config.noise_amplitude
        if self.config.feature_noise == "none":
            return torch.zeros_like(like)
        if self.config.feature_noise == "gaussian":
            return torch.randn_like(like) * amplitude
        noise = torch.rand_like(like).sub_(0.5).mul_(2 * amplitude)
        if self.config.feature_noise == "uniform_by_length":
            lengths = batch.keep_mask.sum(-1).clamp(min=1)
            noise = noise * (NOISE_LENGTH / lengths)[:, None, None].to(noise.dtype)
        return noise

    def _tokens(self, embedded: Tensor) -> Tensor:
        return embedded

    def _first_input(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.fc(torch.cat([tokens, features.to(tokens.dtype)], dim=-1))

    def _next_input(self, fed_back: Tensor, tokens: Tensor) -> Tensor:
        return self._first_input(fed_back, tokens)

    def _fed_back(self, hidden: Tensor) -> Tensor:
        return hidden

    def _head_input(self, fed_back: Tensor) -> Tensor:
        return fed_back

    def _output(
        self, predictions: Predictions, output: ObjectiveOutput, sums: dict[str, Tensor]
    ) -> TrainOutput:
        """Adds the feature regression, in float32."""
        config = self.config
        distance = F.mse_loss if config.feature_loss == "mse" else F.smooth_l1_loss
        found = predictions.draft_hidden.float()
        wanted = predictions.target_hidden.float().expand_as(found)
        with torch.autocast(found.device.type, enabled=False):
            errors = distance(found, wanted, reduction="none").mean(-1)  # [steps, rows]
        weighted = errors * predictions.weights
        loss = config.feature_weight * weighted.sum() + config.objective_weight * output.loss_sum
        steps = weighted.detach().sum(-1).double()
        sums["loss"] = config.feature_weight * steps + config.objective_weight * sums["loss"]
        sums["feature_error"] = (errors.detach() * predictions.supervised).sum(-1).double()
        return TrainOutput(loss, sums)


@dataclass
class EagleMethod(ChainMethod):
    """The `method` node of a run: sizes of the draft and how it is trained. null: the target's."""

    fc_bias: bool = False
    """A bias on fc; vLLM drops it in silence, so a draft with one cannot be exported to it."""
    feature_loss: str = "mse"
    """mse, or smooth_l1 (the published code)."""
    feature_weight: float = 1.0
    """Weight of the feature regression (EAGLE: 1)."""
    objective_weight: float = 0.1
    """Weight of the objective, KL by default (EAGLE: 0.1)."""
    feature_noise: str = "uniform"
    """Added to the features in training: uniform (the paper), uniform_by_length (the published
    code: x 512 / length), gaussian or none."""
    noise_amplitude: float = 0.1
    """Half the width of the uniform noise (EAGLE: 0.1), or the gaussian's standard deviation."""
    aux_layer_ids: list[int] = field(default_factory=list, init=False)
    """EAGLE-1 reads no layer but the final state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("method.fc_bias", self.fc_bias)
        check_choice("method.feature_loss", self.feature_loss, FEATURE_LOSSES)
        check_choice("method.feature_noise", self.feature_noise, FEATURE_NOISES)
        check_list(
            "method.feature_weight and method.objective_weight",
            [self.feature_weight, self.objective_weight],
            float,
        )
        check_number("method.noise_amplitude", self.noise_amplitude, above=0.0, most=10.0)
        if min(self.feature_weight, self.objective_weight) < 0 or not (
            self.feature_weight or self.objective_weight
        ):
            raise ValueError(
                f"method.feature_weight is {self.feature_weight} and method.objective_weight "
                f"{self.objective_weight}; expected numbers >= 0, at least one of them above 0."
            )

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],  # noqa: ARG002
    ) -> EagleDraft:
        """Makes a draft model for a target, float32, attached to it.

        Args:
            target_head: Config, embeddings and head of the target.
            vocabulary: The draft vocabulary, or None for the full one.
            aux_layer_ids: Not read: the final state is what EAGLE-1 knows of the target.
        """
        config = EagleConfig(
            **self.chain_settings(target_head, vocabulary),
            fc_bias=self.fc_bias,
            feature_loss=self.feature_loss,
            feature_weight=self.feature_weight,
            objective_weight=self.objective_weight,
            feature_noise=self.feature_noise,
            noise_amplitude=self.noise_amplitude,
        )
        draft = EagleDraft(config)
        draft.start_at_the_feature()
        if vocabulary is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, vocabulary.draft_to_target)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
