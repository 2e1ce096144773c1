"""Runs the frozen target over prepared rows and stores its hidden states (`draftsmith-cache`).

    draftsmith-cache target=smollm2 data=runs/data cache=runs/cache
    torchrun --nproc_per_node 2 -m draftsmith.data.capture target=... data=... cache=...
    draftsmith-cache verify cache=runs/cache

`capture_features` is the one way from token ids to features: the cache is filled by it and live
features call it, so both train on the same numbers.

Rows are batched inside one shard, by length, so a state depends neither on the number of processes
nor on where a run was interrupted. Process r of n writes shards r, r + n, ...; while the target
works on a shard, a thread checks and writes the one before. Memory on the host: two shards.

Axes: batch, seq, tokens, layers, slots, hidden as in data/cache.py.
"""

from __future__ import annotations

import errno
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from draftsmith.conf.entry import fail, run_verb
from draftsmith.conf.schema import CacheConfig
from draftsmith.data import cache as cache_format
from draftsmith.data import shards
from draftsmith.data.cache import CacheManifest, CacheSettings
from draftsmith.data.cache_size import (
    cache_bytes,
    format_bytes,
    format_seconds,
    free_bytes,
    refuse_short_disk,
)
from draftsmith.data.prepared_rows import (
    PreparedRows,
    RowScan,
    length_batches,
    read_rows,
    scan_rows,
)
from draftsmith.data.processes import join_processes, on_main_process
from draftsmith.data.shards import STATE_DTYPES, ShardPlan, ShardRecord, ShardTensors, SkippedRow
from draftsmith.data.verify_cache import verify_command
from draftsmith.data.write_lock import WriteLock

if TYPE_CHECKING:
    import datasets
    from accelerate import PartialState

    from draftsmith.models.target import TargetModel


