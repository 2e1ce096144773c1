"""draftsmith-prepare: conversations to input_ids and loss_mask, checked and reported.

What it writes, aside first and then renamed into place: `dataset/` (datasets.save_to_disk; columns
id, input_ids, loss_mask, category), `token_counts.safetensors` (counts of supervised tokens, from
which draft vocabularies are made), `report.txt`, and `prepare.json` with the fingerprints of the
tokenizer and the chat template, so that a cache or a training run for another target is refused.

Prepared data are reused only where everything that decides them is equal (`settings_hash`): the
content of the input, tokenizer, template, max_length, the mask rule, and so on.

Check: tests/test_prepare.py, and report.txt by eye.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save
from transformers import GenerationConfig

from draftsmith.data import prepare_report
from draftsmith.data.chat_mask import MASK_RULE_VERSION
from draftsmith.data.row_encoder import (
    TOO_LONG,
    DroppedRow,
    EncodedChunk,
    EncoderSettings,
    encode_rows,
)
from draftsmith.data.row_files import RowSource, open_rows
from draftsmith.models.target_source import (
    chat_template_fingerprint,
    check_vocabulary,
    collect_eos_token_ids,
    load_tokenizer,
    loading_arguments,
    read_config,
    resolve_target,
    tokenizer_fingerprint,
)

if TYPE_CHECKING:
    from draftsmith.conf.schema import PrepareConfig, TargetConfig

INFO_NAME, REPORT_NAME, COUNTS_NAME = "prepare.json", "report.txt", "token_counts.safetensors"
DATASET_NAME = "dataset"
OWN_NAMES = frozenset({INFO_NAME, REPORT_NAME, COUNTS_NAME, DATASET_NAME})
"""Everything in an output folder; a folder that holds anything else is never deleted."""
COLUMNS = pa.schema(
    {
        "id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "category": pa.string(),
    }
)


@dataclass
class PrepareInfo:
    """What prepare.json says about prepared data."""

    target: str
    """Name or path of the target, as given."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    chat_template: str
    """Fingerprint of the chat template."""
    vocab_size: int
    """Entries of the target's head, padding included."""
    tokenizer_size: int
    """Entries of the tokenizer."""
    max_length: int
    """Tokens per row at most."""
    eos_token_ids: list[int]
    """Tokens that end the target's generation."""
    rows_read: int = 0
    rows_kept: int = 0
    training_rows: int = 0
    """Rows of the dataset; more than rows_kept where a template rewrites earlier answers."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows."""
    notes: dict[str, int] = field(default_factory=dict)
    """What happened to rows that were kept -> how often."""
    tokens: int = 0
    supervised_tokens: int = 0
    answers: int = 0
    cut_answers: int = 0
    """Answers that a length limit cut; their end of turn is not supervised."""
    settings: dict[str, Any] = field(default_factory=dict)
    settings_hash: str = ""


@dataclass
class PreparedData:
    """Prepared rows and what is known about them."""

    path: Path
    dataset: datasets.Dataset
    """Columns id, category, input_ids list[int32], loss_mask list[uint8] (1: target-written)."""
    info: PrepareInfo

    @property
    def token_counts(self) -> torch.Tensor:
        """[vocab] int64: how often each id is supervised."""
        return load_file(self.path / COUNTS_NAME)["counts"]


def run(config: PrepareConfig) -> None:
    """Prepares the data and prints the report."""
    prepare(config)


def load_prepared(path: str | Path) -> PreparedData:
    """Opens what draftsmith-prepare wrote (memory-mapped).

    Raises:
        ValueError: the folder was not written by draftsmith-prepare, or is incomplete.
    """
    folder = Path(path)
    missing = sorted(name for name in OWN_NAMES if not (folder / name).exists())
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}, so it is not a folder written by "
            "draftsmith-prepare. Name its output folder, or run it again."
        )
    try:
        info = PrepareInfo(**json.loads((folder / INFO_NAME).read_text(encoding="utf-8")))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder / INFO_NAME} cannot be read ({error}). Run draftsmith-prepare again, with "
            "overwrite=true."
        ) from error
    return PreparedData(folder, datasets.load_from_disk(str(folder / DATASET_NAME)), info)


