"""The two small protocols through which everything else knows a draft model, and their data.

Axes: batch, seq, hidden (draft), target_hidden, vocab (target), draft_vocab, steps (unrolled
draft steps), rows (supervised places gathered from the batch), nodes (drafted tokens).

*Layer id l* is the output of 0-based decoder layer l (residual stream, before the final norm), -1
the embedding output. *Final hidden state* is what the target's LM head reads. Position t holds
token x_t; its hidden states have consumed x_t and its logits predict x_{t+1}.

The training loop sees a draft model only as `TrainableDraft`, the decoder only as `Drafter`; a new
method implements both in its own file and nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass
class TrainBatch:
    """Right-padded conversations with the target's states, cached or computed live."""

    input_ids: Tensor
    """[batch, seq] int64."""
    supervised_mask: Tensor
    """[batch, seq] bool. True where the token itself was written by the target (loss mask)."""
    keep_mask: Tensor
    """[batch, seq] bool. True on real tokens, False on padding (padding is on the right)."""
    position_ids: Tensor
    """[batch, seq] int64, 0-based, restarting per conversation."""
    aux_hidden_states: Tensor
    """[batch, seq, layers * target_hidden]: chosen layers in ascending id order, concatenated."""
    final_hidden_states: Tensor
    """[batch, seq, target_hidden]: what the target's head reads."""

    def to(self, device: torch.device, dtype: torch.dtype) -> TrainBatch:
        """Moves all tensors to `device` and casts the two float ones to `dtype`."""
        return TrainBatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            supervised_mask=self.supervised_mask.to(device, non_blocking=True),
            keep_mask=self.keep_mask.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            aux_hidden_states=self.aux_hidden_states.to(device, dtype, non_blocking=True),
            final_hidden_states=self.final_hidden_states.to(device, dtype, non_blocking=True),
        )


@dataclass
class Predictions:
    """What a draft model hands to an objective: all its predictions, arranged by target place.

    Row r is one place of the batch; `draft_hidden[s, r]` and the target state of row r predict the
    same token, so the target's logits of a row are computed once for all steps.
    """

    draft_hidden: Tensor
    """[steps, rows, hidden]: what the draft head reads."""
    draft_head_weight: Tensor
    """[draft_vocab, hidden]; may require grad."""
    target_hidden: Tensor
    """[rows, target_hidden]: final hidden state whose logits predict the row's token."""
    supervised: Tensor
    """[steps, rows] bool: this prediction is taught and counted."""
    weights: Tensor
    """[steps, rows] float: weight of this prediction in the loss (0 where not supervised)."""
    draft_to_target: Tensor | None
    """[draft_vocab] int64 absolute target ids, ascending; None when the vocabularies are equal."""


@dataclass
class ObjectiveOutput:
    """Sums and per-prediction statistics; only `loss_sum` carries a gradient."""

    loss_sum: Tensor
    """[] sum over predictions of weight * loss; the caller divides by its normaliser."""
    step_loss_sums: Tensor
    """[steps] detached, the same sum per step with the weight of that step's rows."""
    correct: Tensor
    """[steps, rows] bool: draft argmax == target argmax (outside the draft vocabulary: a miss)."""
    acceptance: Tensor
    """[steps, rows] float: sum_v min(p, q) = 1 - TV over the full target vocabulary."""
    in_vocabulary: Tensor
    """[rows] bool: the target's argmax is in the draft vocabulary."""


class Objective(Protocol):
    """A training objective (train/objectives.py); draft models receive it, they never import it."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput: ...


@dataclass
class TrainOutput:
    """The result of one training forward of a draft model."""

    loss_sum: Tensor
    """[] differentiable; divide by the global normaliser of the accumulation window."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Detached float64 tensors that may be added over micro-batches and ranks:
    'loss' [steps], 'supervised' [steps], 'in_vocabulary' [steps], 'correct' [steps],
    'acceptance' [steps], 'chains' [] (places where a draft could start),
    'greedy_joint' [steps] (all predictions up to this step correct),
    'sampled_joint' [steps] (product of acceptances up to this step)."""


@runtime_checkable
class TrainableDraft(Protocol):
    """For training: a batch of target features in, losses and statistics out."""

    def attach_target(self, *, embed_tokens: nn.Module) -> None:
        """Shares the target's frozen embeddings; they are never saved with the draft."""

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64: the count that this batch's loss_sum is to be divided by (no forward)."""

    def forward(self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective) -> Any:
        """Runs the training forward and returns a `TrainOutput`."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the target samples. temperature 0 means greedy. Applied in transformers' order."""

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1.0 keeps all."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass
class DraftContext:
    """What the decoder tells a draft model at the start of a round (batch of one)."""

    token_ids: Tensor
    """[1, length]: every committed token. The target has not yet read the last one (the root)."""
    aux_hidden_states: Tensor
    """[1, new, layers * target_hidden]: features of the positions length - 1 - new .. length - 2
    that were committed since the last call (in the first call: of the whole prompt)."""
    final_hidden_states: Tensor
    """[1, new, target_hidden]: their final hidden states."""


@dataclass
class Draft:
    """A chain of drafted tokens (a tree has a parent per node; a chain leaves it None)."""

    tokens: Tensor
    """[nodes] int64 target ids, in order of depth."""
    probs: Tensor | None
    """[nodes, vocab] the exact distribution each token was drawn from, over the full target
    vocabulary; None when every proposal is one-hot (greedy draft)."""
    confidences: Tensor | None = None
    """[nodes] probability of acceptance that the draft itself reports, or None."""


class Drafter(Protocol):
    """For drafting: committed tokens and features in, a `Draft` out; rolls back its own state."""

    aux_layer_ids: tuple[int, ...]

    def start(self) -> Any:
        """Returns fresh per-sequence state (its KV cache); the decoder never looks inside."""

    def propose(
        self,
        context: DraftContext,
        state: Any,
        *,
        num_draft_tokens: int,
        sampling: SamplingSettings,
        generator: torch.Generator | None = None,
    ) -> Draft:
        """Takes in what was committed, drops its own speculative state, and drafts.

        May return fewer tokens than asked for (position limit), also none.
        """
