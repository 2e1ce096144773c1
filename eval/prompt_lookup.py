"""What drafting without any draft model would have reached: transformers' own prompt lookup.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) proposes what followed the last tokens
when they occurred before. Greedy decoding is lossless, so its text is known already: asking
transformers' candidate generator at each round and counting how far it agrees with that text gives
the rounds of a real run without one target forward. A test in
tests/test_prompt_lookup.py compares with a real `generate(prompt_lookup_num_tokens=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.inference.records import RoundRecord


def replay_prompt_lookup(
    context: Sequence[int],
    continuation: Sequence[int],
    *,
    num_draft_tokens: int,
    max_length: int,
    stop_token_ids: Sequence[int],
) -> list[RoundRecord]:
    """The rounds that prompt lookup would have needed for a known greedy text.

    Args:
        context: tokens before the first round: the prompt, and the token that prefill gave.
        continuation: the tokens that greedy decoding wrote after them.
        num_draft_tokens: tokens proposed per round at most.
        max_length: limit of prompt and answer together, in tokens.
        stop_token_ids: end-of-text ids; prompt lookup never proposes them.

    Returns:
        Rounds with counts only; no time was measured.
    """
    lookup = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(list(stop_token_ids)),
        num_output_tokens=num_draft_tokens,
        max_length=max_length,
    )
    text = torch.tensor([[*context, *continuation]])
    rounds = []
    length = len(context)
    while length < text.shape[1]:
        candidates, _ = lookup.get_candidates(text[:, :length])  # type: ignore[arg-type]
        proposed = candidates[0, length:]
        known = text[0, length : length + len(proposed)]
        agreement = (proposed[: len(known)] == known).long()
        accepted = int(agreement.cumprod(dim=0).sum())
        emitted = min(accepted + 1, text.shape[1] - length)
        count = len(proposed)
        rounds.append(RoundRecord(count, count, accepted, emitted, 0.0, 0.0, 0.0))
        length += emitted
    return rounds
