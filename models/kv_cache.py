"""A key/value cache with slack: appending writes in place, rolling back only moves an end mark.

transformers' `DynamicCache` copies the whole cache for every appended token (one concatenation per
layer and step). Here each layer owns buffers with room to spare, so a decoding step writes just its
own entries, and `crop` keeps the buffers. All layers are full ones, for sliding-window models too:
their masks are computed from positions, and a full cache can be rolled back exactly at any length
(a sliding cache has already dropped the entries that a rollback would bring back).

Recurrent layers (linear attention, state space, short convolution) keep one state per row instead
of entries per token. They stay transformers' own: they do not grow, and cannot be rolled back here
(models/recurrent_states.py does that, for one sequence at a time).

Axes: batch, heads (key/value heads), seq, head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

SLACK_TOKENS = 128
"""Extra room per growth, in tokens (our choice): about one copy per 128 decoded tokens."""


class SlackLayer(DynamicLayer):
    """One layer's keys and values; `keys` and `values` are views on the filled part of buffers."""

    key_buffer: Tensor
    value_buffer: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [batch, heads, new, head_dim]; returns all, [batch, heads, seq, head_dim].

        Args:
            key_states: new keys.
            value_states: new values.
        """
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._has_room(key_states, end):
            self._grow(key_states, value_states, start, end)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        keys, values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        self.keys, self.values = keys, values
        return keys, values

    def filled(self) -> tuple[Tensor, Tensor]:
        """The keys and values of an initialised layer, [batch, heads, seq, head_dim] each."""
        assert self.keys is not None, "the layer holds entries"
        assert self.values is not None, "the layer holds entries"
        return self.keys, self.values

    def _has_room(self, key_states: Tensor, end: int) -> bool:
        if not self.is_initialized or self.get_seq_length() == 0:
            return False
        keys, buffer = self.filled()[0], self.key_buffer
        # Selecting rows replaces `keys` by a tensor of its own; the buffer is then out of date.
        same = keys.data_ptr() == buffer.data_ptr() and keys.stride() == buffer.stride()
        return same and buffer.shape[0] == key_states.shape[0] and buffer.shape[2] >= end

    def _grow(self, key_states: Tensor, value_states: Tensor, start: int, end: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, _, key_dim = key_states.shape
        room = end + SLACK_TOKENS
        key_buffer = key_states.new_empty(batch, heads, room, key_dim)
        value_buffer = value_states.new_empty(batch, heads, room, value_states.shape[-1])
        if start:
            key_buffer[:, :, :start], value_buffer[:, :, :start] = self.filled()
        self.key_buffer, self.value_buffer = key_buffer, value_buffer


class SlackCache(DynamicCache):
    """A `DynamicCache` whose layers are all `SlackLayer`s; `crop(-n)` forgets the last n tokens."""

    def __init__(self) -> None:
        super().__init__()
        # Layers are created at the first update of each; a cache made without a config would make
        # plain dynamic ones.
        self.layer_class_to_replicate = SlackLayer

    @classmethod
    def of(cls, config: PreTrainedConfig) -> SlackCache:
        """An empty cache for a model; its layers are made at once where some are recurrent."""
        cache = cls()
        layers = empty_layers(config)
        if any(map(is_recurrent, layers)):
            cache.layers.extend(layers)
        return cache

    def slack_layers(self) -> Iterator[SlackLayer]:
        """The layers that keep entries per token, with their type."""
        for layer in self.layers:
            if not is_recurrent(layer) and not isinstance(layer, DummyLayer):
                assert isinstance(layer, SlackLayer), f"unexpected layer {type(layer).__name__}"
                yield layer

    def recurrent_layers(self) -> Iterator[LinearAttentionCacheLayerMixin]:
        """The layers that keep a state per row."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                yield layer


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer keeps a state that every token changes."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def empty_layers(config: PreTrainedConfig) -> list[Any]:
    """The empty cache layers of a model, full and sliding ones as `SlackLayer`s.

    Sliding layers forget; a full layer in their place sees the same window through its mask.

    Raises:
        KeyError: transformers has no cache layer for one of the configuration's layer types.
    """
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return [SlackLayer() if type(layer) in plain else layer for layer in layers]


def drop_last(cache: Cache, num_tokens: int) -> None:
    """Forgets the last `num_tokens` entries of every layer, exactly.

    transformers 5 accepts only a negative count in `crop`.

    Raises:
        ValueError: more tokens than the cache holds, or a negative number.
    """
    held = cache.get_seq_length()
    if not 0 <= num_tokens <= held:
        raise ValueError(f"Cannot drop {num_tokens} tokens from a cache that holds {held}.")
    if num_tokens:
        cache.crop(-num_tokens)


def select_rows(cache: SlackCache, rows: Tensor, *, first: int) -> None:
    """Keeps the batch rows `rows` [rows] and the tokens from index `first` on, in every layer."""
    for layer in cache.slack_layers():
        keys, values = layer.filled()
        layer.keys = keys.index_select(0, rows)[:, :, first:]
        layer.values = values.index_select(0, rows)[:, :, first:]
    for states in cache.recurrent_layers():
        for kind in (states.conv_states, states.recurrent_states):
            for index, state in kind.items():
                if state is not None:
                    kind[index] = state.index_select(0, rows)


def join_rows(cache: SlackCache, other: SlackCache) -> None:
    """Appends the batch rows of `other` to `cache`, both padded on the left to the longer one."""
    for layer, added in zip(cache.slack_layers(), other.slack_layers(), strict=True):
        keys, values = layer.filled()
        added_keys, added_values = added.filled()
        layer.keys, layer.values = _join(keys, added_keys), _join(values, added_values)
    for states, new in zip(cache.recurrent_layers(), other.recurrent_layers(), strict=True):
        _append_rows(states.conv_states, new.conv_states)
        _append_rows(states.recurrent_states, new.recurrent_states)


def _append_rows(states: dict[int, Tensor | None], added: dict[int, Tensor | None]) -> None:
    for index, state in states.items():
        new = added[index]
        if state is not None and new is not None:
            states[index] = torch.cat([state, new])


def _join(first: Tensor, second: Tensor) -> Tensor:
    length = max(first.shape[2], second.shape[2])
    rows = first.shape[0] + second.shape[0]
    joined = first.new_zeros(rows, first.shape[1], length, first.shape[3])
    joined[: first.shape[0], :, length - first.shape[2] :] = first
    joined[first.shape[0] :, :, length - second.shape[2] :] = second
    return joined
