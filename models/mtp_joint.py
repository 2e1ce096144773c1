"""Joint training: a language model and its MTP modules, one loss.

Paper: DeepSeek-V3 (arXiv 2412.19437), section 2.2, equations 21 to 25. With T supervised tokens
that something precedes, D depths and the modules of models/mtp_module.py:

    L_main = (1/T) sum over places q of       -log p(token q+1 | main model at q)
    L_k    = (1/T) sum over places q > k of   -log p(token q+1 | depth k of slot q-1-k)
    L      = L_main + lambda (1/D) sum_k L_k

k counts from 0 here, from 1 in the paper. The equal weights 1/D can be given per depth
(`step_weights`); lambda may change over the run (`mtp_weight`; published: 0.3, then 0.1). Every
term is divided by T, as in the paper, although depth k lacks the first k+1 places of each text; the
logged `main_loss` and `mtp_loss` are means over the predictions that exist.

Embeddings and head belong to the language model and are read by both. Gradients of the MTP losses
reach them and all layers, as in the paper; `detach_trunk` stops them there (slime, AReaL), so that
only the modules learn from them.

A supervised token is the label of its main prediction and of one prediction per depth, whatever
tokens the slot stands on; so the supervised set of depth k is the loss mask, moved k + 1 places.
No prediction crosses the end of a document: a row holds one document, and a row in which positions
restart is taken apart into its documents first (`documents_as_rows`).

With `mtp_weight: 0` the modules are frozen and do not run in training: weights and losses are those
of a training without modules, bit for bit. Acceptance is measured against the main model's own most
likely token at that place, in the same forward, so that the simulated accepted length means what it
means for the other methods.

Not here: load balancing losses of routed models; distillation of the depths (the post-hoc method
has it).

Check: tests/test_mtp_joint.py writes the formula out; tests/test_mtp_joint_run.py trains runs.

Axes: batch, seq, hidden, vocab, depths, rows (supervised places).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from draftsmith.models.method_options import check_flag
from draftsmith.models.mtp import DepthwiseMtpDraft, MtpDraft, MtpMethod
from draftsmith.models.protocols import Objective, Predictions, TrainBatch, TrainOutput
from draftsmith.models.small_model import supervised_next
from draftsmith.models.target import TargetHead, TargetModel, fingerprint_target
from draftsmith.models.target_structure import find_structure, first_tensor
from draftsmith.models.tied_names import leave_out_tied_names
from draftsmith.models.ttt_slots import SlotPlan, plan_slots, prediction_sums

PUBLISHED_WEIGHT = 0.3
"""DeepSeek-V3: 0.3 for the first 10 of 14.8 trillion tokens, then 0.1."""

Schedule = list[tuple[float, float]]
"""(share of the run from which on, weight), ascending, the first from 0."""


# --- the modules ----------------------------------------------------------------------------------


class _SharesTrunk(MtpDraft):
    """Embeddings that learn, unless gradients are to stop there."""

    detach_trunk: bool = False

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = self._target_embeddings[0](token_ids)
        return (embedded.detach() if self.detach_trunk else embedded).to(self.dtype)

    def unrolled(self, batch: TrainBatch, plan: SlotPlan, head: TargetHead) -> Tensor:
        """[depths, rows, hidden] what the head reads; zeros where a depth has no prediction."""
        made = []
        states = self._unroll(batch, plan, head)
        for state, slots, exists in zip(states, plan.row_slots, plan.supervised, strict=True):
            # One row more: a text of two tokens has a place, but no slot.
            padded = F.pad(self._head_input(state), (0, 0, 0, 1))  # [active + 1, hidden]
            made.append(padded.index_select(0, torch.where(exists, slots, len(state))))
        return torch.stack(made)


class _JointChain(_SharesTrunk):
    """One module, applied again and again."""


class _JointDepths(_SharesTrunk, DepthwiseMtpDraft):
    """A cache, and perhaps a module, per depth."""


def documents_as_rows(batch: TrainBatch) -> TrainBatch:
    """A batch with one document per row, padded on the right.

        positions [0 1 2 0 1] tokens [10 11 12 20 21]  ->  [10 11 12], [20 21 -]

    Only tokens and masks are taken over: joint training reads no states. A batch of single
    documents is handed back as it is.
    """
    starts = (batch.position_ids == 0) & batch.keep_mask
    if not bool(starts[:, 1:].any()):
        return batch
    starts[:, 0] = batch.keep_mask[:, 0]
    keep = batch.keep_mask.flatten()
    begins = starts.flatten()[keep].nonzero().squeeze(-1)
    lengths = begins.diff(append=keep.sum()[None])  # [documents]

    def rows(values: Tensor) -> Tensor:
        return pad_sequence(values.flatten()[keep].split(lengths.tolist()), batch_first=True)

    input_ids = rows(batch.input_ids)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return TrainBatch(
        input_ids=input_ids,
        supervised_mask=rows(batch.supervised_mask),
        keep_mask=positions < lengths[:, None],
        position_ids=positions,
        aux_hidden_states=batch.aux_hidden_states[:0],
        final_hidden_states=batch.final_hidden_states[:0],
    )


# --- the model ------------------------------------------------------------------------------------


class JointMtp(nn.Module):
    """A `TrainableDraft` that is its own target.

    Attributes:
        trunk: The language model.
        mtp: The modules, a draft of models/mtp.py.
        tokenizer: The language model's.
    """

    def __init__(
        self, target: TargetModel, mtp: MtpDraft, *, schedule: Schedule, detach_trunk: bool
    ) -> None:
        """Ties modules to a language model; most callers use `JointMtpMethod.build`.

        Args:
            target: The language model in float32; it is thawed and keeps its weights.
            mtp: Modules for it, not attached to anything yet.
            schedule: Weight of the MTP losses.
            detach_trunk: Stop the gradients of the MTP losses at the language model.

        Raises:
            ValueError: The language model cannot be trained here.
        """
        super().__init__()
        _check_trainable(target)
        self.trunk: PreTrainedModel = target.model.requires_grad_(True)
        self.tokenizer = target.tokenizer
        made = _JointDepths if isinstance(mtp, DepthwiseMtpDraft) else _JointChain
        self.mtp = made(mtp.config)
        self.mtp.load_state_dict(mtp.state_dict())
        self.mtp.detach_trunk = detach_trunk
        self.schedule = schedule
        self.mtp_weight = schedule[0][1]
        self.runs_modules = any(weight > 0.0 for _, weight in schedule)
        # Parameters without a gradient would keep DDP waiting for them.
        self.mtp.requires_grad_(self.runs_modules)
        # Tuples keep these out of the module tree: they share the weights of the trunk.
        self._decoder = (find_structure(target.model).decoder,)
        self._head = (target.head(),)
        self.mtp.attach_target(embed_tokens=target.embed_tokens, head=target.head())
        leave_out_tied_names(self)

    @property
    def config(self) -> Any:
        """The modules' configuration; the training loop takes notes in it."""
        return self.mtp.config

    @property
    def draft_part(self) -> nn.Module:
        """The modules; the training loop starts them from a checkpoint of the post-hoc method."""
        return self.mtp

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:
        """Nothing to do: the target is the trunk, whose embeddings and head are being trained."""

    def follow_progress(self, share: float) -> None:
        """Sets the weight of the MTP losses for the step after `share` of the run."""
        self.mtp_weight = [weight for start, weight in self.schedule if start <= share][-1]

    # Training.

    def normaliser(self, batch: TrainBatch) -> Tensor:
        """[] float64: T, the supervised tokens that something precedes, for all terms."""
        return supervised_next(documents_as_rows(batch)).sum().double()

    def forward(
        self,
        batch: TrainBatch,
        *,
        target_head: nn.Module,  # noqa: ARG002 (the trunk's own is used)
        objective: Objective,
    ) -> TrainOutput:
        """The joint loss of a batch.

        Args:
            batch: Tokens and masks; states are not read.
            target_head: Not read.
            objective: The cross entropy to the text.
        """
        batch = documents_as_rows(batch)
        # No mask: padding lies to the right of everything that a causal model may look at.
        hidden = first_tensor(self._decoder[0](input_ids=batch.input_ids, use_cache=False))
        assert hidden is not None, "the probe at load saw the decoder return its states"
        depths = len(self.mtp.step_weights)
        plan = plan_slots(supervised_next(batch), batch.keep_mask, num_steps=depths)
        at_places = hidden.flatten(0, 1).index_select(0, plan.places)  # [rows, hidden]
        labels = batch.input_ids.flatten().index_select(0, plan.places + 1)
        everywhere = torch.ones_like(plan.supervised[:1])

        def predictions(states: Tensor, exists: Tensor, weights: Tensor) -> Predictions:
            return Predictions(
                **_head_arguments(self._head[0], states),
                target_hidden=at_places.detach(),
                supervised=exists,
                weights=exists * weights[:, None],
                draft_to_target=None,
                labels=labels,
            )

        main = objective(
            predictions(at_places[None], everywhere, hidden.new_ones(1)), self._head[0]
        )
        count = torch.tensor(len(plan.places), dtype=torch.float64, device=hidden.device)
        sums = {"main_loss": main.step_loss_sums.sum(), "main_loss_count": count}
        if self.training and not self.runs_modules:
            return TrainOutput(main.loss_sum, sums | _no_predictions(depths, hidden.device))
        features = hidden.detach() if self.mtp.detach_trunk else hidden
        states = self.mtp.unrolled(
            dataclasses.replace(batch, final_hidden_states=features), plan, self._head[0]
        )
        made = predictions(states, plan.supervised, states.new_tensor(self.mtp.step_weights))
        if self.mtp.detach_trunk:
            made.draft_head_weight = made.draft_head_weight.detach()
        output = objective(made, self._head[0])
        # The walk takes a pass over the places: only where nothing is trained.
        grid = None if self.training else batch.input_ids.shape
        sums |= prediction_sums(plan, output, grid=grid)
        assert output.losses is not None, "objectives of train/objectives.py report them"
        sums["mtp_loss"] = (output.losses.double() * plan.supervised).sum(-1)
        sums |= {"mtp_weight": count * self.mtp_weight, "mtp_weight_count": count}
        return TrainOutput(main.loss_sum + self.mtp_weight * output.loss_sum, sums)

    # Saving: the modules as a draft of models/mtp.py, the trunk as the model that it was.

    def saved_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The modules alone, as the post-hoc method saves them.

        Args:
            weights: All tensors of this module, by its own names.
        """
        config = copy.deepcopy(self.mtp.config)
        config.architectures = [config.draftsmith_class.rpartition(".")[2]]
        return config, _below("mtp.", weights)

    def save_beside(self, folder: Path) -> None:
        """Nothing lies beside the modules."""

    def target_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The language model: an ordinary transformers checkpoint, tensors by published name.

        Args:
            weights: All tensors of this module, by its own names.
        """
        config = copy.deepcopy(self.trunk.config)
        config.architectures = [type(self.trunk).__name__]
        return config, revert_weight_conversion(self.trunk, _below("trunk.", weights))

    def save_beside_target(self, folder: Path) -> None:
        """Writes the tokenizer and the generation settings into the language model's folder."""
        self.tokenizer.save_pretrained(folder)
        settings = getattr(self.trunk, "generation_config", None)
        if settings is not None:
            # Not by save_pretrained: it refuses settings that real checkpoints have.
            (folder / "generation_config.json").write_text(settings.to_json_string())

    def note_target(self, folder: Path, *, name: str) -> None:
        """Takes down the fingerprint of the language model as it has just been written.

        Args:
            folder: Where it is now.
            name: Where it will stand.
        """
        self.mtp.config.target_fingerprint = asdict(fingerprint_target(str(folder)))
        self.mtp.config.target_name_or_path = name


