"""What a reader of an evaluation must be warned of: numbers that look better, or mean less, than
they seem."""

from __future__ import annotations

from pathlib import Path

from draftsmith.eval.results import EvaluationResult

GAP_SHARE = 0.5
"""A measured acceptance below this share of the simulated one is pointed out (our choice: other
prompts than the validation rows, and texts of the model's own, cost a fifth in our runs) ..."""
MIN_GAP = 0.2
"""... when it is also so many tokens per round below."""
MAX_NAMED = 3
"""Repetitive answers that are named."""


def cautions(result: EvaluationResult) -> list[str]:
    """One sentence for each thing to know before using the numbers."""
    found = [
        _different(result),
        _own_draft(result),
        _repetitive(result),
        _simulated_gap(result),
        _batch(result),
    ]
    processes = result.environment.get("processes", 1)
    if processes > 1:
        found.append(
            f"{processes} processes decoded a share of the prompts each: speeds are those of one "
            "process beside the others."
        )
    return [text for text in found if text is not None]


def _different(result: EvaluationResult) -> str | None:
    if result.overall.lossless.status != "different":
        return None
    return (
        "NOT LOSSLESS: answers differ from the target's own where it is not undecided. Neither "
        "speed nor accepted length means anything until that is explained."
    )


def _own_draft(result: EvaluationResult) -> str | None:
    if result.draft is None or Path(result.draft).resolve() != Path(result.target).resolve():
        return None
    return (
        "the draft model is the whole target: nearly every drafted token is kept, and each costs a "
        "forward of the target. MTP modules in its folder were not used: draftsmith-import "
        "checkpoint=FOLDER target.name_or_path=FOLDER makes a draft of them."
    )


def _repetitive(result: EvaluationResult) -> str | None:
    summary = result.overall
    if not summary.repetitive_answers:
        return None
    looping = [
        (turn.repetition.longest_loop, one.prompt.id, number, turn)
        for one in result.prompts
        for number, turn in enumerate(one.turns, start=1)
        if turn.repetition.repetitive
    ]
    looping.sort(key=lambda entry: -entry[0])
    named = "; ".join(
        f"{identity} turn {number}: {length} of {len(turn.generation.token_ids)} tokens in one "
        f"loop, {turn.repetition.distinct_ratio:.0%} distinct"
        for length, identity, number, turn in looping[:MAX_NAMED]
    )
    without = summary.accepted_length_without_repetitive
    return (
        f"repetitive: {summary.repetitive_answers} of {summary.num_answers} answers run in a "
        f"loop, which is easy to draft ({named}); accepted length without them "
        f"{'-' if without is None else f'{without:.3f}'}"
    )


def _simulated_gap(result: EvaluationResult) -> str | None:
    """Greedy decoding against what training simulated, over the positions that both have."""
    if result.simulated is None or result.draft is None or not result.settings.sampling.greedy:
        return None
    joint = result.overall.acceptance.joint_acceptance
    depth = min(len(result.simulated.conditional), len(joint))
    simulated = result.simulated.accepted_length(depth)
    measured = 1.0 + sum(share or 0.0 for share in joint[:depth])
    if simulated - measured < MIN_GAP or measured - 1 >= GAP_SHARE * (simulated - 1):
        return None
    return (
        f"measured far below training: over {depth} draft positions training simulated an accepted "
        f"length of {simulated:.2f} ({result.simulated.source}), decoding reached {measured:.2f}. "
        "Look for prompts unlike the training data, another chat template or target, or a fault "
        "in how the draft model is served."
    )


def _batch(result: EvaluationResult) -> str | None:
    size = result.settings.batch_size
    if size == 1:
        return None
    timed = result.settings.timed_prompts_per_category or 0
    wanted = result.settings.baseline_prompts_per_category or 0
    more = (
        f"; {timed} prompts per category are decoded plainly instead of {wanted}, so that the "
        "batch is full"
        if timed > wanted
        else ""
    )
    return (
        f"batches of {size}: speeds are throughput over all answers of a batch, and no single "
        f"answer's time is compared{more}."
    )
