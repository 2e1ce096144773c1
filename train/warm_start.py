"""Starts a draft from the weights of another: one of ours, or one of another program.

The weights of a draft mean something only in the layout that they were trained in, so every setting
of the layout is compared, not only the shapes. The draft vocabulary may change: the head's rows go
with their tokens (`init_vocabulary=rebuild`), or the checkpoint's vocabulary stays (`keep`).

Check: tests/test_warm_start.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.vocabulary import DraftVocabulary
from draftsmith.models.format_keys import float_dtype
from draftsmith.models.format_mtp import native_layout
from draftsmith.models.formats import read_foreign, recognise_foreign
from draftsmith.models.import_checkpoint import check_embeddings
from draftsmith.models.load import draft_folder, load_draft
from draftsmith.models.target_facts import read_target_facts, read_target_head
from draftsmith.models.vocabulary_map import absolute_ids
from draftsmith.train.config import TargetConfig

HEAD = "lm_head.weight"
VOCABULARY = ("d2t", "t2d")
LAYOUT = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "hidden_act",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "aux_layer_ids",
    "qk_norm",
    "attention_bias",
    "fc_bias",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "layer_types",
    "sliding_window",
    "sequential_head",
    "confidence_with_markov",
    "num_modules",
    "concat",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "block",
)
"""Settings that change what the same weights compute, or the tokens that they know."""


@dataclass
class WarmStart:
    """What a checkpoint brings."""

    folder: str
    config: Any
    tensors: dict[str, Tensor]
    remark: str = ""
    """What had to be assumed of it."""

    @property
    def draft_to_target(self) -> Tensor | None:
        """[draft_vocab] absolute target ids; None: the full vocabulary, or not a chain draft."""
        d2t = self.tensors.get("d2t")
        return None if d2t is None else absolute_ids(d2t)


def read_warm_start(folder: str, target: TargetConfig, aux_layer_ids: Sequence[int]) -> WarmStart:
    """Reads a checkpoint to start from.

    Args:
        folder: A draft or training run of ours, or a folder that draftsmith-import reads.
        target: The target of this run.
        aux_layer_ids: The target layers that this run's draft reads; taken for the checkpoint's
            where that does not say.

    Raises:
        ValueError: it cannot be read, or has embeddings or a head that are not the target's.
    """
    path = draft_folder(folder)
    if recognise_foreign(path) is None and native_layout(path) is None:
        draft = load_draft(path, dtype="float32", device="cpu")
        return WarmStart(folder, draft.config, dict(draft.state_dict()))
    facts, remark = read_target_facts(target), ""
    try:
        found = read_foreign(path, target=facts)
    except ValueError:
        if not aux_layer_ids:
            raise
        found = read_foreign(path, aux_layer_ids=aux_layer_ids, target=facts)
        remark = (
            f"; it does not say which target layers it reads, so this run's are taken for them: "
            f"{list(aux_layer_ids)} (0-based outputs)"
        )
    if found.holds_target:
        head = read_target_head(target, float_dtype(found.tensors))
        check_embeddings(found, head, target.name_or_path)
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in found.tensors.items()
    }
    return WarmStart(folder, found.config, tensors, remark)


def kept_vocabulary(start: WarmStart, counts: Tensor) -> DraftVocabulary | None:
    """The checkpoint's vocabulary, with its coverage of this run's supervised tokens.

    Args:
        start: The checkpoint.
        counts: [vocab] supervised tokens of this run's data.
    """
    ids = start.draft_to_target
    if ids is None:
        return None
    total = int(counts.sum())
    return DraftVocabulary(ids, int(counts[ids].sum()) / total if total else 1.0)


def apply_warm_start(draft: Any, start: WarmStart, *, vocabulary: str) -> str:
    """Starts `draft` from a checkpoint.

    Args:
        draft: A fresh draft (a transformers model), its vocabulary set.
        start: The checkpoint.
        vocabulary: `init_vocabulary` of the run: same, keep or rebuild.

    Returns:
        What was taken over, for people.

    Raises:
        ValueError: its layout, its tensors or its draft vocabulary differ.
    """
    _check_layout(draft, start)
    found = dict(start.tensors)
    own = draft.state_dict()
    said = f"Starting from {start.folder}{start.remark}"
    ids, own_ids = start.draft_to_target, getattr(draft, "draft_to_target", None)
    if not _same(ids, own_ids):
        if vocabulary == "same":
            raise ValueError(
                f"init_from={start.folder} has another draft vocabulary ({_size(ids)} tokens; this "
                f"run's data give {_size(own_ids)}). Set init_vocabulary=rebuild to take this "
                "run's (the head's rows go with their tokens), or init_vocabulary=keep to stay "
                "with the checkpoint's."
            )
        vocab_size = draft.config.vocab_size
        kept = _move_rows(found, own, ids, own_ids, vocab_size)
        said += (
            f"; draft vocabulary rebuilt: {kept} of its "
            f"{vocab_size if own_ids is None else len(own_ids)} tokens are known to the checkpoint"
        )
    elif HEAD not in found and HEAD in own:
        # A checkpoint that uses the target's head: this draft's starts as the target's rows.
        found[HEAD] = own[HEAD]
    _check_shapes(found, own, start.folder)
    draft.load_state_dict(found)
    return said


def _check_layout(draft: Any, start: WarmStart) -> None:
    for name in LAYOUT:
        before, now = getattr(start.config, name, None), getattr(draft.config, name, None)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                # Of a target's whole configuration, what differs.
                both = {key for key in before | now if before.get(key) != now.get(key)}
                before = {key: before.get(key) for key in both}
                now = {key: now.get(key) for key in both}
            raise ValueError(
                f"init_from={start.folder} was trained with {name}={before!r}, but this run has "
                f"{now!r}. The same weights would compute something else: use the settings of the "
                "checkpoint (method.*), or start anew."
            )


def _same(ids: Tensor | None, own: Tensor | None) -> bool:
    if ids is None or own is None:
        return ids is own
    return torch.equal(ids, own.to(ids.device))


def _size(ids: Tensor | None) -> str:
    return "all" if ids is None else str(len(ids))


def _move_rows(
    found: dict[str, Tensor],
    own: dict[str, Tensor],
    ids: Tensor | None,
    own_ids: Tensor | None,
    vocab_size: int,
) -> int:
    """Puts this run's vocabulary into `found`; returns how many of its tokens had a row there."""
    for name in VOCABULARY:
        found.pop(name, None)
        if name in own:
            found[name] = own[name]
    wanted = torch.arange(vocab_size) if own_ids is None else own_ids
    if ids is None:
        known, place = torch.ones(len(wanted), dtype=torch.bool), wanted
    else:
        place = torch.searchsorted(ids, wanted).clamp_max(len(ids) - 1)
        known = ids[place] == wanted
    if HEAD in own:
        rows = own[HEAD].clone()  # New tokens keep their fresh start.
        if HEAD in found:
            rows[known] = found[HEAD][place[known]].to(rows.dtype)
        found[HEAD] = rows
    return int(known.sum())


def _check_shapes(found: dict[str, Tensor], own: dict[str, Tensor], folder: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    other = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes == other:
        return
    differing = sorted(name for name in {*shapes, *other} if shapes.get(name) != other.get(name))
    name = differing[0]
    raise ValueError(
        f"init_from={folder} does not fit this method: {name} has the shape {other.get(name)} "
        f"there and {shapes.get(name)} here ({len(differing)} tensors differ). Use the method "
        "settings it was trained with."
    )
