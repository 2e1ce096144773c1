"""The processes of one run, as accelerate or torchrun started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import PartialState

BARRIER_TIMEOUT = timedelta(days=7)
"""A resumed run may leave one process with hours of work while the others wait."""


def join_processes(device: str) -> tuple[PartialState, str]:
    """Joins the processes that accelerate or torchrun started and picks this one's device.

    Args:
        device: target.device of the settings.

    Returns:
        The process state and the device of this process.

    Raises:
        ValueError: the launcher promised more processes than run, or all would share one device.
    """
    from accelerate import PartialState

    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    promised = int(os.environ.get("WORLD_SIZE", "1"))
    extra = {"timeout": BARRIER_TIMEOUT} if promised > 1 else {}
    state = PartialState(cpu=on_cpu, **extra)
    if state.num_processes != promised:
        raise ValueError(
            f"The launcher set WORLD_SIZE={promised}, but {state.num_processes} process takes "
            "part. Start with torchrun --nproc_per_node N -m draftsmith.data.capture ... (on CPUs "
            "accelerate launch --cpu starts one process only)."
        )
    if on_cpu:
        return state, "cpu"
    if state.num_processes > 1 and device not in ("auto", "cuda"):
        raise ValueError(
            f"target.device={device} with {state.num_processes} processes puts all of them on one "
            "device. Use target.device=auto."
        )
    return state, f"cuda:{state.local_process_index}" if device in ("auto", "cuda") else device


def on_main_process(state: PartialState, action: Callable[[], None]) -> None:
    """Runs `action` in the main process while the others wait; if it fails, all of them end.

    Whatever `action` raises, the main process raises. The others leave with exit code 2 and no
    message of their own: the trace of a broken barrier would bury the one that helps.
    """
    from accelerate.utils import broadcast_object_list

    failed = [state.is_main_process]
    try:
        if state.is_main_process:
            action()
            failed = [False]
    finally:
        if state.num_processes > 1:
            broadcast_object_list(failed)
    if failed[0]:
        raise SystemExit(2)
