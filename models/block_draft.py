"""What DFlash and DSpark share: a block of slots that is predicted in one parallel pass.

    c       = hidden_norm(fc([chosen layers of the target, concatenated]))   context, per position
    slots   = [embedding of the anchor's token, mask token, mask token, ...]
    layer   : Qwen3-type (norms on queries and keys); keys and values of every layer are projected
              from [c of the positions before the anchor ; normed slots], queries from the slots
    logits  = the target's own head on norm(slots), frozen

Rotary positions continue the sequence: the anchor's slot has the anchor's position. Which slot
predicts what: models/block_anchors.py. Who sees what: models/block_attention.py.

Training runs all blocks of a batch at once. Drafting keeps the context's keys and values of one
sequence in a cache, which grows by accepted positions only; the slots' own are written behind them
and forgotten. A method may correct a slot's logits by the token before it (`_correction`), as
DSpark's sequential head does; tokens are then chosen from left to right.

Check: tests/test_dflash.py compares with an uncached block written out.

Axes: batch, seq, blocks, slots, steps (predictions of a block), context, hidden, vocab, sequences
(drafting together), rows (any gathered slots).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.block_anchors import (
    BlockPlan,
    accepted_by_place,
    anchor_candidates,
    block_sums,
    draw_anchors,
    plan_blocks,
    rounds_of,
)
from draftsmith.models.block_attention import block_attention, slots_hidden
from draftsmith.models.block_pieces import train_in_pieces
from draftsmith.models.block_proposal import Proposal, propose_tokens
from draftsmith.models.block_tree import propose_trees
from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.layered_draft import LayeredDraft, LayeredDraftConfig
from draftsmith.models.lean_norms import rms_norm
from draftsmith.models.protocols import (
    BlockTree,
    Draft,
    DraftContext,
    Objective,
    ObjectiveOutput,
    Predictions,
    SamplingSettings,
    TrainBatch,
    TrainOutput,
)
from draftsmith.models.sequence_cache import SequenceCache, cached_attention
from draftsmith.models.target import TargetHead

LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class BlockDraftConfig(LayeredDraftConfig):
    """Sizes of the layers, the block, and how the draft was trained; `vocab_size` is the target's.

    What other programs have to know is always written: layout, mask token, layers, block size.
    """

    num_hidden_layers: int = 5
    block_size: int = 16
    """Slots of a block, the anchor's included."""
    mask_token_id: int | None = None
    """Token of the slots that are to be predicted."""
    sample_from_anchor: bool = False
    """Whether the anchor's slot predicts too: a block then proposes block_size tokens, not one
    fewer."""
    aux_layer_ids: list[int] | None = None
    """0-based target layers whose outputs are read, ascending (-1: the embeddings)."""
    qk_norm: bool = True
    """RMS norms on queries and keys, as in Qwen3."""
    layer_types: list[str] | None = None
    """full_attention or sliding_attention per layer; None: full everywhere."""
    sliding_window: int | None = None
    """Of sliding layers, in positions, the own one included."""
    decay: float = 7.0
    """Step j of the loss weighs exp(-j / decay)."""
    num_anchors: int = 512
    """Blocks that a micro-batch is trained on; a validation takes all."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPES[0]] * self.num_hidden_layers

    def check_block(self) -> None:
        """Raises ValueError where the settings of the block contradict each other."""
        layers, ids = self.layer_types or [], self.aux_layer_ids or []
        if not ids or ids != sorted(set(ids)):
            raise ValueError(
                f"aux_layer_ids is {self.aux_layer_ids}; expected the target layers to read, "
                "distinct and ascending."
            )
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; expected an id of the target's embeddings "
                f"(0 to {self.vocab_size - 1}) that no text contains."
            )
        if self.num_steps < 1:
            raise ValueError(
                f"block_size is {self.block_size}: no slot is left to predict. Raise it."
            )
        unknown = sorted(set(layers) - set(LAYER_TYPES))
        if unknown or len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types is {layers}; expected {self.num_hidden_layers} entries "
                f"(num_hidden_layers), each one of {', '.join(LAYER_TYPES)}."
            )
        if LAYER_TYPES[1] in layers and (self.sliding_window or 0) < 1:
            raise ValueError(
                f"layer_types has sliding layers, but sliding_window is {self.sliding_window}; "
                "expected a number of positions."
            )

    @property
    def num_steps(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot of step 0."""
        return 0 if self.sample_from_anchor else 1

    @property
    def windows(self) -> list[int | None]:
        """Per layer, in positions; None: full attention."""
        kinds = self.layer_types or []
        return [self.sliding_window if kind == LAYER_TYPES[1] else None for kind in kinds]


