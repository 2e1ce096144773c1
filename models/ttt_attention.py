"""Attention of the training-time test: a causal block of true features plus each slot's own chain.

Paper: EAGLE-3 (arXiv 2503.01840), section 3.1 and figure 6. At step j the query of slot t sees

    the keys of step 0 of slots 0..t in its row, and
    one key per step 1..j, its own: what slot t itself produced in its chain.

That is the context a draft model has at decoding time: true features up to its start, then its own
states. The score of all these keys goes through one softmax.

Three paths, equal up to rounding:

    dense   written from the definition, with all scores in memory.
    fused   the block from the framework's fused attention, which also returns the log-sum-exp of
            its scores; the few chain columns are added by log-sum-exp. Memory grows with rows, not
            with rows x keys. Its backward is exact: the fused backward computes exp(score - lse)
            and dout . out, so given the merged lse and the merged output it yields the gradients
            of the whole softmax for the block's part.
    flex    the block from flex_attention (models/ttt_flex.py), merged in the same way, for what
            the fused CUDA kernels refuse: wide heads and odd sizes.

Differs from published code: no [batch, heads, seq, seq + steps] scores (SpecForge's sdpa variant),
no growing key cache (its flex variant), no flash-attn package (its fa variant), and queries exist
only for the slots that are trained.

Check: tests/test_ttt_attention.py compares all with a loop over slots and by gradcheck.

Axes: batch, heads, kv_heads, groups (heads of a kv_head), seq (slots of a row), rows (gathered
slots), steps (own entries), head_dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

from draftsmith.models.ttt_flex import flex_block, has_flex_attention

logger = logging.getLogger(__name__)

MAX_FUSED_HEAD_DIM = 256
"""Above this the fused CUDA attention refuses (PyTorch 2.9 to 2.13)."""
CPU_PIECE = 128
"""Queries per call of the fused CPU attention in short rows: it reads keys in blocks of 512 and
skips none within one, so that it would compute the whole square of a row of 512. In pieces that
read only the keys up to their end it took 0.73 of the time (one thread of an EPYC, 2 rows, forward
and backward), 0.92 in rows of 1024, and 1.10 in rows of 2048."""
CPU_PIECES_UP_TO = 1024
"""Longest rows that are cut into pieces."""


def ttt_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
    *,
    slots: Tensor,
    path: str | None = None,
) -> Tensor:
    """Attends from gathered slots.

    Args:
        query: [rows, heads, head_dim], rotated.
        block_key: [batch, kv_heads, seq, head_dim] of step 0, rotated.
        block_value: The same shape.
        chain_keys: One [rows, kv_heads, head_dim] per step 1..j, rotated.
        chain_values: The same shapes.
        slots: [rows] int64, distinct flat slots batch_index * seq + slot of the query rows.
        path: "dense", "fused" or "flex"; None: what the device has, see `choose_path`.

    Returns:
        [rows, heads, head_dim].

    Raises:
        ValueError: there is no such path.
    """
    if path is None:
        path = choose_path(query)
    if path not in PATHS:
        raise ValueError(f"path is {path!r}, expected one of {', '.join(PATHS)}, or None.")
    _log_choice(path, query.device.type)
    return PATHS[path](query, block_key, block_value, chain_keys, chain_values, slots=slots)


def choose_path(query: Tensor) -> str:
    """The leanest path that this device has for this dtype and head_dim, forward and backward."""
    if has_fused_attention(query):
        return "fused"
    return "flex" if has_flex_attention(query) else "dense"


def has_fused_attention(query: Tensor) -> bool:
    """Whether this device, dtype and head_dim have a fused attention with log-sum-exp."""
    head_dim = query.shape[-1]
    if query.device.type == "cuda":
        aligned = head_dim % 8 == 0 and head_dim <= MAX_FUSED_HEAD_DIM
        return aligned and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return query.device.type == "cpu"


@functools.cache
def _log_choice(path: str, device: str) -> None:
    logger.info("Training-time test uses %s attention on %s.", path, device)


def dense_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
    *,
    slots: Tensor,
) -> Tensor:
    """The definition, with all scores in memory. Arguments as in `ttt_attention`."""
    batch, kv_heads, seq, head_dim = block_key.shape
    groups = query.shape[1] // kv_heads
    grid = _to_grid(query, slots, batch, seq)
    keys, values = repeat_kv(block_key, groups), repeat_kv(block_value, groups)
    scores = grid @ keys.transpose(-1, -2)  # [batch, heads, seq, seq]
    future = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1)
    scores = _from_grid(scores.masked_fill(future, float("-inf")), slots)  # [rows, heads, seq]
    own = [(query * _per_head(key, groups)).sum(-1, keepdim=True) for key in chain_keys]
    scores = torch.cat([scores, *own], dim=-1) * head_dim**-0.5
    # Softmax in float32 at least, as the fused kernels do.
    probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    probs = probs.to(query.dtype)
    out = _from_grid(_to_grid(probs[..., :seq], slots, batch, seq) @ values, slots)
    for column, value in enumerate(chain_values, start=seq):
        out = out + probs[..., column, None] * _per_head(value, groups)
    return out


def fused_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
    *,
    slots: Tensor,
) -> Tensor:
    """The same values and gradients without the scores. Arguments as in `ttt_attention`."""
    return _FusedChainAttention.apply(
        query, block_key, block_value, slots, *chain_keys, *chain_values
    )


def flex_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
    *,
    slots: Tensor,
) -> Tensor:
    """The same by flex_attention; on a CPU without gradients. Arguments as in `ttt_attention`."""
    batch, _, seq, _ = block_key.shape
    out, lse = flex_block(_to_grid(query, slots, batch, seq), block_key, block_value)
    out, lse = _from_grid(out, slots), _from_grid(lse, slots)
    return _merge_chain(out, lse, query, chain_keys, chain_values)[0]


PATHS: dict[str, Callable[..., Tensor]] = {
    "dense": dense_attention,
    "fused": fused_attention,
    "flex": flex_attention,
}


def _merge_chain(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Adds the own entries to the block's output and log-sum-exp, exactly.

    Args:
        out: [rows, heads, head_dim] of the block alone.
        lse: [rows, heads] of its scores, in float32 at least.
        query, chain_keys, chain_values: As in `ttt_attention`.

    Returns:
        The output and the log-sum-exp of the whole softmax.
    """
    if not chain_keys:
        return out, lse
    keys, values = (_stacked(entries, lse.dtype) for entries in (chain_keys, chain_values))
    scores = _grouped(query.to(lse.dtype), keys) @ keys.mT * query.shape[-1] ** -0.5
    merged = torch.logaddexp(lse, torch.logsumexp(scores, -1).flatten(1))
    probs = torch.exp(scores - _grouped(merged, keys)[..., None])  # [rows, kv_heads, groups, steps]
    own = (probs @ values).flatten(1, 2)
    total = torch.addcmul(own, out.to(lse.dtype), torch.exp(lse - merged)[..., None])
    return total.to(query.dtype), merged


