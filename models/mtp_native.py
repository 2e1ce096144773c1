"""MTP modules whose block is a layer of the target's own family, as published targets carry them.

DeepSeek-V3's modules have latent attention and grouped experts, GLM-4's rotate half of each head,
Qwen3-Next's and Qwen3.5's gate their attention, MiMo's have biases on three of four projections.
The Llama-type block of models/mtp.py holds none of these; this draft's block is transformers' own
layer (models/mtp_native_block.py). It reads the heads that targets come with, decodes with them,
trains them further on the frozen target, and they go back into the target's checkpoint
(models/format_mtp.py, models/stitch.py).

Wiring, depths, caches and decoding are those of models/mtp_depths.py. With `depth_attention: full`
every depth attends to the states of its own depth. `chain` (one module) is what vLLM and SGLang do
with a module that they apply again: one cache, a slot sees true states and its own chain; here a
deeper token goes into the only cache. All norms are of the family's own class, so their weights are
stored as the family stores them (Qwen3-Next, Qwen3.5: minus one).

Differs from models/mtp.py: training runs the block over whole texts, unsupervised slots included (a
family's layer cannot be split into its parts), and a chain's later steps with an explicit mask,
[seq, steps * seq].

Check: tests/test_mtp_native.py, tests/test_golden_mtp_native.py (transformers' use_mtp on
DeepSeek-V3 and GLM-4-MoE).

Axes: rows, hidden, batch, seq.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers import initialization as init

from draftsmith.models.chain_draft import ChainDraft
from draftsmith.models.chain_method import HasDraftToTarget
from draftsmith.models.draft_sizes import draft_layer_sizes
from draftsmith.models.mtp import MtpMethod
from draftsmith.models.mtp_depths import DepthRows, DepthwiseMtpDraft
from draftsmith.models.mtp_module import DEPTH_ATTENTIONS, MtpConfig
from draftsmith.models.mtp_native_block import FamilyBlock, block_settings, norm_offset
from draftsmith.models.packed import Segment
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.models.ttt_slots import SlotPlan
from draftsmith.models.vocabulary_map import has_reduced_vocabulary, set_draft_vocabulary

SMALLEST = 0.05
"""Of the mean factor of the target's final norm: the smallest one that is undone (our choice)."""


@strict
class NativeMtpConfig(MtpConfig):
    """What a draft with a block of the target's family keeps besides MTP's wiring."""

    model_type = "draftsmith_mtp_native"

    block: dict[str, Any] | None = None
    """The target's (text) configuration, which the block is built from."""
    draftsmith_class: str = "draftsmith.models.mtp_native.NativeMtpDraft"


def native_config(
    text_config: PreTrainedConfig, *, num_modules: int, **settings: Any
) -> NativeMtpConfig:
    """The config of a draft for a target, its layer's sizes taken from there.

    Args:
        text_config: the target's.
        num_modules: separate modules; `depth_attention` is chain for one, full for several, unless
            given.
        settings: further fields.

    Raises:
        ValueError: the target's family is not in transformers.
    """
    own = draft_layer_sizes(text_config, {}) | {
        "vocab_size": text_config.vocab_size,
        "depth_attention": DEPTH_ATTENTIONS[num_modules > 1],
        "block": block_settings(text_config),
    }
    return NativeMtpConfig(**(own | settings), num_modules=num_modules)


