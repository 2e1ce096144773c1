"""The training loop. It knows a draft model only as `TrainableDraft`.

    batch -> target features -> draft forward -> loss -> backward -> step -> record

The loss of an optimizer step is one sum over everything that all processes saw in it, divided by
one normaliser: the draft's own count, summed over the accumulation window and all processes. DDP
and DeepSpeed average gradients over processes, hence the factor `num_processes`. So neither loss
nor gradient depends on how a step's rows are split into micro-batches and processes; the tests
compare 1 x 4, 2 x 2 and 4 x 1.

Axes: batch, seq.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.models.protocols import Objective, TrainBatch, TrainOutput
from draftsmith.train import strategy
from draftsmith.train.batch_plan import BatchPlan, MicroBatch
from draftsmith.train.checkpoint import Progress, TrainsTarget, save_checkpoint, save_models
from draftsmith.train.config import TrainConfig
from draftsmith.train.features import FeatureSource, read_ahead
from draftsmith.train.loggers import Logger
from draftsmith.train.progress import ProgressDisplay, as_validation_line
from draftsmith.train.schedules import share
from draftsmith.train.sums import Sums, as_metrics

FEW_IN_VOCABULARY = 0.5
"""Below this share of the target's choices a run is warned about (our choice; 0.99 is usual)."""
BEST_FOLDER = "best"
"""RUN_DIR/best: the draft of the best validation so far."""

Window = list[tuple[MicroBatch, TrainBatch]]
"""What one process works on in one optimizer step."""


@runtime_checkable
class FollowsProgress(Protocol):
    """A draft whose loss changes over the run (a weight with a schedule)."""

    def follow_progress(self, share: float) -> None:
        """Called before every optimizer step with the share of steps done, 0 to below 1; a
        validation sees what the step before it saw."""


@dataclass
class Run:
    """Everything that a run is made of; the worker builds it."""

    settings: TrainConfig
    run_dir: Path
    accelerator: Accelerator
    model: nn.Module
    """The draft, wrapped by DDP or DeepSpeed where there are several processes."""
    draft: Any
    """The draft itself: a `TrainableDraft` and an nn.Module."""
    optimizer: torch.optim.Optimizer
    objective: Objective
    target_head: nn.Module
    features: FeatureSource
    plan: BatchPlan
    total_steps: int
    validation_features: FeatureSource
    validation_plan: BatchPlan | None
    """None when nothing is held out."""
    compute_dtype: torch.dtype
    """Of the features that the draft and the target's head read."""
    save_dtype: torch.dtype
    """Of the draft's weights on disk."""
    progress: Progress = field(default_factory=Progress)
    loggers: list[Logger] = field(default_factory=list)


def train(run: Run) -> None:
    """Trains from `run.progress` to the end; records, validates and saves on the way.

    Every process calls it with the same numbers.

    Raises:
        FloatingPointError: a gradient was not finite; nothing was saved after it.
    """
    loop = run.settings.train
    record = Record(run)
    run.model.train()
    with closing(training_windows(run)) as windows, record:
        for window in windows:
            learning_rate = loop.lr * share(
                run.settings.schedule, run.progress.step, run.total_steps
            )
            if isinstance(run.draft, FollowsProgress):
                run.draft.follow_progress(run.progress.step / run.total_steps)
            counts = [count(run, place, batch) for place, (_, batch) in enumerate(window)]
            normaliser = global_normaliser(run, window, counts)
            for place, (micro_batch, batch) in enumerate(window):
                is_last = place == len(window) - 1
                with strategy.accumulate(run.accelerator, run.model, is_last=is_last):
                    seed_draws(run, place)
                    output = forward(run, batch)
                    factor = run.accelerator.num_processes if micro_batch.counted else 0.0
                    loss = output.loss_sum * (factor / normaliser)
                    strategy.backward(run.accelerator, run.model, loss)
                record.add(output, batch, counts[place], counted=micro_batch.counted)
            grad_norm = strategy.optimizer_step(
                run.accelerator,
                run.model,
                run.optimizer,
                learning_rate=learning_rate,
                max_grad_norm=loop.max_grad_norm,
            )
            run.progress.step += 1
            record.end_of_step(grad_norm)
            if is_due(run, loop.log_every) or is_due(run, loop.save_every):
                record.write(learning_rate, grad_norm)
            with record.paused():
                if run.validation_plan is not None and is_due(run, loop.eval_every):
                    keep_best(run, record.write_validation(validate(run)))
                if is_due(run, loop.save_every):
                    save_checkpoint(
                        run.accelerator,
                        run.draft,
                        run.run_dir,
                        run.progress,
                        dtype=run.save_dtype,
                        keep_last=loop.keep_last,
                    )