class _FusedChainAttention(torch.autograd.Function):
    """Fused causal block, chain columns merged by log-sum-exp.

    The kernels want keys and values of every head. They are repeated here, not before: what is kept
    for the backward pass are those of step 0, which all steps share.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, *chain: Tensor
    ) -> Tensor:
        batch, _, seq, _ = key.shape
        groups = query.shape[1] // key.shape[1]
        block = _block_forward(
            _to_grid(query, slots, batch, seq), repeat_kv(key, groups), repeat_kv(value, groups)
        )
        half = len(chain) // 2
        out, lse = _merge_chain(
            _from_grid(block[0], slots), _from_grid(block[1], slots), query,
            chain[:half], chain[half:],
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, slots, out, lse, *chain)
        ctx.rest = block[2:]
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slots, out, lse, *chain = ctx.saved_tensors
        d_out = grad_outputs[0].contiguous()
        batch, kv_heads, seq, _ = key.shape
        groups = query.shape[1] // kv_heads
        # Slots without a query have zero out, d_out and lse there, and so add exactly nothing.
        d_out_grid, query_grid, out_grid, lse_grid = (
            _to_grid(rows, slots, batch, seq) for rows in (d_out, query, out, lse)
        )
        d_grid, *d_repeated = _block_backward(
            d_out_grid, query_grid, repeat_kv(key, groups), repeat_kv(value, groups),
            out_grid, lse_grid, ctx.rest,
        )  # fmt: skip
        d_key, d_value = (part.unflatten(1, (kv_heads, groups)).sum(2) for part in d_repeated)
        d_query = _from_grid(d_grid, slots)
        if not chain:
            return d_query, d_key, d_value, None
        half = len(chain) // 2
        d_own, d_keys, d_values = _chain_backward(
            d_out, query, out, lse, chain[:half], chain[half:]
        )
        d_query = (d_query.to(lse.dtype) + d_own).to(query.dtype)
        return d_query, d_key, d_value, None, *d_keys, *d_values


def _chain_backward(
    d_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the own entries' part towards query, keys and values, for merged out and lse."""
    keys, values = (_stacked(entries, lse.dtype) for entries in (chain_keys, chain_values))
    grouped, grouped_d_out, grouped_out = (
        _grouped(rows.to(lse.dtype), keys) for rows in (query, d_out, out)
    )
    scale = query.shape[-1] ** -0.5
    scores = (grouped @ keys.mT).mul_(scale)  # [rows, kv_heads, groups, steps]
    probs = scores.sub_(_grouped(lse, keys)[..., None]).exp_()
    # d score = probability * (d_out . value - d_out . out), as for every softmax.
    common = (grouped_d_out * grouped_out).sum(-1, keepdim=True)
    d_scores = (grouped_d_out @ values.mT).sub_(common).mul_(probs).mul_(scale)
    d_query = (d_scores @ keys).flatten(1, 2)
    d_keys = (d_scores.mT @ grouped).to(chain_keys[0].dtype)  # [rows, kv_heads, steps, head_dim]
    d_values = (probs.mT @ grouped_d_out).to(chain_values[0].dtype)
    return d_query, list(d_keys.unbind(2)), list(d_values.unbind(2))


