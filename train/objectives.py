"""Training objectives over hidden states: KL both ways, cross entropy, total variation, LK.

Papers: EAGLE-3 (arXiv 2503.01840, section 3.1, the soft cross entropy over a reduced vocabulary);
the acceptance of speculative sampling, a = sum_v min(p, q) = 1 - TV(p, q), is Leviathan et al.
(arXiv 2211.17192, theorem 3.5). LK-alpha and LK-lambda are what SpecForge (a6b6b02) trains with.

For one prediction with draft logits z, q = softmax(z), target distribution p over the whole target
vocabulary and p' = p restricted to the draft vocabulary and renormalised:

    name        loss                                    gradient towards z
    kl          CE = -sum_v p'_v log q_v                q - p'
    reverse_kl  KL(q || p') = sum_v q_v log(q_v / p'_v) q (log(q / p') - KL(q || p'))
    tv          TV = 1 - sum_v min(p_v, q_v)            q S - q [q < p],  S = sum_v q_v [q_v < p_v]
    lk_alpha    -log a                                  (q S - q [q < p]) / a
    lk_lambda   w CE + (1 - w) TV                       w and 1 - w times those of CE and TV
    ce          -log q_y                                q - onehot(y)
    ce_l1       c (-log q_y) + d sum_v |p_v - q_v|      c times that of ce, 2 d times that of TV

CE equals KL(p' || q) plus the entropy of p', which is constant for the draft, so their gradients
are the same; the reported loss of `kl` is CE, as in the published implementations. The L1 distance
that some papers train with is sum_v |p_v - q_v| = 2 TV.

`ce` puts the token y that really follows in the place of p': what the target wrote instead of all
it could have written (`labels: target`: its most likely token); `ce_l1` (DSpark) adds the L1
distance to p. A following token outside the draft vocabulary, or an unknown one, has weight 0 and
is a miss; the statistics are those of the target's distribution all the same, because that is what
decides about acceptance.

Two places where a logarithm could meet zero. `reverse_kl` takes log p' from the target's logits, so
no finite logit underflows; below -100 (a target that masks tokens with -inf) log p' counts as -100:
a finite, steep price for a token that the target never says. `lk_alpha` counts an acceptance below
the smallest normal number as that number, with gradient 0; above it the gradient is exact and, as
S <= a and q [q < p] <= a, never larger than 1.

A prediction whose target argmax lies outside the draft vocabulary has weight 0 in the loss and is
a miss in the statistics. Its acceptance is what it is: the two distributions still overlap.

A draft that predicts with the target's own head (`Predictions.shares_target_head`) gets that head's
bias and its elementwise transformation too; z are the transformed logits.

Memory and chunks: train/objective_chunks.py.

Differs from the published code: their masks multiply full tensors of logits of every position; the
losses of LK are summed over rows like those of KL, where SpecForge takes means over each step's
rows (`LkLambda.divisor` reproduces its mixture).

Check: tests/test_objectives.py holds slow references, gradcheck and the chunk-size invariance;
tests/test_golden_eagle3.py compares with recorded losses and gradients.

Axes: steps, places, draft_vocab.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.models.protocols import Objective, ObjectiveOutput, Predictions
from draftsmith.train.objective_chunks import TOP_LABEL, Tile, TileLoss, evaluate


def _soft_cross_entropy_losses(tile: Tile) -> Tensor:
    probs = tile.teacher.probs[:, None]
    expected = torch.mul(tile.logits, probs, out=tile.scratch).sum(-1)
    # The sum of p' is 1, or 0 where all of it underflows.
    return probs.sum(-1) * tile.log_normaliser - expected


def _soft_cross_entropy(tile: Tile) -> Tensor:
    losses = _soft_cross_entropy_losses(tile)
    if tile.with_gradient:
        torch.sub(tile.probs, tile.teacher.probs[:, None], out=tile.logits)
    return losses


def _cross_entropy(tile: Tile) -> Tensor:
    assert tile.teacher.label is not None, "evaluate() was given labels"
    label = tile.teacher.label[:, None, None].expand(*tile.log_normaliser.shape, 1)
    losses = tile.log_normaliser - tile.logits.gather(-1, label).squeeze(-1)
    if tile.with_gradient:
        tile.logits.copy_(tile.probs).scatter_add_(-1, label, losses.new_full(label.shape, -1.0))
    return losses


def _labelled_mixture(cross_entropy: float, distance: float) -> TileLoss:
    """The cross entropy to the label and the L1 distance to p, each with its weight."""

    def losses(tile: Tile) -> Tensor:
        assert tile.teacher.label is not None, "evaluate() was given labels"
        label = tile.teacher.label[:, None, None].expand(*tile.log_normaliser.shape, 1)
        log_prob = tile.logits.gather(-1, label).squeeze(-1) - tile.log_normaliser
        total = 2.0 * distance * (1.0 - tile.acceptance) - cross_entropy * log_prob
        if tile.with_gradient:
            _leave_gradient(tile, None, torch.full_like(tile.acceptance, 2.0 * distance))
            gradient = tile.logits.add_(tile.probs, alpha=cross_entropy)
            gradient.scatter_add_(-1, label, total.new_full(label.shape, -cross_entropy))
        return total

    return losses


def _reverse_kl(tile: Tile) -> Tensor:
    assert tile.teacher.log_probs is not None, "evaluate() was asked for them"
    log_ratio = tile.logits.sub_(tile.log_normaliser[..., None])
    log_ratio -= tile.teacher.log_probs[:, None]
    losses = torch.mul(tile.probs, log_ratio, out=tile.scratch).sum(-1)
    if tile.with_gradient:
        log_ratio.sub_(losses[..., None]).mul_(tile.probs)
    return losses


def _leave_gradient(tile: Tile, cross_entropy: Tensor | None, variation: Tensor) -> None:
    """Leaves the sum of the gradients of CE and TV, each with its factor per prediction.

    Args:
        tile: Its probabilities are still q.
        cross_entropy: [steps] or [places, steps]; None: none of it.
        variation: The same.
    """
    variation = variation.expand_as(tile.acceptance)[..., None]
    # A comparison into a float buffer: a boolean mask would leave the vectorised path on a CPU.
    inside = torch.lt(tile.probs, tile.teacher.full_probs[:, None], out=tile.scratch)
    inside.mul_(tile.probs)
    # S first: for an acceptance near the smallest number S times its inverse must stay below 1.
    own = inside.sum(-1, keepdim=True) * variation
    if cross_entropy is not None:
        cross_entropy = cross_entropy.expand_as(tile.acceptance)[..., None]
        own += cross_entropy
    gradient = torch.mul(tile.probs, own, out=tile.logits)
    if cross_entropy is not None:
        gradient.addcmul_(tile.teacher.probs[:, None], cross_entropy, value=-1.0)
    gradient.addcmul_(inside, variation, value=-1.0)


def _total_variation(tile: Tile) -> Tensor:
    if tile.with_gradient:
        _leave_gradient(tile, None, torch.ones_like(tile.acceptance))
    return 1.0 - tile.acceptance


def _negative_log_acceptance(tile: Tile) -> Tensor:
    floor = torch.finfo(tile.acceptance.dtype).tiny
    if tile.with_gradient:
        counted = tile.acceptance >= floor
        _leave_gradient(tile, None, counted / tile.acceptance.clamp_min(floor))
    return -tile.acceptance.clamp_min(floor).log()


def _mixture(cross_entropy: Tensor, variation: Tensor) -> TileLoss:
    """CE and TV with their shares, [steps] each."""

    def losses(tile: Tile) -> Tensor:
        total = cross_entropy * _soft_cross_entropy_losses(tile)
        total += variation * (1.0 - tile.acceptance)
        if tile.with_gradient:
            _leave_gradient(tile, cross_entropy, variation)
        return total

    return losses


@dataclass(frozen=True)
class SoftCrossEntropy:
    """`kl`: the soft cross entropy to the target, EAGLE-3's objective."""

    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return evaluate(
            predictions, target_head, _soft_cross_entropy, chunk_elements=self.chunk_elements
        )


