"""Rows of training data as `TrainBatch`es, with the target's states from a cache or computed live,
or without any.

All sources number the rows by the prepared data they came from, pad on the right and cut at
max_length (exact: the states of a causal model do not depend on what follows). Cached and live
states are the same numbers: both come from `data.capture.capture_features`. Bare tokens are for
methods that train the target itself.

`read` only touches files and runs in a background thread; `complete` runs the target, if there is
one, in the training thread.

Axes: batch, seq, layers, target_hidden.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from draftsmith.data import shards
from draftsmith.data.cache import HiddenStateCache
from draftsmith.data.capture import capture_features
from draftsmith.data.prepared_rows import SCAN_ROWS, read_rows
from draftsmith.models.protocols import TrainBatch
from draftsmith.train.batch_plan import hash_prompt

if TYPE_CHECKING:
    import datasets

    from draftsmith.models.target import TargetModel

Item = TypeVar("Item")
Result = TypeVar("Result")

PREFETCH_BATCHES = 4
"""Micro-batches read ahead. Our choice: enough to hide a page fault, little memory."""


class FeatureSource(Protocol):
    """Where training rows come from."""

    lengths: Tensor
    """[rows] int64: tokens per row, cut at max_length."""
    num_cut: int
    """Rows that max_length cuts."""

    def prompt_hashes(self) -> list[bytes]:
        """A hash of each row's prompt (uncut), the same from every source."""

    def read(self, rows: Sequence[int]) -> TrainBatch:
        """The rows padded to one batch, on the CPU; states may still be missing (width 0)."""

    def complete(self, batch: TrainBatch) -> TrainBatch:
        """The batch with its states."""


class CachedFeatures:
    """Features from a `HiddenStateCache`."""

    def __init__(self, cache: HiddenStateCache, *, max_length: int, pin: bool = False) -> None:
        """Wraps an opened cache.

        Args:
            cache: with the wanted layers chosen (`require`).
            max_length: tokens per row.
            pin: page-lock the batches, for asynchronous copies to a GPU.
        """
        self._cache = cache
        self._max_length = max_length
        self._pin = pin
        self.lengths = cache.lengths.clamp(max=max_length)
        self.num_cut = int((cache.lengths > max_length).sum())

    def prompt_hashes(self) -> list[bytes]:
        # Straight from the shards: reading whole samples would read their states too.
        cache, hashes = self._cache, []
        for record in cache.manifest.shards:
            layout = cache.manifest.settings.shard_layout
            shard = shards.map_shard(cache.folder / record.file, record, **layout)
            ends = shard.sample_offsets.tolist()
            for start, end in zip(ends[:-1], ends[1:], strict=True):
                row = slice(start, end)
                hashes.append(hash_prompt(shard.input_ids[row], shard.loss_mask[row]))
        return hashes

    def read(self, rows: Sequence[int]) -> TrainBatch:
        samples = [self._cache[row] for row in rows]
        cut = self._max_length
        batch = pad_tokens(
            [sample.input_ids[:cut] for sample in samples],
            [sample.supervised_mask[:cut] for sample in samples],
        )
        batch.aux_hidden_states = pad([sample.aux_hidden_states[:cut] for sample in samples])
        batch.final_hidden_states = pad([sample.final_hidden_states[:cut] for sample in samples])
        return pinned(batch) if self._pin else batch

    def complete(self, batch: TrainBatch) -> TrainBatch:
        return batch