def _check_trainable(target: TargetModel) -> None:
    """Raises ValueError where a trained model could not be saved, or its head not be taught."""
    model, head = target.model, target.head()
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(
            f"{name} is defined by code that came with {target.name_or_path!r}; a trained copy "
            "could not be saved as a whole. Joint training takes architectures of transformers."
        )
    if head.bias is not None and not head.is_plain:
        raise ValueError(
            f"The head of {name} has a bias and changes its logits after the product: its bias "
            "would not be trained. Joint training does not support this model."
        )


def _head_arguments(head: TargetHead, states: Tensor) -> dict[str, Any]:
    """The arguments of `Predictions` that say what the head reads, and which head it is.

    Args:
        head: The trunk's.
        states: [steps, rows, hidden].
    """
    if head.bias is None:
        return {
            "draft_hidden": states,
            "draft_head_weight": head.weight,
            "shares_target_head": True,
        }
    # One more column that always reads 1: objectives teach a matrix only.
    ones = states.new_ones(*states.shape[:2], 1)
    return {
        "draft_hidden": torch.cat([states, ones], dim=-1),
        "draft_head_weight": torch.cat([head.weight, head.bias[:, None]], dim=1),
    }


def _no_predictions(depths: int, device: torch.device) -> dict[str, Tensor]:
    """The sums of modules that did not run."""
    none = torch.zeros(depths, dtype=torch.float64, device=device)
    counted = ("loss", "supervised", "in_vocabulary", "correct", "acceptance")
    joint = ("greedy_joint", "sampled_joint")
    return dict.fromkeys(counted + joint, none) | {"chains": none.sum()}


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part, under the names that they have there."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


