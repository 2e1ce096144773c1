"""Batched generation gives every prompt the answer that it would get alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftsmith.models.generation import GeneratedAnswer, generate_batch
from draftsmith.models.protocols import SamplingSettings


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(4, 64, (n,), generator=generator).tolist() for n in lengths]


def alone(
    model: Any, prompt: list[int], max_new_tokens: int, stops: Sequence[int]
) -> GeneratedAnswer:
    """Greedy decoding without cache, batch or padding."""
    ids, answer = list(prompt), []
    while len(answer) < max_new_tokens:
        with torch.inference_mode():
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
        answer.append(token)
        if token in stops:
            return GeneratedAnswer(answer, "stop")
    return GeneratedAnswer(answer, "length")


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma3", "gpt_neox", "qwen3_next", "qwen3_5"]
)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_row_equals_its_single_run(
    family: str, batch_size: int, tiny_model: Callable[..., Any]
) -> None:
    model, prompts = tiny_model(family), random_prompts(9)
    # Tokens that some answers really reach, so that rows end at different times.
    stops = [alone(model, prompts[row], 12, ()).token_ids[row + 2] for row in range(4)]
    answers = generate_batch(
        model, prompts, max_new_tokens=12, stop_token_ids=stops, batch_size=batch_size
    )
    expected = [alone(model, prompt, 12, stops) for prompt in prompts]
    assert answers == expected
    reasons = {answer.finish_reason for answer in expected}
    assert reasons == {"stop", "length"}, "the example must show both ends"


def test_answers_are_reported_once_each_as_soon_as_they_are_done(
    tiny_model: Callable[..., Any],
) -> None:
    seen: dict[int, GeneratedAnswer] = {}

    def report(index: int, answer: GeneratedAnswer) -> None:
        assert index not in seen
        seen[index] = answer

    answers = generate_batch(
        tiny_model("llama"),
        random_prompts(7),
        max_new_tokens=9,
        stop_token_ids=(7, 11),
        batch_size=3,
        on_finished=report,
    )
    assert [seen[index] for index in range(7)] == answers


def test_sampled_answers_do_not_depend_on_the_batch(tiny_model: Callable[..., Any]) -> None:
    model, prompts = tiny_model("llama"), random_prompts(6)
    runs = [
        generate_batch(
            model,
            prompts,
            max_new_tokens=8,
            stop_token_ids=(7, 11),
            batch_size=batch_size,
            sampling=SamplingSettings(temperature=1.5, top_p=0.9),
            seeds=range(6),
        )
        for batch_size in (1, 4)
    ]
    assert runs[0] == runs[1]
    greedy = generate_batch(model, prompts, max_new_tokens=8, stop_token_ids=(7, 11))
    assert greedy != runs[0]


def test_sampling_follows_the_models_distribution(tiny_model: Callable[..., Any]) -> None:
    model, prompt, draws = tiny_model("llama"), [5, 9, 21], 4000
    with torch.inference_mode():
        probs = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), dim=-1)
    answers = generate_batch(
        model,
        [prompt] * draws,
        max_new_tokens=1,
        stop_token_ids=(),
        batch_size=500,
        sampling=SamplingSettings(temperature=1.0),
        seeds=range(draws),
    )
    first = torch.tensor([answer.token_ids[0] for answer in answers])
    share = torch.bincount(first, minlength=64).double() / draws
    assert float((share - probs).abs().max()) < 4 * (0.25 / draws) ** 0.5


def test_bad_calls_are_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no tokens"):
        generate_batch(model, [[5], []], max_new_tokens=2, stop_token_ids=())
    with pytest.raises(ValueError, match="one seed per prompt"):
        generate_batch(
            model,
            [[5], [6]],
            max_new_tokens=2,
            stop_token_ids=(),
            sampling=SamplingSettings(temperature=1.0),
            seeds=[1],
        )
    with pytest.raises(ValueError, match="repetition_penalty is 1.2"):
        generate_batch(
            model, [[5]], max_new_tokens=2, stop_token_ids=(),
            sampling=SamplingSettings(repetition_penalty=1.2),
        )  # fmt: skip
