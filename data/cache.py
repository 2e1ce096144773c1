"""The hidden-state cache: what a frozen target computed for the prepared rows, stored once.

A cache is a folder:

    shard-00000.safetensors, shard-00000.json, ...   states, tokens and masks (data/shards.py)
    plan.json        what the numbers depend on; written first, so that a resumed capture cannot
                     mix two targets, templates, layer sets or data sets in one folder
    index.safetensors  per sample: length, supervised tokens, row of the prepared data; per
                       vocabulary entry: how often it is supervised
    manifest.json    written last: a folder without it is an unfinished cache

`HiddenStateCache` reads it. Opening costs one manifest and one small index however many shards
there are; a shard is mapped when a sample of it is asked for, and at most `MAX_MAPPED_SHARDS` stay
mapped. Samples are views into the mapping. Every read checks what it hands out: the shard's size
and offsets, the sample's length, and that its states are finite. Checksums cost a full read and are
compared by `verify` and when a capture is resumed.

Axes: tokens (of one sample), layers, hidden, slots (layers in ascending order, then the final
hidden state), vocab.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.data import shards
from draftsmith.data.shards import (
    REPAIR_HINT,
    STATE_DTYPES,
    ShardPlan,
    ShardRecord,
    ShardTensors,
    SkippedRow,
)

if TYPE_CHECKING:
    from draftsmith.models.target import Fingerprint

FORMAT = "draftsmith-hidden-states"
FORMAT_VERSION = 1
FINAL_SLOT = "final"
MAX_MAPPED_SHARDS = 64
"""Our choice: enough for shuffled reads to find their shard mapped, far below any system limit."""
FINGERPRINT_PARTS = {"weights": "weights", "tokenizer": "tokenizer", "chat_template": "template"}
"""Part of a target's fingerprint -> its word in messages."""


def slot_names(aux_layer_ids: Sequence[int]) -> tuple[str, ...]:
    """Names of the stored slots: layer.<id> per layer (-1 is the embedding output), then final."""
    return (*(f"layer.{layer}" for layer in aux_layer_ids), FINAL_SLOT)


def fingerprint_parts(fingerprint: Fingerprint | Mapping[str, str]) -> dict[str, str]:
    """The three hashes of a target's fingerprint, from the dataclass or its JSON form."""
    entries = asdict(fingerprint) if is_dataclass(fingerprint) else dict(fingerprint)
    missing = [part for part in FINGERPRINT_PARTS if part not in entries]
    if missing:
        raise ValueError(
            f"The target fingerprint has no {', '.join(missing)} (it has "
            f"{', '.join(entries) or 'nothing'}): give TargetModel.fingerprint or what was saved "
            "of it."
        )
    return {part: entries[part] for part in FINGERPRINT_PARTS}


@dataclass(frozen=True)
class CacheSettings:
    """Everything the stored bytes depend on. One folder holds one of these, never a mixture."""

    target_fingerprint: dict[str, str]
    """weights, tokenizer and chat_template hashes of the target."""
    data_sha256: str
    """Hash of the token ids and loss masks of the prepared rows, in order."""
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    """Stored dtype, a key of STATE_DTYPES."""
    target_dtype: str
    """Dtype the target computed in."""
    attn_implementation: str
    shard_tokens: int
    batch_tokens: int

    @classmethod
    def from_json(cls, entries: dict[str, Any]) -> CacheSettings:
        """Rebuilds settings; KeyError or TypeError when fields are missing or unknown."""
        return cls(**(entries | {"aux_layer_ids": tuple(entries["aux_layer_ids"])}))

    @property
    def slots(self) -> tuple[str, ...]:
        """Slot names, in stored order."""
        return slot_names(self.aux_layer_ids)

    @property
    def shard_layout(self) -> dict[str, Any]:
        """Keyword arguments of the functions in data/shards.py that need tensor shapes."""
        return {
            "num_slots": len(self.slots),
            "hidden_size": self.hidden_size,
            "dtype": STATE_DTYPES[self.dtype],
        }

    def differences(self, wanted: CacheSettings) -> list[str]:
        """One line for each setting in which this (found) one differs from the wanted one."""
        lines = []
        for name, found in asdict(self).items():
            expected = asdict(wanted)[name]
            if name == "target_fingerprint":
                for part, word in FINGERPRINT_PARTS.items():
                    if found[part] != expected[part]:
                        lines.append(
                            f"target {word}: the folder has {_short(found[part])}, this run has "
                            f"{_short(expected[part])}"
                        )
            elif found != expected:
                lines.append(
                    f"{name}: the folder has {_short(found)}, this run has {_short(expected)}"
                )
        return lines


