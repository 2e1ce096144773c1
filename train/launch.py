"""The processes of a run: the folder they share, how they are started, how they end.

Hydra composes in one parent, the parent starts the ranks, and the ranks read a file. This module is
the parent's half and imports no torch. What a launcher (torchrun, accelerate launch) has set up in
the environment is read here too, because a run may be started under one.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from draftsmith.train.config import CONFIG_FILE, LaunchConfig, TrainConfig, method_name

WORKER_MODULE = "draftsmith.train.worker"
SECONDS_TO_END = 30.0
"""How long children get to end by themselves before they are killed. Our choice."""


class ProcessesFailedError(RuntimeError):
    """The child processes of a run ended with an error; they have printed it themselves."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# --- what a launcher has set up -------------------------------------------------------------------


def launched_world_size() -> int | None:
    """Processes that torchrun or accelerate launch started together; None without a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """This process's number among those of the launcher; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuses start-ups that would go wrong in silence, before Hydra has made anything.

    Args:
        arguments: the command line without the program's name.

    Raises:
        ValueError: a sweep under a launcher (every rank would run its own sweep), or accelerate
            launch having started one process where several were asked for.
    """
    several = (launched_world_size() or 1) > 1
    if launched_world_size() is not None and is_sweep(arguments):
        raise ValueError(
            "A sweep starts its own processes: drop torchrun / accelerate launch and set launch=, "
            "for example: draftsmith-train --multirun launch=ddp launch.num_processes="
            f"{max(launched_world_size() or 1, 2)} train.lr=1e-4,2e-4"
        )
    # accelerate sets the address of a process group only when it was asked for several processes,
    # and RANK only when it really starts them. With --cpu it starts one and says nothing.
    asked_for_several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if asked_for_several and launched_world_size() is None:
        raise ValueError(
            "accelerate launch was asked for several processes, but it started one: with --cpu it "
            "never starts more. Use: draftsmith-train launch=ddp launch.device=cpu "
            "launch.num_processes=2 ... , or: torchrun --nproc_per_node 2 -m draftsmith.train "
            "launch=ddp launch.device=cpu ..."
        )
    if several and any(argument.startswith("--local_rank") for argument in arguments):
        raise ValueError(
            "The launcher adds --local_rank, as old ones do. Start with torchrun or accelerate "
            "launch, which use the environment instead."
        )


def is_sweep(arguments: Sequence[str]) -> bool:
    """True when a command line asks for several jobs."""
    flags = {"-m", "--multirun"}
    presets = ("sweep=", "+sweep=", "hydra.mode=MULTIRUN")
    return any(
        argument in flags
        or (argument.startswith(presets) and argument.partition("=")[2] not in ("", "null"))
        for argument in arguments
    )


# --- the run folder -------------------------------------------------------------------------------


def choose_run_folder(settings: TrainConfig, sweep_folder: str | None = None) -> Path:
    """The folder of a run: the sweep's, the one asked for, or runs/train/TIME-METHOD."""
    if sweep_folder is not None:
        return Path(sweep_folder)
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    moment = time.strftime("%Y-%m-%d_%H-%M-%S")
    return Path("runs") / "train" / f"{moment}-{method_name(settings.method)}"


def claim_run_folder(run_dir: Path, *, may_be_there: bool) -> None:
    """Makes the folder, or refuses one that belongs to another run.

    Args:
        run_dir: the folder.
        may_be_there: Hydra made it for this job of a sweep. The exclusive creation of config.yaml
            then tells two sweeps of the same second apart.

    Raises:
        ValueError: another run has this folder.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=may_be_there)
    except FileExistsError as error:
        raise ValueError(
            f"The run folder {run_dir} exists already. Give another run_dir, delete it, or add "
            "resume=auto to go on with the run in it."
        ) from error
    if (run_dir / CONFIG_FILE).exists():
        raise ValueError(
            f"The run folder {run_dir} holds another run (two sweeps of the same second). Start "
            "this one again, or set hydra.sweep.dir."
        )


def write_provenance(run_dir: Path, command: Sequence[str]) -> None:
    """Adds this start to command.txt: when, where and with which words."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with (run_dir / "command.txt").open("a", encoding="utf-8") as file:
        file.write(f"# {moment} in {Path.cwd()}\n{shlex.join(command)}\n")