# --- the method -----------------------------------------------------------------------------------


def weight_schedule(value: Any) -> Schedule:
    """The schedule that `mtp_weight` stands for.

    Args:
        value: A number, or pairs (share of the run from which on, weight).

    Raises:
        ValueError: It is neither, or the pairs are not in order.
    """
    pairs = value if isinstance(value, list) else [[0.0, value]]
    numbers = [
        pair
        for pair in pairs
        if isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair)
    ]
    schedule = [(float(start), float(weight)) for start, weight in numbers]
    starts = [start for start, _ in schedule]
    if (
        not schedule
        or len(schedule) != len(pairs)
        or starts[0] != 0.0
        or starts != sorted(set(starts))
        or starts[-1] >= 1.0
        or not all(0.0 <= weight < float("inf") for _, weight in schedule)
    ):
        raise ValueError(
            f"method.mtp_weight is {value!r}, expected a number >= 0, or pairs of the share of the "
            "run from which on and the weight, ascending and the first from 0, for example "
            "[[0.0, 0.3], [0.67, 0.1]]."
        )
    return schedule


@dataclass
class JointMtpMethod(MtpMethod):
    """The `method` node of a run. null: the target's own value."""

    mtp_weight: Any = PUBLISHED_WEIGHT
    """lambda: a number, or pairs [share of the run from which on, number]; 0: no MTP."""
    detach_trunk: bool = False
    """Stop the gradients of the MTP losses at the language model, its embeddings and its head."""
    num_steps: int = 1
    """Depths D (DeepSeek-V3: 1)."""
    step_decay: float = 1.0
    """Depth k weighs step_decay**k, divided by the sum of all; 1: 1/D each, as published."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "ce"})
    """The cross entropy to the text; options of train/objectives.py."""
    builds_from_target: ClassVar[bool] = True
    """`build` is told how to load the target."""
    trains_target: ClassVar[bool] = True
    """The target learns: rows come without its states, and it is saved with the draft."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weight_schedule(self.mtp_weight)
        check_flag("method.detach_trunk", self.detach_trunk)
        fixed = {
            "draft_vocab_size": (self.draft_vocab_size, None),
            "mask_alignment": (self.mask_alignment, "label"),
            "normalisation": (self.normalisation, "supervised"),
            "objective.name": (self.objective["name"], "ce"),
        }
        for name, (found, expected) in fixed.items():
            if found != expected:
                raise ValueError(
                    f"method.{name} is {found!r}, but joint training has one loss for the language "
                    f"model and its modules, to which only {expected or 'null'} belongs. Set it so."
                )

    def build(  # type: ignore[override]
        self,
        target_head: TargetHead,  # noqa: ARG002 (the trunk's own is used)
        vocabulary: None,
        aux_layer_ids: Sequence[int],  # noqa: ARG002 (none are read)
        *,
        target: Mapping[str, Any],
    ) -> JointMtp:
        """Loads the language model and makes modules for it, float32, on the CPU.

        Args:
            target_head: Not read.
            vocabulary: None, the modules propose every token.
            aux_layer_ids: Not read.
            target: How the target is loaded (the arguments of `TargetModel.load`).
        """
        assert vocabulary is None, "draft_vocab_size is always null"
        loaded = TargetModel.load(**(dict(target) | {"device": "cpu", "dtype": "float32"}))
        return JointMtp(
            loaded,
            super().build(loaded.head(), None, ()),
            schedule=weight_schedule(self.mtp_weight),
            detach_trunk=self.detach_trunk,
        )
