"""A real draft model that is no method of draftsmith: one linear layer over the target's features.

The training tests use it to prove that the loop knows methods only through the protocols. It lives
in a module of its own because worker processes must be able to import it (tests put this folder on
their path).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.models.protocols import Objective, Predictions, TrainBatch, TrainOutput


class LinearDraftConfig(PretrainedConfig):
    model_type = "linear_draft"

    def __init__(
        self,
        feature_size: int = 1,
        hidden_size: int = 1,
        vocab_size: int = 1,
        noise: float = 0.0,
        draft_to_target: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.feature_size = feature_size
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.noise = noise
        self.draft_to_target = draft_to_target
        super().__init__(**kwargs)


class LinearDraft(PreTrainedModel):
    """Predicts the token after next from features and the next token's embedding: two steps."""

    config_class = LinearDraftConfig

    def __init__(self, config: LinearDraftConfig) -> None:
        super().__init__(config)
        width = config.feature_size + config.hidden_size
        size = config.vocab_size if config.draft_to_target is None else len(config.draft_to_target)
        self.fc = nn.ModuleList(nn.Linear(width, config.hidden_size) for _ in range(2))
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        if config.draft_to_target is not None:
            self.register_buffer("draft_to_target", torch.tensor(config.draft_to_target))
        self.post_init()

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:  # noqa: ARG002
        self._embed_tokens = (embed_tokens,)

    def _supervised(self, batch: TrainBatch) -> Tensor:
        """[batch, seq] bool: the token two places on is taught."""
        taught = torch.zeros_like(batch.supervised_mask)
        taught[:, :-2] = batch.supervised_mask[:, 2:]
        return taught

    def normaliser(self, batch: TrainBatch) -> Tensor:
        return self._supervised(batch).sum().double()

    def forward(
        self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective
    ) -> TrainOutput:
        embedded = self._embed_tokens[0](batch.input_ids.roll(-1, dims=1)).detach()
        features = batch.aux_hidden_states
        features = features + self.config.noise * torch.randn_like(features)
        read = torch.cat((features, embedded.to(features)), -1)
        taught = self._supervised(batch)
        states = torch.stack([layer(read)[taught] for layer in self.fc])  # [2, rows, hidden]
        supervised = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        output = objective(
            Predictions(
                draft_hidden=states,
                draft_head_weight=self.lm_head.weight,
                target_hidden=batch.final_hidden_states.roll(-1, dims=1)[taught],
                supervised=supervised,
                weights=supervised.float() * torch.tensor([[1.0], [0.5]], device=states.device),
                draft_to_target=getattr(self, "draft_to_target", None),
            ),
            target_head,
        )
        correct, acceptance = output.correct.double(), output.acceptance.double()
        sums = {
            "loss": output.step_loss_sums.double(),
            "supervised": supervised.double().sum(1),
            "in_vocabulary": output.in_vocabulary.double().sum().expand(2),
            "correct": correct.sum(1),
            "acceptance": acceptance.sum(1),
            "chains": torch.tensor(float(states.shape[1]), dtype=torch.float64),
            "greedy_joint": correct.cumprod(0).sum(1),
            "sampled_joint": acceptance.cumprod(0).sum(1),
        }
        return TrainOutput(output.loss_sum, {k: v.to(states.device) for k, v in sums.items()})


@dataclass
class LinearMethod:
    """The method node: `_target_: linear_draft.LinearMethod`."""

    aux_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    noise: float = 0.0
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "kl"})

    def validate(self, num_target_layers: int, vocab_size: int) -> None:
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocab_size:
            raise ValueError(f"method.draft_vocab_size is over {vocab_size}.")
        if num_target_layers < 2:
            raise ValueError("The target has no layer before its last one.")

    def build(self, target_head: Any, vocabulary: Any, aux_layer_ids: Sequence[int]) -> LinearDraft:
        return LinearDraft(
            LinearDraftConfig(
                feature_size=len(aux_layer_ids) * target_head.hidden_size,
                hidden_size=target_head.hidden_size,
                vocab_size=target_head.vocab_size,
                noise=self.noise,
                draft_to_target=None if vocabulary is None else vocabulary.draft_to_target.tolist(),
            )
        )
