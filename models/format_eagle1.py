"""EAGLE-1 checkpoints of other programs: SafeAILab/EAGLE, vLLM, SGLang.

All three hold a Llama config and `fc` [hidden, 2 hidden] with one layer that has no input norm; the
head is the target's. They differ in two things, so no folder serves all:

- `architectures`: vLLM puts "Eagle" in front of `LlamaForCausalLM`; SGLang wants
  `LlamaForCausalLMEagle`.
- `fc.bias`: vLLM's `fc` has none and drops one in the file silently; SGLang's and SafeAILab's
  always have one, which stays at random numbers when the file lacks it. So it is written as zeros
  there, and a draft with a non-zero bias is refused for vLLM.

The config key `bias` is never written: SafeAILab reads it for `fc`, vLLM and SGLang for the
attention. speculators has no EAGLE-1.

Check: tests/test_formats.py, tests/test_golden_formats.py (folders in EAGLE's own form).

Axes: hidden, vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from draftsmith.models.eagle import EagleConfig
from draftsmith.models.format_keys import (
    ForeignFolder,
    TargetFacts,
    dtype_keys,
    layer_keys,
    read_layer_settings,
    rope_keys,
    rope_of,
    set_positions,
)

ARCHITECTURES = {
    "vllm": "LlamaForCausalLM",
    "sglang": "LlamaForCausalLMEagle",
    "eagle": "LlamaForCausalLM",
}
"""Format -> class name in config.json."""


def to_eagle1_format(
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: vllm, sglang, eagle or speculators.
        target: Facts about the target; None: not known.

    Raises:
        ValueError: the format or its engine has no place for something this draft is.
    """
    problems = [text for applies, text in _problems(config, tensors, format, target) if applies]
    if problems:
        raise ValueError(
            f"This draft cannot be exported as format={format}:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    limit = None if target is None else target.max_positions
    written = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    weight = tensors["fc.weight"]
    if format != "vllm":
        written["fc.bias"] = tensors.get("fc.bias", weight.new_zeros(len(weight)))
    # Otherwise vLLM would hand the draft the bare matrix of a target that scales its embeddings.
    scaled = target is not None and target.scales_embeddings
    if format == "eagle" or (format == "vllm" and scaled):
        assert target is not None, "checked above"
        assert target.embeddings is not None, "checked above, or known to be scaled"
        written["embed_tokens.weight"] = target.embeddings.to(weight.dtype)
    return ForeignFolder(
        {
            "architectures": [ARCHITECTURES[format]],
            "model_type": "llama",
            # No layer_types: vLLM looks its only layer up there by the number it has after all of
            # the target's layers, and fails.
            **layer_keys(config, max_positions=limit),
            **rope_keys(config, max_positions=limit),
            **dtype_keys(tensors),
        },
        written,
        [
            f"{config.num_hidden_layers} draft layers: published drafts have one; more are not "
            "checked in any engine."
        ]
        if config.num_hidden_layers > 1
        else [],
    )


def _problems(
    config: EagleConfig, tensors: Mapping[str, Tensor], format: str, target: TargetFacts | None
) -> Iterable[tuple[bool, str]]:
    """(whether it applies, what the engine cannot serve and what to do)."""
    if format == "speculators":
        yield True, "EAGLE-1: speculators has no such draft. Use vllm, sglang or eagle."
        return
    yield (
        config.draft_vocab_size != config.vocab_size,
        f"a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens: engines "
        "draft with the target's whole head. full_vocabulary=true leaves the restriction out; no "
        "weight changes, but other tokens can be drafted than were measured.",
    )
    yield config.qk_norm, "qk_norm: EAGLE-1 layers have no query and key norms in any engine."
    yield (
        format == "vllm" and "fc.bias" in tensors and bool(tensors["fc.bias"].any()),
        "a non-zero fc.bias: vLLM's fc has no bias and drops it silently. Train with "
        "method.fc_bias=false.",
    )
    yield (
        config.mlp_bias and format != "vllm",
        "mlp_bias: neither SGLang nor SafeAILab's code has biases in the MLP.",
    )
    yield (
        format == "sglang" and target is not None and target.scales_embeddings,
        "the target scales its embeddings: SGLang hands the draft the bare matrix.",
    )
    if format == "eagle":
        yield from _eagle_problems(config, target)


def _eagle_problems(config: EagleConfig, target: TargetFacts | None) -> Iterable[tuple[bool, str]]:
    """What SafeAILab's own code would load wrongly."""
    rope_type = rope_of(config)["rope_type"]
    yield (
        rope_type != "default",
        f"rotary scaling {rope_type}: SafeAILab's code rotates plainly or refuses to load.",
    )
    yield config.attention_bias, "attention_bias: SafeAILab's code has no bias on o_proj."
    yield (
        config.num_attention_heads * (config.head_dim or 0) != config.hidden_size,
        f"{config.num_attention_heads} heads of {config.head_dim} in a hidden size of "
        f"{config.hidden_size}: SafeAILab's EAGLE-1 code divides the hidden size by the heads.",
    )
    yield (
        target is None or target.embeddings is None,
        "the target's embeddings are part of it: give target.name_or_path=....",
    )


def from_eagle1_format(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    target: TargetFacts | None,
    where: str,
) -> tuple[EagleConfig, dict[str, Tensor], list[str]]:
    """A draft of ours from a flat folder.

    Args:
        raw: Its config.json.
        tensors: Its tensors; embeddings were taken out.
        target: Facts about the target; None: not known.
        where: Names the config in errors.

    Returns:
        Config, tensors under our names, and remarks for the user.

    Raises:
        ValueError: a fact is missing or contradicts another.
    """
    settings = read_layer_settings(raw, where)
    own = dict(tensors)
    remarks: list[str] = []
    bias = own.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        del own["fc.bias"]  # What exports write for engines whose fc has one.
    if bias is None and raw.get("bias") is True:
        raise ValueError(
            f"{where} says bias: true, but the checkpoint has no fc.bias. Correct the config."
        )
    if own.pop("lm_head.weight", None) is not None:
        remarks.append("Its lm_head.weight is left out: EAGLE-1 drafts with the target's head.")
    set_positions(settings, raw, None if target is None else target.max_positions, remarks)
    settings["fc_bias"] = "fc.bias" in own
    settings["qk_norm"] = "layers.0.self_attn.q_norm.weight" in own
    return EagleConfig(**settings), own, remarks
