"""Tiny random target models and a tiny tokenizer, made on the spot: nothing is downloaded.

Every model is float32, in eval mode, hidden 32, and drawn with a wide initialisation so that the
argmax of its logits is clear. Vectors (norm weights, biases) are shaken too: a forgotten bias or
norm weight changes the numbers, as it would in a real model.

Other tests reach this file through the fixtures of conftest.py (`tiny`, `tiny_model`, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, IM_START_ID, EOS_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without generation tags, as most targets carry it."""

CHAT_TEMPLATE_WITH_GENERATION_TAGS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text with the assistant's tokens marked."""

TRAINING_TEXT = (
    "the cat sat on the mat and the dog ran to the door",
    "user asks and the assistant answers with a short sentence",
    "system: you are a helpful assistant. count one two three four five",
    "def add(a, b):\n    return a + b\n",
)

TOKENIZER_SIZE = 312
"""256 bytes, 4 special tokens and the rest merges."""
PADDED_VOCAB_SIZE = 320
"""The vocabulary of a saved target: padded beyond its tokenizer, as real checkpoints are."""


def make_tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer: every text round-trips, there is no unknown token.

    Ids 0 to 3 are pad, bos, <|im_start|> and <|im_end|> (eos); neither is added by encoding.
    """
    tokenizer = Tokenizer(models.BPE())
    # Whitespace stays in front of its word and digits stand alone, as in the usual tokenizers.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|\n+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    pad, bos, _, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=pad,
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = chat_template
    return fast


_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
# Gemma's window is shorter than the tests' texts, so that its sliding layers really slide.
_GEMMA = _GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
# Three linear-attention layers, then one of full attention. Drawn less widely: their gated norms
# divide by small numbers, which magnifies the rounding of different orders of summation.
_LINEAR = _GROUPED | {
    "initializer_range": 0.2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


def _gpt2_config(**overrides: Any) -> GPT2Config:
    """GPT-2 has its own names for the sizes, learned positions and layers called `h`."""
    settings = {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 512,
        "initializer_range": 0.3,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
    return GPT2Config(**(settings | {renamed.get(k, k): v for k, v in overrides.items()}))


def _from(config_class: type[PreTrainedConfig], **defaults: Any) -> Callable[..., PreTrainedConfig]:
    return lambda **overrides: config_class(**(defaults | overrides))


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _from(LlamaConfig, **_GROUPED, tie_word_embeddings=False),
    "llama_tied": _from(LlamaConfig, **_GROUPED, tie_word_embeddings=True),
    "qwen2": _from(Qwen2Config, **_GROUPED, tie_word_embeddings=True),
    # head_dim is not hidden / heads here, as in Qwen3 and Gemma.
    "qwen3": _from(Qwen3Config, **_GROUPED, head_dim=16, tie_word_embeddings=False),
    "gemma2": _from(
        Gemma2Config, **_GEMMA, final_logit_softcapping=2.0, attn_logit_softcapping=20.0
    ),
    "gemma3": _from(
        Gemma3TextConfig,
        **_GEMMA,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    # Scales outside its embedding module and after its head.
    "granite": _from(
        GraniteConfig,
        **_GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.35,
        logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    # Its head has a bias.
    "phi": _from(PhiConfig, **_COMMON, tie_word_embeddings=False),
    "gpt_neox": _from(GPTNeoXConfig, **_COMMON, use_parallel_residual=True),
    "gpt2": _gpt2_config,
    "qwen3_moe": _from(
        Qwen3MoeConfig,
        **_GROUPED,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        tie_word_embeddings=False,
    ),
    "qwen3_next": _from(Qwen3NextConfig, **_LINEAR, **_EXPERTS),
    "qwen3_5": _from(Qwen3_5TextConfig, **_LINEAR),
    "qwen3_5_moe": _from(Qwen3_5MoeTextConfig, **_LINEAR, **_EXPERTS),
}
"""Family name -> config builder; keyword arguments override its fields."""


def make_tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a fresh random float32 causal language model in eval mode.

    Args:
        family: A key of FAMILIES.
        seed: Seed of the weights; the global random state is left as it was.
        overrides: Fields of the family's config, for example `num_hidden_layers=6`.
    """
    if "num_hidden_layers" in overrides and family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * overrides["num_hidden_layers"]
        overrides.setdefault("layer_types", kinds[: overrides["num_hidden_layers"]])
    config = FAMILIES[family](**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        model.float().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_tiny_target(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a tiny model and the tiny tokenizer as a Hugging Face folder.

    The model's vocabulary (320) is padded beyond the tokenizer's (312).

    Args:
        folder: Where to write; made if missing.
        family: A key of FAMILIES.
        seed: Seed of the weights.
        chat_template: Jinja text of the tokenizer's chat template, or None for a base model.
        max_shard_size: As in `save_pretrained`; "30KB" splits the weights into several files.
        overrides: Fields of the family's config.

    Returns:
        The folder.
    """
    folder = Path(folder)
    model = make_tiny_model(family, seed=seed, **({"vocab_size": PADDED_VOCAB_SIZE} | overrides))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tiny_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
