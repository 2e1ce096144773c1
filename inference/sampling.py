"""From the target's logits to the distribution it samples from, and one draw from it.

The processors and their order are those of `draftsmith.models.sampling`. The draft models use it
too: target and draft probabilities always come from the same filter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import draw_token, process_logits, warp_logits


def target_probs(logits: Tensor, sampling: SamplingSettings, seen: Tensor | None = None) -> Tensor:
    """The distribution that plain sampling draws from (temperature above 0).

    Args:
        logits: [..., vocab] raw target logits of any float dtype.
        sampling: temperature, top-k, top-p, min-p and repetition penalty.
        seen: [rows, n] int64, the text before each row's token, prompt included, for the leading
            dimensions of `logits` flattened; only a repetition penalty needs it.

    Returns:
        [..., vocab] probabilities, float64 for float64 logits, else float32: bf16 loses the tail
        that the acceptance ratio divides by.

    Raises:
        ValueError: for greedy settings, and for a repetition penalty without `seen`.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return warp_logits(logits, sampling, seen).softmax(dim=-1)


def choose_token(
    logits: Tensor,
    sampling: SamplingSettings,
    generator: torch.Generator | None,
    seen: Tensor | None = None,
) -> int:
    """One token of plain decoding: the first maximum when greedy, else a draw.

    Args:
        logits: [vocab] raw target logits of one position.
        sampling: how the target decodes.
        generator: source of randomness on the logits' device; None takes torch's global one.
        seen: [1, n] int64, the text so far; only a repetition penalty needs it.

    Raises:
        ValueError: for a repetition penalty without `seen`.
    """
    if sampling.greedy:
        return int(process_logits(logits, sampling, seen).argmax(dim=-1))
    return int(draw_token(target_probs(logits, sampling, seen), generator))
