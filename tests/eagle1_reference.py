"""EAGLE-1 as a draft model, slow and straight from its formulas: everything is computed afresh.

    z = fc([embedding of token t+1 ; feature t]);  f = layer(z);  logits = target head(f)

The layer is a Llama layer without input norm (arXiv 2401.15077, section 3). It proves that the
decoder's policies need nothing but the `AutoregressiveDraft` protocol. Tests load this file by its
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.protocols import DraftContext, Frontier


@dataclass
class ReferenceState:
    """Pairs of the committed text, and the rows of the round."""

    tokens: Tensor
    features: Tensor
    row_tokens: list[int] = field(default_factory=list)
    row_parents: list[int] = field(default_factory=list)
    row_hidden: list[Tensor] = field(default_factory=list)
    """Row 0 is the root."""


class Eagle1Reference:
    """Implements `AutoregressiveDraft`."""

    aux_layer_ids = ()
    draft_to_target = None

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], head: Tensor) -> None:
        self.config, self.weights, self.head = config, weights, head

    def start(self, max_length: int) -> ReferenceState:  # noqa: ARG002
        hidden = self.config["hidden_size"]
        return ReferenceState(torch.empty(0, dtype=torch.long), torch.empty(0, hidden))

    def max_depth(self, length: int) -> int:
        return self.config["max_position_embeddings"] - length

    def read(self, contexts: Sequence[DraftContext], states: Sequence[ReferenceState]) -> Tensor:
        logits = []
        for context, state in zip(contexts, states, strict=True):
            state.tokens = context.token_ids[0, 1:]
            new = context.final_hidden_states[0]
            state.features = torch.cat([state.features, new])
            assert len(state.features) == len(state.tokens), "every committed pair once"
            state.row_tokens, state.row_parents, state.row_hidden = [], [], []
            state.row_hidden = [self._forward(state)[len(state.tokens) - 1]]
            logits.append(self.head @ state.row_hidden[0])
        return torch.stack(logits)

    def extend(self, states: Sequence[ReferenceState], frontiers: Sequence[Frontier]) -> Tensor:
        logits = []
        for state, frontier in zip(states, frontiers, strict=True):
            before = len(state.row_tokens)
            state.row_tokens += frontier.tokens.tolist()
            state.row_parents += frontier.parents.tolist()
            hidden = self._forward(state)[len(state.tokens) + before :]
            state.row_hidden += list(hidden)
            logits += [self.head @ one for one in hidden]
        return torch.stack(logits)

    def _forward(self, state: ReferenceState) -> Tensor:
        """[pairs + rows, hidden] predicted features of everything read so far."""
        pairs, rows = len(state.tokens), len(state.row_tokens)
        tokens = torch.cat([state.tokens, torch.tensor(state.row_tokens, dtype=torch.long)])
        above = [state.row_hidden[parent] for parent in state.row_parents]
        features = torch.cat([state.features, *[one[None] for one in above]])
        seen = torch.zeros(pairs + rows, pairs + rows, dtype=torch.bool)
        seen[:pairs, :pairs] = torch.ones(pairs, pairs, dtype=torch.bool).tril()
        positions = list(range(pairs))
        for row, parent in enumerate(state.row_parents):
            seen[pairs + row, :pairs] = True
            if parent:
                seen[pairs + row] |= seen[pairs + parent - 1]
            seen[pairs + row, pairs + row] = True
            positions.append(positions[pairs + parent - 1] + 1)
        return self._layer(self._joined(tokens, features), torch.tensor(positions), seen)

    def _joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        embedded = self.weights["embed_tokens.weight"][tokens]
        return torch.cat([embedded, features], -1) @ self.weights["fc.weight"].T

    def _layer(self, states: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        w = {k.removeprefix("layers.0."): v for k, v in self.weights.items()}
        heads = self.config["num_attention_heads"]
        dim = self.config["hidden_size"] // heads
        rates = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * rates).repeat(1, 2)[:, None]

        def rotated(x: Tensor) -> Tensor:
            half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * angles.cos() + half * angles.sin()

        q, k, v = (
            (states @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim))
            for name in "qkv"
        )
        groups = heads // k.shape[1]
        q, k, v = (
            rotated(q),
            rotated(k).repeat_interleave(groups, 1),
            v.repeat_interleave(groups, 1),
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        states = states + mixed @ w["self_attn.o_proj.weight"].T
        scale = states.pow(2).mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        normed = states * scale * w["post_attention_layernorm.weight"]
        gate = F.silu(normed @ w["mlp.gate_proj.weight"].T)
        return states + (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
