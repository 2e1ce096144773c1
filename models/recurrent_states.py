"""Recurrent states of one sequence that can take back rejected tokens exactly.

A recurrent layer (linear attention, state space, short convolution) keeps a state that every token
changes, so forgetting tokens is not moving an end mark. transformers can record a cache's past
(`activate_past_recording`, then `crop`), but only that of convolution states: in 5.24 a cropped
recurrent state still holds what was cropped. So here each layer's state of before the round is
kept, with what its *mixer* (the module that reads and writes the state: Qwen3.5's `linear_attn`)
was given in the round. When tokens are rejected, that state is put back, and the accepted rows
wait: the mixer reads them in front of the next round's, in the same call, and only the new rows'
outputs go on. Rows that wait are read by the mixers alone, in a call of their own, once they are
more than `MOST_WAITING`. Attention layers, MLPs, norms and the head never run twice.

A state has no branches. Only chains can be verified with it; trees are refused.

Works for any mixer that is called with the cache, and whose states lie in transformers' recurrent
cache layers; no family is known by name. Mixers are found by watching one forward, and a trial at
the start of decoding (models/packed.py) insists on what comes out.

How to check: tests/test_recurrent.py.

Axes: rows (read of one sequence in one round), hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from draftsmith.models.kv_cache import is_recurrent

MOST_WAITING = 16
"""Accepted rows that a mixer reads again with the next ones (our choice). Fewer: more calls of
their own; more: every call is longer. Measured in docs/decoding.md."""
NO_TREES = (
    "A model with recurrent layers cannot read a tree of drafted tokens: its state has no "
    "branches. Draft chains (drafting=chain)."
)


@dataclass(frozen=True)
class MixerCall:
    """A call of a mixer, to be made again for some rows of some sequence."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: Cache
    """What stands for a sequence's own cache among the arguments."""

    def __call__(self, rows: Tensor, cache: Cache) -> Tensor:
        """[1, rows, hidden] -> the same shape; `cache` has read the rows afterwards."""
        args = [cache if value is self.cache else value for value in self.args]
        kwargs = {k: cache if value is self.cache else value for k, value in self.kwargs.items()}
        if args:
            args[0] = rows
        else:
            kwargs["hidden_states"] = rows
        output = self.forward(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"A mixer returned a {type(output).__name__}; expected a tensor.")
        return output

    def without_rows(self) -> MixerCall:
        """The same call, holding no hidden states."""
        kwargs = {name: value for name, value in self.kwargs.items() if name != "hidden_states"}
        return MixerCall(self.forward, (None, *self.args[1:])[: len(self.args)], kwargs, self.cache)


@dataclass
class _LayerRound:
    """What one layer has read since the last `keep`."""

    before: Any
    """The cache layer as it was."""
    call: MixerCall
    inputs: list[Tensor] | None
    """[1, rows, hidden]: rows that had waited, then those of each forward; None for a prompt, which
    is kept whole."""
    waited: int
    """Rows that had waited."""
    count: int = 0
    """Rows of the round."""


