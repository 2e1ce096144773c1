"""Checkpoints of other programs, read into ours and written from ours; pure but for reading files.

`read_foreign(folder)` recognises a folder by its config and tensor names and returns one of our
configs with the tensors under our names; draftsmith-import and warm starts use it. `to_format` is
the way back; models/export.py writes and checks what it returns.

Not read, and said by name: methods that draftsmith keeps in other formats (DFlash, DSpark, MTP,
P-EAGLE, Medusa), and drafts that carry embeddings of their own.

Check: tests/test_formats.py, tests/test_golden_formats.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.chain_draft import ChainDraft
from draftsmith.models.eagle import EagleConfig, EagleDraft
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.foreign_files import read_config_file, read_tensors, tensor_names
from draftsmith.models.format_eagle1 import from_eagle1_format, to_eagle1_format
from draftsmith.models.format_eagle3 import from_eagle3_format, to_eagle3_format
from draftsmith.models.format_keys import ForeignFolder, TargetFacts

FORMATS = ("vllm", "sglang", "eagle", "speculators")

DraftConfig = Eagle3Config | EagleConfig

OTHER_METHODS = {
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "mask_hidden": "P-EAGLE",
    "mtp": "MTP",
    "eh_proj.": "MTP",
    "medusa_head.": "Medusa",
}
"""What the name of a tensor of another method holds -> the method."""


@dataclass
class ForeignDraft:
    """A draft read from another program's folder, in our terms."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    """Under our names, in the dtype of the file. An EAGLE-3 draft that uses the target's head has
    no `lm_head.weight` (`uses_target_head`)."""
    embed_tokens: Tensor | None
    """[vocab, hidden] embeddings in the folder; drafts of ours share the target's."""
    source: str
    """How the folder was recognised, for people."""
    remarks: list[str] = field(default_factory=list)
    """What the user should know of it."""

    @property
    def uses_target_head(self) -> bool:
        return isinstance(self.config, Eagle3Config) and "lm_head.weight" not in self.tensors


