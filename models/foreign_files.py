"""Reads and writes the files of checkpoint folders as they are: no defaults, no conversion.

transformers' own loading would draw missing tensors at random and fill in missing keys; here a
folder is what it says. Pickled files are read with `weights_only=True`: they cannot run code.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"


def read_config_file(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder.

    Raises:
        ValueError: it is missing or is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json. Expected the folder of a checkpoint (a hub model has to "
            "be downloaded first, for example with `hf download NAME --local-dir FOLDER`)."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object.")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: safetensors, or pickled ones, in one file or several.

    Raises:
        ValueError: there is no weight file, or one is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        if not file.is_file():
            raise ValueError(f"{file} is missing: the checkpoint in {folder} is not complete.")
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise ValueError(f"{folder} holds the tensor {name} twice.")
            tensors[name] = tensor
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Names of the stored tensors, from the headers alone where the files have any."""
    names: set[str] = set()
    for file in _weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                names |= set(tensors.keys())
        else:
            names |= _read_file(file).keys()
    return names


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors first."""
    for name in (SAFETENSORS, PICKLED):
        index = folder / f"{name}.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted({folder / file for file in weight_map.values()})
        if (folder / name).is_file():
            return [folder / name]
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(
        f"{folder} has neither {SAFETENSORS} nor {PICKLED} (nor an index of several); it holds "
        f"{found}."
    )


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{file} cannot be read: it is damaged, or holds more than tensors. Cause: {error}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ValueError(f"{file} does not hold a dictionary of tensors.")
    return loaded


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    # The format refuses tensors that share memory, and views of a larger one.
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / SAFETENSORS, metadata={"format": "pt"})
    # safetensors lets only its owner read the file; an engine may run as somebody else.
    (folder / SAFETENSORS).chmod((folder / "config.json").stat().st_mode)


def write_checked(output: str | Path, write: Callable[[Path], None]) -> Path:
    """Writes a folder aside and moves it into place when `write` is done: whole, or not at all.

    Args:
        output: The folder to make.
        write: Fills the folder it is given and checks what it wrote.

    Raises:
        ValueError: the folder exists and is not empty; or what `write` raises.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty. Choose another output.")
    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write(aside)
        aside.rename(folder)  # Takes the place of an empty folder.
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
