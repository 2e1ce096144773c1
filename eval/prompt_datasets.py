"""Prompts from `datasets`: a folder written by save_to_disk, or a name (of a hub or of a folder).

Rows have the forms of draftsmith.eval.prompts. This module is imported only when such a source is
asked for: `datasets` takes a second to load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from draftsmith.eval.prompts import Prompt, parse_prompt, require_distinct_ids


def read_prompt_dataset(
    source: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    column: str | None = None,
) -> list[Prompt]:
    """Reads every row of one split.

    Args:
        source: a folder, or a name for `datasets.load_dataset`.
        subset: configuration of the name; None: its only or default one.
        split: None: the only one.
        column: see `parse_prompt`.

    Raises:
        ValueError: nothing there, several splits or subsets and none chosen, or a row that is no
            prompt.
    """
    found = _open_saved(source, subset, split) or _load_name(source, subset, split)
    rows = _only_split(found, source) if isinstance(found, datasets.DatasetDict) else found
    name = f"data set {source}"
    if column is not None and column not in rows.column_names:
        raise ValueError(
            f"prompts_column is {column!r}, but {name} has {', '.join(rows.column_names)}."
        )
    prompts = [
        parse_prompt(row, place=f"{name}, row {number}", default_id=f"row-{number}", column=column)
        for number, row in enumerate(rows, start=1)
    ]
    return require_distinct_ids(prompts, name)


def _open_saved(source: str, subset: str | None, split: str | None) -> Any:
    """What save_to_disk wrote, the split chosen; None when `source` is no such folder."""
    several = (Path(source) / "dataset_dict.json").is_file()
    if not several and not (Path(source) / "state.json").is_file():
        return None
    for name, value in (("prompts_subset", subset), ("prompts_split", split)):
        if value is not None and not (several and name == "prompts_split"):
            raise ValueError(
                f"{name} is {value!r}, but {source} is a saved data set that has none. Remove it."
            )
    found = datasets.load_from_disk(source)
    if split is None:
        return found
    if split not in found:
        raise ValueError(
            f"prompts={source} has the splits {', '.join(found)}, but not {split}. Set "
            "prompts_split to one of them."
        )
    return found[split]


def _load_name(source: str, subset: str | None, split: str | None) -> Any:
    try:
        return datasets.load_dataset(source, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # Hub and network errors are OSErrors; an unknown split or subset is a ValueError.
        raise ValueError(
            f"`datasets` cannot load prompts={source} (prompts_subset {subset}, prompts_split "
            f"{split}): {error} Give a name it knows, a folder written by save_to_disk, or a JSONL "
            "file."
        ) from error


def _only_split(found: datasets.DatasetDict, source: str) -> datasets.Dataset:
    names = list(found)
    if len(names) != 1:
        raise ValueError(
            f"prompts={source} has the splits {', '.join(names)}. Set prompts_split to one of them."
        )
    return found[names[0]]
