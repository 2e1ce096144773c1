"""The steps-per-second curve: how often a second the target can read so many tokens at once.

    curve = StepsPerSecond.load(Path("runs/profile/profile.json"))
    lengths = schedule(survival, curve.rates(context_length=512))

SPS(B) of DSpark's scheduler (section 3.2), measured by draftsmith-profile at several context
lengths. All timings are kept; what is looked up comes from their medians.

Raw and envelope. Measured times need not rise with B: kernels have steps, machines have noise. The
envelope is the least non-increasing curve above the raw one: a forward of B tokens can always be
filled up to B' > B, so SPS(B') is within reach for B as well. The scheduler's algorithm 1 stops at
a dent of the raw curve and should get the envelope; the asynchronous variant may have either.

Between measured points the seconds of a step are interpolated linearly, in tokens and in context
length. A context shorter than the shortest measured one counts as that one; beyond the longest
context and the largest number of tokens nothing is known, and a ValueError says so.

Axes: contexts, counts (of tokens), repeats.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

Table = Sequence[Sequence[float]]
"""[contexts, counts]."""

DEFINITIONS = {
    "seconds": "[contexts, counts, repeats] of one forward of the target, warm",
    "num_requests": "[counts] requests that share the tokens of a forward",
    "median_seconds": "[contexts, counts] median over the repeats",
    "minimum_seconds": "[contexts, counts] minimum over the repeats",
    "steps_per_second": "[contexts, counts] 1 / median_seconds",
    "envelope": "[contexts, counts] the largest steps_per_second at this or any larger count",
}


@dataclass(frozen=True)
class StepsPerSecond:
    """Timings of the target's forward by number of tokens and context length."""

    token_counts: Sequence[int]
    """[counts] ascending, from 1."""
    context_lengths: Sequence[int]
    """[contexts] ascending: tokens that every request had in its cache."""
    seconds: Sequence[Sequence[Sequence[float]]]
    """[contexts, counts, repeats] of one forward."""
    num_requests: Sequence[int]
    """[counts] requests that shared the forward."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Target and machine, as draftsmith-profile writes them; JSON types only."""

    def __post_init__(self) -> None:
        counts, contexts = list(self.token_counts), list(self.context_lengths)
        if counts[:1] != [1] or counts != sorted(set(counts)):
            raise ValueError(f"token_counts are {counts}; expected an ascending list from 1.")
        if not contexts or contexts != sorted(set(contexts)) or contexts[0] < 1:
            raise ValueError(f"context_lengths are {contexts}; expected an ascending list >= 1.")
        shape = [len(row) for row in self.seconds]
        if shape != [len(counts)] * len(contexts) or len(self.num_requests) != len(counts):
            raise ValueError(
                f"seconds has rows of {shape} and num_requests {len(self.num_requests)} entries; "
                f"expected {len(contexts)} rows of {len(counts)} and {len(counts)} entries."
            )
        if not all(len(cell) and min(cell) > 0.0 for row in self.seconds for cell in row):
            raise ValueError("seconds has a cell without timings, or one that is not positive.")

    @property
    def max_tokens(self) -> int:
        """Where the curve ends."""
        return self.token_counts[-1]

    @property
    def median_seconds(self) -> list[list[float]]:
        return [[statistics.median(cell) for cell in row] for row in self.seconds]

    @property
    def minimum_seconds(self) -> list[list[float]]:
        return [[min(cell) for cell in row] for row in self.seconds]

    @property
    def steps_per_second(self) -> list[list[float]]:
        """[contexts, counts] as measured."""
        return [[1.0 / one for one in row] for row in self.median_seconds]

    @property
    def envelope(self) -> list[list[float]]:
        """[contexts, counts] non-increasing in the number of tokens."""
        return [[1.0 / one for one in row] for row in self._envelope_seconds]

    @property
    def _envelope_seconds(self) -> list[list[float]]:
        return [list(accumulate(row[::-1], min))[::-1] for row in self.median_seconds]

    def sps(self, num_tokens: int, context_length: float, *, raw: bool = False) -> float:
        """Steps per second of forwards that carry `num_tokens` tokens.

        Args:
            num_tokens: 1 to `max_tokens`, all requests' together.
            context_length: tokens in the cache of each request, or their mean.
            raw: as measured, instead of the envelope.

        Raises:
            ValueError: more tokens or a longer context than were measured.
        """
        if not 1 <= num_tokens <= self.max_tokens:
            raise ValueError(
                f"{num_tokens} tokens: the curve was measured from 1 to {self.max_tokens}. "
                "Measure it further with draftsmith-profile token_counts=..."
            )
        row = self._row(context_length, raw=raw)
        return 1.0 / _interpolated(self.token_counts, row, num_tokens)

    def rates(self, context_length: float, *, raw: bool = False) -> list[float]:
        """[max_tokens] steps per second of 1, 2, ... tokens, as the scheduler reads them.

        Args:
            context_length, raw: see `sps`.
        """
        row = self._row(context_length, raw=raw)
        tokens = range(1, self.max_tokens + 1)
        return [1.0 / _interpolated(self.token_counts, row, count) for count in tokens]

    def _row(self, context_length: float, *, raw: bool) -> list[float]:
        """[counts] seconds at a context length."""
        if context_length > self.context_lengths[-1]:
            raise ValueError(
                f"A context of {context_length:g} tokens: the curve was measured up to "
                f"{self.context_lengths[-1]}. Measure it further with draftsmith-profile "
                "context_lengths=..."
            )
        table: Table = self.median_seconds if raw else self._envelope_seconds
        at = max(context_length, self.context_lengths[0])
        return [
            _interpolated(self.context_lengths, column, at) for column in zip(*table, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, with what is derived from it for other readers."""
        return {
            **self.conditions,
            "definitions": DEFINITIONS,
            "token_counts": list(self.token_counts),
            "context_lengths": list(self.context_lengths),
            "num_requests": list(self.num_requests),
            "median_seconds": self.median_seconds,
            "minimum_seconds": self.minimum_seconds,
            "steps_per_second": self.steps_per_second,
            "envelope": self.envelope,
            "seconds": [[list(cell) for cell in row] for row in self.seconds],
        }

    @classmethod
    def load(cls, path: Path) -> StepsPerSecond:
        """Reads a profile.json.

        Raises:
            ValueError: no such file, or not one that draftsmith-profile wrote.
        """
        own = ("token_counts", "context_lengths", "seconds", "num_requests")
        derived = ("median_seconds", "minimum_seconds", "steps_per_second", "envelope")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            parts = {name: found.pop(name) for name in own}
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is no steps-per-second curve ({type(error).__name__}: {error}). Make one "
                "with draftsmith-profile target=... output=FOLDER and give FOLDER/profile.json."
            ) from error
        for name in (*derived, "definitions"):
            found.pop(name, None)
        return cls(**parts, conditions=found)


def _interpolated(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at `at`, on straight lines between places (ascending, which enclose it)."""
    above = bisect_left(places, at)
    if places[above] == at:
        return values[above]
    share = (at - places[above - 1]) / (places[above] - places[above - 1])
    return values[above - 1] + share * (values[above] - values[above - 1])
