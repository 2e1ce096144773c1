"""A Llama-type decoder layer on gathered rows, as EAGLE-3 drafts are made of.

Norms, MLP and rotary embeddings compute what transformers' do; only the split differs: projections,
attention and the rest are separate calls, because training and drafting attend in their own ways
and to rows that do not form a rectangle. Parameter names are those of published checkpoints.

The layer that reads tokens takes [normed embedding ; normed feature] into its projections, twice as
wide, and its `input_layernorm` belongs to the embedding (EAGLE-3, arXiv 2503.01840, figure 5). Such
a projection is the sum of two products. The tokens' one is the same at every step of the
training-time test, so it is made once per text: `read_tokens`.

Axes: rows, hidden, heads, kv_heads, head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from draftsmith.models.lean_mlp import gated_mlp
from draftsmith.models.lean_norms import Rope, rms_norm, rotated

QUIET = 0.3
"""Scale of the feature half of queries and keys at the start: states of different slots share a
large constant part, which would otherwise make all slots look alike."""


def _normed(norm: LlamaRMSNorm, states: Tensor) -> Tensor:
    return rms_norm(states, norm.weight, norm.variance_epsilon)


def _rotated(states: Tensor, rope: Rope, norm: LlamaRMSNorm | None) -> Tensor:
    if norm is None:
        return rotated(states, rope, None, 0.0)
    return rotated(states, rope, norm.weight, norm.variance_epsilon)


class DraftAttention(nn.Module):
    """Projections of one layer, on gathered rows; who attends to what is decided outside."""

    def __init__(self, config: LlamaConfig, in_features: int) -> None:
        super().__init__()
        assert config.head_dim is not None, "set by the config class"
        assert config.num_key_value_heads is not None, "set by the config class"
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(in_features, width, bias=bias)
        self.k_proj = nn.Linear(in_features, kv_width, bias=bias)
        self.v_proj = nn.Linear(in_features, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    @torch.no_grad()
    def focus_on_own_slot(self, token_features: int) -> None:
        """Starts queries equal to keys on the token half of the input, and quietly on the rest.

        A slot's query then agrees most with its own key, so the layer reads its own token from the
        first step on. With independent random weights the attention starts as an average over the
        whole context, and most of a short training goes into undoing that: measured on
        SmolLM2-135M, 331 updates on 141k tokens, held-out first-token acceptance 0.276 -> 0.301
        (one seed, one drafted step).

        Args:
            token_features: leading input columns that hold the embedding.
        """
        heads = self.q_proj.out_features // self.head_dim
        kv_heads = self.k_proj.out_features // self.head_dim
        keys = self.k_proj.weight[:, :token_features].unflatten(0, (kv_heads, self.head_dim))
        # Twice the variance: half of the input columns have to make up a key of unit variance.
        keys = keys * 2**0.5
        self.k_proj.weight[:, :token_features] = keys.flatten(0, 1)
        queries = keys.repeat_interleave(heads // kv_heads, dim=0)
        self.q_proj.weight[:, :token_features] = queries.flatten(0, 1)
        for projection in (self.q_proj, self.k_proj):
            projection.weight[:, token_features:] *= QUIET

    def project_tokens(self, tokens: Tensor) -> Tensor:
        """What the leading input columns add to queries, keys and values, biases included.

        Args:
            tokens: [rows, token features].

        Returns:
            [rows, widths of query, key and value], unrotated.
        """
        parts = [
            F.linear(tokens, projection.weight[:, : tokens.shape[-1]], projection.bias)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        return torch.cat(parts, dim=-1)

    def queries(self, states: Tensor, rope: Rope, tokens: Tensor | None = None) -> Tensor:
        """[rows, heads, head_dim], rotated.

        Args:
            states: [rows, in_features], or what `tokens` leaves of these columns.
            rope: Of the rows.
            tokens: [rows, ...] of `project_tokens`. Where `states` has all columns it is not read.
        """
        return self.turn_queries(self._project(self.q_proj, states, tokens, 0), rope)

    def keys_values(
        self, states: Tensor, rope: Rope, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values, [rows, kv_heads, head_dim] each. Arguments as in `queries`."""
        width, kv_width = self.q_proj.out_features, self.k_proj.out_features
        key = self._project(self.k_proj, states, tokens, width)
        value = self._project(self.v_proj, states, tokens, width + kv_width)
        return self.turn_keys(key, rope), value.unflatten(-1, (-1, self.head_dim))

    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, in_features] -> queries, keys and values, [rows, width] each, unrotated."""
        return self.q_proj(states), self.k_proj(states), self.v_proj(states)

    def turn_queries(self, projected: Tensor, rope: Rope) -> Tensor:
        """[rows, width] of `q_proj` -> [rows, heads, head_dim], normed and rotated."""
        query = projected.unflatten(-1, (-1, self.head_dim))
        return _rotated(query, rope, self.q_norm if self.qk_norm else None)

    def turn_keys(self, projected: Tensor, rope: Rope) -> Tensor:
        """[rows, kv width] of `k_proj` -> [rows, kv_heads, head_dim], normed and rotated."""
        key = projected.unflatten(-1, (-1, self.head_dim))
        return _rotated(key, rope, self.k_norm if self.qk_norm else None)

    @staticmethod
    def _project(
        projection: nn.Linear, states: Tensor, tokens: Tensor | None, start: int
    ) -> Tensor:
        """[rows, outputs]; `start` is where its outputs begin in `tokens`."""
        if states.shape[-1] == projection.in_features:
            return projection(states)
        assert tokens is not None, "they bring the other columns' part"
        own = F.linear(states, projection.weight[:, -states.shape[-1] :])
        return own + tokens[:, start : start + projection.out_features]


class DraftLayer(nn.Module):
    """One decoder layer. It may read [embedding ; feature] (EAGLE-3's first), or have no input norm
    (EAGLE-1's first); an ordinary one reads its normed input."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        reads_tokens: bool,
        input_norm: bool = True,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config, 2 * size if reads_tokens else size)
        self.mlp = LlamaMLP(config)
        if input_norm:
            self.input_layernorm = LlamaRMSNorm(size, eps)
        if reads_tokens:
            self.hidden_norm = LlamaRMSNorm(size, eps)
        self.reads_tokens = reads_tokens
        self.input_norm = input_norm
        self.norm_before_residual = norm_before_residual
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)

    def read_tokens(self, embedded: Tensor) -> Tensor:
        """[rows, hidden] embeddings -> what they add to q, k and v, for a layer that reads them."""
        return self.self_attn.project_tokens(_normed(self.input_layernorm, embedded))

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What q, k and v project, and the residual: [rows, hidden] each.

        Args:
            hidden: [rows, hidden] features or the previous layer's output.
        """
        if self.reads_tokens:
            normed = _normed(self.hidden_norm, hidden)
            return normed, normed if self.norm_before_residual else hidden
        return (_normed(self.input_layernorm, hidden) if self.input_norm else hidden), hidden

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [rows, hidden], attention output [rows, heads, head_dim] -> [rows, hidden]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + gated_mlp(self.mlp, _normed(self.post_attention_layernorm, hidden))
