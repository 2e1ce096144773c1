"""Decodes prompts with transformers' `speculation_type="dflash"` and counts the matches per round.

Imports nothing of draftsmith; `make engine-check` and tests/test_transformers_dflash.py call it in
draftsmith's own environment, whose transformers has this decoder.

A block of N slots drafts N - 1 tokens. transformers counts the matches of a round after it has cut
its text at the limit or behind an end-of-text token: they are the round's new tokens but one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator


@contextmanager
def recorded_matches() -> Iterator[list[int]]:
    """The matches of every round that is decoded in its scope; the prompt's forward is none."""
    found: list[int] = []
    original = DFlashTokenCandidateGenerator.update_candidate_strategy

    def update(self: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        found.append(int(num_matches))
        original(self, input_ids, scores, num_matches)

    DFlashTokenCandidateGenerator.update_candidate_strategy = update  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DFlashTokenCandidateGenerator.update_candidate_strategy = original  # type: ignore[method-assign]


@torch.no_grad()
def decode_with_assistant(
    target: str | Path,
    assistant: str | Path,
    prompts: Sequence[list[int]],
    *,
    tokens: int,
    stop_token_ids: Sequence[int],
) -> dict[str, Any]:
    """Greedy texts and matches per round, one prompt after the other, in float32.

    Args:
        target: Folder of the target.
        assistant: Folder of the draft, in transformers' form.
        prompts: Token ids.
        tokens: New tokens per prompt.
        stop_token_ids: That end a text.

    Returns:
        `version` of transformers, `architecture` of the assistant, and `answers`: `token_ids` and
        `matches` per prompt.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    draft = AutoModel.from_pretrained(assistant, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        with recorded_matches() as matches:
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                assistant_model=draft,
                speculation_type="dflash",
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(stop_token_ids),
                pad_token_id=0,
            )
        # The first update is the prompt's own forward.
        answers.append({"token_ids": output[0, len(prompt) :].tolist(), "matches": matches[1:]})
    return {
        "version": transformers.__version__,
        "architecture": type(draft).__name__,
        "answers": answers,
    }
