"""Logits of a block draft on a fixed random context, for the self-check of an export.

Two rounds of one sequence: the second one reads the cache that the first one left, and its anchor
stands further on. Where a sequential head corrects the logits, the tokens before are drawn from the
same random numbers, so equal drafts draw equal tokens.

Check: tests/test_export_block.py changes each tensor and setting.

Axes: steps, vocab, hidden, layers, rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.block_draft import BlockDraft, BlockDraftConfig
from draftsmith.models.protocols import DraftContext, SamplingSettings
from draftsmith.models.target import TargetHead

VOCABULARY = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
"""Tensors with a row per token."""
ANCHORS = (9, 12)
"""Positions of the two rounds' anchors."""


@torch.no_grad()
def block_logits(
    config: BlockDraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    make: Any,
    make_head: Any,
    count: int,
    seed: int,
) -> Tensor:
    """[2 * steps, count + 1] float32: log probabilities of both rounds' drafted tokens over the
    first tokens of the vocabulary, and their confidences (0 without a head for them).

    Args:
        config: The draft's config.
        tensors: All of its tensors under our names.
        make: Makes a draft of a config.
        make_head: Makes a target's head of a matrix [count, hidden].
        count: Tokens of the small vocabulary; its last one stands for the mask token.
        seed: Of context, embeddings, head and drawn tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = config.hidden_size
    draft = _small_draft(config, tensors, make, count)
    embeddings = nn.Embedding(count, hidden)
    embeddings.weight.copy_(torch.randn(count, hidden, generator=generator))
    head: TargetHead = make_head(torch.randn(count, hidden, generator=generator))
    draft.attach_target(embed_tokens=embeddings, head=head)
    length, layers = ANCHORS[-1] + 1, len(draft.aux_layer_ids)
    ids = torch.randint(count - 1, (1, length), generator=generator)
    aux = torch.randn(1, length, layers * hidden, generator=generator)
    state, rows, first = draft.start(length + config.block_size), [], 0
    for anchor in ANCHORS:
        seen = aux[:, first:anchor]
        (block,) = draft.propose(
            [DraftContext(ids[:, : anchor + 1], seen, seen[..., :hidden])],
            [state],
            num_draft_tokens=[config.num_steps],
            sampling=[SamplingSettings(temperature=1.0)],
            generators=[generator],
        )
        assert block.probs is not None, "sampled tokens have their distribution"
        confidences = block.confidences
        if confidences is None:
            confidences = block.probs.new_zeros(len(block.probs))
        # Clamped: a token that float32 gives no chance at all has no logarithm.
        logs = block.probs.clamp_min(1e-30).log()
        rows.append(torch.cat([logs, confidences[:, None]], dim=-1))
        first = anchor
    return torch.cat(rows)


def _small_draft(
    config: BlockDraftConfig, tensors: Mapping[str, Tensor], make: Any, count: int
) -> BlockDraft:
    """A float32 draft over the first `count` tokens: no other weight depends on the vocabulary."""
    config = copy.deepcopy(config)
    config.vocab_size = count
    config.mask_token_id = count - 1
    draft = make(config).float().eval()
    small = {name: t[:count] if name in VOCABULARY else t for name, t in tensors.items()}
    draft.load_state_dict(small, strict=True)
    return draft
