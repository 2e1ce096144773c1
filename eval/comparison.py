"""What a comparison found: one evaluation per draft model and setting, and its rows."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.eval.results import EvaluationResult


@dataclass
class ComparedLane:
    """One draft model with one setting."""

    draft: str
    """Its name in the comparison."""
    setting: str
    """The setting's name; of plain decoding, how the target samples."""
    result: EvaluationResult

    @property
    def is_plain(self) -> bool:
        return self.result.draft is None

    @property
    def accepted_length(self) -> float | None:
        return self.result.overall.acceptance.accepted_length

    @property
    def tokens_per_second(self) -> float:
        """On the answers that were decoded both ways, where there are any."""
        overall = self.result.overall
        return (overall.timed or overall).tokens_per_second

    @property
    def speed_up(self) -> float | None:
        """Over plain decoding of the same answers; plain decoding itself is 1."""
        if self.is_plain:
            return 1.0
        timed = self.result.overall.timed
        return None if timed is None else timed.speed_up


@dataclass
class Comparison:
    """All lanes, draft by draft."""

    target: str
    lanes: list[ComparedLane]

    @property
    def drafted(self) -> list[ComparedLane]:
        """The lanes with a draft model."""
        return [lane for lane in self.lanes if not lane.is_plain]

    @property
    def drafts(self) -> list[str]:
        """Names of the draft models, plain decoding left out."""
        return list(dict.fromkeys(lane.draft for lane in self.drafted))

    @property
    def settings(self) -> list[str]:
        """Names of the settings."""
        return list(dict.fromkeys(lane.setting for lane in self.drafted))

    @property
    def categories(self) -> list[str]:
        return list(self.lanes[0].result.by_category)

    def lane(self, draft: str, setting: str) -> ComparedLane:
        """The lane of a draft model and a setting."""
        (found,) = [one for one in self.drafted if (one.draft, one.setting) == (draft, setting)]
        return found
