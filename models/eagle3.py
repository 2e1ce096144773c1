"""EAGLE-3: a one-layer draft over several target layers, trained by unrolling its own chain.

Paper: EAGLE-3 (arXiv 2503.01840), section 3; published code SafeAILab/EAGLE at cb7e084.

    g_t = fc([a_low ; a_mid ; a_high]_t)          features of position t, for the first step
    a   = [input_layernorm(embedding of token t+1) ; hidden_norm(g_t)]
    r   = g_t + o_proj(attention(a))              residual: the un-normed feature
    u   = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(u))                     for token t+2, over the draft vocabulary
    next step: g = u (before the norm; after it with `norm_output`), fc is skipped

Training unrolls `num_steps` such steps at every supervised slot, reading the true tokens and
feeding back the draft's own states (models/ttt_slots.py has the shift table,
models/ttt_attention.py the visible keys). Drafting runs the same layers over a key/value cache.

Differs from the published code: any number of feature layers and draft layers, the target's own
rotary scaling, the loss mask aligned to the label (option: as published), work only at supervised
slots. Further layers than the first are ordinary ones that see no embedding.

Check: tests/test_golden_eagle3.py (recorded numbers of four implementations), tests/test_eagle3.py.

Axes: batch, seq, hidden, heads, kv_heads, head_dim, draft_vocab, vocab, rows (any gathered slots).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.draft_reader import DraftState, RowsToRead, run_layers
from draftsmith.models.draft_sizes import draft_layer_sizes
from draftsmith.models.method_options import (
    check_choice,
    check_flag,
    check_integer,
    check_list,
    check_number,
)
from draftsmith.models.protocols import (
    DraftContext,
    Frontier,
    Objective,
    Predictions,
    TrainBatch,
    TrainOutput,
)
from draftsmith.models.sequence_cache import SequenceCache
from draftsmith.models.target import TargetHead, validate_aux_layer_ids
from draftsmith.models.ttt_attention import ttt_attention
from draftsmith.models.ttt_slots import (
    MASK_ALIGNMENTS,
    SlotPlan,
    plan_slots,
    prediction_sums,
    supervised_places,
)
from draftsmith.models.vocabulary_map import (
    draft_to_target,
    has_reduced_vocabulary,
    register_vocabulary_buffers,
    set_draft_vocabulary,
)

NORMALISATIONS = ("supervised", "batch_tokens")


@strict
class Eagle3Config(LlamaConfig):
    """A Llama layer's sizes plus what EAGLE-3 adds; `vocab_size` is the target's."""

    model_type = "draftsmith_eagle3"

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    """Rows of the draft's own head; None: as many as the target's vocabulary."""
    target_hidden_size: int | None = None
    """Width of one target layer's state and of its embeddings; equal to hidden_size."""
    aux_layer_ids: list[int] | None = None
    """0-based target layers whose outputs are read, ascending (-1: the embeddings)."""
    qk_norm: bool = False
    """RMS norms on queries and keys, as in Qwen3."""
    norm_output: bool = False
    """Feed back the state after `norm` instead of before it (EAGLE-3.1)."""
    step_weights: list[float] | None = None
    """Loss weight of each unrolled step; None (a checkpoint of unknown training): 0.8**step, 7."""
    mask_alignment: str = "label"
    """See models/ttt_slots.py."""
    normalisation: str = "supervised"
    """What the loss sum is divided by, see `Eagle3Method`."""
    target_fingerprint: dict[str, str] | None = None
    """Of the target that this draft was trained for."""
    draftsmith_class: str = "draftsmith.models.eagle3.Eagle3Draft"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = False
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.step_weights is None:
            self.step_weights = [0.8**step for step in range(7)]
        if self.aux_layer_ids is None:
            self.aux_layer_ids = []

    def validate_architecture(self) -> None:
        """Replaces Llama's check: with its own head_dim, heads need not divide hidden_size."""
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )


