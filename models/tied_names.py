"""Shared weights under one name each: a head tied to the embeddings is not stored a second time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def leave_out_tied_names(module: nn.Module) -> None:
    """Keeps second names of shared parameters out of the module's state dict, and does not miss
    them when one is loaded."""
    every = dict(module.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(module.named_parameters()).keys()

    def leave_out(_: Any, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        for name in tied:
            state.pop(f"{prefix}{name}", None)

    def not_missing(_: Any, keys: Any) -> None:
        ends = tuple(tied)
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(ends)]

    if tied:
        module.register_state_dict_post_hook(leave_out)
        module.register_load_state_dict_post_hook(not_missing)
