"""What a measured number depends on besides the models: versions, device, threads, dtype."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from draftsmith.models.target import TargetModel


def describe_conditions(target: TargetModel) -> dict[str, Any]:
    """Conditions of this process and of a loaded target; JSON types only."""
    on_cuda = target.device.type == "cuda"
    packages = ("draftsmith", "torch", "transformers")
    return {
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "device": torch.cuda.get_device_name(target.device) if on_cuda else "cpu",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
