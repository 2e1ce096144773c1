"""Typed settings of draftsmith-calibrate; without torch, so help is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from draftsmith.conf.schema import TargetConfig, open_dict, require_at_least, require_choice


@dataclass
class CalibrateConfig:
    """draftsmith-calibrate: temperatures for a confidence head, fitted on held-out prompts."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: str = MISSING
    """Folder of a draft model with a confidence head (DSpark), or of a training run."""
    output: str = MISSING
    """Folder for calibration.json, calibration.txt, calibration.html and rounds.jsonl."""
    store: bool = True
    """Write the temperatures into the draft's config.json; false only reports."""
    prompts: str = "bundled"
    """Prompts that the draft was not trained on, as of draftsmith-evaluate. Of each category every
    other one is fitted on, the rest is what the report is about."""
    prompts_subset: str | None = None
    """Configuration of a `datasets` name."""
    prompts_split: str | None = None
    """Split of a `datasets` name or folder."""
    prompts_column: str | None = None
    """Column that holds the prompt, the turns or the messages."""
    limit_per_category: int | None = None
    """Prompts per category; null takes all."""
    max_new_tokens: int = 128
    """Tokens per answer (our choice)."""
    batch_size: int = 8
    """Answers decoded at a time (our choice)."""
    temperature: float = 0.0
    """0 is greedy. Confidences are of one way to sample: calibrate with the one that is served."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Of sampled answers."""
    num_bins: int = 15
    """Bins of the calibration error, of equal width."""
    min_observations: int = 20
    """Rounds of either half that must reach a position: in which all tokens before it stayed (our
    choice)."""
    short_positions: str = "previous"
    """What becomes of positions that fewer rounds reach: previous gives them the temperature of the
    last position with enough, and the report says so; error stops."""
    template_kwargs: dict[str, Any] = field(default_factory=open_dict)
    """Passed to the chat template."""

    def __post_init__(self) -> None:
        self.template_kwargs = dict(self.template_kwargs)
        require_choice("short_positions", self.short_positions, ("error", "previous"))
        require_at_least("temperature", self.temperature, 0.0)
        for name, minimum in (
            ("limit_per_category", 2),
            ("max_new_tokens", 2),
            ("batch_size", 1),
            ("num_bins", 2),
            ("min_observations", 1),
        ):
            require_at_least(name, getattr(self, name), minimum)
