"""Checkpoints: whole or not there, resuming gives the numbers of never having stopped."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.append(str(Path(__file__).parent))

import train_support as support

from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import Progress
from draftsmith.train.strategy import require_whole

NOISY = support.LINEAR | {"noise": 0.5}
"""Draws random numbers in every forward, so that a lost random state would show."""


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


@pytest.fixture(scope="module")
def finished(inputs: support.Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps with a checkpoint after each third; tests copy it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    settings = support.compose(
        inputs,
        "train.max_steps=9",
        "train.save_every=3",
        "train.eval_every=3",
        "train.keep_last=3",
        method=NOISY,
    )
    support.run_in_process(settings, run_dir)
    return run_dir


def copy_run(finished: Path, tmp_path: Path, *, until: int) -> Path:
    """The run as it was right after step `until`."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > until:
            shutil.rmtree(folder)
    shutil.rmtree(run_dir / "draft")
    return run_dir


def test_three_and_six_steps_equal_nine_exactly(finished: Path, tmp_path: Path) -> None:
    # T15, T33: losses, learning rates, gradient norms and weights, bit for bit; the noise too.
    from draftsmith.train.worker import train_run_folder

    run_dir = copy_run(finished, tmp_path, until=3)
    train_run_folder(run_dir)
    timings = ("tokens_per_second",)
    whole, resumed = (
        [{k: v for k, v in row.items() if k not in timings} for row in support.read_metrics(folder)]
        for folder in (finished, run_dir)
    )
    assert [row for row in whole if "loss" in row] == [row for row in resumed if "loss" in row]
    assert whole == resumed
    before = load_file(finished / "draft" / "model.safetensors")
    after = load_file(run_dir / "draft" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_in_the_middle_of_a_later_epoch_goes_on_at_the_same_rows(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, "train.epochs=3", "train.save_every=17")
    whole = support.run_in_process(settings, tmp_path / "whole")
    run_dir = copy_run(tmp_path / "whole", tmp_path, until=17)
    assert support.losses(support.run_in_process(settings, run_dir)) == support.losses(whole)


def test_the_newest_whole_checkpoint_counts_by_its_number(finished: Path, tmp_path: Path) -> None:
    # T16: sorted by name, step-9 comes after step-10; step-20 is cut; step-30 never got its name.
    run_dir = tmp_path / "run"
    source = finished / "checkpoints" / "step-000009"
    for name in ("step-9", "step-10", "step-20", "step-30.tmp"):
        shutil.copytree(source, run_dir / "checkpoints" / name)
    cut = run_dir / "checkpoints" / "step-20" / "state" / "optimizer.bin"
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.warns(UserWarning, match="Passing over") as warned:
        newest = checkpoint.newest_checkpoint(run_dir)
    assert newest == run_dir / "checkpoints" / "step-10"
    texts = " ".join(str(entry.message) for entry in warned)
    assert "optimizer.bin has 100 bytes instead of" in texts
    assert "step-30.tmp" in texts


@pytest.mark.parametrize("damage", ["no marker", "empty marker", "missing file"])
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(
    damage: str, finished: Path, tmp_path: Path
) -> None:
    # T20
    run_dir = copy_run(finished, tmp_path, until=9)
    broken = run_dir / "checkpoints" / "step-000009"
    if damage == "no marker":
        (broken / "COMPLETE").unlink()
    elif damage == "empty marker":
        (broken / "COMPLETE").write_text("")
    else:
        (broken / "state" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="step-000009"):
        assert checkpoint.newest_checkpoint(run_dir) == run_dir / "checkpoints" / "step-000006"


def test_old_checkpoints_are_removed(inputs: support.Inputs, tmp_path: Path) -> None:
    settings = support.compose(
        inputs, "train.max_steps=5", "train.save_every=1", "train.keep_last=2"
    )
    support.run_in_process(settings, tmp_path)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000005"]


def test_the_best_validation_survives_a_resume(finished: Path, tmp_path: Path) -> None:
    # T17: a first worse validation after the resume must not count as the best.
    run_dir = copy_run(finished, tmp_path, until=3)
    folder = run_dir / "checkpoints" / "step-000003"
    path = folder / "progress.json"
    progress = json.loads(path.read_text()) | {"best_step": 2, "best_accepted_length": 3.0}
    path.write_text(json.dumps(progress))
    sizes = json.loads((folder / "COMPLETE").read_text())
    sizes["progress.json"] = path.stat().st_size
    (folder / "COMPLETE").write_text(json.dumps(sizes))
    shutil.rmtree(run_dir / "best")
    from draftsmith.train.worker import train_run_folder

    train_run_folder(run_dir)
    last = json.loads((run_dir / "checkpoints" / "step-000009" / "progress.json").read_text())
    assert (last["best_step"], last["best_accepted_length"]) == (2, 3.0)
    assert not (run_dir / "best").exists()


def test_the_best_draft_is_that_of_the_best_validation(finished: Path) -> None:
    rows = support.read_metrics(finished)
    name = "validation_simulated_accepted_length_greedy"
    values = {row["step"]: row[name] for row in rows if name in row}
    progress = json.loads((finished / "checkpoints" / "step-000009" / "progress.json").read_text())
    assert progress["best_accepted_length"] == max(values.values())
    assert values[progress["best_step"]] == max(values.values())
    assert (finished / "best" / "model.safetensors").is_file()


def test_a_run_resumed_with_other_micro_batches_is_refused(
    inputs: support.Inputs, finished: Path, tmp_path: Path
) -> None:
    run_dir = copy_run(finished, tmp_path, until=3)
    settings = support.compose(inputs, "train.batch_tokens=300", "train.max_steps=9", method=NOISY)
    with pytest.raises(ValueError, match=r"other micro-batches.*init_from="):
        support.run_in_process(settings, run_dir)


def test_deepspeed_shards_of_another_world_size_are_refused_naming_both() -> None:
    # T19
    found = Progress(step=5, world_size=2, launch="zero2", plan_digest="a")
    for now in (
        Progress(world_size=4, launch="zero2", plan_digest="a"),
        Progress(world_size=1, launch="single", plan_digest="a"),
    ):
        with pytest.raises(ValueError, match=r"written by 2 process.*this run has [14]"):
            checkpoint.check_resumable(found, now, Path("step-5"))
    checkpoint.check_resumable(
        found, Progress(world_size=2, launch="zero2", plan_digest="a"), Path()
    )


def test_a_changed_number_of_ddp_processes_with_the_same_step_is_allowed() -> None:
    found = Progress(step=5, world_size=2, launch="ddp", plan_digest="a")
    checkpoint.check_resumable(
        found, Progress(world_size=1, launch="single", plan_digest="a"), Path()
    )


def test_resume_from_a_path_starts_a_new_folder_from_that_state(
    inputs: support.Inputs, finished: Path, tmp_path: Path
) -> None:
    source = finished / "checkpoints" / "step-000006"
    settings = support.compose(
        inputs,
        f"resume={source}",
        "train.max_steps=9",
        "train.save_every=3",
        "train.eval_every=3",
        method=NOISY,
    )
    rows = support.run_in_process(settings, tmp_path / "new")
    expected = [loss for row, loss in enumerate(support.losses(support.read_metrics(finished)))]
    assert support.losses(rows) == expected[6:]


def test_resume_from_a_folder_without_checkpoints_is_refused(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, f"resume={tmp_path}")
    with pytest.raises(ValueError, match="No whole checkpoint"):
        support.run_in_process(settings, tmp_path / "run")


def test_an_empty_or_missing_tensor_stops_the_save() -> None:
    # T18
    draft = nn.Linear(3, 2)
    weights = draft.state_dict()
    require_whole(weights, draft)
    with pytest.raises(ValueError, match=r"empty tensors \['weight'\].*nothing was written"):
        require_whole(weights | {"weight": torch.zeros(0)}, draft)
    with pytest.raises(ValueError, match=r"missing tensors \['bias'\]"):
        require_whole({"weight": weights["weight"]}, draft)


def test_replacing_a_folder_leaves_the_old_one_when_writing_fails(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    checkpoint.replace_folder(folder, lambda aside: write_note(aside, "first"))

    def fail(aside: Path) -> None:
        write_note(aside, "second")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.replace_folder(folder, fail)
    assert (folder / "note").read_text() == "first"
    checkpoint.replace_folder(folder, lambda aside: write_note(aside, "third"))
    assert (folder / "note").read_text() == "third"
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]


def write_note(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "note").write_text(text)


def test_metrics_written_after_the_checkpoint_are_not_doubled(
    finished: Path, tmp_path: Path
) -> None:
    from draftsmith.train.loggers import MetricsFile

    shutil.copy(finished / "metrics.jsonl", tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.')  # killed while writing
    logger = MetricsFile(tmp_path, resumed_step=6)
    logger.log({"step": 7, "loss": 1.0})
    logger.finish()
    steps = [row["step"] for row in support.read_metrics(tmp_path) if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