def is_due(run: Run, every: int | None) -> bool:
    """True after every `every` steps, and always after the last one."""
    step = run.progress.step
    return step == run.total_steps or (every is not None and step % every == 0)


def seed_draws(run: Run, place: int) -> None:
    """Seeds what a draft draws for the micro-batch at `place` of this process's window.

    Its number within the run decides, so that anchors or noise depend neither on how micro-batches
    are split over processes nor on a stop and a resume.
    """
    plan = run.plan
    turn = run.progress.step * plan.accumulation + place
    number = turn * plan.world_size + run.accelerator.process_index
    torch.manual_seed((run.settings.train.seed + 1) * 1_000_003 + number)


def count(run: Run, place: int, batch: TrainBatch) -> Tensor:
    """What the loss of a micro-batch is divided by; a draft may draw here what it trains on."""
    seed_draws(run, place)
    counted: Tensor = run.draft.normaliser(batch)
    return counted


def forward(run: Run, batch: TrainBatch) -> TrainOutput:
    """The draft's training forward, in the precision of the run."""
    with strategy.autocast(run.accelerator, run.settings.train.precision):
        output = run.model(batch, target_head=run.target_head, objective=run.objective)
    assert isinstance(output, TrainOutput), "TrainableDraft.forward returns a TrainOutput"
    return output


def global_normaliser(run: Run, window: Window, counts: list[Tensor]) -> Tensor:
    """What the loss of this optimizer step is divided by: [] float64, over all processes.

    A step in which nothing is supervised has the loss 0 / 1, not 0 / 0.
    """
    counted = [count for count, (micro, _) in zip(counts, window, strict=True) if micro.counted]
    own = torch.stack(counted).sum() if counted else torch.zeros_like(counts[0])
    total = strategy.sum_over_ranks(run.accelerator, own)
    return torch.where(total > 0, total, torch.ones_like(total))


# --- rows -----------------------------------------------------------------------------------------