@dataclass(frozen=True)
class ReverseKl:
    """`reverse_kl`: KL(q || p'), which prefers one likely answer to covering all of them."""

    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return evaluate(
            predictions,
            target_head,
            _reverse_kl,
            chunk_elements=self.chunk_elements,
            with_log_probs=True,
        )


def _required_labels(predictions: Predictions, name: str) -> Tensor:
    if predictions.labels is None:
        raise ValueError(
            f"The objective {name!r} needs the tokens that follow (Predictions.labels), but this "
            "method gives none. Set method.objective.name=kl."
        )
    return predictions.labels


@dataclass(frozen=True)
class CrossEntropy:
    """`ce`: the cross entropy to the token that follows in the text, or to the target's choice."""

    labels: str = "text"
    """text: the token that follows. target: the target's most likely one at that place."""
    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __post_init__(self) -> None:
        if self.labels not in ("text", "target"):
            raise ValueError(f"objective.labels is {self.labels!r}, expected text or target.")

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        if self.labels == "text":
            labels = _required_labels(predictions, "ce")
        else:
            rows, device = predictions.draft_hidden.shape[1], predictions.draft_hidden.device
            labels = torch.full((rows,), TOP_LABEL, device=device)
        return evaluate(
            predictions,
            target_head,
            _cross_entropy,
            chunk_elements=self.chunk_elements,
            labels=labels,
        )