class Eagle3Draft(PreTrainedModel):
    """The draft model: `TrainableDraft` for the training loop, `Drafter` for the decoder."""

    config_class = Eagle3Config
    config: Eagle3Config
    layers: Sequence[DraftLayer]  # An nn.ModuleList, typed by what it holds.
    # Empty: layers are called in parts, so a wrapper around a layer would never see its forward.
    _no_split_modules: list[str] = []

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        if config.target_hidden_size != size:
            raise ValueError(
                f"hidden_size is {size}, but the target's is {config.target_hidden_size}: the "
                "draft shares the target's embeddings, so its width must be the same."
            )
        if not config.aux_layer_ids:
            raise ValueError("aux_layer_ids is empty; expected the target layers to read.")
        assert config.draft_vocab_size is not None, "set by the config class"
        self.fc = nn.Linear(len(config.aux_layer_ids) * size, size, bias=False)
        layers = [
            DraftLayer(config, reads_tokens=index == 0) for index in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        register_vocabulary_buffers(
            self, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
        )
        self._target_embeddings: tuple[nn.Module, ...] = ()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Variance-preserving at any width: 0.02 is small for narrow drafts, large for wide ones.
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs this draft reads, ascending."""
        return tuple(self.config.aux_layer_ids or ())

    @property
    def step_weights(self) -> list[float]:
        """Loss weight per unrolled step; its length is the number of steps."""
        assert self.config.step_weights is not None, "set by the config"
        return self.config.step_weights

    def attach_target(self, *, embed_tokens: nn.Module) -> None:
        """Shares the target's frozen embeddings.

        A tuple keeps them out of the module tree: no optimizer, wrapper or checkpoint sees them.
        """
        self._target_embeddings = (embed_tokens,)

    @torch.no_grad()
    def copy_head(self, target_head: TargetHead) -> None:
        """Starts `lm_head` as the target's rows of the draft vocabulary.

        `norm` stays at ones: with the target's norm weights an untrained draft is confidently wrong
        (SmolLM2-135M, 3 steps: first loss 54 instead of 28, and behind after 30 updates).
        """
        ids = draft_to_target(self)
        rows = (
            target_head.weight
            if ids is None
            else target_head.weight[ids.to(target_head.weight.device)]
        )
        self.lm_head.weight.copy_(rows)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if not self._target_embeddings:
            raise ValueError(
                "The draft has no embeddings yet: call attach_target(embed_tokens=...) first."
            )
        with torch.no_grad():
            return self._target_embeddings[0](token_ids).to(self.fc.weight.dtype)

    def _rope_table(self, positions: int) -> Rope:
        """cos and sin of positions 0..positions-1: [positions, 1, head_dim] each."""
        place = self.fc.weight
        ids = torch.arange(positions, device=place.device)
        cos, sin = self.rotary_emb(place, ids[None])  # [1, positions, head_dim]
        return cos.transpose(0, 1), sin.transpose(0, 1)

    # Training.

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
        output = objective(self._predictions(batch, plan), target_head)
        return TrainOutput(output.loss_sum, prediction_sums(plan, output))

    def _predictions(self, batch: TrainBatch, plan: SlotPlan) -> Predictions:
        """Arranges the unrolled states by target place."""
        states = self._unroll(batch, plan)
        hidden = torch.stack(  # [steps, rows, hidden]
            [
                state.index_select(0, rows)
                for state, rows in zip(states, plan.row_slots, strict=True)
            ]
        )
        weights = torch.tensor(self.step_weights, device=hidden.device)
        return Predictions(
            draft_hidden=hidden if self.config.norm_output else self.norm(hidden),
            draft_head_weight=self.lm_head.weight,
            target_hidden=batch.final_hidden_states.flatten(0, 1).index_select(0, plan.places),
            supervised=plan.supervised,
            weights=plan.supervised * weights[:, None],
            draft_to_target=draft_to_target(self),
        )

    def _unroll(self, batch: TrainBatch, plan: SlotPlan) -> list[Tensor]:
        """The fed-back state of each step, [active, hidden]."""
        positions = batch.position_ids.flatten()
        steps = len(self.step_weights)
        cos, sin = self._rope_table(int(positions.max()) + steps)
        embedded = self._embed(batch.input_ids.flatten())
        tokens = self.layers[0].input_layernorm(embedded)  # [batch * seq, hidden], for all steps
        chains = [_Chain(layer) for layer in self.layers]
        hidden = self.fc(batch.aux_hidden_states.flatten(0, 1).index_select(0, plan.pairs))
        at = positions[plan.pairs]
        hidden = self._first_step(
            hidden, tokens.index_select(0, plan.pairs + 1), (cos[at], sin[at]), plan, chains,
            grid=batch.input_ids.shape,
        )  # fmt: skip
        states = [self._fed_back(hidden)]
        for step in range(1, steps):
            at = positions[plan.active] + step
            read = tokens.index_select(0, plan.step_positions[step])
            hidden, rope = states[-1], (cos[at], sin[at])
            for chain in chains:
                hidden = chain.step(hidden, read, rope, plan.active)
            states.append(self._fed_back(hidden))
        return states

    def _first_step(
        self,
        hidden: Tensor,
        read: Tensor,
        rope: Rope,
        plan: SlotPlan,
        chains: list[_Chain],
        *,
        grid: torch.Size,
    ) -> Tensor:
        """Step 0: keys of all pairs, queries of the last layer only where a slot is unrolled."""
        for chain in chains:
            layer = chain.layer
            states = layer.attention_input(hidden, read)
            key, value = layer.self_attn.keys_values(states, rope)
            chain.set_block(key, value, plan.pairs, grid)
            slots = plan.pairs
            if chain is chains[-1]:
                slots, at = plan.active, plan.active_pairs
                states, hidden = states.index_select(0, at), hidden.index_select(0, at)
                rope = rope[0].index_select(0, at), rope[1].index_select(0, at)
            query = layer.self_attn.queries(states, rope)
            hidden = layer.finish(hidden, chain.attend(query, slots))
        return hidden

    def _fed_back(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    # Drafting.

    @property
    def draft_to_target(self) -> Tensor | None:
        """[draft_vocab] absolute target ids of the head's rows; None for the full vocabulary."""
        return draft_to_target(self)

    def start(self, max_length: int) -> DraftState:
        """An empty key/value cache for one sequence of at most `max_length` tokens."""
        state = DraftState(SequenceCache(), self._rope_table(0))
        self._reserve(state, min(max_length, self.config.max_position_embeddings))
        return state

    def max_depth(self, length: int) -> int:
        """Deepest drafted token: the one at depth d comes from position length - 3 + d."""
        return max(self.config.max_position_embeddings - length + 2, 0)

    @torch.no_grad()
    def read(self, contexts: Sequence[DraftContext], states: Sequence[DraftState]) -> Tensor:
        """Reads the committed pairs (feature t, token t+1); see `AutoregressiveDraft`.

        Raises:
            ValueError: if a context does not continue what its state has seen.
        """
        reads = []
        for context, state in zip(contexts, states, strict=True):
            length, new = context.token_ids.shape[1], context.aux_hidden_states.shape[1]
            first = length - 1 - new
            if first != state.cache.committed or not new:
                raise ValueError(
                    f"The draft's cache holds {state.cache.committed} committed pairs, but the "
                    f"context brings the features of positions {first} to {length - 2}. Pass every "
                    "committed position once, in order, with the state that start() made for this "
                    "sequence."
                )
            state.rows.clear()
            self._reserve(state, length - 1)
            reads.append(RowsToRead(state, context.token_ids[0, first + 1 :], first, new))
        features = torch.cat([context.aux_hidden_states[0] for context in contexts])
        hidden = self._run(reads, self.fc(features.to(self.fc.weight.dtype)), ends_only=True)
        for row, read in enumerate(reads):
            read.state.cache.keep(range(read.new))
            read.state.hidden = hidden[row : row + 1]
        return self._head(hidden)

    @torch.no_grad()
    def extend(self, states: Sequence[DraftState], frontiers: Sequence[Frontier]) -> Tensor:
        """Reads drafted tokens with the fed-back states of their parents."""
        reads = []
        hidden = []
        for state, frontier in zip(states, frontiers, strict=True):
            assert state.hidden is not None, "read() comes first"
            start = state.cache.committed + state.rows.count
            state.rows.add(frontier)
            new = len(frontier.tokens)
            self._reserve(state, start + new)
            reads.append(RowsToRead(state, frontier.tokens, start, new))
            parents = state.hidden[-1:] if frontier.is_chain else state.hidden[frontier.parents]
            hidden.append(parents)
        fed_back = self._run(reads, torch.cat(hidden), ends_only=False)
        first = 0
        for read in reads:
            own = fed_back[first : first + read.new]
            first += read.new
            assert read.state.hidden is not None, "read() comes first"
            read.state.hidden = torch.cat([read.state.hidden, own])
        return self._head(fed_back)

    def _reserve(self, state: DraftState, positions: int) -> None:
        """Room for `positions` entries, and rotary tables as long as the cache."""
        if state.cache.reserve(positions, limit=self.config.max_position_embeddings):
            state.rope = self._rope_table(state.cache.capacity)

    def _run(self, reads: Sequence[RowsToRead], hidden: Tensor, *, ends_only: bool) -> Tensor:
        """Fed-back states, [rows or sequences, hidden]; see `run_layers`."""
        ids = reads[0].tokens if len(reads) == 1 else torch.cat([read.tokens for read in reads])
        tokens = self.layers[0].input_layernorm(self._embed(ids))
        return self._fed_back(run_layers(self.layers, reads, hidden, tokens, ends_only=ends_only))

    def _head(self, fed_back: Tensor) -> Tensor:
        """[rows, draft_vocab] logits."""
        return self.lm_head(fed_back if self.config.norm_output else self.norm(fed_back))


class _Chain:
    """One layer during the training-time test: its step-0 block and its slots' own entries."""

    def __init__(self, layer: DraftLayer) -> None:
        self.layer = layer
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def set_block(self, key: Tensor, value: Tensor, pairs: Tensor, grid: torch.Size) -> None:
        """Places the keys and values [pairs, kv_heads, head_dim] of step 0 in their rows."""
        self.block_key, self.block_value = (
            rows.new_zeros(grid.numel(), *rows.shape[1:])
            .index_copy(0, pairs, rows)
            .unflatten(0, grid)
            .transpose(1, 2)
            for rows in (key, value)
        )

    def attend(self, query: Tensor, slots: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> the same, over the block and the own entries so far."""
        return ttt_attention(
            query, self.block_key, self.block_value, self.keys, self.values, slots=slots
        )

    def step(self, hidden: Tensor, read: Tensor, rope: Rope, slots: Tensor) -> Tensor:
        """One unrolled step >= 1 of this layer: [active, hidden] -> [active, hidden]."""
        states = self.layer.attention_input(hidden, read)
        key, value = self.layer.self_attn.keys_values(states, rope)
        self.keys.append(key)
        self.values.append(value)
        query = self.layer.self_attn.queries(states, rope)
        return self.layer.finish(hidden, self.attend(query, slots))


class HasDraftToTarget(Protocol):
    """A draft vocabulary (data/vocabulary.py)."""

    draft_to_target: Tensor
    """[draft_vocab] int64 absolute target ids, ascending."""


_SIZES = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass
class Eagle3Method:
    """The `method` node of a run: sizes of the draft and how it is trained. null: the target's."""

    aux_layer_ids: list[int] | None = None
    """Target layers to read (0-based outputs, ascending); null: an early, a middle and a late one,
    (1, N // 2 - 1, N - 4) of N layers, as in EAGLE-3."""
    draft_vocab_size: int | None = 32000
    """Tokens that the draft can propose, the most frequent ones (EAGLE-3: 32000); null: all."""
    num_hidden_layers: int = 1
    """Draft layers. Engines serve one; more cost more per drafted token."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads."""
    head_dim: int | None = None
    """Width of one head."""
    max_position_embeddings: int | None = None
    """Longest context in tokens; drafting stops there."""
    qk_norm: bool = False
    """RMS norms on queries and keys (Qwen3-type layer)."""
    attention_bias: bool = False
    """Biases on q, k, v and o (not every engine loads them)."""
    norm_output: bool = False
    """Feed back the normed state (EAGLE-3.1) instead of the raw one (EAGLE-3)."""
    num_steps: int = 7
    """Draft steps unrolled in training (EAGLE-3: 7)."""
    step_decay: float = 0.8
    """Step j of the loss weighs step_decay**j (EAGLE-3: 0.8)."""
    step_weights: list[float] | None = None
    """Own weight per step instead of step_decay; num_steps entries."""
    mask_alignment: str = "label"
    """label: a prediction is taught where its label token is the target's own. feature: as EAGLE,
    SpecForge and DeepSpec, two tokens off (models/ttt_slots.py)."""
    normalisation: str = "supervised"
    """supervised: divide the loss by the number of taught first-step predictions. batch_tokens: by
    batch x sequence, padding and prompts included, as the published implementations."""
    init_head: str = "target"
    """target: the head starts as the target's rows. random: drawn at random (EAGLE-3)."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "kl"})
    """Objective by name with its options (train/objectives.py: kl, lk_lambda, tv)."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_steps"):
            check_integer(f"method.{name}", getattr(self, name))
        for name in (*_SIZES, "draft_vocab_size"):
            check_integer(f"method.{name}", getattr(self, name), optional=True)
        for name in ("qk_norm", "attention_bias", "norm_output"):
            check_flag(f"method.{name}", getattr(self, name))
        check_number("method.step_decay", self.step_decay, above=0.0, most=1.0)
        check_choice("method.mask_alignment", self.mask_alignment, MASK_ALIGNMENTS)
        check_choice("method.normalisation", self.normalisation, NORMALISATIONS)
        check_choice("method.init_head", self.init_head, ("target", "random"))
        if self.aux_layer_ids is not None:
            check_list("method.aux_layer_ids", self.aux_layer_ids, int)
        if self.step_weights is not None:
            check_list("method.step_weights", self.step_weights, float)
            if len(self.step_weights) != self.num_steps or min(self.step_weights) < 0:
                raise ValueError(
                    f"method.step_weights is {self.step_weights}, expected {self.num_steps} "
                    "numbers >= 0, one per step (method.num_steps)."
                )
        if not isinstance(self.objective, dict) or not isinstance(self.objective.get("name"), str):
            raise ValueError(
                f"method.objective is {self.objective!r}, expected a mapping with a name, for "
                "example {name: kl}."
            )

    def validate(self, num_target_layers: int, vocab_size: int) -> None:
        """Checks the settings against a target, before any weight is loaded.

        Raises:
            ValueError: if a layer does not exist or the draft vocabulary is too large.
        """
        if self.aux_layer_ids is not None:
            validate_aux_layer_ids(self.aux_layer_ids, num_target_layers)
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"method.draft_vocab_size is {self.draft_vocab_size}, but the target has "
                f"{vocab_size} tokens. Lower it, or set it to null for the full vocabulary."
            )

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],
    ) -> Eagle3Draft:
        """Makes a draft model for a target, float32, with the target's embeddings attached.

        Args:
            target_head: Config, embeddings, head and final norm of the target.
            vocabulary: The draft vocabulary, or None for the full one.
            aux_layer_ids: The layers read.
        """
        overrides = {name: getattr(self, name) for name in _SIZES}
        ids = None if vocabulary is None else vocabulary.draft_to_target
        config = Eagle3Config(
            **draft_layer_sizes(target_head.config, overrides),
            num_hidden_layers=self.num_hidden_layers,
            vocab_size=target_head.vocab_size,
            draft_vocab_size=target_head.vocab_size if ids is None else len(ids),
            aux_layer_ids=list(aux_layer_ids),
            qk_norm=self.qk_norm,
            attention_bias=self.attention_bias,
            norm_output=self.norm_output,
            step_weights=self.step_weights
            or [self.step_decay**step for step in range(self.num_steps)],
            mask_alignment=self.mask_alignment,
            normalisation=self.normalisation,
        )
        draft = Eagle3Draft(config)
        draft.layers[0].self_attn.focus_on_own_slot(config.hidden_size)
        if ids is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, ids)
        if self.init_head == "target":
            draft.copy_head(target_head)
        draft.attach_target(embed_tokens=target_head.embed_tokens)
        return draft
