"""Training objectives over hidden states: KL, cross entropy, total variation and the LK hybrid.

All of them chunk by chunk.

Papers: EAGLE-3 (arXiv 2503.01840, section 3.1, the soft cross entropy over a reduced vocabulary);
the acceptance of speculative sampling, sum_v min(p, q) = 1 - TV(p, q), is Leviathan et al.
(arXiv 2211.17192, theorem 3.5). LK-lambda is the mixture that SpecForge (a6b6b02) trains with.

For one prediction with draft logits z, q = softmax(z), target distribution p over the whole target
vocabulary and p' = p restricted to the draft vocabulary and renormalised:

    soft cross entropy   CE = -sum_v p'_v log q_v       gradient  q - p'
    total variation      TV = 1 - sum_v min(p_v, q_v)   gradient  q S - q [q < p]
                         where S = sum_v q_v [q_v < p_v]

CE equals KL(p' || q) plus the entropy of p', which is constant for the draft, so their gradients
are the same; the reported loss is CE, as in the published implementations.

`ce` puts the token that really follows in the place of p' (-log q_y, gradient q - onehot(y)): what
the target wrote instead of all it could have written. A following token outside the draft
vocabulary, or an unknown one, has weight 0 and is a miss; the statistics are those of the target's
distribution all the same, because that is what decides about acceptance.

A prediction whose target argmax lies outside the draft vocabulary has weight 0 in the loss and is
a miss in the statistics. Its acceptance is what it is: the two distributions still overlap.

Memory: the weights of all predictions are known beforehand, so the gradients towards the draft's
hidden states and head are computed while the forward pass visits a chunk; nothing of size
[rows, vocab] outlives its chunk, and the target's logits of a row are computed once for all steps.

Differs from the published code: their masks multiply full tensors of logits of every position; LK's
acceptance term is summed over rows like its KL term unless `divisor` asks for their mean.

Check: tests/test_objectives.py holds slow references, gradcheck and the chunk-size invariance;
tests/test_golden_eagle3.py compares with recorded losses and gradients.

Axes: steps, rows (target places), hidden, draft_vocab, vocab.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.protocols import Objective, ObjectiveOutput, Predictions

CHUNK_ELEMENTS = {"cpu": 2**22}
"""Draft logits per chunk. On a CPU two such float32 buffers (32 MiB) stay in or near the last-level
cache; measured on 7 x 1020 predictions over 8000 tokens (one thread of an EPYC with 32 MiB), 2**20
took 6 % longer, 2**18 half as long again, 2**24 3 % longer."""
CHUNK_ELEMENTS_ACCELERATOR = 2**27
"""1 GiB for two float32 buffers (our choice): large enough to keep the matrix products busy."""
MIN_CHUNK_PREDICTIONS = 64
"""Below this the matrix products would spend their time re-reading the head (our choice)."""


@dataclass(frozen=True)
class SoftCrossEntropy:
    """`kl`: the soft cross entropy to the target, EAGLE-3's objective."""

    chunk_elements: int | None = None
    """Draft logits held at a time, per buffer; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return _evaluate(predictions, target_head, None, self.chunk_elements)


@dataclass(frozen=True)
class CrossEntropy:
    """`ce`: the cross entropy to the token that follows in the text."""

    chunk_elements: int | None = None
    """Draft logits held at a time, per buffer; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        if predictions.labels is None:
            raise ValueError(
                "The objective 'ce' needs the tokens that follow (Predictions.labels), but this "
                "method gives none. Set method.objective.name=kl."
            )
        return _evaluate(
            predictions, target_head, None, self.chunk_elements, labels=predictions.labels
        )


