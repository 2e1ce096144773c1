"""DSpark: DFlash's backbone, a sequential head over its block, and a head for confidence.

Paper: DSpark, sections 3.1 and 5.1; published code DeepSpec (afdfa7c) and SpecForge (a6b6b02).

    slots    [anchor, mask, ...], anchor first: slot j predicts token a+1+j (`sample_from_anchor`)
    e_j      = W1[token a+j]                       the token before; drafting: the one drafted there
    f_j      = e_j                                                    markov
               sigmoid(G [h_j ; e_j]) * e_j                           gated
               tanh(o_j), [g ; c ; o] = J [s_j ; e_j ; h_j],          rnn
                   s_{j+1} = sigmoid(g) s_j + (1 - sigmoid(g)) tanh(c), s_0 = 0
    logits_j = target's head on h_j  +  W2 f_j
    confidence_j = sigmoid(w [h_j ; e_j] + b)      that the target accepts token j if all before it

    loss     sum over slots of exp(-j / decay) * (objective + confidence_weight * BCE), divided by
             the weights' sum; objective = 0.1 CE + 0.9 sum |q - p| by default (`ce_l1`),
             BCE(confidence, 1 - TV(p, q)) with the target as a constant

The first unsupervised label ends a block. The tokens before are the text's while training; while
drafting the block's logits are computed in one pass, and tokens are chosen from left to right.

`confidence_detached` keeps the confidence loss from the backbone and W1; published code lets it
through, which others have tried both ways, so the default is as published.

Differs from the published code: see models/dflash.py; the correction is a term of small rank inside
the chunked objective, never a [blocks, block, vocabulary] tensor; it is added after the target's
soft-capping.

Check: tests/test_golden_dflash.py (recorded numbers of DeepSpec and SpecForge),
tests/test_dspark.py.

Axes: blocks, steps, hidden, vocab, rank, sequences (drafting together), rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from draftsmith.models.block_anchors import BlockPlan, by_step
from draftsmith.models.block_draft import BlockDraft, BlockDraftConfig
from draftsmith.models.block_method import BlockMethod
from draftsmith.models.block_proposal import HeadStep, Proposal
from draftsmith.models.method_options import (
    check_choice,
    check_flag,
    check_integer,
    check_list,
    check_number,
)
from draftsmith.models.protocols import LogitCorrection, ObjectiveOutput, TrainOutput

SEQUENTIAL_HEADS = ("markov", "gated", "rnn", "none")


@strict
class DSparkConfig(BlockDraftConfig):
    """What DSpark adds to a block draft's settings."""

    model_type = "draftsmith_dspark"

    block_size: int = 7
    sample_from_anchor: bool = True
    decay: float = 4.0
    sequential_head: str = "markov"
    """markov, gated, rnn or none."""
    markov_rank: int = 256
    """Rank of its correction."""
    confidence_head: bool = True
    confidence_with_markov: bool = True
    """The confidence head reads the token before, too."""
    confidence_weight: float = 1.0
    confidence_detached: bool = False
    """See `DSparkMethod`."""
    confidence_temperatures: list[float] | None = None
    """What the confidence logit of each drafted token is divided by (draftsmith-calibrate writes
    them; the head's weights stay as trained). None: uncalibrated."""
    draftsmith_class: str = "draftsmith.models.dspark.DSparkDraft"

    def check_block(self) -> None:
        """Raises ValueError where the settings contradict each other."""
        super().check_block()
        check_choice("sequential_head", self.sequential_head, SEQUENTIAL_HEADS)
        if self.confidence_head and self.confidence_with_markov and self.sequential_head == "none":
            raise ValueError(
                "confidence_with_markov is true, but there is no sequential head whose embeddings "
                "it could read. Set confidence_with_markov=false or choose a sequential_head."
            )
        self._check_temperatures()

    def _check_temperatures(self) -> None:
        found = self.confidence_temperatures
        if found is None:
            return
        check_list("confidence_temperatures", found, float)
        if not self.confidence_head:
            raise ValueError(
                "confidence_temperatures is set, but the draft has no confidence head (confidence_"
                "head is false). Remove them from config.json."
            )
        if len(found) != self.num_steps or min(found) <= 0.0:
            raise ValueError(
                f"confidence_temperatures is {found}; expected {self.num_steps} numbers above 0, "
                "one per token that a block proposes. Run draftsmith-calibrate again, or set null."
            )


class MarkovHead(nn.Module):
    """The sequential head: a correction of the logits by the token before them."""

    def __init__(self, kind: str, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, hidden: Tensor, embedded: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One step of any number of blocks.

        Args:
            hidden: [rows, hidden] of the slots.
            embedded: [rows, rank] of the tokens before.
            memory: [rows, rank] of the step before; None: the first step.

        Returns:
            [rows, rank] what W2 reads, and the memory for the next step.
        """
        if self.kind == "markov":
            return embedded, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
            return gate * embedded, None
        if memory is None:
            memory = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([memory, embedded, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * memory + (1.0 - gate) * candidate.tanh()

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[blocks, steps, hidden] and [blocks, steps, rank] -> [blocks, steps, rank] for W2."""
        if self.kind != "rnn":
            return self.step(hidden, embedded, None)[0]
        memory, found = None, []
        for step in range(hidden.shape[1]):
            read, memory = self.step(hidden[:, step], embedded[:, step], memory)
            found.append(read)
        return torch.stack(found, dim=1)


class ConfidenceHead(nn.Module):
    """The logit of a token's acceptance, in float32."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., hidden] and, where it reads them, [..., rank] -> [...]."""
        read = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], -1)
        with torch.autocast(read.device.type, enabled=False):
            weight, bias = self.proj.weight.float(), self.proj.bias.float()
            return F.linear(read.float(), weight, bias).squeeze(-1)


