"""Loads any draft model, and refuses a file that does not fit to the letter.

A draft is a transformers folder: config.json and model.safetensors (or shards with an index). The
config's `draftsmith_class` names the class. transformers itself would draw missing tensors at
random and drop unexpected ones with a warning; here either is an error.

A folder without that name, a hub id, a GGUF file or `package:NAME` is an ordinary language model:
a small-model draft (models/small_model.py).
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftsmith.models.formats import recognise_foreign
from draftsmith.models.small_model import DRAFTSMITH_CLASS, SmallModelDraft, check_same_tokenizer
from draftsmith.models.target import TargetModel
from draftsmith.models.vocabulary_map import check_vocabulary_buffers

CLASS_PREFIX = "draftsmith.models."
"""Only our own classes are imported: a config must not choose code to run."""


def draft_folder(path: str | Path) -> Path:
    """The draft model's folder: the path itself, or `draft` inside a training run."""
    folder, inside = Path(path), Path(path) / "draft"
    is_run = not (folder / "config.json").is_file() and (inside / "config.json").is_file()
    return inside if is_run else folder


def load_drafter(path: str | Path, target: TargetModel) -> Any:
    """Loads a draft model for a loaded target, in its dtype, on its device and attached to it.

    Args:
        path: A draft folder, a training run (its `draft` is taken), or any language model with the
            target's tokenizer (folder, hub id, GGUF file, `package:NAME`).
        target: The target that it drafts for.

    Returns:
        A `Drafter` in eval mode. Whether it was trained for this target is for the caller to check.

    Raises:
        ValueError: See `load_draft`; or a small model's tokenizer is not the target's.
    """
    # Not through Path where there is no folder: a hub id or package:NAME stays as it was typed.
    name = draft_folder(path) if Path(path).is_dir() else path
    draft = load_draft(name, dtype=target.dtype, device=target.device)
    if isinstance(draft, SmallModelDraft):
        check_same_tokenizer(
            draft.tokenizer, target.tokenizer, name=str(name), target_name=target.name_or_path
        )
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    return draft.eval()


def load_draft(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """Loads a draft model in eval mode; embeddings have to be attached with `attach_target`.

    Args:
        path: The folder of a draft, or what `SmallModelDraft.load` takes.
        dtype: Of the weights; "auto": as stored.
        device: Where to put it.

    Returns:
        A module that implements `TrainableDraft` and `Drafter`.

    Raises:
        ValueError: if the folder holds no draft, or tensors are missing, unexpected, empty, of the
            wrong shape, or contradict each other.
    """
    draft_class = _draft_class(path)
    if issubclass(draft_class, SmallModelDraft):
        return draft_class.load(str(path), dtype=dtype, device=device).eval()
    folder = Path(path)
    config_class: Any = draft_class.config_class
    config = config_class.from_pretrained(folder)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in draft_class(config).state_dict().items()}
    _check_shapes(folder, expected, _stored_shapes(folder))
    draft, report = draft_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    _check_report(folder, report)
    check_vocabulary_buffers(draft)
    return draft.to(device).eval()


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Raises ValueError where transformers put a tensor somewhere else than under its own name: the
    names were right, so a tensor that it calls missing was taken for another one."""
    wrong = {kind: sorted(map(str, found)) for kind, found in report.items() if found}
    if wrong:
        raise ValueError(
            f"transformers did not load every tensor of {folder} under its name: {wrong}. The "
            "draft would not be the one that was saved; please report it with its config.json."
        )


def _draft_class(path: str | Path) -> Any:
    """The class that a draft's configuration names; ordinary language models are small models."""
    folder = Path(path)
    config_path = folder / "config.json"
    if folder.suffix == ".gguf" or not (folder.is_dir() or folder.is_absolute()):
        return SmallModelDraft  # A GGUF file, a package or a hub id: loading it says what is wrong.
    if not config_path.is_file():
        raise ValueError(
            f"{folder} has no config.json. Expected the folder of a draft model, for example "
            "RUN/draft or RUN/checkpoints/step-000100/draft."
        )
    config = json.loads(config_path.read_text())
    if "draftsmith_class" not in config:
        source = recognise_foreign(folder)
        if source is not None:
            raise ValueError(
                f"{folder} is a draft of another program ({source}). Import it first: "
                f"draftsmith-import checkpoint={folder} target.name_or_path=... output=FOLDER."
            )
    name = config.get("draftsmith_class", DRAFTSMITH_CLASS)
    if not isinstance(name, str) or not name.startswith(CLASS_PREFIX):
        raise ValueError(
            f"{config_path} has draftsmith_class {name!r}, expected a name that starts with "
            f"{CLASS_PREFIX!r}. This is not a draft model saved by draftsmith."
        )
    module_name, _, class_name = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{config_path} names {name}, which this version of draftsmith does not have."
        ) from error


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every stored tensor, from the headers alone."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = json.loads(index_path.read_text())["weight_map"]
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = [folder / "model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: the draft model in {folder} is not complete.")
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def _check_shapes(
    folder: Path, expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> None:
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"The tensors in {folder} do not fit its config. "
            f"Missing: {', '.join(missing) or 'none'}. "
            f"Unexpected: {', '.join(unexpected) or 'none'}."
        )
    wrong = [
        f"{name} is {list(stored[name])}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if stored[name] != shape
    ]
    if wrong:
        raise ValueError(
            f"Tensors in {folder} have the wrong shape (a size of 0 means that a sharded run was "
            f"saved without gathering): {'; '.join(wrong)}."
        )
