"""DFlash checkpoints of other programs: z-lab, vLLM, SGLang, SpecForge, speculators, transformers.

The backbone's keys and tensors: models/format_block.py. transformers decodes a DFlash draft with
the one class it has of that shape (`speculation_type="dflash"`), whose config keeps the block's
keys at the top and whose tensors have two other names. The vocabulary's size, which that class has
no key for, and `dflash_config` are written all the same, so vLLM and SGLang load the folder too.

Check: tests/test_formats_block.py, tests/test_golden_block.py, tests/test_transformers_dflash.py.

Axes: hidden, vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from draftsmith.models.dflash import DFlashConfig
from draftsmith.models.format_block import (
    ASSISTANT,
    block_cautions,
    block_folder,
    block_layer_ids,
    block_problems,
    flat_block_config,
    refuse_problems,
)
from draftsmith.models.format_block_read import read_backbone
from draftsmith.models.format_keys import ForeignFolder, TargetFacts

ASSISTANT_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
"""Our name -> the name in transformers' class, where they differ."""


def to_dflash_format(
    config: DFlashConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: vllm, sglang, transformers, deepspec or speculators.
        target: Facts about the target; None: not known.

    Raises:
        ValueError: the format or its engine has no place for something this draft is.
    """
    if format == "transformers":
        return _assistant(config, tensors, target)
    return block_folder(
        config,
        tensors,
        format=format,
        target=target,
        kind="dflash",
        architecture="DFlashDraftModel",
        own_keys={},
        problems=_problems(config, format),
    )


def _problems(config: DFlashConfig, format: str) -> Iterable[tuple[bool, str]]:
    """(whether it applies, what the engine cannot serve and what to do)."""
    yield (
        format == "deepspec",
        "DFlash: DeepSpec's blocks propose from the anchor's slot on (its DFlash is DSpark without "
        "the heads), DFlash's from the next one. Use another format.",
    )
    yield (
        config.sample_from_anchor and format != "speculators",
        "sample_from_anchor: in every engine a DFlash block proposes from the slot behind the "
        "anchor on.",
    )
    mixed = len(set(config.layer_types or [])) > 1
    yield (
        mixed and format == "speculators",
        "full and sliding layers: vLLM reads one direction for all layers of this format. "
        "format=vllm says it per layer.",
    )


def _assistant(
    config: DFlashConfig, tensors: Mapping[str, Tensor], target: TargetFacts | None
) -> ForeignFolder:
    """The folder that transformers loads as an assistant."""
    ids, about_ids = block_layer_ids(config, "transformers", target)
    problems = [*about_ids, *block_problems(config, "transformers", target)]
    refuse_problems([*problems, *_problems(config, "transformers")], "transformers")
    written = flat_block_config(
        config, tensors, ids, target, architecture="MuseGlimmerAssistantModel", own_keys={}
    )
    written["model_type"] = ASSISTANT
    # Its class insists on a number; no layer slides.
    written["sliding_window"] = written["max_position_embeddings"]
    if isinstance(written["eos_token_id"], list):
        # It takes a single id, and reads none: the target's decide where a text ends.
        written["eos_token_id"] = written["eos_token_id"][0]
    return ForeignFolder(
        written,
        {ASSISTANT_NAMES.get(name, name): tensor for name, tensor in tensors.items()},
        block_cautions(config, "transformers", target),
    )


def from_dflash_format(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    aux_layer_ids: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
) -> tuple[DFlashConfig, dict[str, Tensor], list[str]]:
    """A draft of ours from any of these folders.

    Args:
        raw: Its config.json.
        tensors: Its tensors; the target's embeddings and head were taken out.
        aux_layer_ids: The target layers read, in our counting; None: as the config says.
        target: Facts about the target; None: not known.
        where: Names the config in errors.

    Returns:
        Config, tensors under our names, and remarks for the user.

    Raises:
        ValueError: a fact is missing, contradicts another, or has no counterpart in draftsmith.
    """
    names = {other: own for own, other in ASSISTANT_NAMES.items()}
    own = {names.get(name, name): tensor for name, tensor in tensors.items()}
    settings, remarks = read_backbone(
        raw, own, aux_layer_ids=aux_layer_ids, target=target, where=where, anchor_first=False
    )
    return DFlashConfig(**settings), own, remarks
