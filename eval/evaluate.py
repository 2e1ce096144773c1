"""draftsmith-evaluate: what a draft model is worth on a target, measured.

    draftsmith-evaluate target=smollm2 draft=runs/train output=runs/evaluation

Decodes prompts with the draft model, times plain decoding of some of them in between (so that a
disturbance of the machine hits both), compares greedy answers with the target's own, and writes the
report. Every number is defined in draftsmith.eval.metrics. Under accelerate launch or torchrun the
prompts are shared by the processes:

    torchrun --nproc_per_node 4 -m draftsmith.eval.evaluate target=... draft=... output=...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.conf.entry import run_verb
from draftsmith.conf.schema import EvaluateConfig, PromptsConfig, TargetConfig
from draftsmith.data.processes import join_processes
from draftsmith.eval.conditions import describe_conditions
from draftsmith.eval.lanes import Lane, LaneRunner, plan_prompts
from draftsmith.eval.lossless import check_lossless, replay_lookup
from draftsmith.eval.prompts import Prompt, load_prompts, template_mode
from draftsmith.eval.report import report_console, write_report
from draftsmith.eval.results import EvaluationResult
from draftsmith.eval.settings import EvaluationSettings, make_settings
from draftsmith.eval.sharding import Lanes, gather_lanes, launched, own_share
from draftsmith.eval.simulated import find_simulated
from draftsmith.inference.plain import GreedyAnswers
from draftsmith.models.load import draft_folder, load_drafter
from draftsmith.models.protocols import Drafter
from draftsmith.models.target import Fingerprint, TargetModel, resolve_target

if TYPE_CHECKING:
    from accelerate import PartialState


def check_target(recorded: Mapping[str, str] | None, target: TargetModel) -> None:
    """Insists that a draft model belongs to this target.

    Args:
        recorded: the fingerprint in the draft model's config; None for one that was never trained.
        target: the loaded target.

    Raises:
        ValueError: weights, tokenizer or chat template differ.
    """
    if recorded is None:
        return
    trained_on = Fingerprint(**recorded)
    differing = trained_on.differences(target.fingerprint)
    if differing:
        raise ValueError(
            f"The draft model was trained for another target: {', '.join(differing)} differ. It "
            f"records {trained_on.describe()}; {target.name_or_path} has "
            f"{target.fingerprint.describe()}. Evaluate it on its own target, or train one for "
            "this target."
        )


def evaluate_lanes(
    target: TargetModel,
    lanes: Sequence[Lane],
    prompts: Sequence[Prompt],
    *,
    answers: GreedyAnswers | None = None,
    show_progress: bool = False,
    state: PartialState | None = None,
) -> list[EvaluationResult]:
    """Measures several ways to decode on the same prompts, interleaved.

    Args:
        target: the frozen target.
        lanes: at least one; they differ in draft model, policy and sampling alone.
        prompts: at least one.
        answers: see `evaluate`.
        show_progress: draw a progress bar on stderr.
        state: the processes that share the work, each of which must call this; None: one process.

    Returns:
        One result per lane, the same in every process.

    Raises:
        ValueError: see `evaluate`.
    """
    if not prompts:
        raise ValueError("There are no prompts to evaluate on.")
    settings = lanes[0].settings
    references = answers or GreedyAnswers(target, max_new_tokens=settings.max_new_tokens)
    if references.max_new_tokens != settings.max_new_tokens:
        raise ValueError(
            f"The greedy answers were made with max_new_tokens {references.max_new_tokens}, but "
            f"the evaluation uses {settings.max_new_tokens}. Make them with the same limit."
        )
    runner = LaneRunner(target, lanes)
    index, count = (0, 1) if state is None else (state.process_index, state.num_processes)

    def own_work() -> Lanes:
        planned = own_share(plan_prompts(prompts, settings), index, count)
        found = runner.run(planned, show_progress=show_progress and index == 0)
        for lane, results in zip(lanes, found, strict=True):
            if lane.settings.sampling.greedy:
                turns = [turn for _, result in results for turn in result.turns]
                replay_lookup(turns, target, lane.settings)
                if lane.settings.check_lossless and lane.draft is not None:
                    check_lossless(turns, references, lane.settings.sampling)
        return found

    warm_up = runner.warm_up(prompts)
    return [
        EvaluationResult(
            settings=lane.settings,
            target=target.name_or_path,
            draft=lane.name if lane.draft is not None else None,
            prompts=results,
            environment=describe_conditions(target) | {"processes": count},
            warm_up=warm_up,
            template=template_mode(target.tokenizer),
        )
        for lane, results in zip(lanes, gather_lanes(own_work, state), strict=True)
    ]


def evaluate(
    target: TargetModel,
    draft: Drafter | None,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    *,
    draft_name: str | None = None,
    answers: GreedyAnswers | None = None,
    show_progress: bool = False,
    state: PartialState | None = None,
) -> EvaluationResult:
    """Measures a draft model on a target; with no draft model, plain decoding.

    Args:
        target: the frozen target.
        draft: a draft model with the target's embeddings attached, or None.
        prompts: at least one.
        settings: how to decode and what to compare.
        draft_name: how reports call the draft model.
        answers: the target's own greedy answers, to share between evaluations of several draft
            models; None makes them here.
        show_progress: draw a progress bar on stderr.
        state: see `evaluate_lanes`.

    Raises:
        ValueError: no prompts, a prompt too long for the target (named), a target that cannot be
            read in packed forwards, or `answers` made for another length limit.
    """
    (result,) = evaluate_lanes(
        target,
        [Lane(draft, settings, draft_name)],
        prompts,
        answers=answers,
        show_progress=show_progress,
        state=state,
    )
    return result


def load_draft_for(path: str, target: TargetModel) -> Any:
    """Loads a draft model for a target, and checks that it belongs to it.

    Args:
        path: see `load_drafter`.
        target: the loaded target.

    Returns:
        A `Drafter` with the target attached.

    Raises:
        ValueError: see `load_drafter` and `check_target`.
    """
    draft = load_drafter(path, target)
    # A small model's config is its own family's: it knows no target unless it was distilled here.
    check_target(getattr(draft.config, "target_fingerprint", None), target)
    return draft


def load_prompts_for(config: PromptsConfig) -> list[Prompt]:
    """The prompts that a configuration names."""
    return load_prompts(
        config.prompts,
        limit_per_category=config.limit_per_category,
        subset=config.prompts_subset,
        split=config.prompts_split,
        column=config.prompts_column,
    )


def load_target(config: TargetConfig) -> tuple[TargetModel, PartialState | None]:
    """The target on this process's device, and the processes that share the work, if several.

    Raises:
        ValueError: see `TargetModel.load` and `join_processes`.
    """
    options = asdict(config)
    if not launched():
        return TargetModel.load(**options), None
    state, device = join_processes(config.device)
    # One process converts or downloads; the others find the result.
    with state.main_process_first():
        resolve_target(config.name_or_path)
    return TargetModel.load(**(options | {"device": device})), state


def run(config: EvaluateConfig) -> None:
    """The verb: loads, evaluates, prints the table and writes the report."""
    prompts = load_prompts_for(config)
    target, state = load_target(config.target)
    draft = load_draft_for(config.draft, target) if config.draft is not None else None
    result = evaluate(
        target,
        draft,
        prompts,
        make_settings(config, target),
        draft_name=config.draft,
        show_progress=True,
        state=state,
    )
    if config.draft is not None:
        result.simulated = find_simulated(draft_folder(config.draft))
    if state is None or state.is_main_process:
        write_report(result, Path(config.output), report_console())
    if state is not None:
        state.wait_for_everyone()
        state.destroy_process_group()


def main() -> None:
    """Entry point of python -m draftsmith.eval.evaluate, for launchers."""
    run_verb(run, root="evaluate", schema="draftsmith.conf.schema:EvaluateConfig")


if __name__ == "__main__":
    main()
