"""draftsmith-stitch: trained MTP modules written into the target's own checkpoint.

Engines find MTP modules in the target's folder, under the names that its family uses
(models/format_mtp.py). The result is a new folder: the modules are one more weight file, the index
names them, config.json says how many there are, and everything else is as it was, byte for byte. A
target in one file gets an index and the names of a checkpoint in two.

The folder is written aside and checked before it takes its name: every tensor of the target that
stays is bit-equal, the index and the files hold the same names, each once, and the modules read
back are the draft's.

Check: tests/test_stitch.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models.foreign_files import read_config_file, read_tensors, write_checked
from draftsmith.models.format_mtp import (
    IGNORED,
    LAYOUTS,
    Layout,
    Module,
    Place,
    find_layout,
    find_place,
    module_names,
    read_named,
    read_native,
    refuse_quantised,
    stored_dtypes,
    stored_names,
    text_config,
    to_layout,
)
from draftsmith.models.format_mtp_write import modules_for_target
from draftsmith.models.load import draft_folder, load_draft
from draftsmith.models.mtp_module import MtpConfig
from draftsmith.models.mtp_native_block import chosen_layer
from draftsmith.models.target_facts import TargetSettings
from draftsmith.models.target_source import resolve_target, weights_fingerprint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST_OF_TWO, SECOND_OF_TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
"""What a target in one file becomes: loaders take model.safetensors before any index."""
ADDED = "model-mtp.safetensors"
"""The file of the modules beside the shards of a target in several files."""


class StitchSettings(Protocol):
    """conf/schema_stitch.py, StitchConfig."""

    draft: str
    output: str
    target: TargetSettings
    layout: str | None
    replace: bool
    copies: bool
    link: bool


@dataclass
class Stitched:
    """What was written."""

    folder: Path
    layout: str
    num_modules: int
    num_tensors: int
    """Of the modules."""
    num_kept: int
    """Tensors of the target, unchanged."""
    remarks: list[str] = field(default_factory=list)


@dataclass
class _Source:
    """The target's folder as it is."""

    folder: Path
    raw: dict[str, Any]
    stored: dict[str, Path]
    place: Place
    present: str | None
    """The layout of the modules that it carries already."""
    dropped: set[str]
    """Their tensors, which the new ones replace."""


def run(settings: StitchSettings) -> None:
    """The verb: writes the folder, checks it, and says what it is."""
    made = stitch(settings)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for remark in made.remarks:
        console.print(f"Note: {remark}")
    console.print(
        f"{made.folder}: {made.num_modules} MTP module(s), {made.num_tensors} tensors in the "
        f"{made.layout} layout; {made.num_kept} tensors of the target bit-equal. Read back: the "
        "modules are the draft's."
    )


def stitch(settings: StitchSettings) -> Stitched:
    """Writes a target with a draft's MTP modules in it.

    Raises:
        ValueError: no such draft or target, modules that are there already, a layout that cannot
            hold the draft, an output that exists, or a folder that did not come back right.
    """
    folder = draft_folder(settings.draft)
    draft = load_draft(folder)
    if not isinstance(draft.config, MtpConfig):
        raise ValueError(
            f"{folder} holds a {type(draft).__name__}; only MTP drafts are part of a target's "
            "checkpoint. Others are exported (draftsmith-export)."
        )
    source = _read_source(settings)
    name = _choose_layout(settings, source)
    layout, text = LAYOUTS[name], text_config(source.raw, str(source.folder))
    remarks = _check_draft(draft.config, source, layout, name)
    modules = modules_for_target(draft.config, read_tensors(folder), text, concat=layout.concat)
    like = f"{source.place.layers}.{chosen_layer(text)}."
    named, modules = _named(modules, layout, source, like)
    if settings.copies:
        named |= _copies(layout, source, len(modules))

    def write(aside: Path) -> None:
        aside.mkdir(parents=True)
        _write_files(aside, source, named, link=settings.link)
        _write_config(aside, source.raw, layout, len(modules))
        check_stitched(aside, source.folder, source.dropped, named)
        _check_modules(aside, modules, name)

    kept = len(source.stored) - len(source.dropped)
    done = write_checked(settings.output, write)
    return Stitched(done, name, len(modules), len(named), kept, remarks)


def _read_source(settings: StitchSettings) -> _Source:
    folder = Path(resolve_target(settings.target.name_or_path))
    if not folder.is_dir():
        raise ValueError(
            f"target {settings.target.name_or_path!r} is no local folder. Download it first, for "
            "example with `hf download NAME --local-dir FOLDER`, and give that folder."
        )
    raw = read_config_file(folder)
    refuse_quantised(raw, str(folder))
    stored = stored_names(folder)
    text = text_config(raw, str(folder))
    place = find_place(stored, text.num_hidden_layers, str(folder))
    present = find_layout(stored, place)
    dropped: set[str] = set()
    if present is not None:
        dropped = set().union(*module_names(stored, LAYOUTS[present], place))
    return _Source(folder, raw, stored, place, present, dropped)


