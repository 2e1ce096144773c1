"""Lossless speculative decoding of many requests: draft, verify in one packed forward, roll back.

The loop of Leviathan et al. (arXiv 2211.17192, algorithm 1) around any `Drafter`; without a draft
model the same loop is plain decoding. In a round every active sequence drafts a tree (a chain is
one); the target reads all roots (the last tokens, not yet in its caches) and all drafted tokens in
one packed forward, whose cost follows the number of tokens, not the longest sequence;
`draftsmith.inference.verify` decides what stays and adds one token of the target's own; accepted
entries are moved together in the caches, the others forgotten. Finished sequences leave, waiting
requests enter.

With a `LengthPolicy` the chains of all sequences are cut to their verification lengths before the
target reads them, and a round for which the policy wants no drafts leaves the draft model out: it
gets what was committed meanwhile when it is asked again.

A text ends exactly where plain decoding ends: at the first stop token inside a block ("stop"; the
token itself is kept), else at `max_new_tokens` ("length"). A drafted end-of-text token ends nothing
until the target has confirmed it.

Each request has its own sampling settings and its own source of randomness: its text does not
depend on who shares the batch (in float32, up to near ties that rounding decides). With a length
policy that looks at the load, a sampled text does depend on it, in its draws but not in its law.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftsmith.inference.draft_lengths import check_length_policy, cut_to_lengths
from draftsmith.inference.length_policies import LengthPolicy
from draftsmith.inference.policies import ChainPolicy, DraftRequest, Policy
from draftsmith.inference.records import EngineStep, Generation, RoundRecord, Stopwatch
from draftsmith.inference.sampling import choose_token
from draftsmith.inference.sequences import (
    Block,
    Request,
    RunningSequence,
    checked_stop_ids,
    features_of,
    room_for_text,
)
from draftsmith.models.packed import PackedModel, Segment
from draftsmith.models.protocols import AutoregressiveDraft, Draft, Drafter
from draftsmith.models.target import TargetModel

__all__ = ["Engine", "Request", "Serving", "checked_stop_ids", "room_for_text"]


class Engine:
    """Decodes requests with one target and, if given, one draft model."""

    def __init__(
        self,
        target: TargetModel,
        draft: Drafter | None,
        policy: Policy,
        *,
        batch_size: int = 1,
        lengths: LengthPolicy | None = None,
    ) -> None:
        """Prepares the target for packed forwards.

        Args:
            target: the frozen target.
            draft: a draft model with the target attached, or None for plain decoding.
            policy: how an autoregressive draft model drafts (others take its depth).
            batch_size: sequences decoded at a time.
            lengths: how many tokens of each chain are verified; None: all. It remembers earlier
                rounds: give every engine one of its own.

        Raises:
            ValueError: the target cannot be read in packed forwards, batch_size below 1,
                `lengths` with trees or without a draft model, or trees with recurrent layers.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
        if lengths is not None:
            check_length_policy(lengths, policy, has_draft=draft is not None)
            if lengths.longest == 0:
                draft = lengths = None  # Plain decoding: nothing is ever drafted.
        _refuse_trees(target, draft, policy)
        self.target = target
        self.draft = draft
        self.policy = policy
        self.batch_size = batch_size
        self.lengths = lengths
        self.aux_layer_ids = () if draft is None else draft.aux_layer_ids
        self._packed = PackedModel.of(target)

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
            ValueError: see `room_for_text` and `checked_stop_ids`; see `cut_to_lengths`.
        """
        serving = self.serve()
        for request in requests:
            serving.submit(request)
        done: dict[int, Generation] = {}
        while serving.busy:
            finished = serving.step().finished
            done |= finished
            if on_finished is not None:
                for index, generation in finished.items():
                    on_finished(index, generation)
        return [done[index] for index in range(len(requests))]

    def serve(self) -> Serving:
        """Nothing in service yet: for a driver that submits requests as they come."""
        return Serving(self)

    def _start(self, index: int, request: Request, arrived: float) -> RunningSequence:
        """Buffers of one sequence, in their final sizes.

        Raises:
            ValueError: see `room_for_text` and `checked_stop_ids`.
        """
        room = room_for_text(self.target, request)
        length = len(request.input_ids)
        tokens = torch.zeros(1, length + room, dtype=torch.long)
        tokens[0, :length] = torch.as_tensor(request.input_ids)
        state = None if self.draft is None else self.draft.start(length + room)
        # The last round may draft a whole tree when one token is missing.
        cache = self._packed.new_cache(length + room + self.policy.max_nodes + 1)
        return RunningSequence(
            index=index,
            request=request,
            room=room,
            stop_ids=checked_stop_ids(self.target, request.stop_token_ids),
            tokens=tokens.to(self.target.device),
            length=length,
            cache=cache,
            arrived=arrived,
            started=time.perf_counter(),
            draft_state=state,
        )

    def _prefill(self, entering: list[RunningSequence], watch: Stopwatch) -> EngineStep:
        """Reads the prompts in one packed forward and chooses each text's first token."""
        segments = [Segment(one.cache, one.tokens[0, : one.length], 0) for one in entering]
        output = self._packed.forward(segments, aux_layer_ids=self.aux_layer_ids, logits="last")
        assert output.logits is not None, "logits were asked for"
        first = 0
        for row, one in enumerate(entering):
            one.cache.keep(range(one.length))
            one.fresh = [features_of(output, slice(first, first + one.length))]
            first += one.length
            logits = output.logits[0, row]
            seen = one.tokens[:, : one.length] if one.sampling.penalised else None
            token = choose_token(logits, one.sampling, one.request.generator, seen=seen)
            one.append([token])
            one.blocks.append(Block(0, one.probabilities(logits[None], [token], seen), None))
        watch.mark()
        (seconds,) = watch.read()
        now = time.perf_counter()
        for one in entering:
            one.prefill_seconds = seconds / len(entering)
            one.first_token = now
        count = len(entering)
        return EngineStep(count, True, 0, 0, count, 0.0, seconds, 0.0)

    def _round(self, active: list[RunningSequence], watch: Stopwatch) -> EngineStep:
        """Draft, one target forward, verdict."""
        drafts = self._propose(active)
        drafted = [len(draft.tokens) for draft in drafts]
        confidences: list[tuple[float, ...]] = [()] * len(active)
        if self.lengths is not None:
            drafts, confidences = cut_to_lengths(drafts, self.lengths)
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
            verdicts.append(one.settle(draft, logits, features_of(output, rows)))
        watch.mark()
        draft_s, verify_s, other_s = watch.read()
        for row, (one, draft) in enumerate(zip(active, drafts, strict=True)):
            accepted, emitted = verdicts[row]
            one.rounds.append(
                RoundRecord(
                    proposed=len(draft.tokens),
                    depth=max(draft.depths, default=0),
                    accepted=accepted,
                    emitted=emitted,
                    draft_seconds=draft_s / len(active),
                    verify_seconds=verify_s / len(active),
                    other_seconds=other_s / len(active),
                    unverified=drafted[row] - len(draft.tokens),
                    confidences=confidences[row],
                )
            )
        return EngineStep(
            num_requests=len(active),
            reads_prompts=False,
            drafted=sum(drafted),
            verified=sum(len(draft.tokens) for draft in drafts),
            emitted=sum(emitted for _, emitted in verdicts),
            draft_seconds=draft_s,
            verify_seconds=verify_s,
            other_seconds=other_s,
        )

    def _propose(self, active: list[RunningSequence]) -> list[Draft]:
        """One draft per sequence; empty ones without a draft model, or where nothing fits."""
        drafts = [Draft.nothing(one.tokens) for one in active]
        if self.draft is None:
            for one in active:
                one.fresh.clear()  # Nobody reads them.
            return drafts
        if self.lengths is not None and not self.lengths.drafts:
            return drafts
        deepest = self.policy.max_depth
        if self.lengths is not None and self.lengths.longest is not None:
            deepest = min(deepest, self.lengths.longest)
        limits = [min(one.depth_left, deepest) for one in active]
        if isinstance(self.draft, AutoregressiveDraft):
            limits = [
                min(limit, self.draft.max_depth(one.length))
                for limit, one in zip(limits, active, strict=True)
            ]
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        for index in set(range(len(active))) - set(drafting):
            active[index].fresh.clear()  # It can draft no more, now or later.
        found = self._drafts_of(
            [active[index] for index in drafting], [limits[index] for index in drafting]
        )
        for index, draft in zip(drafting, found, strict=True):
            drafts[index] = draft
        return drafts

    def _drafts_of(self, drafting: list[RunningSequence], limits: list[int]) -> list[Draft]:
        """Asks the draft model, up to a depth per sequence."""
        contexts = [one.take_context() for one in drafting]
        if isinstance(self.draft, AutoregressiveDraft):
            requests = [
                DraftRequest(
                    context, one.draft_state, limit, one.sampling,
                    one.request.generator, self.target.vocab_size,
                )
                for context, one, limit in zip(contexts, drafting, limits, strict=True)
            ]  # fmt: skip
            return self.policy.draft(self.draft, requests) if requests else []
        assert self.draft is not None, "asked only where there is one"
        tree = getattr(self.policy, "block_tree", None)
        options: dict[str, Any] = {} if tree is None else {"tree": tree}
        return self.draft.propose(
            contexts,
            [one.draft_state for one in drafting],
            num_draft_tokens=limits,
            sampling=[one.sampling for one in drafting],
            generators=[one.request.generator for one in drafting],
            **options,
        )


