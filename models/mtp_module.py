"""The modules of multi-token prediction and the draft that applies one of them again and again.

Paper: DeepSeek-V3 (arXiv 2412.19437), section 2.2. Depth k = 0, 1, ... of slot t (state of position
t, token t+1) with module m = min(k, D - 1) of D:

    x   = M_m [enorm_m(embedding of token t+1+k) ; hnorm_m(s)]     M_m: [hidden, 2 hidden], no bias
    u   = decoder block_m(x)
    n   = norm_m(u)
    logits = the target's own head on n, frozen                    for token t+2+k
    next depth: s = n (`recycle: after_norm`) or u (`before_norm`)

where s is the target's final hidden state at depth 0, after its final norm. The paper counts depths
from 1 and writes the two halves of the input the other way round; every published checkpoint but
MiMo's has the embedding first (`concat`).

What depth k attends to is a choice (`depth_attention`):

    chain   true states up to the slot, then the slot's own states of the depths before: one cache,
            as vLLM and SGLang decode with a module that they apply again. Trained by EAGLE-3's
            training-time test. `MtpDraft`, here.
    full    the states of its own depth at all slots before, as in the paper: a cache per depth.
            `DepthwiseMtpDraft`, models/mtp_depths.py.

The block is a Llama-type layer with the usual flags; `num_experts` makes its MLP a routed one of
Qwen3-MoE's kind (softmax, top-k, no shared expert, no balancing loss).

Check: tests/test_mtp.py, tests/test_mtp_golden.py.

Axes: rows (any gathered slots), hidden, batch, seq.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from draftsmith.models.chain_draft import ChainDraft, ChainDraftConfig
from draftsmith.models.draft_layer import QUIET, DraftLayer
from draftsmith.models.protocols import DraftContext, TrainBatch
from draftsmith.models.target import TargetHead

CONCATS = ("embedding_first", "hidden_first")
RECYCLES = ("after_norm", "before_norm")
DEPTH_ATTENTIONS = ("chain", "full")
PUBLISHED_STEPS = 3
PUBLISHED_DECAY = 0.6
"""FastMTP (arXiv 2509.18362): 0.51, 0.31, 0.18 are 0.6**k over three steps, divided by the sum."""
SMALL = 0.1
"""Scale of what the block adds at the start (our choice)."""


def normalised_weights(num_steps: int, decay: float) -> list[float]:
    """decay**k for k = 0 .. num_steps - 1, divided by their sum."""
    weights = [decay**step for step in range(num_steps)]
    return [weight / sum(weights) for weight in weights]


@strict
class MtpConfig(ChainDraftConfig):
    """What MTP adds to a chain draft's settings."""

    model_type = "draftsmith_mtp"

    num_modules: int = 1
    """Separate modules; the last one serves every further depth. `num_hidden_layers` is what each
    of them has."""
    depth_attention: str = "chain"
    concat: str = "embedding_first"
    recycle: str = "after_norm"
    zero_first_slot: bool = False
    """The slot at position 0 reads zeros for its token's embedding."""
    num_experts: int | None = None
    """Experts of a routed MLP; None: a dense one."""
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    draftsmith_class: str = "draftsmith.models.mtp.MtpDraft"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.step_weights is None and self.depth_attention == "full":
            # A checkpoint of unknown training: a cache for each of its modules.
            self.step_weights = normalised_weights(self.num_modules, 1.0)
        super().__post_init__(**kwargs)

    @staticmethod
    def default_step_weights() -> list[float]:
        """FastMTP's."""
        return normalised_weights(PUBLISHED_STEPS, PUBLISHED_DECAY)