def _choose_layout(settings: StitchSettings, source: _Source) -> str:
    if source.present is not None and not settings.replace:
        raise ValueError(
            f"{source.folder} carries MTP modules already ({source.present} layout, "
            f"{len(source.dropped)} tensors). Set replace=true to write the draft's in their place."
        )
    name = settings.layout or source.present
    if name is None:
        raise ValueError(
            f"{source.folder} carries no MTP modules that would show where its family keeps them. "
            f"Set layout to one of {', '.join(LAYOUTS)}."
        )
    return name


def _check_draft(config: MtpConfig, source: _Source, layout: Layout, name: str) -> list[str]:
    """Raises ValueError where the draft has no place in the target; returns remarks."""
    if layout.max_modules is not None and config.num_modules > layout.max_modules:
        raise ValueError(
            f"The draft has {config.num_modules} MTP modules, but the {name} layout holds "
            f"{layout.max_modules}."
        )
    recorded = config.target_fingerprint
    if recorded is not None:
        found = weights_fingerprint(source.folder)
        if recorded["weights"] != found:
            raise ValueError(
                f"The draft was trained for another target: it records weights "
                f"{recorded['weights'][:12]}, {source.folder} has {found[:12]}. Give the target "
                "that it was trained for."
            )
    remarks = []
    if config.draft_vocab_size != config.vocab_size:
        remarks.append(
            f"The draft vocabulary of {config.draft_vocab_size} tokens is left out: engines let "
            "MTP modules propose any token, so measured and served drafts differ."
        )
    if config.num_modules < len(config.step_weights or []):
        remarks.append(
            "The last module was trained for further depths too: engines apply it again and again "
            "where asked for more tokens; transformers drafts one token per module."
        )
    return remarks


def _named(
    modules: Sequence[Module], layout: Layout, source: _Source, like: str
) -> tuple[dict[str, Tensor], list[Module]]:
    """The modules under the target's names and in its dtypes, and the same under ours.

    Raises:
        ValueError: the block has other tensors than the target's layer `like`.
    """
    fused = not any(name.startswith(f"{like}mlp.experts.0.") for name in source.stored)
    kinds = {
        name.removeprefix(like): kind
        for name, kind in stored_dtypes(source.stored, like).items()
        if not name.endswith(IGNORED)
    }
    layer = set(kinds)
    general = kinds.get("input_layernorm.weight") or next(iter(kinds.values()))
    named: dict[str, Tensor] = {}
    ours: list[Module] = []
    for index, module in enumerate(modules):
        own, block = source.place.prefixes(layout, index)
        written = to_layout(module, layout, source.place, index, fused_experts=fused)
        parts = tuple(f"{own}{part}." for part in layout.names)
        held = {name.removeprefix(block) for name in written if not name.startswith(parts)}
        if held != layer:
            differing = sorted(held ^ layer)
            raise ValueError(
                f"The draft's block has other tensors than the target's layer {like}*: "
                f"{', '.join(differing[:4])}. Train it for this target (method=mtp_native)."
            )
        for name, tensor in written.items():
            kind = general if name.startswith(parts) else kinds[name.removeprefix(block)]
            named[name] = tensor.to(kind).contiguous().clone()
        dtypes = {name: named_kind(name, kinds, general) for name in module}
        ours.append({name: tensor.to(dtypes[name]) for name, tensor in module.items()})
    return named, ours


def named_kind(name: str, kinds: Mapping[str, torch.dtype], general: torch.dtype) -> torch.dtype:
    """The dtype in which a module's tensor (our name) is stored."""
    inner = name.removeprefix("block.")
    if inner in kinds:
        return kinds[inner]
    if ".experts." in inner:  # One tensor per expert in the file.
        return next(kind for known, kind in kinds.items() if ".experts." in known)
    return general


def _copies(layout: Layout, source: _Source, num_modules: int) -> dict[str, Tensor]:
    """The target's embeddings and head again, in every module, as published checkpoints have."""
    if not layout.copies:
        return {}
    root = source.place.layers.removesuffix("layers")
    embeddings = f"{root}embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in source.stored else embeddings
    if embeddings not in source.stored:
        raise ValueError(
            f"{source.folder} has no {embeddings}, so the modules cannot have a copy of it. Set "
            "copies=false: vLLM, SGLang and transformers share the target's."
        )
    held = read_named(source.stored, {embeddings, head})
    both = dict(zip(layout.copies, (held[embeddings], held[head]), strict=True))
    return {
        f"{source.place.prefixes(layout, index)[0]}{name}.weight": tensor.clone()
        for index in range(num_modules)
        for name, tensor in both.items()
    }


# The folder.


