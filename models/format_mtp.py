"""MTP modules in checkpoints: as a target carries them, and in speculators' form.

    family                         names of module i (N: the target's layers)     reads
    DeepSeek-V3, GLM-4.x, GLM-5    model.layers.{N+i}.*  with shared_head.norm    [emb ; state]
    Hy3                            model.layers.{N+i}.*  with final_layernorm     [emb ; state]
    Qwen3-Next, Qwen3.5, Mellum    mtp.*                 one module               [emb ; state]
    MiMo                           model.mtp_layers.{i}.*                         [state ; emb]
    speculators                    mtp_layers.{i}.*      a folder of its own      [emb ; state]

Sources: the tensor names of the published checkpoints as vLLM 0.33 (`deepseek_mtp.py`,
`qwen3_next_mtp.py`, `mimo_mtp.py`) and transformers 5.24 (`MtpModel`) map them; speculators 0.9.
The block's names are those of the target's ordinary layers in all of them. Norm weights are stored
as the family stores its norms: Qwen3-Next and Qwen3.5 minus one. A checkpoint does not say which
state an engine feeds back (after the module's norm or before) nor whether the slot at position 0
reads its token: the presets conf/method/mtp_native_* do.

Experts: transformers keeps those of a layer in two tensors, most checkpoints one tensor per expert
and projection. Both are read; a stitched checkpoint gets the form of its own layers.

Check: tests/test_format_mtp.py, tests/test_golden_mtp_native.py.

Axes: hidden, experts, width (of one expert).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from draftsmith.models.foreign_files import read_config_file
from draftsmith.models.target_structure import text_config_of

OWN = ("enorm", "hnorm", "eh_proj", "norm")
"""A module's own parts, our names; the fourth is the norm in front of the head."""
BLOCK = "block."
"""Our prefix of the decoder layer's tensors within a module."""
BASE_FAMILIES = {"mimo": "qwen2"}
"""Model types that transformers does not have -> the one whose layers they are. MiMo's own code
derives its configuration and its layers from Qwen2's."""

IGNORED = ("rotary_emb.inv_freq",)
"""Ends of names that are no weights; old checkpoints have them."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights that are not quantised, as safetensors spells them."""

Module = dict[str, Tensor]
"""One MTP module: enorm.weight, hnorm.weight, eh_proj.weight, norm.weight, block.*"""


@dataclass(frozen=True)
class Layout:
    """Where a family's checkpoints keep MTP modules. {layers}: the target's list of layers
    (model.layers), {root}: what it lies in (model.), {n}: its number of layers plus i."""

    module: str
    block: str
    names: tuple[str, str, str, str]
    """Of OWN."""
    config_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    """Say how many modules there are; engines look for one of them."""
    concat: str = "embedding_first"
    max_modules: int | None = None
    """None: any number."""
    copies: tuple[str, ...] = ()
    """The target's embeddings and head, again in every module; engines share the target's."""


LAYOUTS = {
    "deepseek": Layout(
        "{layers}.{n}.",
        "{layers}.{n}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        copies=("embed_tokens", "shared_head.head"),
    ),
    "hy3": Layout(
        "{layers}.{n}.",
        "{layers}.{n}.",
        ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    ),
    "qwen": Layout(
        "mtp.",
        "mtp.layers.{i}.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        config_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        max_modules=1,
    ),
    "mimo": Layout(
        "{root}mtp_layers.{i}.",
        "{root}mtp_layers.{i}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        concat="hidden_first",
    ),
}
"""Layouts inside a target's checkpoint, by the name that settings give them."""
PROJECTIONS = tuple(f"{layout.names[2]}.weight" for layout in LAYOUTS.values())
"""Ends of names without which a checkpoint has no modules in any layout."""
SPECULATORS = Layout(
    "mtp_layers.{i}.",
    "mtp_layers.{i}.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    max_modules=1,
)


@dataclass(frozen=True)
class Place:
    """Where modules go in one checkpoint."""

    layers: str = ""
    """Name of the target's list of layers, for example model.layers."""
    num_layers: int = 0

    def prefixes(self, layout: Layout, module: int) -> tuple[str, str]:
        """Of the module's own tensors and of its block's."""
        parts = {
            "layers": self.layers,
            "root": self.layers.removesuffix("layers"),
            "n": self.num_layers + module,
            "i": module,
        }
        return layout.module.format(**parts), layout.block.format(**parts)


@dataclass
class NativeHead:
    """The MTP modules of one checkpoint."""

    layout: str
    modules: list[Module]
    copies: dict[str, Tensor]
    """embed_tokens and shared_head.head, where the checkpoint holds them."""