def _short(value: Any) -> str:
    """Hashes are told apart by their first 12 characters."""
    text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return f"{text[:12]}..." if len(text) >= 40 and " " not in text else text or "nothing"


@dataclass(frozen=True)
class CacheManifest:
    """manifest.json: what is in the folder."""

    settings: CacheSettings
    target_name: str
    num_samples: int
    num_tokens: int
    num_supervised: int
    index_sha256: str
    created: dict[str, Any]
    """Versions, command and time; nothing here changes a number in the cache."""
    shards: tuple[ShardRecord, ...]

    @property
    def target_fingerprint(self) -> dict[str, str]:
        """weights, tokenizer and chat_template hashes."""
        return self.settings.target_fingerprint

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Stored layers, ascending."""
        return self.settings.aux_layer_ids

    @property
    def slots(self) -> tuple[str, ...]:
        """Names along the slot axis of hidden_states."""
        return self.settings.slots

    @property
    def hidden_size(self) -> int:
        """Width of one slot: the target's hidden size."""
        return self.settings.hidden_size

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary (and of token_counts)."""
        return self.settings.vocab_size

    @property
    def dtype(self) -> str:
        """Name of the stored dtype."""
        return self.settings.dtype

    @property
    def skipped(self) -> list[SkippedRow]:
        """Rows of the prepared data that were left out, with the reason."""
        return [row for record in self.shards for row in record.skipped]

    def to_json(self) -> dict[str, Any]:
        """The file's content; slots are listed by name for readers that know no layer ids."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "slots": list(self.slots)}
        return head | {"num_skipped": len(self.skipped)} | asdict(self)


@contextmanager
def _damage_explained(path: Path, advice: str) -> Iterator[None]:
    """Turns what damaged JSON raises, while parsed or taken apart, into one readable error."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}). {advice}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path} is not of a draftsmith cache: its format is {content['format']!r}."
        )
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {content['format_version']}; this draftsmith reads "
            f"{FORMAT_VERSION}. Use the draftsmith version named in the file, or write the cache "
            "again."
        )
    return content


def read_manifest(folder: Path) -> CacheManifest:
    """Reads manifest.json.

    Raises:
        ValueError: no cache, an unfinished one, a damaged manifest or another format version.
    """
    path = folder / "manifest.json"
    plan = folder / "plan.json"
    if not path.is_file() and not plan.is_file():
        raise ValueError(
            f"{folder} is not a cache (it has no manifest.json). Give the folder that "
            "draftsmith-cache wrote (its setting cache=...)."
        )
    if not path.is_file():
        with _damage_explained(plan, "Delete the folder and write the cache again."):
            planned = _read_json(plan)["num_shards"]
        written = len(list(folder.glob("shard-*.json")))
        raise ValueError(
            f"Cache {folder} is not finished: {written} of {planned} shards are written. "
            f"{REPAIR_HINT}"
        )
    with _damage_explained(path, f"Delete this file. {REPAIR_HINT}"):
        content = _read_json(path)
        for derived in ("format", "format_version", "slots", "num_skipped"):
            del content[derived]
        content["settings"] = CacheSettings.from_json(content["settings"])
        content["shards"] = tuple(ShardRecord.from_json(entry) for entry in content["shards"])
        return CacheManifest(**content)


def begin_cache(
    folder: Path, settings: CacheSettings, plans: Sequence[ShardPlan], *, created: dict[str, Any]
) -> None:
    """Makes the folder ready for a capture, or for going on with one.

    Raises:
        ValueError: the folder holds a cache made with other settings, or something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    if path.is_file():
        with _damage_explained(path, "Delete the folder, or use another one (cache=...)."):
            found = CacheSettings.from_json(_read_json(path)["settings"])
        if lines := found.differences(settings):
            raise ValueError(
                f"{folder} holds a cache made with other settings:\n  "
                + "\n  ".join(lines)
                + "\nUse another folder (cache=...), delete this one, or go back to its settings."
            )
    elif others := sorted(entry.name for entry in folder.iterdir() if entry.name[0] != "."):
        raise ValueError(
            f"{folder} is not a cache and not empty (it has {', '.join(others[:3])}). "
            "Give an empty or new folder as cache=..."
        )
    else:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, "num_shards": len(plans)}
        content |= {"settings": asdict(settings), "created": created}
        shards.write_json(path, content)
    for leftover in folder.glob(f".*{shards.TEMPORARY_SUFFIX}"):
        leftover.unlink()


