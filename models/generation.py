"""Plain batched generation with a frozen target: rows that finish leave, waiting prompts enter.

Used to let the target write its own training answers and to get greedy reference outputs. Plain
`generate` loses its time in three places that this avoids: it copies the whole key/value cache for
every token (see kv_cache.py), computes logits it does not need, and keeps decoding rows that have
long ended until the last row of the batch is done.

The active rows share one left-padded cache. Position ids count real tokens only, so a row's numbers
do not depend on its padding beyond floating-point summation order; in bfloat16 a near tie may
therefore fall differently in another batch.

Axes: rows (active), seq (cache length with padding), vocab.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.kv_cache import SlackCache, join_rows, select_rows
from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import warp_logits

REFILL_SHARE = 0.25
"""New prompts enter when this share of the rows is free (our choice): each entry copies the cache
once and runs one prefill, so entering one by one would cost more than the free rows lose."""


@dataclass
class GeneratedAnswer:
    """What one prompt received."""

    token_ids: list[int]
    """New tokens; a final stop token is included."""
    finish_reason: str
    """stop (a stop token came) or length (max_new_tokens reached)."""


@dataclass
class _Row:
    """Book-keeping of one active row."""

    index: int
    token_ids: list[int]
    generator: torch.Generator | None


@dataclass
class _Batch:
    """The active rows and their shared cache."""

    cache: SlackCache = field(default_factory=SlackCache)
    rows: list[_Row] = field(default_factory=list)
    keep_mask: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    """[rows, seq] int64: 1 on real tokens, 0 on left padding."""
    next_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """[rows] int64: chosen, not yet read by the model."""


def choose_next(
    logits: Tensor, sampling: SamplingSettings, generators: Sequence[torch.Generator | None]
) -> Tensor:
    """[rows, vocab] logits to [rows] token ids; greedy takes the first maximum.

    Sampling inverts the cumulative distribution with one uniform number per row, drawn from the
    row's own generator: an answer does not depend on which rows share the batch.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    probs = torch.softmax(warp_logits(logits.float(), sampling).double(), dim=-1)
    cumulative = probs.cumsum(dim=-1)
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    threshold = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return chosen.clamp_(max=logits.shape[-1] - 1)


def _last_logits(
    model: Any, ids: Tensor, keep_mask: Tensor, positions: Tensor, cache: SlackCache
) -> Tensor:
    """One forward of the model; the logits of each row's last token, [rows, vocab]."""
    # transformers 5.2x renamed the argument; the old name warns at every call.
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    output = model(
        input_ids=ids,
        attention_mask=keep_mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_name: cache},
    )
    return output.logits[:, -1]


def _prefill(model: Any, prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[_Batch, Tensor]:
    """Runs new prompts, left-padded, through the model; returns their batch and last logits."""
    longest = max(len(prompt) for prompt in prompts)
    device = model.device
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long, device=device)
    keep = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long, device=device)
        keep[row, longest - len(prompt) :] = 1
    batch = _Batch(SlackCache.of(model.config), keep_mask=keep)
    positions = (keep.cumsum(dim=-1) - 1).clamp_(min=0)
    return batch, _last_logits(model, ids, keep, positions, batch.cache)


def _join_batches(active: _Batch, entering: _Batch) -> _Batch:
    if not active.rows:
        return entering
    length = max(active.keep_mask.shape[1], entering.keep_mask.shape[1])
    masks = [
        torch.nn.functional.pad(mask, (length - mask.shape[1], 0))
        for mask in (active.keep_mask, entering.keep_mask)
    ]
    join_rows(active.cache, entering.cache)
    return _Batch(
        cache=active.cache,
        rows=active.rows + entering.rows,
        keep_mask=torch.cat(masks),
        next_ids=torch.cat([active.next_ids, entering.next_ids]),
    )


def _drop_finished(batch: _Batch, finished: set[int]) -> _Batch:
    """Keeps the unfinished rows, and cuts the columns that are padding in all of them."""
    staying = [slot for slot, row in enumerate(batch.rows) if row.index not in finished]
    if not staying:
        return _Batch()
    kept = torch.tensor(staying, device=batch.keep_mask.device)
    mask = batch.keep_mask.index_select(0, kept)
    first = int(mask.any(dim=0).int().argmax())
    select_rows(batch.cache, kept, first=first)
    return _Batch(
        cache=batch.cache,
        rows=[batch.rows[slot] for slot in staying],
        keep_mask=mask[:, first:],
        next_ids=batch.next_ids.index_select(0, kept),
    )


