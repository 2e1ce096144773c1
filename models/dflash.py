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

from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict

from draftsmith.models.block_draft import BlockDraft, BlockDraftConfig
from draftsmith.models.block_method import BlockMethod


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

    def make(self, settings: dict[str, Any]) -> DFlashDraft:
        """A fresh draft."""
        return DFlashDraft(DFlashConfig(**settings, sample_from_anchor=False))