def check_skipped(skipped: Sequence[SkippedRow], *, num_rows: int, max_bad_share: float) -> None:
    """Stops a capture that leaves out too much.

    Raises:
        ValueError: more than `max_bad_share` of the rows have non-finite states.
    """
    if len(skipped) > max_bad_share * num_rows:
        shown = "\n  ".join(f"row {entry.row}: {entry.reason}" for entry in skipped[:5])
        raise ValueError(
            f"{len(skipped)} of {num_rows} rows have states that are not finite, more than "
            f"max_bad_share={max_bad_share:g} allows:\n  {shown}\nMany targets overflow in "
            "float16: use target.dtype=bfloat16 or float32 (into a new cache folder). When the "
            "rows themselves are odd, raise max_bad_share; finished shards are kept."
        )


def _build_index(
    folder: Path, settings: CacheSettings, records: Sequence[ShardRecord]
) -> dict[str, Tensor]:
    lengths, supervised, rows = [], [], []
    token_counts = torch.zeros(settings.vocab_size, dtype=torch.int64)
    for record in records:
        shard = shards.map_shard(folder / record.file, record, **settings.shard_layout)
        taught = shard.loss_mask.bool()
        running = torch.cat((torch.zeros(1, dtype=torch.int64), taught.cumsum(0)))
        lengths.append(shard.sample_offsets.diff())
        supervised.append(running[shard.sample_offsets].diff())
        skipped = record.skipped_rows()
        kept = [row for row in range(record.first_row, record.end_row) if row not in skipped]
        rows.append(torch.tensor(kept, dtype=torch.int64))
        token_counts += torch.bincount(shard.input_ids[taught], minlength=settings.vocab_size)
    return {
        "lengths": torch.cat(lengths),
        "num_supervised": torch.cat(supervised),
        "rows": torch.cat(rows),
        "token_counts": token_counts,
    }