def count_steps(plan: BatchPlan, *, epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of a run."""
    if max_steps is not None:
        return max_steps
    return sum(plan.steps_in(len(plan.epoch(epoch))) for epoch in range(epochs))


def planned_windows(
    plan: BatchPlan, *, rank: int, first_step: int, end_step: int
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of process `rank` for the steps first_step .. end_step - 1 of a run."""
    epoch, epoch_start = 0, 0
    while epoch_start < end_step:
        batches = plan.epoch(epoch)
        epoch_end = epoch_start + plan.steps_in(len(batches))
        for step in range(max(first_step, epoch_start), min(end_step, epoch_end)):
            yield plan.step_batches(batches, step - epoch_start, rank)
        epoch, epoch_start = epoch + 1, epoch_end


def loaded_windows(
    run: Run, features: FeatureSource, windows: Iterator[list[MicroBatch]]
) -> Generator[Window, None, None]:
    """Reads windows ahead in a thread, completes them with states and moves them to the device."""
    flat = (
        (micro_batch, place == len(window) - 1)
        for window in windows
        for place, micro_batch in enumerate(window)
    )
    device = run.accelerator.device
    loaded: Window = []
    with closing(read_ahead(flat, lambda item: (*item, features.read(item[0].rows)))) as ahead:
        for micro_batch, is_last, batch in ahead:
            complete = features.complete(batch).to(device, run.compute_dtype)
            loaded.append((micro_batch, complete))
            if is_last:
                yield loaded
                loaded = []


def training_windows(run: Run) -> Generator[Window, None, None]:
    """What this process has still to work on."""
    planned = planned_windows(
        run.plan,
        rank=run.accelerator.process_index,
        first_step=run.progress.step,
        end_step=run.total_steps,
    )
    return loaded_windows(run, run.features, planned)


# --- validation -----------------------------------------------------------------------------------


@torch.no_grad()
def validate(run: Run) -> dict[str, Any]:
    """Metrics over the held-out rows, each counted once; the same on every process."""
    plan = run.validation_plan
    assert plan is not None, "the loop asks only when rows are held out"
    batches = plan.epoch(0)
    planned = (
        plan.step_batches(batches, step, run.accelerator.process_index)
        for step in range(plan.steps_in(len(batches)))
    )
    sums = Sums()
    run.model.eval()
    with closing(loaded_windows(run, run.validation_features, planned)) as windows:
        for window in windows:
            for micro_batch, batch in window:
                output, count = forward(run, batch), run.draft.normaliser(batch)
                sums.add(output, batch, count, counted=micro_batch.counted)
    run.model.train()
    return as_metrics(sums.reduced(run.accelerator), prefix="validation_")


def keep_best(run: Run, metrics: dict[str, Any]) -> None:
    """Saves the draft to RUN_DIR/best when it beats the best validation so far.

    Not where the target is trained too: accepted lengths for different targets do not compare, and
    an untrained target, which says the same everywhere, would be the easiest to draft for.
    """
    if isinstance(run.draft, TrainsTarget):
        return
    accepted_length = metrics["validation_simulated_accepted_length_greedy"]
    if not run.progress.is_better(accepted_length):
        return
    run.progress.best_step = run.progress.step
    run.progress.best_accepted_length = accepted_length
    save_consolidated(run, run.run_dir / BEST_FOLDER)


def save_consolidated(run: Run, folder: Path) -> None:
    """Writes the draft to a folder of its own (`save_models`); every process must call it."""
    weights = strategy.consolidated_weights(run.draft)
    if run.accelerator.is_main_process:
        save_models(run.draft, weights, folder, dtype=run.save_dtype)
    run.accelerator.wait_for_everyone()


# --- recording ------------------------------------------------------------------------------------


class Record:
    """Sums, times and their way to metrics.jsonl, the loggers and the screen."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._display = ProgressDisplay(
            run.total_steps, done=run.progress.step, is_shown=run.accelerator.is_main_process
        )
        self._sums = Sums()
        self._all_finite = torch.ones((), dtype=torch.bool, device=run.accelerator.device)
        self._first_step = run.progress.step
        self._warned = False
        self._last_written = run.progress.step
        self._seconds = 0.0
        self._seconds_at_write = 0.0
        self._resumed = time.perf_counter()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.finish()

    def add(self, output: TrainOutput, batch: TrainBatch, count: Tensor, *, counted: bool) -> None:
        """Takes in one micro-batch."""
        self._sums.add(output, batch, count, counted=counted)

    def end_of_step(self, grad_norm: Tensor) -> None:
        """Takes in one optimizer step. Nothing is read from the device here."""
        self._all_finite = self._all_finite & torch.isfinite(grad_norm)
        self._display.advance()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here is not training time."""
        self._seconds += time.perf_counter() - self._resumed
        try:
            yield
        finally:
            self._resumed = time.perf_counter()

    def write(self, learning_rate: float, grad_norm: Tensor) -> None:
        """Writes one row of metrics; every process must call it.

        Raises:
            FloatingPointError: a gradient since the last row was not finite.
        """
        run, step = self._run, self._run.progress.step
        if not bool(self._all_finite):
            raise FloatingPointError(
                f"A gradient between steps {self._last_written + 1} and {step} was not finite, and "
                "the weights with it. Go on from the last checkpoint (resume=auto) with a smaller "
                "train.lr, or with train.precision=fp32."
            )
        sums = self._sums.reduced(run.accelerator)
        with self.paused():
            run.progress.tokens += int(sums["tokens"])
            run.progress.supervised_tokens += int(sums["supervised_tokens"])
            seconds = self._seconds - self._seconds_at_write
            row = {
                "step": step,
                "tokens": run.progress.tokens,
                "supervised_tokens": run.progress.supervised_tokens,
                "learning_rate": learning_rate,
                "grad_norm": float(grad_norm),
                "tokens_per_second": float(sums["tokens"]) / max(seconds, 1e-9),
            } | as_metrics(sums)
            for logger in run.loggers:
                logger.log(row)
            if float(sums["sums.supervised"].sum()) > 0:
                self._warn_of_misses(row["in_draft_vocabulary"])
            per_step = self._seconds / (step - self._first_step)
            self._display.show(row, seconds_left=per_step * (run.total_steps - step))
            self._seconds_at_write, self._last_written = self._seconds, step

    def _warn_of_misses(self, in_vocabulary: float) -> None:
        """Says once that most of the target's own choices lie outside the draft vocabulary."""
        if in_vocabulary >= FEW_IN_VOCABULARY or self._warned:
            return
        self._warned = True
        self._display.say(
            f"WARNING: only {in_vocabulary:.0%} of the target's own choices are in the draft "
            "vocabulary; the others teach nothing and can never be drafted. Train on answers that "
            "this target wrote (draftsmith-regenerate), or raise method.draft_vocab_size."
        )

    def write_validation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Writes one row of validation metrics and hands it on."""
        row = {"step": self._run.progress.step} | metrics
        for logger in self._run.loggers:
            logger.log(row)
        self._display.say(as_validation_line(row))
        return row