@dataclass(frozen=True)
class CrossEntropyL1:
    """`ce_l1`: cross entropy to the text and L1 distance to the target's distribution (DSpark)."""

    ce_weight: float = 0.1
    """Weight of the cross entropy (DSpark: 0.1)."""
    l1_weight: float = 0.9
    """Weight of the L1 distance, twice the total variation (DSpark: 0.9)."""
    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __post_init__(self) -> None:
        if min(self.ce_weight, self.l1_weight) < 0.0 or not (self.ce_weight or self.l1_weight):
            raise ValueError(
                f"objective.ce_weight is {self.ce_weight} and objective.l1_weight "
                f"{self.l1_weight}; expected numbers >= 0, at least one of them above 0."
            )

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return evaluate(
            predictions,
            target_head,
            _labelled_mixture(self.ce_weight, self.l1_weight),
            chunk_elements=self.chunk_elements,
            labels=_required_labels(predictions, "ce_l1"),
        )


@dataclass(frozen=True)
class TotalVariation:
    """`tv`: the total variation distance, whose complement is the acceptance probability."""

    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return evaluate(
            predictions, target_head, _total_variation, chunk_elements=self.chunk_elements
        )


@dataclass(frozen=True)
class LkAlpha:
    """`lk_alpha`: the negative logarithm of the acceptance probability."""

    chunk_elements: int | None = None
    """Draft logits held at a time; null: by device."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        return evaluate(
            predictions, target_head, _negative_log_acceptance, chunk_elements=self.chunk_elements
        )


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
    """Draft logits held at a time; null: by device."""
    couples_predictions: ClassVar[bool] = True
    """One prediction's loss depends on the others: they must come in one call (`Objective`)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.kl_scale <= 1.0:
            raise ValueError(f"objective.kl_scale is {self.kl_scale}, expected 0 to 1.")
        if self.kl_decay < 0.0:
            raise ValueError(f"objective.kl_decay is {self.kl_decay}, expected 0 or more.")
        if self.divisor is not None and self.divisor < 1:
            raise ValueError(f"objective.divisor is {self.divisor}, expected 1 or more, or null.")

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        with torch.no_grad():
            first = evaluate(
                predictions, target_head, _total_variation, chunk_elements=self.chunk_elements
            )
        counted = predictions.supervised & first.in_vocabulary
        rows = counted.sum(-1).clamp_min(1)
        mean = (first.acceptance * counted).sum(-1) / rows
        cross_entropy_share = self.kl_scale * torch.exp(-self.kl_decay * mean)
        variation_share = 1.0 - cross_entropy_share
        if self.divisor is not None:
            variation_share = variation_share * (self.divisor / rows)
        return evaluate(
            predictions,
            target_head,
            _mixture(cross_entropy_share, variation_share),
            chunk_elements=self.chunk_elements,
        )


OBJECTIVES: dict[str, type[Any]] = {
    "ce": CrossEntropy,
    "ce_l1": CrossEntropyL1,
    "kl": SoftCrossEntropy,
    "lk_alpha": LkAlpha,
    "lk_lambda": LkLambda,
    "reverse_kl": ReverseKl,
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
