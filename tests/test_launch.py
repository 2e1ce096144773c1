"""Processes and run folders: what is started, what is refused, what several processes agree on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

sys.path.append(str(Path(__file__).parent))

import train_support as support

from draftsmith.train import launch, strategy
from draftsmith.train.__main__ import flags_first
from draftsmith.train.config import LaunchConfig, TrainConfig

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_MIXED_PRECISION",
)


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def settings_with(**launch_settings: object) -> TrainConfig:
    settings = support.compose_settings(
        "train", support.SCHEMA, ["target.name_or_path=t", "features.cache=c"]
    )
    settings.launch = LaunchConfig(**launch_settings)  # type: ignore[arg-type]
    return settings


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--multirun", "train.lr=1,2"], ["-m"], ["sweep=lr"], ["hydra.mode=MULTIRUN"]]
)
def test_a_sweep_under_a_launcher_is_refused_with_the_way_out(
    words: list[str], no_launcher: pytest.MonkeyPatch
) -> None:
    # T27
    launch.check_launcher(words)
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"drop torchrun / accelerate launch and set launch="):
        launch.check_launcher(words)
    launch.check_launcher(["recipe=eagle3_quickstart", "sweep=null"])


def test_accelerate_that_started_one_process_of_several_is_refused(
    no_launcher: pytest.MonkeyPatch,
) -> None:
    # T32: what `accelerate launch --cpu --num_processes 2` leaves in the environment.
    no_launcher.setenv("ACCELERATE_MIXED_PRECISION", "no")
    launch.check_launcher([])  # with --num_processes 1
    no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match=r"started one.*torchrun --nproc_per_node 2"):
        launch.check_launcher([])
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    launch.check_launcher([])


class FakeAccelerator:
    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes


def test_fewer_processes_than_asked_for_are_refused(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    check = strategy.require_world_size
    check(FakeAccelerator(2), LaunchConfig(name="ddp"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1 process.*launcher started 2"):
        check(FakeAccelerator(1), LaunchConfig(name="ddp"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"launch\.num_processes asks for 4.*nproc_per_node 4"):
        check(FakeAccelerator(2), LaunchConfig(name="ddp", num_processes=4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"launch=single runs one process, but 2"):
        check(FakeAccelerator(2), LaunchConfig())  # type: ignore[arg-type]


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    model = nn.Linear(2, 2)
    strategy.require_wrapped(FakeAccelerator(1), model, LaunchConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradients would not be averaged"):
        strategy.require_wrapped(FakeAccelerator(2), model, LaunchConfig(name="ddp"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DeepSpeed was left out"):
        strategy.require_wrapped(FakeAccelerator(2), model, LaunchConfig(name="zero2"))  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_a_strategy_that_only_accelerate_knows_of_is_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag, "true")
    with pytest.raises(ValueError, match=r"accelerate was told to use .*launch=ddp does not"):
        strategy.make_accelerator(settings_with(name="ddp"))


def test_several_processes_on_the_cpu_need_their_number() -> None:
    with pytest.raises(ValueError, match=r"launch=ddp on the CPU needs launch\.num_processes"):
        launch.resolve_num_processes(LaunchConfig(name="ddp", device="cpu"))
    assert launch.resolve_num_processes(LaunchConfig()) == 1


# --- the run folder -------------------------------------------------------------------------------


def test_two_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    # T25
    launch.claim_run_folder(tmp_path / "run", may_be_there=False)
    with pytest.raises(ValueError, match="exists already.*resume=auto"):
        launch.claim_run_folder(tmp_path / "run", may_be_there=False)
    launch.claim_run_folder(tmp_path / "run", may_be_there=True)
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ValueError, match="holds another run"):
        launch.claim_run_folder(tmp_path / "run", may_be_there=True)


def test_a_run_folder_is_named_by_time_and_method() -> None:
    chosen = launch.choose_run_folder(settings_with())
    assert chosen.parent == Path("runs/train")
    assert chosen.name.endswith("-eagle3")
    assert launch.choose_run_folder(settings_with(), "sweep/3") == Path("sweep/3")


# --- what is started ------------------------------------------------------------------------------


def test_children_share_the_cores_and_get_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    settings = settings_with(name="zero2", num_processes=2, device="cpu")
    environment = launch.child_environment(settings)
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "MASTER_PORT" not in environment
    assert "ACCELERATE_USE_CPU" not in environment
    command = launch.child_command(settings, Path("run"))
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    assert command[-2:] == ["draftsmith.train.worker", "run"]


def test_flags_are_moved_to_where_hydra_takes_them() -> None:
    words = ["recipe=a", "--multirun", "train.lr=1,2"]
    assert flags_first(words) == ["--multirun", "recipe=a", "train.lr=1,2"]
    assert flags_first(["recipe=a"]) == ["recipe=a"]


def test_two_ddp_processes_take_the_steps_of_one_and_leave_one_folder(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    # T01, T24: 2 x 1 equals 1 x 2, also over two epochs with an odd number of micro-batches.
    # A deepspeed that cannot be imported stands in the way: only launch=zero2 may touch it.
    blocked = tmp_path / "blocked" / "deepspeed"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise RuntimeError('deepspeed was imported')\n")
    path = os.pathsep.join([str(blocked.parent), str(support.TESTS_FOLDER)])
    common = ["train.epochs=2", "train.eval_every=4", "train.micro_batch_size=4"]
    settings = support.compose(inputs, "train.gradient_accumulation=2", *common)
    single = support.run_in_process(settings, tmp_path / "single")
    words = ["launch=ddp", "launch.num_processes=2", *common]
    command = support.train_command(tmp_path, inputs, *words)
    done = support.run_command(command, tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "2 process(es) on cpu, launch=ddp" in done.stdout
    (run_dir,) = (tmp_path / "runs" / "train").iterdir()
    compare_runs(single, support.read_metrics(run_dir))
    assert (run_dir / "draft" / "model.safetensors").is_file()
    assert not list(tmp_path.glob("*.log"))


def compare_runs(
    first: list[dict[str, object]], second: list[dict[str, object]], *, tolerance: float = 1e-5
) -> None:
    """Same rows and numbers in both, timings aside."""
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"tokens_per_second"}:
            assert one[key] == pytest.approx(other[key], abs=tolerance), (one["step"], key)


def test_a_sweep_under_torchrun_leaves_nothing_behind(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    words = support.train_command(tmp_path, inputs, "--multirun", "train.lr=1e-3,2e-3")
    done = support.run_command(words, tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "A sweep starts its own processes" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_accelerate_launch_with_cpu_is_told_what_works(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    # T32, with the real launcher.
    words = support.train_command(tmp_path, inputs, "launch=ddp", "launch.num_processes=2")
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    done = support.run_command([*accelerate, "--num_processes", "2", *words[2:]], tmp_path)
    assert done.returncode != 0
    assert "accelerate launch was asked for several processes, but it started one" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_accelerate_launch_shares_one_folder(inputs: support.Inputs, tmp_path: Path) -> None:
    words = support.train_command(tmp_path, inputs, "launch=ddp", "train.max_steps=3")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launcher += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launcher += ["--dynamo_backend", "no"]
    done = support.run_command([*launcher, *words[2:]], tmp_path, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs" / "train").iterdir()
    assert len(support.losses(support.read_metrics(run_dir))) == 3


@pytest.mark.slow
def test_torchrun_with_another_number_than_the_settings_is_refused(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    words = support.train_command(tmp_path, inputs, "launch=ddp", "launch.num_processes=3")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = support.run_command([*launcher, "--nproc_per_node", "2", *words[2:]], tmp_path)
    assert done.returncode != 0
    assert "launch.num_processes asks for 3" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_sweep_of_two_process_jobs_leaves_a_folder_per_job(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    words = ["--multirun", "train.lr=1e-3,2e-3", "launch=ddp", "launch.num_processes=2"]
    words.append("train.max_steps=2")
    done = support.run_command(support.train_command(tmp_path, inputs, *words), tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    rates = {}
    for job in ("0", "1"):
        rows = support.read_metrics(sweep / job)
        rates[job] = max(row["learning_rate"] for row in rows if "loss" in row)
        assert (sweep / job / "draft" / "model.safetensors").is_file()
    assert rates == {"0": pytest.approx(1e-3), "1": pytest.approx(2e-3)}


@pytest.mark.slow
def test_a_failing_job_does_not_keep_the_next_one_of_a_sweep_from_running(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    words = ["--multirun", "train.batch_tokens=8,256", "train.max_steps=1"]
    done = support.run_command(support.train_command(tmp_path, inputs, *words), tmp_path)
    assert done.returncode == 2
    assert "train.batch_tokens=8" in done.stderr
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert not (sweep / "0" / "draft").exists()
    assert (sweep / "1" / "draft" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero2_takes_the_steps_of_one_process_and_resumes(
    precision: str, inputs: support.Inputs, tmp_path: Path
) -> None:
    common = ["train.max_steps=6", "train.save_every=3", "train.micro_batch_size=4"]
    common += ["train.eval_every=3", f"train.precision={precision}"]
    settings = support.compose(inputs, "train.gradient_accumulation=4", *common)
    single = support.run_in_process(settings, tmp_path / "single")
    words = [*common, "train.gradient_accumulation=2", "launch=zero2", "launch.num_processes=2"]
    run_dir = tmp_path / "zero"
    command = support.train_command(tmp_path, inputs, *words, f"run_dir={run_dir}")
    done = support.run_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    found = support.read_metrics(run_dir)
    if precision == "fp32":
        compare_runs(single, found)
    else:
        # bf16 weights against autocast over float32 ones: the same run, rounded differently.
        assert support.losses(found) == pytest.approx(support.losses(single), rel=0.02)
    for folder in sorted((run_dir / "checkpoints").iterdir())[1:]:
        (folder / "COMPLETE").unlink()
    done = support.run_command([*command, "resume=auto"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Going on from" in done.stdout
    compare_runs(found, support.read_metrics(run_dir), tolerance=1e-6)
    done = support.run_command([*command, "resume=auto", "launch.num_processes=1"], tmp_path)
    assert done.returncode != 0
    assert "written by 2 process(es) with launch=zero2, this run has 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(
    number: signal.Signals, inputs: support.Inputs, tmp_path: Path
) -> None:
    words = ["launch=ddp", "launch.num_processes=2", "train.max_steps=1000000"]
    command = support.train_command(tmp_path, inputs, *words)
    log = (tmp_path / "log").open("w")
    parent = subprocess.Popen(
        command, cwd=tmp_path, env=support.environment(), stdout=log, stderr=log
    )
    metrics = tmp_path / "runs" / "train"
    deadline = time.monotonic() + 120
    while not list(metrics.glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    children = descendants(parent.pid)
    assert len(children) >= 3, "torchrun and two workers"
    parent.send_signal(number)
    parent.wait(timeout=60)
    deadline = time.monotonic() + 60
    while any(is_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [child for child in children if is_running(child)]


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
