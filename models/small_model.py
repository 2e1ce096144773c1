"""Small-model draft: any causal language model with the target's tokenizer drafts for it.

Papers: speculative decoding with a smaller model of the family (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318); DistillSpec (arXiv 2310.08461) distils it on the target's answers.

    drafting   the model reads what was committed, then its own tokens, over one key/value cache per
               sequence; entries of accepted tokens are kept, nothing is computed twice
    training   row t reads x_0 .. x_t and predicts x_{t+1}; it is taught by the target's head on the
               target's final hidden state of position t (or by the text itself, objective `ce`),
               where token t+1 is the target's own

The student is the target's own architecture with a few of its layers (embeddings, norms and head
copied), or any existing small model. A finished draft is an ordinary transformers folder, which
every engine loads.

The acceptance of a small model follows the same law at every position, so training computes one
prediction per place. The K steps that are reported read consecutive places as a chain: step j of
the chain that starts at place p is the prediction at place p + j. On greedy answers of the target
that is exactly what decoding will meet.

Differs from DistillSpec: off-policy only, the text is the target's, not the student's.

How to check: tests/test_small_model.py, tests/test_small_model_decoding.py (rounds equal to
transformers' assisted generation).

Axes: batch, seq, hidden (of the small model), vocab (the target's), draft_vocab (the columns of the
small model's head that are target tokens), rows (supervised places), new (tokens being read).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from draftsmith.models.draft_rows import DraftRows
from draftsmith.models.method_options import check_flag, check_integer, check_list, check_objective
from draftsmith.models.packed import PackedModel, Segment
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
from draftsmith.models.simulated_rounds import simulated_rounds
from draftsmith.models.student import (
    drop_soft_capping,
    linear_head_factor,
    spread_layers,
    student_config,
    take_layers,
)
from draftsmith.models.target import TargetHead, TargetModel
from draftsmith.models.target_source import (
    Fingerprint,
    load_tokenizer,
    loading_arguments,
    read_config,
    resolve_target,
)
from draftsmith.models.target_structure import find_structure, first_tensor, text_config_of
from draftsmith.models.tied_names import leave_out_tied_names

DRAFTSMITH_CLASS = "draftsmith.models.small_model.SmallModelDraft"
DEFAULT_LAYERS = 4
"""Layers of a student when nothing is said (our choice)."""
DEFAULT_STEPS = 4
"""Steps that are reported when nothing is said: the evaluator's chain length."""
SPARE_ROWS = 64
"""Room in a new cache for drafted tokens beyond the text (our choice); larger trees grow it."""
UNTRAINED = Fingerprint(weights="untrained", tokenizer="untrained", chat_template="untrained")


@dataclass
class SmallModelState:
    """One sequence's cache and what the draft has read of it."""

    cache: SequenceCache
    """`committed` counts committed tokens that need not be read again; rows lie behind it."""
    rows: DraftRows = field(default_factory=DraftRows)
    seen: int = 0
    """Positions whose target features have been announced: all but the root of the last round."""


