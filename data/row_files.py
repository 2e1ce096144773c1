"""Where rows come from: JSONL, JSON and Parquet files, folders or globs of them, `datasets` names.

JSONL is read line by line with Python's json, never through a guessed column schema: a field may be
null in one row, a string in the next and a list in the third. Only the byte offset of each line is
kept in memory, so that a file of any size can be shuffled and shared out to processes.

Check: tests/test_prepare.py.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftsmith.data.conversations import RowError

DATASET_MARKERS = ("state.json", "dataset_dict.json")
"""Files by which a folder of `Dataset.save_to_disk` is known."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""What a data folder of the hub says about itself; not rows."""
_UTF8_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RawRow:
    """A row as it was read, not parsed yet: parsing is the work of the processes that tokenise."""

    origin: str
    """file:line, or name[index]."""
    value: bytes | Mapping[str, Any]

    def parse(self) -> Mapping[str, Any]:
        """The row's fields.

        Raises:
            RowError: bad JSON, or not an object.
        """
        if not isinstance(self.value, bytes):
            return self.value
        try:
            row = json.loads(self.value)
        except json.JSONDecodeError as error:
            # The line is counted by the file, so the column is what the message adds.
            raise RowError("bad JSON", f"{error.msg} at column {error.colno}") from error
        except UnicodeDecodeError as error:
            raise RowError("bad JSON", f"not UTF-8 at byte {error.start}") from error
        if not isinstance(row, dict):
            raise RowError("not an object", f"the row is a {type(row).__name__}")
        if b"\\ud" in self.value.lower():
            _refuse_half_characters(row)
        return row


class RowSource(Protocol):
    """A sequence of rows that is read in any order."""

    digest: str
    """Hash of the content."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Iterator[RawRow]:
        """Yields the rows of `indices`, in that order."""


class JsonLines:
    """A JSONL file: blank lines and a byte-order mark are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("q")
        self._line_numbers = array("q")
        hasher = hashlib.sha256()
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                hasher.update(line)
                if line.removeprefix(_UTF8_BOM if number == 1 else b"").strip():
                    self._offsets.append(offset)
                    self._line_numbers.append(number)
                offset += len(line)
        self.digest = hasher.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int]) -> Iterator[RawRow]:
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                number = self._line_numbers[index]
                line = file.readline().removeprefix(_UTF8_BOM if number == 1 else b"")
                yield RawRow(f"{self.path.name}:{number}", line.rstrip(b"\r\n"))


class JsonArray:
    """A .json file that holds one list of rows (ShareGPT dumps); it is parsed as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()
        try:
            self._rows = json.loads(content.removeprefix(_UTF8_BOM))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}. Correct the file.") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> Iterator[RawRow]:
        for index in indices:
            yield RawRow(f"{self.path.name}[{index}]", json.dumps(self._rows[index]).encode())


class ArrowRows:
    """A `datasets.Dataset`, memory-mapped."""

    def __init__(self, name: str, dataset: Any, digest: str) -> None:
        self.name = name
        self.digest = digest
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> Iterator[RawRow]:
        for index in indices:
            # Arrow gives every object all fields that any row has; the absent ones come as null.
            yield RawRow(f"{self.name}[{index}]", _without_nulls(self._dataset[int(index)]))


class ManyRows:
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._starts = [0]
        for source in sources:
            self._starts.append(self._starts[-1] + len(source))
        joined = "".join(source.digest for source in sources)
        self.digest = hashlib.sha256(joined.encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, indices: Sequence[int]) -> Iterator[RawRow]:
        # Neighbours of one source are read together: a file is then opened once for them.
        pending: list[int] = []
        current = 0
        for index in indices:
            here = current
            if not self._starts[current] <= index < self._starts[current + 1]:
                here = next(n for n, end in enumerate(self._starts[1:]) if index < end)
            if here != current and pending:
                yield from self._sources[current].read(pending)
                pending = []
            current = here
            pending.append(index - self._starts[current])
        if pending:
            yield from self._sources[current].read(pending)


def _refuse_half_characters(row: Mapping[str, Any]) -> None:
    """JSON can escape half of a surrogate pair (a cut emoji); no tokenizer takes that.

    Raises:
        RowError: the row holds one.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("broken character", f"half of a surrogate pair ({error.reason})") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def file_digest(paths: Sequence[Path]) -> str:
    """sha256 of the contents of some files, in the order given."""
    hasher = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                hasher.update(block)
    return hasher.hexdigest()


