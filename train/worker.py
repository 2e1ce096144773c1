"""One process of a run: reads RUN_DIR/config.yaml, builds everything, trains, writes the draft.

    python -m draftsmith.train.worker RUN_DIR

The parent (`draftsmith-train`) starts it, once or under torchrun. Called by hand it goes on with a
run folder, from its newest checkpoint, exactly as the file there says: Hydra has no part in it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

from draftsmith.conf.entry import fail
from draftsmith.data.vocabulary import DraftVocabulary, build_draft_vocabulary
from draftsmith.models.cpu_precision import slow_bfloat16
from draftsmith.models.target import TargetHead, TargetModel
from draftsmith.train import checkpoint, strategy
from draftsmith.train.batch_plan import BatchPlan, hold_out
from draftsmith.train.checkpoint import Progress
from draftsmith.train.config import TrainConfig, read_config
from draftsmith.train.features import CachedFeatures, FeatureSource, LiveFeatures, TokenFeatures
from draftsmith.train.launch import end_with_parent, launched_world_size
from draftsmith.train.loggers import make_loggers
from draftsmith.train.loop import Run, count_steps, save_consolidated, train
from draftsmith.train.objectives import make_objective
from draftsmith.train.preflight import OpenedRows, Preflight, check_before_start
from draftsmith.train.warm_start import (
    WarmStart,
    apply_warm_start,
    kept_vocabulary,
    read_warm_start,
)

DRAFT_FOLDER = "draft"
"""RUN_DIR/draft: the finished draft model."""
VERSIONED_PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "hydra-core",
    "safetensors",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def shown_log() -> Iterator[None]:
    """Prints what modules log about choices that they make, a line each, on the first process."""
    log = logging.getLogger("draftsmith")
    level, handler = log.level, logging.StreamHandler()
    if os.environ.get("RANK", "0") == "0":
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def train_run_folder(run_dir: Path, preflight: Preflight | None = None) -> None:
    """Trains the run in `run_dir` in this process (one of several, under a launcher).

    Args:
        run_dir: a folder with a config.yaml.
        preflight: what the checks of these settings found, where they have just been run.

    Raises:
        ValueError: something in the settings or the run folder does not fit.
    """
    settings = read_config(run_dir)
    with shown_log(), num_threads(settings.train.num_threads):
        preflight = preflight or check_before_start(settings)
        accelerator = strategy.make_accelerator(settings)
        try:
            train_with(accelerator, settings, preflight, run_dir)
        finally:
            strategy.release(accelerator)


def train_under_launcher(
    settings: TrainConfig, preflight: Preflight, open_folder: Callable[[], Path]
) -> None:
    """Trains in this process, one of those that torchrun or accelerate launch started.

    Rank 0 alone chooses the folder; the others are told.

    Args:
        settings: the same on every rank.
        preflight: what the checks of these settings found.
        open_folder: makes the run folder and writes its config; called on rank 0.

    Raises:
        ValueError: on every rank, also when only rank 0 found something wrong.
    """
    end_with_parent()
    with num_threads(settings.train.num_threads):
        accelerator = strategy.make_accelerator(settings)
        try:
            run_dir = _shared_folder(accelerator, open_folder)
            train_with(accelerator, settings, preflight, run_dir)
        finally:
            strategy.release(accelerator)


def _shared_folder(accelerator: Accelerator, open_folder: Callable[[], Path]) -> Path:
    message: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            message[0] = str(open_folder())
        except ValueError as error:
            message[1] = str(error)
    broadcast_object_list(message)
    if message[1] is not None:
        raise ValueError(message[1])
    return Path(message[0])


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Sets torch's CPU threads for the run, and puts the old number back."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_with(
    accelerator: Accelerator, settings: TrainConfig, preflight: Preflight, run_dir: Path
) -> None:
    """Builds the run, goes on from a checkpoint if there is one, trains, writes the draft."""
    start = find_start(accelerator, settings, run_dir)
    if start is not None and settings.init_vocabulary != "keep":
        # The checkpoint brings its own weights; a kept vocabulary is read again.
        settings = replace(settings, init_from=None, init_vocabulary="same")
    run = build_run(accelerator, settings, preflight, run_dir)
    resume(run, start)
    if accelerator.is_main_process:
        write_versions(run_dir)
        run.loggers = make_loggers(
            run_dir, settings.logger, asdict(settings), resumed_step=run.progress.step
        )
    try:
        train(run)
    finally:
        for logger in run.loggers:
            logger.finish()
    save_consolidated(run, run_dir / DRAFT_FOLDER)
    if run.progress.best_step is not None:
        accelerator.print(
            f"Best validation at step {run.progress.best_step}: simulated accepted length "
            f"{run.progress.best_accepted_length:.3f} (greedy), saved in {run_dir / 'best'}"
        )
    accelerator.print(f"The draft is in {run_dir / DRAFT_FOLDER}")
    if isinstance(run.draft, checkpoint.TrainsTarget):
        accelerator.print(f"Its target is in {checkpoint.target_folder(run_dir / DRAFT_FOLDER)}")


# --- building -------------------------------------------------------------------------------------


def build_run(
    accelerator: Accelerator, settings: TrainConfig, preflight: Preflight, run_dir: Path
) -> Run:
    """Loads the target (or its head alone), builds the draft and wraps it for the processes."""
    loop = settings.train
    compute_dtype = torch.bfloat16 if loop.precision == "bf16" else torch.float32
    target = load_target(settings, accelerator) if settings.features.source == "live" else None
    target_head = load_head(settings, accelerator, target, compute_dtype)
    features = open_features(settings, preflight.rows, target, preflight, accelerator)
    training_rows: tuple[int, ...] = tuple(range(len(features.lengths)))
    held_out: tuple[int, ...] = ()
    if preflight.validation_rows is not None:
        validation = open_features(
            settings, preflight.validation_rows, target, preflight, accelerator
        )
        held_out = tuple(range(len(validation.lengths)))
    else:
        validation = features
        if settings.data.validation_share > 0.0:
            training_rows, held_out = hold_out(
                features.prompt_hashes(), settings.data.validation_share
            )
    plan = make_plan(features, training_rows, settings, accelerator)
    # The same weights on every process, whatever was drawn before.
    set_seed(loop.seed)
    draft = build_draft(settings, preflight, target_head, accelerator)
    optimizer = make_optimizer(draft, settings)
    model, wrapped_optimizer = accelerator.prepare(draft, optimizer)
    strategy.require_wrapped(accelerator, model, settings.launch)
    # What training draws is seeded per micro-batch (train/loop.py); all else differs by process.
    set_seed(loop.seed + 1 + accelerator.process_index)
    total_steps = count_steps(plan, epochs=loop.epochs, max_steps=loop.max_steps)
    describe(accelerator, settings, draft, plan, features, held_out, total_steps)
    return Run(
        settings=settings,
        run_dir=run_dir,
        accelerator=accelerator,
        model=model,
        draft=draft,
        optimizer=wrapped_optimizer,
        objective=make_objective(**preflight.method.objective),
        target_head=target_head,
        features=features,
        plan=plan,
        total_steps=total_steps,
        validation_features=validation,
        validation_plan=make_plan(validation, held_out, settings, accelerator, accumulation=1)
        if held_out
        else None,
        compute_dtype=compute_dtype,
        save_dtype=compute_dtype,
    )


def load_target(settings: TrainConfig, accelerator: Accelerator) -> TargetModel:
    """The whole target, for live features."""
    target = settings.target
    device = accelerator.device if target.device == "auto" else torch.device(target.device)
    return TargetModel.load(
        target.name_or_path,
        dtype=target.dtype,
        device=device,
        attn_implementation=target.attn_implementation,
        trust_remote_code=target.trust_remote_code,
        revision=target.revision,
    )


def load_head(
    settings: TrainConfig,
    accelerator: Accelerator,
    target: TargetModel | None,
    dtype: torch.dtype,
) -> TargetHead:
    """The target's head in the dtype of the loop: the loaded target's own where it fits."""
    if target is not None and target.dtype == dtype and target.device == accelerator.device:
        return target.head()
    return TargetHead.load(
        settings.target.name_or_path,
        dtype=dtype,
        device=accelerator.device,
        trust_remote_code=settings.target.trust_remote_code,
        revision=settings.target.revision,
    )


def open_features(
    settings: TrainConfig,
    rows: OpenedRows,
    target: TargetModel | None,
    preflight: Preflight,
    accelerator: Accelerator,
) -> FeatureSource:
    """The rows as a source of batches."""
    pin = accelerator.device.type == "cuda"
    if rows.cache is not None:
        return CachedFeatures(rows.cache, max_length=settings.train.max_length, pin=pin)
    assert rows.prepared is not None, "rows are a cache or prepared data"
    assert rows.scan is not None, "prepared data is scanned when it is opened"
    if settings.features.source == "tokens":
        return TokenFeatures(
            rows.prepared.dataset,
            rows.scan.lengths,
            max_length=settings.train.max_length,
            pin=pin,
        )
    assert target is not None, "live features load the target"
    dtype = settings.features.dtype
    return LiveFeatures(
        rows.prepared.dataset,
        rows.scan.lengths,
        target,
        aux_layer_ids=preflight.aux_layer_ids,
        max_length=settings.train.max_length,
        dtype=None if dtype is None else DTYPES[dtype],
        pin=pin,
    )


def make_plan(
    features: FeatureSource,
    rows: Sequence[int],
    settings: TrainConfig,
    accelerator: Accelerator,
    *,
    accumulation: int | None = None,
) -> BatchPlan:
    """The order of `rows`.

    Raises:
        ValueError: the longest row does not fit into a micro-batch.
    """
    loop = settings.train
    longest = int(features.lengths[list(rows)].max())
    if longest > loop.batch_tokens:
        raise ValueError(
            f"A row has {longest} tokens, but a micro-batch holds train.batch_tokens="
            f"{loop.batch_tokens}. Raise it, or lower train.max_length (now {loop.max_length})."
        )
    return BatchPlan(
        lengths=features.lengths,
        row_ids=tuple(rows),
        batch_tokens=loop.batch_tokens,
        max_rows=loop.micro_batch_size,
        seed=loop.seed,
        world_size=accelerator.num_processes,
        accumulation=loop.gradient_accumulation if accumulation is None else accumulation,
    )


def build_draft(
    settings: TrainConfig, preflight: Preflight, target_head: TargetHead, accelerator: Accelerator
) -> nn.Module:
    """The draft in float32, knowing its target and how it was trained."""
    start = None
    if settings.init_from is not None:
        start = read_warm_start(settings.init_from, settings.target, preflight.aux_layer_ids)
    vocabulary = make_vocabulary(settings, preflight, accelerator, start)
    method: Any = preflight.method
    # A draft that starts from the target's own layers needs more of it than the head.
    from_target = getattr(method, "builds_from_target", False)
    options = {"target": asdict(settings.target)} if from_target else {}
    draft = method.build(target_head, vocabulary, preflight.aux_layer_ids, **options)
    draft.float()
    if start is not None:
        part = draft.draft_part if isinstance(draft, checkpoint.TrainsTarget) else draft
        said = apply_warm_start(part, start, vocabulary=settings.init_vocabulary)
        accelerator.print(said)
        before = getattr(start.config, "target_fingerprint", None) or {}
        if before.get("weights", preflight.fingerprint.weights) != preflight.fingerprint.weights:
            accelerator.print(
                "Note: that draft was trained for a target with other weights; it has to learn "
                "this one's answers first."
            )
    draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
    draft.config.target_fingerprint = asdict(preflight.fingerprint)
    draft.config.target_name_or_path = settings.target.name_or_path
    draft.config.eos_token_id = list(preflight.eos_token_ids)
    draft.config.training = training_summary(settings)
    return draft


def make_vocabulary(
    settings: TrainConfig,
    preflight: Preflight,
    accelerator: Accelerator,
    start: WarmStart | None,
) -> DraftVocabulary | None:
    """The draft vocabulary from the counts of supervised tokens, or the one of the checkpoint that
    the run starts from; None for the full one."""
    size = preflight.method.draft_vocab_size
    rows = preflight.rows
    source = rows.cache if rows.cache is not None else rows.prepared
    assert source is not None, "rows are a cache or prepared data"
    counts = source.token_counts
    if start is not None and settings.init_vocabulary == "keep":
        vocabulary = kept_vocabulary(start, counts)
    elif size is None or size == preflight.vocab_size:
        vocabulary = None
    else:
        vocabulary = build_draft_vocabulary(
            counts,
            draft_vocab_size=size,
            tokenizer_size=preflight.tokenizer_size,
            always_include=preflight.eos_token_ids,
        )
    if vocabulary is not None:
        accelerator.print(
            f"Draft vocabulary: {len(vocabulary.draft_to_target)} of {preflight.vocab_size} "
            f"tokens, which covers {vocabulary.coverage:.2%} of the supervised tokens"
        )
    return vocabulary


def training_summary(settings: TrainConfig) -> dict[str, Any]:
    """What a person who finds the draft wants to know about how it was made."""
    loop = settings.train
    return {
        "method": dict(settings.method),
        "features": settings.features.source,
        "lr": loop.lr,
        "epochs": loop.epochs,
        "max_steps": loop.max_steps,
        "max_length": loop.max_length,
        "precision": loop.precision,
        "seed": loop.seed,
        "draftsmith_version": version("draftsmith"),
    }


def make_optimizer(draft: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters of the draft, and nothing of the target."""
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    options = settings.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=settings.train.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        # One pass over the weights instead of ten. DeepSpeed brings its own optimizer step.
        fused=settings.launch.name != "zero2",
    )


