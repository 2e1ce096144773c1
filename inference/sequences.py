"""Requests, and the texts that the engine writes for them: tokens, cache, features, records.

A `RunningSequence` is one request in service. Features of committed positions wait in it until the
draft model is asked again, so that it gets each of them once and in order, also after rounds that
left it out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.records import (
    FinishReason,
    Generation,
    RoundRecord,
    TokenOrigin,
    cut_block,
)
from draftsmith.inference.sampling import target_probs
from draftsmith.inference.verify import verify_chain, verify_tree, verify_tree_greedy
from draftsmith.models.packed import Segment
from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings
from draftsmith.models.sampling import process_logits
from draftsmith.models.sequence_cache import SequenceCache
from draftsmith.models.target import TargetModel, TargetOutput


@dataclass(frozen=True)
class Request:
    """One prompt to answer."""

    input_ids: Sequence[int]
    """The prompt, at least one token."""
    max_new_tokens: int
    """Length limit, exact."""
    sampling: SamplingSettings = SamplingSettings()
    stop_token_ids: Sequence[int] = ()
    """Ids that end the text besides the target's own end-of-text ids."""
    generator: torch.Generator | None = None
    """Source of randomness on the target's device; None takes torch's global one."""


def checked_stop_ids(target: TargetModel, stop_token_ids: Sequence[int]) -> frozenset[int]:
    """The target's end-of-text ids and the caller's.

    Raises:
        ValueError: an id outside the vocabulary, which could never be generated.
    """
    outside = [token for token in stop_token_ids if not 0 <= token < target.vocab_size]
    if outside:
        raise ValueError(
            f"stop_token_ids has {outside}, but the vocabulary ends at {target.vocab_size - 1}. "
            "Use ids of this target's tokenizer."
        )
    return frozenset(target.eos_token_ids) | frozenset(stop_token_ids)


def room_for_text(target: TargetModel, request: Request) -> int:
    """Tokens that may be generated: `max_new_tokens`, or fewer at the target's last position.

    Raises:
        ValueError: an empty prompt, no token asked for, or a prompt that fills all of the target's
            positions.
    """
    length = len(request.input_ids)
    if length == 0:
        raise ValueError("A prompt has no tokens; decoding needs at least one to start from.")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1.")
    room = target.max_positions - length
    if room < 1:
        raise ValueError(
            f"The prompt has {length} tokens, but the target has {target.max_positions} "
            "positions, which leaves no room for an answer. Shorten it."
        )
    return min(room, request.max_new_tokens)


@dataclass
class Block:
    """The tokens that one round (or prefill) added to the text, and how likely they were.

    Probabilities stay on the device until the text is finished: reading them is worth no waiting.
    """

    drafted: int
    """Of these, how many the draft model wrote; they come first, at depths 1, 2, ..."""
    target_probs: Tensor
    """[tokens]."""
    draft_probs: Tensor | None
    """[drafted], where the draft model reports them."""


def token_origins(blocks: Sequence[Block]) -> list[TokenOrigin]:
    """One per token of the text, with a single transfer for each model's probabilities."""
    target_probs = torch.cat([block.target_probs for block in blocks]).tolist()
    known = [block.draft_probs for block in blocks if block.draft_probs is not None]
    draft_probs = iter(torch.cat(known).tolist() if known else [])
    origins: list[TokenOrigin] = []
    for block in blocks:
        for place in range(len(block.target_probs)):
            drafted = place < block.drafted
            prob = next(draft_probs) if drafted and block.draft_probs is not None else None
            origins.append(
                TokenOrigin(place + 1 if drafted else 0, prob, target_probs[len(origins)])
            )
    return origins