def find_place(names: Iterable[str], num_layers: int, where: str) -> Place:
    """Finds the list of layers in a target's tensor names.

    Raises:
        ValueError: no list has so many layers.
    """
    found: dict[str, set[int]] = {}
    for name in names:
        matched = re.match(r"(.*?\blayers)\.(\d+)\.", name)
        if matched:
            found.setdefault(matched[1], set()).add(int(matched[2]))
    fitting = [name for name, ids in found.items() if set(range(num_layers)) <= ids]
    # A target of one layer: its list is not the one within the MTP modules.
    fitting = [name for name in fitting if "mtp" not in name]
    if len(fitting) > 1:  # The encoder of a multimodal target may have as many.
        fitting = [name for name in fitting if "language_model" in name]
    if len(fitting) != 1:
        raise ValueError(
            f"{where}: the config says {num_layers} layers, but the tensors have "
            f"{', '.join(f'{name} ({len(ids)})' for name, ids in found.items()) or 'no layers'}. "
            "Expected exactly one list of that length."
        )
    return Place(fitting[0], num_layers)


def find_layout(names: Collection[str], place: Place) -> str | None:
    """The layout of the MTP modules in a target's checkpoint; None: it has none that we know."""
    for key, layout in LAYOUTS.items():
        own = place.prefixes(layout, 0)[0]
        if all(f"{own}{name}.weight" in names for name in layout.names):
            return key
    return None


def module_names(names: Iterable[str], layout: Layout, place: Place) -> list[list[str]]:
    """The tensors of each module, in order."""
    held = sorted(names)
    modules: list[list[str]] = []
    while layout.max_modules is None or len(modules) < layout.max_modules:
        prefixes = place.prefixes(layout, len(modules))
        own = [name for name in held if name.startswith(prefixes) and not name.endswith(IGNORED)]
        if not own:
            break
        modules.append(own)
    return modules


# Reading.


def text_config(raw: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """The decoder's configuration of a target's config.json; runs no code that comes with it.

    Raises:
        ValueError: transformers does not know its family.
    """
    settings = dict(raw)
    family = settings.pop("model_type", None)
    try:
        config = AutoConfig.for_model(BASE_FAMILIES.get(str(family), family), **settings)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{where}: transformers has no model type {family!r}, so its MTP modules cannot be run "
            "here."
        ) from error
    return text_config_of(config)


