"""The causal block of the training-time test by flex_attention, with its log-sum-exp.

For CUDA devices where the fused kernels refuse: heads wider than 256, or widths that are no
multiple of 8. There torch compiles it to one kernel that skips the blocks above the diagonal. On a
CPU flex_attention has a forward without gradients only, uncompiled here, for comparison.

Rows are padded to a multiple of 128 slots: queries behind the end get no gradient and keys there
are in every real query's future, so that they change nothing; and a kernel serves many lengths.

Not measured: no CUDA device has run it yet. tests/test_ttt_attention.py compares its CPU forward
with the definition, and on a GPU (marker `gpu`) values and gradients.

Axes: batch, heads, kv_heads, seq, head_dim.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

BLOCK = 128
"""flex_attention's granularity of skipped scores (its default)."""
MIN_HEAD_DIM = 16
"""Below this its compiled kernels refuse (PyTorch 2.13)."""
WIDE_HEAD_DIM = 256
WIDE_OPTIONS = {
    "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16,
    "num_stages": 1,
}  # fmt: skip
"""Tiles for heads wider than WIDE_HEAD_DIM: the default ones do not fit into shared memory (our
choice; 16 is the smallest there is)."""


def has_flex_attention(query: Tensor) -> bool:
    """Whether flex_attention compiles, forward and backward, for this device, dtype and width."""
    if query.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    known = query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return known and recent and query.shape[-1] >= MIN_HEAD_DIM


def flex_block(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within each row.

    Args:
        query: [batch, heads, seq, head_dim].
        key: [batch, kv_heads, seq, head_dim].
        value: The same shape.

    Returns:
        The output, shaped like the query, and the log-sum-exp [batch, heads, seq], float32.
    """
    seq, head_dim = query.shape[-2:]
    padded = -(-seq // BLOCK) * BLOCK
    query, key, value = (F.pad(x, (0, 0, 0, padded - seq)) for x in (query, key, value))
    attend: Any = compiled() if query.device.type == "cuda" else flex_attention
    out, aux = attend(
        query,
        key,
        value,
        block_mask=_causal_mask(padded, str(query.device)),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options=WIDE_OPTIONS if head_dim > WIDE_HEAD_DIM else None,
    )
    return out[:, :, :seq], aux.lse[:, :, :seq]


@functools.cache
def compiled() -> Callable[..., Any]:
    """flex_attention as one kernel, for all callers."""
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=32)
def _causal_mask(seq: int, device: str) -> BlockMask:
    return create_block_mask(_is_past, None, None, seq, seq, device=device)


def _is_past(_batch: Tensor, _head: Tensor, query_slot: Tensor, key_slot: Tensor) -> Tensor:
    return query_slot >= key_slot
