"""Compares greedy answers with the target's own, and replays prompt lookup on them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.eval.prompt_lookup import replay_prompt_lookup
from draftsmith.eval.results import TurnResult
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.inference.plain import GreedyAnswers, find_divergence, plain_generate
from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.target import TargetModel


def check_lossless(
    turns: Sequence[TurnResult], answers: GreedyAnswers, sampling: SamplingSettings
) -> None:
    """Compares every answer with the target's own; plain runs that were timed serve as they are.

    Args:
        turns: greedy answers; their `checked` and `divergence` are set.
        answers: the target's own without a repetition penalty.
        sampling: how the turns were decoded.
    """
    if sampling.penalised:
        _check_penalised(turns, answers, sampling)
        return
    for turn in turns:
        if turn.plain is not None:
            answers.remember(turn.prompt_ids, turn.plain.token_ids)
    answers.decode([turn.prompt_ids for turn in turns])
    for turn in turns:
        turn.divergence = answers.divergence(turn.prompt_ids, turn.generation.token_ids)
        turn.checked = True


def _check_penalised(
    turns: Sequence[TurnResult], answers: GreedyAnswers, sampling: SamplingSettings
) -> None:
    """With a repetition penalty the references are decoded one by one."""
    for turn in turns:
        plain = turn.plain or plain_generate(
            answers.target,
            turn.prompt_ids,
            max_new_tokens=answers.max_new_tokens,
            sampling=sampling,
        )
        turn.divergence = find_divergence(
            answers.target,
            turn.prompt_ids,
            turn.generation.token_ids,
            plain.token_ids,
            sampling=sampling,
        )
        turn.checked = True


def replay_lookup(
    turns: Sequence[TurnResult], target: TargetModel, settings: EvaluationSettings
) -> None:
    """Notes the rounds of prompt lookup on the same answers, after the token from prefill as ours.

    It proposes as many tokens as the policy is deep.
    """
    for turn in turns:
        first, *rest = turn.generation.token_ids
        turn.prompt_lookup_rounds = replay_prompt_lookup(
            [*turn.prompt_ids, first],
            rest,
            num_draft_tokens=settings.policy.max_depth,
            max_length=len(turn.prompt_ids) + settings.max_new_tokens,
            stop_token_ids=target.eos_token_ids,
        )
