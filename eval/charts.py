"""Charts as inline SVG: bars, grouped bars, rows and lines; no script, no library, no network.

    bar_chart(...)          one value per label, upright
    grouped_bar_chart(...)  several series per label, upright
    row_chart(...)          one value per label, lying: for long labels
    line_chart(...)         curves over numbers

Each returns a <figure> as `Markup`. It can be read without colour (values are printed on bars;
series differ by filling and outline, curves by marker and dash), without sight (role="img", a
title, and a description that names every value), and in the dark (colours are CSS variables). A
page that shows charts includes `chart_style()` once.

Values may be None: "not measured", shown as a dash, never as 0.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from draftsmith.eval.markup import MISSING, Markup, element, join

WIDTH = 400
"""Units of the picture, about pixels: narrow, so that a phone need not shrink the text."""
PLOT_HEIGHT = 190
GROUP_GAP = 12
MAX_BAR = 56
ROW_HEIGHT = 26
CHARACTER = 7.2
"""Estimated width of a character at the charts' font size."""
MARGIN_LEFT, MARGIN_TOP, MARGIN_BOTTOM = 58, 18, 40

DASHES = (None, "7 4", "2 3", "9 3 2 3")
MAX_SERIES = len(DASHES)


@dataclass(frozen=True)
class Series:
    """Values of one kind, one per label of the chart."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one line, in drawing order."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Reference:
    """A thin line at a value that the others are to be compared with."""

    value: float
    name: str


Format = Callable[[float], str]


def two_decimals(value: float) -> str:
    return f"{value:.2f}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def plain_number(value: float) -> str:
    """As short as it can be: 3, 0.25, 12000."""
    return f"{value:.10g}"


def chart_style() -> str:
    """CSS of all charts; it also defines the colour variables, light and dark."""
    folder = importlib.resources.files("draftsmith.eval") / "page"
    return (folder / "charts.css").read_text(encoding="utf-8")


def bar_chart(
    title: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    *,
    x_label: str,
    y_label: str,
    value_format: Format = two_decimals,
    y_max: float | None = None,
    reference: Reference | None = None,
) -> Markup:
    """One upright bar per label; see `grouped_bar_chart`."""
    return grouped_bar_chart(
        title,
        labels,
        [Series(y_label, values)],
        x_label=x_label,
        y_label=y_label,
        value_format=value_format,
        y_max=y_max,
        reference=reference,
    )


def grouped_bar_chart(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    value_format: Format = two_decimals,
    y_max: float | None = None,
    reference: Reference | None = None,
) -> Markup:
    """Upright bars from 0, side by side for each label.

    Args:
        title: shown above, and the picture's accessible name.
        labels: one per group, short.
        series: at most MAX_SERIES, each with a value >= 0 or None per label.
        x_label, y_label: what the axes are, with units.
        value_format: how the value printed on a bar is written.
        y_max: end of the axis; None: the largest value, rounded up.
        reference: a value to compare with.

    Returns:
        A <figure>.

    Raises:
        ValueError: nothing to draw, too many series, a series with another number of values than
            there are labels, or a negative value.
    """
    _check(title, labels, series)
    known = [value for one in series for value in one.values if value is not None]
    ticks = axis_ticks(0.0, _end(known, y_max, reference))
    # Room for the value printed on each bar: many bars make the picture wider, never illegible.
    narrowest = CHARACTER * max((len(value_format(value)) for value in known), default=1) + 2
    even = ((WIDTH - MARGIN_LEFT) / len(labels) - GROUP_GAP) / len(series)
    bar = max(narrowest, min(even, MAX_BAR))
    group = max(bar * len(series) + GROUP_GAP, (WIDTH - MARGIN_LEFT) / len(labels))
    frame = _Frame(
        width=MARGIN_LEFT + group * len(labels), height=PLOT_HEIGHT, bottom=0.0, top=ticks[-1]
    )
    marks: list[Markup] = []
    for index, label in enumerate(labels):
        middle = MARGIN_LEFT + group * (index + 0.5)
        first = middle - bar * len(series) / 2
        for number, one in enumerate(series):
            marks.append(
                _bar(frame, first + bar * number, bar, one.values[index], number, value_format)
            )
        marks.append(_text(label, middle, frame.base + 15, anchor="middle"))
    picture = join(frame.grid(ticks, value_format), *marks, frame.names(x_label, y_label))
    if reference is not None:
        picture = join(picture, frame.level(reference))
    return _figure(
        title, _describe(labels, series, value_format), picture, series, frame.size, reference
    )


def row_chart(
    title: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    *,
    x_label: str,
    value_format: Format = two_decimals,
    x_max: float | None = None,
    reference: Reference | None = None,
) -> Markup:
    """One lying bar per label, from the top down; arguments as of `grouped_bar_chart`."""
    series = [Series(x_label, values)]
    _check(title, labels, series)
    known = [value for value in values if value is not None]
    end = axis_ticks(0.0, _end(known, x_max, reference))[-1]
    room = min(150.0, max(len(label) for label in labels) * CHARACTER)
    left = room + 10
    written = [MISSING if value is None else value_format(value) for value in values]
    scale = (WIDTH - left - max(map(len, written)) * CHARACTER - 12) / end
    marks: list[Markup] = []
    for index, (label, value, text) in enumerate(zip(labels, values, written, strict=True)):
        top = index * ROW_HEIGHT + 6
        short = _shorten(label, room)
        marks.append(_text(short, left - 8, top + 14, anchor="end", full=label))
        length = 0.0 if value is None else value * scale
        marks.append(_rectangle(left, top, length, ROW_HEIGHT - 7, 0))
        marks.append(_text(text, left + length + 6, top + 14, class_="value"))
    base = len(labels) * ROW_HEIGHT + 8
    marks.append(element("path", d=f"M{left:.1f},2 V{base}", class_="axis"))
    if reference is not None:
        x = left + reference.value * scale
        marks.append(element("path", d=f"M{x:.1f},2 V{base}", class_="reference"))
    marks.append(_text(x_label, (left + WIDTH) / 2, base + 15, anchor="middle", class_="name"))
    description = _describe(labels, series, value_format)
    return _figure(title, description, join(*marks), series, (WIDTH, base + 22), reference)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_format: Format = plain_number,
    y_format: Format = two_decimals,
    y_min: float | None = 0.0,
    y_max: float | None = None,
) -> Markup:
    """Curves over numbers, each with a marker per point.

    Args:
        title: shown above, and the picture's accessible name.
        curves: at most MAX_SERIES, each with at least one point.
        x_label, y_label: what the axes are, with units.
        x_format, y_format: how values are written on the axes and in the description.
        y_min, y_max: ends of the axis; None: from the points.

    Returns:
        A <figure>.

    Raises:
        ValueError: nothing to draw, or too many curves.
    """
    if not curves or not all(curve.points for curve in curves) or len(curves) > MAX_SERIES:
        raise ValueError(
            f"chart {title!r}: {len(curves)} curves; expected 1 to {MAX_SERIES} with points."
        )
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_ticks = axis_ticks(min(xs), max(xs))
    y_ticks = axis_ticks(min(ys) if y_min is None else y_min, max(ys) if y_max is None else y_max)
    frame = _Frame(width=WIDTH, height=PLOT_HEIGHT, bottom=y_ticks[0], top=y_ticks[-1])
    step = (WIDTH - MARGIN_LEFT - 14) / (x_ticks[-1] - x_ticks[0])

    def across(x: float) -> float:
        return MARGIN_LEFT + (x - x_ticks[0]) * step

    marks = [
        _text(x_format(tick), across(tick), frame.base + 15, anchor="middle") for tick in x_ticks
    ]
    for number, curve in enumerate(curves):
        places = [(across(x), frame.y(y)) for x, y in curve.points]
        path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        color = f"curve s{number + 1}"
        marks.append(element("path", d=path, class_=color, stroke_dasharray=DASHES[number]))
        for (x, y), point in zip(places, curve.points, strict=True):
            said = f"{curve.name}: {y_format(point[1])} at {x_format(point[0])}"
            marks.append(_marker(number, x, y, said))
    picture = join(frame.grid(y_ticks, y_format), *marks, frame.names(x_label, y_label))
    description = "; ".join(
        f"{curve.name}: "
        + ", ".join(f"{y_format(y)} at {x_label} {x_format(x)}" for x, y in curve.points)
        for curve in curves
    )
    return _figure(title, description, picture, curves, frame.size, None)


def axis_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose low and high.

    Args:
        low, high: low <= high; equal values get an axis of length 1.
        count: about how many steps.
    """
    if high <= low:
        high = low + 1.0
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    # A hair of slack: 0.6 / 0.2 is not 3 in floating point, and must not open another step.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # The ratio of integers is the float nearest to the tick: 3 * 0.1 would print as 0.30000000004.
    digits = max(0, -math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def _check(title: str, labels: Sequence[str], series: Sequence[Series]) -> None:
    if not labels or not 1 <= len(series) <= MAX_SERIES:
        raise ValueError(
            f"chart {title!r}: {len(labels)} labels and {len(series)} series; expected at least "
            f"one label and 1 to {MAX_SERIES} series."
        )
    for one in series:
        if len(one.values) != len(labels):
            raise ValueError(
                f"chart {title!r}: series {one.name!r} has {len(one.values)} values for "
                f"{len(labels)} labels; give None where there is no value."
            )
        if any(value is not None and not value >= 0 for value in one.values):
            raise ValueError(f"chart {title!r}: series {one.name!r} has a value below 0 or NaN.")


def _end(known: Sequence[float], given: float | None, reference: Reference | None) -> float:
    """Where the value axis ends, before rounding up."""
    if given is not None:
        return given
    return max([*known, 0.0 if reference is None else reference.value])


@dataclass(frozen=True)
class _Frame:
    """The plot area of an upright chart: bottom and top are the values at its edges."""

    width: float
    height: float
    bottom: float
    top: float

    @property
    def base(self) -> float:
        return MARGIN_TOP + self.height

    @property
    def size(self) -> tuple[float, float]:
        return self.width, self.base + MARGIN_BOTTOM

    def y(self, value: float) -> float:
        return self.base - (value - self.bottom) / (self.top - self.bottom) * self.height

    def grid(self, ticks: Sequence[float], value_format: Format) -> Markup:
        """Lines across, each with its value; shorter numbers where the format adds nothing."""
        parts: list[Markup] = []
        rounded = [value_format(tick) for tick in ticks]
        distinct = all(a != b for a, b in pairwise(rounded))
        as_percent = rounded[0].endswith("%")
        for tick, text in zip(ticks, rounded, strict=True):
            y = self.y(tick)
            line = "axis" if tick == ticks[0] else "grid"
            parts.append(
                element("path", d=f"M{MARGIN_LEFT},{y:.1f} H{self.width:.1f}", class_=line)
            )
            shown = text if as_percent and distinct else plain_number(tick)
            parts.append(_text(shown, MARGIN_LEFT - 6, y + 4, anchor="end"))
        return join(*parts)

    def names(self, x_label: str, y_label: str) -> Markup:
        middle = (MARGIN_LEFT + self.width) / 2
        across = _text(x_label, middle, self.base + 33, anchor="middle", class_="name")
        y = MARGIN_TOP + self.height / 2
        up = element(
            "text",
            y_label,
            x=f"{-y:.1f}",
            y=11,
            transform="rotate(-90)",
            text_anchor="middle",
            class_="name",
        )
        return join(across, up)

    def level(self, reference: Reference) -> Markup:
        y = self.y(reference.value)
        return element("path", d=f"M{MARGIN_LEFT},{y:.1f} H{self.width:.1f}", class_="reference")


def _text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "start",
    class_: str | None = None,
    full: str | None = None,
) -> Markup:
    """A text; `full` is what it stands for, where it was shortened."""
    tooltip = element("title", full) if full is not None and full != text else None
    return element(
        "text", text, tooltip, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_
    )