def finish_cache(
    folder: Path,
    settings: CacheSettings,
    plans: Sequence[ShardPlan],
    *,
    target_name: str,
    created: dict[str, Any],
    max_bad_share: float,
) -> CacheManifest:
    """Writes the index and, last of all, the manifest. One process calls it when all are done.

    Raises:
        ValueError: a shard is missing, too many rows were skipped, or no token is supervised.
    """
    found = [(plan, shards.read_record(folder / plan.file_name)) for plan in plans]
    missing = [plan.file_name for plan, record in found if record is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(plans)} shards were not written, first {missing[0]}. "
            f"{REPAIR_HINT}"
        )
    records = tuple(record for _, record in found if record is not None)
    skipped = [row for record in records for row in record.skipped]
    num_rows = sum(plan.num_rows for plan in plans)
    check_skipped(skipped, num_rows=num_rows, max_bad_share=max_bad_share)
    index = _build_index(folder, settings, records)
    if int(index["num_supervised"].sum()) == 0:
        raise ValueError(
            f"No token in {folder} is supervised, so nothing could be learnt from it. Look at "
            "report.txt of the prepared data."
        )
    index_sha256 = shards.write_file(folder / "index.safetensors", [safetensors.torch.save(index)])
    manifest = CacheManifest(
        settings=settings,
        target_name=target_name,
        num_samples=sum(record.num_samples for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_supervised=sum(record.num_supervised for record in records),
        index_sha256=index_sha256,
        created=created,
        shards=records,
    )
    shards.write_json(folder / "manifest.json", manifest.to_json())
    return manifest


@dataclass
class CachedSample:
    """One conversation of the cache; the states are views of the mapped file."""

    input_ids: Tensor
    """[tokens] int64."""
    supervised_mask: Tensor
    """[tokens] bool, True where the token itself was written by the target."""
    aux_hidden_states: Tensor
    """[tokens, layers * hidden], layers in the order of `HiddenStateCache.aux_layer_ids`."""
    final_hidden_states: Tensor
    """[tokens, hidden]: what the target's head reads."""


@dataclass(frozen=True)
class ShardCheck:
    """Result of verifying one shard."""

    record: ShardRecord
    problem: str | None
    """None when everything is right."""


class HiddenStateCache:
    """A finished cache, read lazily; `cache[i]` is a `CachedSample`."""

    def __init__(self, folder: Path, manifest: CacheManifest, index: dict[str, Tensor]) -> None:
        """Use `HiddenStateCache.open`."""
        self.folder = folder
        self.manifest = manifest
        self.aux_layer_ids: tuple[int, ...] = manifest.aux_layer_ids
        """Layers that samples carry; all stored ones until `require` chooses some of them."""
        self.lengths = index["lengths"]
        """[samples] int64: tokens per sample."""
        self.supervised_counts = index["num_supervised"]
        """[samples] int64: supervised tokens per sample."""
        self.rows = index["rows"]
        """[samples] int64: row of the prepared data that each sample came from."""
        self.token_counts = index["token_counts"]
        """[vocab] int64: how often each token is supervised."""
        ends = list(accumulate(record.num_samples for record in manifest.shards))
        self._first_samples = [0, *ends]
        self._mapped: OrderedDict[int, ShardTensors] = OrderedDict()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HiddenStateCache:
        """Opens a cache folder; no shard is touched.

        Raises:
            ValueError: not a cache, an unfinished one, or a damaged manifest or index.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        index_path = folder / "index.safetensors"
        advice = f"Delete {index_path.with_name('manifest.json')}. {REPAIR_HINT}"
        if not index_path.is_file():
            raise ValueError(f"{index_path} is missing. {advice}")
        if shards.file_sha256(index_path) != manifest.index_sha256:
            raise ValueError(f"{index_path} is damaged: its checksum differs. {advice}")
        try:
            index = safetensors.torch.load_file(index_path)
        except SafetensorError as error:
            raise ValueError(f"{index_path} is damaged ({error}). {advice}") from error
        return cls(folder, manifest, index)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[CachedSample]:
        return (self[sample] for sample in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the shards it needs itself; mappings would be copied as data.
        return self.__dict__ | {"_mapped": OrderedDict()}

    def __getitem__(self, sample: int) -> CachedSample:
        """Sample number `sample`.

        Raises:
            IndexError: there are not that many samples.
            ValueError: its shard is missing, cut or damaged, or its states are not finite.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a cache with {len(self)} samples")
        number = bisect_right(self._first_samples, sample) - 1
        shard = self._shard(number)
        place = sample - self._first_samples[number]
        start, end = shard.sample_offsets[place : place + 2].tolist()
        states = shard.hidden_states[start:end]  # [tokens, slots, hidden]
        if not shards.is_finite(states):
            raise ValueError(
                f"Shard {self.folder / self.manifest.shards[number].file} has a "
                f"{shards.first_bad_place(states, self.manifest.slots)} of sample {sample} (row "
                f"{int(self.rows[sample])} of the prepared data). Delete this shard file and run "
                "draftsmith-cache again with the settings that made this cache."
            )
        return CachedSample(
            input_ids=shard.input_ids[start:end].long(),
            supervised_mask=shard.loss_mask[start:end].bool(),
            aux_hidden_states=self._select_layers(states),
            final_hidden_states=states[:, -1],
        )

    def _select_layers(self, states: Tensor) -> Tensor:
        """Chosen layers of [tokens, slots, hidden] as [tokens, layers * hidden].

        A view when the chosen slots are neighbours, as all of them are.
        """
        places = [self.manifest.aux_layer_ids.index(layer) for layer in self.aux_layer_ids]
        first = places[0] if places else 0
        if places == list(range(first, first + len(places))):
            return states[:, first : first + len(places)].flatten(1)
        return states[:, places].flatten(1)

    def _shard(self, number: int) -> ShardTensors:
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        record = self.manifest.shards[number]
        path = self.folder / record.file
        shard = shards.map_shard(path, record, **self.manifest.settings.shard_layout)
        first, end = self._first_samples[number : number + 2]
        if not torch.equal(shard.sample_offsets.diff(), self.lengths[first:end]):
            raise ValueError(
                f"Shard {path} is broken: its samples have other lengths than the index says. "
                f"{REPAIR_HINT}"
            )
        self._mapped[number] = shard
        if len(self._mapped) > MAX_MAPPED_SHARDS:
            self._mapped.popitem(last=False)
        return shard

    def require(
        self,
        target_fingerprint: Fingerprint | Mapping[str, str],
        aux_layer_ids: Sequence[int],
    ) -> None:
        """Checks that the cache was made with this target and has these layers, and selects them.

        From then on samples carry `aux_layer_ids` only, in this order; a part of the stored layers
        is fine.

        Raises:
            ValueError: names what differs (weights, tokenizer, template, layers) and what to do.
        """
        wanted = fingerprint_parts(target_fingerprint)
        differing = [
            f"{word}: the cache has {_short(self.manifest.target_fingerprint[part])}, this target "
            f"has {_short(wanted[part])}"
            for part, word in FINGERPRINT_PARTS.items()
            if self.manifest.target_fingerprint[part] != wanted[part]
        ]
        if differing:
            raise ValueError(
                f"Cache {self.folder} was made with another target "
                f"({self.manifest.target_name}):\n  "
                + "\n  ".join(differing)
                + "\nUse that target, or run draftsmith-prepare and draftsmith-cache for this one."
            )
        stored = self.manifest.aux_layer_ids
        missing = [layer for layer in aux_layer_ids if layer not in stored]
        if missing:
            raise ValueError(
                f"Cache {self.folder} has no layer {', '.join(map(str, missing))}: it holds layers "
                f"{', '.join(map(str, stored)) or '(none)'} and the final state. Use those "
                "(method.aux_layer_ids), or write a cache with "
                f"aux_layer_ids=[{','.join(map(str, aux_layer_ids))}]."
            )
        self.aux_layer_ids = tuple(aux_layer_ids)

    def verify(self) -> Iterator[ShardCheck]:
        """Reads every byte: checksums, shapes, offsets, lengths, counts and finite states."""
        for number, record in enumerate(self.manifest.shards):
            yield ShardCheck(record, self._shard_problem(number))

    def _shard_problem(self, number: int) -> str | None:
        record = self.manifest.shards[number]
        self._mapped.pop(number, None)
        try:
            shard = self._shard(number)
        except ValueError as error:
            return str(error).removesuffix(f" {REPAIR_HINT}")
        if not shards.is_finite(shard.hidden_states):
            return shards.first_bad_place(shard.hidden_states, self.manifest.slots)
        if int(shard.loss_mask.sum()) != record.num_supervised or bool((shard.loss_mask > 1).any()):
            return "the loss mask differs from the manifest's count"
        if shards.file_sha256(self.folder / record.file) != record.sha256:
            return "the checksum differs from the manifest's"
        return None
