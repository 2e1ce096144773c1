"""MTP drafts of ours as modules of a checkpoint: in a target's layout, or in speculators' form.

An engine runs the modules with the target's own layer. A draft with a Llama-type block is therefore
written only where that block computes the same as the target's layer (models/mtp_native_match.py).

Check: tests/test_format_mtp.py, tests/test_stitch.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.models.format_keys import SPECULATORS_VERSION
from draftsmith.models.format_mtp import (
    OWN,
    SPECULATORS,
    Module,
    Place,
    draft_modules,
    to_layout,
)
from draftsmith.models.mtp_module import MtpConfig
from draftsmith.models.mtp_native import NativeMtpConfig, native_config
from draftsmith.models.mtp_native_match import same_function

VOCABULARY = ("d2t", "t2d")


def modules_for_target(
    config: MtpConfig, tensors: Mapping[str, Tensor], text: PreTrainedConfig, *, concat: str
) -> list[Module]:
    """A draft's modules as a target's own layers would run them.

    Args:
        config: The draft's.
        tensors: Its tensors. A draft vocabulary is left out: no weight depends on it.
        text: The target's (text) configuration.
        concat: Order of the projection's input that is wanted; its columns are moved accordingly.

    Raises:
        ValueError: the block is not the target's layer, or the draft is another target's.
    """
    wanted = {name: tensor for name, tensor in tensors.items() if name not in VOCABULARY}
    native = native_config(
        text,
        num_modules=config.num_modules,
        depth_attention=config.depth_attention,
        concat=config.concat,
        recycle=config.recycle,
        zero_first_slot=config.zero_first_slot,
    )
    if isinstance(config, NativeMtpConfig):
        differing = _differing(config.block or {}, native.block or {})
        if differing:
            raise ValueError(
                f"The draft's block was built for a target with other {', '.join(differing[:4])}. "
                "Give the target that it was trained for."
            )
    else:
        whole = copy.deepcopy(config)
        whole.draft_vocab_size = config.vocab_size
        if config.num_hidden_layers != 1 or not same_function(native, whole, wanted):
            raise ValueError(
                "The draft's block is not the target's own layer, which engines run MTP modules "
                "with: they would compute something else. Train with method=mtp_native, whose "
                "block is that layer; method=mtp serves targets of Llama's, Qwen3's and "
                "Qwen3-MoE's kind with fitting settings (qk_norm, num_experts, the target's sizes)."
            )
    modules = draft_modules(wanted, config.num_modules)
    if concat != config.concat:
        for module in modules:
            first, second = module["eh_proj.weight"].chunk(2, dim=1)
            module["eh_proj.weight"] = torch.cat([second, first], dim=1)
    return modules


def _differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings of a target's layers that two of its configurations disagree on."""
    return sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))


def to_mtp_speculators(
    modules: list[Module],
    text: PreTrainedConfig,
    *,
    num_draft_tokens: int,
    verifier: str,
    architectures: list[str],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of an MTP draft in speculators' form.

    Args:
        modules: One, the projection's input with the embedding first.
        text: The target's (text) configuration.
        num_draft_tokens: Tokens per round that the folder asks for.
        verifier: The target's hub id or folder.
        architectures: The target's.

    Raises:
        ValueError: several modules, for which the form has no place.
    """
    if len(modules) != 1:
        raise ValueError(
            f"The draft has {len(modules)} MTP modules; speculators' form holds one. Stitch it "
            "into its target instead (draftsmith-stitch)."
        )
    layer = text.to_dict()
    layer.pop("quantization_config", None)
    tensors = to_layout(modules[0], SPECULATORS, Place(), 0, fused_experts=True)
    kind = str(tensors[f"mtp_layers.0.{SPECULATORS.names[OWN.index('eh_proj')]}.weight"].dtype)
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    config = {
        "architectures": ["MTPDraftModel"],
        "auto_map": {"": "config.MTPSpeculatorConfig"},
        "dtype": kind.removeprefix("torch."),
        "num_nextn_predict_layers": 1,
        "speculators_model_type": "mtp",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
    return config, tensors
