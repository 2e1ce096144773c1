"""Evaluates an objective chunk by chunk: no tensor of [predictions, vocab] outlives its chunk.

Predictions are arranged by target place (`Predictions`). A *chunk* is a run of places: its draft
logits come from one matrix product, and two more give the gradients. A *tile* is a part of a chunk
that stays in a core's cache while the many elementwise operations of a loss pass over it. The
objectives themselves (train/objectives.py) see tiles only.

Memory: the weights of all predictions are known beforehand, so the gradients towards the draft's
hidden states and head are computed while the forward pass visits a chunk. The target's logits of a
place are computed once for all steps, and once for all rows that name the same place
(`Predictions.target_places`): the rows are visited in the order of their places.

Precision: products run in the dtype of the states (or of autocast); softmax, loss and gradient in
float32 at least, because bf16 loses the tail that the gradient consists of.

No third-party fused kernel is used, on a GPU either: none has been measured here, and none known to
us takes several draft steps per target place, a reduced draft vocabulary and the acceptance.

Axes: steps, places (target places, the rows of `Predictions`), predictions (places * steps),
hidden, draft_vocab, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.known_gradients import with_known_gradients
from draftsmith.models.protocols import LogitCorrection, ObjectiveOutput, Predictions

CHUNK_ELEMENTS = {"cpu": 2**23}
"""Draft logits per chunk. On a CPU such a float32 buffer (32 MiB) stays in or near the last-level
cache, and the head is read often enough to be worth its packing (docs/training_speed.md)."""
CHUNK_ELEMENTS_ACCELERATOR = 2**27
"""512 MiB of float32 (our choice): large enough to keep the matrix products busy."""
TILE_ELEMENTS = {"cpu": 2**18}
"""Draft logits per tile."""
TILE_ELEMENTS_ACCELERATOR = 2**25
"""128 MiB of float32 (our choice): small beside a chunk, large beside the cost of a launch."""
MIN_CHUNK_PREDICTIONS = 64
"""Below this the matrix products would spend their time re-reading the head (our choice)."""
TOP_LABEL = -2
"""In the place of a label: the target's own most likely token."""
LOG_PROB_FLOOR = -100.0
"""Smallest log p' that the reverse KL reads (our choice, e**-100 is below any float32 number)."""


@dataclass
class Teacher:
    """The target's view of some places."""

    full_probs: Tensor
    """[places, draft_vocab]: p at the draft vocabulary's tokens; sums to less than 1 if reduced."""
    probs: Tensor
    """[places, draft_vocab]: p', the same renormalised."""
    top_token: Tensor
    """[places] target ids of the argmax over the whole vocabulary."""
    in_vocabulary: Tensor
    """[places] bool: that argmax (with `label`: the following token) is in the draft vocabulary."""
    label: Tensor | None = None
    """[places] draft id of the token that follows, 0 where there is none; None: not asked for."""
    log_probs: Tensor | None = None
    """[places, draft_vocab]: log p', at least LOG_PROB_FLOOR; None: not asked for."""

    def part(self, places: slice | Tensor) -> Teacher:
        """Some of the places, by a slice or by indices, which may repeat."""

        def chosen(value: Tensor | None) -> Any:
            if value is None:
                return None
            return value[places] if isinstance(places, slice) else value.index_select(0, places)

        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.probs is self.full_probs:  # Nothing is reduced: choose once.
            del parts["probs"]
        found = {name: chosen(value) for name, value in parts.items()}
        return Teacher(**{"probs": found["full_probs"]} | found)


@dataclass
class Tile:
    """Some predictions with all that a loss reads, and the room in which it computes."""

    logits: Tensor
    """[places, steps, draft_vocab]. A loss leaves its gradient towards them here, unweighted, where
    `with_gradient` asks for it; otherwise it may leave anything."""
    probs: Tensor
    """[places, steps, draft_vocab] softmax of the logits; may be overwritten."""
    scratch: Tensor
    """[places, steps, draft_vocab] to compute in."""
    log_normaliser: Tensor
    """[places, steps] logsumexp of the logits."""
    acceptance: Tensor
    """[places, steps] sum_v min(p, q)."""
    teacher: Teacher
    """Of these places."""
    with_gradient: bool
    """Whether anybody will read the gradient."""


