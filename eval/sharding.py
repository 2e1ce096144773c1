"""One evaluation by several processes: each decodes a share of the prompts, all get all results.

accelerate or torchrun starts the processes (see draftsmith.data.processes). Results are gathered,
not averaged: every number is drawn from the pooled rounds, as one process would have drawn it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from draftsmith.eval.results import PromptResult

if TYPE_CHECKING:
    from accelerate import PartialState

Item = TypeVar("Item")
Lanes = list[list[tuple[int, PromptResult]]]
"""Per lane: (index of the prompt, its result)."""


def launched() -> bool:
    """True in a process that a launcher started beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def own_share(items: Sequence[Item], process_index: int, num_processes: int) -> list[Item]:
    """Every num_processes-th item: categories and timed prompts are spread over the processes."""
    return list(items[process_index::num_processes])


def merge_lanes(shares: Iterable[Lanes]) -> list[list[PromptResult]]:
    """The shares of all processes as one process would have returned them."""
    shares = list(shares)
    merged = []
    for parts in zip(*shares, strict=True):
        pooled = [entry for part in parts for entry in part]
        indices = sorted(index for index, _ in pooled)
        assert indices == list(range(len(pooled))), "every prompt was decoded by one process"
        merged.append([result for _, result in sorted(pooled, key=lambda entry: entry[0])])
    return merged


def gather_lanes(work: Callable[[], Lanes], state: PartialState | None) -> list[list[PromptResult]]:
    """Does this process's share and returns the results of all; every process must call it.

    Raises:
        ValueError: what any of the processes raised, in the main process; the others leave with
            exit code 2 and no message of their own.
    """
    if state is None or state.num_processes == 1:
        return merge_lanes([work()])
    from accelerate.utils import gather_object

    share: Lanes = []
    problem: str | None = None
    try:
        share = work()
    except ValueError as error:
        problem = str(error)
    found: list[tuple[Lanes, str | None]] = gather_object([(share, problem)])
    problems = [text for _, text in found if text is not None]
    if problems and state.is_main_process:
        raise ValueError(problems[0])
    if problems:
        raise SystemExit(2)
    return merge_lanes(one for one, _ in found)