class SmallModelDraft(nn.Module):
    """The draft model: `TrainableDraft` for the training loop, `AutoregressiveDraft` for decoding.

    Attributes:
        language_model: The transformers model; its weights are the only ones.
        tokenizer: Its tokenizer.
        aux_layer_ids: (), it reads none of the target's states.
        draft_to_target: None, or 0 .. n - 1 where its head has fewer rows than the target's.
    """

    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, model: TargetModel, *, num_steps: int = DEFAULT_STEPS) -> None:
        """Wraps a loaded model.

        Args:
            model: The small model, loaded as a target is; it keeps its weights.
            num_steps: Draft steps whose acceptance training reports.
        """
        super().__init__()
        self.language_model = model.model
        self.tokenizer: PreTrainedTokenizerBase = model.tokenizer
        self.num_steps = num_steps
        self.max_positions = model.max_positions
        self.draft_to_target: Tensor | None = None
        # A tuple keeps the wrapper's modules, which share the weights, out of the module tree.
        self._wrapped = (model,)
        self._decoder = (find_structure(model.model).decoder,)
        self._target_vocab_size = model.vocab_size
        self._head_factor: float | None = None
        leave_out_tied_names(self)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
    ) -> SmallModelDraft:
        """Loads a small model: a folder, a hub id, a GGUF file or `package:NAME`.

        Args:
            name_or_path: As in `TargetModel.load`.
            dtype: Of the weights; "auto": as stored.
            device: Where to put it.

        Raises:
            ValueError: It cannot be found, loaded or rolled back; says what to do.
        """
        try:
            if dtype == "auto":
                source = resolve_target(name_or_path)
                arguments = loading_arguments(source, trust_remote_code=False, revision=None)
                stored = text_config_of(read_config(name_or_path, source, arguments)).dtype
                dtype = torch.float32 if stored is None else stored
            model = TargetModel.load(name_or_path, dtype=dtype, device=device)
        except ValueError as error:
            raise ValueError(
                f"{name_or_path!r} cannot be loaded as a small draft model, which is loaded as a "
                f"target is: {error}"
            ) from error
        return cls(model)

    @property
    def config(self) -> Any:
        """The transformers configuration; the training loop notes the target in it."""
        return self.language_model.config

    @property
    def chain_only(self) -> bool:
        """It cannot draft trees: it has recurrent layers."""
        return self._wrapped[0].chain_only

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:  # noqa: ARG002
        """Learns the size of the target's vocabulary; the embeddings are this model's own.

        A head padded beyond the target's vocabulary loses those columns, a shorter one proposes
        fewer tokens: with one tokenizer, ids mean the same in both.
        """
        weight = embed_tokens.weight
        assert isinstance(weight, Tensor), "embeddings have a table"
        self._target_vocab_size = len(weight)
        own = self._wrapped[0].vocab_size
        shorter = own < self._target_vocab_size
        self.draft_to_target = torch.arange(own, device=weight.device) if shorter else None

    # Training.

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64: the number of supervised tokens that something precedes."""
        return supervised_next(batch).sum().double()

    def forward(
        self, batch: TrainBatch, *, target_head: nn.Module, objective: Objective
    ) -> TrainOutput:
        """Predicts every supervised token of a batch from the text before it.

        Args:
            batch: See `TrainBatch`; the layer states may be missing (width 0).
            target_head: The target's frozen head.
            objective: What the predictions are taught by.
        """
        places = supervised_next(batch)
        # No mask: padding lies to the right of everything that a causal model may look at.
        hidden = first_tensor(self._decoder[0](input_ids=batch.input_ids, use_cache=False))
        assert hidden is not None, "the probe at load saw the decoder return its states"
        rows = places.flatten().nonzero().squeeze(-1)
        draft_hidden, head_weight = self._head_inputs(hidden.flatten(0, 1).index_select(0, rows))
        supervised = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
        output = objective(
            Predictions(
                draft_hidden=draft_hidden[None],
                draft_head_weight=head_weight,
                target_hidden=batch.final_hidden_states.flatten(0, 1).index_select(0, rows),
                supervised=supervised,
                weights=supervised.float(),
                draft_to_target=self.draft_to_target,
                labels=batch.input_ids.flatten().index_select(0, rows + 1),
            ),
            target_head,
        )
        sums = chain_sums(places, output, num_steps=self.num_steps, walk_rounds=not self.training)
        return TrainOutput(output.loss_sum, sums)

    def _head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States and matrix whose product are the model's logits, bias and scale included.

        Args:
            hidden: [rows, hidden] final hidden states.

        Returns:
            [rows, width] and [draft_vocab, width].
        """
        if self._head_factor is None:
            self._head_factor = linear_head_factor(self._wrapped[0].head())
        head = self._wrapped[0].head()
        weight = head.weight[: self._target_vocab_size]
        if head.bias is not None:
            # One more column that always reads 1: objectives know a matrix only.
            bias = head.bias[: self._target_vocab_size]
            weight = torch.cat([weight, bias[:, None]], dim=1)
            hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        return hidden if self._head_factor == 1.0 else hidden * self._head_factor, weight

    # Saving.

    def saved_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """An ordinary transformers checkpoint: its configuration, and tensors by published name.

        Args:
            weights: All tensors of this module, by its own names.
        """
        config = copy.deepcopy(self.config)
        config.architectures = [type(self.language_model).__name__]
        config.draftsmith_class = DRAFTSMITH_CLASS
        prefix = "language_model."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        return config, revert_weight_conversion(self.language_model, own)

    def save_beside(self, folder: Path) -> None:
        """Writes the tokenizer into the folder of the weights."""
        self.tokenizer.save_pretrained(folder)

    # Drafting.

    def start(self, max_length: int) -> SmallModelState:
        """An empty key/value cache for one sequence of at most `max_length` tokens."""
        positions = min(max_length, self.max_positions)
        packed = PackedModel.of(self._wrapped[0])
        return SmallModelState(packed.new_cache(positions + SPARE_ROWS))

    def max_depth(self, length: int) -> int:
        """Deepest drafted token: the one at depth d is predicted at position length - 2 + d."""
        return max(self.max_positions - length + 1, 0)

    @torch.no_grad()
    def read(self, contexts: Sequence[DraftContext], states: Sequence[SmallModelState]) -> Tensor:
        """Reads committed tokens, except those that were read when drafted; `AutoregressiveDraft`.

        Raises:
            ValueError: A context does not continue what its state has seen.
        """
        segments = []
        for context, state in zip(contexts, states, strict=True):
            length, new = context.token_ids.shape[1], context.final_hidden_states.shape[1]
            cache, first = state.cache, length - 1 - new
            known = cache.committed + len(context.kept_rows)
            if first != state.seen or known >= length:
                raise ValueError(
                    f"The draft has seen {state.seen} positions of this text and keeps the entries "
                    f"of {known} tokens, but the context brings positions {first} to {length - 2} "
                    f"of {length} tokens. Pass every committed position once, in order, with the "
                    "state that start() made for this sequence."
                )
            cache.keep([row - 1 for row in context.kept_rows])  # Row 0 was committed when read.
            state.seen = length - 1
            state.rows.clear()
            cache.reserve(length, limit=length + SPARE_ROWS)
            segments.append(
                Segment(cache, context.token_ids[0, cache.committed :], cache.committed)
            )
        logits = self._run(segments, ends_only=True)
        for segment in segments:
            segment.cache.keep(range(segment.new))
        return logits

    @torch.no_grad()
    def extend(self, states: Sequence[SmallModelState], frontiers: Sequence[Frontier]) -> Tensor:
        """Reads drafted tokens, each after its own ancestors only."""
        segments = []
        for state, frontier in zip(states, frontiers, strict=True):
            cache, new = state.cache, len(frontier.tokens)
            start = cache.committed + state.rows.count
            state.rows.add(frontier)
            cache.reserve(start + new, limit=start + new + SPARE_ROWS)
            depths = state.rows.all_depths()
            # The root, at depth 0, is the last committed token.
            positions = None if depths is None else depths + (cache.committed - 1)
            ancestors = state.rows.new_ancestors(new)
            segments.append(Segment(cache, frontier.tokens, start, positions, ancestors))
        return self._run(segments, ends_only=False)

    def _run(self, segments: Sequence[Segment], *, ends_only: bool) -> Tensor:
        """[segments or rows, draft_vocab] logits below each segment's last token, or below all."""
        packed = PackedModel.of(self._wrapped[0])
        output = packed.forward(segments, logits="last" if ends_only else "all")
        assert output.logits is not None, "logits were asked for"
        return output.logits[0, :, : self._target_vocab_size]


