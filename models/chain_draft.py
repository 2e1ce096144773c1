"""What EAGLE-type drafts share: one Llama-type body that feeds its own state back, in training and
drafting.

    hidden_0 = first_input(features of position t, token t+1)
    state_j  = fed_back(layers(hidden_j, token t+1+j))       attention: models/ttt_attention.py
    hidden_j = next_input(state_{j-1}, token t+1+j)
    logits_j = head(head_input(state_j))                     for token t+2+j

Training unrolls this at every supervised slot (training-time test, EAGLE-3, arXiv 2503.01840,
section 3.1; models/ttt_slots.py has the shift table). Drafting runs the same functions over a
key/value cache. A method says what the functions are, and may add terms to the loss.

Check: tests/test_eagle3.py, tests/test_eagle.py compare with uncached chains written out.

Axes: batch, seq, hidden, heads, kv_heads, head_dim, draft_vocab, vocab, rows (any gathered slots),
pairs (slots whose token t+1 is real), active (slots that are unrolled).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.draft_reader import DraftState, RowsToRead, run_layers
from draftsmith.models.layered_draft import LayeredDraft, LayeredDraftConfig
from draftsmith.models.protocols import (
    DraftContext,
    Frontier,
    Objective,
    ObjectiveOutput,
    Predictions,
    TrainBatch,
    TrainOutput,
)
from draftsmith.models.sequence_cache import SequenceCache
from draftsmith.models.target import TargetHead
from draftsmith.models.ttt_chain import unroll
from draftsmith.models.ttt_slots import SlotPlan, plan_slots, prediction_sums, supervised_places
from draftsmith.models.vocabulary_map import draft_to_target, register_vocabulary_buffers

OWN_TOKEN_LOGITS = 2**22
"""Draft logits held at a time when a step reads its own predictions (our choice)."""


@strict
class ChainDraftConfig(LayeredDraftConfig):
    """A Llama layer's sizes and how the draft was trained; `vocab_size` is the target's."""

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    """Tokens that the draft can propose; None: all of the target's."""
    rope_offset: int = 0
    """0: the rotary position of a slot is its feature's. 1: its token's, one further."""
    step_weights: list[float] | None = None
    """Loss weight of each unrolled step; None (a checkpoint of unknown training): the method's."""
    step_tokens: list[str] | None = None
    """What each unrolled step reads: "true", the token of the text, or "own", the draft's own most
    likely one; None: true ones."""
    mask_alignment: str = "label"
    """See models/ttt_slots.py."""
    normalisation: str = "supervised"
    """What the loss sum is divided by, see `ChainMethod`."""
    checkpoint_steps: bool = False
    """Recompute each unrolled step in the backward pass instead of keeping what it held."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.step_weights is None:
            self.step_weights = self.default_step_weights()

    @staticmethod
    def default_step_weights() -> list[float]:
        """The loss weights of the published training."""
        raise NotImplementedError


class ChainDraft(LayeredDraft):
    """A `TrainableDraft` for the training loop and an `AutoregressiveDraft` for the decoder."""

    config: ChainDraftConfig
    has_own_head: bool = False
    """Whether the draft predicts with a head of its own, instead of the target's."""

    def __init__(self, config: ChainDraftConfig, layers: Sequence[DraftLayer]) -> None:
        super().__init__(config, layers)
        assert config.draft_vocab_size is not None, "set by the config class"
        register_vocabulary_buffers(
            self, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
        )
        self._drafting_head: tuple[Tensor, Tensor | None] | tuple[()] = ()
        """The target head's rows and bias of a reduced vocabulary, gathered once for drafting."""

    # What a method is.

    aux_layer_ids: tuple[int, ...]
    """Target layers whose outputs this draft reads, ascending; () for none."""

    def _features(self, source: TrainBatch | DraftContext) -> Tensor:
        """[batch, any, features]: what the first step reads of the target's states."""
        raise NotImplementedError

    def _tokens(self, embedded: Tensor) -> Tensor:
        """[rows, hidden] embeddings -> what the steps read of them."""
        raise NotImplementedError

    def _first_input(self, features: Tensor, tokens: Tensor) -> Tensor:
        """[rows, features] and [rows, hidden] -> [rows, hidden] into the first layer."""
        raise NotImplementedError

    def _next_input(self, fed_back: Tensor, tokens: Tensor) -> Tensor:
        """The same for the further steps."""
        raise NotImplementedError

    def _fed_back(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] out of the last layer -> the state that the next step reads."""
        raise NotImplementedError

    def _head_input(self, fed_back: Tensor) -> Tensor:
        """[..., hidden] -> what the head reads."""
        raise NotImplementedError

    zeroes_first_slot: bool = False
    """Whether the slot at position 0 of a text reads zeros for its token, as in vLLM's MTP."""

    def _output(
        self,
        predictions: Predictions,  # noqa: ARG002
        output: ObjectiveOutput,
        sums: dict[str, Tensor],
    ) -> TrainOutput:
        """The loss of a batch; methods may add terms."""
        return TrainOutput(output.loss_sum, sums)

    # The head: the target's own, frozen, unless a method brings another.

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:
        """Shares the target's frozen embeddings, and its head where the draft predicts with it.

        Raises:
            ValueError: there is no head, or it does not fit the draft's sizes.
        """
        super().attach_target(embed_tokens=embed_tokens)
        if not self.has_own_head:
            self._attach_head(head)
            self._drafting_head = ()

    def _logits(self, head_input: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, draft_vocab] while drafting."""
        assert self._target_head, "attach_target comes first"
        head = self._target_head[0]
        ids = self.draft_to_target
        if ids is None:
            return head(head_input.to(head.weight.dtype))
        if not self._drafting_head:
            bias = None if head.bias is None else head.bias.detach()[ids.to(head.bias.device)]
            self._drafting_head = (self._draft_rows(head).detach(), bias)
        weight, bias = self._drafting_head
        return head.transform(F.linear(head_input.to(weight.dtype), weight, bias))

    def _draft_rows(self, head: TargetHead) -> Tensor:
        """[draft_vocab, hidden] the head's rows of the draft vocabulary."""
        ids = self.draft_to_target
        return head.weight if ids is None else head.weight[ids.to(head.weight.device)]

    def _head_of_predictions(self, target_head: nn.Module) -> dict[str, Any]:
        """The arguments of `Predictions` that say with which head the draft predicts."""
        assert isinstance(target_head, TargetHead), "the loop passes the target's head"
        return {
            "draft_head_weight": self._draft_rows(target_head).detach(),
            "shares_target_head": True,
        }

    # Training.

    @property
    def step_weights(self) -> list[float]:
        """Loss weight per unrolled step; its length is the number of steps."""
        assert self.config.step_weights is not None, "set by the config"
        return self.config.step_weights

    @property
    def draft_to_target(self) -> Tensor | None:
        """[draft_vocab] absolute target ids of the draft's logits; None: the full vocabulary."""
        return draft_to_target(self)

    def _table(self, positions: int) -> Rope:
        """cos and sin of the first `positions` slots."""
        return self._rope_table(positions, offset=self.config.rope_offset)

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64, as the option `normalisation` says; known before any forward."""
        if self.config.normalisation == "batch_tokens":
            count = torch.tensor(batch.input_ids.numel(), device=batch.input_ids.device)
            return count.double()
        return self._supervised_places(batch).sum().double()

    def _supervised_places(self, batch: TrainBatch) -> Tensor:
        return supervised_places(batch.supervised_mask, batch.keep_mask, self.config.mask_alignment)

    def forward(
        self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective
    ) -> TrainOutput:
        """Runs the training-time test of one batch.

        Args:
            batch: See `TrainBatch`.
            target_head: The target's frozen head.
            objective: What the predictions are taught by.
        """
        plan = plan_slots(
            self._supervised_places(batch), batch.keep_mask, num_steps=len(self.step_weights)
        )
        predictions = self._predictions(batch, plan, target_head)
        output = objective(predictions, target_head)
        # The walk takes a pass over the places: only where nothing is trained.
        grid = None if self.training else batch.input_ids.shape
        return self._output(predictions, output, prediction_sums(plan, output, grid=grid))

    def _predictions(
        self, batch: TrainBatch, plan: SlotPlan, target_head: nn.Module
    ) -> Predictions:
        """Arranges the unrolled states by target place."""
        states = self._unroll(batch, plan, target_head)
        hidden = torch.stack(  # [steps, rows, hidden]
            [
                state.index_select(0, rows)
                for state, rows in zip(states, plan.row_slots, strict=True)
            ]
        )
        weights = torch.tensor(self.step_weights, device=hidden.device)
        return Predictions(
            draft_hidden=self._head_input(hidden),
            target_hidden=batch.final_hidden_states.flatten(0, 1).index_select(0, plan.places),
            supervised=plan.supervised,
            weights=plan.supervised * weights[:, None],
            draft_to_target=self.draft_to_target,
            labels=_following_tokens(batch, plan.places),
            **self._head_of_predictions(target_head),
        )

    def _unroll(self, batch: TrainBatch, plan: SlotPlan, target_head: nn.Module) -> list[Tensor]:
        """The fed-back state of each step, [active, hidden]."""
        positions = batch.position_ids.flatten()
        rope = self._table(int(positions.max()) + len(self.step_weights))
        tokens = self._tokens(self._embed(batch.input_ids.flatten()))  # [batch * seq, hidden]
        features = self._features(batch).flatten(0, 1).index_select(0, plan.pairs)
        sources = self.config.step_tokens or ["true"] * len(self.step_weights)

        def first_input() -> tuple[Tensor, Tensor]:
            read = tokens.index_select(0, plan.pairs + 1)
            if self.zeroes_first_slot:
                read = read * (positions.index_select(0, plan.pairs) != 0)[:, None]
            return self._first_input(features, read), read

        def next_input(step: int, state: Tensor) -> tuple[Tensor, Tensor]:
            if sources[step] == "own":
                own = self._most_likely(state, target_head)
                read = self._tokens(self._embed(own))
            else:
                read = tokens.index_select(0, plan.step_positions[step])
            return self._next_input(state, read), read

        return unroll(
            self.layers,
            plan,
            rope,
            positions,
            grid=batch.input_ids.shape,
            num_steps=len(self.step_weights),
            first_input=first_input,
            next_input=next_input,
            feed_back=self._fed_back,
            checkpoint_steps=self.config.checkpoint_steps and torch.is_grad_enabled(),
        )

    @torch.no_grad()
    def _most_likely(self, states: Tensor, target_head: nn.Module) -> Tensor:
        """[active, hidden] -> [active] target ids of the draft's first maximum, chunk by chunk."""
        head = self._head_of_predictions(target_head)
        weight = head["draft_head_weight"]
        chosen = []
        for part in states.split(max(OWN_TOKEN_LOGITS // len(weight), 1)):
            head_input = self._head_input(part)
            if head.get("shares_target_head"):
                logits = self._logits(head_input)
            else:
                logits = head_input @ weight.to(head_input.dtype).T
            chosen.append(logits.argmax(-1))
        ids = torch.cat(chosen)
        return ids if self.draft_to_target is None else self.draft_to_target[ids]

    # Drafting.

    def start(self, max_length: int) -> DraftState:
        """An empty key/value cache for one sequence of at most `max_length` tokens."""
        state = DraftState(SequenceCache(), self._table(0))
        self._reserve(state, min(max_length, self.config.max_position_embeddings))
        return state

    def max_depth(self, length: int) -> int:
        """Deepest drafted token: the one at depth d comes from position length - 3 + d."""
        limit = self.config.max_position_embeddings - self.config.rope_offset
        return max(limit - length + 2, 0)

    @torch.no_grad()
    def read(self, contexts: Sequence[DraftContext], states: Sequence[DraftState]) -> Tensor:
        """Reads the committed pairs (feature t, token t+1); see `AutoregressiveDraft`.

        Raises:
            ValueError: if a context does not continue what its state has seen.
        """
        reads = []
        for context, state in zip(contexts, states, strict=True):
            length, new = context.token_ids.shape[1], self._features(context).shape[1]
            first = self._check_continues(context, state, new)
            state.rows.clear()
            self._reserve(state, length - 1)
            reads.append(RowsToRead(state, context.token_ids[0, first + 1 :], first, new))
        features = torch.cat([self._features(context)[0] for context in contexts])
        tokens = self._tokens_of(reads)
        self._zero_first_slots(tokens, reads)
        hidden = self._first_input(features.to(self.dtype), tokens)
        fed_back = self._fed_back(run_layers(self.layers, reads, hidden, tokens, ends_only=True))
        for row, read in enumerate(reads):
            read.state.cache.keep(range(read.new))
            read.state.hidden = fed_back[row : row + 1]
        return self._logits(self._head_input(fed_back))

    @torch.no_grad()
    def extend(self, states: Sequence[DraftState], frontiers: Sequence[Frontier]) -> Tensor:
        """Reads drafted tokens with the fed-back states of their parents."""
        reads = []
        above = []
        for state, frontier in zip(states, frontiers, strict=True):
            assert state.hidden is not None, "read() comes first"
            start = state.cache.committed + state.rows.count
            state.rows.add(frontier)
            new = len(frontier.tokens)
            self._reserve(state, start + new)
            reads.append(RowsToRead(state, frontier.tokens, start, new))
            parents = state.hidden[-1:] if frontier.is_chain else state.hidden[frontier.parents]
            above.append(parents)
        tokens = self._tokens_of(reads)
        hidden = self._next_input(torch.cat(above), tokens)
        fed_back = self._fed_back(run_layers(self.layers, reads, hidden, tokens, ends_only=False))
        first = 0
        for read in reads:
            own = fed_back[first : first + read.new]
            first += read.new
            assert read.state.hidden is not None, "read() comes first"
            read.state.hidden = torch.cat([read.state.hidden, own])
        return self._logits(self._head_input(fed_back))

    @staticmethod
    def _check_continues(context: DraftContext, state: DraftState, new: int) -> int:
        """The first position that a context with `new` features brings; ValueError if not next."""
        length = context.token_ids.shape[1]
        first = length - 1 - new
        if first != state.cache.committed or not new:
            raise ValueError(
                f"The draft's cache holds {state.cache.committed} committed pairs, but the "
                f"context brings the features of positions {first} to {length - 2}. Pass every "
                "committed position once, in order, with the state that start() made for this "
                "sequence."
            )
        return first

    def _tokens_of(self, reads: Sequence[RowsToRead]) -> Tensor:
        ids = reads[0].tokens if len(reads) == 1 else torch.cat([read.tokens for read in reads])
        return self._tokens(self._embed(ids))

    def _zero_first_slots(self, tokens: Tensor, reads: Sequence[RowsToRead]) -> None:
        """Clears, in place, what committed slots at position 0 read, if the method wants that."""
        row = 0
        for read in reads if self.zeroes_first_slot else ():
            if read.start == 0:
                tokens[row] = 0.0
            row += read.new

    def _reserve(self, state: DraftState, positions: int) -> None:
        """Room for `positions` entries, and rotary tables as long as the cache."""
        if state.cache.reserve(positions, limit=self.config.max_position_embeddings):
            state.rope = self._table(state.cache.capacity)


def _following_tokens(batch: TrainBatch, places: Tensor) -> Tensor:
    """[rows] the token after each place, -1 where the text ends."""
    following = torch.full_like(batch.input_ids, -1)
    real = batch.keep_mask[:, 1:]
    following[:, :-1] = torch.where(real, batch.input_ids[:, 1:], -1)
    return following.flatten().index_select(0, places)
