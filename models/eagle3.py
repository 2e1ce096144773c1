"""EAGLE-3: a one-layer draft over several target layers, trained by unrolling its own chain.

Paper: EAGLE-3 (arXiv 2503.01840), section 3; published code SafeAILab/EAGLE at cb7e084.

    g_t = fc([a_low ; a_mid ; a_high]_t)          features of position t, for the first step
    a   = [input_layernorm(embedding of token t+1) ; hidden_norm(g_t)]
    r   = g_t + o_proj(attention(a))              residual: the un-normed feature
    u   = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(u))                     for token t+2, over the draft vocabulary
    next step: g = u (before the norm; after it with `norm_output`), fc is skipped

Training unrolls `num_steps` such steps at every supervised slot; models/chain_draft.py has all that
this shares with other drafts of its kind.

Norms that engines know besides: `norm_before_fc` (one over all features), `fc_norm` (one per
layer's feature; the states of different layers differ in scale), `norm_before_residual` (the
residual is hidden_norm(g), as in speculators), `norm_output` (EAGLE-3.1).

Differs from the published code: any number of feature layers and draft layers, the target's own
rotary scaling, the loss mask aligned to the label (option: as published), work only at supervised
slots. Further layers than the first are ordinary ones that see no embedding.

Check: tests/test_golden_eagle3.py (recorded numbers of four implementations), tests/test_eagle3.py.

Axes: batch, seq, hidden, layers (target layers read), draft_vocab, vocab, rows (gathered slots).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.models.chain_draft import ChainDraft, ChainDraftConfig
from draftsmith.models.chain_method import ChainMethod, HasDraftToTarget
from draftsmith.models.draft_layer import DraftLayer
from draftsmith.models.method_options import check_choice, check_flag, check_list
from draftsmith.models.protocols import DraftContext, TrainBatch
from draftsmith.models.target import TargetHead, validate_aux_layer_ids
from draftsmith.models.vocabulary_map import (
    draft_to_target,
    has_reduced_vocabulary,
    set_draft_vocabulary,
)

PUBLISHED_STEPS = 7


@strict
class Eagle3Config(ChainDraftConfig):
    """What EAGLE-3 adds to a chain draft's settings."""

    model_type = "draftsmith_eagle3"

    target_hidden_size: int | None = None
    """Width of one target layer's state and of its embeddings; equal to hidden_size."""
    aux_layer_ids: list[int] | None = None
    """0-based target layers whose outputs are read, ascending (-1: the embeddings)."""
    norm_before_fc: bool = False
    """An RMS norm over all layers' features together, before `fc`."""
    fc_norm: bool = False
    """An RMS norm over each layer's features, before `fc`."""
    norm_before_residual: bool = False
    """The residual of the first layer is the normed feature."""
    norm_output: bool = False
    """Feed back the state after `norm` instead of before it (EAGLE-3.1)."""
    draftsmith_class: str = "draftsmith.models.eagle3.Eagle3Draft"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.aux_layer_ids is None:
            self.aux_layer_ids = []

    @staticmethod
    def default_step_weights() -> list[float]:
        """EAGLE-3: 0.8**step over seven steps."""
        return [0.8**step for step in range(PUBLISHED_STEPS)]


