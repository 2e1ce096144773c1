"""What the tests of checkpoint formats share: random drafts, and a target's facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.dflash import DFlashConfig
from draftsmith.models.dspark import DSparkConfig
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.foreign_files import write_folder
from draftsmith.models.format_keys import TargetFacts
from draftsmith.models.formats import DraftConfig, ForeignDraft, new_draft, read_foreign, to_format
from draftsmith.models.vocabulary_map import set_draft_vocabulary

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, POSITIONS = 40, 24, 32, 8, 512
"""Sizes of the target that the random drafts belong to."""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip

EAGLE3_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full_vocabulary": {"draft_vocab_size": VOCAB},
    "five_layers": {"aux_layer_ids": [-1, 0, 2, 4, 6]},
    "two_draft_layers": {"num_hidden_layers": 2},
    "own_head_dim": {"head_dim": 16},
    "scaled_rope": {"rope_parameters": LLAMA3},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_residual": {"norm_before_residual": True},
    "attention_bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
}


def make_draft(config: DraftConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a draft with this config, vectors shaken; three of five tokens are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = new_draft(config)
        for parameter in draft.parameters():
            if parameter.ndim == 1:  # A forgotten norm weight or bias must show.
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    if getattr(config, "draft_vocab_size", VOCAB) != VOCAB:
        kept = [token for token in range(VOCAB) if token % 5 not in (1, 4)]
        set_draft_vocabulary(draft, torch.tensor(kept))
    return {name: tensor.clone() for name, tensor in draft.state_dict().items()}


def eagle3_config(**overrides: Any) -> Eagle3Config:
    """A small EAGLE-3 draft of the target above."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": POSITIONS, "aux_layer_ids": [1, 3, 4], "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
    }  # fmt: skip
    return Eagle3Config(**(settings | overrides))


def eagle1_config(**overrides: Any) -> EagleConfig:
    """A small EAGLE-1 draft of the target above."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return EagleConfig(**(settings | overrides))


def block_settings() -> dict[str, Any]:
    """What the small block drafts of the target above share."""
    return {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS, "aux_layer_ids": [1, 3, 4], "rms_norm_eps": 1e-5,
        "mask_token_id": VOCAB - 1, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
    }  # fmt: skip


def dflash_config(**overrides: Any) -> DFlashConfig:
    """A small DFlash draft of the target above."""
    return DFlashConfig(**(block_settings() | {"block_size": 6} | overrides))


def dspark_config(**overrides: Any) -> DSparkConfig:
    """A small DSpark draft of the target above."""
    return DSparkConfig(**(block_settings() | {"block_size": 4, "markov_rank": 6} | overrides))


def target_facts(**overrides: Any) -> TargetFacts:
    """The target above, with embeddings."""
    facts: dict[str, Any] = {
        "name_or_path": "org/target", "source": "org/target", "architectures": ["LlamaForCausalLM"],
        "num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "max_positions": POSITIONS,
        "embeddings": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)),
        "head": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6)),
    }  # fmt: skip
    return TargetFacts(**(facts | overrides))


def export(config: Any, format: str, **facts: Any) -> Any:
    """A random draft in a format, in memory."""
    return to_format(config, make_draft(config), format=format, target=target_facts(**facts))


def written(
    folder: Path,
    config: DraftConfig,
    format: str,
    *,
    target: TargetFacts | None = None,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None] | None = None,
) -> Path:
    """A random draft of this config in a format on disk; `change` edits config and tensors."""
    target = target_facts() if target is None else target
    foreign = to_format(config, make_draft(config), format=format, target=target)
    if change is not None:
        change(foreign.config, foreign.tensors)
    write_folder(folder, foreign.config, foreign.tensors)
    return folder


def read_back(folder: Path, **options: Any) -> ForeignDraft:
    """Reads a folder with the target's facts known."""
    return read_foreign(folder, target=target_facts(), **options)
