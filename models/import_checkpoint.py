"""draftsmith-import: a draft of another program (docs/serving.md names them) as a draft of ours.

The result is a folder as training writes it: draftsmith-evaluate measures it, draftsmith-export
writes it in another format, and init_from starts from it. Drafts of ours share the target's
embeddings, and block drafts its head, so what the checkpoint holds of them must be the target's.

Check: tests/test_export.py and tests/test_export_block.py (there and back),
tests/test_golden_formats.py, tests/test_golden_block.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import Tensor

from draftsmith.models.block_draft import BlockDraftConfig
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
    config, reads = draft.config, "the final state"
    if isinstance(config, Eagle3Config | BlockDraftConfig):
        reads = f"the outputs of layers {config.aux_layer_ids} (0-based)"
    if isinstance(config, BlockDraftConfig):
        proposes = (
            f"blocks of {config.block_size} slots that propose {config.num_steps} tokens, mask "
            f"token {config.mask_token_id}"
        )
    else:
        proposes = f"draft vocabulary {config.draft_vocab_size} of {config.vocab_size}"
    console.print(
        f"{settings.output}: {draft.source}; {len(draft.tensors)} tensors, {proposes}, reads "
        f"{reads}."
    )


def import_checkpoint(settings: ImportSettings) -> ForeignDraft:
    """Writes a draft of ours from another program's checkpoint.

    Raises:
        ValueError: the checkpoint cannot be read (see `read_foreign`), does not belong to the
            target, or the output exists.
    """
    target = read_target_facts(settings.target)
    draft = read_foreign(settings.checkpoint, aux_layer_ids=settings.aux_layer_ids, target=target)
    if draft.holds_target or draft.uses_target_head:
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
    """What the checkpoint holds of the target must be this target's: embeddings, and a block
    draft's head. A norm behind an EAGLE-3 draft's embeddings forgives a factor.

    Raises:
        ValueError: they are of another size, or trained.
    """
    if draft.embed_tokens is not None:
        ratio = embedding_ratio(draft.embed_tokens, embedding_table(head)[0])
        forgiven = isinstance(draft.config, Eagle3Config)
        if ratio is None or not (forgiven or abs(ratio - 1) < 1e-2):
            raise ValueError(
                "The checkpoint has embeddings of its own, "
                f"{list(draft.embed_tokens.shape)}, which are not those of {name}. Drafts of "
                "draftsmith read the target's: give the target that the checkpoint was trained "
                "for. One whose embeddings were trained too cannot be read."
            )
    rows = draft.target_head
    if rows is not None:
        own = head.weight.detach() if rows.ids is None else head.weight.detach()[rows.ids]
        ratio = embedding_ratio(rows.weight, own)
        if ratio is None or abs(ratio - 1) >= 1e-2:
            raise ValueError(
                f"The checkpoint has a head of its own, {list(rows.weight.shape)}, which is not "
                f"that of {name}. Block drafts of draftsmith predict with the target's: give the "
                "target that the checkpoint was trained for. One whose head was trained too "
                "cannot be read."
            )
        draft.remarks.append(
            "Its head is the target's and left out, as embeddings are: drafts of this kind use "
            "the target's own."
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