def _refuse_trees(target: TargetModel, draft: Drafter | None, policy: Policy) -> None:
    """Raises ValueError where trees would be drafted by, or for, a model with recurrent layers."""
    if draft is None or isinstance(policy, ChainPolicy):
        return
    for what, model in (("target", target), ("draft model", draft)):
        if getattr(model, "chain_only", False):
            raise ValueError(
                f"The {what} has recurrent layers, whose state has no branches, but the policy is "
                f"a {policy.name}. Draft chains (ChainPolicy, drafting=chain)."
            )


class Serving:
    """Requests in service: submitted at any time, decoded step by step.

        serving = engine.serve()
        serving.submit(request)
        while serving.busy:
            for number, generation in serving.step().finished.items(): ...

    Requests enter in the order in which they were submitted, as soon as one of `batch_size` places
    is free.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = Stopwatch(engine.target.device)
        self._waiting: deque[tuple[int, Request, float]] = deque()
        self._active: list[RunningSequence] = []
        self._submitted = 0
        self._idle = True

    @property
    def busy(self) -> bool:
        """There is something to do."""
        return bool(self._waiting or self._active)

    @property
    def num_waiting(self) -> int:
        """Requests without a place."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Requests that are being answered."""
        return len(self._active)

    def submit(self, request: Request, *, arrived: float | None = None) -> int:
        """Queues a request.

        Args:
            request: checked at once.
            arrived: when it came, on the clock of time.perf_counter; None: now.

        Returns:
            Its number, from 0.

        Raises:
            ValueError: see `room_for_text` and `checked_stop_ids`.
        """
        room_for_text(self._engine.target, request)
        checked_stop_ids(self._engine.target, request.stop_token_ids)
        number = self._submitted
        self._submitted += 1
        self._waiting.append((number, request, time.perf_counter() if arrived is None else arrived))
        return number

    @torch.inference_mode()
    def step(self) -> EngineStep:
        """Lets waiting requests enter and reads their prompts, if places are free; else a round.

        Raises:
            ValueError: nothing is in service; see `cut_to_lengths`.
        """
        if not self.busy:
            raise ValueError("No request is in service: submit one first.")
        engine = self._engine
        if self._idle:
            self._watch.restart()  # Else what lies between two steps belongs to the second.
        places = min(engine.batch_size - len(self._active), len(self._waiting))
        entering = [engine._start(*self._waiting.popleft()) for _ in range(places)]
        if entering:
            done = engine._prefill(entering, self._watch)
            self._active += entering
        else:
            done = engine._round(self._active, self._watch)
        for one in self._active:
            if one.finish_reason is not None:
                done.finished[one.index] = one.finish()
        self._active = [one for one in self._active if one.finish_reason is None]
        self._idle = not self.busy
        return done