class TokenFeatures:
    """Prepared rows as they are: no states (width 0), no target."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        lengths: Tensor,
        *,
        max_length: int,
        pin: bool = False,
    ) -> None:
        """Wraps prepared rows.

        Args:
            dataset: prepared rows (input_ids, loss_mask).
            lengths: [rows] int64, tokens per row.
            max_length: tokens per row.
            pin: page-lock the batches, for asynchronous copies to a GPU.
        """
        self._dataset = dataset
        self._max_length = max_length
        self._pin = pin
        self.lengths = lengths.clamp(max=max_length)
        self.num_cut = int((lengths > max_length).sum())

    def prompt_hashes(self) -> list[bytes]:
        hashes: list[bytes] = []
        for start in range(0, len(self._dataset), SCAN_ROWS):
            rows = read_rows(self._dataset, start, min(start + SCAN_ROWS, len(self._dataset)))
            lengths = rows.lengths.tolist()
            tokens = torch.from_numpy(rows.input_ids).split(lengths)
            masks = torch.from_numpy(rows.loss_mask).split(lengths)
            hashes.extend(map(hash_prompt, tokens, masks))
        return hashes

    def read(self, rows: Sequence[int]) -> TrainBatch:
        found = [read_rows(self._dataset, row, row + 1) for row in rows]
        cut = self._max_length
        batch = pad_tokens(
            [torch.from_numpy(row.input_ids[:cut]).long() for row in found],
            [torch.from_numpy(row.loss_mask[:cut]).bool() for row in found],
        )
        return pinned(batch) if self._pin else batch

    def complete(self, batch: TrainBatch) -> TrainBatch:
        return batch


class LiveFeatures(TokenFeatures):
    """Features that the target computes when they are needed."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        lengths: Tensor,
        target: TargetModel,
        *,
        aux_layer_ids: Sequence[int],
        max_length: int,
        dtype: torch.dtype | None = None,
        pin: bool = False,
    ) -> None:
        """Wraps prepared rows and a loaded target.

        Args:
            dataset: prepared rows (input_ids, loss_mask).
            lengths: [rows] int64, tokens per row.
            target: the frozen target; its forward runs in `complete`.
            aux_layer_ids: layers to hand out, ascending.
            max_length: tokens per row.
            dtype: round the states to this dtype, as a cache of that dtype would; None does not.
            pin: page-lock the batches, for asynchronous copies to a GPU.
        """
        super().__init__(dataset, lengths, max_length=max_length, pin=pin)
        self._target = target
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._dtype = dtype

    def complete(self, batch: TrainBatch) -> TrainBatch:
        aux, final = capture_features(
            self._target,
            batch.input_ids,
            batch.keep_mask,
            self._aux_layer_ids,
            dtype=self._dtype,
        )
        # Padding of a cached batch is 0; here it holds what the target made of padding. Zero it
        # too, so that not even a masked place can tell the two sources apart.
        keep = batch.keep_mask.to(aux.device)[..., None]
        batch.aux_hidden_states = aux.masked_fill(~keep, 0.0)
        batch.final_hidden_states = final.masked_fill(~keep, 0.0)
        return batch


def pad(rows: Sequence[Tensor]) -> Tensor:
    """Stacks [tokens, ...] tensors of different lengths, zeros on the right: [batch, seq, ...]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pad_tokens(input_ids: Sequence[Tensor], supervised: Sequence[Tensor]) -> TrainBatch:
    """A batch of tokens and masks whose states are still missing (width 0).

    Args:
        input_ids: per row [tokens] int64.
        supervised: per row [tokens] bool.
    """
    lengths = torch.tensor([len(row) for row in input_ids])
    seq = int(lengths.max())
    position_ids = torch.arange(seq).expand(len(input_ids), seq).contiguous()
    empty = torch.zeros(len(input_ids), seq, 0)
    return TrainBatch(
        input_ids=pad(input_ids),
        supervised_mask=pad(supervised),
        keep_mask=position_ids < lengths[:, None],
        position_ids=position_ids,
        aux_hidden_states=empty,
        final_hidden_states=empty,
    )


def pinned(batch: TrainBatch) -> TrainBatch:
    """The batch in page-locked memory."""
    return TrainBatch(**{name: tensor.pin_memory() for name, tensor in vars(batch).items()})


def read_ahead(
    items: Iterable[Item], read: Callable[[Item], Result], *, depth: int = PREFETCH_BATCHES
) -> Generator[Result, None, None]:
    """`map(read, items)`, read in a background thread up to `depth` results ahead.

    An error in the thread is raised here, at the place of the item that caused it. Closing the
    generator ends the thread.
    """
    results: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(result: Result | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                results.put((result, error), timeout=0.1)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                put(read(item), None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # noqa: BLE001 - handed to the reader, which raises it
            put(None, error)

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            result, error = results.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result  # type: ignore[misc]  # the error is None, so this is a Result
    finally:
        stopped.set()
        thread.join()
