"""draftsmith-simulate: throughput against load for fixed verification lengths and the scheduler.

    draftsmith-simulate target_profile=runs/profile/profile.json output=runs/simulation

    draftsmith-simulate execute.draft=runs/dspark target=smollm2 target_profile=... output=...

The second form serves loads for real (`draftsmith.eval.execution`); this file is about the first.
It runs `draftsmith.eval.load_simulation` for every load and every policy, on the same requests, and
writes simulate.json, simulate.txt and simulate.html. Steps take what was measured, dents included.
The schedulers know the time of drafting, because that is part of a step, and leave drafting out for
a while where it does not pay (`PausingDrafts`); algorithm 1 reads the curve's envelope.

A curve that was measured less far than the largest load needs is continued: each further token
costs what a token cost on average between the middle and the end of what was measured. The report
says so.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from draftsmith.conf.entry import load_named
from draftsmith.conf.schema_serving import SimulateConfig
from draftsmith.eval.charts import MAX_SERIES, Curve, line_chart, plain_number
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.load_simulation import (
    DraftRound,
    LoadResult,
    OfferedRequest,
    poisson_arrivals,
    simulate_closed_loop,
    simulate_open_loop,
    synthetic_rounds,
    with_draft_time,
)
from draftsmith.eval.markup import Markup, element
from draftsmith.eval.plain_page import number_table, render_plain_page
from draftsmith.eval.report import as_text, number, report_console, write_aside
from draftsmith.inference.length_policies import (
    PAUSE_STEPS,
    AsyncPrefixScheduler,
    FixedLength,
    LengthPolicy,
    PausingDrafts,
    PrefixScheduler,
    StaticThreshold,
)

DRAWN_ROUNDS = 20_000
"""Rounds drawn when none were recorded; requests start at different places of them."""

DEFINITIONS = {
    "load": "closed loop: requests always in flight; open loop: requests that arrive per second",
    "tokens_per_second": "tokens emitted by all requests / seconds of the simulation",
    "request_tokens_per_second": "median over requests of tokens / seconds in a slot",
    "latency_s": "seconds from arrival (closed loop: from entering) to the whole answer: shares "
    "0.5, 0.9 and 0.99 of the requests are faster",
    "verified_per_round": "drafted tokens that the target reads, per request and step",
    "accepted_length": "tokens emitted per request and step",
    "of_best_fixed": "tokens_per_second / that of the best fixed length at this load, no draft "
    "included",
}


def made_up_curve(
    num_tokens: int, *, floor_s: float, flat_tokens: int, token_s: float
) -> list[float]:
    """[num_tokens] rates of a forward that is bound by memory up to `flat_tokens`, then linear."""
    return [
        1.0 / (floor_s + token_s * max(0, count - flat_tokens))
        for count in range(1, num_tokens + 1)
    ]


def continued_curve(rates: Sequence[float], num_tokens: int) -> list[float]:
    """[num_tokens] rates: the given ones, then each token costs as in their second half."""
    known = list(rates[:num_tokens])
    middle = len(rates) // 2
    slope = (1.0 / rates[-1] - 1.0 / rates[middle]) / max(1, len(rates) - 1 - middle)
    return known + [
        1.0 / (1.0 / rates[-1] + slope * beyond) for beyond in range(1, num_tokens - len(known) + 1)
    ]


def read_rounds(path: Path) -> list[DraftRound]:
    """Recorded rounds of a JSONL file.

    Raises:
        ValueError: no such file, no round in it, or a line that is none (named).
    """
    rounds = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"rounds: cannot read {path} ({error}).") from error
    for place, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            one = DraftRound(tuple(map(float, found["confidences"])), int(found["accepted"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{path}, line {place}: expected {{"confidences": [...], "accepted": n}}; found '
                f"{line[:80]!r}."
            ) from error
        if not 0 <= one.accepted <= len(one.confidences):
            raise ValueError(
                f"{path}, line {place}: {one.accepted} accepted of {len(one.confidences)} drafted."
            )
        rounds.append(one)
    if not rounds:
        raise ValueError(f"{path} has no rounds.")
    return rounds


class Workload:
    """Curve, rounds and requests of one configuration."""

    def __init__(self, config: SimulateConfig) -> None:
        """Raises ValueError for files that cannot be read.

        Steps take what was measured, dents included (`rates`); algorithm 1 reads the `envelope`.
        """
        self.config = config
        self.rounds = (
            synthetic_rounds(
                DRAWN_ROUNDS,
                num_draft_tokens=config.num_draft_tokens,
                acceptance=config.acceptance,
                certainty=config.certainty,
                seed=config.seed,
            )
            if config.rounds is None
            else read_rounds(Path(config.rounds))
        )
        longest = max(len(one.confidences) for one in self.rounds)
        needed = max(config.num_slots) * (longest + 1)
        if config.target_profile is None:
            self.measured_tokens = None
            self.rates = made_up_curve(
                needed,
                floor_s=config.floor_ms / 1000,
                flat_tokens=config.flat_tokens,
                token_s=config.token_ms / 1000,
            )
            self.envelope = self.rates
        else:
            curve = StepsPerSecond.load(Path(config.target_profile))
            self.measured_tokens = curve.max_tokens
            measured = curve.rates(config.context_length, raw=True)
            envelope = curve.rates(config.context_length)
            self.rates = continued_curve(measured, needed)
            self.envelope = continued_curve(envelope, needed)

    def requests(self, num_slots: int) -> list[OfferedRequest]:
        """Requests of different lengths, each from its own place of the rounds on."""
        source = random.Random(self.config.seed)
        half = self.config.num_tokens // 2
        found = []
        for _ in range(self.config.requests_per_slot * num_slots):
            start = source.randrange(len(self.rounds))
            wanted = source.randint(self.config.num_tokens - half, self.config.num_tokens + half)
            rounds = self.rounds[start : start + wanted]
            rounds += self.rounds[: wanted - len(rounds)]
            found.append(OfferedRequest(wanted, rounds))
        return found

    def policies(self) -> list[LengthPolicy]:
        """See `make_policies`."""
        return make_policies(
            self.config, self.rates, self.envelope, draft_seconds=self.config.draft_ms / 1000
        )


def make_policies(
    config: SimulateConfig,
    rates: Sequence[float],
    envelope: Sequence[float],
    *,
    draft_seconds: float,
) -> list[LengthPolicy]:
    """Fresh ones, no draft first and the schedulers last.

    Args:
        config: names the fixed lengths and thresholds.
        rates: steps per second of the target's forward as measured.
        envelope: of `rates`.
        draft_seconds: of drafting, per step.
    """
    drafting = with_draft_time(rates, draft_seconds)
    return [
        FixedLength(0),
        *map(FixedLength, config.fixed_lengths),
        *map(StaticThreshold, config.thresholds),
        PausingDrafts(PrefixScheduler(with_draft_time(envelope, draft_seconds)), drafting, rates),
        PausingDrafts(AsyncPrefixScheduler(drafting), drafting, rates),
    ]


def load_row(loop: str, load: float, result: LoadResult) -> dict[str, Any]:
    """The numbers of one policy under one load, see DEFINITIONS."""
    return {
        "loop": loop,
        "load": load,
        "policy": result.policy,
        "tokens_per_second": result.tokens_per_second,
        "request_tokens_per_second": result.request_tokens_per_second,
        "latency_s": {str(share): result.latency(share) for share in (0.5, 0.9, 0.99)},
        "verified_per_round": result.verified_per_round,
        "accepted_length": result.emitted_per_round,
        "served": len(result.served),
        "steps": len(result.steps),
    }


def _loads(
    work: Workload,
) -> Iterator[tuple[str, float, int, Callable[..., LoadResult], list[OfferedRequest]]]:
    """(loop, load, slots, how it is simulated, requests) of every load."""
    for slots in work.config.num_slots:
        yield "closed", slots, slots, simulate_closed_loop, work.requests(slots)
    most = work.config.num_slots[-1]
    for rate in work.config.requests_per_second:
        requests = work.requests(most)
        times = poisson_arrivals(len(requests), requests_per_second=rate, seed=work.config.seed)
        arriving = [replace(one, arrival_s=at) for one, at in zip(requests, times, strict=True)]
        yield "open", rate, most, simulate_open_loop, arriving


def simulate(work: Workload) -> list[dict[str, Any]]:
    """All loads and policies: one row each (see DEFINITIONS), policies of a load together."""
    rows: list[dict[str, Any]] = []
    for loop, load, slots, run_load, requests in _loads(work):
        policies = work.policies()
        group = [
            load_row(
                loop,
                load,
                run_load(
                    requests,
                    policy,
                    work.rates,
                    num_slots=slots,
                    draft_seconds=work.config.draft_ms / 1000,
                ),
            )
            for policy in policies
        ]
        rows += beside_best_fixed(group, policies)
    return rows


def beside_best_fixed(
    group: Sequence[dict[str, Any]], policies: Sequence[LengthPolicy]
) -> list[dict[str, Any]]:
    """Rows of one load, in the order of its policies, with `of_best_fixed` added."""
    best = max(
        row["tokens_per_second"]
        for row, policy in zip(group, policies, strict=True)
        if isinstance(policy, FixedLength)
    )
    return [row | {"of_best_fixed": row["tokens_per_second"] / best} for row in group]


HEADS = (
    "loop", "load", "policy", "tok/s", "of best fixed", "tok/s per request", "latency, median",
    "90 %", "99 %", "verified", "accepted length",
)  # fmt: skip


def row_cells(row: dict[str, Any]) -> list[str]:
    """One line of the table below HEADS."""
    return [
        row["loop"],
        plain_number(row["load"]),
        row["policy"],
        number(row["tokens_per_second"], 1),
        f"{row['of_best_fixed']:.1%}",
        number(row["request_tokens_per_second"], 1),
        *(f"{seconds:.2f} s" for seconds in row["latency_s"].values()),
        number(row["verified_per_round"]),
        number(row["accepted_length"]),
    ]


def make_notes(work: Workload) -> list[str]:
    """Where the curve and the rounds come from, and what is left out."""
    config = work.config
    if work.measured_tokens is None:
        curve = (
            f"made up: {config.floor_ms:g} ms up to {config.flat_tokens} tokens, "
            f"{config.token_ms:g} ms for each further one"
        )
    else:
        curve = f"{config.target_profile}, context of {config.context_length}"
        if work.measured_tokens < len(work.rates):
            curve += f", measured to {work.measured_tokens} tokens and continued as it ends"
    rounds = (
        f"drawn: {config.num_draft_tokens} tokens, mean confidence {config.acceptance:g}, "
        f"certainty {config.certainty:g}, calibrated"
        if config.rounds is None
        else f"{len(work.rounds)} recorded in {config.rounds}"
    )
    return [
        f"curve: {curve}; drafting {config.draft_ms:g} ms per step; schedulers leave it out for "
        f"{PAUSE_STEPS} steps when the last {PAUSE_STEPS} drafted ones did not pay",
        f"rounds: {rounds}; seed {config.seed}",
        "a simulation: prompts, growing contexts and the host's time are left out",
    ]


def render(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> Group:
    """Table and notes, for any rich console."""
    table = Table(box=box.SIMPLE, padding=0)
    for place, head in enumerate(HEADS):
        table.add_column(head, justify="left" if place in (0, 2) else "right", no_wrap=place == 2)
    for place, row in enumerate(rows):
        ends = place + 1 < len(rows) and rows[place + 1]["load"] != row["load"]
        table.add_row(*map(Text, row_cells(row)), end_section=ends)
    return Group(table, *map(Text, notes))


def load_charts(rows: Sequence[dict[str, Any]]) -> Iterator[Markup]:
    """The scheduler beside the others, a few at a time."""
    closed = [row for row in rows if row["loop"] == "closed"]
    names = list(dict.fromkeys(row["policy"] for row in closed))
    others = [name for name in names if name != PrefixScheduler.name]

    def curve(name: str, x: str, y: str) -> Curve:
        own = [row for row in closed if row["policy"] == name]
        return Curve(name, [(math.log2(row[x]) if x == "load" else row[x], row[y]) for row in own])

    for title, x, y, x_label, y_label in (
        (
            "Throughput against speed per request",
            "request_tokens_per_second",
            "tokens_per_second",
            "tokens/s of the median request",
            "tokens/s of all",
        ),
        (
            "Verification length against load",
            "load",
            "verified_per_round",
            "requests in flight (doubling)",
            "drafted tokens read per round",
        ),
        (
            "Throughput against the best fixed length",
            "load",
            "of_best_fixed",
            "requests in flight (doubling)",
            "share of its tokens/s",
        ),
    ):
        for start in range(0, len(others), MAX_SERIES - 1):
            shown = [PrefixScheduler.name, *others[start : start + MAX_SERIES - 1]]
            yield line_chart(
                title,
                [curve(name, x, y) for name in shown],
                x_label=x_label,
                y_label=y_label,
                x_format=(lambda at: f"{2**at:.4g}") if x == "load" else plain_number,
            )


def write_simulation(
    rows: Sequence[dict[str, Any]], work: Workload, folder: Path, console: Console
) -> None:
    """Prints the table and writes simulate.json, simulate.txt and simulate.html into `folder`.

    Args:
        rows: what `simulate` found.
        work: what was simulated.
        folder: made if missing; files of an earlier simulation are replaced.
        console: where the table is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = make_notes(work)
    page = render_plain_page(
        "draftsmith simulation",
        "Verification policies under load",
        element("div", *load_charts(rows), class_="charts"),
        element("h2", "All numbers"),
        number_table("All numbers", HEADS, [row_cells(row) for row in rows]),
        *(element("p", note, class_="soft") for note in notes),
    )
    found = {"settings": asdict(work.config), "definitions": DEFINITIONS, "rows": list(rows)}
    texts = {
        "simulate.json": json.dumps(found, indent=1),
        "simulate.txt": as_text(render(rows, notes)),
        "simulate.html": page,
    }
    written = [write_aside(folder, name, text) for name, text in texts.items()]
    console.print(render(rows, notes))
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def run(config: SimulateConfig) -> None:
    """The verb: simulates or executes, and writes."""
    if config.execute.draft is not None:
        load_named("draftsmith.eval.execution:run")(config)  # It builds on this module.
        return
    work = Workload(config)
    write_simulation(simulate(work), work, Path(config.output), report_console())
