"""Attention of the training-time test: a causal block of true features plus each slot's own chain.

Paper: EAGLE-3 (arXiv 2503.01840), section 3.1 and figure 6. At step j the query of slot t sees

    the keys of step 0 of slots 0..t in its row, and
    one key per step 1..j, its own: what slot t itself produced in its chain.

That is the context a draft model has at decoding time: true features up to its start, then its own
states. The score of all these keys goes through one softmax.

Two implementations. The dense one is written from the definition. The fused one takes the block
from the fused attention that also returns the log-sum-exp of its scores, and adds the few chain
columns by log-sum-exp: memory grows with rows, not with rows x keys. Its backward is exact: the
fused backward computes exp(score - lse) and dout . out, so given the merged lse and the merged
output it yields the gradients of the whole softmax for the block's part.

Differs from published code: no [batch, heads, seq, seq + steps] scores (SpecForge's sdpa variant),
no flash-attn package (its fa variant), and queries exist only for the slots that are trained.

Check: tests/test_ttt_attention.py compares both with a loop over slots and by gradcheck.

Axes: batch, heads, kv_heads, seq (slots of a row), rows (gathered slots), head_dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

logger = logging.getLogger(__name__)

MAX_FUSED_HEAD_DIM = 256
"""Above this the fused CUDA attention refuses (PyTorch 2.9 to 2.13)."""


def ttt_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    chain_keys: Sequence[Tensor],
    chain_values: Sequence[Tensor],
    *,
    slots: Tensor,
) -> Tensor:
    """Attends from gathered slots, by the fused path where the device has one.

    Args:
        query: [rows, heads, head_dim], rotated.
        block_key: [batch, kv_heads, seq, head_dim] of step 0, rotated.
        block_value: The same shape.
        chain_keys: One [rows, kv_heads, head_dim] per step 1..j, rotated.
        chain_values: The same shapes.
        slots: [rows] int64, distinct flat slots batch_index * seq + slot of the query rows.

    Returns:
        [rows, heads, head_dim].
    """
    path = fused_attention if has_fused_attention(query) else dense_attention
    _log_choice(path.__name__, query.device.type)
    return path(query, block_key, block_value, chain_keys, chain_values, slots=slots)


def has_fused_attention(query: Tensor) -> bool:
    """Whether this device, dtype and head_dim have a fused attention with log-sum-exp."""
    head_dim = query.shape[-1]
    if query.device.type == "cuda":
        aligned = head_dim % 8 == 0 and head_dim <= MAX_FUSED_HEAD_DIM
        return aligned and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return query.device.type == "cpu"


@functools.cache
def _log_choice(name: str, device: str) -> None:
    logger.info("Training-time test uses %s on %s.", name, device)


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
    groups = query.shape[1] // block_key.shape[1]
    keys, values = repeat_kv(block_key, groups), repeat_kv(block_value, groups)
    return _FusedChainAttention.apply(query, keys, values, slots, *chain_keys, *chain_values)


class _FusedChainAttention(torch.autograd.Function):
    """Fused causal block, chain columns merged by log-sum-exp; keys and values of all heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, *chain: Tensor
    ) -> Tensor:
        batch, _, seq, head_dim = key.shape
        block = _block_forward(_to_grid(query, slots, batch, seq), key, value)
        out = _from_grid(block[0], slots)
        lse = _from_grid(block[1], slots)
        if chain:
            half = len(chain) // 2
            accurate = lse.dtype
            grouped = _grouped(query, chain[0]).to(accurate)
            scores = torch.stack(  # [rows, kv_heads, groups, steps]
                [(grouped * own[:, :, None]).sum(-1) for own in chain[:half]], dim=-1
            ).mul_(head_dim**-0.5)
            scores = scores.flatten(1, 2)  # [rows, heads, steps]
            merged = torch.logaddexp(lse, torch.logsumexp(scores, -1))
            probs = torch.exp(scores - merged[..., None])
            total = out.to(accurate) * torch.exp(lse - merged)[..., None]
            for column, own in enumerate(chain[half:]):
                grouped_total = total.unflatten(1, (own.shape[1], -1))
                weight = probs[..., column].unflatten(1, (own.shape[1], -1))
                grouped_total.addcmul_(weight[..., None], own[:, :, None].to(accurate))
            out, lse = total.to(query.dtype), merged
        ctx.save_for_backward(query, key, value, slots, out, lse, *chain)
        ctx.rest = block[2:]
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slots, out, lse, *chain = ctx.saved_tensors
        d_out = grad_outputs[0].contiguous()
        batch, _, seq, head_dim = key.shape
        # Slots without a query have zero out, d_out and lse there, and so add exactly nothing.
        d_out_grid, query_grid, out_grid, lse_grid = (
            _to_grid(rows, slots, batch, seq) for rows in (d_out, query, out, lse)
        )
        d_grid, d_key, d_value = _block_backward(
            d_out_grid, query_grid, key, value, out_grid, lse_grid, ctx.rest
        )
        d_query = _from_grid(d_grid, slots)
        half = len(chain) // 2
        d_chain: list[Tensor] = [query] * len(chain)
        if chain:
            accurate, scale = lse.dtype, head_dim**-0.5
            grouped = _grouped(query, chain[0]).to(accurate)
            grouped_d_out = _grouped(d_out, chain[0]).to(accurate)
            grouped_lse = _grouped(lse, chain[0])
            # d score = probability * (d_out . value - d_out . out), as for every softmax.
            common = (grouped_d_out * _grouped(out, chain[0])).sum(-1)
            d_query = d_query.to(accurate)
            grouped_d_query = _grouped(d_query, chain[0])
            for index, (own_key, own_value) in enumerate(
                zip(chain[:half], chain[half:], strict=True)
            ):
                wide_key = own_key[:, :, None].to(accurate)
                wide_value = own_value[:, :, None].to(accurate)
                prob = torch.exp((grouped * wide_key).sum(-1).mul_(scale).sub_(grouped_lse))
                d_score = (grouped_d_out * wide_value).sum(-1).sub_(common).mul_(prob).mul_(scale)
                grouped_d_query.addcmul_(d_score[..., None], wide_key)
                d_chain[index] = (d_score[..., None] * grouped).sum(2).to(own_key.dtype)
                d_chain[half + index] = (prob[..., None] * grouped_d_out).sum(2).to(own_value.dtype)
            d_query = d_query.to(query.dtype)
        return d_query, d_key, d_value, None, *d_chain


def _block_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Causal fused attention: (out, log-sum-exp [batch, heads, seq], what its backward needs)."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True))
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
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, query, key, value, out, lse, 0.0, True
        )
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


def _to_grid(rows: Tensor, slots: Tensor, batch: int, seq: int) -> Tensor:
    """[rows, heads, ...] -> [batch, heads, seq, ...], zero where there is no row."""
    grid = rows.new_zeros(batch * seq, *rows.shape[1:]).index_copy(0, slots, rows)
    return grid.unflatten(0, (batch, seq)).transpose(1, 2)


def _from_grid(grid: Tensor, slots: Tensor) -> Tensor:
    """[batch, heads, seq, ...] -> [rows, heads, ...]."""
    return grid.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def _grouped(rows: Tensor, chain: Tensor) -> Tensor:
    """[rows, heads, ...] -> a view [rows, kv_heads, groups, ...]."""
    return rows.unflatten(1, (chain.shape[1], -1))


def _per_head(chain: Tensor, groups: int) -> Tensor:
    """[rows, kv_heads, head_dim] -> [rows, heads, head_dim]."""
    return chain.repeat_interleave(groups, dim=1)
