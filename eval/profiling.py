"""draftsmith-profile: how long the target's forward takes for 1, 2, 3, ... tokens.

    draftsmith-profile target=smollm2 target.dtype=float32 output=runs/profile

Measures the steps-per-second curve that DSpark's scheduler reads (`draftsmith.eval.curve`), with
the engine's own packed forward: the tokens of all requests in one row, each request over its own
cache, logits of every token. The number of tokens is what a forward costs by; how many requests
they belong to matters less, and follows from `tokens_per_request`.

Every kind of forward (a number of tokens at a context length) runs once untimed, then once per
repeat. Within a repeat all kinds take turns in a random order, so that a disturbance of the machine
hits no kind alone. Caches hold one real prefix of random tokens, copied: each request reads memory
of its own. The verb writes profile.json, profile.txt and profile.html.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.progress import track
from rich.table import Table
from rich.text import Text

from draftsmith.conf.schema_serving import ProfileConfig
from draftsmith.eval.charts import MAX_SERIES, Curve, line_chart
from draftsmith.eval.conditions import describe_conditions
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.markup import Markup, element
from draftsmith.eval.plain_page import number_table, render_plain_page
from draftsmith.eval.report import as_text, number, report_console, write_aside
from draftsmith.inference.records import Stopwatch
from draftsmith.models.packed import PackedModel, Segment
from draftsmith.models.target import TargetModel


def spread_tokens(num_tokens: int, tokens_per_request: int) -> list[int]:
    """Tokens of each request in a forward, as even as they can be.

    Args:
        num_tokens: at least 1.
        tokens_per_request: of one request, at most.
    """
    requests = -(-num_tokens // tokens_per_request)
    shared, more = divmod(num_tokens, requests)
    return [shared + 1] * more + [shared] * (requests - more)


class _Forwards:
    """Requests with filled caches, and timed forwards over them."""

    def __init__(
        self, target: TargetModel, *, num_requests: int, context: int, room: int, seed: int
    ) -> None:
        """Reads one prefix of `context` tokens; `room` more fit into every cache."""
        self._packed = PackedModel.of(target)
        self._watch = Stopwatch(target.device)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(target.vocab_size, (context + room,), generator=generator)
        self._tokens = tokens.to(target.device)
        first = self._packed.new_cache(context + room)
        self._packed.forward([Segment(first, self._tokens[:context], 0)])
        first.keep(range(context))
        self._caches = [first, *(first.copy() for _ in range(num_requests - 1))]

    def seconds(self, sizes: Sequence[int], context: int) -> float:
        """Times a forward of `sizes` tokens per request behind `context` tokens each."""
        for cache in self._caches[: len(sizes)]:
            cache.committed = context  # Recurrent states stay those of the longest: no difference.
        self._watch.mark()
        segments = [
            Segment(cache, self._tokens[context : context + size], context)
            for cache, size in zip(self._caches, sizes, strict=False)
        ]
        self._packed.forward(segments, logits="all")
        self._watch.mark()
        for segment in segments:
            segment.cache.keep(())
        return self._watch.read()[-1]


@torch.inference_mode()
def measure_curve(
    target: TargetModel,
    *,
    token_counts: Sequence[int],
    context_lengths: Sequence[int],
    tokens_per_request: int,
    repeats: int,
    seed: int = 0,
    show_progress: bool = False,
) -> StepsPerSecond:
    """Measures the curve; arguments as in `ProfileConfig`.

    Raises:
        ValueError: the target has too few positions, or cannot be read in packed forwards.
    """
    sizes = {count: spread_tokens(count, tokens_per_request) for count in token_counts}
    room = max(max(one) for one in sizes.values())
    longest = max(context_lengths)
    if longest + room > target.max_positions:
        raise ValueError(
            f"context_lengths has {longest}, but the target has {target.max_positions} positions, "
            f"of which the new tokens take {room}. Give at most {target.max_positions - room}."
        )
    forwards = _Forwards(
        target, num_requests=max(map(len, sizes.values())), context=longest, room=room, seed=seed
    )
    kinds = [(context, count) for context in context_lengths for count in token_counts]
    timings: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    order = random.Random(seed)
    for repeat in track(
        range(repeats + 1),
        "forwards",
        console=Console(stderr=True),
        transient=True,
        disable=not show_progress,
    ):
        order.shuffle(kinds)
        for context, count in kinds:
            seconds = forwards.seconds(sizes[count], context)
            if repeat:  # The first pass warms up.
                timings[context, count].append(seconds)
    return StepsPerSecond(
        list(token_counts),
        list(context_lengths),
        [[timings[context, count] for count in token_counts] for context in context_lengths],
        [len(sizes[count]) for count in token_counts],
        {
            "target": target.name_or_path,
            "fingerprint": asdict(target.fingerprint),
            "environment": describe_conditions(target),
            "tokens_per_request": tokens_per_request,
            "repeats": repeats,
            "seed": seed,
        },
    )


HEADS = (
    "context", "tokens", "requests", "ms, median", "ms, minimum", "steps/s", "envelope",
    "times 1 token",
)  # fmt: skip


def curve_rows(curve: StepsPerSecond) -> Iterator[list[str]]:
    """The table below HEADS, one row per kind of forward."""
    tables = (
        curve.median_seconds,
        curve.minimum_seconds,
        curve.steps_per_second,
        curve.envelope,
    )
    for context, *rows in zip(curve.context_lengths, *tables, strict=True):
        columns = zip(curve.token_counts, curve.num_requests, *rows, strict=True)
        for count, requests, median, minimum, rate, envelope in columns:
            yield [
                str(context),
                str(count),
                str(requests),
                number(1000 * median, 2),
                number(1000 * minimum, 2),
                number(rate, 1),
                number(envelope, 1),
                f"{median / rows[0][0]:.2f}x",
            ]


def make_notes(curve: StepsPerSecond) -> list[str]:
    """Conditions, and how far the machine can be believed."""
    conditions = curve.conditions["environment"]
    versions = ", ".join(f"{name} {one}" for name, one in conditions["versions"].items())
    pairs = zip(curve.median_seconds, curve.minimum_seconds, strict=True)
    worst = max(a / b for row, fastest in pairs for a, b in zip(row, fastest, strict=True))
    return [
        f"conditions: {conditions['dtype']}, {conditions['device']}, {conditions['threads']} "
        f"threads, attention {conditions['attention']} (decoding uses its own), {versions}",
        f"{curve.conditions['repeats']} timed forwards of every kind, interleaved in random order "
        f"(seed {curve.conditions['seed']}); up to {curve.conditions['tokens_per_request']} tokens "
        "per request",
        f"medians lie up to {worst:.2f} times above minima"
        + (": the machine was busy with other things, or too few repeats" if worst > 1.2 else ""),
        "envelope: the highest steps/s at this or any larger number of tokens",
    ]


def render(curve: StepsPerSecond) -> Group:
    """Table and notes, for any rich console."""
    table = Table(
        title=Text(f"steps per second of {curve.conditions['target']}"),
        title_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    for head in HEADS:
        table.add_column(head, justify="right")
    rows = list(curve_rows(curve))
    for place, row in enumerate(rows):
        after = rows[place + 1 : place + 2]
        table.add_row(*map(Text, row), end_section=bool(after) and after[0][0] != row[0])
    return Group(table, *(Text(note) for note in make_notes(curve)))


def _charts(curve: StepsPerSecond) -> Iterator[Markup]:
    counts = curve.token_counts

    def points(values: Sequence[float], scale: float = 1.0) -> list[tuple[float, float]]:
        return [(x, scale * y) for x, y in zip(counts, values, strict=True)]

    by_context = list(
        zip(
            curve.context_lengths,
            curve.steps_per_second,
            curve.envelope,
            curve.median_seconds,
            strict=True,
        )
    )
    for start in range(0, len(by_context), MAX_SERIES):
        yield line_chart(
            "Time of a forward",
            [
                Curve(f"context of {context}", points(seconds, 1000.0))
                for context, _, _, seconds in by_context[start : start + MAX_SERIES]
            ],
            x_label="tokens in the forward",
            y_label="ms, median",
        )
    for context, raw, envelope, _ in by_context:
        yield line_chart(
            f"Steps per second, context of {context}",
            [Curve("as measured", points(raw)), Curve("envelope", points(envelope))],
            x_label="tokens in the forward",
            y_label="steps per second",
        )


def render_curve(curve: StepsPerSecond) -> str:
    """profile.html."""
    return render_plain_page(
        "draftsmith profile",
        f"Steps per second of {curve.conditions['target']}",
        element("div", *_charts(curve), class_="charts"),
        element("h2", "All numbers"),
        number_table("All numbers", HEADS, list(curve_rows(curve))),
        *(element("p", note, class_="soft") for note in make_notes(curve)),
    )


def write_curve(curve: StepsPerSecond, folder: Path, console: Console) -> None:
    """Prints the table and writes profile.json, profile.txt and profile.html into `folder`.

    Args:
        curve: what `measure_curve` found.
        folder: made if missing; files of an earlier profile are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, Any] = {
        "profile.json": json.dumps(curve.to_json(), indent=1),
        "profile.txt": as_text(render(curve)),
        "profile.html": render_curve(curve),
    }
    written = [write_aside(folder, name, text) for name, text in texts.items()]
    console.print(render(curve))
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def run(config: ProfileConfig) -> None:
    """The verb: loads the target, measures and writes."""
    target = TargetModel.load(**asdict(config.target))
    curve = measure_curve(
        target,
        token_counts=config.token_counts,
        context_lengths=config.context_lengths,
        tokens_per_request=config.tokens_per_request,
        repeats=config.repeats,
        seed=config.seed,
        show_progress=True,
    )
    write_curve(curve, Path(config.output), report_console())
