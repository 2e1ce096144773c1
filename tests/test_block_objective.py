"""What DSpark asks of the objectives: `ce_l1`, a correction of small rank, losses one by one.

The slow reference is written from the formulas, with all logits in memory and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.models.protocols import LogitCorrection, Predictions
from draftsmith.train.objectives import make_objective

STEPS, ROWS, HIDDEN, RANK, VOCAB = 2, 7, 6, 3, 11


class Head(nn.Module):
    """A target's head with a bias, and soft-capping if asked."""

    def __init__(self, *, is_plain: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
        self.is_plain = is_plain

    def transform(self, raw: Tensor) -> Tensor:
        return raw if self.is_plain else 2.0 * torch.tanh(raw / 2.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.transform(hidden @ self.weight.T + self.bias)


def make_predictions(head: Head, *, reduced: bool = False) -> tuple[Predictions, list[Tensor]]:
    """Float64 predictions and their differentiable tensors: states, correction, its matrix."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.tensor([0, 2, 3, 5, 8, 9, 10]) if reduced else None
    columns = VOCAB if ids is None else len(ids)
    leaves = [drawn(STEPS, ROWS, HIDDEN), drawn(STEPS, ROWS, RANK), drawn(columns, RANK)]
    for leaf in leaves:
        leaf.requires_grad_()
    supervised = torch.rand(STEPS, ROWS, generator=generator) < 0.8
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[0] = -1
    weights = supervised * torch.rand(STEPS, ROWS, generator=generator, dtype=torch.float64)
    predictions = Predictions(
        draft_hidden=leaves[0],
        draft_head_weight=head.weight if ids is None else head.weight[ids],
        target_hidden=drawn(ROWS, HIDDEN),
        supervised=supervised,
        weights=weights,
        draft_to_target=ids,
        labels=labels,
        shares_target_head=True,
        correction=LogitCorrection(leaves[1], leaves[2]),
    )
    return predictions, leaves


def reference(predictions: Predictions, head: Head, loss: Callable[..., Tensor]) -> Tensor:
    """[steps, rows] losses; `loss` reads log q and p over the draft vocabulary, and the label."""
    ids = predictions.draft_to_target
    ids = torch.arange(VOCAB) if ids is None else ids
    raw = predictions.draft_hidden @ head.weight[ids].T + head.bias[ids]
    assert predictions.correction is not None
    logits = head.transform(raw) + predictions.correction.hidden @ predictions.correction.weight.T
    log_q = logits.log_softmax(-1)
    p = head(predictions.target_hidden).softmax(-1)
    assert predictions.labels is not None
    places = (ids == predictions.labels[:, None]).int().argmax(-1)
    known = (ids == predictions.labels[:, None]).any(-1)
    return known * loss(log_q, p[:, ids], 1.0 - p[:, ids].sum(-1), places)


def ce_l1(log_q: Tensor, p: Tensor, outside: Tensor, label: Tensor) -> Tensor:
    cross_entropy = -log_q.gather(-1, label[:, None].expand(*log_q.shape[:-1], 1)).squeeze(-1)
    return 0.3 * cross_entropy + 0.7 * ((p - log_q.exp()).abs().sum(-1) + outside)


@pytest.mark.parametrize("chunk_elements", [None, 1, 40])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("is_plain", [True, False])
def test_ce_l1_and_its_gradients_are_those_of_the_formula(
    is_plain: bool, reduced: bool, chunk_elements: int | None
) -> None:
    head = Head(is_plain=is_plain)
    predictions, leaves = make_predictions(head, reduced=reduced)
    objective = make_objective("ce_l1", ce_weight=0.3, l1_weight=0.7, chunk_elements=chunk_elements)
    output = objective(predictions, head)
    losses = reference(predictions, head, ce_l1)
    wanted = (predictions.weights * losses).sum()
    torch.testing.assert_close(output.loss_sum, wanted)
    torch.testing.assert_close(
        output.step_loss_sums, (predictions.weights * losses).sum(-1).detach()
    )
    found = torch.autograd.grad(output.loss_sum, leaves)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(one, other)
    # The loss of each prediction, for sums by any other order than the steps'.
    assert output.losses is not None
    known = losses.detach() != 0
    torch.testing.assert_close(output.losses[known], losses.detach()[known])
    assert not output.losses.requires_grad


@pytest.mark.parametrize("name", ["kl", "ce", "tv", "reverse_kl", "lk_alpha", "lk_lambda"])
def test_a_correction_acts_in_every_objective(name: str) -> None:
    """The same logits from a head of their own: [hidden ; correction] @ [matrix | its matrix]."""
    head = Head(is_plain=True)
    predictions, leaves = make_predictions(head)
    output = make_objective(name)(predictions, head)
    ones = torch.ones(STEPS, ROWS, 1, dtype=torch.float64)
    joined = Predictions(
        draft_hidden=torch.cat([leaves[0], leaves[1], ones], dim=-1),
        draft_head_weight=torch.cat([head.weight, leaves[2], head.bias[:, None]], dim=1),
        target_hidden=predictions.target_hidden,
        supervised=predictions.supervised,
        weights=predictions.weights,
        draft_to_target=None,
        labels=predictions.labels,
    )
    wanted = make_objective(name)(joined, head)
    torch.testing.assert_close(output.loss_sum, wanted.loss_sum)
    assert torch.equal(output.correct, wanted.correct)
    torch.testing.assert_close(output.acceptance, wanted.acceptance)
    found = torch.autograd.grad(output.loss_sum, leaves)
    expected = torch.autograd.grad(wanted.loss_sum, leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("chunk_elements", [None, 25])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", ["kl", "ce", "ce_l1", "reverse_kl", "lk_lambda"])
def test_rows_that_share_a_place_are_taught_as_if_each_had_its_own(
    name: str, reduced: bool, chunk_elements: int | None
) -> None:
    head = Head(is_plain=True)
    predictions, leaves = make_predictions(head, reduced=reduced)
    places = torch.tensor([4, 9, 4, 7, 9, 4, 8])
    firsts = torch.tensor([0, 1, 0, 3, 1, 0, 6])
    predictions.target_hidden = predictions.target_hidden[firsts]
    assert predictions.labels is not None
    predictions.labels = predictions.labels[firsts]
    objective = make_objective(name, chunk_elements=chunk_elements)
    wanted = objective(predictions, head)
    taught: list[int] = []
    head.register_forward_pre_hook(lambda _head, given: taught.append(len(given[0])))
    found = objective(replace(predictions, target_places=places), head)
    if chunk_elements is None:
        assert max(taught) == 4
    for one, other in zip(vars(found).values(), vars(wanted).values(), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        torch.autograd.grad(found.loss_sum, leaves),
        torch.autograd.grad(wanted.loss_sum, leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_frozen_correction_matrix_gets_no_gradient() -> None:
    head = Head(is_plain=True)
    predictions, leaves = make_predictions(head)
    leaves[2].requires_grad_(False)
    make_objective("ce_l1")(predictions, head).loss_sum.backward()
    assert leaves[2].grad is None
    assert leaves[1].grad is not None


@pytest.mark.parametrize(
    "settings", [{"ce_weight": -0.1}, {"l1_weight": -1.0}, {"ce_weight": 0.0, "l1_weight": 0.0}]
)
def test_weights_of_ce_l1_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"objective\.ce_weight is"):
        make_objective("ce_l1", **settings)


def test_ce_l1_needs_labels() -> None:
    head = Head(is_plain=True)
    predictions, _ = make_predictions(head)
    predictions.labels = None
    with pytest.raises(ValueError, match="'ce_l1' needs the tokens that follow"):
        make_objective("ce_l1")(predictions, head)
