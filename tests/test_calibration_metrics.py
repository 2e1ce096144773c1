"""Calibration error, ranks and squared error against cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.eval.calibration_metrics import (
    area_under_curve,
    brier_score,
    calibration_errors,
    error_by_chance,
    expected_calibration_error,
    reliability_bins,
)


def test_calibration_error_by_hand() -> None:
    """Two bins: |0.2 - 1/2| of the first two, |0.8 - 2/3| of the other three."""
    said = torch.tensor([0.1, 0.3, 0.7, 0.8, 0.9])
    held = torch.tensor([False, True, True, False, True])
    wanted = 2 / 5 * 0.3 + 3 / 5 * (0.8 - 2 / 3)
    assert expected_calibration_error(said, held, num_bins=2) == pytest.approx(wanted, abs=1e-6)
    # In one bin the errors of both cancel in part: |0.56 - 0.6|.
    assert expected_calibration_error(said, held, num_bins=1) == pytest.approx(0.04, abs=1e-6)


def test_several_sets_of_confidences_are_judged_as_each_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    said = torch.rand(4, 50, generator=draw, dtype=torch.float64)
    held = torch.rand(50, generator=draw) < 0.4
    together = calibration_errors(said, held, num_bins=7).tolist()
    assert together == [expected_calibration_error(one, held, num_bins=7) for one in said]


def test_bins_are_closed_below_and_the_last_one_above() -> None:
    said = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    bins = reliability_bins(said, torch.tensor([True, False, True, True]), num_bins=4)
    assert [one.low for one in bins] == [0.0, 0.25, 0.5, 0.75]
    assert [one.count for one in bins] == [1, 1, 1, 1]
    assert [one.confidence for one in bins] == [0.0, 0.25, 0.5, 1.0]
    assert [one.rate for one in bins] == [1.0, 0.0, 1.0, 1.0]
    empty = reliability_bins(said[:1], torch.tensor([True]), num_bins=2)[1]
    assert (empty.count, empty.confidence, empty.rate) == (0, None, None)


def test_perfect_and_worst_confidences() -> None:
    held = torch.tensor([True, False, True])
    perfect, worst = held.double(), 1.0 - held.double()
    assert expected_calibration_error(perfect, held) == brier_score(perfect, held) == 0.0
    assert expected_calibration_error(worst, held) == brier_score(worst, held) == 1.0
    assert area_under_curve(perfect, held) == 1.0
    assert area_under_curve(worst, held) == 0.0
    assert brier_score(torch.tensor([0.5, 0.2]), torch.tensor([True, False])) == pytest.approx(
        (0.25 + 0.04) / 2
    )


def test_area_under_curve_by_hand() -> None:
    """Of 2 x 3 pairs, 4 are in order and 1 is a tie."""
    scores = torch.tensor([0.9, 0.4, 0.4, 0.1, 0.6])
    held = torch.tensor([True, True, False, False, False])
    assert area_under_curve(scores, held) == pytest.approx((3 + 1 + 0.5) / 6)
    assert area_under_curve(scores, torch.ones(5, dtype=torch.bool)) is None
    assert area_under_curve(scores[:0], held[:0]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=25))
def test_area_under_curve_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, good in rows for b, bad in rows if good and not bad]
    scores = torch.tensor([float(score) for score, _ in rows])
    found = area_under_curve(scores, torch.tensor([held for _, held in rows]))
    assert found == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_exact_confidences_show_an_error_by_chance_that_falls_with_their_number() -> None:
    few = error_by_chance(torch.full((20,), 0.5), draws=200)
    many = error_by_chance(torch.full((2000,), 0.5), draws=200)
    # One bin: the mean of |share - 1/2| is near sqrt(2 / pi) * sqrt(1 / 4 / n).
    assert few == pytest.approx((0.25 / 20 * 2 / torch.pi) ** 0.5, rel=0.15)
    assert many == pytest.approx((0.25 / 2000 * 2 / torch.pi) ** 0.5, rel=0.15)
    assert error_by_chance(torch.tensor([0.0, 1.0])) == 0.0


def test_what_is_no_probability_is_refused() -> None:
    held = torch.tensor([True])
    for wrong in (1.01, -0.01, float("nan")):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            expected_calibration_error(torch.tensor([wrong]), held)
    with pytest.raises(ValueError, match="no observations"):
        expected_calibration_error(torch.tensor([]), held[:0])