# --- training: places and chains ------------------------------------------------------------------


def supervised_next(batch: TrainBatch) -> Tensor:
    """[batch, seq] bool: the token after this place is the target's own, so it is taught here."""
    places = torch.zeros_like(batch.supervised_mask)
    places[:, :-1] = (batch.supervised_mask & batch.keep_mask)[:, 1:]
    return places


def chain_sums(
    places: Tensor, output: ObjectiveOutput, *, num_steps: int, walk_rounds: bool = False
) -> dict[str, Tensor]:
    """The sums of `TrainOutput` for chains that read consecutive places.

    A chain starts at every supervised place; its step j is the prediction j places on, and it ends
    before the first place that is not supervised.

    Args:
        places: [batch, seq] bool, the supervised places.
        output: Of one step, [1, rows]: a row per supervised place, in order.
        num_steps: Steps per chain.
        walk_rounds: Walk through the rounds too (models/simulated_rounds.py).
    """

    def by_place(values: Tensor) -> Tensor:
        """[rows] -> [batch, seq + num_steps], 0 elsewhere."""
        spread = torch.zeros_like(places, dtype=torch.float64)
        spread[places] = values.double()
        return F.pad(spread, (0, num_steps))

    seq = places.shape[1]
    reached = by_place(torch.ones_like(output.acceptance[0]))
    values = {
        "supervised": reached,
        "in_vocabulary": by_place(output.in_vocabulary),
        "correct": by_place(output.correct[0]),
        "acceptance": by_place(output.acceptance[0]),
    }
    alive, greedy, sampled = (torch.ones_like(places, dtype=torch.float64) for _ in range(3))
    sums: dict[str, list[Tensor]] = {name: [] for name in (*values, "greedy", "sampled")}
    accepted = torch.zeros_like(alive)
    for step in range(num_steps):
        here = {name: value[:, step : step + seq] for name, value in values.items()}
        alive = alive * here["supervised"]
        greedy = greedy * here["correct"]
        sampled = sampled * here["acceptance"]
        accepted += greedy
        for name, value in here.items():
            sums[name].append((value * alive).sum())
        sums["greedy"].append(greedy.sum())
        sums["sampled"].append(sampled.sum())
    stacked = {name: torch.stack(values) for name, values in sums.items()}
    rounds = simulated_rounds(places, accepted) if walk_rounds else {}
    return (
        rounds
        | {
            # One prediction serves every step, and so does its loss.
            "loss": output.step_loss_sums.double().expand(num_steps),
            "chains": places.sum().double(),
            "greedy_joint": stacked.pop("greedy"),
            "sampled_joint": stacked.pop("sampled"),
        }
        | stacked
    )