def _block_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Causal fused attention: (out, log-sum-exp [batch, heads, seq], what its backward needs)."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        pieces = []
        for rows, mask in _cpu_pieces(query):
            pieces.append(
                aten._scaled_dot_product_flash_attention_for_cpu(
                    query[:, :, rows], key[:, :, : rows.stop], value[:, :, : rows.stop],
                    0.0, mask is None, attn_mask=mask,
                )
            )  # fmt: skip
        outs, sums = zip(*pieces, strict=True)
        return (outs[0], sums[0]) if len(pieces) == 1 else (torch.cat(outs, 2), torch.cat(sums, 2))
    if query.dtype == torch.float32:  # Flash attention on CUDA takes half precision only.
        out, lse, *rest = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, True
        )
        # This kernel pads the log-sum-exp to a multiple of 32 queries; its backward wants it so.
        return out, lse[..., : query.shape[-2]], *rest, lse.shape[-1]
    out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, False
    )
    return out, lse, *rest


def _block_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the block's part towards query, key and value, for a merged `out` and `lse`."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return _block_backward_on_cpu(d_out, query, key, value, out, lse)
    if query.dtype == torch.float32:
        seed, offset, padded = rest
        lse = torch.nn.functional.pad(lse, (0, padded - lse.shape[-1]))
        d_query, d_key, d_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            d_out, query, key, value, None, out, lse, seed, offset, 0.0, [True] * 3 + [False], True
        )
        return d_query, d_key, d_value
    cum_query, cum_key, max_query, max_key, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, query, key, value, out, lse.contiguous(),
        cum_query, cum_key, max_query, max_key, 0.0, True, seed, offset,
    )  # fmt: skip


def _block_backward_on_cpu(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d_queries = []
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    for rows, mask in _cpu_pieces(query):
        seen = slice(0, rows.stop)
        d_piece, d_seen_key, d_seen_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out[:, :, rows], query[:, :, rows], key[:, :, seen], value[:, :, seen],
                out[:, :, rows], lse[:, :, rows], 0.0, mask is None, attn_mask=mask,
            )
        )  # fmt: skip
        d_queries.append(d_piece)
        d_key[:, :, seen] += d_seen_key
        d_value[:, :, seen] += d_seen_value
    return torch.cat(d_queries, 2), d_key, d_value


def _cpu_pieces(query: Tensor) -> list[tuple[slice, Tensor | None]]:
    """Slices of a row's queries and the mask of each, [queries, keys up to its end].

    None: the kernel's own causal mask, where queries and keys are the same slots.
    """
    seq = query.shape[2]
    piece = CPU_PIECE if seq <= CPU_PIECES_UP_TO else seq
    pieces: list[tuple[slice, Tensor | None]] = [(slice(0, min(piece, seq)), None)]
    for start in range(piece, seq, piece):
        stop = min(start + piece, seq)
        mask = query.new_full((stop - start, stop), float("-inf")).triu_(start + 1)
        pieces.append((slice(start, stop), mask))
    return pieces


def _to_grid(rows: Tensor, slots: Tensor, batch: int, seq: int) -> Tensor:
    """[rows, heads, ...] -> [batch, heads, seq, ...], zero where there is no row."""
    grid = rows.new_zeros(batch * seq, *rows.shape[1:]).index_copy(0, slots, rows)
    return grid.unflatten(0, (batch, seq)).transpose(1, 2)


def _from_grid(grid: Tensor, slots: Tensor) -> Tensor:
    """[batch, heads, seq, ...] -> [rows, heads, ...]."""
    return grid.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _stacked(entries: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[rows, kv_heads, head_dim] each -> [rows, kv_heads, steps, head_dim]."""
    return torch.stack(list(entries), 2).to(dtype)


def _grouped(rows: Tensor, stacked: Tensor) -> Tensor:
    """[rows, heads, ...] -> a view [rows, kv_heads, groups, ...]."""
    return rows.unflatten(1, (stacked.shape[1], -1))


def _per_head(chain: Tensor, groups: int) -> Tensor:
    """[rows, kv_heads, head_dim] -> [rows, heads, head_dim]."""
    return chain.repeat_interleave(groups, dim=1)