def to_format(
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
    num_draft_tokens: int = 3,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: One of FORMATS.
        target: Facts about the target; None: not known.
        num_draft_tokens: Tokens per round that a speculators folder asks for.

    Raises:
        ValueError: the format cannot hold this draft, or a tensor is not finite.
    """
    assert format in FORMATS, "the settings check the name"
    damaged = [
        name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()
    ]
    if damaged:
        raise ValueError(f"Not finite: {', '.join(damaged)}. The training went wrong; see its log.")
    if target is not None:
        _check_target(config, target)
    if isinstance(config, Eagle3Config):
        return to_eagle3_format(
            config, tensors, format=format, target=target, num_draft_tokens=num_draft_tokens
        )
    return to_eagle1_format(config, tensors, format=format, target=target)


def _check_target(config: DraftConfig, target: TargetFacts) -> None:
    own = (config.vocab_size, config.hidden_size)
    found = (target.vocab_size, target.hidden_size)
    if own != found:
        raise ValueError(
            f"The draft was made for a vocabulary of {own[0]} and a hidden size of {own[1]}, but "
            f"{target.name_or_path} has {found[0]} and {found[1]}. Give the draft's own target."
        )


def read_foreign(
    folder: str | Path,
    *,
    aux_layer_ids: Sequence[int] | None = None,
    target: TargetFacts | None = None,
) -> ForeignDraft:
    """Reads an EAGLE-1 or EAGLE-3 folder of SafeAILab, vLLM, SGLang, speculators or DeepSpec.

    Args:
        folder: It has config.json and weights, safetensors or pickled (read without running code).
        aux_layer_ids: The target layers that an EAGLE-3 draft reads (0-based outputs); None: as the
            folder says.
        target: Facts about the target; None: nothing is compared with it.

    Raises:
        ValueError: no such folder, another method, a missing fact, or tensors that do not fit.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder. Expected a checkpoint with config.json.")
    raw, tensors = read_config_file(path), read_tensors(path)
    where = str(path / "config.json")
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    source = _recognise(raw, tensors, where)
    config: DraftConfig
    if source.startswith("EAGLE-3"):
        config, own, remarks = from_eagle3_format(
            raw, tensors, aux_layer_ids=aux_layer_ids, target=target, where=where
        )
    else:
        if aux_layer_ids is not None:
            raise ValueError(
                f"aux_layer_ids is {list(aux_layer_ids)}, but {path} is an EAGLE-1 draft, which "
                "reads the target's final state only. Leave it out."
            )
        config, own, remarks = from_eagle1_format(raw, tensors, target=target, where=where)
    if target is not None:
        _check_target(config, target)
    draft = ForeignDraft(config, own, embed_tokens, source, remarks)
    _check_tensors(draft, where)
    return draft


def recognise_foreign(folder: str | Path) -> str | None:
    """What another program's draft in a folder is, for people; None where there is none we read."""
    path = Path(folder)
    try:
        return _recognise(read_config_file(path), tensor_names(path), str(path))
    except ValueError:
        return None


def _recognise(raw: Mapping[str, Any], tensors: Collection[str], where: str) -> str:
    """What the folder is, for people; starts with EAGLE-1 or EAGLE-3."""
    if "draftsmith_class" in raw:
        raise ValueError(
            f"{where} belongs to a draft of draftsmith's own: it needs no import, give its folder "
            "as draft=... or init_from=...."
        )
    nested = raw.get("speculators_model_type")
    if nested is not None or "speculators_config" in raw:
        if nested != "eagle3":
            raise ValueError(
                f"{where}: a speculators checkpoint of type {nested!r}; draftsmith reads eagle3."
            )
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise ValueError(f"{where} lacks transformer_layer_config, the sizes of its layers.")
        return "EAGLE-3, speculators"
    other = _other_method(tensors)
    if other is not None:
        raise ValueError(f"{where}: {other}; draftsmith imports EAGLE-1 and EAGLE-3.")
    names = set(tensors)
    if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
        if "target_layer_ids" in raw:
            return "EAGLE-3, DeepSpec"
        flat = raw.get("architectures") == ["LlamaForCausalLMEagle3"]
        return "EAGLE-3, as vLLM and SGLang read it" if flat else "EAGLE-3, EAGLE's own form"
    one = "layers.0.self_attn.q_proj.weight"
    if {"fc.weight", one} <= names and "layers.0.input_layernorm.weight" not in names:
        return "EAGLE-1"
    listed = ", ".join(sorted(tensors)[:6])
    raise ValueError(
        f"{where}: not recognised as an EAGLE-1 or EAGLE-3 draft; its tensors start {listed}."
    )


def _other_method(names: Iterable[str]) -> str | None:
    """What tells another method, or None."""
    for name in names:
        method = "DFlash" if name == "hidden_norm.weight" else None
        for part, found in OTHER_METHODS.items():
            method = found if part in name else method
        if method is not None:
            return f"the tensor {name} belongs to a {method} draft"
    return None


def new_draft(config: DraftConfig) -> ChainDraft:
    """A draft of this config with random weights."""
    return Eagle3Draft(config) if isinstance(config, Eagle3Config) else EagleDraft(config)


def _check_tensors(draft: ForeignDraft, where: str) -> None:
    """Insists that the tensors are those of the config, to the letter.

    Raises:
        ValueError: one is missing, unknown, of another shape, or not finite.
    """
    with torch.device("meta"):
        made = new_draft(draft.config).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in made.items()}
    if draft.uses_target_head:
        del expected["lm_head.weight"]
    found = {name: tuple(tensor.shape) for name, tensor in draft.tensors.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not known" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name] != shape
    ]
    problems += [
        f"{name} is not finite"
        for name, tensor in sorted(draft.tensors.items())
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if problems:
        raise ValueError(
            f"{where}: the tensors do not fit the config ({draft.source}): {'; '.join(problems)}. "
            "An engine would skip them or draw them at random."
        )
