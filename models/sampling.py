"""From logits to what is decoded, as transformers' `generate` does it, for target and draft alike.

transformers' own processors are called, in the order of its `generate` (5.24,
`GenerationMixin._get_logits_processor`): repetition penalty, temperature, top-k, top-p, min-p, each
skipped at its neutral value. Only the penalty acts on greedy decoding. A draft over a reduced
vocabulary is warped after its logits were scattered into the target's vocabulary, with -inf
elsewhere.

Differs from transformers in one place: top-p on a CPU sorts only the largest logits where that
provably keeps the same tokens (`_cut_to_top_p`). tests/test_sampling.py compares both.

Axes: rows (leading dimensions, flattened), vocab (target).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.models.protocols import SamplingSettings

HEAD_SIZES = (128, 2048)
"""Largest logits that top-p sorts at first, and where these do not suffice. Our choice, measured on
two CPU cores with 5 and 61 rows of 49,152 logits: 0.5 and 8 ms for 128, 2 and 32 ms for 2,048, 19
and 236 ms for a full sort."""


def process_logits(
    logits: Tensor, sampling: SamplingSettings, seen: Tensor | None = None
) -> Tensor:
    """The logits that greedy decoding takes the argmax of: only the repetition penalty acts.

    Args:
        logits: [..., vocab] raw logits.
        sampling: repetition_penalty is read.
        seen: [rows, n] int64, the text before each row's token, prompt included; needed for a
            penalty. Duplicates are harmless: shorter rows may be filled up with their own tokens.

    Returns:
        [..., vocab]: `logits` itself without a penalty, else float32 at least.

    Raises:
        ValueError: for a penalty without `seen`, or one whose rows are not those of the logits.
    """
    if not sampling.penalised:
        return logits
    name = f"repetition_penalty is {sampling.repetition_penalty}"
    if seen is None:
        raise ValueError(
            f"{name}, which depends on the text so far, but no token ids came with the logits. "
            "Pass seen=[rows, n], or set repetition_penalty to 1."
        )
    flat = _as_rows(logits)
    if seen.dim() != 2 or len(seen) != len(flat):
        raise ValueError(
            f"{name} and seen has shape {list(seen.shape)}; it must be [{len(flat)}, n]: one row "
            f"of token ids per row of logits {list(logits.shape)}."
        )
    return RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(seen, flat).reshape(
        logits.shape
    )


def warp_logits(logits: Tensor, sampling: SamplingSettings, seen: Tensor | None = None) -> Tensor:
    """Returns the logits whose softmax is the distribution that is sampled from.

    Args:
        logits: [..., vocab]; cast to float32 at least.
        sampling: all its fields are read.
        seen: [rows, n] int64 as in `process_logits`; needed for a penalty only.

    Returns:
        [..., vocab], -inf at tokens that are cut.

    Raises:
        ValueError: for greedy settings, which have no distribution to sample from, and as
            `process_logits`.
    """
    if sampling.greedy:
        raise ValueError("temperature is 0: greedy decoding takes the argmax, nothing to warp.")
    flat = _as_rows(process_logits(logits, sampling, seen))
    no_ids: Any = None  # These warpers ignore the ids, which are typed in several ways.
    if sampling.temperature != 1.0:
        flat = TemperatureLogitsWarper(float(sampling.temperature))(no_ids, flat)
    if sampling.top_k:
        flat = TopKLogitsWarper(sampling.top_k)(no_ids, flat)
    if sampling.top_p < 1.0:
        flat = _cut_to_top_p(flat, sampling.top_p)
    if sampling.min_p > 0.0:
        flat = MinPLogitsWarper(sampling.min_p)(no_ids, flat)
    return flat.reshape(logits.shape)


def draw_token(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution in float64.

    torch.multinomial draws one random number per vocabulary entry (1.1 ms for 49,152 on a CPU core,
    this 0.1 ms).

    Args:
        probs: [..., vocab], not negative, some mass in every row; need not sum to 1.
        generator: source of randomness on the same device; None takes torch's global one.

    Returns:
        [...] int64; never a token of probability 0.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    uniform = torch.rand(total.shape, dtype=total.dtype, device=total.device, generator=generator)
    # The number is at most 1 - 2**-53: the product rounds to less than the total, so that the first
    # entry above it is a token that has mass.
    return torch.searchsorted(cumulative, uniform * total, right=True).squeeze(-1)


def _as_rows(logits: Tensor) -> Tensor:
    """[rows, vocab] in float32 at least: transformers' warpers refuse one dimension."""
    flat = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return flat.reshape(-1, logits.shape[-1])


