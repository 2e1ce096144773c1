"""Lossless speculative decoding of many requests: draft, verify in one packed forward, roll back.

The loop of Leviathan et al. (arXiv 2211.17192, algorithm 1) around any `Drafter`; without a draft
model the same loop is plain decoding. In a round every active sequence drafts a tree (a chain is
one); the target reads all roots (the last tokens, not yet in its caches) and all drafted tokens in
one packed forward, whose cost follows the number of tokens, not the longest sequence;
`draftsmith.inference.verify` decides what stays and adds one token of the target's own; accepted
entries are moved together in the caches, the others forgotten. Finished sequences leave, waiting
requests enter.

A text ends exactly where plain decoding ends: at the first stop token inside a block ("stop"; the
token itself is kept), else at `max_new_tokens` ("length"). A drafted end-of-text token ends nothing
until the target has confirmed it.

Each request has its own sampling settings and its own source of randomness: its text does not
depend on who shares the batch (in float32, up to near ties that rounding decides).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.policies import DraftRequest, Policy
from draftsmith.inference.records import (
    FinishReason,
    Generation,
    RoundRecord,
    Stopwatch,
    TokenOrigin,
    cut_block,
)
from draftsmith.inference.sampling import choose_token, target_probs
from draftsmith.inference.verify import verify_chain, verify_tree, verify_tree_greedy
from draftsmith.models.packed import PackedModel, Segment
from draftsmith.models.protocols import (
    AutoregressiveDraft,
    Draft,
    DraftContext,
    Drafter,
    SamplingSettings,
)
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
class _Block:
    """The tokens that one round (or prefill) added to the text, and how likely they were.

    Probabilities stay on the device until the text is finished: reading them is worth no waiting.
    """

    drafted: int
    """Of these, how many the draft model wrote; they come first, at depths 1, 2, ..."""
    target_probs: Tensor
    """[tokens]."""
    draft_probs: Tensor | None
    """[drafted], where the draft model reports them."""


def _origins(blocks: Sequence[_Block]) -> list[TokenOrigin]:
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
class _Sequence:
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
    started: float
    draft_state: Any = None
    """The draft model's own; never looked into."""
    fresh: TargetOutput | None = None
    """Features of the positions committed since the draft model last looked."""
    kept_rows: list[int] = field(default_factory=list)
    """See `DraftContext`."""
    text: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def sampling(self) -> SamplingSettings:
        return self.request.sampling

    @property
    def depth_left(self) -> int:
        """Deepest drafted token that can reach the text: the target adds one of its own."""
        return self.room - len(self.text) - 1

    def context(self) -> DraftContext:
        assert self.fresh is not None, "prefill comes first"
        return DraftContext(
            token_ids=self.tokens[:, : self.length],
            aux_hidden_states=self.fresh.aux_hidden_states,
            final_hidden_states=self.fresh.final_hidden_states,
            kept_rows=self.kept_rows,
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

    def finish(self) -> Generation:
        assert self.finish_reason is not None, "the text has ended"
        origins = _origins(self.blocks)
        return Generation(
            self.text,
            self.finish_reason,
            self.rounds,
            time.perf_counter() - self.started,
            self.prefill_seconds,
            origins,
        )


class Engine:
    """Decodes requests with one target and, if given, one draft model."""

    def __init__(
        self, target: TargetModel, draft: Drafter | None, policy: Policy, *, batch_size: int = 1
    ) -> None:
        """Prepares the target for packed forwards.

        Args:
            target: the frozen target.
            draft: a draft model with the target attached, or None for plain decoding.
            policy: how an autoregressive draft model drafts (others take its depth).
            batch_size: sequences decoded at a time.

        Raises:
            ValueError: the target cannot be read in packed forwards, or batch_size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
        self.target = target
        self.draft = draft
        self.policy = policy
        self.batch_size = batch_size
        self.aux_layer_ids = () if draft is None else draft.aux_layer_ids
        self._packed = PackedModel.of(target)

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        *,
        on_finished: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Answers all requests; the texts have the target's own law (greedy: are its own texts).

        Args:
            requests: in any number; longer prompts than the target has positions are refused
                before anything is decoded.
            on_finished: called with (index of the request, its text) as soon as one is done.

        Raises:
            ValueError: see `room_for_text` and `checked_stop_ids`.
        """
        rooms = [room_for_text(self.target, request) for request in requests]
        stops = [checked_stop_ids(self.target, request.stop_token_ids) for request in requests]
        waiting = deque(range(len(requests)))
        active: list[_Sequence] = []
        done: dict[int, Generation] = {}
        watch = Stopwatch(self.target.device)
        watch.mark()
        while waiting or active:
            entering = [
                self._start(index, requests[index], rooms[index], stops[index])
                for index in (
                    waiting.popleft()
                    for _ in range(min(self.batch_size - len(active), len(waiting)))
                )
            ]
            if entering:
                self._prefill(entering, watch)
                active += entering
            else:
                self._round(active, watch)
            for sequence in active:
                if sequence.finish_reason is not None:
                    done[sequence.index] = sequence.finish()
                    if on_finished is not None:
                        on_finished(sequence.index, done[sequence.index])
            active = [sequence for sequence in active if sequence.finish_reason is None]
        return [done[index] for index in range(len(requests))]

    def _start(
        self, index: int, request: Request, room: int, stop_ids: frozenset[int]
    ) -> _Sequence:
        """Buffers of one sequence, in their final sizes."""
        started = time.perf_counter()
        length = len(request.input_ids)
        tokens = torch.zeros(1, length + room, dtype=torch.long)
        tokens[0, :length] = torch.as_tensor(request.input_ids)
        state = None if self.draft is None else self.draft.start(length + room)
        # The last round may draft a whole tree when one token is missing.
        cache = self._packed.new_cache(length + room + self.policy.max_nodes + 1)
        return _Sequence(
            index, request, room, stop_ids, tokens.to(self.target.device), length, cache, started,
            draft_state=state,
        )  # fmt: skip

    def _prefill(self, entering: list[_Sequence], watch: Stopwatch) -> None:
        """Reads the prompts in one packed forward and chooses each text's first token."""
        segments = [Segment(one.cache, one.tokens[0, : one.length], 0) for one in entering]
        output = self._packed.forward(segments, aux_layer_ids=self.aux_layer_ids, logits="last")
        assert output.logits is not None, "logits were asked for"
        first = 0
        for row, one in enumerate(entering):
            one.cache.keep(range(one.length))
            one.fresh = _features(output, slice(first, first + one.length))
            first += one.length
            logits = output.logits[0, row]
            seen = one.tokens[:, : one.length] if one.sampling.penalised else None
            token = choose_token(logits, one.sampling, one.request.generator, seen=seen)
            one.append([token])
            one.blocks.append(_Block(0, _probabilities(one, logits[None], [token], seen), None))
        watch.mark()
        (seconds,) = watch.read()
        for one in entering:
            one.prefill_seconds = seconds / len(entering)

    def _round(self, active: list[_Sequence], watch: Stopwatch) -> None:
        """Draft, one target forward, verdict."""
        drafts = self._propose(active)
        watch.mark()
        segments = [one.segment(draft) for one, draft in zip(active, drafts, strict=True)]
        output = self._packed.forward(segments, aux_layer_ids=self.aux_layer_ids, logits="all")
        watch.mark()
        assert output.logits is not None, "logits were asked for"
        verdicts = []
        first = 0
        for one, draft in zip(active, drafts, strict=True):
            rows = slice(first, first + len(draft.tokens) + 1)
            first = rows.stop
            logits = output.logits[0, rows]  # [nodes + 1, vocab]
            verdicts.append(self._settle(one, draft, logits, _features(output, rows)))
        watch.mark()
        spans = [seconds / len(active) for seconds in watch.read()]
        for one, draft, (accepted, emitted) in zip(active, drafts, verdicts, strict=True):
            depth = max(draft.depths, default=0)
            one.rounds.append(RoundRecord(len(draft.tokens), depth, accepted, emitted, *spans))

    def _propose(self, active: list[_Sequence]) -> list[Draft]:
        """One draft per sequence; empty ones without a draft model, or where nothing fits."""
        drafts = [Draft.nothing(one.tokens) for one in active]
        if self.draft is None:
            return drafts
        limits = [min(one.depth_left, self.policy.max_depth) for one in active]
        if isinstance(self.draft, AutoregressiveDraft):
            limits = [
                min(limit, self.draft.max_depth(one.length))
                for limit, one in zip(limits, active, strict=True)
            ]
            drafting = [index for index, limit in enumerate(limits) if limit > 0]
            requests = [
                DraftRequest(
                    one.context(), one.draft_state, limits[index], one.sampling,
                    one.request.generator, self.target.vocab_size,
                )
                for index in drafting
                for one in (active[index],)
            ]  # fmt: skip
            found = self.policy.draft(self.draft, requests) if requests else []
        else:
            drafting = [index for index, limit in enumerate(limits) if limit > 0]
            found = self.draft.propose(
                [active[index].context() for index in drafting],
                [active[index].draft_state for index in drafting],
                num_draft_tokens=[limits[index] for index in drafting],
                sampling=[active[index].sampling for index in drafting],
                generators=[active[index].request.generator for index in drafting],
            )
        for index, draft in zip(drafting, found, strict=True):
            drafts[index] = draft
        return drafts

    def _settle(
        self, one: _Sequence, draft: Draft, logits: Tensor, features: TargetOutput
    ) -> tuple[int, int]:
        """Verifies, takes back what was rejected, and keeps the features of what was read.

        Returns:
            (accepted, emitted) numbers of tokens.
        """
        seen = one.seen(draft)
        if one.sampling.greedy:
            choices = process_logits(logits, one.sampling, seen=seen).argmax(-1)
            path, token = verify_tree_greedy(draft, choices)
        else:
            probs = target_probs(logits, one.sampling, seen=seen)
            generator = one.request.generator
            if draft.is_chain:
                count, token = verify_chain(draft.tokens, draft.probs, probs, generator)
                path = list(range(count))
            else:
                path, token = verify_tree(draft, probs, generator)
        rows = [0, *(node + 1 for node in path)]
        one.cache.keep(rows)
        in_order = rows == list(range(len(rows)))
        one.fresh = _features(features, slice(len(rows)) if in_order else rows)
        one.kept_rows = []
        if draft.state_rows is not None:
            for node in path:
                if draft.state_rows[node] < 0:
                    break
                one.kept_rows.append(draft.state_rows[node])
        accepted = draft.tokens[path].tolist()
        emitted = one.append([*accepted, token])
        drafted = min(emitted, len(path))
        used = rows[:emitted]
        one.blocks.append(
            _Block(
                drafted,
                _probabilities(
                    one, logits[used], one.text[-emitted:], None if seen is None else seen[used]
                ),
                None if draft.token_probs is None else draft.token_probs[path[:drafted]],
            )
        )
        return len(path), emitted


def _probabilities(one: _Sequence, logits: Tensor, block: list[int], seen: Tensor | None) -> Tensor:
    """[tokens] the target's probability of each token of a block, from its rows [tokens, vocab]."""
    if one.sampling.greedy:
        probs = process_logits(logits, one.sampling, seen=seen).float().softmax(-1)
    else:
        probs = target_probs(logits, one.sampling, seen=seen)
    ids = torch.tensor(block, device=logits.device)
    return probs.gather(-1, ids[:, None]).squeeze(-1).float()


def _features(output: TargetOutput, rows: slice | list[int]) -> TargetOutput:
    """Some positions of a packed output, without logits."""
    return TargetOutput(
        aux_hidden_states=output.aux_hidden_states[:, rows],
        final_hidden_states=output.final_hidden_states[:, rows],
        logits=None,
    )
