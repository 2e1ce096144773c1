"""Reads what an export or import has to know of a target, without its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.models.format_keys import TargetFacts
from draftsmith.models.target import Fingerprint, TargetHead, fingerprint_target, resolve_target
from draftsmith.models.target_source import loading_arguments, read_config
from draftsmith.models.target_structure import text_config_of

ROWS = 8192
"""Embedding rows computed or compared at a time."""
SAME = 1e-2
"""Largest difference, relative to the largest entry, of embeddings that are the same in another
dtype: bfloat16 keeps 8 bits."""


class TargetSettings(Protocol):
    """How a target is named in the settings (conf/schema.py, TargetConfig)."""

    name_or_path: str
    trust_remote_code: bool
    revision: str | None


@dataclass
class NamedTarget:
    """A target named by a checkpoint instead of by the settings."""

    name_or_path: str
    trust_remote_code: bool = False
    revision: str | None = None


def read_target_facts(target: TargetSettings) -> TargetFacts:
    """Sizes and names from the configuration alone; downloads no weight.

    Raises:
        ValueError: it cannot be found, or is no target.
    """
    source = resolve_target(target.name_or_path)
    arguments = loading_arguments(
        source, trust_remote_code=target.trust_remote_code, revision=target.revision
    )
    config = read_config(target.name_or_path, source, arguments)
    text = text_config_of(config)
    return TargetFacts(
        name_or_path=target.name_or_path,
        source=source,
        architectures=list(config.architectures or []),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def read_target_head(target: TargetSettings, dtype: torch.dtype) -> TargetHead:
    """Embeddings and head of the target in a dtype."""
    return TargetHead.load(
        target.name_or_path,
        dtype=dtype,
        trust_remote_code=target.trust_remote_code,
        revision=target.revision,
    )


def read_fingerprint(target: TargetSettings) -> Fingerprint:
    """The target's fingerprint; its tokenizer is read, of its weights only samples."""
    return fingerprint_target(
        target.name_or_path,
        trust_remote_code=target.trust_remote_code,
        revision=target.revision,
    )


@torch.no_grad()
def embedding_table(head: TargetHead) -> tuple[Tensor, bool]:
    """[vocab, hidden] embeddings as the layers read them, and whether they are scaled for that."""
    matrix = head.embed_tokens.weight
    assert isinstance(matrix, Tensor), "an embedding, or shaped like one"
    ids = torch.arange(min(ROWS, len(matrix)), device=matrix.device)
    if torch.equal(head.embed_tokens(ids), matrix[ids]):
        return matrix, False
    every = torch.arange(len(matrix), device=matrix.device)
    return torch.cat([head.embed_tokens(part) for part in every.split(ROWS)]), True


@torch.no_grad()
def embedding_ratio(own: Tensor, target: Tensor) -> float | None:
    """c where the tables agree but for one constant factor, own = c * target; None: they do not.

    Args:
        own: [vocab, hidden] the draft's.
        target: [vocab, hidden] the target's.
    """
    if own.shape != target.shape:
        return None
    products, squares, largest = 0.0, 0.0, 0.0
    for mine, theirs in _parts(own, target):
        products += float((mine * theirs).sum())
        squares += float((theirs * theirs).sum())
        largest = max(largest, float(mine.abs().max()))
    ratio = products / squares if squares else 0.0
    errors = (float((mine - ratio * theirs).abs().max()) for mine, theirs in _parts(own, target))
    return ratio if ratio > 0 and max(errors) <= SAME * largest else None


def _parts(own: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [
        (mine.double(), theirs.double())
        for mine, theirs in zip(own.split(ROWS), target.split(ROWS), strict=True)
    ]
