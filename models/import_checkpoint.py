"""draftsmith-import: a checkpoint of SafeAILab, vLLM, SGLang, speculators or DeepSpec as our draft.

The result is a folder as training writes it: draftsmith-evaluate measures it, draftsmith-export
writes it in another format, and init_from starts from it. Drafts of ours share the target's
embeddings, so embeddings in the checkpoint must be the target's.

Check: tests/test_export.py (there and back), tests/test_golden_formats.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import Tensor

from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.foreign_files import write_checked, write_folder
from draftsmith.models.format_keys import float_dtype
from draftsmith.models.formats import ForeignDraft, read_foreign
from draftsmith.models.load import load_draft
from draftsmith.models.target import TargetHead
from draftsmith.models.target_facts import (
    TargetSettings,
    embedding_ratio,
    embedding_table,
    read_fingerprint,
    read_target_facts,
    read_target_head,
)


class ImportSettings(Protocol):
    """conf/schema.py, ImportConfig."""

    checkpoint: str
    output: str
    target: TargetSettings
    aux_layer_ids: list[int] | None


def run(settings: ImportSettings) -> None:
    """The verb: reads the checkpoint, writes the draft and says what it is."""
    draft = import_checkpoint(settings)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for remark in draft.remarks:
        console.print(f"Note: {remark}")
    reads = "the final state"
    if isinstance(draft.config, Eagle3Config):
        reads = f"the outputs of layers {draft.config.aux_layer_ids} (0-based)"
    console.print(
        f"{settings.output}: {draft.source}; {len(draft.tensors)} tensors, draft vocabulary "
        f"{draft.config.draft_vocab_size} of {draft.config.vocab_size}, reads {reads}."
    )


def import_checkpoint(settings: ImportSettings) -> ForeignDraft:
    """Writes a draft of ours from another program's checkpoint.

    Raises:
        ValueError: the checkpoint cannot be read (see `read_foreign`), does not belong to the
            target, or the output exists.
    """
    target = read_target_facts(settings.target)
    draft = read_foreign(settings.checkpoint, aux_layer_ids=settings.aux_layer_ids, target=target)
    if draft.embed_tokens is not None or draft.uses_target_head:
        head = read_target_head(settings.target, float_dtype(draft.tensors))
        check_embeddings(draft, head, settings.target.name_or_path)
        if draft.uses_target_head:
            draft.tensors["lm_head.weight"] = _head_rows(draft, head)
    config: Any = draft.config
    config.target_fingerprint = asdict(read_fingerprint(settings.target))
    config.target_name_or_path = settings.target.name_or_path
    config.architectures = [config.draftsmith_class.rpartition(".")[-1]]
    config.dtype = float_dtype(draft.tensors)

    def write(aside: Path) -> None:
        write_folder(aside, json.loads(config.to_json_string()), draft.tensors)
        load_draft(aside)

    write_checked(settings.output, write)
    return draft


def check_embeddings(draft: ForeignDraft, head: TargetHead, name: str) -> None:
    """The checkpoint's embeddings must be the target's; a norm behind them forgives a factor.

    Raises:
        ValueError: they are of another size, or trained.
    """
    if draft.embed_tokens is None:
        return
    ratio = embedding_ratio(draft.embed_tokens, embedding_table(head)[0])
    if ratio is not None and (isinstance(draft.config, Eagle3Config) or abs(ratio - 1) < 1e-2):
        return
    raise ValueError(
        f"The checkpoint has embeddings of its own, {list(draft.embed_tokens.shape)}, which are "
        f"not those of {name}. Drafts of draftsmith read the target's: give the target that the "
        "checkpoint was trained for. One whose embeddings were trained too cannot be read."
    )


def _head_rows(draft: ForeignDraft, head: TargetHead) -> Tensor:
    """[draft_vocab, hidden] the target's head, for a draft that has none."""
    if head.bias is not None or not head.is_plain:
        raise ValueError(
            "The checkpoint uses the target's head, but this target's logits are more than a "
            "product with a matrix (a bias, soft-capping or scaling), which a copy cannot hold."
        )
    draft.remarks.append("It has no head of its own: the target's was copied.")
    d2t = draft.tensors.get("d2t")
    weight = head.weight.detach()
    return weight if d2t is None else weight[d2t + d2t.new_tensor(range(len(d2t)))]
