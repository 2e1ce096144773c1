"""Parallel heads on one hidden state (Medusa): the ablation of MTP's causal chain.

Paper: Medusa (arXiv 2401.10774), section 2.1.1; Gloeckle et al. (arXiv 2404.19737) pretrain so.

    p_k = f_t + SiLU(W_k f_t + b_k)        f_t: the target's final hidden state of position t
    logits_k = the target's own head on p_k, frozen                         for token t+2+k

Head k never learns which tokens were drafted before its own, so all nodes of a tree at one depth
have the same children: what a chain of tokens is worth shows in the difference to method=mtp on the
same cache. Tokens, places, weights and statistics are those of every chain draft.

Differs from Medusa: the heads share the target's frozen head instead of copies of it (a copy per
head would be 28 M weights for SmolLM2), and the token after the last state is always the target's
own, so the first head predicts the token after that. W_k and b_k start at 0, as in Medusa.

Check: tests/test_mtp_parallel.py.

Axes: batch, seq, hidden, rows, active (slots that are unrolled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from draftsmith.models.chain_draft import ChainDraft, ChainDraftConfig
from draftsmith.models.chain_method import HasDraftToTarget
from draftsmith.models.draft_sizes import draft_layer_sizes
from draftsmith.models.method_options import (
    check_integer,
    check_list,
    check_number,
    check_objective,
)
from draftsmith.models.protocols import DraftContext, Frontier, TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.models.ttt_slots import SlotPlan
from draftsmith.models.vocabulary_map import has_reduced_vocabulary, set_draft_vocabulary


@strict
class ParallelHeadsConfig(ChainDraftConfig):
    """A chain draft's settings; the number of step weights is that of the heads."""

    model_type = "draftsmith_parallel_heads"

    draftsmith_class: str = "draftsmith.models.parallel_heads.ParallelHeadsDraft"

    @staticmethod
    def default_step_weights() -> list[float]:
        """Medusa-1: 0.8**k, here for three heads."""
        return [0.8**step for step in range(3)]


@dataclass
class HeadsState:
    """One sequence: how far it has been read, and the round's predictions."""

    states: Tensor
    """[heads, hidden] what the target's head reads; nothing before the first round."""
    committed: int = 0
    """Positions whose states were announced."""
    node_depths: list[int] = field(default_factory=lambda: [0])
    """Distance of every node from the root, the root's first."""


