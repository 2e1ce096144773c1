"""Plain decoding: the target alone, as the yardstick for speed and for losslessness.

`plain_generate` is the loop of speculative decoding with nothing drafted, so that both sides of a
speed-up share their stop rules, the target adapter and the clock. `GreedyAnswers` holds the
target's own greedy answers to many prompts: decoded in batches, which is faster but sums in another
order, so a difference only counts once `plain_generate` has confirmed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.inference.decode import generate
from draftsmith.inference.records import Generation
from draftsmith.models.generation import generate_batch
from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import process_logits
from draftsmith.models.target import TargetModel

NEAR_TIE_ULPS = 8
"""Two logits this many rounding steps apart may change places with the order of summation (our
choice: float32 forwards of one and of five tokens differ by up to that much)."""


def plain_generate(
    target: TargetModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingSettings | None = None,
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Decodes one prompt token by token, batch of one; arguments and errors as `generate`."""
    return generate(
        target,
        None,
        torch.tensor([list(prompt)], dtype=torch.long),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        generator=generator,
    )


def reference_outputs(
    target: TargetModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """The target's greedy answers to many prompts, decoded in left-padded batches.

    Args:
        target: the frozen target.
        prompts: token ids.
        max_new_tokens: length limit; an answer ends earlier at the target's last position.
        batch_size: prompts decoded at a time.

    Returns:
        New tokens per prompt, the end-of-text token included.
    """
    answers: dict[int, list[int]] = {}
    roomy = [i for i, p in enumerate(prompts) if len(p) + max_new_tokens <= target.max_positions]
    batched = generate_batch(
        target.model,
        [prompts[index] for index in roomy],
        max_new_tokens=max_new_tokens,
        stop_token_ids=target.eos_token_ids,
        batch_size=batch_size,
    )
    for index, answer in zip(roomy, batched, strict=True):
        answers[index] = answer.token_ids
    for index in set(range(len(prompts))) - set(roomy):
        exact = plain_generate(target, prompts[index], max_new_tokens=max_new_tokens)
        answers[index] = exact.token_ids
    return [answers[index] for index in range(len(prompts))]


@dataclass(frozen=True)
class Divergence:
    """Where an answer leaves the target's own greedy answer."""

    position: int
    """Index of the first new token that differs."""
    token: int | None
    """What the answer has there; None when it has ended."""
    expected_token: int | None
    """What plain decoding has there; None when it has ended."""
    margin: float
    """The target's highest logit minus its second highest at that place."""
    near_tie: bool
    """The margin is within what the target's dtype rounds away; a fault shows as a clear margin."""


@torch.inference_mode()
def find_divergence(
    target: TargetModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    expected: Sequence[int],
    *,
    sampling: SamplingSettings | None = None,
) -> Divergence | None:
    """Compares an answer with plain decoding's; None when they are the same, length included.

    Args:
        target: the frozen target.
        prompt: token ids before both.
        answer: what is judged.
        expected: what plain greedy decoding wrote.
        sampling: how both were decoded, for the margin of penalised logits; None has no penalty.
    """
    if list(answer) == list(expected):
        return None
    shared = min(len(answer), len(expected))
    position = next((i for i in range(shared) if answer[i] != expected[i]), shared)
    seen = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    output = target.forward(seen, logits="last")
    assert output.logits is not None, "logits were asked for"
    last = output.logits.flatten(0, -2)[-1:]
    logits = process_logits(last, sampling or SamplingSettings(), seen=seen)[0]
    first, second = logits.float().topk(2).values.tolist()
    resolution = torch.finfo(output.logits.dtype).eps * max(abs(first), 1.0)
    return Divergence(
        position=position,
        token=answer[position] if position < len(answer) else None,
        expected_token=expected[position] if position < len(expected) else None,
        margin=first - second,
        near_tie=first - second <= NEAR_TIE_ULPS * resolution,
    )


class GreedyAnswers:
    """The target's own greedy answers, each prompt decoded once; shared by several evaluations."""

    def __init__(self, target: TargetModel, *, max_new_tokens: int, batch_size: int = 16) -> None:
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._exact: set[tuple[int, ...]] = set()

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Notes what `plain_generate` answered to a prompt, so that it is not decoded again."""
        self._answers[tuple(prompt)] = list(answer)
        self._exact.add(tuple(prompt))

    def decode(self, prompts: Sequence[Sequence[int]]) -> None:
        """Decodes the prompts that are not known yet, in batches."""
        missing = [p for p in dict.fromkeys(map(tuple, prompts)) if p not in self._answers]
        outputs = reference_outputs(
            self.target, missing, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size
        )
        self._answers.update(zip(missing, outputs, strict=True))

    def divergence(self, prompt: Sequence[int], answer: Sequence[int]) -> Divergence | None:
        """None when `answer` is the target's own; a difference is confirmed before it counts."""
        key = tuple(prompt)
        if key not in self._answers:
            self.decode([key])
        if self._answers[key] != list(answer) and key not in self._exact:
            exact = plain_generate(self.target, key, max_new_tokens=self.max_new_tokens)
            self.remember(key, exact.token_ids)
        return find_divergence(self.target, key, answer, self._answers[key])