@dataclass
class RunningSequence:
    """One text in the making."""

    index: int
    request: Request
    room: int
    """Tokens that the text may have."""
    stop_ids: frozenset[int]
    tokens: Tensor
    """[1, prompt + room] buffer on the target's device; the first `length` are committed."""
    length: int
    cache: SequenceCache
    arrived: float
    """When it was asked for, on the clock of time.perf_counter; so are the next two."""
    started: float
    """When it left the queue."""
    first_token: float = 0.0
    """When its first token was known."""
    draft_state: Any = None
    """The draft model's own; never looked into."""
    fresh: list[TargetOutput] = field(default_factory=list)
    """Features of the positions committed since the draft model last looked, round by round."""
    kept_rows: list[int] = field(default_factory=list)
    """See `DraftContext`: of the round in which the draft model last looked."""
    text: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def sampling(self) -> SamplingSettings:
        return self.request.sampling

    @property
    def depth_left(self) -> int:
        """Deepest drafted token that can reach the text: the target adds one of its own."""
        return self.room - len(self.text) - 1

    def take_context(self) -> DraftContext:
        """What the draft model has not been told yet; it counts as told from now on."""
        fresh, kept_rows = self.fresh, self.kept_rows
        self.fresh, self.kept_rows = [], []
        return DraftContext(
            token_ids=self.tokens[:, : self.length],
            aux_hidden_states=_joined([one.aux_hidden_states for one in fresh]),
            final_hidden_states=_joined([one.final_hidden_states for one in fresh]),
            kept_rows=kept_rows,
        )

    def segment(self, draft: Draft) -> Segment:
        """The root and the drafted tokens, behind the cache."""
        root = self.tokens[0, self.length - 1 : self.length]
        tokens = torch.cat([root, draft.tokens])
        start = self.cache.committed
        if draft.is_chain:
            return Segment(self.cache, tokens, start)
        rows = len(tokens)
        ancestors = torch.zeros(rows, rows, dtype=torch.bool)
        ancestors[:, 0] = True
        for node, parent in enumerate(draft.parent_list, start=1):
            ancestors[node] |= ancestors[parent + 1]
            ancestors[node, node] = True
        positions = start + ancestors.sum(1) - 1
        device = tokens.device
        return Segment(self.cache, tokens, start, positions.to(device), ancestors.to(device))

    def seen(self, draft: Draft) -> Tensor | None:
        """[nodes + 1, length + depth] tokens before each row's prediction, for the repetition
        penalty; None when there is none. Rows are filled up with the root, which is there anyway.
        """
        if not self.sampling.penalised:
            return None
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(draft.parent_list):
            paths.append([*paths[parent + 1], node])
        deepest = max(map(len, paths))
        above = torch.tensor([[*path, *[-1] * (deepest - len(path))] for path in paths])
        with_root = torch.cat([draft.tokens, self.tokens[0, self.length - 1 : self.length]])
        drafted = with_root[above.long().to(with_root.device)]  # -1 is the root.
        return torch.cat([self.tokens[:, : self.length].expand(len(paths), -1), drafted], dim=1)

    def append(self, block: list[int]) -> int:
        """Adds a block's tokens to the text as far as they belong there; returns how many."""
        room = self.room - len(self.text)
        kept, self.finish_reason = cut_block(block, room=room, stop_ids=self.stop_ids)
        end = self.length + len(kept)
        self.tokens[0, self.length : end] = torch.tensor(kept)
        self.length = end
        self.text += kept
        return len(kept)

    def settle(self, draft: Draft, logits: Tensor, features: TargetOutput) -> tuple[int, int]:
        """Verifies, takes back what was rejected, and keeps the features of what was read.

        Args:
            draft: what the target has read below the root.
            logits: [nodes + 1, vocab] of the root and of each node.
            features: [1, nodes + 1, ...] of the same rows.

        Returns:
            (accepted, emitted) numbers of tokens.
        """
        seen = self.seen(draft)
        if self.sampling.greedy:
            choices = process_logits(logits, self.sampling, seen=seen).argmax(-1)
            path, token = verify_tree_greedy(draft, choices)
        else:
            probs = target_probs(logits, self.sampling, seen=seen)
            generator = self.request.generator
            if draft.is_chain:
                count, token = verify_chain(draft.tokens, draft.probs, probs, generator)
                path = list(range(count))
            else:
                path, token = verify_tree(draft, probs, generator)
        rows = [0, *(node + 1 for node in path)]
        self.cache.keep(rows)
        in_order = rows == list(range(len(rows)))
        self.fresh.append(features_of(features, slice(len(rows)) if in_order else rows))
        if draft.state_rows is not None:
            for node in path:
                if draft.state_rows[node] < 0:
                    break
                self.kept_rows.append(draft.state_rows[node])
        accepted = draft.tokens[path].tolist()
        emitted = self.append([*accepted, token])
        drafted = min(emitted, len(path))
        used = rows[:emitted]
        target = self.probabilities(
            logits[used], self.text[-emitted:], None if seen is None else seen[used]
        )
        own = None if draft.token_probs is None else draft.token_probs[path[:drafted]]
        self.blocks.append(Block(drafted, target, own))
        return len(path), emitted

    def probabilities(self, logits: Tensor, block: list[int], seen: Tensor | None) -> Tensor:
        """[tokens] the target's probability of a block's tokens, from its rows [tokens, vocab]."""
        if self.sampling.greedy:
            probs = process_logits(logits, self.sampling, seen=seen).float().softmax(-1)
        else:
            probs = target_probs(logits, self.sampling, seen=seen)
        ids = torch.tensor(block, device=logits.device)
        return probs.gather(-1, ids[:, None]).squeeze(-1).float()

    def finish(self) -> Generation:
        assert self.finish_reason is not None, "the text has ended"
        origins = token_origins(self.blocks)
        return Generation(
            self.text,
            self.finish_reason,
            self.rounds,
            time.perf_counter() - self.started,
            self.prefill_seconds,
            origins,
            waited_seconds=self.started - self.arrived,
            first_token_seconds=self.first_token - self.arrived,
        )


def _joined(parts: list[Tensor]) -> Tensor:
    """[1, positions, ...] of several rounds; one round's is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def features_of(output: TargetOutput, rows: slice | list[int]) -> TargetOutput:
    """Some positions of a packed output, without logits."""
    return TargetOutput(
        aux_hidden_states=output.aux_hidden_states[:, rows],
        final_hidden_states=output.final_hidden_states[:, rows],
        logits=None,
    )
