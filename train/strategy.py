"""Accelerate, DDP and DeepSpeed behind six small functions, and the checks that they really run.

Each of these set-ups can fail in silence: accelerate starts one process where two were asked for,
or leaves the model unwrapped so that every rank trains on its own. `require_wrapped` stops such a
run before its first step. DeepSpeed is imported only for launch=zero2.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from torch import Tensor, nn

from draftsmith.train.config import LaunchConfig, LoopConfig, TrainConfig
from draftsmith.train.launch import launched_world_size, resolve_device

WORKING_COMMANDS = (
    "Start it with: draftsmith-train launch={name} launch.num_processes={count} ... , or: torchrun "
    "--nproc_per_node {count} -m draftsmith.train launch={name} ..."
)


def make_accelerator(settings: TrainConfig) -> Accelerator:
    """Starts the process group, if there is one, and checks that it has the size asked for.

    Raises:
        ValueError: fewer or more processes run than the launcher or the settings say.
    """
    launch = settings.launch
    for name, flag in (("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"), ("FSDP", "ACCELERATE_USE_FSDP")):
        if os.environ.get(flag, "false").lower() == "true" and launch.name != "zero2":
            raise ValueError(
                f"accelerate was told to use {name}, but launch={launch.name} does not. Choose the "
                "strategy by launch=ddp or launch=zero2, and start with accelerate launch "
                "--multi_gpu, torchrun or draftsmith-train alone."
            )
    on_cpu = resolve_device(launch.device) == "cpu"
    handlers: list[Any] = []
    if launch.name == "zero2":
        if launched_world_size() is None:
            raise ValueError(
                "launch=zero2 needs a process launcher, also for one process. Use draftsmith-train "
                "launch=zero2 launch.num_processes=1, or torchrun."
            )
        if on_cpu:
            # Without it accelerate counts one process. cpu=True would drop DeepSpeed in silence.
            handlers.append(InitProcessGroupKwargs(backend="gloo"))
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(settings.train, launch, on_cpu))
        precision = "bf16" if settings.train.precision == "bf16" else "no"
        accelerator = Accelerator(
            mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers
        )
    else:
        handlers.append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
        # Autocast is ours (see `autocast`): accelerate's would also convert the outputs.
        accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=handlers)
    require_world_size(accelerator, launch)
    return accelerator


def deepspeed_config(train: LoopConfig, launch: LaunchConfig, on_cpu: bool) -> dict[str, Any]:
    """DeepSpeed's own settings for ZeRO stage 2, none left to be guessed."""
    zero: dict[str, Any] = {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": not on_cpu,
    }
    if launch.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not on_cpu}
    return {
        # Only read for DeepSpeed's own throughput log: micro-batches are ours, and vary in size.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": train.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }


def require_world_size(accelerator: Accelerator, launch: LaunchConfig) -> None:
    """Stops when the processes that run are not those that were asked for.

    Raises:
        ValueError: naming both numbers and a command that works.
    """
    launched = launched_world_size() or 1
    wanted = launch.num_processes if launch.num_processes is not None else launched
    running = accelerator.num_processes
    if running != launched or running != wanted:
        advice = WORKING_COMMANDS.format(name=launch.name, count=max(wanted, launched))
        raise ValueError(
            f"{running} process(es) run together, but the launcher started {launched} and "
            f"launch.num_processes asks for {wanted}. {advice}"
        )
    if launch.name == "single" and running > 1:
        raise ValueError(
            f"launch=single runs one process, but {running} were started. Add launch=ddp (or "
            "launch=zero2) to the command, or drop the launcher."
        )


def require_wrapped(accelerator: Accelerator, model: nn.Module, launch: LaunchConfig) -> None:
    """Stops when several processes would train without averaging their gradients.

    Raises:
        ValueError: the model is not wrapped by DDP or DeepSpeed.
    """
    is_engine = type(model).__name__ == "DeepSpeedEngine"
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    advice = WORKING_COMMANDS.format(name=launch.name, count=accelerator.num_processes)
    if launch.name == "zero2" and not is_engine:
        raise ValueError(
            f"launch=zero2, but accelerate gave back a {type(model).__name__}: DeepSpeed was left "
            f"out. Unset ACCELERATE_USE_CPU. {advice}"
        )
    if launch.name != "zero2" and accelerator.num_processes > 1 and not is_ddp:
        raise ValueError(
            f"{accelerator.num_processes} processes run, but the model is a "
            f"{type(model).__name__}, not DistributedDataParallel: their gradients would not be "
            f"averaged. {advice}"
        )


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """True when DeepSpeed runs the backward and the optimizer step."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def autocast(accelerator: Accelerator, precision: str) -> contextlib.AbstractContextManager[Any]:
    """bf16 autocast around a forward; under DeepSpeed the weights are bf16 already."""
    enabled = precision == "bf16" and not uses_deepspeed(accelerator)
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=enabled)


def sum_over_ranks(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The elementwise sum of a tensor over all processes."""
    if accelerator.num_processes == 1:
        return values
    return accelerator.reduce(values, reduction="sum")


@contextlib.contextmanager
def accumulate(accelerator: Accelerator, model: Any, *, is_last: bool) -> Iterator[None]:
    """Around forward and backward: DDP exchanges gradients only in the last micro-batch.

    Here and below `model` may be a DeepSpeed engine, whose class is not imported: hence the Any.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
    else:
        if uses_deepspeed(accelerator):
            model.set_gradient_accumulation_boundary(is_boundary=is_last)
        yield


def backward(accelerator: Accelerator, model: Any, loss: Tensor) -> None:
    """Adds the gradient of `loss`; the caller has scaled it for the whole accumulation window."""
    if uses_deepspeed(accelerator):
        # The window's own normaliser is in the loss: DeepSpeed must not divide by its length too.
        model.backward(loss, scale_wrt_gas=False)
    else:
        loss.backward()


def optimizer_step(
    accelerator: Accelerator,
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_grad_norm: float,
) -> Tensor:
    """Clips by the global norm, steps, clears the gradients.

    Returns:
        [] float: the global gradient norm before clipping.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if uses_deepspeed(accelerator):
        model.step()  # clips (gradient_clipping), steps and clears
        return torch.as_tensor(model.get_global_grad_norm(), device=accelerator.device)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def consolidated_weights(draft: nn.Module) -> dict[str, Tensor]:
    """All weights of the draft, whole. DDP and ZeRO-2 keep them whole on every process.

    Raises:
        ValueError: a tensor has no elements (a shard instead of the whole).
    """
    weights = draft.state_dict()
    require_whole(weights, draft)
    return weights


def require_whole(weights: dict[str, Tensor], draft: nn.Module) -> None:
    """Raises ValueError when `weights` lacks a tensor of the draft, or holds an empty one."""
    missing = sorted(set(draft.state_dict()) - set(weights))
    empty = sorted(name for name, tensor in weights.items() if tensor.numel() == 0)
    if missing or empty:
        raise ValueError(
            f"The draft cannot be saved: missing tensors {missing}, empty tensors {empty}. They "
            "were not gathered from the processes that hold them; nothing was written."
        )


def release(accelerator: Accelerator) -> None:
    """Ends the process group and clears accelerate's process-wide state.

    Without this a second run in the same process would inherit device and precision of the first.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Private, but there is no public way to end a run; accelerate's own tests do the same.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