def split_indices(count: int, validation_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Splits 0 .. count-1 into training and validation indices: disjoint, together complete.

    Args:
        count: rows.
        validation_share: 0 to below 1; above 0, at least one row is held out (if two exist).
        seed: of the permutation.

    Returns:
        (training, validation), each ascending.

    Raises:
        ValueError: the share is not in [0, 1).
    """
    if not 0.0 <= validation_share < 1.0:
        raise ValueError(f"validation_share is {validation_share}; expected 0 to below 1.")
    # One number decides both sides; two roundings (int here, ceil there) would share a row.
    held_out = int(count * validation_share)
    if validation_share > 0 and count > 1:
        held_out = max(held_out, 1)
    order = np.random.default_rng(seed).permutation(count)
    return sorted(order[held_out:].tolist()), sorted(order[:held_out].tolist())


def prepare(config: PrepareConfig) -> PreparedData:
    """Reads, encodes, checks and writes; or finds that the output is there already.

    Raises:
        ValueError: bad input or target, too many dropped rows, nothing supervised, or an output
            folder that was made with other settings.
    """
    output = Path(config.output).expanduser()
    tokenizer, info, encoder = _open_target(config)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        source = open_rows(config.input, split=config.split, workspace=Path(scratch) / "rows")
        info.settings = _deciding_settings(config, source, info)
        info.settings_hash = _hash(info.settings)
        if _is_finished(output, info, overwrite=config.overwrite):
            prepare_report.show_line(
                f"{output} already holds these data, made with the same settings and input: reused."
            )
            return load_prepared(output)
        order = _row_order(len(source), limit=config.limit, seed=config.shuffle_seed)
        result = Path(scratch) / "result"
        result.mkdir()
        chunks = encode_rows(source, order, encoder, num_workers=config.num_workers)
        template = str(tokenizer.chat_template)
        totals = _Totals(config, info, template=template, num_rows=len(order))
        with _RowWriter(result) as writer:
            for chunk in _with_progress(chunks, num_rows=len(order)):
                totals.add(chunk)
                writer.add(chunk)
        totals.finish()
        dataset = writer.save()
        # Written by us and not by safetensors, which lets nobody but the owner read its files.
        (result / COUNTS_NAME).write_bytes(save({"counts": torch.from_numpy(totals.counts)}))
        report = prepare_report.report_text(
            info,
            tokenizer,
            examples=totals.examples,
            end_counts=totals.end_counts,
            rows=[dataset[i] for i in _spread(len(dataset), prepare_report.SHOWN_ROWS)],
        )
        (result / REPORT_NAME).write_text(report.plain, encoding="utf-8")
        info_text = json.dumps(dataclasses.asdict(info), indent=2, ensure_ascii=False)
        (result / INFO_NAME).write_text(info_text + "\n", encoding="utf-8")
        _install(result, output, aside=Path(scratch) / "replaced")
    prepare_report.show(report)
    return load_prepared(output)


def _open_target(config: PrepareConfig) -> tuple[Any, PrepareInfo, EncoderSettings]:
    """The target's tokenizer and what of its configuration matters here; no weights are read."""
    target: TargetConfig = config.target
    source = resolve_target(target.name_or_path)
    arguments = loading_arguments(
        source, trust_remote_code=target.trust_remote_code, revision=target.revision
    )
    model_config = read_config(target.name_or_path, source, arguments)
    tokenizer = load_tokenizer(target.name_or_path, source, arguments)
    vocab_size = model_config.get_text_config(decoder=True).vocab_size
    check_vocabulary(target.name_or_path, tokenizer, vocab_size)
    generation_config = None
    if not Path(source).is_dir() or (Path(source) / "generation_config.json").is_file():
        generation_config = _generation_config(source, arguments)
    eos = collect_eos_token_ids(model_config, generation_config, tokenizer, vocab_size)
    info = PrepareInfo(
        target=target.name_or_path,
        tokenizer=tokenizer_fingerprint(tokenizer),
        chat_template=chat_template_fingerprint(tokenizer),
        vocab_size=vocab_size,
        tokenizer_size=len(tokenizer),
        max_length=config.max_length,
        eos_token_ids=list(eos),
    )
    encoder = EncoderSettings(
        target_name=target.name_or_path,
        tokenizer_source=source,
        loading_arguments=arguments,
        eos_token_ids=eos,
        template_kwargs=dict(config.template_kwargs),
        input_format=config.input_format,
        train_on=config.train_on,
        max_length=config.max_length,
    )
    return tokenizer, info, encoder


def _generation_config(source: str, arguments: Mapping[str, Any]) -> GenerationConfig | None:
    """A hub model may lack the file; nothing but its EOS ids is read from it."""
    wanted = {k: v for k, v in arguments.items() if k != "trust_remote_code"}
    try:
        return GenerationConfig.from_pretrained(source, **wanted)
    except OSError:
        return None


def _deciding_settings(
    config: PrepareConfig, source: RowSource, info: PrepareInfo
) -> dict[str, Any]:
    """Everything that decides the output; workers, names and places do not."""
    return {
        "mask_rule": MASK_RULE_VERSION,
        "input_content": source.digest,
        "input_rows": len(source),
        "input_format": config.input_format,
        "tokenizer": info.tokenizer,
        "chat_template": info.chat_template,
        "eos_token_ids": info.eos_token_ids,
        "vocab_size": info.vocab_size,
        "template_kwargs": dict(config.template_kwargs),
        "max_length": config.max_length,
        "train_on": config.train_on,
        "max_dropped_share": config.max_dropped_share,
        "on_bad_row": config.on_bad_row,
        "limit": config.limit,
        "shuffle_seed": config.shuffle_seed,
    }


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _is_finished(output: Path, wanted: PrepareInfo, *, overwrite: bool) -> bool:
    """Whether the output exists already with the same settings.

    Raises:
        ValueError: it exists, but with other settings, or it is something else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    foreign = not output.is_dir() or {p.name for p in output.iterdir()} - OWN_NAMES
    if foreign or not (output / INFO_NAME).is_file():
        raise ValueError(
            f"output={output} exists and holds other things than prepared data; it is left as it "
            "is. Choose another output folder."
        )
    if overwrite and not all((output / name).exists() for name in OWN_NAMES):
        return False
    found = load_prepared(output).info
    if found.settings_hash == wanted.settings_hash:
        return True
    if overwrite:
        return False
    keys = {*found.settings, *wanted.settings}
    differing = sorted(k for k in keys if found.settings.get(k) != wanted.settings.get(k))
    raise ValueError(
        f"output={output} was made with other settings ({', '.join(differing)}). Set "
        "overwrite=true to replace it, or choose another output folder."
    )


def _install(result: Path, output: Path, *, aside: Path) -> None:
    """Renames a complete result into place; what it replaces is removed with the scratch folder."""
    if output.exists():
        output.replace(aside)
    result.replace(output)


def _row_order(count: int, *, limit: int | None, seed: int | None) -> Sequence[int]:
    """Which rows are read, in which order: shuffled first, then limited."""
    if seed is None:
        return range(count)[:limit]
    return np.random.default_rng(seed).permutation(count)[:limit].tolist()


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` indices spread over 0 .. count-1."""
    if count <= wanted:
        return list(range(count))
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def _with_progress(chunks: Iterator[EncodedChunk], *, num_rows: int) -> Iterator[EncodedChunk]:
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task, tokens = progress.add_task("preparing", total=num_rows, tokens="0"), 0
        for chunk in chunks:
            yield chunk
            tokens += sum(len(row.input_ids) for row in chunk.rows)
            progress.update(task, advance=chunk.num_read, tokens=f"{tokens:,}")


class _Totals:
    """Adds up chunks into the info, and stops the run when too much is dropped."""

    def __init__(
        self, config: PrepareConfig, info: PrepareInfo, *, template: str, num_rows: int
    ) -> None:
        self._config = config
        self._template = template
        self._info = info
        self._num_rows = num_rows
        self._dropped: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self.counts = np.zeros(info.vocab_size, dtype=np.int64)
        self.end_counts: Counter[int] = Counter()
        self.examples: dict[str, list[DroppedRow]] = {}

    def add(self, chunk: EncodedChunk) -> None:
        """Adds one chunk.

        Raises:
            ValueError: a bad row under on_bad_row=strict, or the dropped share is certain to be
                above max_dropped_share.
        """
        info = self._info
        for bad in chunk.dropped:
            # A row that is merely too long is not a bad one.
            if self._config.on_bad_row == "strict" and bad.reason != TOO_LONG:
                raise ValueError(
                    f"{bad.describe()}\nCorrect the row, or set on_bad_row=skip to leave it out."
                )
            self._dropped[bad.reason] += 1
            kept = self.examples.setdefault(bad.reason, [])
            if len(kept) < prepare_report.EXAMPLES_PER_REASON:
                kept.append(bad)
        self._notes += chunk.notes
        self.end_counts += chunk.end_ids
        info.rows_read += chunk.num_read
        info.rows_kept += chunk.num_kept
        info.training_rows += len(chunk.rows)
        info.answers += chunk.num_answers
        info.cut_answers += chunk.num_cut_answers
        for row in chunk.rows:
            mask = np.asarray(row.loss_mask, dtype=bool)
            supervised = np.asarray(row.input_ids, dtype=np.int64)[mask]
            np.add.at(self.counts, supervised, 1)
            info.tokens += len(row.input_ids)
            info.supervised_tokens += len(supervised)
        # Waiting for the end would not change the answer.
        self._check_dropped()

    def finish(self) -> None:
        """Fills the info.

        Raises:
            ValueError: nothing is supervised, or too many rows were dropped.
        """
        self._check_dropped()
        if not self._info.supervised_tokens:
            self._stop_for_nothing()
        self._info.dropped = dict(self._dropped)
        self._info.notes = dict(self._notes)

    def _check_dropped(self) -> None:
        info, num_dropped = self._info, self._dropped.total()
        allowed = self._config.max_dropped_share * self._num_rows
        if num_dropped <= allowed:
            return
        if not info.supervised_tokens:
            self._stop_for_nothing()
        raise ValueError(
            f"{num_dropped} of {info.rows_read} rows read "
            f"({prepare_report.share(num_dropped, info.rows_read)}) cannot be used; "
            f"max_dropped_share={self._config.max_dropped_share} allows {allowed:g} of "
            f"{self._num_rows}:\n{self._reasons()}\nCorrect the input or its input_format, or "
            "raise max_dropped_share."
        )

    def _stop_for_nothing(self) -> None:
        info = self._info
        raise ValueError(
            f"0 supervised tokens in {info.rows_read} rows of {self._config.input}: a draft model "
            f"would learn nothing.\n{self._reasons() or '  (the input is empty)'}\n"
            f"The chat template of {info.target} starts {self._template[:200]!r}. Check that the "
            "rows hold assistant turns, that input_format fits, and that max_length has room for "
            "the answers."
        )

    def _reasons(self) -> str:
        return "\n".join(prepare_report.dropped_lines(self._dropped, self.examples))


class _RowWriter:
    """Streams rows into one Arrow file, then saves it as a dataset."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "rows.arrow"

    def __enter__(self) -> _RowWriter:
        self._sink = pa.OSFile(str(self._file), "wb")
        self._stream = pa.ipc.new_stream(self._sink, COLUMNS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._sink.close()

    def add(self, chunk: EncodedChunk) -> None:
        """Writes the chunk's rows."""
        if not chunk.rows:
            return
        columns = {
            "id": [row.identity for row in chunk.rows],
            "input_ids": [row.input_ids for row in chunk.rows],
            "loss_mask": [row.loss_mask for row in chunk.rows],
            "category": [row.category for row in chunk.rows],
        }
        self._stream.write_batch(pa.RecordBatch.from_pydict(columns, schema=COLUMNS))

    def save(self) -> datasets.Dataset:
        """Writes dataset/ and removes the stream; the result is open and memory-mapped."""
        rows = datasets.Dataset.from_file(str(self._file))
        quiet = datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            rows.save_to_disk(str(self._folder / DATASET_NAME))
        finally:
            if quiet:
                datasets.enable_progress_bars()
        del rows
        self._file.unlink()
        return datasets.load_from_disk(str(self._folder / DATASET_NAME))
