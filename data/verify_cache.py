"""`draftsmith-cache verify cache=FOLDER`: reads every byte of a cache and prints what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from draftsmith.conf.entry import near_matches
from draftsmith.data.cache import HiddenStateCache
from draftsmith.data.shards import REPAIR_HINT


def verify_command(arguments: Sequence[str]) -> int:
    """`draftsmith-cache verify cache=FOLDER`: checks every byte and prints a table.

    Returns:
        Exit code: 0 when all is right, 1 when something is broken.

    Raises:
        ValueError: wrong arguments, or no finished cache there.
    """
    settings = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = [name for name in settings if name != "cache"]
    if unknown or not settings.get("cache"):
        close = near_matches(unknown[0], ["cache"]) if unknown else []
        found = f"{unknown[0]!r} is not a setting of verify. " if unknown else ""
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ValueError(f"{found}{hint}Usage: draftsmith-cache verify cache=FOLDER")
    cache = HiddenStateCache.open(settings["cache"])
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"Cache {settings['cache']}")
    for name in ("shard", "samples", "tokens", "bytes", "smallest", "largest", "result"):
        table.add_column(name, justify="left" if name in ("shard", "result") else "right")
    problems: list[str] = []
    for check in cache.verify():
        record = check.record
        table.add_row(
            record.file.removesuffix(".safetensors"),
            f"{record.num_samples:,}",
            f"{record.num_tokens:,}",
            f"{record.num_bytes:,}",
            f"{record.min_value:.4g}",
            f"{record.max_value:.4g}",
            "ok" if check.problem is None else "BROKEN",
        )
        if check.problem is not None:
            problems.append(f"{record.file}: {check.problem}")
    console.print(table)
    manifest = cache.manifest
    console.print(
        f"{len(manifest.shards)} shards, {len(problems)} broken; {manifest.num_samples:,} samples, "
        f"{manifest.num_tokens:,} tokens, {manifest.num_supervised:,} supervised, "
        f"{len(manifest.skipped):,} rows skipped; target {manifest.target_name}"
    )
    for problem in problems:
        console.print(problem)
    if problems:
        console.print(REPAIR_HINT)
    return 1 if problems else 0
