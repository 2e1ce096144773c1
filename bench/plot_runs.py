"""Pictures for the documentation from training runs: right tokens by position, and progress.

    python bench/plot_runs.py --runs dspark=runs/dspark none=runs/none dflash=runs/dflash \
        --output docs/pictures --name heads

Reads the runs' metrics.jsonl and writes two SVG files that stand alone (colours follow the reader's
light or dark mode):

    NAME_accuracy.svg   share of right tokens by drafted position, given the text before it, in the
                        last validation
    NAME_progress.svg   simulated accepted length (greedy) of training steps, means of five entries
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

from rich.console import Console

from draftsmith.eval.charts import DASHES, MAX_SERIES, Curve, chart_style, line_chart, percent

LEGEND_ROW = 20
"""Height of a line of the legend, in units of the picture."""
RIGHT_EDGE = 14
"""Room for the half of the last label that stands out of the chart, in units of the picture."""
SMOOTHED = 5
"""Entries of metrics.jsonl that make one point of the progress."""


def read_metrics(run: Path) -> list[dict[str, object]]:
    """The entries of a run's metrics.jsonl.

    Raises:
        SystemExit: there are none.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; expected the folder of a draftsmith-train run.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracy_curve(name: str, entries: list[dict[str, object]]) -> Curve:
    """Of the last validation."""
    measured = [entry["validation_accuracy"] for entry in entries if "validation_accuracy" in entry]
    if not measured:
        raise SystemExit(f"{name} was never validated; set data.validation_share.")
    shares = measured[-1]
    assert isinstance(shares, list)
    return Curve(name, [(float(place), share) for place, share in enumerate(shares, start=1)])


def progress_curve(name: str, entries: list[dict[str, object]]) -> Curve:
    """Of training steps."""
    key = "simulated_accepted_length_greedy"
    steps = [(float(str(one["step"])), float(str(one[key]))) for one in entries if key in one]
    parts = [steps[start : start + SMOOTHED] for start in range(0, len(steps), SMOOTHED)]
    points = [
        (part[-1][0], statistics.fmean(value for _, value in part))
        for part in parts
        if len(part) == SMOOTHED
    ]
    return Curve(name, points)


def standalone(figure: str, names: list[str]) -> str:
    """The picture of a figure as a file of its own, its legend below it."""
    found = re.search(r"<svg.*?</svg>", figure, re.DOTALL)
    assert found is not None, "a chart is a picture"
    width, height = (int(one) for one in re.findall(r'viewBox="0 0 (\d+) (\d+)"', found[0])[0])
    legend = []
    for number, name in enumerate(names):
        y = height + LEGEND_ROW * number + 8
        dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
        legend.append(f'<path d="M58,{y} H96" class="curve s{number + 1}"{dash}/>')
        legend.append(f'<text x="104" y="{y + 4}">{name}</text>')
    total = height + LEGEND_ROW * len(names) + 8
    width += RIGHT_EDGE
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
        f'width="{width}" height="{total}" role="img" class="chart">'
    )
    style = f"<style>{chart_style()}\ntext {{ font: 13px sans-serif; }}</style>"
    body = re.sub(r"^<svg[^>]*>", "", found[0]).removesuffix("</svg>")
    return f"{opening}{style}{body}{''.join(legend)}</svg>\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Pictures from training runs.")
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    runs = dict(one.split("=", 1) for one in options.runs)
    if len(runs) > MAX_SERIES:
        raise SystemExit(f"{len(runs)} runs; a picture holds {MAX_SERIES}.")
    entries = {name: read_metrics(Path(folder)) for name, folder in runs.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    for kind, curve_of, labels, y_format in (
        ("accuracy", accuracy_curve, ("drafted position", "right tokens"), percent),
        ("progress", progress_curve, ("update", "simulated accepted length"), None),
    ):
        curves = [curve_of(name, found) for name, found in entries.items()]
        figure = line_chart(
            f"{labels[1]} by {labels[0]}",
            curves,
            x_label=labels[0],
            y_label=labels[1],
            y_min=0.0 if kind == "accuracy" else 1.0,
            **({"y_format": y_format} if y_format else {}),
        )
        path = options.output / f"{options.name}_{kind}.svg"
        path.write_text(standalone(str(figure), list(entries)), encoding="utf-8")
        Console().print(f"written: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
