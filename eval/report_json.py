"""An evaluation as JSON: what results.json holds, and what the page is drawn from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftsmith.eval.cautions import cautions
from draftsmith.eval.results import EvaluationResult, GroupSummary, PromptResult, TurnResult
from draftsmith.eval.settings import describe_settings
from draftsmith.eval.spec_bench import spec_bench_groups

DEFINITIONS = {
    "accepted_length": "tokens emitted in rounds / rounds: the target's own token of each round "
    "included, the token from prefill excluded, cut at the end of the text, mean over all rounds",
    "accepted_draft_tokens": "drafted tokens in the text / rounds (the target's own excluded)",
    "verified_nodes": "drafted tokens that the target read / rounds: all nodes of a tree",
    "joint_acceptance": "by draft position i: share of the rounds whose draft is i deep that kept "
    "i tokens or more",
    "conditional_acceptance": "the same among rounds that kept the first i - 1",
    "macro_accepted_length": "mean over prompts of each prompt's accepted length",
    "accepted_length_vllm": "1 + accepted drafts / rounds with drafts, not cut at the end of text",
    "joint_acceptance_vllm": "by draft position i: share of all rounds with drafts that kept i or "
    "more, not cut at the end of text",
    "accepted_length_spec_bench": "mean over rounds of 1 + drafted tokens in the text",
    "tokens_per_second": "generated token ids / wall-clock seconds, prefill included; with batches "
    "the throughput",
    "timed": "both speeds on the answers that were decoded both ways, alternating in one run, both "
    "counting generated ids",
    "seconds": "of all answers: reading prompts, inside the draft model, the target's forwards, "
    "everything else in rounds",
    "draft_ms": "milliseconds of drafting, median over the rounds with drafted tokens",
    "verify_ms": "milliseconds of the target's forward, median over the rounds with drafted tokens",
    "round_overhead": "other / (draft + verify): what a round costs beyond its forwards",
    "repetitive_answers": "answers of which one loop of up to 16 tokens covers at least half",
    "distinct_ratio": "mean over answers of different tokens / tokens",
    "longest_loop": "tokens of the longest stretch of any answer that repeats one phrase",
    "prompt_lookup": "rounds that transformers' prompt lookup needs for the same greedy answers, "
    "with as many tokens as the policy is deep",
    "spec_bench": "Spec-Bench's numbers: mean accepted tokens over all steps, tokens per second as "
    "the mean over questions; MT-Bench's eight categories are one group",
    "tokens": "per generated token: its text, the depth at which it was drafted (0: the target's "
    "own), its round (0: prefill), and both models' probability of it",
}
"""Written into every results.json."""


def _token_rounds(turn: TurnResult) -> list[int]:
    """Round of each token, from 1; 0 is prefill."""
    records = turn.generation.rounds
    in_rounds = [
        number for number, record in enumerate(records, start=1) for _ in range(record.emitted)
    ]
    return [0] * (len(turn.generation.token_ids) - len(in_rounds)) + in_rounds


def _tokens_json(turn: TurnResult) -> dict[str, Any]:
    origins = turn.generation.origins
    return {
        "texts": turn.token_texts,
        "depths": [origin.depth for origin in origins],
        "rounds": _token_rounds(turn),
        "draft_probs": [origin.draft_prob for origin in origins],
        "target_probs": [origin.target_prob for origin in origins],
    }


def _turn_json(turn: TurnResult, prompt: str, batch_size: int) -> dict[str, Any]:
    generation = turn.generation
    timed = turn.plain is not None and batch_size == 1
    return {
        "prompt": prompt,
        "prompt_tokens": len(turn.prompt_ids),
        "text": turn.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "rounds": [[r.proposed, r.accepted, r.emitted, r.depth] for r in generation.rounds],
        "seconds": generation.seconds,
        "prefill_seconds": generation.prefill_seconds,
        # In a batch an answer's time says when it was done, not what it took.
        "plain_seconds": turn.plain.seconds if timed and turn.plain is not None else None,
        "repetition": asdict(turn.repetition),
        "checked": turn.checked,
        "divergence": None if turn.divergence is None else asdict(turn.divergence),
        "tokens": _tokens_json(turn),
    }


def _prompt_json(result: PromptResult, batch_size: int) -> dict[str, Any]:
    summary = result.acceptance
    return {
        "id": result.prompt.id,
        "category": result.prompt.category,
        "given": [[dict(message) for message in before] for before in result.prompt.given],
        "accepted_length": summary.accepted_length,
        "histogram": summary.histogram,
        "turns": [
            _turn_json(turn, text, batch_size)
            for turn, text in zip(result.turns, result.prompt.turns, strict=True)
        ],
    }


def group_json(summary: GroupSummary) -> dict[str, Any]:
    """The numbers of one category, or of all prompts."""
    found = asdict(summary)
    found["lossless"]["text"] = summary.lossless.text
    if summary.timed is not None:
        found["timed"]["speed_up"] = summary.timed.speed_up
    return found


def to_json(result: EvaluationResult) -> dict[str, Any]:
    """Everything that was found, with the definitions of the numbers; JSON types only."""
    simulated = result.simulated
    size = result.settings.batch_size
    return {
        "target": result.target,
        "draft": result.draft,
        "settings": describe_settings(result.settings),
        "environment": result.environment,
        "template": result.template,
        "warm_up": result.warm_up,
        "warnings": cautions(result),
        "definitions": DEFINITIONS,
        "overall": group_json(result.overall),
        "by_category": {name: group_json(one) for name, one in result.by_category.items()},
        "spec_bench": {
            name: asdict(one) for name, one in spec_bench_groups(result.prompts).items()
        },
        "simulated": None if simulated is None else asdict(simulated),
        "prompts": [_prompt_json(one, size) for one in result.prompts],
    }
