"""Which key-value caches can take back rejected tokens exactly; the others are refused.

`draftsmith.models.kv_cache.drop_last` does the taking back. It needs layers that still hold what a
rollback brings to light again: sliding-window layers have thrown it away unless they record the
past, and recurrent layers cannot go back by themselves (models/recurrent_states.py goes back for
them, where the mixer of the layer is known).
"""

from __future__ import annotations

from collections.abc import Container

from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from draftsmith.models.kv_cache import is_recurrent


def require_exact_rollback(cache: Cache, *, mixers: Container[int] = ()) -> None:
    """Raises ValueError unless every layer of the cache can be rolled back without a trace.

    Call it after prefill: recurrent layers only know what they hold once they have been used.

    Args:
        cache: a cache that was used.
        mixers: layers whose mixers are known, so that `RecurrentStates` takes their tokens back.
    """
    for index, layer in enumerate(cache.layers):
        if is_recurrent(layer) and index in mixers:
            continue
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