class RoutedMlp(Qwen3MoeSparseMoeBlock):
    """transformers' routed MLP on gathered rows, [rows, hidden]."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states[None])[0]


class MtpDraft(ChainDraft):
    """The draft model, and the wiring of its modules; one module, applied to every depth."""

    config_class = MtpConfig
    config: MtpConfig
    aux_layer_ids: tuple[int, ...] = ()
    depth_attention = "chain"
    # nn.ModuleLists with an entry per module; the norms may be of a family's own class.
    enorm: Sequence[Any]
    hnorm: Sequence[Any]
    norm: Sequence[Any]
    eh_proj: Sequence[nn.Linear]

    def __init__(self, config: MtpConfig) -> None:
        self._check(config)
        count = config.num_modules * config.num_hidden_layers
        layers = [DraftLayer(config, reads_tokens=False) for _ in range(count)]
        if config.num_experts is not None:
            for layer in layers:
                layer.mlp = RoutedMlp(config)  # type: ignore[assignment, arg-type]
        super().__init__(config, layers)
        size, eps, modules = config.hidden_size, config.rms_norm_eps, range(config.num_modules)
        self.enorm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in modules)  # type: ignore[assignment]
        self.hnorm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in modules)  # type: ignore[assignment]
        projections = [nn.Linear(2 * size, size, bias=False) for _ in modules]
        self.eh_proj = nn.ModuleList(projections)  # type: ignore[assignment]
        self.norm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in modules)  # type: ignore[assignment]
        self.post_init()

    def _check(self, config: MtpConfig) -> None:
        if config.depth_attention != self.depth_attention:
            raise ValueError(
                f"depth_attention is {config.depth_attention!r}, but {type(self).__name__} is for "
                f"{self.depth_attention!r}: draftsmith_class and depth_attention do not fit."
            )
        if self.depth_attention == "chain" and config.num_modules != 1:
            raise ValueError(
                f"num_modules is {config.num_modules} with depth_attention 'chain'; expected 1: "
                "separate modules keep separate caches, which is depth_attention 'full'."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Qwen3MoeExperts | Qwen3MoeTopKRouter):
            for weight in module.parameters():
                init.normal_(weight, std=weight.shape[-1] ** -0.5)
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def start_at_the_state(self, target_head: TargetHead) -> None:
        """Starts as the guess that the next state is like the last one.

        The projection passes the state on and little of the token, the block adds little, attention
        looks at everything alike, and the norm gives back the size of the target's states. Measured
        on SmolLM2-135M, three steps, 80 updates of a row of at most 256 tokens, cross entropy over
        4096 tokens, one seed: held-out accuracy per depth 0.145, 0.138, 0.136 from random weights,
        0.186, 0.166, 0.162 so; with all of the token 0.181, 0.157, 0.151.
        """
        factor = target_head.final_norm_weight
        for module in range(self.config.num_modules):
            for_token, for_state = self._halves(module)
            for_token *= SMALL
            for_state.copy_(torch.eye(self.config.hidden_size))
            if factor is not None:
                # A state is a vector of ones in size, times this factor.
                self.norm[module].weight.fill_(float(factor.float().square().mean().sqrt()))
        for layer in self.layers:
            layer.self_attn.q_proj.weight *= QUIET
            layer.self_attn.k_proj.weight *= QUIET
            layer.self_attn.o_proj.weight *= SMALL
            mlp: Any = layer.mlp
            out = mlp.experts.down_proj if isinstance(mlp, RoutedMlp) else mlp.down_proj.weight
            out *= SMALL

    @property
    def zeroes_first_slot(self) -> bool:  # type: ignore[override]
        """Whether the slot at position 0 reads zeros for its token."""
        return self.config.zero_first_slot

    # One module.

    def _halves(self, module: int) -> tuple[Tensor, Tensor]:
        """The projection's columns for the embedding and for the state, [hidden, hidden] each."""
        first, second = self.eh_proj[module].weight.chunk(2, dim=1)
        return (first, second) if self.config.concat == "embedding_first" else (second, first)

    def _token_part(self, module: int, embedded: Tensor) -> Tensor:
        """[rows, hidden] embeddings -> what they add to the block's input, at whatever depth."""
        return F.linear(self.enorm[module](embedded), self._halves(module)[0])

    def _state_part(self, module: int, states: Tensor) -> Tensor:
        """[rows, hidden] states -> what they add to the block's input."""
        states = states.to(self.eh_proj[module].weight.dtype)
        return F.linear(self.hnorm[module](states), self._halves(module)[1])

    # As a chain.

    def _features(self, source: TrainBatch | DraftContext) -> Tensor:
        return source.final_hidden_states

    def _tokens(self, embedded: Tensor) -> Tensor:
        return self._token_part(0, embedded)

    def _first_input(self, features: Tensor, tokens: Tensor) -> Tensor:
        return tokens + self._state_part(0, features)

    def _next_input(self, fed_back: Tensor, tokens: Tensor) -> Tensor:
        return self._first_input(fed_back, tokens)

    def _fed_back(self, hidden: Tensor) -> Tensor:
        return self.norm[0](hidden) if self.config.recycle == "after_norm" else hidden

    def _head_input(self, fed_back: Tensor) -> Tensor:
        return fed_back if self.config.recycle == "after_norm" else self.norm[0](fed_back)
