"""MTP: modules that predict the token after next, and the one after that, through the target's own
head.

Papers: DeepSeek-V3 (arXiv 2412.19437), section 2.2, for the module; FastMTP (arXiv 2509.18362) for
one module applied again and again, trained after the fact on a frozen target. The formulas and the
two kinds of attention: models/mtp_module.py, models/mtp_depths.py.

Here the target is frozen and its final hidden states come from the cache or live, as for EAGLE-1;
the modules are all that is trained. `num_steps` depths are unrolled with the weights
step_decay**k / sum (0.51, 0.31, 0.18 for three); one step is what checkpoints were pretrained with.
The objective is any of train/objectives.py: `ce` (the text, or with labels: target the target's
most likely token), `kl` (its distribution), `tv`, `lk_alpha`, `lk_lambda`.

Differs from FastMTP and speculators: the training-time test lets a slot see true states and its own
chain, which is what engines do when they apply a module again (speculators trains what is called
`full` here); the loss is divided by one count for all steps; the embedding's half of the projection
is taken once per text.

Not here: a block of the target's own family (models/mtp_native.py), training the target too
(models/mtp_joint.py), first states from before the target's final norm (Step-3.5, MiMo-V2).

Check: tests/test_mtp.py, tests/test_mtp_golden.py (transformers' use_mtp, speculators).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.models.chain_method import ChainMethod, HasDraftToTarget
from draftsmith.models.method_options import check_choice, check_flag, check_integer
from draftsmith.models.mtp_depths import DepthwiseMtpDraft
from draftsmith.models.mtp_module import (
    CONCATS,
    DEPTH_ATTENTIONS,
    PUBLISHED_DECAY,
    PUBLISHED_STEPS,
    RECYCLES,
    MtpConfig,
    MtpDraft,
    normalised_weights,
)
from draftsmith.models.target import TargetHead
from draftsmith.models.vocabulary_map import has_reduced_vocabulary, set_draft_vocabulary

__all__ = ["DepthwiseMtpDraft", "MtpConfig", "MtpDraft", "MtpMethod"]


@dataclass
class MtpMethod(ChainMethod):
    """The `method` node of a run: sizes of the draft and how it is trained. null: the target's."""

    num_modules: int = 1
    """Separate modules (DeepSeek's D); the last one serves all further depths."""
    depth_attention: str | None = None
    """chain: a depth sees true states and its slot's own chain, one cache. full: a depth sees the
    states of its own depth, a cache per depth (DeepSeek-V3, transformers). null: chain for one
    module, full for several."""
    concat: str = "embedding_first"
    """Order of the projection's input; hidden_first: MiMo."""
    recycle: str = "after_norm"
    """The state that the next depth reads: after the module's norm; before_norm: GLM in vLLM."""
    zero_first_slot: bool = False
    """The slot at position 0 reads no token, as vLLM computes DeepSeek, GLM, MiMo and Hy3."""
    num_experts: int | None = None
    """A number: a routed MLP of Qwen3-MoE's kind; null: a dense one."""
    num_experts_per_tok: int = 2
    """Experts that each token is sent to."""
    moe_intermediate_size: int | None = None
    """Width of one expert; null: that of the dense MLP divided by num_experts_per_tok."""
    num_steps: int = PUBLISHED_STEPS
    """Depths unrolled in training (FastMTP: 3); 1: as in pretraining."""
    step_decay: float = PUBLISHED_DECAY
    """Depth k of the loss weighs step_decay**k, divided by the sum of all (FastMTP: 0.6)."""
    aux_layer_ids: list[int] = field(default_factory=list, init=False)
    """MTP reads no layer but the final state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_modules", "num_experts_per_tok"):
            check_integer(f"method.{name}", getattr(self, name))
        for name in ("num_experts", "moe_intermediate_size"):
            check_integer(f"method.{name}", getattr(self, name), optional=True)
        check_choice("method.concat", self.concat, CONCATS)
        check_choice("method.recycle", self.recycle, RECYCLES)
        check_flag("method.zero_first_slot", self.zero_first_slot)
        if self.depth_attention is not None:
            check_choice("method.depth_attention", self.depth_attention, DEPTH_ATTENTIONS)
        self._check_depths()
        if self.num_experts is not None and self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"method.num_experts is {self.num_experts}, expected at least "
                f"method.num_experts_per_tok ({self.num_experts_per_tok}), or null."
            )

    def _check_depths(self) -> None:
        if self.attention == "chain" and self.num_modules > 1:
            raise ValueError(
                f"method.num_modules is {self.num_modules} with method.depth_attention=chain: "
                "separate modules keep separate caches. Set method.depth_attention=full, or one "
                "module."
            )
        if self.num_steps < self.num_modules:
            raise ValueError(
                f"method.num_steps is {self.num_steps}, but there are {self.num_modules} modules "
                "(method.num_modules): the last ones would never be trained. Raise num_steps."
            )
        if self.attention == "full" and self.step_tokens is not None:
            raise ValueError(
                "method.step_tokens has no effect with method.depth_attention=full, whose depths "
                "read the text at every slot. Set it to null."
            )

    @property
    def attention(self) -> str:
        """`depth_attention` with its default filled in."""
        return self.depth_attention or DEPTH_ATTENTIONS[self.num_modules > 1]

    def chain_settings(
        self, target_head: TargetHead, vocabulary: HasDraftToTarget | None
    ) -> dict[str, Any]:
        """As of every chain, with weights that sum to 1 where none are given."""
        settings = super().chain_settings(target_head, vocabulary)
        if self.step_weights is None:
            settings["step_weights"] = normalised_weights(self.num_steps, self.step_decay)
        return settings

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],  # noqa: ARG002
    ) -> MtpDraft:
        """Makes a draft model for a target, float32, attached to it.

        Args:
            target_head: Config, embeddings, head and final norm of the target.
            vocabulary: The draft vocabulary, or None for the full one.
            aux_layer_ids: Not read: the final state is what MTP knows of the target.
        """
        settings = self.chain_settings(target_head, vocabulary)
        made = DepthwiseMtpDraft if self.attention == "full" else MtpDraft
        width = settings["intermediate_size"] // self.num_experts_per_tok
        config = MtpConfig(
            **settings,
            num_modules=self.num_modules,
            depth_attention=self.attention,
            concat=self.concat,
            recycle=self.recycle,
            zero_first_slot=self.zero_first_slot,
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size or max(width, 1),
            draftsmith_class=f"draftsmith.models.mtp.{made.__name__}",
        )
        draft = made(config)
        draft.start_at_the_state(target_head)
        if vocabulary is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, vocabulary.draft_to_target)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