def describe(
    accelerator: Accelerator,
    settings: TrainConfig,
    draft: nn.Module,
    plan: BatchPlan,
    features: FeatureSource,
    held_out: Sequence[int],
    total_steps: int,
) -> None:
    """Prints what is about to happen, the size of the world and of a step first."""
    world, loop = accelerator.num_processes, settings.train
    trainable = sum(entry.numel() for entry in draft.parameters() if entry.requires_grad)
    tokens = int(features.lengths[list(plan.row_ids)].sum())
    accelerator.print(
        f"{world} process(es) on {accelerator.device.type}, launch={settings.launch.name}, "
        f"{loop.precision}; a step takes {world} x {loop.gradient_accumulation} micro-batches of "
        f"at most {loop.batch_tokens} tokens (effective batch: up to "
        f"{world * loop.gradient_accumulation * loop.batch_tokens} tokens)\n"
        f"{len(plan.row_ids)} rows with {tokens} tokens to train on, {len(held_out)} held out; "
        f"{total_steps} steps; {trainable / 1e6:.2f} M trainable parameters"
    )
    precision = torch.bfloat16 if loop.precision == "bf16" else torch.float32
    slow = slow_bfloat16(accelerator.device, precision)
    if slow:
        accelerator.print(f"{slow} train.precision=fp32 trains faster here.")
    if features.num_cut:
        accelerator.print(
            f"{features.num_cut} rows are longer than train.max_length={loop.max_length} and are "
            "cut there"
        )


