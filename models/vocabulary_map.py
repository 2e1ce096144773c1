"""The two buffers that tie a reduced draft vocabulary to the target's: `d2t` and `t2d`.

`d2t` [draft_vocab] int64 holds *offsets*: target id = draft id + d2t[draft id] (EAGLE-3's
checkpoint format, read by vLLM and SGLang). `t2d` [vocab] bool marks the target ids that are in the
draft vocabulary. Both ascend in the target id; neither exists when the vocabularies are equal.
Everything but checkpoints works with absolute ids (`draft_to_target`).

Axes: vocab (target), draft_vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def register_vocabulary_buffers(
    module: nn.Module, *, vocab_size: int, draft_vocab_size: int
) -> None:
    """Adds `d2t` and `t2d` (of the first draft_vocab_size ids) unless the sizes are equal.

    Raises:
        ValueError: if the draft vocabulary is larger than the target's, or empty.
    """
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}, expected 1 to {vocab_size} (the target's "
            "vocabulary). Set method.draft_vocab_size, or leave it null for the full vocabulary."
        )
    if draft_vocab_size < vocab_size:
        module.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        module.register_buffer("t2d", torch.arange(vocab_size) < draft_vocab_size)


def set_draft_vocabulary(module: nn.Module, draft_to_target: Tensor) -> None:
    """Writes a draft vocabulary into the module's buffers.

    Args:
        module: One prepared by `register_vocabulary_buffers`.
        draft_to_target: [draft_vocab] int64 absolute target ids, ascending, no duplicates.

    Raises:
        ValueError: if sizes, order or range do not fit.
    """
    d2t, t2d = _buffers(module)
    if draft_to_target.shape != d2t.shape:
        raise ValueError(
            f"The draft vocabulary has {tuple(draft_to_target.shape)} entries, the draft model "
            f"{len(d2t)}. Make both with the same draft_vocab_size."
        )
    ids = draft_to_target.to(d2t)
    if ids[0] < 0 or ids[-1] >= len(t2d) or bool((ids.diff() <= 0).any()):
        raise ValueError(
            f"The draft vocabulary must hold ascending, distinct target ids from 0 to "
            f"{len(t2d) - 1}; it starts {ids[:8].tolist()} and ends {ids[-8:].tolist()}."
        )
    d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    t2d.zero_()
    t2d[ids] = True


def draft_to_target(module: nn.Module) -> Tensor | None:
    """[draft_vocab] int64 absolute target ids, or None when the vocabularies are equal."""
    if not has_reduced_vocabulary(module):
        return None
    d2t, _ = _buffers(module)
    return absolute_ids(d2t)


def absolute_ids(d2t: Tensor) -> Tensor:
    """[draft_vocab] offsets -> absolute target ids."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def has_reduced_vocabulary(module: nn.Module) -> bool:
    """Whether the module has the two buffers."""
    return "d2t" in module._buffers


def check_vocabulary_buffers(module: nn.Module) -> None:
    """Checks that `d2t` and `t2d`, as loaded, describe the same vocabulary.

    Raises:
        ValueError: if they do not; the usual cause is a `d2t` of absolute ids instead of offsets.
    """
    if not has_reduced_vocabulary(module):
        return
    d2t, t2d = _buffers(module)
    from_offsets = absolute_ids(d2t)
    from_mask = t2d.nonzero().squeeze(-1)
    if torch.equal(from_offsets, from_mask):
        return
    absolute = torch.equal(d2t, from_mask)
    raise ValueError(
        f"d2t and t2d disagree: id + offset gives {from_offsets[:8].tolist()}..., the marked ids "
        f"are {from_mask[:8].tolist()}.... "
        + (
            "d2t holds absolute target ids; it must hold offsets (target id - draft id)."
            if absolute
            else "Write both from one draft vocabulary."
        )
    )


def _buffers(module: nn.Module) -> tuple[Tensor, Tensor]:
    d2t, t2d = module.get_buffer("d2t"), module.get_buffer("t2d")
    return d2t, t2d
