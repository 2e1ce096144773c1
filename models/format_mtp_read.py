"""MTP modules of a target's checkpoint, or of a speculators folder, as a draft of ours.

Where a Llama-type block computes the same as the target's own layer (Llama, Qwen3, Qwen3-MoE), the
draft gets one: it drafts faster and trains with `depth_attention: chain`. Otherwise its block is a
layer of the target's family (models/mtp_native.py).

A checkpoint does not say what an engine feeds back nor what the first slot reads; the draft
gets `recycle: after_norm` and `zero_first_slot: false`, as transformers and SGLang compute.

Check: tests/test_format_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.foreign_files import read_config_file, read_tensors
from draftsmith.models.format_mtp import (
    LAYOUTS,
    SPECULATORS,
    Place,
    draft_tensors,
    from_layout,
    module_names,
    native_layout,
    read_native,
    text_config,
)
from draftsmith.models.mtp_module import PUBLISHED_DECAY, MtpConfig, normalised_weights
from draftsmith.models.mtp_native import NativeMtpDraft, native_config
from draftsmith.models.mtp_native_match import llama_type_config

FEEDS_BACK = (
    "The checkpoint does not say which state is fed back: after the module's norm is assumed, and "
    "that the first slot reads its token (transformers, SGLang). vLLM feeds GLM-4's back before "
    "the norm, and gives the first slot of DeepSeek's, GLM-4's and MiMo's no token: train with the "
    "preset of the family (method=mtp_native_*) for that."
)
STATES_BEFORE = (
    "speculators trains its MTP drafts on the target's states before its final norm; this draft, "
    "like the engines, reads those after it, so it starts lower than it was trained."
)


@dataclass
class MtpDraftRead:
    """A draft of ours made of modules that were read."""

    config: MtpConfig
    tensors: dict[str, Tensor]
    source: str
    """For people."""
    copies: dict[str, Tensor] = field(default_factory=dict)
    """embed_tokens and shared_head.head of the target, where the checkpoint holds them."""
    remarks: list[str] = field(default_factory=list)


def is_mtp_speculators(folder: str | Path) -> bool:
    """Whether a folder is an MTP draft in speculators' form."""
    try:
        return read_config_file(Path(folder)).get("speculators_model_type") == "mtp"
    except ValueError:
        return False


def holds_mtp(folder: str | Path) -> bool:
    """Whether a folder is one that `read_mtp` reads: such a draft, or a target with modules."""
    return is_mtp_speculators(folder) or native_layout(folder) is not None


def read_mtp(folder: str | Path) -> MtpDraftRead:
    """Reads the MTP modules of a folder.

    Raises:
        ValueError: it has none that are read, or its tensors do not fit its config.
    """
    if is_mtp_speculators(folder):
        return _read_speculators(Path(folder))
    text, head = read_native(folder)
    name = f"the MTP modules of {folder} ({head.layout} layout)"
    read = _as_draft(
        text,
        draft_tensors(head.modules),
        name,
        num_modules=len(head.modules),
        concat=LAYOUTS[head.layout].concat,
        step_weights=normalised_weights(len(head.modules), 1.0),
    )
    read.copies = head.copies
    read.remarks.append(FEEDS_BACK)
    return read


def _read_speculators(folder: Path) -> MtpDraftRead:
    raw = read_config_file(folder)
    where = str(folder / "config.json")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{where} lacks transformer_layer_config, the target's configuration.")
    tensors = read_tensors(folder)
    # Embeddings and head would be the target's.
    copies = {
        ours: tensors.pop(theirs)
        for ours, theirs in (
            ("embed_tokens", "embed_tokens.weight"),
            ("shared_head.head", "lm_head.weight"),
        )
        if theirs in tensors
    }
    place = Place()
    names = module_names(tensors, SPECULATORS, place)
    unknown = sorted(set(tensors).difference(*names))
    if not names or unknown:
        raise ValueError(f"{where}: expected mtp_layers.0.* only, found {unknown[:4] or 'none'}.")
    module = from_layout({name: tensors[name] for name in names[0]}, SPECULATORS, place, 0, where)
    steps = _speculative_tokens(raw)
    read = _as_draft(
        text_config(layer, where),
        draft_tensors([module]),
        "MTP, speculators",
        num_modules=1,
        concat=SPECULATORS.concat,
        step_weights=normalised_weights(steps, PUBLISHED_DECAY),
    )
    read.copies = copies
    read.remarks.append(STATES_BEFORE)
    return read


def _speculative_tokens(raw: Mapping[str, Any]) -> int:
    """Tokens per round that a speculators folder asks for: the steps it was trained for."""
    proposals = raw.get("speculators_config", {}).get("proposal_methods") or [{}]
    return int(proposals[0].get("speculative_tokens") or 1)


def _as_draft(
    text: PreTrainedConfig, tensors: dict[str, Tensor], source: str, **settings: Any
) -> MtpDraftRead:
    """Config and tensors, checked: a Llama-type draft where it computes the same."""
    config = native_config(text, **settings)
    with torch.device("meta"):
        draft = NativeMtpDraft(config)
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not known" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    problems += [
        f"{name} is not finite"
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if problems:
        raise ValueError(
            f"{source}: the tensors do not fit the target's layers: {'; '.join(problems[:8])}."
        )
    made = llama_type_config(config, tensors)
    if made is None:
        return MtpDraftRead(config, tensors, f"{source}, block of the target's family")
    made.step_weights = config.step_weights
    return MtpDraftRead(made, tensors, f"{source}, Llama-type block")