def _step(model: Any, batch: _Batch) -> Tensor:
    """Reads each row's next token; returns the logits after it, [rows, vocab]."""
    batch.keep_mask = torch.nn.functional.pad(batch.keep_mask, (0, 1), value=1)
    positions = batch.keep_mask.sum(dim=-1, keepdim=True) - 1
    return _last_logits(model, batch.next_ids[:, None], batch.keep_mask, positions, batch.cache)


@dataclass
class _Work:
    """Everything in hand: waiting prompts, active rows and finished answers."""

    model: Any
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    stops: frozenset[int]
    pad_id: int
    sampling: SamplingSettings
    seeds: Sequence[int] | None
    on_finished: Callable[[int, GeneratedAnswer], None] | None
    waiting: deque[int]
    active: _Batch = field(default_factory=_Batch)
    finished: set[int] = field(default_factory=set)
    """Prompts that are done but still hold a slot of the active batch."""
    answers: dict[int, GeneratedAnswer] = field(default_factory=dict)

    @property
    def num_live(self) -> int:
        return len(self.active.rows) - len(self.finished)

    def compact(self) -> None:
        """Frees the slots of finished rows."""
        if self.finished:
            self.active = _drop_finished(self.active, self.finished)
            self.finished = set()

    def enter(self, count: int) -> None:
        """Prefills up to `count` waiting prompts and joins them to the active rows."""
        indices = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        prompts = [self.prompts[index] for index in indices]
        entering, logits = _prefill(self.model, prompts, self.pad_id)
        entering.rows = [_Row(index, [], self._generator(index)) for index in indices]
        entering.next_ids = self._accept(entering.rows, logits)
        self.active = _join_batches(self.active, entering)

    def step(self) -> None:
        """One more token for every live row."""
        logits = _step(self.model, self.active)
        rows = self.active.rows
        live = [slot for slot, row in enumerate(rows) if row.index not in self.finished]
        index = torch.tensor(live, device=logits.device)
        chosen = self._accept([rows[slot] for slot in live], logits.index_select(0, index))
        self.active.next_ids = self.active.next_ids.index_copy(0, index, chosen)

    def _generator(self, index: int) -> torch.Generator | None:
        return None if self.seeds is None else torch.Generator().manual_seed(self.seeds[index])

    def _accept(self, rows: list[_Row], logits: Tensor) -> Tensor:
        """Chooses the next token of each row and records the answers that end with it."""
        chosen = choose_next(logits, self.sampling, [row.generator for row in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.token_ids.append(token)
            if token in self.stops or len(row.token_ids) == self.max_new_tokens:
                reason = "stop" if token in self.stops else "length"
                self.answers[row.index] = GeneratedAnswer(row.token_ids, reason)
                self.finished.add(row.index)
                if self.on_finished is not None:
                    self.on_finished(row.index, self.answers[row.index])
        return chosen


@torch.inference_mode()
def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pad_id: int = 0,
    batch_size: int = 32,
    sampling: SamplingSettings | None = None,
    seeds: Sequence[int] | None = None,
    on_finished: Callable[[int, GeneratedAnswer], None] | None = None,
) -> list[GeneratedAnswer]:
    """Answers every prompt; `on_finished(prompt index, answer)` is called as soon as one is done.

    Args:
        model: a causal language model of transformers (it computes logits and keeps the cache).
        prompts: token ids, at least one each.
        max_new_tokens: tokens per answer.
        stop_token_ids: each of them ends an answer.
        pad_id: any valid id; masked.
        batch_size: rows decoded at a time.
        sampling: None is greedy.
        seeds: one per prompt, needed when sampling.
        on_finished: for progress and for writing results early.

    Raises:
        ValueError: an empty prompt, sampling without seeds, or a repetition penalty.
    """
    sampling = sampling or SamplingSettings()
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("A prompt has no tokens; generation needs at least one token to start.")
    if sampling.penalised:
        raise ValueError(
            f"repetition_penalty is {sampling.repetition_penalty}, which batched plain generation "
            "does not apply. Set it to 1.0, or decode with draftsmith.inference.engine."
        )
    if not sampling.greedy and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError("Sampling needs one seed per prompt, so that answers can be repeated.")
    work = _Work(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        stops=frozenset(stop_token_ids),
        pad_id=pad_id,
        sampling=sampling,
        seeds=seeds,
        on_finished=on_finished,
        # Long prompts first: neighbours in the queue are alike, so little of a prefill is padding.
        waiting=deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))),
    )
    while work.waiting or work.num_live:
        free = batch_size - work.num_live
        refill = bool(work.waiting) and free >= REFILL_SHARE * batch_size
        # A finished row keeps its slot until enough of them are worth one compaction.
        if refill or len(work.finished) >= REFILL_SHARE * len(work.active.rows):
            work.compact()
        if refill:
            work.enter(free)
        else:
            work.step()
    return [work.answers[index] for index in range(len(prompts))]
