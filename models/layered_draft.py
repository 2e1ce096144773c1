"""What draft models made of Llama-type layers share: config checks, start of the weights, rotary
tables, and the parts that they borrow from the target.

Axes: rows, hidden, head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.draft_layer import DraftLayer, Rope
from draftsmith.models.target import TargetHead


@strict
class LayeredDraftConfig(LlamaConfig):
    """A Llama layer's sizes; `vocab_size` is the target's."""

    qk_norm: bool = False
    """RMS norms on queries and keys, as in Qwen3."""
    target_fingerprint: dict[str, str] | None = None
    """Of the target that this draft was trained for."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = False

    def validate_architecture(self) -> None:
        """Replaces Llama's check: with its own head_dim, heads need not divide hidden_size."""
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )


class LayeredDraft(PreTrainedModel):
    """Layers, their positions, and the target's embeddings."""

    layers: Sequence[DraftLayer]  # An nn.ModuleList, typed by what it holds.
    # Empty: layers are called in parts, so a wrapper around a layer would never see its forward.
    _no_split_modules: list[str] = []
    # With an empty prefix transformers 5 loads `enorm.0.weight` into `norm.0.weight`: it takes any
    # first letter for the prefix where the rest is a tensor's name too.
    base_model_prefix = "draft"

    def __init__(self, config: LayeredDraftConfig, layers: Sequence[DraftLayer]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.rotary_emb = LlamaRotaryEmbedding(config)
        # Tuples keep these out of the module tree: no optimizer, wrapper or checkpoint sees them.
        self._target_embeddings: tuple[nn.Module, ...] = ()
        self._target_head: tuple[TargetHead, ...] = ()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Variance-preserving at any width: 0.02 is small for narrow drafts, large for wide ones.
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def attach_target(self, *, embed_tokens: nn.Module, head: nn.Module | None = None) -> None:  # noqa: ARG002
        """Shares the target's frozen embeddings."""
        self._target_embeddings = (embed_tokens,)

    def _attach_head(self, head: nn.Module | None) -> None:
        """Shares the target's head, for a draft that predicts with it.

        Raises:
            ValueError: there is no head, or it does not fit the draft's sizes.
        """
        if not isinstance(head, TargetHead):
            raise ValueError(
                "This draft predicts with the target's head: pass attach_target(embed_tokens="
                f"..., head=TargetHead); found {type(head).__name__}."
            )
        found = (head.vocab_size, head.hidden_size)
        expected = (self.config.vocab_size, self.config.hidden_size)
        if found != expected:
            raise ValueError(
                f"The target's head is {found[0]} x {found[1]} (vocabulary x hidden), but this "
                f"draft was made for {expected[0]} x {expected[1]}: it belongs to another target."
            )
        self._target_head = (head,)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[...] target ids -> [..., hidden]."""
        if not self._target_embeddings:
            raise ValueError(
                "The draft has no embeddings yet: call attach_target(embed_tokens=...) first."
            )
        with torch.no_grad():
            return self._target_embeddings[0](token_ids).to(self.dtype)

    def _rope_table(self, positions: int, *, offset: int = 0) -> Rope:
        """cos and sin of `positions` positions from `offset` on: [positions, 1, head_dim] each."""
        place = next(self.parameters())
        ids = torch.arange(positions, device=place.device) + offset
        cos, sin = self.rotary_emb(place, ids[None])  # [1, positions, head_dim]
        return cos.transpose(0, 1), sin.transpose(0, 1)
