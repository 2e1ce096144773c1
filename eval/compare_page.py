"""compare.html: the plots and the table of a comparison, self-contained and without script.

Colours and charts are those of report.html (draftsmith.eval.charts, eval/page/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from draftsmith.eval.charts import (
    MAX_SERIES,
    Curve,
    Reference,
    Series,
    grouped_bar_chart,
    line_chart,
    percent,
)
from draftsmith.eval.comparison import ComparedLane, Comparison
from draftsmith.eval.markup import Markup, element
from draftsmith.eval.plain_page import number_table, render_plain_page
from draftsmith.inference.policies import ChainPolicy

PLAIN = Reference(1.0, "plain decoding: 1")


def _slices(drafts: Sequence[str]) -> Iterator[list[str]]:
    """Draft models that fit into one chart."""
    for start in range(0, len(drafts), MAX_SERIES):
        yield list(drafts[start : start + MAX_SERIES])


def _by_setting(comparison: Comparison, drafts: Sequence[str]) -> Iterator[Markup]:
    """Accepted length and speed-up of every setting."""
    settings = comparison.settings

    def series(value_of: str) -> list[Series]:
        return [
            Series(
                draft,
                [getattr(comparison.lane(draft, setting), value_of) for setting in settings],
            )
            for draft in drafts
        ]

    for title, name, y_label in (
        ("Accepted length by setting", "accepted_length", "tokens per round"),
        ("Speed-up over plain decoding by setting", "speed_up", "times plain decoding"),
    ):
        shown = series(name)
        if any(value is not None for one in shown for value in one.values):
            yield grouped_bar_chart(
                title, settings, shown, x_label="setting", y_label=y_label, reference=PLAIN
            )


def _by_chain_length(comparison: Comparison, drafts: Sequence[str]) -> Iterator[Markup]:
    """Accepted length over chain length, where several greedy or equally sampled chains are."""

    def chains(draft: str) -> list[ComparedLane]:
        lanes = [comparison.lane(draft, setting) for setting in comparison.settings]
        settings = [lane.result.settings for lane in lanes]
        return [
            lane
            for lane, one in zip(lanes, settings, strict=True)
            if isinstance(one.policy, ChainPolicy) and one.confidence_threshold is None
        ]

    def sampling_of(lane: ComparedLane) -> str:
        return repr(lane.result.settings.sampling)

    curves: dict[str, list[Curve]] = {}
    for draft in drafts:
        ordered = sorted(chains(draft), key=sampling_of)
        for sampling, lanes in groupby(ordered, key=sampling_of):
            points = sorted(
                (float(lane.result.settings.policy.max_depth), lane.accepted_length or 1.0)
                for lane in lanes
            )
            if len({x for x, _ in points}) > 1:
                curves.setdefault(sampling, []).append(Curve(draft, points))
    for shown in curves.values():
        yield line_chart(
            "Accepted length by chain length",
            shown,
            x_label="drafted tokens per round",
            y_label="tokens per round",
        )


def _by_category(comparison: Comparison, drafts: Sequence[str], setting: str) -> Markup:
    """Accepted length of every category."""
    return grouped_bar_chart(
        f"Accepted length by category: {setting}",
        comparison.categories,
        [
            Series(
                draft,
                [
                    group.acceptance.accepted_length
                    for group in comparison.lane(draft, setting).result.by_category.values()
                ],
            )
            for draft in drafts
        ],
        x_label="category",
        y_label="tokens per round",
        reference=PLAIN,
    )


def _by_position(comparison: Comparison, drafts: Sequence[str], setting: str) -> Markup | None:
    """Share of rounds that keep the first i drafted tokens."""
    curves = []
    for draft in drafts:
        joint = comparison.lane(draft, setting).result.overall.acceptance.joint_acceptance
        points = [
            (float(place), share) for place, share in enumerate(joint, start=1) if share is not None
        ]
        if points:
            curves.append(Curve(draft, points))
    if not curves:
        return None
    return line_chart(
        f"Drafts kept up to each position: {setting}",
        curves,
        x_label="draft position",
        y_label="share of rounds",
        y_format=percent,
        y_max=1.0,
    )


def _charts(comparison: Comparison) -> Iterator[Markup]:
    for drafts in _slices(comparison.drafts):
        yield from _by_setting(comparison, drafts)
        yield from _by_chain_length(comparison, drafts)
        for setting in comparison.settings:
            yield _by_category(comparison, drafts, setting)
            positions = _by_position(comparison, drafts, setting)
            if positions is not None:
                yield positions


def render_comparison(
    comparison: Comparison,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    """Draws the page.

    Args:
        comparison: what `compare` found.
        heads, rows: the table, as in the terminal.
        notes: lines below it.

    Returns:
        HTML.
    """
    return render_plain_page(
        "draftsmith comparison",
        f"Draft models on {comparison.target}",
        element("h2", "All numbers"),
        number_table("All numbers", heads, rows),
        *(element("p", note, class_="soft") for note in notes),
        element("h2", "Plots"),
        element("div", *_charts(comparison), class_="charts"),
    )