def capture_features(
    target: TargetModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    aux_layer_ids: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Target states of a padded batch: what the cache stores and what live features train on.

    Args:
        target: the frozen target.
        input_ids: [batch, seq] token ids; padding may hold any id.
        attention_mask: [batch, seq], nonzero on real tokens, padding on one side; None when there
            is no padding.
        aux_layer_ids: layers in ascending order; may be empty.
        dtype: dtype to return. Live features give the cache's dtype here and get what a cache
            would hold; None keeps the target's.

    Returns:
        ([batch, seq, layers * hidden], [batch, seq, hidden]); values on padding mean nothing.

    Raises:
        ValueError: the target returned states for other positions than were asked for, or a state
            does not fit into float16.
    """
    input_ids = input_ids.to(target.device)
    if attention_mask is not None:
        attention_mask = attention_mask.to(target.device)
    output = target.forward(
        input_ids,
        attention_mask=attention_mask,
        aux_layer_ids=tuple(aux_layer_ids),
        logits="none",
    )
    batch, seq = input_ids.shape
    found = {
        f"layers {', '.join(map(str, aux_layer_ids))}": (
            output.aux_hidden_states,
            (batch, seq, len(aux_layer_ids) * target.hidden_size),
        ),
        "the final state": (output.final_hidden_states, (batch, seq, target.hidden_size)),
    }
    for name, (states, shape) in found.items():
        if tuple(states.shape) != shape:
            raise ValueError(
                f"The target returned {name} with shape {tuple(states.shape)}; {batch} rows of "
                f"{seq} tokens need {shape}. Every position has to be computed: switch off prefix "
                "caching in whatever runs the target."
            )
    aux, final = output.aux_hidden_states, output.final_hidden_states
    if dtype is None:
        return aux, final
    if dtype == torch.float16:
        refuse_float16_overflow(aux, attention_mask)
        refuse_float16_overflow(final, attention_mask)
    return aux.to(dtype), final.to(dtype)


def refuse_float16_overflow(states: Tensor, attention_mask: Tensor | None) -> None:
    """Raises ValueError when a finite state of a real token exceeds float16's largest value.

    Args:
        states: [batch, seq, width].
        attention_mask: [batch, seq] or None.
    """
    limit = torch.finfo(torch.float16).max
    sizes = states.abs()
    too_large = (sizes > limit) & torch.isfinite(states)
    if attention_mask is not None:
        too_large &= attention_mask.bool()[..., None]
    if bool(too_large.any()):
        raise ValueError(
            f"A hidden state reaches {sizes[too_large].max().item():.0f}, float16 ends at "
            f"{limit:.0f}. Use dtype=bfloat16, which has the same size, or float32."
        )


def capture_states(
    target: TargetModel,
    rows: PreparedRows,
    settings: CacheSettings,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """States of all tokens of one shard.

    Args:
        target: the frozen target.
        rows: the shard's rows.
        settings: layers, dtype and batch size.
        on_batch: told the number of tokens after each batch.

    Returns:
        [tokens, slots, hidden] on the CPU, in the stored dtype.
    """
    on_gpu = target.device.type == "cuda"
    ends = rows.lengths.cumsum()
    starts = ends - rows.lengths
    width = len(settings.slots) * settings.hidden_size
    dtype = STATE_DTYPES[settings.dtype]
    # Pinned memory lets the copies run while the target goes on with the next batch.
    states = torch.empty(int(ends[-1]), width, dtype=dtype, pin_memory=on_gpu)
    token_ids = torch.from_numpy(rows.input_ids).long()
    for batch in length_batches(rows.lengths.tolist(), settings.batch_tokens):
        lengths = torch.from_numpy(rows.lengths[batch])
        seq = int(lengths[0])
        input_ids = torch.zeros(len(batch), seq, dtype=torch.long)
        for line, row in enumerate(batch):
            input_ids[line, : rows.lengths[row]] = token_ids[starts[row] : ends[row]]
        padded = bool((lengths < seq).any())
        keep_mask = torch.arange(seq) < lengths[:, None] if padded else None  # [batch, seq]
        aux, final = capture_features(
            target, input_ids, keep_mask, settings.aux_layer_ids, dtype=dtype
        )
        packed = torch.cat((aux, final), -1)  # [batch, seq, slots * hidden]
        for line, row in enumerate(batch):
            real = packed[line, : rows.lengths[row]]
            states[starts[row] : ends[row]].copy_(real, non_blocking=on_gpu)
        on_batch(int(lengths.sum()))
    if on_gpu:
        torch.cuda.synchronize(target.device)
    return states.view(-1, len(settings.slots), settings.hidden_size)


def store_shard(
    folder: Path, plan: ShardPlan, rows: PreparedRows, states: Tensor, settings: CacheSettings
) -> ShardRecord:
    """Leaves out rows whose states are not finite and writes the rest as one shard.

    Args:
        folder: cache folder.
        plan: which shard.
        rows: its rows.
        states: [tokens, slots, hidden] their states.
        settings: names the slots.
    """
    skipped: list[SkippedRow] = []
    keep_tokens = torch.ones(len(states), dtype=torch.bool)
    keep_rows = np.ones(len(rows.lengths), dtype=bool)
    ends = rows.lengths.cumsum()
    for row, (length, end) in enumerate(zip(rows.lengths, ends, strict=True)):
        own = states[end - length : end]
        if not shards.is_finite(own):
            reason = shards.first_bad_place(own, settings.slots)
            skipped.append(SkippedRow(plan.first_row + row, reason))
            keep_rows[row] = False
            keep_tokens[end - length : end] = False
    if skipped:
        states = states[keep_tokens]
    offsets = np.concatenate(([0], rows.lengths[keep_rows].cumsum()))
    tensors = ShardTensors(
        sample_offsets=torch.from_numpy(offsets),
        input_ids=torch.from_numpy(rows.input_ids)[keep_tokens],
        hidden_states=states,
        loss_mask=torch.from_numpy(rows.loss_mask)[keep_tokens],
    )
    return shards.write_shard(folder / plan.file_name, tensors, plan=plan, skipped=skipped)


def _stored(pending: Future[ShardRecord]) -> ShardRecord:
    try:
        return pending.result()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"The disk is full ({error}). Finished shards are kept: make room and run the same "
            "command again, or train without a cache (draftsmith-train features=live)."
        ) from error


def write_shards(
    target: TargetModel,
    dataset: datasets.Dataset,
    settings: CacheSettings,
    plans: Sequence[ShardPlan],
    folder: Path,
    *,
    max_bad_share: float = 0.0,
    on_batch: Callable[[int], None] = lambda _: None,
) -> None:
    """Captures and writes the given shards.

    Args:
        target: the frozen target.
        dataset: all prepared rows.
        settings: what the cache holds.
        plans: the shards to write.
        folder: cache folder.
        max_bad_share: stop when more than this share of all rows has non-finite states.
        on_batch: told the number of tokens after each batch.

    Raises:
        ValueError: too many non-finite rows, a full disk, float16 overflow, a wrong state shape.
    """
    skipped: list[SkippedRow] = []

    def collect(pending: Future[ShardRecord]) -> None:
        skipped.extend(_stored(pending).skipped)
        cache_format.check_skipped(skipped, num_rows=len(dataset), max_bad_share=max_bad_share)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer") as disk:
        pending: Future[ShardRecord] | None = None
        for plan in plans:
            rows = read_rows(dataset, plan.first_row, plan.end_row)
            states = capture_states(target, rows, settings, on_batch=on_batch)
            if pending is not None:
                collect(pending)
            pending = disk.submit(store_shard, folder, plan, rows, states, settings)
        if pending is not None:
            collect(pending)


def check_prepared_for(target: TargetModel, info: Any, path: str) -> None:
    """Raises ValueError when the rows were rendered with another tokenizer or chat template.

    Args:
        target: the target about to run.
        info: PrepareInfo of data/prepare.py.
        path: folder of the prepared data, for the message.
    """
    fingerprint = target.fingerprint
    differing = [
        f"{word}: the data has {found[:12]}..., this target has {wanted[:12]}..."
        for word, found, wanted in (
            ("tokenizer", info.tokenizer, fingerprint.tokenizer),
            ("chat template", info.chat_template, fingerprint.chat_template),
        )
        if found != wanted
    ]
    if differing:
        raise ValueError(
            f"{path} was prepared for another target than {target.name_or_path}:\n  "
            + "\n  ".join(differing)
            + "\nRun draftsmith-prepare with this target, or give the target it was prepared for."
        )


class _SpeedColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} tokens/s")


class CaptureProgress:
    """Progress bar of one process, and the estimate after its first batch."""

    def __init__(self, console: Console, *, num_tokens: int, num_processes: int) -> None:
        self._console = console
        self._num_tokens = num_tokens
        name = "tokens" if num_processes == 1 else f"tokens (process 1 of {num_processes})"
        self._bar = Progress(
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            _SpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=num_tokens)
        self._started = 0.0
        self._measured = False

    def __enter__(self) -> CaptureProgress:
        self._bar.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_batch(self, tokens: int) -> None:
        """Advances by one batch."""
        if not self._measured:
            self._measured = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            speed = tokens / (time.perf_counter() - self._started)
            left = format_seconds((self._num_tokens - tokens) / speed)
            self._console.print(f"First batch: {speed:,.0f} tokens/s, about {left} left")
        self._bar.advance(self._task, tokens)


def measure_tokens_per_second(
    target: TargetModel, dataset: datasets.Dataset, settings: CacheSettings, plan: ShardPlan
) -> float:
    """Speed of capturing the first batch of a shard, after a short warm-up; nothing is stored."""
    rows = read_rows(dataset, plan.first_row, plan.end_row)
    batch = length_batches(rows.lengths.tolist(), settings.batch_tokens)[0]
    starts = rows.lengths.cumsum() - rows.lengths
    pieces = [np.arange(starts[row], starts[row] + rows.lengths[row]) for row in batch]
    chosen = np.concatenate(pieces)
    sample = PreparedRows(rows.input_ids[chosen], rows.loss_mask[chosen], rows.lengths[batch])
    short = PreparedRows(sample.input_ids[:8], sample.loss_mask[:8], np.minimum([8], len(chosen)))
    capture_states(target, short, settings)
    started = time.perf_counter()
    capture_states(target, sample, settings)
    return len(chosen) / (time.perf_counter() - started)


def _describe(
    console: Console,
    config: CacheConfig,
    scan: RowScan,
    settings: CacheSettings,
    plans: Sequence[ShardPlan],
    needed: int,
    processes: str,
) -> None:
    layers = ", ".join(settings.slots)
    console.print(
        f"Cache {config.cache}: {len(scan.lengths):,} rows, {scan.num_tokens:,} tokens, "
        f"{scan.num_supervised:,} supervised; states {layers} of width {settings.hidden_size} in "
        f"{settings.dtype}; {processes}"
    )
    console.print(
        f"Size: {format_bytes(cache_bytes(plans, settings))} in {len(plans):,} shards, "
        f"{format_bytes(needed)} still to write; free on that disk: "
        f"{format_bytes(free_bytes(Path(config.cache)))}"
    )


def created_by(config: CacheConfig) -> dict[str, Any]:
    """Versions, command and time, for the manifest."""
    packages = {name: version(name) for name in ("draftsmith", "torch", "transformers")}
    return packages | {
        "command": shlex.join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "data": config.data,
    }


def run(config: CacheConfig) -> None:
    """The verb's work: checks, estimates, captures, and finishes with the manifest.

    Raises:
        ValueError: whatever keeps the cache from being made; the message says what to do.
    """
    from draftsmith.data.prepare import load_prepared
    from draftsmith.models.target import (
        TargetModel,
        default_aux_layer_ids,
        resolve_target,
        validate_aux_layer_ids,
    )

    prepared = load_prepared(config.data)
    state, device = join_processes(config.target.device)
    # One process converts or downloads; the others find the result.
    with state.main_process_first():
        resolve_target(config.target.name_or_path)
    target = TargetModel.load(
        config.target.name_or_path,
        dtype=config.target.dtype,
        device=device,
        attn_implementation=config.target.attn_implementation,
        trust_remote_code=config.target.trust_remote_code,
        revision=config.target.revision,
    )
    check_prepared_for(target, prepared.info, config.data)
    layers = config.aux_layer_ids
    if layers is None:
        layers = list(default_aux_layer_ids(target.num_layers))
    elif layers:
        layers = list(validate_aux_layer_ids(layers, target.num_layers))
    scan = scan_rows(
        prepared.dataset, vocab_size=target.vocab_size, max_positions=target.max_positions
    )
    settings = CacheSettings(
        target_fingerprint=cache_format.fingerprint_parts(target.fingerprint),
        data_sha256=scan.sha256,
        aux_layer_ids=tuple(layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=config.dtype,
        target_dtype=config.target.dtype,
        attn_implementation=config.target.attn_implementation,
        shard_tokens=config.shard_tokens,
        batch_tokens=config.batch_tokens,
    )
    capture(config, target, prepared.dataset, scan, settings, state)
    state.destroy_process_group()


def _report(console: Console, manifest: CacheManifest) -> None:
    console.print(
        f"Done: {manifest.num_samples:,} samples, {manifest.num_tokens:,} tokens, "
        f"{manifest.num_supervised:,} supervised, {len(manifest.skipped):,} rows skipped"
    )
    for row in manifest.skipped[:10]:
        console.print(f"  skipped row {row.row}: {row.reason}")


def _write_own_shards(
    config: CacheConfig,
    target: TargetModel,
    dataset: datasets.Dataset,
    settings: CacheSettings,
    own: Sequence[ShardPlan],
    state: PartialState,
    console: Console,
) -> None:
    folder = Path(config.cache)
    todo = [plan for plan in own if not shards.is_intact(folder, plan)]
    if kept := len(own) - len(todo):
        console.print(f"{kept} of {len(own)} shards are already written and intact")
    if not todo:
        return
    num_tokens = sum(plan.num_tokens for plan in todo)
    with CaptureProgress(
        console, num_tokens=num_tokens, num_processes=state.num_processes
    ) as progress:
        write_shards(
            target,
            dataset,
            settings,
            todo,
            folder,
            max_bad_share=config.max_bad_share,
            on_batch=progress.on_batch,
        )


def capture(
    config: CacheConfig,
    target: TargetModel,
    dataset: datasets.Dataset,
    scan: RowScan,
    settings: CacheSettings,
    state: PartialState,
) -> None:
    """Fills the cache folder, this process writing its share of the shards.

    Raises:
        ValueError: as `run`.
    """
    from draftsmith.models.cpu_precision import slow_bfloat16

    folder = Path(config.cache)
    console = Console(quiet=not state.is_main_process, highlight=False, soft_wrap=True)
    plans = shards.plan_shards(scan.lengths, settings.shard_tokens)
    absent = [plan for plan in plans if not shards.looks_finished(folder, plan)]
    needed = cache_bytes(absent, settings)
    number = "1 process" if state.num_processes == 1 else f"{state.num_processes} processes"
    processes = f"{number} on {target.device.type}"
    _describe(console, config, scan, settings, plans, needed, processes)
    slow = slow_bfloat16(target.device, getattr(torch, config.target.dtype))
    if slow:
        console.print(f"{slow} target.dtype=float32 reads the target faster here.")
    if config.dry_run:
        speed = measure_tokens_per_second(target, dataset, settings, plans[0])
        seconds = sum(plan.num_tokens for plan in absent) / (speed * state.num_processes)
        console.print(f"Time: about {format_seconds(seconds)} at {speed:,.0f} tokens/s per process")
    on_main_process(state, lambda: refuse_short_disk(needed, folder))
    if config.dry_run:
        return
    created = created_by(config)
    lock = WriteLock(folder)
    with ExitStack() as held:

        def begin() -> None:
            held.enter_context(lock)
            cache_format.begin_cache(folder, settings, plans, created=created)

        def finish() -> None:
            lock.check()
            manifest = cache_format.finish_cache(
                folder,
                settings,
                plans,
                target_name=config.target.name_or_path,
                created=created,
                max_bad_share=config.max_bad_share,
            )
            _report(console, manifest)

        on_main_process(state, begin)
        if len(absent) < len(plans):
            console.print("Checking the shards that are already written ...")
        own = plans[state.process_index :: state.num_processes]
        _write_own_shards(config, target, dataset, settings, own, state, console)
        state.wait_for_everyone()
        on_main_process(state, finish)


def main() -> None:
    """Entry point of `draftsmith-cache`."""
    if sys.argv[1:2] == ["verify"]:
        try:
            code = verify_command(sys.argv[2:])
        except ValueError as error:
            fail(str(error))
        raise SystemExit(code)
    run_verb(run, root="cache", schema="draftsmith.conf.schema:CacheConfig")


if __name__ == "__main__":
    main()
