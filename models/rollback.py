"""Which key-value caches can take back rejected tokens exactly; the others are refused.

`draftsmith.models.kv_cache.drop_last` does the taking back. It needs layers that still hold what a
rollback brings to light again: sliding-window layers have thrown it away unless they record the
past, and recurrent layers cannot go back at all.
"""

from __future__ import annotations

from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer


def require_exact_rollback(cache: Cache) -> None:
    """Raises ValueError unless every layer of the cache can be rolled back without a trace.

    Call it after prefill: recurrent layers only know what they hold once they have been used.
    """
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        forgets = isinstance(layer, StaticSlidingWindowLayer) or (
            isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
        )
        if forgets or not layer.is_croppable:
            raise ValueError(
                f"Layer {index} of the cache is a {kind}, which cannot take back rejected tokens "
                "exactly. Use full-attention layers (TargetModel.new_cache()), or call "
                "cache.activate_past_recording() on a sliding-window cache before prefill."
            )
