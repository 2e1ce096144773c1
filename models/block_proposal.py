"""From the slots' logits to drafted chains: all at once, or from left to right.

Tokens are chosen greedily (one-hot proposals) or drawn from the softmax of the logits after the
target's own processors, and the distribution that each was drawn from is reported as it is: a
slot's distribution may depend on the tokens drawn before it, which verification conditions on too.

A method whose logits depend on the token before them gives a `SequentialHead`; a repetition penalty
makes any method choose from left to right. Trees: models/block_tree.py.

Axes: sequences, steps, vocab, rows (tokens before a step; one per sequence in a chain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings
from draftsmith.models.sampling import draw_token, process_logits, warp_logits


@dataclass
class HeadStep:
    """What a head says about the tokens of one step."""

    correction: Tensor | None
    """[rows, vocab] to be added to the logits."""
    confidence_logits: Tensor | None
    """[rows] logits of the chance that the step's token is accepted if all before it are, before
    any calibration."""
    memory: Tensor | None
    """[rows, ...] for the next step; None where there is none."""


class SequentialHead(Protocol):
    """Corrects logits by the tokens before them, step after step."""

    remembers: bool
    """Whether a step depends on more than the token before it."""

    def step(
        self, step: int, before: Tensor, *, sequences: Tensor | None, memory: Tensor | None
    ) -> HeadStep:
        """Reads the tokens before step `step`.

        Args:
            step: From 0.
            before: [rows] token ids; those of sequences that have ended are arbitrary.
            sequences: [rows] the sequence of each; None: one row per sequence, in order.
            memory: [rows, ...] as the step before left it on each row's path; None: the first step.
        """


@dataclass
class Proposal:
    """What a block says about several sequences."""

    logits: Tensor
    """[sequences, steps, vocab] before any correction."""
    head: SequentialHead | None = None
    temperatures: Sequence[float] | None = None
    """[steps] what the confidence logits are divided by (draftsmith-calibrate); None: by 1."""


def propose_tokens(
    proposal: Proposal,
    contexts: Sequence[DraftContext],
    *,
    counts: Sequence[int],
    sampling: Sequence[SamplingSettings],
    generators: Sequence[torch.Generator | None],
) -> list[Draft]:
    """One chain per sequence.

    Args:
        proposal: Of these sequences.
        contexts: Committed tokens, the anchor last.
        counts: Tokens to draft per sequence, at most the steps of the logits; 0: none.
        sampling: How each sequence samples.
        generators: Its source of randomness.
    """
    chains = [
        _Chain(*arguments, proposal.temperatures)
        for arguments in zip(contexts, counts, sampling, generators, strict=True)
    ]
    if proposal.head is None:
        for chain, logits in zip(chains, proposal.logits, strict=True):
            if chain.count:
                chain.add_all(logits[: chain.count])
        return [chain.finish() for chain in chains]
    before = torch.cat([context.token_ids[0, -1:] for context in contexts])
    memory: Tensor | None = None
    for step in range(max(counts)):
        said = proposal.head.step(step, before, sequences=None, memory=memory)
        memory = said.memory
        logits = proposal.logits[:, step]
        if said.correction is not None:
            logits = logits.float() + said.correction
        for row, chain in enumerate(chains):
            if step < chain.count:
                chain.add(logits[row : row + 1])
                if said.confidence_logits is not None:
                    chain.confidence_logits.append(said.confidence_logits[row : row + 1])
        before = torch.cat([chain.newest() for chain in chains])
    return [chain.finish() for chain in chains]


class _Chain:
    """One sequence's tokens in the making."""

    def __init__(
        self,
        context: DraftContext,
        count: int,
        sampling: SamplingSettings,
        generator: torch.Generator | None,
        temperatures: Sequence[float] | None,
    ) -> None:
        self.committed = context.token_ids  # [1, length]
        self.count = count
        self.sampling = sampling
        self.generator = generator
        self.temperatures = temperatures
        self.tokens: list[Tensor] = []
        self.token_probs: list[Tensor] = []
        self.distributions: list[Tensor] = []
        self.confidence_logits: list[Tensor] = []

    def newest(self) -> Tensor:
        """[1] the last token: drafted, or committed."""
        return self.tokens[-1][-1:] if self.tokens else self.committed[0, -1:]

    def add_all(self, logits: Tensor) -> None:
        """Chooses all tokens from their logits [steps, vocab]."""
        if not self.sampling.penalised:
            self.add(logits)
            return
        for row in range(len(logits)):
            self.add(logits[row : row + 1])

    def add(self, logits: Tensor) -> None:
        """Chooses the next tokens, each from a row of [rows, vocab]; one row under a penalty."""
        seen = None
        if self.sampling.penalised:
            seen = torch.cat([self.committed[0], *self.tokens])[None]
        if self.sampling.greedy:
            own = process_logits(logits, self.sampling, seen=seen)
            own = own.to(torch.promote_types(own.dtype, torch.float32))
            tokens = own.argmax(-1)  # The first of equal maxima, as the target's own.
            top = own.gather(-1, tokens[:, None]).squeeze(-1)
            self.token_probs.append((top - own.logsumexp(-1)).exp())
        else:
            probs = warp_logits(logits.float(), self.sampling, seen=seen).softmax(-1)
            tokens = draw_token(probs, self.generator)
            self.token_probs.append(probs.gather(-1, tokens[:, None]).squeeze(-1))
            self.distributions.append(probs)
        self.tokens.append(tokens)

    def finish(self) -> Draft:
        if not self.tokens:
            return Draft.nothing(self.committed)
        said = torch.cat(self.confidence_logits) if self.confidence_logits else None
        return Draft(
            tokens=torch.cat(self.tokens),
            probs=torch.cat(self.distributions) if self.distributions else None,
            confidences=None if said is None else self.calibrated(said).sigmoid(),
            confidence_logits=said,
            token_probs=torch.cat(self.token_probs),
        )

    def calibrated(self, logits: Tensor) -> Tensor:
        """[steps] over the temperature of each step."""
        if self.temperatures is None:
            return logits
        return logits / logits.new_tensor(self.temperatures[: len(logits)])
