"""Checkpoints that are whole or not there, and the draft folder that everything else reads.

    RUN_DIR/checkpoints/step-000100/
        draft/         the draft model, consolidated, in the form of save_pretrained
        model/         the target in that form, where it was trained together with the draft
        state/         weights, optimizer and random states as the processes hold them
        progress.json  steps, tokens, best validation, and what the position depends on
        COMPLETE       written last: every file of the checkpoint with its size

A checkpoint is written under another name and renamed when it is whole. The learning rate is a
function of the step (train/schedules.py) and the order of the rows one of (seed, epoch)
(train/batch_plan.py), so the step number is all their state.

On resume the newest *whole* checkpoint counts, by its number, not by name or time; anything else is
passed over with a warning that names it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.train.strategy import consolidated_weights

COMPLETE = "COMPLETE"
PROGRESS = "progress.json"
STEP_NAME = re.compile(r"step-(\d+)")


@dataclass
class Progress:
    """Where a run stands. Written with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, all processes together, repeats in later epochs included."""
    supervised_tokens: int = 0
    """Those of them that the target wrote."""
    best_step: int | None = None
    """Step of the best validation so far."""
    best_accepted_length: float | None = None
    """Its simulated accepted length, greedy."""
    world_size: int = 1
    """Processes that wrote this."""
    launch: str = "single"
    """Strategy that wrote this."""
    plan_digest: str = ""
    """Digest of the batch plan (train/batch_plan.py): the step is a position in it."""

    def is_better(self, accepted_length: float) -> bool:
        """True when a validation result beats the best one so far."""
        return self.best_accepted_length is None or accepted_length > self.best_accepted_length


def step_folder(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


# --- reading --------------------------------------------------------------------------------------


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint folder is not whole; None when it is."""
    marker = folder / COMPLETE
    if not marker.is_file():
        return f"it has no {COMPLETE} file, so writing it was broken off"
    try:
        sizes: dict[str, int] = json.loads(marker.read_text())
    except ValueError:
        return f"its {COMPLETE} file is damaged"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint with the highest step; broken ones are warned about and passed over."""
    found: list[tuple[int, Path]] = []
    for folder in sorted((run_dir / "checkpoints").glob("*")):
        name = STEP_NAME.fullmatch(folder.name)
        if name is None:
            warnings.warn(f"Passing over {folder}: its writing was broken off.", stacklevel=2)
        elif problem := problem_of(folder):
            warnings.warn(f"Passing over the checkpoint {folder}: {problem}.", stacklevel=2)
        else:
            found.append((int(name.group(1)), folder))
    return max(found)[1] if found else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `resume=PATH` means: a checkpoint folder, or the newest one of a run.

    Raises:
        ValueError: there is none, or the one named is broken.
    """
    if (path / PROGRESS).is_file():
        if problem := problem_of(path):
            raise ValueError(f"The checkpoint {path} cannot be used: {problem}. Give another one.")
        return path
    newest = newest_checkpoint(path)
    if newest is None:
        raise ValueError(
            f"No whole checkpoint in {path}: give a run folder with checkpoints/step-..., or one "
            "of those folders."
        )
    return newest


def read_progress(folder: Path) -> Progress:
    """Reads progress.json of a checkpoint.

    Raises:
        ValueError: it was written by another version of draftsmith.
    """
    entries = json.loads((folder / PROGRESS).read_text())
    names = {entry.name for entry in fields(Progress)}
    if set(entries) != names:
        raise ValueError(
            f"{folder / PROGRESS} has the fields {sorted(entries)}, expected {sorted(names)}: it "
            "was written by another version of draftsmith. Go on with that version."
        )
    return Progress(**entries)


def check_resumable(found: Progress, now: Progress, folder: Path) -> None:
    """Refuses to go on where the position or the optimizer's shards would not fit.

    Args:
        found: of the checkpoint.
        now: of this run: world_size, launch and plan_digest.
        folder: the checkpoint, for the message.

    Raises:
        ValueError: naming both sides and what to set.
    """
    sharded = "zero2" in (found.launch, now.launch)
    if sharded and (found.world_size, found.launch) != (now.world_size, now.launch):
        raise ValueError(
            f"{folder} was written by {found.world_size} process(es) with launch={found.launch}, "
            f"this run has {now.world_size} with launch={now.launch}: DeepSpeed's optimizer shards "
            f"do not fit. Use launch={found.launch} launch.num_processes={found.world_size}, or "
            f"start anew from its weights: init_from={folder / 'draft'}."
        )
    if found.plan_digest != now.plan_digest:
        raise ValueError(
            f"{folder} stands at step {found.step} of other micro-batches: the data, the seed, "
            "max_length, batch_tokens, micro_batch_size or processes x gradient_accumulation "
            f"differ (it was written by {found.world_size} process(es)). Set them as they were, or "
            f"start anew from its weights: init_from={folder / 'draft'}."
        )


def restore(accelerator: Accelerator, folder: Path) -> None:
    """Loads weights, optimizer and random states; every process must call it."""
    accelerator.load_state(str(folder / "state"))


# --- writing --------------------------------------------------------------------------------------