# --- resuming and provenance ----------------------------------------------------------------------


def find_start(accelerator: Accelerator, settings: TrainConfig, run_dir: Path) -> Path | None:
    """The checkpoint to start from: the run folder's newest, else that of `resume`; or None.

    Raises:
        ValueError: `resume` names a folder without a whole checkpoint.
    """
    with warnings.catch_warnings():
        if not accelerator.is_main_process:
            warnings.simplefilter("ignore")
        folder = checkpoint.newest_checkpoint(run_dir)
        if folder is None and settings.resume not in (None, "auto"):
            folder = checkpoint.find_checkpoint(Path(settings.resume))
    # Nobody may write into the folder before all have looked.
    accelerator.wait_for_everyone()
    return folder


def resume(run: Run, folder: Path | None) -> None:
    """Goes on from a checkpoint, if there is one.

    Raises:
        ValueError: the checkpoint does not fit this run.
    """
    run.progress = Progress(
        world_size=run.accelerator.num_processes,
        launch=run.settings.launch.name,
        plan_digest=run.plan.digest(),
    )
    if folder is None:
        return
    found = checkpoint.read_progress(folder)
    checkpoint.check_resumable(found, run.progress, folder)
    checkpoint.restore(run.accelerator, folder)
    run.progress = replace(found, world_size=run.progress.world_size, launch=run.progress.launch)
    run.accelerator.print(f"Going on from {folder} (step {found.step} of {run.total_steps})")


def write_versions(run_dir: Path) -> None:
    """Writes versions.json: packages, Python, machine and the commit of a checkout."""
    packages: dict[str, str | None] = {}
    for name in VERSIONED_PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    content = {
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git_sha": git_sha(),
    }
    (run_dir / "versions.json").write_text(json.dumps(content, indent=2) + "\n")


def git_sha() -> str | None:
    """Commit of the checkout that draftsmith runs from; None for an installed package."""
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: one argument, the run folder."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        fail("usage: python -m draftsmith.train.worker RUN_DIR")
    if launched_world_size() is not None:
        end_with_parent()
    try:
        train_run_folder(Path(arguments[0]))
    except (ValueError, FloatingPointError) as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        fail(str(error))


if __name__ == "__main__":
    main()
