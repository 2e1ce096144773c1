"""Sequential temperature scaling of a confidence head, and what it is worth. Pure functions.

DSpark, section 3.2: on held-out rounds, position by position from left to right, the temperature of
position k is the one of a grid that minimises the expected calibration error of the cumulative
product

    a_k = sigmoid(z_1 / T_1) ... sigmoid(z_k / T_k)          z: raw logits of the confidence head

as the chance that drafted tokens 1 to k all stay; T_1 .. T_{k-1} are fixed by then. A temperature
keeps the order of the scores of its position.

An outcome is whether verification kept the token, drawn or not. The exact chance 1 - TV would be
less noisy when sampling, but as a label of the product it is biased: drafted tokens that are kept
are not a fair sample of those that are drafted.

Axes: rounds, steps (positions of a block), n observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.calibration_metrics import (
    NUM_BINS,
    ReliabilityBin,
    area_under_curve,
    brier_score,
    calibration_errors,
    error_by_chance,
    expected_calibration_error,
    reliability_bins,
)

GRID = torch.logspace(-1.0, 1.0, 401, dtype=torch.float64)
"""Temperatures that are tried: 0.1 to 10, each 1.2 % above the last (our choice)."""


@dataclass(frozen=True)
class ObservedRound:
    """One drafted block, all of it verified."""

    logits: tuple[float, ...]
    """Raw confidence logits, one per drafted token that counts."""
    accepted: int
    """How many of these tokens stayed."""


class Observations:
    """Rounds as tensors."""

    def __init__(self, rounds: Sequence[ObservedRound], num_steps: int) -> None:
        """Fills up short rounds; `num_steps` is what a whole block proposes."""
        self.num_rounds = len(rounds)
        self.num_steps = num_steps
        self.logits = torch.zeros(len(rounds), num_steps, dtype=torch.float64)
        self.drafted = torch.zeros(len(rounds), num_steps, dtype=torch.bool)
        """[rounds, steps]: False where a round was shorter."""
        for row, one in enumerate(rounds):
            self.logits[row, : len(one.logits)] = torch.tensor(one.logits, dtype=torch.float64)
            self.drafted[row, : len(one.logits)] = True
        accepted = torch.tensor([one.accepted for one in rounds], dtype=torch.long)
        steps = torch.arange(num_steps)
        self.reached = self.drafted & (accepted[:, None] >= steps)
        """[rounds, steps]: every token before this one stayed."""
        self.held = accepted[:, None] > steps
        """[rounds, steps]: this one stayed too."""

    def confidences(self, temperatures: Sequence[float]) -> Tensor:
        """[rounds, steps] conditional ones; arbitrary where nothing was drafted."""
        return (self.logits / torch.tensor(temperatures, dtype=torch.float64)).sigmoid()


def few_observations(found: Observations, minimum: int) -> list[tuple[int, int]]:
    """(position from 1, observations) of every position that too few rounds reached."""
    counts = found.reached.sum(0).tolist()
    return [(step + 1, count) for step, count in enumerate(counts) if count < minimum]


def fit_temperatures(
    found: Observations, *, num_bins: int = NUM_BINS, fitted_steps: int | None = None
) -> list[float]:
    """The temperatures of all positions; see the module.

    Args:
        found: What to fit on.
        num_bins: Of the calibration error.
        fitted_steps: Positions that are fitted, at least 1; later ones take the last of these
            temperatures. None: all.

    Returns:
        [steps]. Between equal errors the temperature nearest to 1 is taken.
    """
    fitted = found.num_steps if fitted_steps is None else fitted_steps
    nearest = GRID.log().abs().argsort(stable=True)
    grid = GRID[nearest]  # argmin returns the first of equal errors.
    survival = torch.ones(found.num_rounds, dtype=torch.float64)
    temperatures: list[float] = []
    for step in range(fitted):
        rows = found.drafted[:, step]
        logits = found.logits[rows, step]
        products = survival[rows] * (logits / grid[:, None]).sigmoid()  # [grid, n]
        errors = calibration_errors(products, found.held[rows, step], num_bins=num_bins)
        # The grid's middle is 1 up to rounding; a stored value needs no more digits.
        temperatures.append(round(float(grid[errors.argmin()]), 6))
        survival = survival * (found.logits[:, step] / temperatures[-1]).sigmoid()
    return temperatures + temperatures[-1:] * (found.num_steps - fitted)


@dataclass(frozen=True)
class Quality:
    """What confidences are worth on some observations."""

    error: float | None
    """Expected calibration error of the conditional confidence; None without observations."""
    auc: float | None
    brier: float | None
    cumulative_error: float | None
    """Expected calibration error of the product as the chance of all tokens up to here to stay."""
    cumulative_error_by_chance: float | None
    """What it would be on average if the products were exact: the noise of so few rounds."""
    bins: list[ReliabilityBin]
    cumulative_bins: list[ReliabilityBin]


@dataclass(frozen=True)
class PositionQuality:
    """One position of the block, or all together."""

    position: int | None
    """From 1; None: all."""
    num_rounds: int
    """Rounds whose product is judged; for all positions, products."""
    num_reached: int
    """Rounds in which all tokens before stayed: observations of the conditional confidence."""
    num_held: int
    """Of these, in how many the token stayed too."""
    temperature: float | None
    before: Quality
    after: Quality


def _quality(
    found: Observations, temperatures: Sequence[float], steps: slice, num_bins: int
) -> Quality:
    scores = found.logits / torch.tensor(temperatures, dtype=torch.float64)
    confidences = scores.sigmoid()
    products = confidences.cumprod(1)
    reached, drafted = found.reached[:, steps], found.drafted[:, steps]
    said, held = confidences[:, steps][reached], found.held[:, steps][reached]
    product, all_held = products[:, steps][drafted], found.held[:, steps][drafted]
    return Quality(
        expected_calibration_error(said, held, num_bins=num_bins) if len(said) else None,
        area_under_curve(scores[:, steps][reached], held),
        brier_score(said, held) if len(said) else None,
        expected_calibration_error(product, all_held, num_bins=num_bins) if len(product) else None,
        error_by_chance(product, num_bins=num_bins) if len(product) else None,
        reliability_bins(said, held, num_bins=num_bins),
        reliability_bins(product, all_held, num_bins=num_bins),
    )


def judge(
    found: Observations, temperatures: Sequence[float], *, num_bins: int = NUM_BINS
) -> Iterator[PositionQuality]:
    """Before (all temperatures 1) and after: every position, and at last all together."""
    neutral = [1.0] * found.num_steps
    for step in [*range(found.num_steps), None]:
        steps = slice(None) if step is None else slice(step, step + 1)
        reached = found.reached[:, steps]
        yield PositionQuality(
            None if step is None else step + 1,
            int(found.drafted[:, steps].sum()),
            int(reached.sum()),
            int((found.held[:, steps] & reached).sum()),
            None if step is None else temperatures[step],
            _quality(found, neutral, steps, num_bins),
            _quality(found, temperatures, steps, num_bins),
        )
