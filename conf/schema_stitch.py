"""Typed settings of draftsmith-stitch; without torch, so help is instant.

Each field has its meaning below it. Values come from conf/stitch.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from draftsmith.conf.schema import TargetConfig, require_choice

LAYOUTS = ("deepseek", "hy3", "qwen", "mimo")
"""Names of models/format_mtp.py."""


@dataclass
class StitchConfig:
    """draftsmith-stitch: MTP modules written into the target's own checkpoint."""

    draft: str = MISSING
    """Folder of an MTP draft, or of a training run."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """A local folder; only its name is read."""
    output: str = MISSING
    """Folder to make; it must not exist, or be empty."""
    layout: str | None = None
    """Names that the family uses: deepseek (DeepSeek-V3, GLM-4.x), hy3, qwen (Qwen3-Next, Qwen3.5)
    or mimo. null: that of the modules which the target carries already."""
    replace: bool = False
    """The target carries MTP modules: write the draft's in their place."""
    copies: bool = True
    """deepseek: the target's embeddings and head again in every module, as published checkpoints
    have; engines share the target's."""
    link: bool = True
    """Unchanged weight files become hard links to the target's where the disk allows it, else
    copies. false: always copies, so that nobody who changes one changes both."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            require_choice("layout", self.layout, LAYOUTS)