class ParallelHeadsDraft(ChainDraft):
    """The draft model."""

    config_class = ParallelHeadsConfig
    config: ParallelHeadsConfig
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: ParallelHeadsConfig) -> None:
        super().__init__(config, [])
        size = config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(size, size) for _ in self.step_weights)
        self.post_init()

    def _states(self, head: int, features: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        features = features.to(self.dtype)
        return features + F.silu(self.heads[head](features))

    def _head_input(self, fed_back: Tensor) -> Tensor:
        return fed_back

    def _unroll(self, batch: TrainBatch, plan: SlotPlan, target_head: nn.Module) -> list[Tensor]:  # noqa: ARG002
        features = batch.final_hidden_states.flatten(0, 1).index_select(0, plan.active)
        return [self._states(head, features) for head in range(len(self.heads))]

    def start(self, max_length: int) -> HeadsState:  # type: ignore[override]  # noqa: ARG002
        """Nothing is kept between rounds but the number of positions."""
        return HeadsState(torch.empty(0, self.config.hidden_size))

    def max_depth(self, length: int) -> int:  # noqa: ARG002
        """One token per head, at any length."""
        return len(self.heads)

    @torch.no_grad()
    def read(  # type: ignore[override]
        self, contexts: Sequence[DraftContext], states: Sequence[HeadsState]
    ) -> Tensor:
        """Predicts everything from the newest state; see `AutoregressiveDraft`.

        Raises:
            ValueError: if a context does not continue what its state has seen.
        """
        for context, state in zip(contexts, states, strict=True):
            length, new = context.token_ids.shape[1], context.final_hidden_states.shape[1]
            if not new or length - 1 - new != state.committed:
                raise ValueError(
                    f"The draft has seen {state.committed} positions, but the context brings those "
                    f"from {length - 1 - new} to {length - 2}. Pass every committed position once, "
                    "in order, with the state that start() made for this sequence."
                )
            newest = context.final_hidden_states[0, -1:]
            made = [self._states(head, newest) for head in range(len(self.heads))]
            state.committed, state.states, state.node_depths = length - 1, torch.cat(made), [0]
        return self._logits(torch.cat([state.states[:1] for state in states]))

    @torch.no_grad()
    def extend(  # type: ignore[override]
        self, states: Sequence[HeadsState], frontiers: Sequence[Frontier]
    ) -> Tensor:
        """The next head's prediction, whatever the tokens are."""
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            last = len(state.node_depths) - 1
            parents = [last] if frontier.is_chain else frontier.parents.tolist()
            depths = [state.node_depths[parent] + 1 for parent in parents]
            state.node_depths += depths
            rows.append(state.states[depths])
        return self._logits(torch.cat(rows))


@dataclass
class ParallelHeadsMethod:
    """The `method` node of a run."""

    draft_vocab_size: int | None = None
    """Tokens that the draft can propose, the most frequent ones; null: all."""
    num_steps: int = 3
    """Heads."""
    step_decay: float = 0.8
    """Head k of the loss weighs step_decay**k (Medusa-1: 0.8)."""
    step_weights: list[float] | None = None
    """Own weight per head instead of step_decay; num_steps entries."""
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "ce"})
    """Objective by name with its options (train/objectives.py); Medusa: ce."""
    aux_layer_ids: list[int] = field(default_factory=list, init=False)
    """The final state is all that is read."""

    def __post_init__(self) -> None:
        check_integer("method.num_steps", self.num_steps)
        check_integer("method.draft_vocab_size", self.draft_vocab_size, optional=True)
        check_number("method.step_decay", self.step_decay, above=0.0, most=1.0)
        check_objective(self.objective)
        if self.step_weights is None:
            return
        check_list("method.step_weights", self.step_weights, float)
        if len(self.step_weights) != self.num_steps or min(self.step_weights) < 0:
            raise ValueError(
                f"method.step_weights is {self.step_weights}, expected {self.num_steps} numbers "
                ">= 0, one per head (method.num_steps)."
            )

    def validate(self, num_target_layers: int, vocab_size: int) -> None:  # noqa: ARG002
        """Raises ValueError if the draft vocabulary is larger than the target's."""
        if self.draft_vocab_size is not None and self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"method.draft_vocab_size is {self.draft_vocab_size}, but the target has "
                f"{vocab_size} tokens. Lower it, or set it to null for the full vocabulary."
            )

    def build(
        self,
        target_head: TargetHead,
        vocabulary: HasDraftToTarget | None,
        aux_layer_ids: Sequence[int],  # noqa: ARG002
    ) -> ParallelHeadsDraft:
        """Makes heads for a target, float32, attached to it, each starting as the identity."""
        ids = None if vocabulary is None else vocabulary.draft_to_target
        config = ParallelHeadsConfig(
            **draft_layer_sizes(target_head.config, {}),
            vocab_size=target_head.vocab_size,
            draft_vocab_size=target_head.vocab_size if ids is None else len(ids),
            step_weights=self.step_weights or [self.step_decay**k for k in range(self.num_steps)],
        )
        draft = ParallelHeadsDraft(config)
        for head in draft.heads:
            nn.init.zeros_(head.weight)  # type: ignore[arg-type]
        if ids is not None and has_reduced_vocabulary(draft):
            set_draft_vocabulary(draft, ids)
        draft.attach_target(embed_tokens=target_head.embed_tokens, head=target_head)
        return draft
