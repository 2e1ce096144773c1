"""Plain decoding against transformers' own `generate`, and the comparison with its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.inference import plain
from draftsmith.inference.plain import (
    GreedyAnswers,
    find_divergence,
    plain_generate,
    reference_outputs,
)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(4, 300, (3 + 4 * index,), generator=generator).tolist()
        for index in range(count)
    ]


def transformers_greedy(target: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(target.eos_token_ids),
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.lossless
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_plain_decoding_is_transformers_greedy_generate(
    tiny_target: Callable[..., Any], family: str
) -> None:
    target = tiny_target(family)
    for prompt in prompts(4):
        result = plain_generate(target, prompt, max_new_tokens=20)
        assert result.token_ids == transformers_greedy(target, prompt, 20)
        stopped = result.token_ids[-1] in target.eos_token_ids
        assert result.finish_reason == ("stop" if stopped else "length")


@pytest.mark.lossless
def test_batched_references_are_the_exact_answers(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("gpt2", n_positions=32)
    asked = prompts(7)
    assert len(asked[-1]) + 20 > target.max_positions, "one answer ends at the last position"
    found = reference_outputs(target, asked, max_new_tokens=20, batch_size=3)
    for prompt, answer in zip(asked, found, strict=True):
        assert answer == plain_generate(target, prompt, max_new_tokens=20).token_ids


def test_first_difference_and_its_margin_are_found(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    prompt = prompts(1)[0]
    expected = plain_generate(target, prompt, max_new_tokens=12).token_ids
    assert find_divergence(target, prompt, expected, expected) is None

    changed = [*expected[:5], 9, *expected[6:]]
    found = find_divergence(target, prompt, changed, expected)
    assert found is not None
    assert (found.position, found.token, found.expected_token) == (5, 9, expected[5])
    logits = target.model(torch.tensor([[*prompt, *expected[:5]]])).logits[0, -1]
    top = logits.topk(2).values
    assert found.margin == pytest.approx(float(top[0] - top[1]), rel=1e-3)
    assert not found.near_tie

    short = find_divergence(target, prompt, expected[:7], expected)
    assert short is not None
    assert (short.position, short.token, short.expected_token) == (7, None, expected[7])


def test_tied_logits_are_a_near_tie(tiny_target: Callable[..., Any], monkeypatch: Any) -> None:
    target = tiny_target("llama")
    whole = target.forward

    def tied(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits[..., [2, 5]] = output.logits.max() + 1.0
        return output

    monkeypatch.setattr(target, "forward", tied)
    found = find_divergence(target, [7, 8], [5], [2])
    assert found is not None
    assert found.margin == 0.0
    assert found.near_tie


def test_a_batched_reference_that_differs_is_decoded_again_before_it_counts(
    tiny_target: Callable[..., Any], monkeypatch: Any
) -> None:
    target = tiny_target("llama")
    prompt = prompts(2)[1]
    exact = plain_generate(target, prompt, max_new_tokens=6).token_ids
    wrong = [exact[0] + 1, *exact[1:]]
    monkeypatch.setattr(plain, "reference_outputs", lambda *_args, **_kwargs: [wrong])
    answers = GreedyAnswers(target, max_new_tokens=6)
    answers.decode([prompt])
    assert answers.divergence(prompt, exact) is None
    found = answers.divergence(prompt, wrong)
    assert found is not None
    assert found.position == 0


def test_answers_that_are_known_are_not_decoded_again(
    tiny_target: Callable[..., Any], monkeypatch: Any
) -> None:
    target = tiny_target("llama")
    asked: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> list[list[int]]:
        asked.extend(args[1])
        return reference_outputs(*args, **kwargs)

    monkeypatch.setattr(plain, "reference_outputs", counted)
    first, second = prompts(2)
    answers = GreedyAnswers(target, max_new_tokens=6)
    answers.remember(first, plain_generate(target, first, max_new_tokens=6).token_ids)
    answers.decode([first, second, second])
    answers.decode([first, second])
    assert asked == [tuple(second)]