def _shorten(text: str, room: float) -> str:
    most = int(room / CHARACTER)
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _rectangle(x: float, y: float, width: float, height: float, number: int) -> Markup:
    return element(
        "rect",
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        width=f"{width:.1f}",
        height=f"{height:.1f}",
        rx=2,
        class_=f"bar s{number + 1}",
    )


def _bar(
    frame: _Frame, x: float, width: float, value: float | None, number: int, value_format: Format
) -> Markup:
    y = frame.base if value is None else frame.y(value)
    text = MISSING if value is None else value_format(value)
    shown = _text(text, x + width / 2, y - 4, anchor="middle", class_="value")
    return join(_rectangle(x + 1, y, width - 2, frame.base - y, number), shown)


def _marker(number: int, x: float, y: float, said: str | None = None) -> Markup:
    """Circle, square, triangle, diamond."""
    shapes = (
        f"M{x - 3.5:.1f},{y:.1f} a3.5,3.5 0 1 0 7,0 a3.5,3.5 0 1 0 -7,0 Z",
        f"M{x - 3.5:.1f},{y - 3.5:.1f} h7 v7 h-7 Z",
        f"M{x:.1f},{y - 4.5:.1f} l4.5,8 h-9 Z",
        f"M{x:.1f},{y - 5:.1f} l5,5 l-5,5 l-5,-5 Z",
    )
    tooltip = None if said is None else element("title", said)
    return element("path", tooltip, d=shapes[number], class_=f"marker s{number + 1}")