class DSparkDraft(BlockDraft):
    """The draft model."""

    config_class = DSparkConfig
    config: DSparkConfig
    cumulative_supervision = True

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.markov_rank
        if config.sequential_head != "none":
            self.markov_head = MarkovHead(config.sequential_head, config.vocab_size, size, rank)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(
                size + (rank if config.confidence_with_markov else 0)
            )
        self.post_init()

    @property
    def has_sequential_head(self) -> bool:
        return self.config.sequential_head != "none"

    def _embedded_before(self, before: Tensor) -> Tensor | None:
        """[...] token ids -> [..., rank] W1 of them; None without a sequential head."""
        return self.markov_head.markov_w1(before) if self.has_sequential_head else None

    def _confidence_logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., hidden] and [..., rank] -> [...]."""
        return self.confidence_head(
            hidden, embedded if self.config.confidence_with_markov else None
        )

    def _correction_of_predictions(
        self, hidden: Tensor, before: Tensor, plan: BlockPlan
    ) -> dict[str, Any]:
        embedded = self._embedded_before(before)
        if embedded is None:
            return {}
        read = self.markov_head(hidden, embedded.to(hidden.dtype))[plan.supervised]
        weight = self.markov_head.markov_w2.weight
        return {"correction": LogitCorrection(read[None], weight)}

    def _output(
        self,
        hidden: Tensor,
        before: Tensor,
        plan: BlockPlan,
        output: ObjectiveOutput,
        sums: dict[str, Tensor],
    ) -> TrainOutput:
        """Adds the confidence head's loss, in float32."""
        config = self.config
        if not config.confidence_head:
            return TrainOutput(output.loss_sum, sums)
        hidden = hidden[plan.supervised]
        embedded = self._embedded_before(before[plan.supervised])
        if config.confidence_detached:
            hidden = hidden.detach()
            embedded = None if embedded is None else embedded.detach()
        logits = self._confidence_logits(hidden, embedded)  # [rows]
        accepted = output.acceptance[0].to(logits.dtype).clamp(0.0, 1.0)
        with torch.autocast(logits.device.type, enabled=False):
            losses = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        weights = self.step_weights.expand(plan.supervised.shape)[plan.supervised]
        weighted = config.confidence_weight * weights * losses
        found = logits.detach().sigmoid()
        sums["loss"] = sums["loss"] + by_step(plan, weighted.detach()).sum(0)
        sums["confidence"] = by_step(plan, found).sum(0)
        sums["confidence_error"] = by_step(plan, (found - accepted).abs()).sum(0)
        return TrainOutput(output.loss_sum + weighted.sum(), sums)

    def _proposal(self, hidden: Tensor, logits: Tensor) -> Proposal:
        if not self.has_sequential_head and not self.config.confidence_head:
            return Proposal(logits)
        return Proposal(logits, _Heads(self, hidden), self.config.confidence_temperatures)


class _Heads:
    """The heads over one round's blocks, as `propose_tokens` and `propose_trees` ask for them."""

    def __init__(self, draft: DSparkDraft, hidden: Tensor) -> None:
        self.draft = draft
        self.hidden = hidden  # [sequences, steps, hidden]
        self.remembers = draft.config.sequential_head == "rnn"

    def step(
        self, step: int, before: Tensor, *, sequences: Tensor | None, memory: Tensor | None
    ) -> HeadStep:
        """See `SequentialHead`."""
        draft, hidden = self.draft, self.hidden[:, step]
        if sequences is not None:
            hidden = hidden[sequences]
        embedded = draft._embedded_before(before)
        correction = confidence = None
        if embedded is not None:
            read, memory = draft.markov_head.step(hidden, embedded, memory)
            correction = draft.markov_head.markov_w2(read)
        if draft.config.confidence_head:
            confidence = draft._confidence_logits(hidden, embedded)
        return HeadStep(correction, confidence, memory)


@dataclass
class DSparkMethod(BlockMethod):
    """The `method` node of a run: sizes of the draft and how it is trained."""

    block_size: int = 7
    decay: float = 4.0
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "ce_l1"})
    sequential_head: str = "markov"
    """markov, gated, rnn or none: how a slot learns which token was drafted before it."""
    markov_rank: int = 256
    """Rank of its correction of the logits (DSpark: 256)."""
    confidence_head: bool = True
    """A head that says how likely each drafted token is to be accepted."""
    confidence_with_markov: bool = True
    """It reads the sequential head's embedding of the token before, too."""
    confidence_weight: float = 1.0
    """Weight of its loss (DSpark: 1)."""
    confidence_detached: bool = False
    """Keep its loss from the rest of the draft (published: false)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method.sequential_head", self.sequential_head, SEQUENTIAL_HEADS)
        check_integer("method.markov_rank", self.markov_rank)
        for name in ("confidence_head", "confidence_with_markov", "confidence_detached"):
            check_flag(f"method.{name}", getattr(self, name))
        check_number("method.confidence_weight", self.confidence_weight, above=0.0, most=1e6)
        if self.confidence_head and self.confidence_with_markov and self.sequential_head == "none":
            raise ValueError(
                "method.confidence_with_markov is true, but method.sequential_head is none: there "
                "is no embedding to read. Set method.confidence_with_markov=false."
            )

    def make(self, settings: dict[str, Any]) -> DSparkDraft:
        """A fresh draft."""
        return DSparkDraft(
            DSparkConfig(
                **settings,
                sample_from_anchor=True,
                sequential_head=self.sequential_head,
                markov_rank=self.markov_rank,
                confidence_head=self.confidence_head,
                confidence_with_markov=self.confidence_with_markov,
                confidence_weight=self.confidence_weight,
                confidence_detached=self.confidence_detached,
            )
        )
