"""How large a cache will be and whether it fits, known before any work starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from draftsmith.data import shards
from draftsmith.data.cache import CacheSettings
from draftsmith.data.shards import ShardPlan


def cache_bytes(plans: Sequence[ShardPlan], settings: CacheSettings) -> int:
    """Exact bytes of the shard files of these plans when no row is skipped."""
    return sum(
        shards.shard_bytes(plan.num_rows, plan.num_tokens, **settings.shard_layout)
        for plan in plans
    )


def format_bytes(count: int) -> str:
    """67108864000 -> '67.1 GB (62.5 GiB)'."""
    for power, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if count >= 1000**power:
            binary = unit.upper()
            return f"{count / 1000**power:.1f} {unit}B ({count / 1024**power:.1f} {binary}iB)"
    return f"{count} bytes"


def format_seconds(seconds: float) -> str:
    """Whole units of time: '2 h 5 min', '3 min 20 s', '8 s'."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def free_bytes(folder: Path) -> int:
    """Free disk space where `folder` is or will be."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def refuse_short_disk(needed: int, folder: Path) -> None:
    """Raises ValueError when the cache would not fit; says what else can be done."""
    free = free_bytes(folder)
    if needed > free:
        raise ValueError(
            f"The cache needs {format_bytes(needed)} more, {folder} has {format_bytes(free)} free. "
            "Give a cache= folder on a larger disk, prepare fewer rows (draftsmith-prepare "
            "limit=N), store fewer layers (aux_layer_ids=[...]), or train without a cache "
            "(draftsmith-train features=live)."
        )