@dataclass
class RecurrentStates:
    """The states of one sequence: committed ones, or those of a round that is not settled yet."""

    cache: Cache
    """A cache of the model's own kind; only its recurrent layers are used."""
    _round: dict[int, _LayerRound] = field(default_factory=dict)
    _waiting: dict[int, tuple[MixerCall, Tensor]] = field(default_factory=dict)
    """Committed rows that a layer's state has not read yet, [1, rows, hidden]."""

    def read(self, layer: int, call: MixerCall, rows: Tensor, *, behind: int) -> Tensor:
        """Lets a mixer read new rows; they stay uncommitted until `keep`.

        Args:
            layer: index of the layer in the cache.
            call: of the mixer.
            rows: [1, rows, hidden] what it is given.
            behind: rows of this round before them.

        Returns:
            [1, rows, hidden].

        Raises:
            ValueError: rows that the state has read do not match `behind`.
        """
        given = rows
        if layer not in self._round:
            before = copy.deepcopy(self.cache.layers[layer])
            # A prompt's rows are as large as its activations, and none of them is ever rejected.
            inputs: list[Tensor] | None = [] if _has_state(before) else None
            held = self._round[layer] = _LayerRound(before, call.without_rows(), inputs, 0)
            if layer in self._waiting:
                assert inputs is not None, "rows wait behind a state"
                waiting = self._waiting.pop(layer)[1]
                inputs.append(waiting)
                held.waited = waiting.shape[1]
                given = torch.cat([waiting, rows], dim=1)
        held = self._round[layer]
        if held.count != behind:
            raise ValueError(
                f"A recurrent state has read {held.count} rows since the last commit, but the new "
                f"ones come behind {behind}: call keep() after every round."
            )
        if held.inputs is not None:
            held.inputs.append(rows)
        held.count += rows.shape[1]
        return call(given, self.cache)[:, -rows.shape[1] :]

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Commits the first rows of the round and takes back the others.

        Args:
            rows: 0, 1, ... as `SequenceCache.keep` takes them.

        Raises:
            ValueError: other rows than the first ones (a tree's path), or a part of a prompt.
        """
        count = len(rows)
        if list(rows) != list(range(count)):
            raise ValueError(
                f"Rows {list(rows)} of a round are to be kept: a recurrent state has read them in "
                "one line and keeps the first ones only. Draft chains (drafting=chain)."
            )
        for layer, held in self._round.items():
            if count == held.count:
                continue
            if held.inputs is None and count:
                raise ValueError(
                    f"{count} of the {held.count} rows of a prompt are to be kept; a recurrent "
                    "state keeps its first round whole."
                )
            self.cache.layers[layer] = held.before
            if held.waited + count:
                assert held.inputs is not None, "a prompt is kept whole or not at all"
                waiting = torch.cat(held.inputs, dim=1)[:, : held.waited + count].clone()
                self._waiting[layer] = held.call, waiting
        self._round.clear()
        if any(waiting.shape[1] > MOST_WAITING for _, waiting in self._waiting.values()):
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Lets the mixers read the committed rows that wait."""
        assert not self._round, "a round is settled by keep"
        for call, waiting in self._waiting.values():
            call(waiting, self.cache)
        self._waiting.clear()

    def copy(self) -> RecurrentStates:
        """The committed states, independent of these."""
        self.settle()
        return RecurrentStates(copy.deepcopy(self.cache))


def _has_state(layer: Any) -> bool:
    """Whether a recurrent cache layer has read anything."""
    initialised = (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized)
    return any(any(kind.values()) for kind in initialised)


@contextmanager
def watched_mixers(model: nn.Module, cache: Cache) -> Iterator[dict[int, nn.Module]]:
    """Finds the mixers of a model while it reads its first tokens with an empty cache.

    A mixer is the innermost module that was called with the cache and left a state in it.

    Args:
        model: what is called inside the `with`.
        cache: what it is called with.

    Yields:
        Index of a recurrent layer in the cache -> its mixer; complete after the forward.
    """
    found: dict[int, nn.Module] = {}
    entered: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is cache for value in (*args, *kwargs.values())):
            entered.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        if not entered or entered[-1] is not module:
            return
        entered.pop()
        for index, layer in enumerate(cache.layers):
            if index not in found and is_recurrent(layer) and _has_state(layer):
                found[index] = module

    handles = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def require_mixers(name: str, cache: Cache, mixers: dict[int, nn.Module]) -> None:
    """Raises ValueError unless every recurrent layer of a used cache has a mixer of its own.

    Args:
        name: of the model.
        cache: what the model has read its first tokens with.
        mixers: those that were found.
    """
    for index, layer in enumerate(cache.layers):
        if is_recurrent(layer) and index not in mixers:
            raise ValueError(
                f"{name} does not keep the recurrent state of layer {index} in its cache, so it "
                "cannot be rolled back after a rejected draft. This target is not supported."
            )
    if len(set(mixers.values())) < len(mixers):
        raise ValueError(
            f"{name}: several layers share a recurrent module. This target is not supported."
        )


@torch.no_grad()
def goes_on(layer: int, call: MixerCall, rows: Tensor, new_cache: Callable[[], Cache]) -> bool:
    """Whether a mixer that reads several rows behind a state starts from that state.

    Some start from nothing then, as only a prompt has several rows in plain generation. Whole
    models hide it where one layer says little, so each mixer is asked for itself.

    Args:
        layer: its layer in the cache.
        call: of the mixer.
        rows: [1, rows, hidden] as it is given them, a few.
        new_cache: makes empty caches.
    """
    once, twice = new_cache(), new_cache()
    half = rows.shape[1] // 2
    found = [call(part, twice) for part in (rows[:, :half], rows[:, half:])]
    pairs = [(torch.cat(found, dim=1), call(rows, once))]
    for name in ("conv_states", "recurrent_states"):
        states, expected = (getattr(cache.layers[layer], name) for cache in (twice, once))
        pairs += [(state, expected[i]) for i, state in states.items() if state is not None]
    tolerance = 1e-3 if rows.dtype == torch.float32 else 5e-2
    return all(
        float((one - other).abs().max()) <= tolerance * float(other.abs().max())
        for one, other in pairs
    )


@contextmanager
def replaced_forwards(
    mixers: dict[int, nn.Module], forward: Callable[..., Tensor]
) -> Iterator[None]:
    """Sends the calls of mixers to `forward(layer, own forward, args, kwargs)`."""
    before = [(module, module.__dict__.get("forward")) for module in mixers.values()]

    def redirected(layer: int, own: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: forward(layer, own, args, kwargs)

    for layer, module in mixers.items():
        module.forward = redirected(layer, module.forward)
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own