TileLoss = Callable[[Tile], Tensor]
"""Gives the loss of each prediction, [places, steps]."""


@dataclass
class _Gradients:
    """Sums over chunks; None where nobody asks for them."""

    hidden: Tensor
    """[steps, places, hidden]."""
    weight: Tensor | None
    """[draft_vocab, hidden]."""
    correction_hidden: Tensor | None
    """[steps, places, rank]."""
    correction_weight: Tensor | None
    """[draft_vocab, rank]."""

    def rows_chosen(self, rows: Tensor) -> _Gradients:
        """The same with the rows in another order."""
        correction = self.correction_hidden
        return replace(
            self,
            hidden=self.hidden[:, rows],
            correction_hidden=None if correction is None else correction[:, rows],
        )

    @classmethod
    def zeros(cls, predictions: Predictions, dtype: torch.dtype) -> _Gradients:
        """For the tensors that require one; matrices in `dtype`."""
        correction = predictions.correction

        def matrix(weight: Tensor) -> Tensor | None:
            return torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None

        return cls(
            torch.zeros_like(predictions.draft_hidden),
            matrix(predictions.draft_head_weight),
            None if correction is None else torch.zeros_like(correction.hidden),
            None if correction is None else matrix(correction.weight),
        )


def evaluate(
    predictions: Predictions,
    target_head: nn.Module,
    loss: TileLoss,
    *,
    chunk_elements: int | None = None,
    labels: Tensor | None = None,
    with_log_probs: bool = False,
) -> ObjectiveOutput:
    """The sum over predictions of weight * loss, and the statistics.

    Args:
        predictions: See `Predictions`.
        target_head: Maps [places, target_hidden] to the target's logits [places, vocab].
        loss: What a prediction costs.
        chunk_elements: Draft logits per chunk; None: by device.
        labels: [places] target ids that the loss is taken towards: one outside the draft vocabulary
            has weight 0; TOP_LABEL: the target's argmax. None: towards the target's distribution.
        with_log_probs: The loss reads `Teacher.log_probs`.
    """
    steps, places, _ = predictions.draft_hidden.shape
    hidden, correction = predictions.draft_hidden, predictions.correction
    inputs = [hidden, predictions.draft_head_weight]
    if correction is not None:
        inputs += [correction.hidden, correction.weight]
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with torch.no_grad():
        order = None
        if predictions.target_places is not None:
            order = predictions.target_places.argsort(stable=True)
            predictions, labels = _in_order(predictions, labels, order)
        chunks = _Chunks(predictions, target_head, loss, labels, with_log_probs)
        gradients = _Gradients.zeros(predictions, chunks.dtype) if with_gradient else None
        losses = hidden.new_zeros(steps, places, dtype=chunks.dtype)
        acceptance = torch.zeros_like(losses)
        correct = torch.zeros_like(losses, dtype=torch.bool)
        in_vocabulary = torch.zeros(places, dtype=torch.bool, device=hidden.device)
        for part in _chunk_slices(predictions, target_head, chunk_elements):
            chunk = chunks.evaluate(part, gradients)
            losses[:, part], acceptance[:, part], correct[:, part], in_vocabulary[part] = chunk
        weights = predictions.weights * in_vocabulary
        step_loss_sums = (weights * losses).sum(-1, dtype=torch.float64)
        value = step_loss_sums.sum().to(chunks.dtype)
        correct &= in_vocabulary & predictions.supervised
        if order is not None:
            back = order.argsort()
            losses, acceptance, correct = (x[:, back] for x in (losses, acceptance, correct))
            in_vocabulary = in_vocabulary[back]
            if gradients is not None:
                gradients = gradients.rows_chosen(back)
    if gradients is not None:
        known = [getattr(gradients, entry.name) for entry in fields(gradients)][: len(inputs)]
        value = with_known_gradients(value, known, inputs)
    return ObjectiveOutput(
        loss_sum=value,
        step_loss_sums=step_loss_sums,
        correct=correct,
        acceptance=acceptance,
        in_vocabulary=in_vocabulary,
        losses=losses,
    )


