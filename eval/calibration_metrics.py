"""How good confidences are: calibration error, ranking, squared error. Pure functions.

    expected_calibration_error   sum over bins of n_b / n |mean confidence_b - share that held_b|
    area_under_curve             chance that one that held is ranked above one that did not
    brier_score                  mean of (confidence - outcome)^2

Bins are of equal width over [0, 1], closed below and open above, the last one closed (Guo et al.,
arXiv 1706.04599, section 3, with their 15 bins as default); empty bins count nothing.

Axes: n observations, rows (several sets of confidences for the same outcomes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """Observations whose confidences lie in one bin."""

    low: float
    """Where the bin starts."""
    count: int
    confidence: float | None
    """Mean; None for an empty bin."""
    rate: float | None
    """Share of outcomes that held."""


def _bin_of(confidences: Tensor, num_bins: int) -> Tensor:
    if not bool(((confidences >= 0.0) & (confidences <= 1.0)).all()):
        raise ValueError("Confidences must lie in [0, 1]; found a number outside, or NaN.")
    return (confidences * num_bins).long().clamp(max=num_bins - 1)


def _bin_sums(confidences: Tensor, outcomes: Tensor, num_bins: int) -> tuple[Tensor, ...]:
    """[rows, num_bins] counts, sums of confidences and sums of outcomes, of [rows, n] and [n]."""
    rows, n = confidences.shape
    first = torch.arange(rows, device=confidences.device)[:, None] * num_bins
    places = (_bin_of(confidences, num_bins) + first).flatten()
    held = outcomes.to(torch.float64).expand(rows, n).flatten()
    size = rows * num_bins
    sums = (
        torch.bincount(places, minlength=size).double(),
        torch.bincount(places, confidences.double().flatten(), minlength=size),
        torch.bincount(places, held, minlength=size),
    )
    return tuple(one.view(rows, num_bins) for one in sums)


def calibration_errors(
    confidences: Tensor, outcomes: Tensor, *, num_bins: int = NUM_BINS
) -> Tensor:
    """The expected calibration error of several sets of confidences for the same outcomes.

    Args:
        confidences: [rows, n] in [0, 1].
        outcomes: [n] bool.
        num_bins: Of equal width.

    Returns:
        [rows] float64.

    Raises:
        ValueError: no observations, or a confidence outside [0, 1].
    """
    if not len(outcomes):
        raise ValueError("There are no observations to take a calibration error of.")
    _, said, held = _bin_sums(confidences, outcomes, num_bins)
    return (said - held).abs().sum(-1) / len(outcomes)


def expected_calibration_error(
    confidences: Tensor, outcomes: Tensor, *, num_bins: int = NUM_BINS
) -> float:
    """See the module; [n] confidences and [n] bool outcomes, at least one."""
    return float(calibration_errors(confidences[None], outcomes, num_bins=num_bins))


def error_by_chance(
    confidences: Tensor, *, num_bins: int = NUM_BINS, draws: int = 50, seed: int = 0
) -> float:
    """The calibration error that perfect confidences would show with so few observations.

    The mean over `draws` sets of outcomes drawn independently from the [n] confidences themselves.
    """
    generator = torch.Generator().manual_seed(seed)
    found = 0.0
    for _ in range(draws):
        outcomes = torch.rand(confidences.shape, generator=generator, dtype=torch.float64)
        found += expected_calibration_error(confidences, outcomes < confidences, num_bins=num_bins)
    return found / draws


def reliability_bins(
    confidences: Tensor, outcomes: Tensor, *, num_bins: int = NUM_BINS
) -> list[ReliabilityBin]:
    """What a reliability diagram shows, of [n] confidences and [n] bool outcomes."""
    sums = (one[0].tolist() for one in _bin_sums(confidences[None], outcomes, num_bins))
    return [
        ReliabilityBin(
            place / num_bins,
            int(count),
            said / count if count else None,
            held / count if count else None,
        )
        for place, (count, said, held) in enumerate(zip(*sums, strict=True))
    ]


def area_under_curve(scores: Tensor, outcomes: Tensor) -> float | None:
    """Area under the receiver operating characteristic, by ranks; equal scores count half.

    Args:
        scores: [n] of any scale: only their order counts.
        outcomes: [n] bool.

    Returns:
        None where all outcomes are the same.
    """
    held = int(outcomes.sum())
    failed = len(outcomes) - held
    if not held or not failed:
        return None
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1.0) / 2.0)[places]  # From 1; ties have their mean.
    above = float(ranks[outcomes].sum()) - held * (held + 1) / 2
    return above / (held * failed)


def brier_score(confidences: Tensor, outcomes: Tensor) -> float:
    """[n] confidences and [n] bool outcomes, at least one."""
    return float((confidences.double() - outcomes.double()).pow(2).mean())