def stored_names(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file of a checkpoint.

    Raises:
        ValueError: there are no safetensors files, or one is missing.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # As transformers looks: the single file first.
        files = [single]
    elif index.is_file():
        held = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / name for name in held.values()})
    else:
        raise ValueError(f"{folder} has no safetensors weights (model.safetensors or an index).")
    names: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: the checkpoint in {folder} is not complete.")
        try:
            with safe_open(file, framework="pt") as stored:
                names |= dict.fromkeys(stored.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: it is damaged. Cause: {error}") from error
    return names


def stored_dtypes(stored: Mapping[str, Path], prefix: str) -> dict[str, torch.dtype]:
    """The dtypes of the tensors whose names start so, from the headers alone."""
    kinds: dict[str, torch.dtype] = {}
    for file in {place for name, place in stored.items() if name.startswith(prefix)}:
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 (not a dict)
                if name.startswith(prefix):
                    kinds[name] = DTYPES[held.get_slice(name).get_dtype()]
    return kinds


def read_named(stored: Mapping[str, Path], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Some tensors of a checkpoint; the others are not read."""
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(stored[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as held:
            tensors |= {name: held.get_tensor(name) for name in names}
    return tensors


def native_layout(folder: str | Path) -> str | None:
    """The layout of the MTP modules in a target's folder; None: no target, or none with modules."""
    try:
        path = Path(folder)
        raw, stored = read_config_file(path), stored_names(path)
        if "draftsmith_class" in raw or not any(name.endswith(PROJECTIONS) for name in stored):
            return None
        text = text_config(raw, str(path))
        return find_layout(stored, find_place(stored, text.num_hidden_layers, str(path)))
    except ValueError:
        return None


def read_native(folder: str | Path) -> tuple[PreTrainedConfig, NativeHead]:
    """The MTP modules that a target's folder carries, and the target's (text) configuration.

    Raises:
        ValueError: it carries none, or they are quantised or not whole.
    """
    path = Path(folder)
    raw = read_config_file(path)
    where = str(path)
    refuse_quantised(raw, where)
    stored, text = stored_names(path), text_config(raw, where)
    place = find_place(stored, text.num_hidden_layers, where)
    name = find_layout(stored, place)
    if name is None:
        raise ValueError(
            f"{where} carries no MTP modules in a layout that draftsmith knows "
            f"({', '.join(LAYOUTS)})."
        )
    layout = LAYOUTS[name]
    modules, copies = [], {}
    for index, names in enumerate(module_names(stored, layout, place)):
        tensors = read_named(stored, names)
        own, _ = place.prefixes(layout, index)
        for copied in layout.copies:
            found = tensors.pop(f"{own}{copied}.weight", None)
            if found is not None:
                copies[copied] = found
        modules.append(from_layout(tensors, layout, place, index, where))
    held = raw.get("text_config", raw)
    said = {key: held[key] for key in layout.config_keys if held.get(key) is not None}
    if any(count != len(modules) for count in said.values()):
        raise ValueError(
            f"{where}: the config says {said}, but there are {len(modules)} MTP modules."
        )
    return text, NativeHead(name, modules, copies)


def refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a checkpoint of quantised weights."""
    if raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config"):
        raise ValueError(
            f"{where} holds quantised weights (quantization_config), which would be misread. Use "
            "the checkpoint in bfloat16."
        )


def from_layout(
    tensors: Mapping[str, Tensor], layout: Layout, place: Place, index: int, where: str
) -> Module:
    """One module under our names.

    Raises:
        ValueError: one of its own parts is missing.
    """
    own, block = place.prefixes(layout, index)
    renamed = {
        f"{own}{theirs}.": f"{ours}." for ours, theirs in zip(OWN, layout.names, strict=True)
    }
    module: Module = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        if prefix is not None:
            module[renamed[prefix] + name.removeprefix(prefix)] = tensor
        else:
            module[BLOCK + name.removeprefix(block)] = tensor
    missing = [ours for ours in OWN if f"{ours}.weight" not in module]
    if missing:
        theirs = ", ".join(own + layout.names[OWN.index(ours)] for ours in missing)
        raise ValueError(f"{where}: the MTP module {index} lacks {theirs}.")
    return fuse_experts(module)


def to_layout(
    module: Module, layout: Layout, place: Place, index: int, *, fused_experts: bool
) -> dict[str, Tensor]:
    """One module under a layout's names."""
    own, block = place.prefixes(layout, index)
    named = {f"{ours}.": f"{own}{theirs}." for ours, theirs in zip(OWN, layout.names, strict=True)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in (module if fused_experts else split_experts(module)).items():
        prefix = next((prefix for prefix in named if name.startswith(prefix)), None)
        if prefix is not None:
            tensors[named[prefix] + name.removeprefix(prefix)] = tensor
        else:
            tensors[block + name.removeprefix(BLOCK)] = tensor
    return tensors


# Experts.

_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fuse_experts(module: Mapping[str, Tensor]) -> Module:
    """One tensor per expert and projection -> gate_up_proj [experts, 2 width, hidden] and down_proj
    [experts, hidden, width], as transformers keeps them."""
    fused: Module = {}
    single: dict[str, dict[str, list[tuple[int, Tensor]]]] = {}
    for name, tensor in module.items():
        matched = _ONE_EXPERT.fullmatch(name)
        if matched is None:
            fused[name] = tensor
        else:
            of = single.setdefault(matched[1], {"gate": [], "up": [], "down": []})
            of[matched[3]].append((int(matched[2]), tensor))
    for experts, parts in single.items():
        stacked = {
            part: torch.stack([tensor for _, tensor in sorted(held, key=lambda item: item[0])])
            for part, held in parts.items()
        }
        fused[f"{experts}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
        fused[f"{experts}.down_proj"] = stacked["down"]
    return fused


def split_experts(module: Mapping[str, Tensor]) -> Module:
    """The inverse of `fuse_experts`."""
    split: Module = {}
    for name, tensor in module.items():
        if name.endswith(".experts.gate_up_proj"):
            parts: Sequence[tuple[str, Tensor]] = list(
                zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            )
        elif name.endswith(".experts.down_proj"):
            parts = [("down", tensor)]
        else:
            split[name] = tensor
            continue
        experts = name.rpartition(".")[0]
        for part, of_all in parts:
            for expert, weight in enumerate(of_all):
                split[f"{experts}.{expert}.{part}_proj.weight"] = weight
    return split


# A draft of ours.


def draft_tensors(modules: Sequence[Module]) -> dict[str, Tensor]:
    """Modules under the names of an MTP draft of ours."""
    return {
        _draft_name(name, index): tensor
        for index, module in enumerate(modules)
        for name, tensor in module.items()
    }


def draft_modules(tensors: Mapping[str, Tensor], num_modules: int) -> list[Module]:
    """The inverse of `draft_tensors`; a draft vocabulary is left out: no weight depends on it."""
    modules: list[Module] = [{} for _ in range(num_modules)]
    for name, tensor in tensors.items():
        for index, module in enumerate(modules):
            ours = _module_name(name, index)
            if ours is not None:
                module[ours] = tensor
    return modules


def _draft_name(name: str, index: int) -> str:
    if name.startswith(BLOCK):
        return f"layers.{index}.{name.removeprefix(BLOCK)}"
    part, _, rest = name.partition(".")
    return f"{part}.{index}.{rest}"


def _module_name(name: str, index: int) -> str | None:
    if name.startswith(f"layers.{index}."):
        return BLOCK + name.removeprefix(f"layers.{index}.")
    part, number, rest = (*name.split(".", 2), "", "")[:3]
    return f"{part}.{rest}" if part in OWN and number == str(index) else None
