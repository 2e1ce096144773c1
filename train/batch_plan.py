"""Which rows go together in which micro-batch, and which process takes it.

The plan of an epoch is a pure function of (row lengths, batch_tokens, seed, epoch). It does not
depend on the number of processes: optimizer step w of an epoch always works on the micro-batches
w * P * A to (w + 1) * P * A - 1, with P processes and A accumulated micro-batches each. So 1 x 4,
2 x 2 and 4 x 1 take the same steps, and a run is resumed from its step number alone.

Nothing is dropped and nothing is counted twice. Where the last step of an epoch has fewer
micro-batches than processes to fill, the idle processes repeat one of them with weight 0: they take
part in the collective calls and add nothing to the loss, its normaliser or the statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POOL_BATCHES = 16
"""Rows are sorted by length within pools of about this many micro-batches: a larger pool pads less
and mixes less. Our choice; 16 pads a few per cent on chat data."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward of one process."""

    rows: tuple[int, ...]
    counted: bool = True
    """False for a repeat that only keeps an idle process in step."""


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a data set become optimizer steps."""

    lengths: Tensor
    """[rows] int64: tokens per row."""
    row_ids: tuple[int, ...]
    """The rows to use (the training or the held-out ones)."""
    batch_tokens: int
    """Padded tokens per micro-batch."""
    max_rows: int | None
    """Rows per micro-batch at most; None sets no limit."""
    seed: int
    world_size: int
    accumulation: int

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """All micro-batches of one epoch, in order; each row stands in exactly one."""
        # Two multipliers, so that (seed 0, epoch 1) and (seed 1, epoch 0) are different orders.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.row_ids), generator=generator).tolist()
        batches: list[tuple[int, ...]] = []
        for pool in self._pools([self.row_ids[place] for place in order]):
            batches.extend(self._pack(pool))
        order = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[place] for place in order]

    def steps_in(self, num_batches: int) -> int:
        """Optimizer steps that `num_batches` micro-batches make."""
        return -(-num_batches // (self.world_size * self.accumulation))

    def step_batches(
        self, batches: Sequence[tuple[int, ...]], step: int, rank: int
    ) -> list[MicroBatch]:
        """The micro-batches of process `rank` in optimizer step `step` of an epoch.

        Every process gets the same number of them.
        """
        size = self.world_size * self.accumulation
        window = batches[step * size : (step + 1) * size]
        if not window:
            raise IndexError(f"step {step} lies beyond an epoch of {len(batches)} micro-batches")
        rounds = -(-len(window) // self.world_size)
        places = [turn * self.world_size + rank for turn in range(rounds)]
        return [
            MicroBatch(window[place]) if place < len(window) else MicroBatch(window[0], False)
            for place in places
        ]

    def digest(self) -> str:
        """A short hash of all that decides which rows a step sees; it guards a resume."""
        rows = torch.tensor(self.row_ids, dtype=torch.int64)
        state = hashlib.sha256()
        state.update(rows.numpy().tobytes())
        state.update(self.lengths[rows].to(torch.int64).numpy().tobytes())
        numbers = (self.batch_tokens, self.max_rows, self.seed, self.world_size * self.accumulation)
        state.update(repr(numbers).encode())
        return state.hexdigest()[:16]

    def _pools(self, rows: list[int]) -> Iterator[list[int]]:
        pool: list[int] = []
        tokens = 0
        for row in rows:
            pool.append(row)
            tokens += int(self.lengths[row])
            if tokens >= POOL_BATCHES * self.batch_tokens:
                yield pool
                pool, tokens = [], 0
        if pool:
            yield pool

    def _pack(self, pool: list[int]) -> Iterator[tuple[int, ...]]:
        """Fills micro-batches with rows of like length, longest first."""
        batch: list[int] = []
        longest = 0
        # Python's sort is stable: rows of one length keep their shuffled order.
        for row in sorted(pool, key=lambda row: -int(self.lengths[row])):
            padded = max(longest, int(self.lengths[row])) * (len(batch) + 1)
            full = self.max_rows is not None and len(batch) >= self.max_rows
            if batch and (padded > self.batch_tokens or full):
                yield tuple(batch)
                batch, longest = [], 0
            batch.append(row)
            longest = max(longest, int(self.lengths[row]))
        if batch:
            yield tuple(batch)


def hold_out(row_hashes: Sequence[bytes], share: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits rows into training and held-out ones by the hash of their prompts.

    A row keeps its side however the set is ordered, and all answers to one prompt are on the same
    side, so the held-out prompts are never trained on.

    Args:
        row_hashes: one hash per row; equal prompts have equal hashes.
        share: share of the rows to hold out; 0 holds out none, any other share at least one row.

    Returns:
        Row numbers (training, held out), each ascending.

    Raises:
        ValueError: there would be nothing left to train on.
    """
    if share == 0.0:
        return tuple(range(len(row_hashes))), ()
    wanted = max(1, round(share * len(row_hashes)))
    limit = sorted(row_hashes)[min(wanted, len(row_hashes)) - 1] if row_hashes else b""
    held_out = tuple(row for row, value in enumerate(row_hashes) if value <= limit)
    training = tuple(row for row, value in enumerate(row_hashes) if value > limit)
    if not training:
        raise ValueError(
            f"data.validation_share is {share}, which leaves no row to train on: there are "
            f"{len(row_hashes)} rows. Prepare more data, or set data.validation_share=0."
        )
    return training, held_out


def hash_prompt(input_ids: Tensor, supervised: Tensor) -> bytes:
    """A hash of what a row holds before its first supervised token: its prompt.

    Several answers to one prompt are then held out together. A row that is supervised from its
    first token on (plain text) is hashed whole.

    Args:
        input_ids: [tokens], any integer type.
        supervised: [tokens], non-zero where the target itself wrote the token.
    """
    first = int(supervised.ne(0).int().argmax())
    prompt = input_ids[:first] if first else input_ids
    return hashlib.blake2b(prompt.to(torch.int32).numpy().tobytes(), digest_size=16).digest()
