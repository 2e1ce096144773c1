"""Prepared rows as flat arrays: no Python object per token, and one look through all of them.

Axes: rows, tokens (of several rows, one after the other).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets

SCAN_ROWS = 4096
"""Rows read at a time when the prepared data is looked through."""


@dataclass
class PreparedRows:
    """Some rows of the prepared data, one after the other."""

    input_ids: np.ndarray
    """[tokens] int32."""
    loss_mask: np.ndarray
    """[tokens] uint8."""
    lengths: np.ndarray
    """[rows] int64."""


def read_rows(dataset: datasets.Dataset, first_row: int, end_row: int) -> PreparedRows:
    """Reads rows first_row .. end_row - 1 without a Python object per token.

    Raises:
        ValueError: a row whose mask has another length than its tokens.
    """
    table = dataset.with_format("arrow")[first_row:end_row]
    lengths = pc.list_value_length(table["input_ids"]).to_numpy().astype(np.int64)
    mask_lengths = pc.list_value_length(table["loss_mask"]).to_numpy()
    differing = np.flatnonzero(lengths != mask_lengths)
    if len(differing):
        row = int(differing[0])
        raise ValueError(
            f"Row {first_row + row} of the prepared data has {lengths[row]} tokens and a loss mask "
            f"of {mask_lengths[row]}. Run draftsmith-prepare again."
        )
    return PreparedRows(
        input_ids=pc.list_flatten(table["input_ids"]).to_numpy().astype(np.int32),
        loss_mask=pc.list_flatten(table["loss_mask"]).to_numpy().astype(np.uint8),
        lengths=lengths,
    )


@dataclass(frozen=True)
class RowScan:
    """What is known about the prepared rows before any target forward."""

    lengths: Tensor
    """[rows] int64."""
    num_supervised: int
    sha256: str
    """Identity of the data: of lengths, token ids and masks."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())


def scan_rows(dataset: datasets.Dataset, *, vocab_size: int, max_positions: int) -> RowScan:
    """Looks through all rows and refuses what the target cannot read.

    Raises:
        ValueError: no rows, an empty or too long row, a token id outside the vocabulary, or no
            supervised token at all.
    """
    digest = hashlib.sha256()
    lengths: list[np.ndarray] = []
    supervised = 0
    for start in range(0, len(dataset), SCAN_ROWS):
        rows = read_rows(dataset, start, min(start + SCAN_ROWS, len(dataset)))
        ends = rows.lengths.cumsum()
        outside = np.flatnonzero((rows.input_ids < 0) | (rows.input_ids >= vocab_size))
        if len(outside):
            row = start + int(np.searchsorted(ends, outside[0], side="right"))
            raise ValueError(
                f"Row {row} of the prepared data has token id {rows.input_ids[outside[0]]}; the "
                f"target's vocabulary ends at {vocab_size - 1}. Prepare the data for this target."
            )
        misfits = np.flatnonzero((rows.lengths < 1) | (rows.lengths > max_positions))
        if len(misfits):
            row = int(misfits[0])
            raise ValueError(
                f"Row {start + row} of the prepared data has {rows.lengths[row]} tokens; the "
                f"target reads 1 to {max_positions}. Run draftsmith-prepare with "
                f"max_length={max_positions} or less."
            )
        for part in (rows.lengths, rows.input_ids, rows.loss_mask):
            digest.update(part.data)
        lengths.append(rows.lengths)
        supervised += int(rows.loss_mask.astype(bool).sum())
    if not lengths:
        raise ValueError("The prepared data has no rows. Look at its report.txt.")
    if supervised == 0:
        raise ValueError(
            f"None of the {len(dataset)} prepared rows has a supervised token, so nothing could be "
            "learnt from them. Look at the report.txt of the prepared data."
        )
    return RowScan(torch.from_numpy(np.concatenate(lengths)), supervised, digest.hexdigest())


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups rows of similar length, longest first, into batches of bounded padded size.

    Args:
        lengths: tokens per row.
        batch_tokens: upper limit of rows * longest row; a longer row makes a batch of its own.

    Returns:
        Row numbers per batch; each row once.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
