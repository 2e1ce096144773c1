"""The draft vocabulary: which target ids a draft head may write.

EAGLE-3 (https://arxiv.org/abs/2503.01840) drafts over the ids that are frequent in the training
answers. Ids are counted under the loss mask only: words that stand in prompts are never drafted.
The mapping is made from counts alone, so it can be rebuilt without touching cached hidden states.

Two forms of the same mapping: absolute ids (`draft_to_target`, used everywhere) and offsets
(`offsets`, the `d2t` of EAGLE-3 checkpoints: target id = draft id + d2t[draft id]).

Axes: vocab (target), draft_vocab. Check: tests/test_vocabulary.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """A choice of target ids, and how much of the training answers it covers."""

    draft_to_target: Tensor
    """[draft_vocab] int64 absolute target ids, ascending, distinct."""
    coverage: float
    """Share of the supervised tokens whose id is in the draft vocabulary; 1.0 without any."""

    @property
    def offsets(self) -> Tensor:
        """[draft_vocab] int64 `d2t`: target id minus draft id."""
        return self.draft_to_target - torch.arange(len(self.draft_to_target))

    def mask(self, vocab_size: int) -> Tensor:
        """[vocab] bool `t2d`: True for target ids that are in the draft vocabulary.

        Args:
            vocab_size: entries of the target's head, padding included.
        """
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[self.draft_to_target] = True
        return mask


def build_draft_vocabulary(
    counts: Tensor,
    *,
    draft_vocab_size: int,
    tokenizer_size: int,
    always_include: Sequence[int],
) -> DraftVocabulary:
    """Picks the most frequent ids; ties and unused places go to the lowest ids.

    Args:
        counts: [vocab] integer counts of supervised tokens.
        draft_vocab_size: ids to pick.
        tokenizer_size: entries of the tokenizer; ids from here on are padding of the target's head
            and are never picked.
        always_include: ids that must be in (the end-of-turn tokens: without them a draft never
            proposes to stop).

    Raises:
        ValueError: the sizes do not fit each other, or an id does not exist.
    """
    usable = min(len(counts), tokenizer_size)
    if not 1 <= draft_vocab_size <= usable:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}; expected 1 to {usable}, the ids that both "
            f"the target ({len(counts)}) and its tokenizer ({tokenizer_size}) have. Set "
            "method.draft_vocab_size, or leave it null for the full vocabulary."
        )
    required = torch.tensor(sorted(set(always_include)), dtype=torch.int64)
    outside = [i for i in required.tolist() if not 0 <= i < usable]
    if outside or len(required) > draft_vocab_size:
        raise ValueError(
            f"always_include holds {required.tolist()}; expected at most {draft_vocab_size} ids "
            f"from 0 to {usable - 1}. Give the target's end-of-turn ids, and a draft vocabulary "
            "that has room for them."
        )
    counts = counts.to(torch.int64)
    if bool(counts[usable:].any()):
        raise ValueError(
            f"Ids from {usable} on are counted, but the tokenizer has {tokenizer_size} entries: "
            "the counts belong to another tokenizer. Prepare the data again for this target."
        )
    rank = counts[:usable].clone()
    rank[required] = torch.iinfo(torch.int64).max
    # A stable sort breaks ties by the lower id, which also fills up with the lowest unused ids.
    picked = torch.sort(rank, descending=True, stable=True).indices[:draft_vocab_size]
    draft_to_target = picked.sort().values
    total = int(counts.sum())
    covered = int(counts[draft_to_target].sum())
    return DraftVocabulary(draft_to_target, covered / total if total else 1.0)