@dataclass(frozen=True)
class TotalVariation:
    """`tv`: the total variation distance, whose complement is the acceptance probability."""

    chunk_elements: int | None = None
    """Draft logits held at a time, per buffer; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        steps, device = len(predictions.weights), predictions.weights.device
        shares = torch.zeros(steps, device=device), torch.ones(steps, device=device)
        return _evaluate(predictions, target_head, shares, self.chunk_elements)


@dataclass(frozen=True)
class LkLambda:
    """`lk_lambda`: w CE + (1 - w) TV with w = kl_scale exp(-kl_decay a) per step.

    a is the mean acceptance of the step's supervised, in-vocabulary predictions in this batch, so
    training starts close to KL and moves towards TV as the draft improves. w carries no gradient.
    a belongs to one micro-batch: unlike the other objectives, this one is not exactly invariant
    to how a batch is split into micro-batches.
    """

    kl_scale: float = 1.0
    """Weight of the cross entropy at acceptance 0 (SpecForge: 1)."""
    kl_decay: float = 1.0
    """How fast that weight falls with the acceptance (SpecForge: 1; its older script: 3)."""
    divisor: int | None = None
    """SpecForge takes 1 - a as a mean over the step's rows, but the cross entropy as a sum divided
    by batch x sequence. Give that number here to reproduce its mixture; null: both are sums over
    rows, so that the mixture does not depend on how much of the batch is supervised."""
    chunk_elements: int | None = None
    """Draft logits held at a time, per buffer; null: by device."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.kl_scale <= 1.0:
            raise ValueError(f"objective.kl_scale is {self.kl_scale}, expected 0 to 1.")
        if self.kl_decay < 0.0:
            raise ValueError(f"objective.kl_decay is {self.kl_decay}, expected 0 or more.")
        if self.divisor is not None and self.divisor < 1:
            raise ValueError(f"objective.divisor is {self.divisor}, expected 1 or more, or null.")

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        with torch.no_grad():
            first = _evaluate(predictions, target_head, None, self.chunk_elements)
        counted = predictions.supervised & first.in_vocabulary
        rows = counted.sum(-1).clamp_min(1)
        mean = (first.acceptance * counted).sum(-1) / rows
        cross_entropy_share = self.kl_scale * torch.exp(-self.kl_decay * mean)
        variation_share = 1.0 - cross_entropy_share
        if self.divisor is not None:
            variation_share = variation_share * (self.divisor / rows)
        shares = cross_entropy_share, variation_share
        return _evaluate(predictions, target_head, shares, self.chunk_elements)


OBJECTIVES: dict[str, type[Any]] = {
    "ce": CrossEntropy,
    "kl": SoftCrossEntropy,
    "lk_lambda": LkLambda,
    "tv": TotalVariation,
}


def make_objective(name: str, **options: Any) -> Objective:
    """Builds the objective called `name` with its options.

    Raises:
        ValueError: if the name or an option is unknown, naming the choices.
    """
    if name not in OBJECTIVES:
        raise ValueError(_unknown("objective.name", name, list(OBJECTIVES)))
    known = [field.name for field in dataclasses.fields(OBJECTIVES[name])]
    for option in options:
        if option not in known:
            raise ValueError(_unknown(f"option of the objective {name!r}", option, known))
    return OBJECTIVES[name](**options)


