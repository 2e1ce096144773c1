"""Temperature, top-k and top-p as transformers applies them, for target and draft alike.

transformers' own warpers are called, in the order of its `generate`: temperature, then top-k, then
top-p (each skipped at its neutral value). A draft over a reduced vocabulary is warped after its
logits were scattered into the target's vocabulary, with -inf elsewhere.

Axes: vocab (target).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.models.protocols import SamplingSettings


def warp_logits(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Returns the logits whose softmax is the distribution that is sampled from.

    Args:
        logits: [..., vocab]; cast to float32 at least.
        sampling: temperature, top_k and top_p.

    Returns:
        [..., vocab], -inf at tokens that are cut.

    Raises:
        ValueError: for greedy settings, which have no distribution to sample from.
    """
    if sampling.greedy:
        raise ValueError("temperature is 0: greedy decoding takes the argmax, nothing to warp.")
    flat = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = flat.reshape(-1, logits.shape[-1])
    no_ids: Tensor = None  # type: ignore[assignment]  # These three warpers ignore the ids.
    if sampling.temperature != 1.0:
        flat = TemperatureLogitsWarper(sampling.temperature)(no_ids, flat)
    if sampling.top_k:
        flat = TopKLogitsWarper(sampling.top_k)(no_ids, flat)
    if sampling.top_p < 1.0:
        flat = TopPLogitsWarper(sampling.top_p)(no_ids, flat)
    return flat.view(logits.shape)