class Eagle3Draft(ChainDraft):
    """The draft model."""

    config_class = Eagle3Config
    config: Eagle3Config
    has_own_head = True

    def __init__(self, config: Eagle3Config) -> None:
        size = config.hidden_size
        if config.target_hidden_size != size:
            raise ValueError(
                f"hidden_size is {size}, but the target's is {config.target_hidden_size}: the "
                "draft shares the target's embeddings, so its width must be the same."
            )
        if not config.aux_layer_ids:
            raise ValueError("aux_layer_ids is empty; expected the target layers to read.")
        layers = [
            DraftLayer(
                config,
                reads_tokens=index == 0,
                norm_before_residual=config.norm_before_residual and index == 0,
            )
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers)
        count = len(config.aux_layer_ids)
        self.fc = nn.Linear(count * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(count * size, config.rms_norm_eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(count)]
            self.fc_norm = nn.ModuleList(norms)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        assert config.draft_vocab_size is not None, "set by the config class"
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.post_init()

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """Target layers whose outputs this draft reads, ascending."""
        return tuple(self.config.aux_layer_ids or ())

    @torch.no_grad()
    def copy_head(self, target_head: TargetHead) -> None:
        """Starts `lm_head` as the target's rows of the draft vocabulary.

        `norm` stays at ones: with the target's norm weights an untrained draft is confidently wrong
        (SmolLM2-135M, 3 steps: first loss 54 instead of 28, and behind after 30 updates).
        """
        ids = draft_to_target(self)
        rows = (
            target_head.weight
            if ids is None
            else target_head.weight[ids.to(target_head.weight.device)]
        )
        self.lm_head.weight.copy_(rows)

    def _features(self, source: TrainBatch | DraftContext) -> Tensor:
        return source.aux_hidden_states

    def _tokens(self, embedded: Tensor) -> Tensor:
        return self.layers[0].read_tokens(embedded)

    def _first_input(self, features: Tensor, tokens: Tensor) -> Tensor:  # noqa: ARG002
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def _next_input(self, fed_back: Tensor, tokens: Tensor) -> Tensor:  # noqa: ARG002
        return fed_back

    def _fed_back(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def _head_input(self, fed_back: Tensor) -> Tensor:
        return fed_back if self.config.norm_output else self.norm(fed_back)

    def _logits(self, head_input: Tensor) -> Tensor:
        return self.lm_head(head_input)

    def _head_of_predictions(self, target_head: nn.Module) -> dict[str, Any]:  # noqa: ARG002
        return {"draft_head_weight": self.lm_head.weight}


@dataclass
class Eagle3Method(ChainMethod):
    """The `method` node of a run: sizes of the draft and how it is trained. null: the target's."""

    aux_layer_ids: list[int] | None = None
    """Target layers to read (0-based outputs, ascending); null: an early, a middle and a late one,
    (1, N // 2 - 1, N - 4) of N layers, as in EAGLE-3."""
    draft_vocab_size: int | None = 32000
    """Tokens that the draft can propose, the most frequent ones (EAGLE-3: 32000); null: all."""
    norm_before_fc: bool = False
    """One RMS norm over the concatenated features before fc (speculators' default)."""
    fc_norm: bool = False
    """One RMS norm per layer's feature before fc, for targets whose layers differ in scale."""
    norm_before_residual: bool = False
    """The residual is the normed feature (speculators' default; SGLang cannot serve it)."""
    norm_output: bool = False
    """Feed back the normed state (EAGLE-3.1) instead of the raw one (EAGLE-3)."""
    num_steps: int = PUBLISHED_STEPS
    """Draft steps unrolled in training (EAGLE-3: 7)."""
    init_head: str = "target"
    """target: the head starts as the target's rows. random: drawn at random (EAGLE-3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
            check_flag(f"method.{name}", getattr(self, name))
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "method.norm_before_fc and method.fc_norm are both true: engines know one norm "
                "over all features or one per layer, not both. Drop one."
            )
        check_choice("method.init_head", self.init_head, ("target", "random"))
        if self.aux_layer_ids is not None:
            check_list("method.aux_layer_ids", self.aux_layer_ids, int)

    def validate(self, num_target_layers: int, vocab_size: int) -> None:
        """Checks the settings against a target, before any weight is loaded.

        Raises:
            ValueError: if a layer does not exist or the draft vocabulary is too large.
        """
        if self.aux_layer_ids is not None:
            validate_aux_layer_ids(self.aux_layer_ids, num_target_layers)
        super().validate(num_target_layers, vocab_size)

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],
    ) -> Eagle3Draft:
        """Makes a draft model for a target, float32, with the target's embeddings attached.

        Args:
            target_head: Config, embeddings, head and final norm of the target.
            vocabulary: The draft vocabulary, or None for the full one.
            aux_layer_ids: The layers read.
        """
        config = Eagle3Config(
            **self.chain_settings(target_head, vocabulary),
            aux_layer_ids=list(aux_layer_ids),
            norm_before_fc=self.norm_before_fc,
            fc_norm=self.fc_norm,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
        )
        draft = Eagle3Draft(config)
        draft.layers[0].self_attn.focus_on_own_slot(config.hidden_size)
        if vocabulary is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, vocabulary.draft_to_target)
        if self.init_head == "target":
            draft.copy_head(target_head)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