def _write_files(aside: Path, source: _Source, named: Mapping[str, Tensor], *, link: bool) -> None:
    """Weight files with their index, and every other file but config.json."""
    weight_map: dict[str, str] = {}
    files = sorted(set(source.stored.values()))
    single = files == [source.folder / SINGLE]
    for file in files:
        names = [name for name, place in source.stored.items() if place == file]
        kept = [name for name in names if name not in source.dropped]
        written = FIRST_OF_TWO if single else file.name
        if len(kept) == len(names):
            _take_over(file, aside / written, link=link)
        elif kept:
            with safe_open(file, framework="pt") as held:
                tensors = {name: held.get_tensor(name) for name in kept}
                _save(aside / written, tensors, held.metadata())
        weight_map |= dict.fromkeys(kept, written)
    added = SECOND_OF_TWO if single else ADDED
    if (aside / added).exists():
        added = f"model-mtp-{len(files)}.safetensors"
    _save(aside / added, named, {"format": "pt"})
    weight_map |= dict.fromkeys(named, added)
    index: dict[str, Any] = {"metadata": {}}
    if (source.folder / INDEX).is_file() and not single:
        index = json.loads((source.folder / INDEX).read_text(encoding="utf-8"))
    index["metadata"] = (index.get("metadata") or {}) | {
        "total_size": _total_size(aside, weight_map)
    }
    index["weight_map"] = dict(sorted(weight_map.items()))
    _write_json(aside / INDEX, index)
    done = {"config.json", INDEX, *(file.name for file in files)}
    for file in sorted(source.folder.iterdir()):
        if file.is_file() and file.name not in done:
            shutil.copy2(file, aside / file.name)


def _take_over(file: Path, to: Path, *, link: bool) -> None:
    """The same file under another name: a hard link where asked for and possible, else a copy."""
    real = file.resolve()  # Folders of the hub's cache hold links.
    if link:
        try:
            os.link(real, to)
        except OSError:
            pass
        else:
            return
    shutil.copy2(real, to)


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    path.chmod(0o644)  # safetensors lets only its owner read the file.


def _total_size(folder: Path, weight_map: Mapping[str, str]) -> int:
    """Bytes of all tensors, from the headers."""
    total = 0
    for file in sorted(set(weight_map.values())):
        with (folder / file).open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                total += stop - start
    return total


def _write_config(aside: Path, raw: Mapping[str, Any], layout: Layout, num_modules: int) -> None:
    """config.json with the number of modules; the order of its keys stays."""
    config = json.loads(json.dumps(raw))
    for held in (config, config["text_config"]) if "text_config" in config else (config,):
        for key in layout.config_keys:
            # A nested config says it where the decoder's settings are, or in both places.
            if held is not config or "text_config" not in config or key in held:
                held[key] = num_modules
    _write_json(aside / "config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The check.


def check_stitched(
    folder: Path, source: Path, dropped: set[str], named: Mapping[str, Tensor]
) -> None:
    """Insists that a stitched folder is its target and the modules, nothing else.

    Args:
        folder: What was written.
        source: The target's folder.
        dropped: Tensors of the target that are not to be there any more.
        named: Those that were added.

    Raises:
        ValueError: a tensor is missing, twice there, unknown, or not bit-equal.
    """
    before, now = stored_names(source), stored_names(folder)
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    expected = (before.keys() - dropped) | named.keys()
    held: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            held += stored.keys()
    problems = [f"{name} is missing" for name in sorted(expected - now.keys())]
    problems += [f"{name} is too much" for name in sorted(set(held) - expected)]
    problems += [f"{name} is stored twice" for name, count in Counter(held).items() if count > 1]
    problems += [
        f"the index puts {name} in {weight_map.get(name)}"
        for name in sorted(expected & now.keys())
        if weight_map.get(name) != now[name].name
    ]
    for name in sorted(expected & now.keys()):
        if name not in named and before[name].resolve().samefile(now[name]):
            continue
        found = read_named(now, [name])[name]
        wanted = named[name] if name in named else read_named(before, [name])[name]
        if not _bit_equal(found, wanted):
            problems.append(f"{name} differs")
    if problems:
        raise ValueError(f"The stitched folder is wrong: {'; '.join(problems[:8])}.")


def _bit_equal(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def _check_modules(folder: Path, modules: Sequence[Module], name: str) -> None:
    """Insists that what an importer finds in the folder is the draft."""
    _, head = read_native(folder)
    same = head.layout == name and len(head.modules) == len(modules)
    same = same and all(
        found.keys() == module.keys()
        and all(_bit_equal(found[part], module[part]) for part in module)
        for found, module in zip(head.modules, modules, strict=True)
    )
    if not same:
        raise ValueError(
            f"Read back, the stitched folder holds other modules ({head.layout} layout, "
            f"{len(head.modules)} of them) than the draft."
        )