@runtime_checkable
class HasSavedForm(Protocol):
    """A draft that stands on disk in another form than its own (an ordinary language model)."""

    def saved_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The configuration to write (architectures set), and the tensors under their names there.

        Args:
            weights: all tensors of the draft under its own names, consolidated.
        """

    def save_beside(self, folder: Path) -> None:
        """Writes what belongs beside the weights (a tokenizer)."""


@runtime_checkable
class TrainsTarget(Protocol):
    """A draft that is trained together with its target, so that both are saved."""

    draft_part: nn.Module
    """The draft model alone; init_from starts its weights."""

    def target_form(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The target's configuration and tensors, as `HasSavedForm.saved_form` does the draft's."""

    def save_beside_target(self, folder: Path) -> None:
        """Writes what belongs beside the target's weights (a tokenizer)."""

    def note_target(self, folder: Path, *, name: str) -> None:
        """Takes down, for the draft's configuration, which target has just been written.

        Args:
            folder: where it is now.
            name: where it will stand.
        """


def target_folder(folder: Path) -> Path:
    """Where the target goes that was trained with the draft in `folder`: model beside draft,
    NAME_model beside any other NAME."""
    return folder.with_name("model" if folder.name == "draft" else f"{folder.name}_model")


def save_models(
    draft: Any,
    weights: dict[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    later: Path | None = None,
) -> None:
    """Writes the draft to a folder of its own, in one move, and before it the target where that was
    trained too; main process only.

    Args:
        draft, weights, folder, dtype: as of `save_draft`.
        later: the name that the folder will have, if another.
    """
    if isinstance(draft, TrainsTarget):
        config, tensors = draft.target_form(weights)

        def write_target(aside: Path) -> None:
            _write_model(config, tensors, aside, dtype=dtype)
            draft.save_beside_target(aside)

        replace_folder(target_folder(folder), write_target)
        draft.note_target(target_folder(folder), name=str(target_folder(later or folder)))
    replace_folder(folder, lambda aside: save_draft(draft, weights, aside, dtype=dtype))


def save_draft(draft: Any, weights: dict[str, Tensor], folder: Path, *, dtype: torch.dtype) -> None:
    """Writes the files that `save_pretrained` writes, floats in `dtype`; main process only.

    Not by `save_pretrained` itself: that imports DeepSpeed wherever it is installed, which costs
    seconds and, without a CUDA compiler, would fail after the training is done.

    Args:
        draft: the unwrapped draft model: a transformers PreTrainedModel, or a `HasSavedForm`.
        weights: all of its tensors, consolidated.
        folder: where to write.
        dtype: of the float tensors on disk; vocabulary maps keep theirs.
    """
    if isinstance(draft, HasSavedForm):
        config, weights = draft.saved_form(weights)
    else:
        config = copy.deepcopy(draft.config)
        config.architectures = [type(draft).__name__]
    _write_model(config, weights, folder, dtype=dtype)
    if isinstance(draft, HasSavedForm):
        draft.save_beside(folder)


def _write_model(
    config: Any, tensors: dict[str, Tensor], folder: Path, *, dtype: torch.dtype
) -> None:
    """Writes a configuration and tensors as `save_pretrained` would."""
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype  # of the file; the weights in memory are float32 masters
    config.save_pretrained(folder)
    cast = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    # The format refuses tensors that share memory, and views of a larger one.
    whole = {name: tensor.contiguous().clone() for name, tensor in cast.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder aside, then puts it in the place of an older one."""
    aside = folder.with_name(f"{folder.name}.tmp")
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    write(aside)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_checkpoint(
    accelerator: Accelerator,
    draft: nn.Module,
    run_dir: Path,
    progress: Progress,
    *,
    dtype: torch.dtype,
    keep_last: int,
) -> Path:
    """Writes the checkpoint of `progress.step`; every process must call it.

    Returns:
        Its folder.
    """
    folder = step_folder(run_dir, progress.step)
    aside = folder.with_name(f"{folder.name}.tmp")
    weights = consolidated_weights(draft)
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside / "state"))
    # Without this wait the marker could list files that another process is still writing.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save_models(draft, weights, aside / "draft", dtype=dtype, later=folder / "draft")
        (aside / PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n")
        _mark_complete(aside)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed from before it
        aside.rename(folder)
        _remove_old(run_dir, keep_last)
    accelerator.wait_for_everyone()
    return folder


def _mark_complete(folder: Path) -> None:
    """Forces all files to disk, then lists them: the list must not outlive what it lists."""
    sizes: dict[str, int] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    with (folder / COMPLETE).open("w", encoding="utf-8") as stream:
        json.dump(sizes, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())


def _remove_old(run_dir: Path, keep_last: int) -> None:
    """Keeps the newest `keep_last` whole checkpoints; broken ones are left for a person to see."""
    whole: list[tuple[int, Path]] = []
    for folder in (run_dir / "checkpoints").iterdir():
        name = STEP_NAME.fullmatch(folder.name)
        if name is not None and problem_of(folder) is None:
            whole.append((int(name.group(1)), folder))
    for _, folder in sorted(whole)[:-keep_last]:
        # Without its marker a half-deleted folder is never taken for a checkpoint.
        (folder / COMPLETE).unlink()
        shutil.rmtree(folder)
