"""DFlash: a whole block is filled in at once, over features of the target.

Paper: DFlash (arXiv 2602.06036), sections 3 and 4; published code z-lab/dflash, training code
SpecForge (a6b6b02).

    slots    [anchor, mask, mask, ...]; slot k >= 1 predicts the token of its own position a + k
    loss     sum over slots of exp(-(k - 1) / decay) * CE(token a + k), divided by the weights' sum

The backbone is models/block_draft.py. The slots of a block do not know what the others propose: the
further from the anchor, the more the proposals contradict each other (DSpark, models/dspark.py,
corrects that).

Differs from the published code: any of train/objectives.py in place of the cross entropy (KL or
total variation to the target's distribution); anchors are a number per micro-batch; blocks are
packed, none is empty; `sample_from_anchor` (fixed false here) is in the config, because
engines guess it differently.

Check: tests/test_golden_dflash.py (recorded numbers of SpecForge, transformers and z-lab),
tests/test_dflash.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict

from draftsmith.models.block_draft import BlockDraft, BlockDraftConfig
from draftsmith.models.block_method import BlockMethod
from draftsmith.models.target import TargetHead


@strict
class DFlashConfig(BlockDraftConfig):
    """DFlash's settings are those of any block draft."""

    model_type = "draftsmith_dflash"

    draftsmith_class: str = "draftsmith.models.dflash.DFlashDraft"


class DFlashDraft(BlockDraft):
    """The draft model: the backbone alone."""

    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.post_init()


@dataclass
class DFlashMethod(BlockMethod):
    """The `method` node of a run: sizes of the draft and how it is trained."""

    def build(
        self,
        target_head: TargetHead,
        vocabulary: None,
        aux_layer_ids: Sequence[int],
        *,
        target: Mapping[str, Any] | None = None,
    ) -> DFlashDraft:
        """Makes a draft model for a target, float32, attached to it.

        Args:
            target_head: Config, embeddings and head of the target.
            vocabulary: None, the draft proposes every token.
            aux_layer_ids: The layers read.
            target: How the target is loaded, see `BlockMethod.block_settings`.
        """
        assert vocabulary is None, "draft_vocab_size is always null"
        draft = DFlashDraft(
            DFlashConfig(
                **self.block_settings(target_head, aux_layer_ids, target), sample_from_anchor=False
            )
        )
        draft.start_quietly(target_head)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
