"""Whether an MTP draft with a Llama-type block and one with a block of the target's own family
compute the same: where they do, either may stand for the other.

A Llama-type block (models/mtp.py) drafts faster and trains with `depth_attention: chain`, but most
families' layers are not of that kind. Names and shapes do not tell (GLM-4 rotates half of a head of
the same shape), so both are run on a random text.

Check: tests/test_mtp_native.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.layered_draft import LayeredDraft
from draftsmith.models.mtp_depths import DepthwiseMtpDraft
from draftsmith.models.mtp_module import MtpConfig
from draftsmith.models.mtp_native import NativeMtpConfig, NativeMtpDraft
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.ttt_slots import plan_slots

PROBE_LENGTH = 24
"""Tokens of the random text (our choice)."""
TOLERANCE = 1e-4
"""Of the largest number, float32."""
WIRING = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
    "pad_token_id", "hidden_act", "vocab_size", "draft_vocab_size", "num_modules", "concat",
    "recycle", "zero_first_slot",
)  # fmt: skip
"""Fields that both configs have and that mean the same in both."""


def llama_type_config(config: NativeMtpConfig, tensors: Mapping[str, Tensor]) -> MtpConfig | None:
    """The config of a Llama-type draft that computes the same with the same tensors, if there is
    one.

    Args:
        config: Of the draft with a block of the target's family.
        tensors: All of its tensors.
    """
    block = config.block or {}
    experts = tensors.get("layers.0.mlp.experts.down_proj")
    single = config.num_modules == 1
    made = MtpConfig(
        **{name: getattr(config, name) for name in WIRING},
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        attention_bias="layers.0.self_attn.o_proj.bias" in tensors,
        num_experts=None if experts is None else len(experts),
        moe_intermediate_size=None if experts is None else experts.shape[-1],
        num_experts_per_tok=block.get("num_experts_per_tok") or 2,
        norm_topk_prob=bool(block.get("norm_topk_prob", True)),
        depth_attention="chain" if single else "full",
        draftsmith_class=f"draftsmith.models.mtp.{'MtpDraft' if single else 'DepthwiseMtpDraft'}",
    )
    return made if same_function(config, made, tensors) else None


@torch.no_grad()
def same_function(native: NativeMtpConfig, llama: MtpConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether both kinds of draft compute the same states with the same tensors, at two depths."""
    llama = copy.deepcopy(llama)
    llama.depth_attention = "full"
    kinds: tuple[tuple[Any, Any], ...] = ((native, NativeMtpDraft), (llama, DepthwiseMtpDraft))
    for config, kind in kinds:
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in kind(config).state_dict().items()}
        if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            return False
    own = _states(NativeMtpDraft, native, tensors)
    other = _states(DepthwiseMtpDraft, llama, tensors)
    return torch.allclose(own, other, rtol=0.0, atol=TOLERANCE * float(own.abs().max()))


def _states(kind: Any, config: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """[2, rows, hidden] what the head reads after a random text."""
    config = copy.deepcopy(config)
    config.depth_attention = "full"
    config.step_weights = [1.0, 1.0]
    draft = kind(config).float().eval()
    draft.load_state_dict(dict(tensors), strict=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.arange(PROBE_LENGTH)[None]
    embeddings = nn.Embedding(PROBE_LENGTH, config.hidden_size)
    embeddings.weight.copy_(torch.randn(embeddings.weight.shape, generator=draw))
    LayeredDraft.attach_target(draft, embed_tokens=embeddings)
    real = torch.ones_like(ids, dtype=torch.bool)
    final = torch.randn(1, PROBE_LENGTH, config.hidden_size, generator=draw)
    batch = TrainBatch(ids, real, real, ids, final[..., :0], final)
    places = real.clone()
    places[:, :2] = places[:, -1:] = False  # Both depths have a prediction of every place.
    plan = plan_slots(places, real, num_steps=2)
    made = draft._unroll(batch, plan, nn.Identity())
    return torch.stack(
        [state.index_select(0, rows) for state, rows in zip(made, plan.row_slots, strict=True)]
    )