def _unknown(what: str, found: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(found, choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {what}: {found!r}. Choices: {', '.join(choices)}.{hint}"


@dataclass
class _Teacher:
    """The target's view of a chunk of rows."""

    full_probs: Tensor
    """[rows, draft_vocab]: p at the draft vocabulary's tokens; sums to less than 1 if reduced."""
    probs: Tensor
    """[rows, draft_vocab]: the same, renormalised."""
    top_token: Tensor
    """[rows] target ids of the argmax over the whole vocabulary."""
    in_vocabulary: Tensor
    """[rows] bool: that argmax (with `label`: the following token) is in the draft vocabulary."""
    label: Tensor | None = None
    """[rows] draft id of the token that follows, 0 where there is none; None: taught by `probs`."""


class _PrecomputedGradient(torch.autograd.Function):
    """A number whose gradients towards two tensors are already known."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        value: Tensor,
        d_hidden: Tensor,
        d_weight: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = (d_hidden * scale).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        # None where the head is frozen: it was not computed either.
        d_weight = (d_weight * scale).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight, None, None, None


def _evaluate(
    predictions: Predictions,
    target_head: nn.Module,
    shares: tuple[Tensor, Tensor] | None,
    chunk_elements: int | None,
    labels: Tensor | None = None,
) -> ObjectiveOutput:
    """The sum over predictions of weight * (CE share * CE + TV share * TV), and the statistics.

    Args:
        predictions: See `Predictions`.
        target_head: Maps [rows, target_hidden] to the target's logits [rows, vocab].
        shares: Those of the cross entropy and of the total variation, [steps] each; None: CE alone.
        chunk_elements: Draft logits per chunk; None: by device.
        labels: [rows] target ids that CE is taken towards; None: towards the target's distribution.
    """
    steps, rows, _ = predictions.draft_hidden.shape
    hidden, weight = predictions.draft_hidden, predictions.draft_head_weight
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        chunks = _Chunks(predictions, target_head, shares, labels)
        accuracy_dtype = chunks.dtype
        d_hidden = torch.zeros_like(hidden) if with_gradient else None
        d_weight = None
        if with_gradient and weight.requires_grad:
            d_weight = torch.zeros_like(weight, dtype=accuracy_dtype)
        losses = hidden.new_zeros(steps, rows, dtype=accuracy_dtype)
        acceptance = torch.zeros_like(losses)
        correct = torch.zeros_like(losses, dtype=torch.bool)
        in_vocabulary = torch.zeros(rows, dtype=torch.bool, device=hidden.device)
        for rows_slice in _row_slices(predictions, target_head, chunk_elements):
            chunk = chunks.evaluate(rows_slice, d_hidden, d_weight)
            losses[:, rows_slice], acceptance[:, rows_slice], correct[:, rows_slice] = chunk[:3]
            in_vocabulary[rows_slice] = chunk[3]
        weights = predictions.weights * in_vocabulary
        step_loss_sums = (weights * losses).sum(-1, dtype=torch.float64)
        value = step_loss_sums.sum().to(accuracy_dtype)
    if with_gradient:
        value = _PrecomputedGradient.apply(hidden, weight, value, d_hidden, d_weight)
    return ObjectiveOutput(
        loss_sum=value,
        step_loss_sums=step_loss_sums,
        correct=correct & in_vocabulary & predictions.supervised,
        acceptance=acceptance,
        in_vocabulary=in_vocabulary,
    )


def _row_slices(
    predictions: Predictions, target_head: nn.Module, chunk_elements: int | None
) -> Iterator[slice]:
    """Slices over rows such that a chunk holds about `chunk_elements` draft or target logits."""
    steps, rows, _ = predictions.draft_hidden.shape
    if rows == 0:
        return
    per_row = steps * len(predictions.draft_head_weight)
    if predictions.draft_to_target is not None:
        per_row = max(per_row, target_head(predictions.target_hidden[:1]).shape[-1])
    if chunk_elements is None:
        device = predictions.draft_hidden.device.type
        chunk_elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS_ACCELERATOR)
        chunk = max(chunk_elements // per_row, MIN_CHUNK_PREDICTIONS // steps)
    else:
        chunk = chunk_elements // per_row
    chunk = max(chunk, 1)
    for start in range(0, rows, chunk):
        yield slice(start, min(start + chunk, rows))


class _Chunks:
    """Evaluates chunks of rows with two reused buffers: fresh ones cost a page fault per 4 KiB."""

    def __init__(
        self,
        predictions: Predictions,
        target_head: nn.Module,
        shares: tuple[Tensor, Tensor] | None,
        labels: Tensor | None,
    ) -> None:
        self.predictions = predictions
        self.target_head = target_head
        self.shares = shares
        self.labels = labels
        hidden, weight = predictions.draft_hidden, predictions.draft_head_weight
        device = hidden.device.type
        self.autocast_off = torch.autocast(device, enabled=False)
        self.matmul_dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else torch.promote_types(hidden.dtype, weight.dtype)
        )
        # Softmax and loss in float32 at least: bf16 loses the tail that the gradient consists of.
        self.dtype = torch.promote_types(self.matmul_dtype, torch.float32)
        self.head_weight = weight.detach().to(self.matmul_dtype)
        self.buffers: list[Tensor] = []

    def evaluate(
        self, rows: slice, d_hidden: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses, acceptances, hits ([steps, rows]) and in-vocabulary flags ([rows]) of a chunk.

        Adds this chunk's gradients to `d_hidden` and `d_weight` where they are given.
        """
        made = self.predictions
        teacher_logits = self.target_head(made.target_hidden[rows])  # [rows, vocab]
        with self.autocast_off:
            teacher = _read_teacher(
                teacher_logits.to(self.dtype),
                made.draft_to_target,
                None if self.labels is None else self.labels[rows],
            )
            hidden = made.draft_hidden[:, rows].to(self.matmul_dtype).flatten(0, 1)
            shape = (len(made.weights), len(teacher.probs), -1)  # [steps, rows, draft_vocab]
            logits, probs = self._logits_and_buffer(hidden)
            top = _argmax(logits)
            top_logit = logits.gather(-1, top[:, None])
            torch.softmax(logits, -1, out=probs)
            # logsumexp from the largest probability: softmax does not hand out its normaliser.
            log_normaliser = (top_logit - probs.gather(-1, top[:, None]).log()).view(shape[:2])
            logits, probs = logits.view(shape), probs.view(shape)
            if teacher.label is None:
                losses = teacher.probs.sum(-1) * log_normaliser
                losses -= logits.mul_(teacher.probs).sum(-1)
            else:
                label = teacher.label.expand(shape[:2])[..., None]  # [steps, rows, 1]
                losses = log_normaliser - logits.gather(-1, label).squeeze(-1)
            scratch = torch.minimum(probs, teacher.full_probs, out=logits)
            acceptance = scratch.sum(-1)
            if self.shares is not None:
                losses = losses * self.shares[0][:, None]
                losses += (1.0 - acceptance) * self.shares[1][:, None]
            if d_hidden is not None:
                self._logit_gradient(probs, scratch, teacher)
                weights = (made.weights[:, rows] * teacher.in_vocabulary).flatten()[:, None]
                gradient = probs.flatten(0, 1).to(self.matmul_dtype)
                # Weights scale the small matrices, never the [steps * rows, draft_vocab] one.
                d_rows = (gradient @ self.head_weight) * weights
                d_hidden[:, rows] = d_rows.view(*shape[:2], -1).to(d_hidden.dtype)
                if d_weight is not None:
                    _add_product(d_weight, gradient.T, (hidden * weights).to(self.matmul_dtype))
            tokens = top if made.draft_to_target is None else made.draft_to_target[top]
            correct = tokens.view(shape[:2]) == teacher.top_token
        return losses, acceptance, correct, teacher.in_vocabulary

    def _logits_and_buffer(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[steps * rows, draft_vocab] draft logits and a second buffer of the same size."""
        size = (len(hidden), len(self.head_weight))
        if not self.buffers:
            self.buffers = [hidden.new_empty(size, dtype=self.dtype) for _ in range(2)]
        logits, other = (buffer[: len(hidden)] for buffer in self.buffers)
        if self.dtype == self.matmul_dtype:
            torch.mm(hidden, self.head_weight.T, out=logits)
        else:
            logits.copy_(hidden @ self.head_weight.T)
        return logits, other

    def _logit_gradient(self, probs: Tensor, scratch: Tensor, teacher: _Teacher) -> None:
        """Turns `probs` in place into the gradient of a prediction's loss towards its logits."""
        if teacher.label is not None:
            label = teacher.label.expand(probs.shape[:2])[..., None]
            probs.scatter_add_(-1, label, probs.new_full(label.shape, -1.0))
            return
        if self.shares is None:
            probs.sub_(teacher.probs)
            return
        cross_entropy, variation = (share[:, None, None] for share in self.shares)
        torch.mul(probs, probs < teacher.full_probs, out=scratch)
        inside = scratch.sum(-1, keepdim=True)
        probs.mul_(cross_entropy + variation * inside)
        probs.addcmul_(teacher.probs, -cross_entropy).addcmul_(scratch, -variation)


def _read_teacher(
    logits: Tensor, draft_to_target: Tensor | None, labels: Tensor | None
) -> _Teacher:
    """Softmax over the whole vocabulary, then the draft vocabulary's part of it, renormalised."""
    top_token = _argmax(logits)
    probs = torch.softmax(logits, -1)
    if draft_to_target is None:
        known = torch.ones_like(top_token, dtype=torch.bool) if labels is None else labels >= 0
        label = None if labels is None else labels.clamp_min(0)
        return _Teacher(probs, probs, top_token, known, label)
    taught = top_token if labels is None else labels
    place = torch.searchsorted(draft_to_target, taught).clamp_max(len(draft_to_target) - 1)
    known = draft_to_target[place] == taught
    full_probs = probs.index_select(-1, draft_to_target)
    if labels is not None:
        return _Teacher(full_probs, full_probs, top_token, known, place)
    # Where all of the draft vocabulary underflows its argmax is outside, and the weight is 0.
    mass = full_probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
    return _Teacher(full_probs, full_probs / mass, top_token, known)


def _argmax(logits: Tensor) -> Tensor:
    """[rows] first index of the maximum of [rows, vocab], as torch.argmax.

    On a CPU in two stages: argmax is scalar code there, four times slower than the vectorised amax.
    """
    block = 64
    if logits.device.type != "cpu" or logits.shape[-1] < 4 * block:
        return logits.argmax(-1)
    whole = logits.shape[-1] // block * block
    blocks = logits[:, :whole].unflatten(-1, (-1, block))  # [rows, blocks, block]
    maxima = blocks.amax(-1)
    if whole < logits.shape[-1]:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=-1)
    start = maxima.argmax(-1, keepdim=True) * block
    index = start + torch.arange(block, device=logits.device)
    # The last block may be short: repeating its last entry cannot move the first maximum.
    inner = logits.gather(-1, index.clamp_max(logits.shape[-1] - 1)).argmax(-1, keepdim=True)
    return (start + inner).squeeze(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
