"""What the tests of native MTP modules share: tiny targets of the families that have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from draftsmith.models.format_mtp import LAYOUTS
from draftsmith.models.mtp_native import NativeMtpConfig, NativeMtpDraft, native_config
from draftsmith.models.stitch import Stitched, stitch
from draftsmith.models.target_source import weights_fingerprint

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3, "tie_word_embeddings": False,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2}
LINEAR = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "topk_group": 1,
}  # fmt: skip
NEXT = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A target, and where its checkpoints keep modules."""

    config: Callable[[], PreTrainedConfig]
    layout: str
    num_modules: int = 1


FAMILIES = {
    "deepseek_v3": Family(lambda: DeepseekV3Config(**(SIZES | ROUTED | LATENT)), "deepseek", 2),
    "glm4_moe": Family(
        lambda: Glm4MoeConfig(**(SIZES | ROUTED | {"head_dim": 16, "use_qk_norm": True})),
        "deepseek",
    ),
    "qwen3_next": Family(lambda: Qwen3NextConfig(**(SIZES | LINEAR | NEXT)), "qwen"),
    "qwen3_5": Family(lambda: Qwen3_5TextConfig(**(SIZES | LINEAR)), "qwen"),
    "mimo": Family(lambda: Qwen2Config(**SIZES), "mimo"),
    "hy3": Family(lambda: Qwen3Config(**SIZES, head_dim=16), "hy3"),
    "qwen3_moe": Family(
        lambda: Qwen3MoeConfig(**(SIZES | EXPERTS), num_experts=4, head_dim=16), "deepseek"
    ),
}


def shake(model: Any, seed: int) -> None:
    """Moves every weight, vectors most: a forgotten norm or bias has to show."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                scale = 0.2 if tensor.ndim == 1 else 0.1
                tensor.add_(scale * torch.randn(tensor.shape, generator=draw))


def save_target(folder: Path, family: str, *, max_shard_size: str = "60KB") -> Path:
    """A random target of a family, in shards, without MTP modules."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family].config()).float().eval()
    shake(model, 1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_draft(target: Path, family: str, **settings: Any) -> NativeMtpDraft:
    """A random draft for a saved target."""
    text = AutoConfig.from_pretrained(target)
    config = native_config(
        text,
        **(
            {
                "num_modules": FAMILIES[family].num_modules,
                "concat": LAYOUTS[FAMILIES[family].layout].concat,
                "target_fingerprint": {
                    "weights": weights_fingerprint(target), "tokenizer": "", "chat_template": "",
                },
            }
            | settings
        ),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = NativeMtpDraft(config).float().eval()
    shake(draft, 2)
    return draft


def stitched(draft: Path, target: Path, output: Path, **settings: Any) -> Stitched:
    """draftsmith-stitch with its defaults."""
    named = SimpleNamespace(name_or_path=str(target), trust_remote_code=False, revision=None)
    defaults = {"layout": None, "replace": False, "copies": True, "link": True}
    return stitch(
        SimpleNamespace(draft=str(draft), target=named, output=str(output), **(defaults | settings))
    )


__all__ = [
    "FAMILIES",
    "NativeMtpConfig",
    "make_draft",
    "save_target",
    "shake",
    "stitched",
]