def _in_order(
    predictions: Predictions, labels: Tensor | None, order: Tensor
) -> tuple[Predictions, Tensor | None]:
    """The same predictions and labels with their rows in another order."""
    correction = predictions.correction
    if correction is not None:
        correction = LogitCorrection(correction.hidden[:, order], correction.weight)
    assert predictions.target_places is not None, "they give the order"
    arranged = replace(
        predictions,
        draft_hidden=predictions.draft_hidden[:, order],
        target_hidden=predictions.target_hidden[order],
        supervised=predictions.supervised[:, order],
        weights=predictions.weights[:, order],
        target_places=predictions.target_places[order],
        correction=correction,
    )
    return arranged, None if labels is None else labels[order]


def _chunk_slices(
    predictions: Predictions, target_head: nn.Module, chunk_elements: int | None
) -> Iterator[slice]:
    """Slices over places such that a chunk holds about `chunk_elements` draft or target logits."""
    steps, places, _ = predictions.draft_hidden.shape
    if places == 0:
        return
    per_place = steps * len(predictions.draft_head_weight)
    if predictions.draft_to_target is not None:
        per_place = max(per_place, target_head(predictions.target_hidden[:1]).shape[-1])
    if chunk_elements is None:
        device = predictions.draft_hidden.device.type
        chunk_elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS_ACCELERATOR)
        chunk = max(chunk_elements // per_place, MIN_CHUNK_PREDICTIONS // steps)
    else:
        chunk = chunk_elements // per_place
    yield from _slices(places, max(chunk, 1))


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class _Chunks:
    """Evaluates chunks in reused buffers: fresh ones cost a page fault per 4 KiB."""

    def __init__(
        self,
        predictions: Predictions,
        target_head: nn.Module,
        loss: TileLoss,
        labels: Tensor | None,
        with_log_probs: bool,
    ) -> None:
        self.predictions = predictions
        self.target_head = target_head
        self.loss = loss
        self.labels = labels
        self.with_log_probs = with_log_probs
        hidden, weight = predictions.draft_hidden, predictions.draft_head_weight
        device = hidden.device.type
        self.autocast_off = torch.autocast(device, enabled=False)
        self.matmul_dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else torch.promote_types(hidden.dtype, weight.dtype)
        )
        self.dtype = torch.promote_types(self.matmul_dtype, torch.float32)
        self.head_weight = weight.detach().to(self.matmul_dtype)
        correction = predictions.correction
        self.correction_weight = (
            None if correction is None else correction.weight.detach().to(self.matmul_dtype)
        )
        self.head_bias, self.transform = _shared_head(predictions, target_head, self.dtype)
        tile = TILE_ELEMENTS.get(device, TILE_ELEMENTS_ACCELERATOR)
        self.tile_places = max(tile // (len(hidden) * len(weight)), 1)
        self.buffers: dict[str, Tensor] = {}

    def evaluate(
        self, places: slice, gradients: _Gradients | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses, acceptances, hits ([steps, places]) and in-vocabulary flags ([places]).

        Adds this chunk's gradients to `gradients` where they are given.
        """
        made = self.predictions
        teacher, row_teachers = self._teacher(places)
        with self.autocast_off:
            # Steps of a place side by side: they share a teacher, and a tile is contiguous.
            hidden = made.draft_hidden[:, places].transpose(0, 1)  # [places, steps, hidden]
            shape = hidden.shape
            hidden = hidden.to(self.matmul_dtype).flatten(0, 1)  # [predictions, hidden]
            corrected = self._flat_correction(places)
            logits, graph = self._logits(hidden, corrected, with_gradient=gradients is not None)
            losses, acceptance, top = self._visit_tiles(
                logits.view(*shape[:2], -1), teacher, row_teachers, gradients is not None
            )
            taught, in_vocabulary = teacher.top_token, teacher.in_vocabulary
            if row_teachers is not None:
                taught, in_vocabulary = taught[row_teachers], in_vocabulary[row_teachers]
            if gradients is not None:
                weights = made.weights[:, places] * in_vocabulary
                weights = weights.T.reshape(-1, 1)  # [predictions, 1]
                # Left in the logits by the loss, tile by tile.
                gradient = logits.to(self.matmul_dtype)
                if corrected is not None:
                    self._add_correction_gradient(gradients, gradient, corrected, weights, places)
                if graph is not None:
                    raw, transformed = graph
                    (gradient,) = torch.autograd.grad(transformed, raw, logits)
                    gradient = gradient.to(self.matmul_dtype)
                # Weights scale the small matrices, never the [predictions, draft_vocab] one.
                d_rows = (gradient @ self.head_weight) * weights
                d_hidden = gradients.hidden
                d_hidden[:, places] = d_rows.view(shape).transpose(0, 1).to(d_hidden.dtype)
                if gradients.weight is not None:
                    scaled = (hidden * weights).to(self.matmul_dtype)
                    _add_product(gradients.weight, gradient.T, scaled)
            tokens = top if made.draft_to_target is None else made.draft_to_target[top]
            correct = tokens == taught[:, None]
        return losses.T, acceptance.T, correct.T, in_vocabulary

    def _teacher(self, places: slice) -> tuple[Teacher, Tensor | None]:
        """The target's view of the distinct places of a chunk, and which of them teaches each row;
        None: row i is taught by place i."""
        made = self.predictions
        states = made.target_hidden[places]
        labels = None if self.labels is None else self.labels[places]
        row_teachers = None
        if made.target_places is not None:
            _, row_teachers, counts = made.target_places[places].unique_consecutive(
                return_inverse=True, return_counts=True
            )
            firsts = counts.cumsum(0) - counts
            states = states[firsts]
            labels = None if labels is None else labels[firsts]
        logits = self.target_head(states).to(self.dtype)  # [distinct places, vocab]
        if logits.untyped_storage().data_ptr() == states.untyped_storage().data_ptr():
            logits = logits.clone()  # A head without layers; the logits are written into below.
        with self.autocast_off:
            teacher = _read_teacher(logits, made.draft_to_target, labels, self.with_log_probs)
        return teacher, row_teachers

    def _flat_correction(self, places: slice) -> Tensor | None:
        """[predictions, rank], arranged as the hidden states are; None: nothing is corrected."""
        correction = self.predictions.correction
        if correction is None:
            return None
        return correction.hidden[:, places].transpose(0, 1).to(self.matmul_dtype).flatten(0, 1)

    def _add_correction_gradient(
        self,
        gradients: _Gradients,
        gradient: Tensor,
        corrected: Tensor,
        weights: Tensor,
        places: slice,
    ) -> None:
        """The correction's part of the gradient; it is added to the transformed logits."""
        assert self.correction_weight is not None, "there is a correction"
        total = gradients.correction_hidden
        assert total is not None, "made for all inputs"
        rows = (gradient @ self.correction_weight) * weights
        steps = len(total)
        total[:, places] = rows.view(-1, steps, rows.shape[-1]).transpose(0, 1).to(total.dtype)
        if gradients.correction_weight is not None:
            scaled = (corrected * weights).to(self.matmul_dtype)
            _add_product(gradients.correction_weight, gradient.T, scaled)

    def _logits(
        self, hidden: Tensor, corrected: Tensor | None, *, with_gradient: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """[predictions, draft_vocab] draft logits in a buffer.

        Where the target's head transforms them and `with_gradient`, also the graph of that: raw and
        transformed logits.
        """
        logits = self._buffer("logits", (len(hidden), len(self.head_weight)))
        if self.dtype == self.matmul_dtype:
            torch.mm(hidden, self.head_weight.T, out=logits)
        else:
            logits.copy_(hidden @ self.head_weight.T)
        if self.head_bias is not None:
            logits += self.head_bias
        graph = None
        if self.transform is not None:
            raw = logits.clone().requires_grad_(with_gradient)
            with torch.set_grad_enabled(with_gradient):
                transformed = self.transform(raw)
            logits.copy_(transformed.detach())
            graph = (raw, transformed) if with_gradient else None
        if corrected is not None:
            assert self.correction_weight is not None, "there is a correction"
            _add_product(logits, corrected, self.correction_weight.T)
        return logits, graph

    def _visit_tiles(
        self, logits: Tensor, teacher: Teacher, row_teachers: Tensor | None, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, acceptances and first maxima [places, steps]; the gradient takes the place of
        the logits."""
        losses = logits.new_empty(logits.shape[:2])
        acceptance = torch.empty_like(losses)
        top = torch.empty(losses.shape, dtype=torch.long, device=losses.device)
        for places in _slices(len(logits), self.tile_places):
            part = logits[places]
            taught = teacher.part(places if row_teachers is None else row_teachers[places])
            best = _argmax(part.flatten(0, 1)).view(*part.shape[:2], 1)
            top[places] = best.squeeze(-1)
            top_logit = part.gather(-1, best)
            probs, scratch = (self._buffer(name, part.shape) for name in ("probs", "scratch"))
            torch.softmax(part, -1, out=probs)
            # logsumexp from the largest probability: softmax does not hand out its normaliser.
            log_normaliser = (top_logit - probs.gather(-1, best).log()).squeeze(-1)
            overlap = torch.minimum(probs, taught.full_probs[:, None], out=scratch)
            torch.sum(overlap, -1, out=acceptance[places])
            losses[places] = self.loss(
                Tile(
                    part, probs, scratch, log_normaliser, acceptance[places], taught, with_gradient
                )
            )
            del taught  # Not kept while the next tile's is chosen.
        return losses, acceptance, top

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """[*shape] uninitialised; the first request of a name is the largest."""
        if name not in self.buffers:
            self.buffers[name] = torch.empty(
                shape, dtype=self.dtype, device=self.predictions.draft_hidden.device
            )
        return self.buffers[name][: shape[0]]


def _shared_head(
    predictions: Predictions, target_head: nn.Module, dtype: torch.dtype
) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
    """What the target's head does to the draft's raw logits: its bias [draft_vocab], its transform.

    Both None where the draft has a head of its own, or where the target's does nothing of the kind.
    """
    if not predictions.shares_target_head:
        return None, None
    bias: Any = target_head.bias
    if bias is not None:
        if predictions.draft_to_target is not None:
            bias = bias[predictions.draft_to_target]
        bias = bias.detach().to(dtype)
    transform: Any = None if target_head.is_plain else target_head.transform
    return bias, transform


def _read_teacher(
    logits: Tensor, draft_to_target: Tensor | None, labels: Tensor | None, with_log_probs: bool
) -> Teacher:
    """Softmax over the whole vocabulary, then the draft vocabulary's part of it, renormalised.

    Writes into the logits.
    """
    log_probs = _floored_log_probs(logits, draft_to_target) if with_log_probs else None
    top_token = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    tile = TILE_ELEMENTS.get(logits.device.type, TILE_ELEMENTS_ACCELERATOR)
    size = max(tile // logits.shape[-1], 1)
    buffer = torch.empty_like(logits[:size])
    for rows in _slices(len(logits), size):
        part = logits[rows]
        top_token[rows] = _argmax(part)
        part.copy_(torch.softmax(part, -1, out=buffer[: len(part)]))
    probs = logits
    if labels is not None:
        labels = torch.where(labels == TOP_LABEL, top_token, labels)
    if draft_to_target is None:
        known = torch.ones_like(top_token, dtype=torch.bool) if labels is None else labels >= 0
        label = None if labels is None else labels.clamp_min(0)
        return Teacher(probs, probs, top_token, known, label, log_probs)
    taught = top_token if labels is None else labels
    place = torch.searchsorted(draft_to_target, taught).clamp_max(len(draft_to_target) - 1)
    known = draft_to_target[place] == taught
    full_probs = probs.index_select(-1, draft_to_target)
    # Where all of the draft vocabulary underflows its argmax is outside, and the weight is 0.
    mass = full_probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
    label = None if labels is None else place
    return Teacher(full_probs, full_probs / mass, top_token, known, label, log_probs)


def _floored_log_probs(logits: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """log p' from the logits: no finite logit underflows on the way; -inf becomes the floor."""
    restricted = logits if draft_to_target is None else logits.index_select(-1, draft_to_target)
    restricted = restricted.clamp_min(torch.finfo(logits.dtype).min)
    return restricted.log_softmax(-1).clamp_min_(LOG_PROB_FLOOR)


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