# --- tokenizers -----------------------------------------------------------------------------------


def check_same_tokenizer(
    own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, *, name: str, target_name: str
) -> None:
    """Insists that two tokenizers give the same ids to the same tokens, added ones included.

    Args:
        own: Of the small model.
        target: Of the target.
        name: The small model's, for the message.
        target_name: The target's.

    Raises:
        ValueError: They differ; shows a few entries that do.
    """
    ours, theirs = own.get_vocab(), target.get_vocab()
    differing = [token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)]
    if not differing:
        return
    differing.sort(key=lambda token: (theirs.get(token, ours.get(token, 0)), token))
    shown = "; ".join(
        f"{token!r} is {ours.get(token, 'missing')} there and {theirs.get(token, 'missing')} here"
        for token in differing[:4]
    )
    raise ValueError(
        f"The draft model {name} has another tokenizer than the target {target_name}: "
        f"{len(differing)} of {len(theirs)} entries differ ({shown}). A small-model draft must "
        "share the target's tokenizer, entry by entry; text is not translated between two "
        "tokenizers. Use a smaller model of the same family, or make one of the target itself "
        "(draftsmith-train method=small_model)."
    )


# --- the method -----------------------------------------------------------------------------------


@dataclass
class SmallModelMethod:
    """The `method` node of a run: where the student comes from and how it is trained."""

    num_hidden_layers: int | None = None
    """Layers of a student cut from the target, spread evenly, first and last included; null: 4."""
    layers: list[int] | None = None
    """These layers of the target instead (0-based, ascending)."""
    init_from_target: bool = True
    """Copy layers, embeddings, norms and head from the target; false: draw everything at random."""
    student: str | None = None
    """Start from this model instead (folder, hub id, GGUF file; the target's tokenizer)."""
    freeze_embeddings: bool = False
    """Train neither the embeddings nor the head: most of a small model's weights, and the costliest
    gradient."""
    num_steps: int = DEFAULT_STEPS
    """Draft steps whose acceptance is reported; training is the same for any number."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "kl"})
    """Objective by name with its options (train/objectives.py)."""
    builds_from_target: ClassVar[bool] = True
    """`build` is told how to load the target."""
    aux_layer_ids: list[int] = field(default_factory=list, init=False)
    """No layer of the target is read: its final hidden states alone teach."""
    draft_vocab_size: None = field(default=None, init=False)
    """All of the target's tokens."""

    def __post_init__(self) -> None:
        check_integer("method.num_hidden_layers", self.num_hidden_layers, optional=True)
        check_integer("method.num_steps", self.num_steps)
        for name in ("init_from_target", "freeze_embeddings"):
            check_flag(f"method.{name}", getattr(self, name))
        if self.layers is not None:
            check_list("method.layers", self.layers, int)
        cut = {"num_hidden_layers": self.num_hidden_layers, "layers": self.layers}
        given = [f"method.{name}" for name, value in cut.items() if value is not None]
        if len(given) == 2 or (given and self.student is not None):
            both = " and ".join([*given, *(["method.student"] if self.student else [])])
            raise ValueError(f"{both} each say which layers the student has. Set one of them.")
        if self.freeze_embeddings and self.student is None and not self.init_from_target:
            raise ValueError(
                "method.freeze_embeddings would keep random embeddings: "
                "method.init_from_target is false. Set one of them."
            )
        check_objective(self.objective)

    def chosen_layers(self, num_target_layers: int) -> list[int]:
        """The target's layers that a student is cut from."""
        count = self.num_hidden_layers or min(DEFAULT_LAYERS, num_target_layers)
        return self.layers or spread_layers(num_target_layers, count)

    def validate(self, num_target_layers: int, vocab_size: int) -> None:  # noqa: ARG002 (protocol)
        """Checks the settings against a target, before any weight is loaded.

        Raises:
            ValueError: A layer does not exist, or more are asked for than the target has.
        """
        if self.student is not None:
            return
        layers = self.chosen_layers(num_target_layers)
        ascending = layers == sorted(set(layers))
        if not ascending or layers[0] < 0 or layers[-1] >= num_target_layers:
            raise ValueError(
                f"method.layers or method.num_hidden_layers asks for layers {layers}, but the "
                f"target has {num_target_layers} (0 to {num_target_layers - 1}). Give distinct "
                "ascending layers, at most as many as there are."
            )

    def build(
        self,
        target_head: TargetHead,
        vocabulary: None,
        aux_layer_ids: Sequence[int],
        *,
        target: Mapping[str, Any],
    ) -> SmallModelDraft:
        """Makes the student, float32, on the CPU.

        Args:
            target_head: Config and embeddings of the target.
            vocabulary: None, the student proposes every token.
            aux_layer_ids: (), it reads no layer.
            target: How the target is loaded (the arguments of `TargetModel.load`).
        """
        assert vocabulary is None, "draft_vocab_size is always null"
        assert not aux_layer_ids, "aux_layer_ids is always empty"
        model, tokenizer = self._start(target_head, target)
        wrapped = TargetModel(
            model.float().eval().requires_grad_(False),
            tokenizer,
            name_or_path=f"student of {target['name_or_path']}",
            fingerprint=UNTRAINED,
        )
        model.requires_grad_(True)
        if self.freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            model.get_output_embeddings().requires_grad_(False)
        draft = SmallModelDraft(wrapped, num_steps=self.num_steps)
        draft._head_factor = linear_head_factor(wrapped.head())
        draft.attach_target(embed_tokens=target_head.embed_tokens)
        return draft

    def _start(
        self, target_head: TargetHead, target: Mapping[str, Any]
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The student before training, and its tokenizer."""
        name, trusted = target["name_or_path"], target["trust_remote_code"]
        layers = self.chosen_layers(target_head.config.num_hidden_layers)
        if self.student is None and self.init_from_target:
            # The whole target, on the CPU: transformers finds its tensors by name in any family.
            place = {"device": "cpu", "attn_implementation": "sdpa"}
            whole = TargetModel.load(**(dict(target) | place))
            return take_layers(whole.model, layers), whole.tokenizer
        source = resolve_target(name)
        arguments = loading_arguments(
            source, trust_remote_code=trusted, revision=target["revision"]
        )
        tokenizer = load_tokenizer(name, source, arguments)
        if self.student is not None:
            small = SmallModelDraft.load(self.student, dtype="float32")
            check_same_tokenizer(small.tokenizer, tokenizer, name=self.student, target_name=name)
            drop_soft_capping(text_config_of(small.config))
            return small.language_model, small.tokenizer
        config = student_config(target_head.config, layers)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer
