"""One shard of the hidden-state cache: a safetensors file and a small JSON record beside it.

Axes: tokens (of all samples of a shard, one after the other, no padding), samples, slots (the
chosen layers in ascending order, then the final hidden state), hidden.

    shard-00000.safetensors   sample_offsets  int64 [samples + 1]
                              input_ids       int32 [tokens]
                              hidden_states   bf16 / fp32 / fp16 [tokens, slots, hidden]
                              loss_mask       uint8 [tokens], 1 = written by the target itself
    shard-00000.json          ShardRecord: checksum, counts, skipped rows

Which rows go into which shard follows from the row lengths alone (`plan_shards`), so any number of
processes writes the same files. A shard is written under a temporary name, flushed to the disk and
renamed; its record follows the same way. So a record says that its shard was complete once.

The file is serialised here instead of by the safetensors package: the checksum is taken while
writing, and the tensors are not copied into a second buffer first. Any safetensors reader opens it
(tests/test_cache.py does).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
}
"""Dtypes that hidden states may be stored in, by their name in the settings."""

_SAFETENSORS_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
}
_CHUNK_BYTES = 16 * 2**20
TEMPORARY_SUFFIX = ".tmp"
REPAIR_HINT = (
    "Run draftsmith-cache again with the settings that made this cache: it writes only what is "
    "missing or broken."
)


@dataclass(frozen=True)
class ShardPlan:
    """Rows first_row .. end_row - 1 of the prepared data, which make one shard."""

    index: int
    first_row: int
    end_row: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows planned; the shard holds fewer samples when rows had to be skipped."""
        return self.end_row - self.first_row

    @property
    def file_name(self) -> str:
        """Name of the shard file in the cache folder."""
        return f"shard-{self.index:05d}.safetensors"


def record_path(shard_path: Path) -> Path:
    """The JSON record that belongs to a shard file."""
    return shard_path.with_suffix(".json")


@dataclass(frozen=True)
class SkippedRow:
    """A row that is in the plan and not in the cache."""

    row: int
    """Index in the prepared data."""
    reason: str


@dataclass(frozen=True)
class ShardRecord:
    """What is known about a finished shard; also an entry of the manifest."""

    file: str
    num_bytes: int
    sha256: str
    first_row: int
    end_row: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    min_value: float
    max_value: float
    skipped: list[SkippedRow] = field(default_factory=list)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ShardRecord:
        """Rebuilds a record; KeyError or TypeError when fields are missing or unknown."""
        skipped = [SkippedRow(**row) for row in entry["skipped"]]
        return cls(**(entry | {"skipped": skipped}))

    def skipped_rows(self) -> set[int]:
        """Indices of the rows left out."""
        return {entry.row for entry in self.skipped}


@dataclass
class ShardTensors:
    """The tensors of one shard, in memory or mapped from its file."""

    sample_offsets: Tensor
    """[samples + 1] int64; sample i is tokens offsets[i] .. offsets[i + 1] - 1."""
    input_ids: Tensor
    """[tokens] int32."""
    hidden_states: Tensor
    """[tokens, slots, hidden]."""
    loss_mask: Tensor
    """[tokens] uint8, 1 where the token itself was written by the target."""


def plan_shards(lengths: Sequence[int] | Tensor, shard_tokens: int) -> list[ShardPlan]:
    """Cuts the rows into runs of at most `shard_tokens` tokens (one row at least).

    Args:
        lengths: [rows] tokens per row of the prepared data.
        shard_tokens: upper limit of tokens per shard.
    """
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    plans: list[ShardPlan] = []
    first, tokens = 0, 0
    for row, length in enumerate(counts):
        if row > first and tokens + length > shard_tokens:
            plans.append(ShardPlan(len(plans), first, row, tokens))
            first, tokens = row, 0
        tokens += length
    if counts:
        plans.append(ShardPlan(len(plans), first, len(counts), tokens))
    return plans


def _shapes(
    num_samples: int, num_tokens: int, *, num_slots: int, hidden_size: int, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    # Wider types first, as safetensors lays them out: every tensor starts aligned to its type.
    return {
        "sample_offsets": (torch.int64, (num_samples + 1,)),
        "input_ids": (torch.int32, (num_tokens,)),
        "hidden_states": (dtype, (num_tokens, num_slots, hidden_size)),
        "loss_mask": (torch.uint8, (num_tokens,)),
    }


def _header(shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON are allowed by the format and align the data to 64 bytes.
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def shard_bytes(
    num_samples: int, num_tokens: int, *, num_slots: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """Exact size of a shard file, in bytes, before it is written."""
    shapes = _shapes(
        num_samples, num_tokens, num_slots=num_slots, hidden_size=hidden_size, dtype=dtype
    )
    data = sum(math.prod(shape) * kind.itemsize for kind, shape in shapes.values())
    return len(_header(shapes)) + data


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other process uses; hidden, so that no reader picks it up."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}{TEMPORARY_SUFFIX}")


def write_file(path: Path, pieces: Sequence[Any]) -> str:
    """Writes buffers under a temporary name, flushes them to the disk and renames.

    Whoever looks sees the old file, no file or the whole new one. Nothing is left behind when
    writing fails.

    Args:
        path: final name.
        pieces: objects with the buffer protocol, written one after the other.

    Returns:
        SHA-256 of the content.
    """
    digest = hashlib.sha256()
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), _CHUNK_BYTES):
                    digest.update(view[start : start + _CHUNK_BYTES])
                    file.write(view[start : start + _CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself lives in the folder, which has to reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return digest.hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> str:
    """Writes JSON as `write_file` does and returns its SHA-256."""
    return write_file(path, [(json.dumps(content, indent=1) + "\n").encode()])


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def write_shard(
    path: Path, tensors: ShardTensors, *, plan: ShardPlan, skipped: Sequence[SkippedRow] = ()
) -> ShardRecord:
    """Writes one shard file, then its record.

    Args:
        path: final name of the shard file.
        tensors: content, on the CPU.
        plan: the rows it was made from.
        skipped: planned rows that are not in it.

    Raises:
        OSError: from the file system, for example when the disk is full.
    """
    tokens, slots, hidden = tensors.hidden_states.shape
    samples = len(tensors.sample_offsets) - 1
    shapes = _shapes(
        samples, tokens, num_slots=slots, hidden_size=hidden, dtype=tensors.hidden_states.dtype
    )
    data = {name: getattr(tensors, name) for name in shapes}
    for name, (dtype, shape) in shapes.items():
        assert data[name].dtype == dtype, f"{name} is {data[name].dtype}, not {dtype}"
        assert data[name].shape == shape, f"{name} is {tuple(data[name].shape)}, not {shape}"
    header = _header(shapes)
    sha256 = write_file(path, [header, *(_bytes_of(data[name]) for name in shapes)])
    low, high = value_range(tensors.hidden_states)
    record = ShardRecord(
        file=path.name,
        num_bytes=len(header) + sum(tensor.nbytes for tensor in data.values()),
        sha256=sha256,
        first_row=plan.first_row,
        end_row=plan.end_row,
        num_samples=samples,
        num_tokens=tokens,
        num_supervised=int(tensors.loss_mask.sum()),
        min_value=low,
        max_value=high,
        skipped=list(skipped),
    )
    write_json(record_path(path), asdict(record))
    return record


def value_range(states: Tensor) -> tuple[float, float]:
    """Smallest and largest value, (0, 0) of nothing; NaN or an infinity inside shows in them."""
    if states.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(states)
    return low.item(), high.item()


def is_finite(states: Tensor) -> bool:
    """True when no value is NaN or infinite: one pass, no mask of the size of the states."""
    return all(math.isfinite(value) for value in value_range(states))


def read_record(shard_path: Path) -> ShardRecord | None:
    """The record of a shard, or None when there is none that can be read."""
    try:
        return ShardRecord.from_json(json.loads(record_path(shard_path).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None


def looks_finished(folder: Path, plan: ShardPlan) -> bool:
    """A quick look: the record is there, of these rows, and the file has the recorded size."""
    path = folder / plan.file_name
    record = read_record(path)
    if record is None or not path.is_file():
        return False
    same_rows = (record.first_row, record.end_row) == (plan.first_row, plan.end_row)
    return same_rows and path.stat().st_size == record.num_bytes


def is_intact(folder: Path, plan: ShardPlan) -> bool:
    """The shard looks finished and its content has the recorded checksum (reads all of it)."""
    if not looks_finished(folder, plan):
        return False
    path = folder / plan.file_name
    record = read_record(path)
    return record is not None and file_sha256(path) == record.sha256


def _parse_header(path: Path, mapped: Tensor) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(bytes(mapped[:8].tolist()), "little") if len(mapped) >= 8 else 0
    if not 2 <= length <= len(mapped) - 8:
        raise ValueError(f"Shard {path} is broken: its header is damaged. {REPAIR_HINT}")
    try:
        entries = json.loads(mapped[8 : 8 + length].numpy().tobytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"Shard {path} is broken: its header is damaged ({error}). {REPAIR_HINT}"
        ) from error
    return 8 + length, entries


def map_shard(
    path: Path, record: ShardRecord, *, num_slots: int, hidden_size: int, dtype: torch.dtype
) -> ShardTensors:
    """Maps a shard into memory: nothing is read but the header and the sample offsets.

    The tensors are views of a private mapping: pages are loaded when they are touched, no file
    stays open, and writing into a tensor never reaches the file.

    Raises:
        ValueError: the file is missing, cut, or not what its record says; names it and says how
            to repair it.
    """
    if not path.is_file():
        raise ValueError(f"Shard {path} is missing. {REPAIR_HINT}")
    size = path.stat().st_size
    if size != record.num_bytes:
        raise ValueError(
            f"Shard {path} is broken: it has {size} bytes, the cache was written with "
            f"{record.num_bytes}. {REPAIR_HINT}"
        )
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    data_start, entries = _parse_header(path, mapped)
    shapes = _shapes(
        record.num_samples,
        record.num_tokens,
        num_slots=num_slots,
        hidden_size=hidden_size,
        dtype=dtype,
    )
    expected = _header(shapes)
    if data_start != len(expected) or entries != json.loads(expected[8:]):
        raise ValueError(
            f"Shard {path} is broken: its header names other tensors or shapes than the cache's "
            f"manifest. {REPAIR_HINT}"
        )
    tensors: dict[str, Tensor] = {}
    for name, (kind, shape) in shapes.items():
        start, end = entries[name]["data_offsets"]
        piece = mapped[data_start + start : data_start + end]
        tensors[name] = piece.view(kind).view(shape)
    shard = ShardTensors(**tensors)
    steps = shard.sample_offsets.diff()
    ends = (int(shard.sample_offsets[0]), int(shard.sample_offsets[-1]))
    if ends != (0, record.num_tokens) or bool((steps < 1).any()):
        raise ValueError(f"Shard {path} is broken: its sample offsets are damaged. {REPAIR_HINT}")
    return shard


def first_bad_place(states: Tensor, slots: Sequence[str]) -> str:
    """Names the first NaN or infinity of states [tokens, slots, hidden]."""
    token, slot, _ = (~torch.isfinite(states)).nonzero()[0].tolist()
    return f"non-finite value in {slots[slot]} at token {token}"
