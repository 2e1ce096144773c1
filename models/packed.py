"""One forward of a causal language model over several sequences, each with its own cache or tree.

transformers runs rectangles: a batch is padded to its longest row, and a tree needs a mask over all
keys of all rows. Here the new tokens of all sequences lie in one row, [1, total]: every layer's
linear parts cost what the tokens cost, whoever they belong to. Only attention and recurrent mixers
look at the sequences one by one, each over its own `SequenceCache`. The model's code is untouched:
during a packed forward its attention goes through transformers' attention interface to `_attend`,
the calls of its mixers (models/recurrent_states.py) go to `_mix`, and its cache is an object that
notes which layer is speaking.

Works for any model that attends through that interface and takes position ids, with full,
sliding-window and recurrent layers (these read chains, no trees); a trial at construction compares
with the model's own forward and refuses a model that computes anything else. A flash-attention
target is read with this attention instead (flash kernels take no tree masks); that is said once.

How to check: tests/test_packed.py, on tiny models of eleven families.

Axes: total (new tokens of all sequences), new (of one), rows (uncommitted tokens of one sequence,
those read earlier in the round included), heads, kv_heads, head_dim, vocab.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from draftsmith.models.recurrent_states import (
    NO_TREES,
    MixerCall,
    RecurrentStates,
    goes_on,
    replaced_forwards,
)
from draftsmith.models.rollback import require_exact_rollback
from draftsmith.models.sequence_cache import (
    SMALL_QUERY,
    SequenceCache,
    cached_attention,
    causal_mask,
)
from draftsmith.models.target import TargetModel, TargetOutput
from draftsmith.models.target_structure import agree, layer_input, probe_tokens

logger = logging.getLogger(__name__)

INTERFACE_NAME = "draftsmith_packed"


@dataclass
class Segment:
    """New tokens of one sequence."""

    cache: SequenceCache
    tokens: Tensor
    """[new] int64."""
    start: int
    """Where their entries go: `cache.committed` plus the rows read earlier in this round."""
    positions: Tensor | None = None
    """[rows] int64 positions of all uncommitted rows, the new ones last; None: consecutive."""
    ancestors: Tensor | None = None
    """[new, rows] bool: True where a new token sees an uncommitted row (itself included); None: it
    sees all before it. Committed entries are always seen."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def new(self) -> int:
        return len(self.tokens)

    def new_positions(self, device: torch.device) -> Tensor:
        """[new] positions of the new tokens."""
        if self.positions is None:
            return torch.arange(self.start, self.start + self.new, device=device)
        return self.positions[-self.new :]

    def keep_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """[new, start + new] bool, what each new token sees; None: everything before it.

        Args:
            window: width of a sliding window in positions, or None for full attention.
            device: of the mask.
        """
        if window is not None and self.start + self.new <= window:
            window = None  # Nothing is out of the window yet.
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, device)
        return self._masks[window]

    def _make_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        if window is None and self.ancestors is None:
            if self.new == 1 or self.new > SMALL_QUERY:
                return None
            return causal_mask(self.new, self.start + self.new, device)  # Once for all layers.
        past = self.cache.committed
        seen = torch.ones(self.new, self.start + self.new, dtype=torch.bool, device=device)
        if self.ancestors is None:
            seen = seen.tril(self.start)
        else:
            seen[:, past:] = self.ancestors
        if window is not None:
            keys = torch.arange(self.start + self.new, device=device)
            if self.positions is not None:
                keys[past:] = self.positions
            seen &= keys[None, :] > self.new_positions(device)[:, None] - window
        return seen


@dataclass
class _Step:
    """The packed forward that is running."""

    segments: Sequence[Segment]
    layer: int = -1
    layers_attended: int = 0


_RUNNING: ContextVar[_Step] = ContextVar("draftsmith_packed_step")


class PackedKeyValues(DynamicCache):
    """What the model takes for its cache: it only notes the layer, the segments do the rest."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.step.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (transformers' signature)
        return 0


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, for the packed forward that is running.

    Args:
        query: [1, heads, total, head_dim].
        key: [1, kv_heads, total, head_dim], of the new tokens.
        value: the same.
        scaling: of the scores.
        sliding_window: in positions.
        softcap: see `cached_attention`.

    Returns:
        [1, total, heads, head_dim], None.
    """
    step = _RUNNING.get()
    step.layers_attended += 1
    outputs = []
    first = 0
    for segment in step.segments:
        rows = slice(first, first + segment.new)
        first += segment.new
        keys, values = segment.cache.write(
            step.layer, segment.start, key[0, :, rows], value[0, :, rows]
        )
        outputs.append(
            cached_attention(
                query[0, :, rows].transpose(0, 1),
                keys,
                values,
                keep_mask=segment.keep_mask(sliding_window, query.device),
                scale=scaling,
                softcap=softcap,
            )
        )
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(INTERFACE_NAME, _attend)


