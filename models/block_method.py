"""Settings that DFlash and DSpark share: sizes of the layers, the block, and a safe mask token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from draftsmith.models.block_draft import LAYER_TYPES, BlockDraft
from draftsmith.models.draft_sizes import SIZE_OPTIONS, draft_layer_sizes
from draftsmith.models.method_options import (
    check_choice,
    check_flag,
    check_integer,
    check_list,
    check_number,
    check_objective,
)
from draftsmith.models.target import TargetHead, validate_aux_layer_ids
from draftsmith.models.target_source import load_tokenizer, loading_arguments, resolve_target

NUM_FEATURE_LAYERS = 5
"""Target layers that are read when nothing is said (DFlash, DSpark: 5)."""


def spread_feature_layers(num_target_layers: int) -> list[int]:
    """Up to five layers from the second to the last but two, evenly: round(1 + i (N - 4) / 4).

    Source: the published DFlash code (z-lab) and SpecForge; shallow targets have fewer.
    """
    step = (num_target_layers - 4) / (NUM_FEATURE_LAYERS - 1)
    ids = {round(1 + index * step) for index in range(NUM_FEATURE_LAYERS)}
    return sorted({min(max(layer, 0), num_target_layers - 2) for layer in ids})


@dataclass
class BlockMethod:
    """Fields of a `method` node. null: the target's own value."""

    aux_layer_ids: list[int] | None = None
    """Target layers to read (0-based outputs, ascending); null: five, evenly spread."""
    num_hidden_layers: int = 5
    """Draft layers (published: 5)."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads."""
    head_dim: int | None = None
    """Width of one head."""
    max_position_embeddings: int | None = None
    """Longest context in tokens, the block included; drafting stops there."""
    qk_norm: bool = True
    """RMS norms on queries and keys (Qwen3-type layer, which engines serve)."""
    attention_bias: bool = False
    """Biases on q, k, v and o (not every engine loads them)."""
    layer_types: list[str] | None = None
    """full_attention or sliding_attention per layer; null: sliding everywhere where sliding_window
    is set, else full."""
    sliding_window: int | None = None
    """Positions that a sliding layer sees, its own included; such a layer is causal inside the
    block."""
    block_size: int = 16
    """Slots of a block, the anchor's included."""
    mask_token_id: int | None = None
    """Token of the slots to be predicted: an id that no text contains. null: the tokenizer's mask
    token, or the first id behind the tokenizer that the target's embeddings have."""
    decay: float = 7.0
    """Step j of the loss weighs exp(-j / decay)."""
    num_anchors: int = 512
    """Blocks that a micro-batch is trained on."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "ce"})
    """Objective by name with its options (train/objectives.py)."""
    builds_from_target: ClassVar[bool] = True
    """`build` is told how to load the target, for its tokenizer."""
    draft_vocab_size: None = field(default=None, init=False)
    """All of the target's tokens."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_anchors"):
            check_integer(f"method.{name}", getattr(self, name))
        check_integer("method.block_size", self.block_size, least=2)
        for name in (*SIZE_OPTIONS, "sliding_window"):
            check_integer(f"method.{name}", getattr(self, name), optional=True)
        check_integer("method.mask_token_id", self.mask_token_id, least=0, optional=True)
        for name in ("qk_norm", "attention_bias"):
            check_flag(f"method.{name}", getattr(self, name))
        check_number("method.decay", self.decay, above=0.0, most=1e6)
        if self.aux_layer_ids is not None:
            check_list("method.aux_layer_ids", self.aux_layer_ids, int)
        self._check_layer_types()
        check_objective(self.objective)

    def _check_layer_types(self) -> None:
        if self.layer_types is None:
            return
        for kind in self.layer_types:
            check_choice("method.layer_types", kind, LAYER_TYPES)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"method.layer_types has {len(self.layer_types)} entries, expected "
                f"{self.num_hidden_layers} (method.num_hidden_layers)."
            )
        slides = LAYER_TYPES[1] in self.layer_types
        if slides != (self.sliding_window is not None):
            raise ValueError(
                f"method.layer_types is {self.layer_types} and method.sliding_window "
                f"{self.sliding_window}: set the window where, and only where, a layer slides."
            )

    def validate(self, num_target_layers: int, vocab_size: int) -> None:
        """Checks the settings against a target, before any weight is loaded; fills in its layers.

        Raises:
            ValueError: a layer or the mask token does not exist.
        """
        if self.aux_layer_ids is None:
            self.aux_layer_ids = spread_feature_layers(num_target_layers)
        validate_aux_layer_ids(self.aux_layer_ids, num_target_layers)
        if self.mask_token_id is not None and self.mask_token_id >= vocab_size:
            raise ValueError(_beyond(self.mask_token_id, vocab_size))

    def make(self, settings: dict[str, Any]) -> BlockDraft:
        """A fresh draft with the settings of `block_settings`; each method has its class."""
        raise NotImplementedError

    def build(
        self,
        target_head: TargetHead,
        vocabulary: None,
        aux_layer_ids: Sequence[int],
        *,
        target: Mapping[str, Any] | None = None,
    ) -> BlockDraft:
        """Makes a draft model for a target, float32, attached to it.

        Args:
            target_head: Config, embeddings and head of the target.
            vocabulary: None, the draft proposes every token.
            aux_layer_ids: The layers read.
            target: How the target is loaded, see `block_settings`.
        """
        assert vocabulary is None, "draft_vocab_size is always null"
        draft = self.make(self.block_settings(target_head, aux_layer_ids, target))
        draft.start_quietly(target_head)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft

    def block_settings(
        self,
        target_head: TargetHead,
        aux_layer_ids: Sequence[int],
        target: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Arguments of a `BlockDraftConfig` for a target.

        Args:
            target_head: Config, embeddings and head of the target.
            aux_layer_ids: The layers read.
            target: How the target is loaded (the arguments of `TargetModel.load`); None: unknown,
                then mask_token_id must be set and is not compared with a tokenizer.
        """
        overrides = {name: getattr(self, name) for name in SIZE_OPTIONS}
        tokenizer = None if target is None else _load_tokenizer(target)
        kind = LAYER_TYPES[0 if self.sliding_window is None else 1]
        return draft_layer_sizes(target_head.config, overrides) | {
            "num_hidden_layers": self.num_hidden_layers,
            "vocab_size": target_head.vocab_size,
            "qk_norm": self.qk_norm,
            "attention_bias": self.attention_bias,
            "layer_types": self.layer_types or [kind] * self.num_hidden_layers,
            "sliding_window": self.sliding_window,
            "aux_layer_ids": list(aux_layer_ids),
            "block_size": self.block_size,
            "mask_token_id": choose_mask_token(
                self.mask_token_id,
                vocab_size=target_head.vocab_size,
                text_config=target_head.config,
                tokenizer=tokenizer,
            ),
            "decay": self.decay,
            "num_anchors": self.num_anchors,
        }


def _load_tokenizer(target: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    name = target["name_or_path"]
    source = resolve_target(name)
    arguments = loading_arguments(
        source, trust_remote_code=target["trust_remote_code"], revision=target["revision"]
    )
    return load_tokenizer(name, source, arguments)


# --- the mask token -------------------------------------------------------------------------------


def _beyond(found: int, vocab_size: int) -> str:
    return (
        f"method.mask_token_id is {found}, but the target has embeddings for the ids 0 to "
        f"{vocab_size - 1} only. Choose an id among them that no text contains."
    )


def choose_mask_token(
    wanted: int | None,
    *,
    vocab_size: int,
    text_config: Any,
    tokenizer: PreTrainedTokenizerBase | None,
) -> int:
    """A token that no text contains: a block's masks must not look like text to the draft.

    Args:
        wanted: The id that was asked for; None: choose one.
        vocab_size: Rows of the target's embeddings and head.
        text_config: The target's; its end, begin and padding ids are refused.
        tokenizer: The target's; None: not known.

    Returns:
        `wanted`, else the tokenizer's mask token, else the first id behind the tokenizer.

    Raises:
        ValueError: the wanted id is out of range or occurs in texts, or there is no safe one.
    """
    if wanted is None:
        wanted = _unused_token(vocab_size, text_config, tokenizer)
    if not 0 <= wanted < vocab_size:
        raise ValueError(_beyond(wanted, vocab_size))
    reason = _why_in_texts(wanted, text_config, tokenizer)
    if reason is not None:
        raise ValueError(
            f"method.mask_token_id is {wanted}, {reason}. Choose an id that no text contains"
            f"{_suggestions(text_config, tokenizer)}."
        )
    return wanted


def _unused_token(
    vocab_size: int, text_config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    if tokenizer is None:
        raise ValueError(
            "method.mask_token_id is null, and without the target's tokenizer no unused id can be "
            "found. Set it to an id that no text contains."
        )
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind >= vocab_size:
        raise ValueError(
            f"The target's {vocab_size} embeddings all belong to tokens, and its tokenizer names "
            "no mask token: there is no unused id for the slots of a block. Set "
            "method.mask_token_id to a reserved token that your texts do not contain"
            f"{_suggestions(text_config, tokenizer)}."
        )
    return behind


def _why_in_texts(
    token_id: int, text_config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> str | None:
    """Why a text may contain the token; None: as far as is known, none does."""
    for place in (text_config, tokenizer):
        for role in ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id"):
            ids = getattr(place, role, None)
            if token_id == ids or (isinstance(ids, list) and token_id in ids):
                return f"the target's {role}"
    if tokenizer is None or token_id not in set(tokenizer.get_vocab().values()):
        return None
    text = str(tokenizer.convert_ids_to_tokens(token_id))
    if token_id not in tokenizer.added_tokens_decoder:
        return f"the ordinary token {text!r}"
    if text in str(tokenizer.chat_template):
        return f"the token {text!r}, which the chat template writes"
    return None


def _suggestions(text_config: Any, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A few ids that would do, for a message."""
    if tokenizer is None:
        return ""
    safe = [
        f"{token_id} ({token.content})"
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if _why_in_texts(token_id, text_config, tokenizer) is None
    ]
    return f", for example {', '.join(safe[:3])}" if safe else ""
