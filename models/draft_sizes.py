"""Sizes and rotary settings that a Llama-type draft layer takes over from its target.

The draft is a Llama layer for any target, because that is what the engines serve; only sizes,
rotary scaling and norm epsilon come from the target. Field names are transformers'.
"""

from __future__ import annotations

from typing import Any

SIZE_OPTIONS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Options of a method that override the target's sizes."""
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""For targets without rotary embeddings (learned positions)."""
DEFAULT_NORM_EPS = 1e-6
"""For targets without an RMS norm (our choice, Llama's default)."""


def draft_layer_sizes(text_config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a Llama-type config of a draft layer.

    Args:
        text_config: The target's (text) config; transformers' classes differ per family.
        overrides: Sizes set by the user; None means the target's.

    Returns:
        hidden_size, intermediate_size, heads, head_dim, rope_parameters and the like.

    Raises:
        ValueError: if the target's config lacks a size that the user has to set then.
    """
    heads = overrides.get("num_attention_heads") or text_config.num_attention_heads
    own_heads = heads == text_config.num_attention_heads
    sizes = {
        "hidden_size": text_config.hidden_size,
        "intermediate_size": getattr(text_config, "intermediate_size", None),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text_config, "num_key_value_heads", None)
        if own_heads
        else None,
        "head_dim": getattr(text_config, "head_dim", None),
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
        "rms_norm_eps": getattr(text_config, "rms_norm_eps", DEFAULT_NORM_EPS),
        "rope_parameters": draft_rope_parameters(text_config),
        "bos_token_id": text_config.bos_token_id,
        "eos_token_id": text_config.eos_token_id,
        "pad_token_id": text_config.pad_token_id,
        "hidden_act": "silu",
    }
    sizes |= {name: value for name, value in overrides.items() if value is not None}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    sizes["head_dim"] = sizes["head_dim"] or text_config.hidden_size // heads
    for name in ("intermediate_size", "max_position_embeddings"):
        if sizes[name] is None:
            raise ValueError(
                f"The target's config ({type(text_config).__name__}) has no {name}. "
                f"Set method.{name}."
            )
    return sizes


def draft_rope_parameters(text_config: Any) -> dict[str, Any]:
    """The target's rotary settings for full attention, as a flat dict.

    Settings per layer type (Gemma 3) are reduced to those of `full_attention`: the draft attends to
    everything. A partly rotated head and sections for images (mrope) are dropped: a Llama layer
    rotates the whole head, and on text the three position rows are equal.

    Raises:
        ValueError: if settings per layer type have none for full attention.
    """
    parameters = getattr(text_config, "rope_parameters", None)
    if not parameters:
        return dict(DEFAULT_ROPE)
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if nested:
        if "full_attention" not in nested:
            raise ValueError(
                f"The target has rotary settings for {', '.join(nested)}, but none for "
                "full_attention, which the draft uses. This target is not supported."
            )
        parameters = nested["full_attention"]
    return {
        name: value
        for name, value in parameters.items()
        if name != "partial_rotary_factor" and not name.startswith("mrope")
    }