def _mix(
    layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A recurrent mixer, for the packed forward that is running: each sequence by its own state.

    Args:
        layer: index in the cache.
        forward: the mixer's own.
        args: what it was called with: hidden states [1, total, hidden] first, or by name.
        kwargs: the same.

    Returns:
        [1, total, hidden].

    Raises:
        ValueError: a segment is a tree.
    """
    step = _RUNNING.get()
    step.layers_attended += 1
    hidden = layer_input(args, kwargs)
    (cache,) = (v for v in (*args, *kwargs.values()) if isinstance(v, PackedKeyValues))
    call = MixerCall(forward, args, kwargs, cache)
    outputs = []
    first = 0
    for segment in step.segments:
        if segment.ancestors is not None:
            raise ValueError(NO_TREES)
        assert segment.cache.recurrent is not None, "new_cache() of this model made the cache"
        behind = segment.start - segment.cache.committed
        rows = hidden[:, first : first + segment.new]
        first += segment.new
        outputs.append(segment.cache.recurrent.read(layer, call, rows, behind=behind))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@contextmanager
def packed_attention(
    configs: Sequence[Any],
    segments: Sequence[Segment],
    mixers: dict[int, nn.Module] | None = None,
) -> Iterator[PackedKeyValues]:
    """What transformers' modules need to read packed rows: [1, total, ...] of all segments.

    Args:
        configs: every configuration object that a part of the model reads its attention from.
        segments: whose new tokens the rows are.
        mixers: the recurrent ones, by their layer in the cache.

    Yields:
        What to pass for the cache. A layer's keys go where its `layer_idx` says.
    """
    step = _Step(segments)
    before = [config._attn_implementation_internal for config in configs]
    token = _RUNNING.set(step)
    for config in configs:
        config._attn_implementation_internal = INTERFACE_NAME
    try:
        with replaced_forwards(mixers or {}, _mix):
            yield PackedKeyValues(step)
    finally:
        for config, kind in zip(configs, before, strict=True):
            config._attn_implementation_internal = kind
        _RUNNING.reset(token)


class PackedModel:
    """A target model, or a small language model as draft, read in packed forwards."""

    def __init__(self, model: TargetModel) -> None:
        """Raises ValueError for a model that cannot be read this way."""
        self.model = model
        self.device = model.device
        self._configs = attention_configs(model.model)
        kinds = {config._attn_implementation_internal for config in self._configs}
        if any("flash" in str(kind) for kind in kinds):
            logger.warning(
                "%s was loaded with %s; decoding reads it with its own attention instead, because "
                "flash kernels take no tree masks.",
                model.name_or_path,
                ", ".join(map(str, sorted(kinds, key=str))),
            )
        self._try()

    @classmethod
    def of(cls, model: TargetModel) -> PackedModel:
        """The one that belongs to a model, made and tried on first use."""
        if model.packed_model is None:
            model.packed_model = cls(model)
        return model.packed_model

    def new_cache(self, capacity: int) -> SequenceCache:
        """An empty cache of one sequence with room for `capacity` positions."""
        states = RecurrentStates(self.model.new_cache()) if self.model.mixers else None
        return SequenceCache(capacity, recurrent=states)

    @torch.no_grad()
    def forward(
        self,
        segments: Sequence[Segment],
        *,
        aux_layer_ids: Sequence[int] = (),
        logits: Literal["none", "last", "all"] = "none",
    ) -> TargetOutput:
        """Reads the new tokens of all segments; their caches hold them afterwards, uncommitted.

        Args:
            segments: at least one.
            aux_layer_ids: layers whose outputs are wanted; -1 is the embedding output.
            logits: of no token, of each segment's last token, or of all.

        Returns:
            A `TargetOutput` with [1, total, ...] states; logits [1, total or segments, vocab].
        """
        ids = torch.cat([segment.tokens for segment in segments])[None]
        positions = torch.cat([segment.new_positions(self.device) for segment in segments])[None]
        with packed_attention(self._configs, segments, self.model.mixers) as cache:
            output = self.model.forward(
                ids,
                position_ids=positions,
                cache=cache,
                aux_layer_ids=aux_layer_ids,
                logits="all" if logits == "all" else "none",
            )
        if cache.step.layers_attended == 0:
            raise ValueError(self._refusal("does not attend through transformers' interface"))
        if logits == "last":
            ends = torch.tensor([segment.new for segment in segments]).cumsum(0) - 1
            states = output.final_hidden_states[:, ends.to(self.device)]
            output.logits = self.model.logits(states)
        return output

    def _try(self) -> None:
        """Reads two short sequences and a small tree both ways; rejected chains for recurrent ones.

        Raises:
            ValueError: the packed forward does not give the model's own logits.
        """
        probe = probe_tokens(self.model.head().weight)[0]
        plain_cache = self.model.new_cache()
        self.model.forward(probe[None], cache=plain_cache)
        require_exact_rollback(plain_cache, mixers=self.model.mixers)
        ids = torch.cat([probe, probe.flip(0)])
        first, second, root, left, right = ids[:3], ids[1:3], ids[3:4], ids[-1:], ids[-2:-1]
        caches = [self.new_cache(8), self.new_cache(8)]
        prompts = [Segment(caches[0], first, 0), Segment(caches[1], second, 0)]
        self.forward(prompts)
        for cache, prompt in zip(caches, prompts, strict=True):
            cache.keep(range(prompt.new))
        below = torch.cat([root, left, right])
        if self.model.mixers:
            self._try_rollback(caches, [first, second], below)
            return
        tree = Segment(
            caches[0],
            below,
            3,
            positions=torch.tensor([3, 4, 4], device=self.device),
            ancestors=torch.tensor(
                [[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=self.device
            ),
        )
        found = self.forward([tree, Segment(caches[1], root, 2)], logits="all").logits
        assert found is not None, "logits were asked for"
        paths = [
            torch.cat([first, root]),
            torch.cat([first, root, left]),
            torch.cat([first, root, right]),
            torch.cat([second, root]),
        ]
        self._compare(found[0], paths)

    def _try_rollback(
        self, caches: Sequence[SequenceCache], texts: list[Tensor], chain: Tensor
    ) -> None:
        """Reads a chain behind both texts, keeps one and two of its tokens, and goes on."""
        self._try_mixers(torch.cat([texts[0], chain, texts[0].flip(0)]))
        for kept, cache in enumerate(caches, start=1):
            wrong = Segment(cache, torch.cat([chain[:kept], chain.flip(0)]), cache.committed)
            self.forward([wrong])
            cache.keep(range(kept))
        segments = [
            Segment(cache, chain[kept:], cache.committed)
            for kept, cache in enumerate(caches, start=1)
        ]
        found = self.forward(segments, logits="all").logits
        assert found is not None, "logits were asked for"
        paths = [
            torch.cat([text, chain[:stop]])
            for kept, text in enumerate(texts, start=1)
            for stop in range(kept + 1, len(chain) + 1)
        ]
        self._compare(found[0], paths)

    def _try_mixers(self, text: Tensor) -> None:
        """Insists that each mixer goes on from its state when it reads several tokens."""
        calls: dict[int, tuple[MixerCall, Tensor]] = {}
        cache = self.model.new_cache()

        def record(
            layer: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            calls[layer] = MixerCall(own, args, kwargs, cache), layer_input(args, kwargs)
            return own(*args, **kwargs)

        with replaced_forwards(self.model.mixers, record):
            self.model.forward(text[None], cache=cache)
        for layer, (call, rows) in calls.items():
            if not goes_on(layer, call, rows, self.model.new_cache):
                kind = type(self.model.mixers[layer]).__name__
                raise ValueError(
                    self._refusal(
                        f"has a {kind} (layer {layer}) that forgets its state when it reads "
                        "several tokens at once"
                    )
                )

    def _compare(self, found: Tensor, texts: list[Tensor]) -> None:
        """Insists that the rows of [texts, vocab] logits are the model's own after each text."""
        for row, text in zip(found, texts, strict=True):
            expected = self.model.forward(text[None], logits="last").logits
            assert expected is not None, "logits were asked for"
            if not agree(row, expected.flatten()):
                raise ValueError(self._refusal("gives other logits when sequences are packed"))

    def _refusal(self, what: str) -> str:
        return (
            f"{type(self.model.model).__name__} {what}, so it cannot be decoded with here (caching "
            "its states and training on them still work). Use a model whose attention goes through "
            "transformers' AttentionInterface and that takes position ids."
        )


def attention_configs(model: nn.Module) -> list[Any]:
    """Every configuration object that some part of the model reads its attention from."""
    found = {
        id(config): config
        for module in model.modules()
        if hasattr(config := getattr(module, "config", None), "_attn_implementation_internal")
    }
    return list(found.values())