@dataclass
class BlockState:
    """One sequence's context: keys and values of the positions before the anchor."""

    cache: SequenceCache
    rope: Rope
    """[capacity, 1, head_dim] each."""


@dataclass
class _KeptPlan:
    """The blocks of a batch, for one forward and one normaliser."""

    plan: BlockPlan
    used_by: set[str]


class BlockDraft(LayeredDraft):
    """A `TrainableDraft` for the training loop and a `BlockDrafter` for the decoder."""

    config: BlockDraftConfig
    cumulative_supervision = False
    """Whether the first unsupervised label ends a block."""

    def __init__(self, config: BlockDraftConfig) -> None:
        config.check_block()
        layers = [DraftLayer(config, reads_tokens=False) for _ in range(config.num_hidden_layers)]
        super().__init__(config, layers)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.aux_layer_ids or ()) * size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.norm = LlamaRMSNorm(size, eps)
        self._plans: Any = WeakIdKeyDictionary()  # TrainBatch -> _KeptPlan, as long as it lives.

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs this draft reads, ascending."""
        return tuple(self.config.aux_layer_ids or ())

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:
        """Shares the target's frozen embeddings and head.

        Raises:
            ValueError: there is no head, or it does not fit the draft's sizes.
        """
        super().attach_target(embed_tokens=embed_tokens)
        self._attach_head(head)

    @torch.no_grad()
    def start_quietly(self, target_head: TargetHead) -> None:
        """Starts `norm` so that the head's logits spread by about 1: an untrained draft is unsure.

        At ones it is confidently wrong. Measured on SmolLM2-135M, DFlash, two layers, block 8, 30
        updates of 512 tokens (one seed): training loss of the last ten 8.97 -> 7.83.
        """
        rows = target_head.weight.float().pow(2).sum(-1)
        self.norm.weight.fill_(float(rows.mean().rsqrt().clamp(max=1.0)))

    def _slot_inputs(self, anchor_tokens: Tensor) -> Tensor:
        """[blocks] token ids -> [blocks * slots, hidden]: the anchor's embedding, then masks."""
        mask = self.config.mask_token_id
        assert mask is not None, "checked when the draft was made"
        ids = anchor_tokens.new_full((len(anchor_tokens), self.config.block_size), mask)
        ids[:, 0] = anchor_tokens
        return self._embed(ids.flatten())

    def _context(self, features: Tensor) -> Tensor:
        """[context, layers * hidden] -> [context, hidden], what every layer's keys read."""
        norm = self.hidden_norm
        return rms_norm(self.fc(features), norm.weight, norm.variance_epsilon)

    def _context_at(self, batch: TrainBatch, places: Tensor) -> Tensor:
        """[context, hidden] at these flat positions.

        Features are the widest tensor of a batch. Where nearly all are read, projecting the others
        too costs less than a copy that the graph keeps. Not beside padding, which may hold
        anything: a gradient of 0 times NaN is NaN.
        """
        features = batch.aux_hidden_states.flatten(0, 1)
        if 8 * len(places) >= 7 * len(features) and bool(batch.keep_mask.all()):
            return self._context(features)[places]
        return self._context(features[places])

    # Training.

    @property
    def step_weights(self) -> Tensor:
        """[steps] float32, of the loss."""
        steps = torch.arange(self.config.num_steps, device=self.device)
        return torch.exp(-steps / self.config.decay)

    def choose_anchors(self, batch: TrainBatch) -> Tensor:
        """[blocks] flat positions: drawn anew for every step of training, else all candidates."""
        candidates = anchor_candidates(batch)
        if not self.training:
            return candidates
        return draw_anchors(candidates, self.config.num_anchors)

    def _plan_for(self, batch: TrainBatch, user: str) -> BlockPlan:
        """The blocks of a batch: what `normaliser` counts is what `forward` trains on.

        Either may come first. A plan serves each of them once, so that a batch that comes again
        gets new anchors.
        """
        kept = self._plans.get(batch)
        if kept is None or user in kept.used_by:
            plan = plan_blocks(
                batch,
                self.choose_anchors(batch),
                num_steps=self.config.num_steps,
                cumulative=self.cumulative_supervision,
            )
            kept = self._plans[batch] = _KeptPlan(plan, set())
        kept.used_by.add(user)
        return kept.plan

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64: the sum of the weights of all supervised predictions."""
        plan = self._plan_for(batch, "normaliser")
        return (plan.supervised.sum(0) * self.step_weights.double()).sum()

    def forward(
        self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective
    ) -> TrainOutput:
        """Predicts the blocks of one batch.

        Args:
            batch: See `TrainBatch`.
            target_head: The target's frozen head.
            objective: What the predictions are taught by.
        """
        plan = self._plan_for(batch, "forward")
        entries, rope = self._context_entries(batch, plan)

        def evaluate(piece: BlockPlan, entries: Sequence[Tensor]) -> TrainOutput:
            slots = self._slots(batch, piece, entries, rope)
            return self._piece_output(batch, piece, slots, target_head, objective)

        if getattr(objective, "couples_predictions", False):
            output = evaluate(plan, entries)
        else:
            slots = self.config.block_size
            output = train_in_pieces(plan, entries, self._slot_parameters(), evaluate, slots=slots)
        if not self.training:
            output.sums |= rounds_of(batch, output.sums.pop("accepted"))
        return output

    def _slot_parameters(self) -> list[Tensor]:
        """All but those that only the context's entries are made with."""
        of_context = {id(one) for part in (self.fc, self.hidden_norm) for one in part.parameters()}
        return [one for one in self.parameters() if id(one) not in of_context]

    def _first_projections(self, inputs: Tensor) -> Sequence[Tensor]:
        """[blocks, slots, hidden] -> the first layer's `project`: once for all mask tokens."""
        layer, (blocks, slots, _) = self.layers[0], inputs.shape
        if not blocks:
            return layer.self_attn.project(layer.enter(inputs.flatten(0, 1))[0])
        distinct = torch.cat([inputs[:, 0], inputs[0, 1:2]])  # Anchors, then the mask.
        parts = layer.self_attn.project(layer.enter(distinct)[0])
        return [
            torch.cat(
                [part[:blocks, None], part[blocks:].expand(blocks, slots - 1, -1)], 1
            ).flatten(0, 1)
            for part in parts
        ]

    def _piece_output(
        self,
        batch: TrainBatch,
        plan: BlockPlan,
        slots: Tensor,
        target_head: nn.Module,
        objective: Objective,
    ) -> TrainOutput:
        """Loss and sums of blocks whose slots are [blocks, slots, hidden] after the last norm."""
        hidden = slots[:, self.config.first_slot :]  # [blocks, steps, hidden]
        before = self._tokens_before(batch, plan)
        supervised = plan.supervised
        weights = self.step_weights.expand(supervised.shape)[supervised]
        places = plan.places[supervised]
        predictions = Predictions(
            draft_hidden=hidden[supervised][None],
            draft_head_weight=target_head.weight,  # type: ignore[arg-type]
            target_hidden=batch.final_hidden_states.flatten(0, 1)[places],
            target_places=places,
            supervised=torch.ones_like(weights, dtype=torch.bool)[None],
            weights=weights[None],
            draft_to_target=None,
            labels=plan.labels[supervised],
            shares_target_head=True,
            **self._correction_of_predictions(hidden, before, plan),
        )
        output = objective(predictions, target_head)
        sums = block_sums(plan, output, self.step_weights)
        if not self.training:  # There every candidate is an anchor.
            sums["accepted"] = accepted_by_place(batch, plan, output)
        return self._output(hidden, before, plan, output, sums)

    def _tokens_before(self, batch: TrainBatch, plan: BlockPlan) -> Tensor:
        """[blocks, steps] the token before the one that a step predicts: the anchor's, then the
        text's. Where the text has ended it is the anchor's, and nothing is supervised."""
        return batch.input_ids.flatten()[plan.places]

    def _backbone(self, batch: TrainBatch, plan: BlockPlan) -> Tensor:
        """[blocks, slots, hidden] after the last norm."""
        return self._slots(batch, plan, *self._context_entries(batch, plan))

    def _context_entries(self, batch: TrainBatch, plan: BlockPlan) -> tuple[list[Tensor], Rope]:
        """Key and value of every layer in turn, [context, kv_heads, head_dim] each, and a rotary
        table for all positions of the batch and a block behind."""
        positions = batch.position_ids.flatten()
        table = self._rope_table(int(positions.max()) + self.config.block_size)
        seen = positions[plan.context]
        rope = table[0][seen], table[1][seen]
        context = self._context_at(batch, plan.context)
        pairs = [layer.self_attn.keys_values(context, rope) for layer in self.layers]
        return [entry for pair in pairs for entry in pair], table

    def _slots(
        self, batch: TrainBatch, plan: BlockPlan, entries: Sequence[Tensor], table: Rope
    ) -> Tensor:
        """[blocks, slots, hidden] after the last norm, given `_context_entries`."""
        slots = self.config.block_size
        anchors = batch.position_ids.flatten()[plan.anchors]
        places = (anchors[:, None] + torch.arange(slots, device=anchors.device)).flatten()
        rope = table[0][places], table[1][places]
        hidden = self._slot_inputs(batch.input_ids.flatten()[plan.anchors])
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            attention = layer.self_attn
            if index == 0:
                projected = self._first_projections(hidden.unflatten(0, (-1, slots)))
            else:
                projected = attention.project(layer.enter(hidden)[0])
            value = projected[2].unflatten(-1, (-1, attention.head_dim))
            attended = block_attention(
                attention.turn_queries(projected[0], rope).unflatten(0, (-1, slots)),
                attention.turn_keys(projected[1], rope).unflatten(0, (-1, slots)),
                value.unflatten(0, (-1, slots)),
                entries[2 * index],
                entries[2 * index + 1],
                plan=plan,
                window=window,
            )
            hidden = layer.finish(hidden, attended.flatten(0, 1))
        normed = rms_norm(hidden, self.norm.weight, self.norm.variance_epsilon)
        return normed.unflatten(0, (-1, slots))

    # What a method may add.

    def _correction_of_predictions(
        self,
        hidden: Tensor,  # noqa: ARG002
        before: Tensor,  # noqa: ARG002
        plan: BlockPlan,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Arguments of `Predictions` for what is added to the head's logits.

        Args:
            hidden: [blocks, steps, hidden].
            before: [blocks, steps] token ids.
            plan: Of the batch.
        """
        return {}

    def _output(
        self,
        hidden: Tensor,  # noqa: ARG002
        before: Tensor,  # noqa: ARG002
        plan: BlockPlan,  # noqa: ARG002
        output: ObjectiveOutput,
        sums: dict[str, Tensor],
    ) -> TrainOutput:
        """The loss of a batch; methods may add terms."""
        return TrainOutput(output.loss_sum, sums)

    def _proposal(self, hidden: Tensor, logits: Tensor) -> Proposal:  # noqa: ARG002
        """What `propose_tokens` reads.

        Args:
            hidden: [sequences, steps, hidden].
            logits: [sequences, steps, vocab] of the target's head on it.
        """
        return Proposal(logits)

    # Drafting.

    def start(self, max_length: int) -> BlockState:
        """An empty context cache for one sequence of at most `max_length` tokens."""
        limit = self.config.max_position_embeddings
        state = BlockState(SequenceCache(), self._rope_table(0))
        self._reserve(state, min(max_length + self.config.block_size, limit))
        return state

    @torch.no_grad()
    def propose(
        self,
        contexts: Sequence[DraftContext],
        states: Sequence[BlockState],
        *,
        num_draft_tokens: Sequence[int],
        sampling: Sequence[SamplingSettings],
        generators: Sequence[torch.Generator | None],
        tree: BlockTree | None = None,
    ) -> list[Draft]:
        """Reads the committed features and proposes one block per sequence; see `BlockDrafter`.

        A sequence whose block would pass the last position gets no draft, now or later.

        Raises:
            ValueError: a context does not continue what its state has seen.
        """
        drafts = [Draft.nothing(context.token_ids) for context in contexts]
        limit = self.config.max_position_embeddings
        fits = [
            index
            for index, context in enumerate(contexts)
            if context.token_ids.shape[1] - 1 + self.config.block_size <= limit
        ]
        if not fits:
            return drafts
        chosen = [contexts[index] for index in fits]
        hidden = self._read(chosen, [states[index] for index in fits])
        counts = [min(num_draft_tokens[index], self.config.num_steps) for index in fits]
        first = self.config.first_slot
        hidden = hidden[:, first : first + max(counts)]  # [sequences, steps, hidden]
        head = self._target_head[0]
        proposal = self._proposal(hidden, head(hidden.to(head.weight.dtype)))
        how = [sampling[index] for index in fits]
        if tree is None:
            own = [generators[index] for index in fits]
            made = propose_tokens(proposal, chosen, counts=counts, sampling=how, generators=own)
        else:
            made = propose_trees(proposal, chosen, counts=counts, sampling=how, tree=tree)
        for index, draft in zip(fits, made, strict=True):
            drafts[index] = draft
        return drafts

    def _read(self, contexts: Sequence[DraftContext], states: Sequence[BlockState]) -> Tensor:
        """[sequences, slots, hidden] after the last norm, and the context's entries are kept."""
        slots = self.config.block_size
        context, context_rope = self._new_context(contexts, states)
        counts = [one.aux_hidden_states.shape[1] for one in contexts]
        anchors = [one.token_ids.shape[1] - 1 for one in contexts]
        ropes = [
            (state.rope[0][anchor : anchor + slots], state.rope[1][anchor : anchor + slots])
            for state, anchor in zip(states, anchors, strict=True)
        ]
        rope = torch.cat([cos for cos, _ in ropes]), torch.cat([sin for _, sin in ropes])
        hidden = self._slot_inputs(torch.cat([one.token_ids[0, -1:] for one in contexts]))
        layers = zip(self.layers, self.config.windows, strict=True)
        for index, (layer, window) in enumerate(layers):
            inputs, residual = layer.enter(hidden)
            queries = layer.self_attn.queries(inputs, rope).split(slots)
            own = layer.self_attn.keys_values(inputs, rope)
            read = layer.self_attn.keys_values(context, context_rope)
            attended = []
            for row, (state, anchor) in enumerate(zip(states, anchors, strict=True)):
                # The new positions', then the slots', [kv_heads, new, head_dim].
                entries = [
                    torch.cat([new.split(counts)[row], block.split(slots)[row]]).transpose(0, 1)
                    for new, block in zip(read, own, strict=True)
                ]
                seen = state.cache.write(index, state.cache.committed, entries[0], entries[1])
                mask = _visible(anchor, slots, window, hidden.device)
                attended.append(cached_attention(queries[row], *seen, keep_mask=mask))
            hidden = layer.finish(residual, torch.cat(attended))
        for state, count in zip(states, counts, strict=True):
            state.cache.keep(range(count))
        return self.norm(hidden).unflatten(0, (-1, slots))

    def _new_context(
        self, contexts: Sequence[DraftContext], states: Sequence[BlockState]
    ) -> tuple[Tensor, Rope]:
        """[rows, hidden] of the positions committed since the last round, and their rotations."""
        cos, sin = [], []
        for context, state in zip(contexts, states, strict=True):
            length, new = context.token_ids.shape[1], context.aux_hidden_states.shape[1]
            first = length - 1 - new
            if first != state.cache.committed or not new:
                raise ValueError(
                    f"The draft's cache holds {state.cache.committed} committed positions, but the "
                    f"context brings the features of positions {first} to {length - 2}. Pass every "
                    "committed position once, in order, with the state that start() made for this "
                    "sequence."
                )
            self._reserve(state, length - 1 + self.config.block_size)
            cos.append(state.rope[0][first : length - 1])
            sin.append(state.rope[1][first : length - 1])
        features = torch.cat([context.aux_hidden_states[0] for context in contexts])
        return self._context(features.to(self.dtype)), (torch.cat(cos), torch.cat(sin))

    def _reserve(self, state: BlockState, positions: int) -> None:
        """Room for `positions` entries, and rotary tables as long as the cache."""
        if state.cache.reserve(positions, limit=self.config.max_position_embeddings):
            state.rope = self._rope_table(state.cache.capacity)


def _visible(anchor: int, slots: int, window: int | None, device: torch.device) -> Tensor:
    """[slots, anchor + slots] bool, what the slots see of context and block while drafting."""
    total = anchor + slots
    hidden = slots_hidden(slots, window, device)
    if hidden is None or window is None:
        return torch.ones(slots, total, dtype=torch.bool, device=device)
    own = torch.arange(anchor, total, device=device)[:, None]
    context = torch.arange(anchor, device=device) > own - window
    return torch.cat([context, ~hidden], dim=1)
