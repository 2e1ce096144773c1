"""Lossless speculative decoding of one prompt; the loop itself is draftsmith.inference.engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy, Policy
from draftsmith.inference.records import Generation
from draftsmith.models.protocols import Drafter, SamplingSettings
from draftsmith.models.target import TargetModel


def generate(
    target: TargetModel,
    draft: Drafter | None,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    policy: Policy | None = None,
    sampling: SamplingSettings | None = None,
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Decodes one prompt; the text has the target's own law (greedy: is the target's own text).

    Args:
        target: the frozen target.
        draft: a draft model, or None for plain decoding.
        input_ids: [1, prompt] int64 on any device.
        max_new_tokens: length limit, in tokens, exact.
        policy: how to draft; None is a chain of 4. Fewer tokens are drafted near the limit, and
            where the draft model has no more positions, down to plain steps.
        sampling: None is greedy.
        stop_token_ids: ids that end the text besides the target's own end-of-text ids.
        generator: source of randomness on the target's device; None takes torch's global one.

    Raises:
        ValueError: not one sequence; else see `Engine`.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; generate takes one prompt, "
            "[1, length]. Use Engine.run for several."
        )
    request = Request(
        input_ids=input_ids[0].tolist(),
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingSettings(),
        stop_token_ids=stop_token_ids,
        generator=generator,
    )
    return Engine(target, draft, policy or ChainPolicy()).run([request])[0]
