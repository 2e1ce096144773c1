"""Checkpoints of other programs, read into ours and written from ours; pure but for reading files.

`read_foreign(folder)` recognises a folder by its config and tensor names and returns one of our
configs with the tensors under our names; draftsmith-import and warm starts use it. `to_format` is
the way back; models/export.py writes and checks what it returns.

MTP modules, in a target's own checkpoint or as a speculators folder: models/format_mtp_read.py.

Not read, and said by name: methods that draftsmith does not have in this form (other MTP layouts,
P-EAGLE, Medusa, Domino, DFlash-2), and drafts that carry embeddings of their own.

Check: tests/test_formats.py, tests/test_formats_block.py, tests/test_golden_formats.py,
tests/test_golden_block.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.block_draft import BlockDraftConfig
from draftsmith.models.dflash import DFlashConfig, DFlashDraft
from draftsmith.models.dspark import DSparkConfig, DSparkDraft
from draftsmith.models.eagle import EagleConfig, EagleDraft
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.foreign_files import read_config_file, read_tensors, tensor_names
from draftsmith.models.format_block import ASSISTANT, PROGRAMS
from draftsmith.models.format_block_read import TargetRows, take_head
from draftsmith.models.format_dflash import from_dflash_format, to_dflash_format
from draftsmith.models.format_dspark import from_dspark_format, to_dspark_format
from draftsmith.models.format_eagle1 import from_eagle1_format, to_eagle1_format
from draftsmith.models.format_eagle3 import from_eagle3_format, to_eagle3_format
from draftsmith.models.format_keys import ForeignFolder, TargetFacts
from draftsmith.models.format_mtp_read import holds_mtp, is_mtp_speculators, read_mtp
from draftsmith.models.mtp_module import MtpConfig

CHAIN_FORMATS = ("vllm", "sglang", "eagle", "speculators")
"""What EAGLE drafts are written in; block drafts: PROGRAMS."""
FORMATS = tuple(dict.fromkeys([*CHAIN_FORMATS, *PROGRAMS]))

DraftConfig = Eagle3Config | EagleConfig | DFlashConfig | DSparkConfig | MtpConfig
DRAFT_CLASSES: dict[type, Any] = {
    Eagle3Config: Eagle3Draft,
    EagleConfig: EagleDraft,
    DFlashConfig: DFlashDraft,
    DSparkConfig: DSparkDraft,
}
NESTED_TYPES = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
"""`speculators_model_type` -> method."""
CHAIN_TOKENS = 3
"""Drafted tokens per round that a speculators folder of an EAGLE draft asks for (our choice)."""

OTHER_METHODS = {
    "prefix_gru.": "Domino",
    "candidate_selector.": "DFlash-2",
    "aux_hidden_norms.": "Laguna DFlash",
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
    target_head: TargetRows | None = None
    """The target's head in the folder of a block draft; drafts of ours use the target's."""

    @property
    def holds_target(self) -> bool:
        """Whether the folder has copies of the target's embeddings or head."""
        return self.embed_tokens is not None or self.target_head is not None

    @property
    def uses_target_head(self) -> bool:
        return isinstance(self.config, Eagle3Config) and "lm_head.weight" not in self.tensors