def open_rows(name: str, *, split: str, workspace: Path) -> RowSource:
    """Finds the rows that a name stands for.

    Args:
        name: a file, a folder, a glob pattern, or a `datasets` name (`name` or `name:config`).
        split: the split of a `datasets` name or of a saved DatasetDict.
        workspace: a folder for temporary files; they must outlive the rows.

    Raises:
        ValueError: nothing is there, or it cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir() and any((path / marker).is_file() for marker in DATASET_MARKERS):
        return _saved_dataset(path, split)
    if path.is_dir():
        suffixes = (".jsonl", ".json", ".parquet")
        files = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
        files = [file for file in files if file.name not in _DESCRIPTIONS]
        if not files:
            raise ValueError(
                f"input={name} is a folder without .jsonl, .json or .parquet files, and not one "
                "written by Dataset.save_to_disk. Name a folder or file that holds the data."
            )
    elif path.is_file():
        files = [path]
    elif any(character in name for character in "*?["):
        root = Path(path.anchor)
        files = sorted(p for p in root.glob(str(path.relative_to(root))) if p.is_file())
        if not files:
            raise ValueError(f"input={name} matches no file. Check the pattern.")
    else:
        return _named_dataset(name, split)
    sources = [_open_file(file, workspace / str(number)) for number, file in enumerate(files)]
    return sources[0] if len(sources) == 1 else ManyRows(sources)


def _open_file(path: Path, workspace: Path) -> RowSource:
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".json":
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(_UTF8_BOM).lstrip()
        # Many files named .json hold one object per line.
        return JsonArray(path) if start.startswith(b"[") else JsonLines(path)
    if path.suffix == ".parquet":
        import datasets

        # Read in a workspace of its own: the shared datasets cache is keyed by path and time stamp.
        dataset = datasets.Dataset.from_parquet(str(path), cache_dir=str(workspace))
        return ArrowRows(path.name, dataset, file_digest([path]))
    raise ValueError(
        f"{path} has the ending {path.suffix or '(none)'}; expected .jsonl, .json or .parquet. "
        "Rename or convert the file."
    )


def _pick_split(loaded: Any, split: str, name: str) -> Any:
    import datasets

    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(
            f"split={split}, but {name} has {', '.join(loaded)}. Set split to one of them."
        )
    return loaded[split]


def _saved_dataset(path: Path, split: str) -> RowSource:
    import datasets

    dataset = _pick_split(datasets.load_from_disk(str(path)), split, str(path))
    files = sorted(Path(entry["filename"]) for entry in dataset.cache_files)
    return ArrowRows(path.name, dataset, file_digest(files) + str(len(dataset)))


def _named_dataset(name: str, split: str) -> RowSource:
    """Loads a `datasets` name; whatever keeps it from loading becomes one readable message."""
    import datasets

    repository, _, subset = name.partition(":")
    advice = (
        f"input={name} is no file, folder or pattern here, and could not be loaded as a datasets "
        "name. Check the spelling; without network, download the data first and name the file."
    )
    if Path(name).suffix in (".jsonl", ".json", ".parquet", ".txt"):
        raise ValueError(f"input={name}: there is no such file. Check the path.")
    try:
        loaded = datasets.load_dataset(repository, subset or None, split=split)
    except (OSError, ValueError) as error:
        # Offline, unknown name, unknown split and unknown subset all end here, with their own text.
        raise ValueError(f"{advice}\n{type(error).__name__}: {error}") from error
    return ArrowRows(name, loaded, str(loaded._fingerprint))
