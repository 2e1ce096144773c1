"""Replayed prompt lookup against transformers' own runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.eval.prompt_lookup import replay_prompt_lookup


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 10])
@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_replayed_prompt_lookup_has_the_rounds_of_a_real_run(
    tiny_target: Callable[..., Any], monkeypatch: Any, num_draft_tokens: int, family: str
) -> None:
    target = tiny_target(family)
    matches: list[int] = []

    def note(_self: Any, _ids: Any, _scores: Any, num_matches: Any) -> None:
        matches.append(int(num_matches))

    monkeypatch.setattr(PromptLookupCandidateGenerator, "update_candidate_strategy", note)
    found_any = 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(4, 300, (6,), generator=generator).tolist() * 2
        ids = torch.tensor([prompt])
        matches.clear()
        output = target.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            prompt_lookup_num_tokens=num_draft_tokens,
            eos_token_id=list(target.eos_token_ids),
        )
        rounds = replay_prompt_lookup(
            prompt,
            output[0, len(prompt) :].tolist(),
            num_draft_tokens=num_draft_tokens,
            max_length=len(prompt) + 40,
            stop_token_ids=target.eos_token_ids,
        )
        assert [record.emitted for record in rounds] == [count + 1 for count in matches]
        found_any += sum(matches)
    assert found_any > 0, "these texts never repeat: the comparison would be empty"
