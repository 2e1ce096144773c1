"""From the target's logits to the distribution it samples from, and one draw from it.

Temperature, top-k and top-p are applied in transformers' order by `draftsmith.models.sampling`. The
draft models use it too: target and draft probabilities always come from the same filter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import warp_logits


def target_probs(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """The distribution that plain sampling draws from (temperature above 0).

    Args:
        logits: [..., vocab] raw target logits of any float dtype.
        sampling: temperature, top-k and top-p.

    Returns:
        [..., vocab] probabilities, float64 for float64 logits, else float32: bf16 loses the tail
        that the acceptance ratio divides by.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return warp_logits(logits, sampling).softmax(dim=-1)


def choose_token(
    logits: Tensor, sampling: SamplingSettings, generator: torch.Generator | None
) -> int:
    """One token of plain decoding: the first maximum when greedy, else a draw.

    Args:
        logits: [vocab] raw target logits of one position.
        sampling: temperature, top-k and top-p.
        generator: source of randomness on the logits' device; None takes torch's global one.
    """
    if sampling.greedy:
        return int(logits.argmax(dim=-1))
    return int(torch.multinomial(target_probs(logits, sampling), 1, generator=generator))
