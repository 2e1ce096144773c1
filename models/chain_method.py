"""Settings that the EAGLE-type methods share: sizes of the draft layer, how a chain is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from draftsmith.models.draft_sizes import SIZE_OPTIONS, draft_layer_sizes
from draftsmith.models.method_options import (
    check_choice,
    check_flag,
    check_integer,
    check_list,
    check_number,
    check_objective,
)
from draftsmith.models.target import TargetHead
from draftsmith.models.ttt_slots import MASK_ALIGNMENTS

NORMALISATIONS = ("supervised", "batch_tokens")
ROPE_POSITIONS = ("feature", "token")
STEP_TOKENS = ("true", "own")


class HasDraftToTarget(Protocol):
    """A draft vocabulary (data/vocabulary.py)."""

    draft_to_target: Tensor
    """[draft_vocab] int64 absolute target ids, ascending."""


@dataclass
class ChainMethod:
    """Fields of a `method` node. null: the target's own value."""

    draft_vocab_size: int | None = None
    """Tokens that the draft can propose, the most frequent ones; null: all."""
    num_hidden_layers: int = 1
    """Draft layers. Engines serve one; more cost more per drafted token."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads."""
    head_dim: int | None = None
    """Width of one head."""
    max_position_embeddings: int | None = None
    """Longest context in tokens; drafting stops there."""
    qk_norm: bool = False
    """RMS norms on queries and keys (Qwen3-type layer)."""
    attention_bias: bool = False
    """Biases on q, k, v and o (not every engine loads them)."""
    rope_position: str = "feature"
    """feature: slot t (feature of position t, token t+1) has rotary position t, as EAGLE. token:
    t+1, as speculators. Scores see differences only, so both give the same with a plain rope."""
    num_steps: int = 1
    """Draft steps unrolled in training."""
    step_decay: float = 0.8
    """Step j of the loss weighs step_decay**j (EAGLE-3: 0.8)."""
    step_weights: list[float] | None = None
    """Own weight per step instead of step_decay; num_steps entries."""
    step_tokens: list[str] | None = None
    """What each step reads: true (the text's token) or own (the draft's own most likely one of the
    step before); num_steps entries, the first one true. null: true everywhere, as published."""
    mask_alignment: str = "label"
    """label: a prediction is taught where its label token is the target's own. feature: as EAGLE,
    SpecForge and DeepSpec, two tokens off (models/ttt_slots.py)."""
    normalisation: str = "supervised"
    """supervised: divide the loss by the number of taught first-step predictions. batch_tokens: by
    batch x sequence, padding and prompts included, as the published implementations."""
    checkpoint_steps: bool = False
    """Recompute each unrolled step in the backward pass: about a third more time, and memory that
    hardly grows with the number of steps. For long samples."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "kl"})
    """Objective by name with its options (train/objectives.py)."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_steps"):
            check_integer(f"method.{name}", getattr(self, name))
        for name in (*SIZE_OPTIONS, "draft_vocab_size"):
            check_integer(f"method.{name}", getattr(self, name), optional=True)
        for name in ("qk_norm", "attention_bias", "checkpoint_steps"):
            check_flag(f"method.{name}", getattr(self, name))
        check_number("method.step_decay", self.step_decay, above=0.0, most=1.0)
        check_choice("method.rope_position", self.rope_position, ROPE_POSITIONS)
        check_choice("method.mask_alignment", self.mask_alignment, MASK_ALIGNMENTS)
        check_choice("method.normalisation", self.normalisation, NORMALISATIONS)
        if self.step_weights is not None:
            check_list("method.step_weights", self.step_weights, float)
            if len(self.step_weights) != self.num_steps or min(self.step_weights) < 0:
                raise ValueError(
                    f"method.step_weights is {self.step_weights}, expected {self.num_steps} "
                    "numbers >= 0, one per step (method.num_steps)."
                )
        self._check_step_tokens()
        check_objective(self.objective)

    def _check_step_tokens(self) -> None:
        if self.step_tokens is None:
            return
        if isinstance(self.step_tokens, list):
            # YAML and Hydra read a bare true as a truth value.
            self.step_tokens = ["true" if token is True else token for token in self.step_tokens]
        fits = isinstance(self.step_tokens, list) and len(self.step_tokens) == self.num_steps
        if not fits or self.step_tokens[0] != "true":
            raise ValueError(
                f"method.step_tokens is {self.step_tokens!r}, expected {self.num_steps} entries "
                "(method.num_steps), the first one true: the first step reads a committed token."
            )
        for source in self.step_tokens:
            check_choice("method.step_tokens", source, STEP_TOKENS)

    def validate(self, num_target_layers: int, vocab_size: int) -> None:  # noqa: ARG002
        """Checks the settings against a target, before any weight is loaded.

        Raises:
            ValueError: if the draft vocabulary is too large.
        """
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"method.draft_vocab_size is {self.draft_vocab_size}, but the target has "
                f"{vocab_size} tokens. Lower it, or set it to null for the full vocabulary."
            )

    def chain_settings(
        self, target_head: TargetHead, vocabulary: HasDraftToTarget | None
    ) -> dict[str, Any]:
        """Arguments of a `ChainDraftConfig` for a target.

        Args:
            target_head: Config, embeddings, head and final norm of the target.
            vocabulary: The draft vocabulary, or None for the full one.

        Raises:
            ValueError: the heads do not fit each other, or a size is in no config.
        """
        overrides = {name: getattr(self, name) for name in SIZE_OPTIONS}
        decayed = [self.step_decay**step for step in range(self.num_steps)]
        sizes = draft_layer_sizes(target_head.config, overrides)
        _check_heads(sizes)
        return sizes | {
            "num_hidden_layers": self.num_hidden_layers,
            "vocab_size": target_head.vocab_size,
            "draft_vocab_size": target_head.vocab_size
            if vocabulary is None
            else len(vocabulary.draft_to_target),
            "qk_norm": self.qk_norm,
            "attention_bias": self.attention_bias,
            "rope_offset": ROPE_POSITIONS.index(self.rope_position),
            "step_weights": self.step_weights or decayed,
            "step_tokens": self.step_tokens,
            "mask_alignment": self.mask_alignment,
            "normalisation": self.normalisation,
            "checkpoint_steps": self.checkpoint_steps,
        }


def _check_heads(sizes: dict[str, Any]) -> None:
    """Raises ValueError where query and key/value heads, or a head and its rotation, do not fit."""
    heads, groups, width = (
        sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % groups:
        raise ValueError(
            f"The draft would have {heads} query heads on {groups} key/value heads, expected a "
            "multiple. Set method.num_attention_heads and method.num_key_value_heads."
        )
    if width % 2:
        raise ValueError(
            f"The draft's heads would be {width} wide; rotary positions turn pairs of numbers. Set "
            "method.head_dim to an even number."
        )