def to_format(
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
    num_draft_tokens: int | None = None,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: One of FORMATS.
        target: Facts about the target; None: not known.
        num_draft_tokens: Tokens per round that a speculators folder asks for; None: a block draft's
            whole block, else CHAIN_TOKENS.

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
    if isinstance(config, BlockDraftConfig):
        _check_block_choice(config, format, num_draft_tokens)
    elif format not in CHAIN_FORMATS:
        raise ValueError(
            f"format={format} is for block drafts (DFlash, DSpark); an EAGLE draft is written as "
            f"one of {', '.join(CHAIN_FORMATS)}."
        )
    if isinstance(config, DFlashConfig):
        return to_dflash_format(config, tensors, format=format, target=target)
    if isinstance(config, DSparkConfig):
        return to_dspark_format(config, tensors, format=format, target=target)
    if isinstance(config, Eagle3Config):
        tokens = CHAIN_TOKENS if num_draft_tokens is None else num_draft_tokens
        return to_eagle3_format(
            config, tensors, format=format, target=target, num_draft_tokens=tokens
        )
    assert isinstance(config, EagleConfig), "MTP drafts are written by models/export_mtp.py"
    return to_eagle1_format(config, tensors, format=format, target=target)


def _check_block_choice(
    config: BlockDraftConfig, format: str, num_draft_tokens: int | None
) -> None:
    """A block draft's own limits on what was asked for."""
    if format not in PROGRAMS:
        raise ValueError(
            f"format={format} is the form of SafeAILab's code, which has no block drafts (DFlash, "
            f"DSpark). Choose one of {', '.join(PROGRAMS)}."
        )
    if num_draft_tokens not in (None, config.num_steps):
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}, but a block of {config.block_size} slots "
            f"proposes {config.num_steps} tokens, and a block of another length is not what was "
            "trained. Leave num_draft_tokens out."
        )


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
    """Reads a draft of SafeAILab, vLLM, SGLang, speculators, DeepSpec, z-lab or transformers.

    Args:
        folder: It has config.json and weights, safetensors or pickled (read without running code).
        aux_layer_ids: The target layers that the draft reads (0-based outputs; not EAGLE-1); None:
            as the folder says.
        target: Facts about the target; None: nothing is compared with it.

    Raises:
        ValueError: no such folder, another method, a missing fact, or tensors that do not fit.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder. Expected a checkpoint with config.json.")
    if holds_mtp(path):
        return _read_mtp(path, target)
    raw, tensors = read_config_file(path), read_tensors(path)
    where = str(path / "config.json")
    source = _recognise(raw, tensors, where)
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    head = take_head(raw, tensors, where) if source.startswith(("DFlash", "DSpark")) else None
    config, own, remarks = _from_format(
        source, raw, tensors, head, aux_layer_ids=aux_layer_ids, target=target, where=where
    )
    if target is not None:
        _check_target(config, target)
    draft = ForeignDraft(config, own, embed_tokens, source, remarks, head)
    if head is not None and head.ids is not None:
        draft.remarks.append(
            f"Its vocabulary of {len(head.ids)} tokens is left out: drafts of this kind predict "
            "with the target's whole head and can propose any token."
        )
    _check_tensors(draft, where)
    return draft


def _read_mtp(path: Path, target: TargetFacts | None) -> ForeignDraft:
    """The MTP modules of a target, or of a speculators folder (models/format_mtp_read.py)."""
    read = read_mtp(path)
    if target is not None:
        _check_target(read.config, target)
    head = read.copies.get("shared_head.head")
    rows = None if head is None else TargetRows(head, None)
    embeddings = read.copies.get("embed_tokens")
    return ForeignDraft(read.config, read.tensors, embeddings, read.source, read.remarks, rows)


def _from_format(
    source: str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    head: TargetRows | None,
    *,
    aux_layer_ids: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
) -> tuple[DraftConfig, dict[str, Tensor], list[str]]:
    """Config, tensors under our names, and remarks, by what the folder is."""
    if source.startswith("EAGLE-1"):
        if aux_layer_ids is not None:
            raise ValueError(
                f"aux_layer_ids is {list(aux_layer_ids)}, but {where} belongs to an EAGLE-1 draft, "
                "which reads the target's final state only. Leave it out."
            )
        return from_eagle1_format(raw, tensors, target=target, where=where)
    layers: dict[str, Any] = {"aux_layer_ids": aux_layer_ids, "target": target, "where": where}
    if source.startswith("EAGLE-3"):
        return from_eagle3_format(raw, tensors, **layers)
    if source.startswith("DFlash"):
        return from_dflash_format(raw, tensors, **layers)
    ids = None if head is None else head.ids
    return from_dspark_format(raw, tensors, **layers, head_ids=ids)


def recognise_foreign(folder: str | Path) -> str | None:
    """What another program's draft in a folder is, for people; None where there is none we read."""
    path = Path(folder)
    if is_mtp_speculators(path):
        return "MTP, speculators"
    try:
        return _recognise(read_config_file(path), tensor_names(path), str(path))
    except ValueError:
        return None


def _recognise(raw: Mapping[str, Any], tensors: Collection[str], where: str) -> str:
    """What the folder is, for people; starts with EAGLE-1, EAGLE-3, DFlash or DSpark."""
    if "draftsmith_class" in raw:
        raise ValueError(
            f"{where} belongs to a draft of draftsmith's own: it needs no import, give its folder "
            "as draft=... or init_from=...."
        )
    nested = raw.get("speculators_model_type")
    if nested is not None or "speculators_config" in raw:
        if nested not in NESTED_TYPES:
            raise ValueError(
                f"{where}: a speculators checkpoint of type {nested!r}; draftsmith reads "
                f"{', '.join(NESTED_TYPES)}."
            )
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise ValueError(f"{where} lacks transformer_layer_config, the sizes of its layers.")
        return f"{NESTED_TYPES[nested]}, speculators"
    other = _other_method(tensors)
    if other is not None:
        raise ValueError(f"{where}: {other}; draftsmith imports EAGLE-1, EAGLE-3, DFlash, DSpark.")
    names = set(tensors)
    if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
        if "target_layer_ids" in raw:
            return "EAGLE-3, DeepSpec"
        flat = raw.get("architectures") == ["LlamaForCausalLMEagle3"]
        return "EAGLE-3, as vLLM and SGLang read it" if flat else "EAGLE-3, EAGLE's own form"
    if {"hidden_norm.weight", "encoder.output_norm_enc.weight"} & names:
        return _recognise_block(raw, names)
    one = "layers.0.self_attn.q_proj.weight"
    if {"fc.weight", one} <= names and "layers.0.input_layernorm.weight" not in names:
        return "EAGLE-1"
    listed = ", ".join(sorted(tensors)[:6])
    raise ValueError(
        f"{where}: not recognised as an EAGLE-1, EAGLE-3, DFlash or DSpark draft; its tensors "
        f"start {listed}."
    )


def _recognise_block(raw: Mapping[str, Any], names: Collection[str]) -> str:
    """Which block draft a flat folder holds."""
    classes = " ".join(raw.get("architectures") or [])
    heads = any(name.startswith(("markov_head.", "confidence_head.")) for name in names)
    if heads or "DSpark" in classes:
        return "DSpark, DeepSpec" if "lm_head.weight" in names else "DSpark, a flat folder"
    if raw.get("model_type") == ASSISTANT:
        return "DFlash, transformers' assistant"
    return "DFlash, as z-lab, vLLM and SGLang read it"


def _other_method(names: Iterable[str]) -> str | None:
    """What tells another method, or None."""
    for name in names:
        method = None
        for part, found in OTHER_METHODS.items():
            method = found if part in name else method
        if method is not None:
            return f"the tensor {name} belongs to a {method} draft"
    return None


def new_draft(config: DraftConfig) -> Any:
    """A draft of this config with random weights."""
    return DRAFT_CLASSES[type(config)](config)


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
