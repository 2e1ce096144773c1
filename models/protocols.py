"""The two small protocols through which everything else knows a draft model, and their data.

Axes: batch, seq, hidden (draft), target_hidden, vocab (target), draft_vocab, steps (unrolled
draft steps), rows (supervised places gathered from the batch), nodes (drafted tokens).

*Layer id l* is the output of 0-based decoder layer l (residual stream, before the final norm), -1
the embedding output. *Final hidden state* is what the target's LM head reads. Position t holds
token x_t; its hidden states have consumed x_t and its logits predict x_{t+1}.

The training loop sees a draft model only as `TrainableDraft`, the decoder only as `Drafter`: either
an `AutoregressiveDraft`, with which the decoder's policies grow chains and trees, or a
`BlockDrafter`, which proposes by itself. A new method implements both in its own file and nothing
else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

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
class LogitCorrection:
    """What a draft model adds to its head's logits: hidden @ weight.T, of a small rank."""

    hidden: Tensor
    """[steps, rows, rank]."""
    weight: Tensor
    """[draft_vocab, rank]; may require grad."""


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
    labels: Tensor | None = None
    """[rows] int64 token that really follows the place, -1 where none does; None: not known."""
    target_places: Tensor | None = None
    """[rows] int64: rows of the same number have the same target state and label, so that the
    target's logits are computed once for them; None: every row has its own."""
    shares_target_head: bool = False
    """The draft predicts with the target's own head: `draft_head_weight` is (rows of) its matrix,
    frozen, and its bias and elementwise transformation (soft-capping, scaling) apply too."""
    correction: LogitCorrection | None = None
    """Added to the logits last, after that transformation; None: nothing is."""


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
    losses: Tensor | None = None
    """[steps, rows] loss of each prediction, without its weight, detached; None: not reported."""


