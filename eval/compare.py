"""draftsmith-compare: several draft models and ways to decode, on the same prompts in one run.

    draftsmith-compare target=smollm2 'drafts={a: runs/a, b: runs/b}' output=runs/compare

Every draft model is decoded with every setting. For each prompt all of them take turns, one right
after the other and starting with another one each time, so that what else the machine does hits all
alike; plain decoding and the target's greedy answers are shared. A draft called none is plain
decoding of all prompts, once per way to sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.conf.entry import run_verb
from draftsmith.conf.schema import CompareConfig, CompareSetting
from draftsmith.eval.compare_report import write_comparison
from draftsmith.eval.comparison import ComparedLane, Comparison
from draftsmith.eval.evaluate import (
    evaluate_lanes,
    load_draft_for,
    load_prompts_for,
    load_target,
)
from draftsmith.eval.lanes import Lane
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import report_console
from draftsmith.eval.settings import (
    EvaluationSettings,
    describe_sampling,
    policy_from_config,
    sampling_from_setting,
)
from draftsmith.eval.simulated import find_simulated
from draftsmith.inference.plain import GreedyAnswers
from draftsmith.models.load import draft_folder
from draftsmith.models.protocols import Drafter, SamplingSettings
from draftsmith.models.target import TargetModel

if TYPE_CHECKING:
    from accelerate import PartialState


@dataclass(frozen=True)
class _Combination:
    """One row of the comparison."""

    draft_name: str
    draft: Drafter | None
    setting_name: str
    settings: EvaluationSettings


def _combinations(
    drafts: Mapping[str, Drafter | None], settings: Mapping[str, EvaluationSettings]
) -> list[_Combination]:
    """Every draft model with every setting; plain decoding has no policy, only sampling."""
    found = []
    for draft_name, draft in drafts.items():
        if draft is not None:
            found += [_Combination(draft_name, draft, name, one) for name, one in settings.items()]
            continue
        distinct: dict[SamplingSettings, EvaluationSettings] = {}
        for one in settings.values():
            distinct.setdefault(one.sampling, one)
        found += [
            _Combination(draft_name, None, describe_sampling(sampling), one)
            for sampling, one in distinct.items()
        ]
    return found


def compare(
    target: TargetModel,
    drafts: Mapping[str, Drafter | None],
    settings: Mapping[str, EvaluationSettings],
    prompts: Sequence[Prompt],
    *,
    answers: GreedyAnswers | None = None,
    show_progress: bool = False,
    state: PartialState | None = None,
) -> Comparison:
    """Measures every draft model with every setting on the same prompts.

    Args:
        target: the frozen target.
        drafts: name -> draft model with the target attached; None is plain decoding.
        settings: name -> how to decode; they differ in policy and sampling alone.
        prompts: at least one.
        answers: the target's own greedy answers; None makes them here.
        show_progress: draw a progress bar on stderr.
        state: see `evaluate_lanes`.

    Raises:
        ValueError: no drafts or settings; else see `evaluate_lanes`.
    """
    if not drafts or not settings:
        raise ValueError("There is nothing to compare: name at least one draft and one setting.")
    combinations = _combinations(drafts, settings)
    results = evaluate_lanes(
        target,
        [Lane(one.draft, one.settings, one.draft_name) for one in combinations],
        prompts,
        answers=answers,
        show_progress=show_progress,
        state=state,
    )
    return Comparison(
        target.name_or_path,
        [
            ComparedLane(one.draft_name, one.setting_name, result)
            for one, result in zip(combinations, results, strict=True)
        ],
    )


def _settings(config: CompareConfig, setting: CompareSetting) -> EvaluationSettings:
    return EvaluationSettings(
        max_new_tokens=config.max_new_tokens,
        policy=policy_from_config(setting),
        sampling=sampling_from_setting(setting),
        seed=config.seed,
        baseline_prompts_per_category=config.baseline_prompts_per_category,
        check_lossless=config.check_lossless,
        template_kwargs=config.template_kwargs,
        confidence_threshold=setting.confidence_threshold,
    )


def _is_plain(path: str | None) -> bool:
    return path is None or path.lower() == "none"


def run(config: CompareConfig) -> None:
    """The verb: loads, compares, prints the table and writes the files."""
    prompts = load_prompts_for(config)
    settings = {
        name: _settings(config, setting)
        for name, setting in (config.settings or config.default_settings).items()
    }
    target, state = load_target(config.target)
    drafts: dict[str, Drafter | None] = {}
    for name, path in config.drafts.items():
        try:
            drafts[name] = None if path is None or _is_plain(path) else load_draft_for(path, target)
        except ValueError as error:
            raise ValueError(f"drafts.{name}: {error}") from error
    found = compare(target, drafts, settings, prompts, show_progress=True, state=state)
    for lane in found.lanes:
        path = config.drafts[lane.draft]
        if path is not None and not _is_plain(path):
            lane.result.simulated = find_simulated(draft_folder(path))
    if state is None or state.is_main_process:
        paths = {name: None if _is_plain(path) else path for name, path in config.drafts.items()}
        write_comparison(found, paths, Path(config.output), report_console())
    if state is not None:
        state.wait_for_everyone()
        state.destroy_process_group()


def main() -> None:
    """Entry point of python -m draftsmith.eval.compare, for launchers."""
    run_verb(run, root="compare", schema="draftsmith.conf.schema:CompareConfig")


if __name__ == "__main__":
    main()