class NativeMtpDraft(DepthwiseMtpDraft):
    """The draft model; `layers[m]` is module m's block."""

    config_class = NativeMtpConfig
    config: NativeMtpConfig

    def __init__(self, config: NativeMtpConfig) -> None:
        self._check(config)
        if config.block is None:
            raise ValueError("The draft's config has no block: the target's configuration is lost.")
        modules = range(config.num_modules)
        blocks = tuple(FamilyBlock(config.block) for _ in modules)
        # The parent would build Llama-type layers.
        ChainDraft.__init__(self, config, [block.layer for block in blocks])  # type: ignore[misc]
        size = config.hidden_size
        self.enorm = nn.ModuleList(block.new_norm(size) for block in blocks)  # type: ignore[assignment]
        self.hnorm = nn.ModuleList(block.new_norm(size) for block in blocks)  # type: ignore[assignment]
        self.eh_proj = nn.ModuleList(nn.Linear(2 * size, size, bias=False) for _ in modules)  # type: ignore[assignment]
        self.norm = nn.ModuleList(block.new_norm(size) for block in blocks)  # type: ignore[assignment]
        self.block_rotary = blocks[0].share_rotary(blocks)
        self._blocks = blocks
        self.post_init()

    def _check(self, config: MtpConfig) -> None:
        if config.depth_attention == "chain" and config.num_modules != 1:
            raise ValueError(
                f"num_modules is {config.num_modules} with depth_attention 'chain'; expected 1: "
                "separate modules keep separate caches, which is depth_attention 'full'."
            )

    @property
    def is_chain(self) -> bool:
        """Whether all depths share one cache."""
        return self.config.depth_attention == "chain"

    @property
    def num_caches(self) -> int:
        """Caches of a sequence."""
        return 1 if self.is_chain else super().num_caches

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # Variance-preserving at any width, as in all drafts.
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            self._blocks[0].init_weights(module)

    @torch.no_grad()
    def start_at_the_state(self, target_head: TargetHead) -> None:
        """Starts as the guess that the next state is like the last one.

        The state goes through as it was before the target's final norm: `hnorm` undoes that norm's
        factor, the projection hands it on, and the module's norm applies the factor again. The
        block adds to it.
        """
        factor = target_head.final_norm_weight
        for module in range(self.config.num_modules):
            self._halves(module)[1].copy_(torch.eye(self.config.hidden_size))
            if factor is None:
                continue
            applied = factor.float().cpu()
            middle = applied.abs().mean()
            # A factor near zero cannot be undone.
            held = torch.where(applied < 0, -1.0, 1.0) * applied.abs().clamp_min(SMALLEST * middle)
            for norm, wanted in ((self.norm, applied), (self.hnorm, middle / held)):
                own: Any = norm[module]
                own.weight.copy_(wanted - norm_offset(own))

    def check_block(self) -> None:
        """Raises ValueError where the block is not a layer of the target, or not it alone."""
        assert self.config.block is not None, "checked at construction"
        self._blocks[0].check(self.config.block)

    def _layers_of(self, depth: int) -> Sequence[Any]:
        return [self.layers[self._module(depth)]]

    # Training.

    def _unroll(self, batch: TrainBatch, plan: SlotPlan, target_head: nn.Module) -> list[Tensor]:  # noqa: ARG002
        """What the head reads at each depth, [active, hidden]."""
        embedded = self._embed(batch.input_ids)
        state = self._features(batch)
        made = []
        cache = self._blocks[0].new_cache() if self.is_chain else None
        for depth in range(len(self.step_weights)):
            if cache is not None:
                normed, state = self.depth_over_texts(depth, embedded, state, cache)
            elif self.config.checkpoint_steps and torch.is_grad_enabled():
                normed, state = checkpoint(
                    self.depth_over_texts, depth, embedded, state, use_reentrant=False
                )
            else:
                normed, state = self.depth_over_texts(depth, embedded, state)
            made.append(normed.flatten(0, 1).index_select(0, plan.active))
        return made

    def depth_over_texts(
        self, depth: int, embedded: Tensor, states: Tensor, cache: Any = None
    ) -> tuple[Tensor, Tensor]:
        """One depth at every slot of whole texts.

        Args:
            depth: from 0.
            embedded: [batch, seq, hidden] embeddings of the texts' tokens.
            states: [batch, seq, hidden] of the depth before; at depth 0 the target's final ones.
            cache: a chain's, with the depths before; this one's keys are added.

        Returns:
            What the head reads and what the next depth reads, [batch, seq, hidden] each. Slots
            whose token t+1+depth is beyond the text hold nothing; no slot before them sees them.
        """
        module = self._module(depth)
        following = F.pad(embedded[:, 1 + depth :], (0, 0, 0, min(1 + depth, embedded.shape[1])))
        tokens = self._token_part(module, following[:, : embedded.shape[1]])
        if self.zeroes_first_slot and (depth == 0 or not self.is_chain):
            tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, 1:]], dim=1)
        entered = tokens + self._state_part(module, states)
        if cache is None:
            hidden = self._blocks[module].over_texts(entered)
        else:
            hidden = self._blocks[module].over_chains(entered, cache, depth)
        return self._outputs(depth, hidden)

    # Drafting.

    def _run(  # type: ignore[override]
        self, depth: int, reads: Sequence[Any], above: Tensor, *, drafted: bool
    ) -> tuple[Tensor, Tensor]:
        """New entries of one depth's caches -> what the head reads and the next depth reads."""
        module = self._module(depth)
        ids = torch.cat([read.tokens for read in reads])
        tokens = self._token_part(module, self._embed(ids))
        if not drafted:
            self._zero_first_slots(tokens, reads)
        hidden = tokens + self._state_part(module, above)
        segments = [_segment(read) for read in reads]
        return self._outputs(depth, self._blocks[module].over_rows(hidden, segments))


def _segment(read: Any) -> Segment:
    """The rows that a cache reads, as packed forwards take them."""
    cache = read.state.cache
    segment = Segment(cache, read.tokens, read.start)
    if isinstance(read, DepthRows) and read.seen is not None:
        segment.positions = read.at
        segment.ancestors = read.seen[:, cache.committed :]
    return segment


LAYER_FIELDS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_norm",
    "attention_bias",
    "num_hidden_layers",
    "num_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "rope_position",
    "step_tokens",
)
"""Settings of a Llama-type layer and its chains: the target's own configuration decides here."""


@dataclass
class NativeMtpMethod(MtpMethod):
    """The `method` node of a run whose block is a layer of the target's family."""

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {item.name: item.default for item in fields(self)}
        set_ones = [name for name in LAYER_FIELDS if getattr(self, name) != defaults[name]]
        if set_ones:
            raise ValueError(
                f"method.{', method.'.join(set_ones)} has no effect with a block of the target's "
                "own family (method=mtp_native). Leave it out, or use method=mtp."
            )
        if self.checkpoint_steps and self.attention == "chain":
            raise ValueError(
                "method.checkpoint_steps has no effect on a chain whose block is of the target's "
                "own family. Set it to false, or method.depth_attention=full."
            )

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],  # noqa: ARG002
    ) -> NativeMtpDraft:
        """Makes a draft model for a target, float32, attached to it.

        Args:
            target_head: Config, embeddings, head and final norm of the target.
            vocabulary: The draft vocabulary, or None for the full one.
            aux_layer_ids: Not read: the final state is what MTP knows of the target.

        Raises:
            ValueError: the target's layers cannot be a draft's block.
        """
        config = native_config(
            target_head.config,
            num_modules=self.num_modules,
            depth_attention=self.attention,
            concat=self.concat,
            recycle=self.recycle,
            zero_first_slot=self.zero_first_slot,
            **self.chain_settings(target_head, vocabulary),
        )
        draft = NativeMtpDraft(config)
        draft.check_block()
        draft.start_at_the_state(target_head)
        if vocabulary is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, vocabulary.draft_to_target)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