# --- starting and ending --------------------------------------------------------------------------


def cuda_devices() -> int:
    """CUDA devices of this machine. The only place of the parent that asks torch."""
    import torch

    return torch.cuda.device_count()


def resolve_device(device: str) -> str:
    """auto to cuda (when there is one) or cpu.

    Raises:
        ValueError: cuda was asked for and there is none.
    """
    if device == "cpu":
        return "cpu"
    count = cuda_devices()
    if device == "cuda" and count == 0:
        raise ValueError(
            "launch.device is cuda, but torch sees no CUDA device. Use launch.device=cpu."
        )
    return "cuda" if count else "cpu"


def resolve_num_processes(launch: LaunchConfig) -> int:
    """How many processes to start.

    Raises:
        ValueError: it was left open on the CPU, or exceeds the GPUs there are.
    """
    if launch.name == "single":
        return 1
    if resolve_device(launch.device) == "cpu":
        if launch.num_processes is None:
            raise ValueError(
                f"launch={launch.name} on the CPU needs launch.num_processes, for example "
                "launch.num_processes=2."
            )
        return launch.num_processes
    devices = cuda_devices()
    if launch.num_processes is not None and launch.num_processes > devices:
        raise ValueError(
            f"launch.num_processes is {launch.num_processes}, but there are {devices} GPU(s). Set "
            f"launch.num_processes={devices}, or null for all of them."
        )
    return launch.num_processes or devices


def child_command(settings: TrainConfig, run_dir: Path) -> list[str]:
    """The command line that trains `run_dir` in processes of its own."""
    worker = ["-m", WORKER_MODULE, str(run_dir)]
    if settings.launch.name == "single":
        return [sys.executable, *worker]
    count = resolve_num_processes(settings.launch)
    # --standalone takes a free port of its own, so two runs on one machine never meet.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return [sys.executable, *launcher, *worker]


def child_environment(settings: TrainConfig) -> dict[str, str]:
    """The parent's environment, with the cores shared out and no leftovers of a launcher."""
    leftovers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in leftovers}
    if settings.launch.name != "single":
        # Two processes with a thread per core each make each other many times slower.
        processes = resolve_num_processes(settings.launch)
        threads = settings.train.num_threads or max(1, (os.cpu_count() or 1) // processes)
        environment["OMP_NUM_THREADS"] = str(threads)
    elif settings.train.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.train.num_threads)
    if settings.launch.name == "zero2":
        # With this flag accelerate would drop DeepSpeed in silence.
        environment.pop("ACCELERATE_USE_CPU", None)
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        # `-m` puts the working folder first; in a checkout its data/ and eval/ would shadow others.
        environment["PYTHONSAFEPATH"] = "1"
    return environment


def end_with_parent() -> None:
    """Asks Linux to end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)


def run_children(settings: TrainConfig, run_dir: Path) -> None:
    """Starts the processes of a run and waits for them.

    Ctrl-C and SIGTERM are passed on; when this process is killed outright, Linux ends the children.

    Raises:
        ProcessesFailedError: they ended with an exit code other than 0.
    """
    command = child_command(settings, run_dir)
    sys.stderr.write(f"draftsmith: starting {shlex.join(command)}\n")
    child = subprocess.Popen(
        command,
        env=child_environment(settings),
        preexec_fn=end_with_parent,
        start_new_session=True,
    )
    code = wait_for(child)
    if code != 0:
        raise ProcessesFailedError(
            f"The training processes of {run_dir} ended with exit code {code}; their own message "
            f"stands above. After mending it, go on with: draftsmith-train ... run_dir={run_dir} "
            "resume=auto",
            code,
        )


def wait_for(child: subprocess.Popen[Any]) -> int:
    """Waits for a child, passing SIGINT and SIGTERM on to it.

    Returns:
        Its exit code; 128 + signal number when a signal ended it.
    """

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # torchrun ends its workers on SIGTERM; a second signal while it does would break that off.
        child.terminate()
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    except KeyboardInterrupt as interruption:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        _end(child)
        raise SystemExit(128 + signal.Signals[str(interruption)]) from interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[Any]) -> None:
    try:
        child.wait(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # start_new_session made the child a group leader
        child.wait()
