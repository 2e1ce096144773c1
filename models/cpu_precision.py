"""Whether this CPU multiplies bfloat16 as fast as float32.

Some have instructions for it (avx512_bf16, amx) and are faster with it; others emulate it and take
tens of times as long, which turns minutes into hours. No flag tells across vendors and versions of
torch, so it is measured.
"""

from __future__ import annotations

import functools
import time

import torch

SLOW = 1.5
"""bfloat16 is called slow when it takes this many times as long as float32 (our choice)."""
SIZE = 256
"""Side of the square matrices that are multiplied: milliseconds even where it is emulated."""


@functools.cache
def bfloat16_slowdown() -> float:
    """Seconds of a bfloat16 product / those of the float32 one on this CPU, minima of some runs."""
    best: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(SIZE, SIZE, dtype=dtype)
        for _ in range(4):  # The first one warms up, a minimum forgets it.
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds = time.perf_counter() - start
            best[dtype] = min(best.get(dtype, seconds), seconds)
    return best[torch.bfloat16] / best[torch.float32]


def slow_bfloat16(device: torch.device, dtype: torch.dtype) -> str | None:
    """What to tell someone who is about to compute in `dtype` on `device`; None: nothing.

    Args:
        device: where the products are computed.
        dtype: of the products.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or bfloat16_slowdown() < SLOW:
        return None
    return (
        f"This CPU takes {bfloat16_slowdown():.1f} times as long for bfloat16 products as for "
        "float32 ones."
    )