class Objective(Protocol):
    """A training objective (train/objectives.py); draft models receive it, they never import it.

    One that couples the predictions of a call says so by an attribute `couples_predictions` that is
    true; the predictions of all others may come in several calls, whose sums are added.
    """

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
    'sampled_joint' [steps] (product of acceptances up to this step); without training, where a
    chain starts at every place, also 'rounds' and 'round_tokens' [] (models/simulated_rounds.py).
    Further ones [steps] are sums over
    the supervised predictions and are reported as their means, under their own names; one that
    comes with NAME_count, of its own shape, is divided by that instead."""


@runtime_checkable
class TrainableDraft(Protocol):
    """For training: a batch of target features in, losses and statistics out."""

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:
        """Shares the target's frozen parts; they are never saved with the draft.

        Args:
            embed_tokens: The target's embeddings.
            head: Its head (a `TargetHead`), for a draft that predicts with it.
        """

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64: the count that this batch's loss_sum is to be divided by (no forward)."""

    def forward(self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective) -> Any:
        """Runs the training forward and returns a `TrainOutput`."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the target samples. temperature 0 means greedy. Applied in transformers' order.

    The order (transformers 5, `generate`): repetition penalty, temperature, top-k, top-p, min-p.
    The penalty acts on greedy decoding too.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1.0 keeps all."""
    min_p: float = 0.0
    """Cuts tokens below this share of the most probable one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1: every token of the prompt and of the text so far becomes less likely."""

    def __post_init__(self) -> None:
        for name, value, allowed, holds in (
            ("temperature", self.temperature, ">= 0", self.temperature >= 0),
            ("top_k", self.top_k, ">= 0 (0 keeps all)", self.top_k >= 0),
            ("top_p", self.top_p, "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", self.min_p, "in [0, 1)", 0 <= self.min_p < 1),
            ("repetition_penalty", self.repetition_penalty, "> 0", self.repetition_penalty > 0),
        ):
            if not holds:
                raise ValueError(f"{name} is {value}; it must be {allowed}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """The distribution depends on the text so far beyond what the model reads."""
        return self.repetition_penalty != 1.0


@dataclass
class DraftContext:
    """What the decoder tells a draft model about one sequence at the start of a round."""

    token_ids: Tensor
    """[1, length]: every committed token. The target has not yet read the last one (the root)."""
    aux_hidden_states: Tensor
    """[1, new, layers * target_hidden]: features of the positions length - 1 - new .. length - 2
    that were committed since the last call (in the first call: of the whole prompt)."""
    final_hidden_states: Tensor
    """[1, new, target_hidden]: their final hidden states."""
    kept_rows: list[int] = field(default_factory=list)
    """Rows that the draft model read in the last round (see `Frontier`) and whose tokens are now
    committed, in order: a draft model may keep their keys and values instead of reading the tokens
    again."""


ProposalKind = Literal["one_hot", "drawn"]


@dataclass
class Draft:
    """The drafted tokens of one sequence: a tree below the root; a chain is a tree too.

    Nodes come parents first. The root (the last committed token) is no node.
    """

    tokens: Tensor
    """[nodes] int64 target ids."""
    probs: Tensor | None = None
    """[nodes, vocab] the exact distribution that a node and its siblings were drawn from, over the
    full target vocabulary: siblings are drawn one after the other, in the order of the nodes,
    without replacement. None: one-hot, the tokens were chosen with certainty (greedy, top-k)."""
    parents: list[int] | None = None
    """[nodes] index of each node's parent, -1 for children of the root; None: a chain."""
    confidences: Tensor | None = None
    """[nodes] probability of acceptance that the draft model reports, or None. It may depend on the
    tokens before its own, never on its own: it may decide whether that token is verified."""
    confidence_logits: Tensor | None = None
    """[nodes] the logits behind them as the draft model computed them, before any calibration; or
    None."""
    token_probs: Tensor | None = None
    """[nodes] the draft model's own probability of each token, for reports; or None."""
    state_rows: list[int] | None = None
    """[nodes] the row of the draft model's state that read the node, -1 if none did; or None."""

    @property
    def kind(self) -> ProposalKind:
        return "one_hot" if self.probs is None else "drawn"

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @property
    def parent_list(self) -> list[int]:
        """Parents, spelled out for a chain too."""
        return list(range(-1, len(self.tokens) - 1)) if self.parents is None else self.parents

    @property
    def depths(self) -> list[int]:
        """[nodes] distance from the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parent_list:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def first(self, count: int) -> Draft:
        """The first `count` tokens of a chain, with all that is known of them.

        Raises:
            ValueError: a tree, or more tokens than there are.
        """
        if not self.is_chain or not 0 <= count <= len(self.tokens):
            kind = "chain" if self.is_chain else "tree"
            raise ValueError(
                f"A {kind} of {len(self.tokens)} drafted tokens cannot be cut to {count}; give a "
                "chain and a length from 0 to its own."
            )
        if count == len(self.tokens):
            return self
        parts: dict[str, Any] = {
            name: None if own is None else own[:count]
            for name in ("tokens", "probs", "confidences", "confidence_logits", "token_probs")
            for own in (getattr(self, name),)
        }
        rows = None if self.state_rows is None else self.state_rows[:count]
        return Draft(**parts, state_rows=rows)

    @classmethod
    def nothing(cls, like: Tensor) -> Draft:
        """No drafted token, on the device of `like`."""
        return cls(tokens=torch.empty(0, dtype=torch.long, device=like.device))


@dataclass(frozen=True)
class BlockTree:
    """Asks a `BlockDrafter` for a tree instead of a chain: the best-scored nodes below the root."""

    num_nodes: int
    """Drafted tokens, at most."""
    top_k: int
    """Children of a node, at most."""


@runtime_checkable
class BlockDrafter(Protocol):
    """A draft model that proposes all its tokens itself (a block, an n-gram): features in, trees
    out."""

    aux_layer_ids: tuple[int, ...]
    """Target layers whose outputs it reads, ascending."""

    def start(self, max_length: int) -> Any:
        """Fresh state of one sequence of at most `max_length` tokens; only the draft looks in."""

    def propose(
        self,
        contexts: Sequence[DraftContext],
        states: Sequence[Any],
        *,
        num_draft_tokens: Sequence[int],
        sampling: Sequence[SamplingSettings],
        generators: Sequence[torch.Generator | None],
        tree: BlockTree | None = None,
    ) -> list[Draft]:
        """Takes in what was committed, drops its own speculative state, and drafts, per sequence.

        May return fewer tokens than asked for (position limit), also none. `num_draft_tokens` is
        the deepest drafted token; with `tree` None a chain of so many.
        """


@dataclass
class Frontier:
    """Drafted tokens that one sequence's draft model is to read next.

    Rows count what the draft model has read in this round: row 0 is the root, rows 1, 2, ... are
    drafted tokens in the order in which they were read.
    """

    tokens: Tensor
    """[new] int64 target ids."""
    parents: Tensor
    """[new] int64 row of each token's parent."""
    is_chain: bool = False
    """One token, below the newest row, and every row so far continues the one before."""


@runtime_checkable
class AutoregressiveDraft(Protocol):
    """A draft model that reads one drafted token to propose the next; the decoder's policies build
    chains and trees with it (inference/policies.py).

    All calls are packed: several sequences, each with its own number of rows.
    """

    aux_layer_ids: tuple[int, ...]
    """Target layers whose outputs it reads, ascending; () for none."""
    draft_to_target: Tensor | None
    """[draft_vocab] absolute target ids, ascending; None when column i of its logits is token i."""

    def start(self, max_length: int) -> Any:
        """Fresh state of one sequence of at most `max_length` tokens; only the draft looks in."""

    def max_depth(self, length: int) -> int:
        """Deepest drafted token that its positions allow with `length` committed tokens; 0 when it
        can no longer draft."""

    def read(self, contexts: Sequence[DraftContext], states: Sequence[Any]) -> Tensor:
        """Forgets the last round's drafted rows but the kept ones, and reads what was committed.

        Called only for sequences whose `max_depth` is at least 1.

        Returns:
            [sequences, draft_vocab] logits of the token below the root.

        Raises:
            ValueError: a context does not continue what its state has seen.
        """

    def extend(self, states: Sequence[Any], frontiers: Sequence[Frontier]) -> Tensor:
        """Reads drafted tokens, each after its own ancestors only.

        Returns:
            [rows, draft_vocab] logits of the token below each, sequence after sequence.
        """


Drafter = BlockDrafter | AutoregressiveDraft
"""For drafting: committed tokens and features in, a `Draft` out; rolls back its own state."""