def _cut_to_top_p(scores: Tensor, top_p: float) -> Tensor:
    """transformers' TopPLogitsWarper without the full sort, where the kept set is sure.

    A token stays if the tokens before it, in descending order, hold less than top_p. A row is
    decided by its largest logits if the last token that stays and the first that goes are not tied
    and both are farther from the limit than float32 sums can err; the others go to the full sort.

    Args:
        scores: [rows, vocab].
        top_p: below 1.
    """
    warper = TopPLogitsWarper(top_p)
    no_ids: Any = None  # The warper ignores the ids.
    vocab = scores.shape[-1]
    if scores.device.type != "cpu" or vocab <= HEAD_SIZES[-1]:
        return warper(no_ids, scores)  # A GPU sorts faster than it would wait for the verdict.
    highest = scores.amax(dim=-1, keepdim=True)
    mass = (scores - highest).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    cutoff = torch.full_like(highest, float("-inf"))
    unsure = torch.arange(len(scores))
    for size in HEAD_SIZES:
        rows = scores if len(unsure) == len(scores) else scores[unsure]
        head = rows.topk(size).values  # [unsure, size] descending
        probs = (head.double() - highest[unsure]).exp() / mass[unsure]
        through = probs.cumsum(dim=-1)
        ahead = through - probs  # mass of the tokens before
        margin = _rounding_of_top_p(scores, top_p, size=size, tail=1.0 - through[:, -1:])
        num_kept = (ahead < top_p - margin).sum(dim=-1, keepdim=True)
        first_cut = num_kept.clamp(max=size - 1)
        lowest = head.gather(-1, (num_kept - 1).clamp(min=0))
        sure = (num_kept > 0) & (ahead.gather(-1, first_cut) > top_p + margin)
        sure = (sure & (head.gather(-1, first_cut) < lowest)).squeeze(-1)
        cutoff[unsure[sure]] = lowest[sure]
        unsure = unsure[~sure]
        if not len(unsure):
            return scores.masked_fill(scores < cutoff, float("-inf"))
    kept = scores.masked_fill(scores < cutoff, float("-inf"))
    kept[unsure] = warper(no_ids, scores[unsure])
    return kept


def _rounding_of_top_p(scores: Tensor, top_p: float, *, size: int, tail: Tensor) -> Tensor:
    """[rows, 1] how far transformers' cumulative probabilities near the limit may be off.

    It adds the exponentials in ascending order, in at least 4 lanes (the width of a vector
    register), each time with an error of at most eps / 2 of the sum so far: of `tail` before the
    `size` largest come, then of 1. The probabilities it compares with 1 - top_p carry that relative
    error; the rest is the rounding of single numbers.
    """
    eps = torch.finfo(scores.dtype).eps
    additions = scores.shape[-1] / 4 * tail.clamp(min=0.0) + size
    return (1.0 - top_p) * additions * eps + 8 * eps


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value == 0


def _is_one(value: Any) -> bool:
    return value is None or value == 1


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ([], (), {}, "")


_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "bad_words_ids": _is_empty,
    "begin_suppress_tokens": _is_empty,
    "constraints": _is_empty,
    "diversity_penalty": _is_unset,
    "dola_layers": _is_empty,
    "encoder_no_repeat_ngram_size": _is_unset,
    "encoder_repetition_penalty": _is_one,
    "exponential_decay_length_penalty": _is_empty,
    "force_words_ids": _is_empty,
    "forced_bos_token_id": lambda value: value is None,
    "forced_decoder_ids": _is_empty,
    "forced_eos_token_id": lambda value: value is None,
    "guidance_scale": _is_one,
    "min_length": _is_unset,
    "min_new_tokens": _is_unset,
    "no_repeat_ngram_size": _is_unset,
    "num_beam_groups": _is_one,
    "num_beams": _is_one,
    "penalty_alpha": _is_unset,
    "sequence_bias": _is_empty,
    "stop_strings": _is_empty,
    "suppress_tokens": _is_empty,
    "token_healing": _is_empty,
    "watermarking_config": _is_empty,
}
"""Field of a GenerationConfig that changes the text -> whether a value changes nothing."""

_UNSUPPORTED_WHEN_SAMPLING: dict[str, Callable[[Any], bool]] = {
    "epsilon_cutoff": _is_unset,
    "eta_cutoff": _is_unset,
    "top_h": lambda value: value is None,
    "typical_p": _is_one,
}
"""The same for fields that greedy decoding ignores."""

DEFAULT_TOP_K = 50
"""What transformers' `generate` samples with when a configuration says nothing (5.24)."""


def sampling_from_generation_config(generation_config: GenerationConfig) -> SamplingSettings:
    """The settings with which transformers' `generate` decodes under a configuration.

    A field that is not set has the default of `generate`: greedy, and top-k 50 when sampling.
    Lengths, stop tokens and what concerns caches or the draft of assisted generation are not read.

    Args:
        generation_config: usually a model's own.

    Raises:
        ValueError: naming every field whose value changes the text and is not supported.
    """

    def value_of(name: str, default: Any = None) -> Any:
        # Fields come and go with versions of transformers: one that is absent is not set.
        value = getattr(generation_config, name, None)
        return default if value is None else value

    sampled = bool(value_of("do_sample"))
    neutral_if = _UNSUPPORTED | (_UNSUPPORTED_WHEN_SAMPLING if sampled else {})
    refused = [name for name, neutral in neutral_if.items() if not neutral(value_of(name))]
    if refused:
        found = ", ".join(f"{name} = {value_of(name)!r}" for name in refused)
        raise ValueError(
            f"The generation configuration sets {found}: speculative decoding here would not keep "
            "the resulting distribution. Unset it; supported are do_sample, temperature, top_k, "
            "top_p, min_p and repetition_penalty."
        )
    penalty = float(value_of("repetition_penalty", 1.0))
    if not sampled:
        return SamplingSettings(repetition_penalty=penalty)
    temperature = float(value_of("temperature", 1.0))
    if temperature == 0.0:
        raise ValueError(
            "The generation configuration has do_sample = True and temperature = 0, which "
            "transformers refuses: set do_sample to False for greedy decoding."
        )
    return SamplingSettings(
        temperature=temperature,
        top_k=int(value_of("top_k", DEFAULT_TOP_K)),
        top_p=float(value_of("top_p", 1.0)),
        min_p=float(value_of("min_p", 0.0)),
        repetition_penalty=penalty,
    )
