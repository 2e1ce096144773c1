"""What is checked before a weight is loaded: target, layers, vocabulary, data, cache.

Reads configurations, the tokenizer, manifests and indices only. Every mistake that would otherwise
show after minutes of loading, or never, is a ValueError here that says what to set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from draftsmith.data.cache import HiddenStateCache
from draftsmith.data.prepare import PreparedData, load_prepared
from draftsmith.data.prepared_rows import RowScan, scan_rows
from draftsmith.models.target import default_aux_layer_ids, validate_aux_layer_ids
from draftsmith.models.target_source import (
    Fingerprint,
    check_vocabulary,
    collect_eos_token_ids,
    explained_load_errors,
    load_tokenizer,
    loading_arguments,
    make_fingerprint,
    read_config,
    resolve_target,
)
from draftsmith.models.target_structure import text_config_of
from draftsmith.train.config import DraftMethod, TrainConfig, build_method
from draftsmith.train.objectives import make_objective

UNLIMITED_POSITIONS = 1 << 30
"""For targets whose configuration states no longest sequence."""


@dataclass(frozen=True)
class OpenedRows:
    """One set of rows, opened: a cache, or prepared data for live features and bare tokens."""

    cache: HiddenStateCache | None = None
    prepared: PreparedData | None = None
    scan: RowScan | None = None
    """Of `prepared`."""


@dataclass(frozen=True)
class Preflight:
    """What the checks found out; the run is built from it."""

    method: DraftMethod
    fingerprint: Fingerprint
    aux_layer_ids: tuple[int, ...]
    vocab_size: int
    """Of the target's head, padding included."""
    tokenizer_size: int
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer; always in the draft vocabulary."""
    rows: OpenedRows
    validation_rows: OpenedRows | None
    """Of data.validation; None when a share of `rows` is held out, or nothing is."""


@dataclass(frozen=True)
class _Target:
    """The parts of a target that need no weights."""

    config: Any  # a transformers config; its fields differ by family
    fingerprint: Fingerprint
    tokenizer_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)


def check_before_start(settings: TrainConfig) -> Preflight:
    """Runs all checks, the quick ones first: reading a target may convert or download it.

    Raises:
        ValueError: something does not fit; says what was found, what was expected, what to do.
    """
    method = build_method(settings.method)
    make_objective(**method.objective)
    _check_source(method, settings)
    rows, validation_rows = _open_rows(settings)
    target = _read_target(settings)
    method.validate(target.num_layers, target.vocab_size)
    wanted = method.aux_layer_ids
    if wanted is None:  # An empty list is a choice too: the final state alone.
        wanted = list(default_aux_layer_ids(target.num_layers))
    aux_layer_ids = validate_aux_layer_ids(wanted, target.num_layers)
    rows = _check_rows(rows, target, aux_layer_ids)
    if validation_rows is not None:
        validation_rows = _check_rows(validation_rows, target, aux_layer_ids)
    if rows.cache is not None and settings.data.prepared is not None:
        _check_made_from(rows.cache, load_prepared(settings.data.prepared), target)
    return Preflight(
        method=method,
        fingerprint=target.fingerprint,
        aux_layer_ids=aux_layer_ids,
        vocab_size=target.vocab_size,
        tokenizer_size=target.tokenizer_size,
        eos_token_ids=target.eos_token_ids,
        rows=rows,
        validation_rows=validation_rows,
    )


def _check_source(method: DraftMethod, settings: TrainConfig) -> None:
    """Insists on target states where the method reads them, and on none where it would not.

    Raises:
        ValueError: says which features to choose.
    """
    trains_target = getattr(method, "trains_target", False)
    source, name = settings.features.source, type(method).__name__
    if source == "tokens" and not trains_target:
        raise ValueError(
            f"features=tokens has no states of the target, which {name} reads. Set features=cached "
            "features.cache=FOLDER, or features=live."
        )
    if source != "tokens" and trains_target:
        raise ValueError(
            f"{name} trains the target itself, so states that the target had before "
            f"(features={source}) are of no use to it. Set features=tokens data.prepared=FOLDER."
        )


def _open_rows(settings: TrainConfig) -> tuple[OpenedRows, OpenedRows | None]:
    """Opens the training rows and those of data.validation, without looking at the target."""
    source = settings.features.source
    from_cache = source == "cached"
    if not from_cache and settings.features.cache is not None:
        sys.stderr.write(f"draftsmith: features={source} does not read features.cache\n")
    path = settings.features.cache if from_cache else settings.data.prepared
    held_out = settings.data.validation
    assert path is not None, "TrainConfig refuses a source without its folder"
    if held_out is not None and Path(held_out).resolve() == Path(path).resolve():
        raise ValueError(
            f"data.validation is {held_out}, the folder that is trained on. Give another one, or "
            "set data.validation=null to hold out data.validation_share of it."
        )

    def opened(folder: str) -> OpenedRows:
        if from_cache:
            return OpenedRows(cache=HiddenStateCache.open(folder))
        return OpenedRows(prepared=load_prepared(folder))

    return opened(path), None if held_out is None else opened(held_out)


def _check_rows(rows: OpenedRows, target: _Target, aux_layer_ids: Sequence[int]) -> OpenedRows:
    """Insists that opened rows belong to this target and have these layers."""
    if rows.cache is not None:
        rows.cache.require(target.fingerprint, aux_layer_ids)
        return rows
    assert rows.prepared is not None, "rows are a cache or prepared data"
    return replace(rows, scan=_scan_prepared(rows.prepared, target))


def _read_target(settings: TrainConfig) -> _Target:
    """Config, tokenizer and fingerprint of the target."""
    name, revision = settings.target.name_or_path, settings.target.revision
    source = resolve_target(name)
    arguments = loading_arguments(
        source, trust_remote_code=settings.target.trust_remote_code, revision=revision
    )
    config = read_config(name, source, arguments)
    text_config = text_config_of(config)
    tokenizer = load_tokenizer(name, source, arguments)
    check_vocabulary(name, tokenizer, text_config.vocab_size)
    generation_config = None
    if (Path(source) / "generation_config.json").is_file() or not Path(source).is_dir():
        arguments.pop("trust_remote_code")
        with explained_load_errors(name):
            generation_config = GenerationConfig.from_pretrained(source, **arguments)
    return _Target(
        config=text_config,
        fingerprint=make_fingerprint(name, source, tokenizer, revision=revision),
        tokenizer_size=len(tokenizer),
        eos_token_ids=collect_eos_token_ids(
            config, generation_config, tokenizer, text_config.vocab_size
        ),
    )


def _scan_prepared(prepared: PreparedData, target: _Target) -> RowScan:
    """Looks through prepared data, insisting on this target's tokenizer and template.

    Raises:
        ValueError: it was made with others, or holds rows that the target cannot read.
    """
    for part in ("tokenizer", "chat_template"):
        if getattr(prepared.info, part) != getattr(target.fingerprint, part):
            raise ValueError(
                f"{prepared.path} was prepared with another {part.replace('_', ' ')} than this "
                f"target's (for {prepared.info.target}). Run draftsmith-prepare with this target."
            )
    longest = getattr(target.config, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    return scan_rows(prepared.dataset, vocab_size=target.vocab_size, max_positions=longest)


def _check_made_from(cache: HiddenStateCache, prepared: PreparedData, target: _Target) -> None:
    """Raises ValueError when `cache` was not made from these prepared rows."""
    if _scan_prepared(prepared, target).sha256 != cache.manifest.settings.data_sha256:
        raise ValueError(
            f"The cache {cache.folder} was not made from the rows in {prepared.path}. Drop "
            "data.prepared (a cache holds its own tokens), or run draftsmith-cache again."
        )