def _describe(labels: Sequence[str], series: Sequence[Series], value_format: Format) -> str:
    """Every value in words, for readers who do not see the picture."""
    told = []
    for one in series:
        values = ", ".join(
            f"{label} {'not measured' if value is None else value_format(value)}"
            for label, value in zip(labels, one.values, strict=True)
        )
        told.append(f"{one.name}: {values}")
    return "; ".join(told)


def _legend(series: Sequence[Series | Curve], reference: Reference | None) -> Markup:
    """What fillings, markers and the reference line mean; empty for one series alone."""
    entries: list[Markup] = []
    named = series if len(series) > 1 else []
    for number, one in enumerate(named):
        if isinstance(one, Curve):
            line = element(
                "path",
                d="M0,7 H26",
                class_=f"curve s{number + 1}",
                stroke_dasharray=DASHES[number],
            )
            sample = join(line, _marker(number, 13, 7))
        else:
            sample = _rectangle(4, 1, 18, 12, number)
        entries.append(join(_swatch(sample), element("span", one.name)))
    if reference is not None:
        line = element("path", d="M0,7 H26", class_="reference")
        entries.append(join(_swatch(line), element("span", reference.name)))
    return element("ul", *(element("li", entry) for entry in entries), class_="key")


def _swatch(sample: Markup) -> Markup:
    return element("svg", sample, viewBox="0 0 26 14", width=26, height=14, aria_hidden="true")


def _figure(
    title: str,
    description: str,
    picture: Markup,
    series: Sequence[Series | Curve],
    size: tuple[float, float],
    reference: Reference | None,
) -> Markup:
    """The picture with its title, its description and its legend."""
    width, height = size
    # From the content: two charts of a page never share an id unless they are the same chart.
    name = "chart-" + hashlib.sha256(f"{title}\n{description}".encode()).hexdigest()[:10]
    drawing = element(
        "svg",
        element("title", title, id=f"{name}-t"),
        element("desc", description, id=f"{name}-d"),
        picture,
        role="img",
        aria_labelledby=f"{name}-t",
        aria_describedby=f"{name}-d",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
    )
    wide = width > WIDTH + 1
    box = element(
        "div",
        drawing,
        class_="scroll wide" if wide else "scroll",
        tabindex=0 if wide else None,
        role="region" if wide else None,
        aria_label=f"{title} (scrolls sideways)" if wide else None,
    )
    parts = [element("figcaption", title), box]
    if len(series) > 1 or reference is not None:
        parts.append(_legend(series, reference))
    return element("figure", *parts, class_="chart")
