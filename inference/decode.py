"""Lossless speculative decoding of one sequence: draft, verify in one target forward, roll back.

The loop of Leviathan et al. (arXiv 2211.17192, algorithm 1) around any `Drafter`; without a draft
model the same loop is plain decoding. A round reads the root (the last token, not yet in the
target's cache) and n drafted tokens in one forward, keeps what `draftsmith.inference.verify` lets
stay, adds one token of the target's own, and takes the rest back from the cache.

Ends exactly where plain decoding ends: at the first stop token inside a block ("stop"; the token
itself is kept), else at `max_new_tokens` ("length"). A drafted end-of-text token ends nothing until
the target has confirmed it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.rollback import require_exact_rollback
from draftsmith.inference.sampling import choose_token, target_probs
from draftsmith.inference.verify import verify_chain, verify_chain_greedy
from draftsmith.models.kv_cache import drop_last
from draftsmith.models.protocols import Draft, DraftContext, Drafter, SamplingSettings
from draftsmith.models.target import TargetModel, TargetOutput

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class RoundRecord:
    """One round: what was drafted, what stayed, what reached the text, and the time it took."""

    proposed: int
    """Drafted tokens that the target verified."""
    accepted: int
    """Drafted tokens that passed, counted before the text was cut at a stop token or the limit."""
    emitted: int
    """Tokens added to the text, the target's own included, after that cut. At least 1."""
    draft_seconds: float
    """Inside the draft model."""
    verify_seconds: float
    """The target's forward."""
    other_seconds: float
    """Acceptance, rollback, bookkeeping."""


@dataclass
class Generation:
    """The new tokens of one prompt and how they came about."""

    token_ids: list[int]
    """New tokens: the first comes from prefill, the others from rounds."""
    finish_reason: FinishReason
    rounds: list[RoundRecord]
    seconds: float
    """Wall-clock time of everything, prefill included."""
    prefill_seconds: float
    """Of that, reading the prompt and choosing the first token."""


class Stopwatch:
    """Seconds between marks, without making the device wait.

    On CUDA the marks are events on the stream, read at the end of a round, when the verdict has
    come to the host anyway; elsewhere they are the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Notes this moment."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def read(self) -> list[float]:
        """Returns the seconds between successive marks, and forgets all but the last mark."""
        if self._on_cuda:
            self._events[-1].synchronize()
            spans = [a.elapsed_time(b) / 1000.0 for a, b in pairwise(self._events)]
        else:
            spans = [b - a for a, b in pairwise(self._times)]
        del self._events[:-1], self._times[:-1]
        return spans


def cut_block(
    block: Sequence[int], *, room: int, stop_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """What of a verified block belongs to the text, and whether the text ends with it.

    The stop scan comes before the limit: a stop token that still fits ends the text as "stop", also
    in the very last place; one that does not fit was never part of the text.

    Args:
        block: accepted tokens and the target's own.
        room: tokens that the text may still take, at least 1.
        stop_ids: tokens that end a text (and stay in it).
    """
    for index, token in enumerate(block[:room]):
        if token in stop_ids:
            return list(block[: index + 1]), "stop"
    if len(block) >= room:
        return list(block[:room]), "length"
    return list(block), None


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


def room_for_text(target: TargetModel, input_ids: Tensor, max_new_tokens: int) -> int:
    """Tokens that may be generated: `max_new_tokens`, or fewer at the target's last position.

    Raises:
        ValueError: not one sequence, an empty prompt, no token asked for, or a prompt that fills
            all of the target's positions.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; decoding takes one prompt of at least "
            "one token, [1, length]. Decode prompts one after the other."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    room = target.max_positions - input_ids.shape[1]
    if room < 1:
        raise ValueError(
            f"The prompt has {input_ids.shape[1]} tokens, but the target has "
            f"{target.max_positions} positions, which leaves no room for an answer. Shorten it."
        )
    return min(room, max_new_tokens)


@dataclass
class _Decoding:
    """One text in the making: its tokens, the target's cache and the draft model's state."""

    target: TargetModel
    draft: Drafter | None
    sampling: SamplingSettings
    generator: torch.Generator | None
    tokens: Tensor
    """[1, prompt + room] buffer on the target's device; the first `length` are committed."""
    length: int
    cache: Cache
    draft_state: Any = None
    """The draft model's own; never looked into."""
    fresh: TargetOutput | None = None
    """Features of the positions committed since the draft model last looked."""

    def forward(self, input_ids: Tensor, logits: Literal["last", "all"]) -> TargetOutput:
        """The target reads `input_ids` [1, new] behind its cache."""
        aux_layer_ids = self.draft.aux_layer_ids if self.draft is not None else ()
        return self.target.forward(
            input_ids, cache=self.cache, aux_layer_ids=aux_layer_ids, logits=logits
        )

    def prefill(self) -> int:
        """Reads the prompt and chooses the first token."""
        output = self.forward(self.tokens[:, : self.length], "last")
        require_exact_rollback(self.cache)
        if self.draft is not None:
            self.draft_state, self.fresh = self.draft.start(), output
        assert output.logits is not None, "logits were asked for"
        return choose_token(output.logits.flatten(0, -2)[-1], self.sampling, self.generator)

    def append(self, tokens: list[int]) -> None:
        """Commits tokens to the text; the last one becomes the root of the next round."""
        end = self.length + len(tokens)
        self.tokens[0, self.length : end] = torch.tensor(tokens)
        self.length = end

    def propose(self, num_draft_tokens: int) -> Draft:
        """Asks the draft model; no draft tokens without one (then a round is a plain step)."""
        if self.draft is None or num_draft_tokens < 1:
            return Draft(tokens=self.tokens.new_empty(0), probs=None)
        assert self.fresh is not None, "prefill comes first"
        context = DraftContext(
            token_ids=self.tokens[:, : self.length],
            aux_hidden_states=self.fresh.aux_hidden_states,
            final_hidden_states=self.fresh.final_hidden_states,
        )
        return self.draft.propose(
            context,
            self.draft_state,
            num_draft_tokens=num_draft_tokens,
            sampling=self.sampling,
            generator=self.generator,
        )

    def read_block(self, proposal: Draft) -> TargetOutput:
        """One target forward over the root and the drafted tokens."""
        root = self.tokens[:, self.length - 1 : self.length]
        return self.forward(torch.cat([root, proposal.tokens[None]], dim=1), "all")

    def settle(self, proposal: Draft, output: TargetOutput) -> tuple[int, list[int]]:
        """Verifies, takes back what was rejected, and keeps the features of what was read.

        Returns:
            (num_accepted, block): the block is the accepted tokens and the target's own.
        """
        assert output.logits is not None, "logits were asked for"
        logits = output.logits[0]  # [n + 1, vocab]
        if self.sampling.greedy:
            accepted, token = verify_chain_greedy(proposal.tokens, logits)
        else:
            probs = target_probs(logits, self.sampling)
            accepted, token = verify_chain(proposal.tokens, proposal.probs, probs, self.generator)
        drop_last(self.cache, len(proposal.tokens) - accepted)
        if self.draft is not None:
            self.fresh = TargetOutput(
                aux_hidden_states=output.aux_hidden_states[:, : accepted + 1],
                final_hidden_states=output.final_hidden_states[:, : accepted + 1],
                logits=None,
            )
        return accepted, [*proposal.tokens[:accepted].tolist(), token]


@torch.inference_mode()
def generate(
    target: TargetModel,
    draft: Drafter | None,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    num_draft_tokens: int = 0,
    sampling: SamplingSettings | None = None,
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Decodes one prompt; the text has the target's own law (greedy: is the target's own text).

    Args:
        target: the frozen target.
        draft: a draft model, or None for plain decoding.
        input_ids: [1, prompt] int64 on any device.
        max_new_tokens: length limit, in tokens, exact.
        num_draft_tokens: drafted tokens per round; fewer near the limit, and where the draft model
            itself returns fewer (its last position), down to plain steps.
        sampling: temperature, top-k and top-p; None is greedy.
        stop_token_ids: ids that end the text besides the target's own end-of-text ids.
        generator: source of randomness on the target's device; None takes torch's global one.

    Raises:
        ValueError: see `room_for_text`, `checked_stop_ids` and `require_exact_rollback`.
    """
    room = room_for_text(target, input_ids, max_new_tokens)
    stop_ids = checked_stop_ids(target, stop_token_ids)
    watch = Stopwatch(target.device)
    watch.mark()
    started = time.perf_counter()
    run = _start(target, draft, input_ids, room, sampling or SamplingSettings(), generator)
    text, finish_reason = cut_block([run.prefill()], room=room, stop_ids=stop_ids)
    run.append(text)
    watch.mark()
    (prefill_seconds,) = watch.read()
    rounds: list[RoundRecord] = []
    while finish_reason is None:
        # The target adds a token of its own, so that one draft fewer than the room fills it.
        proposal = run.propose(min(num_draft_tokens, room - len(text) - 1))
        watch.mark()
        output = run.read_block(proposal)
        watch.mark()
        accepted, block = run.settle(proposal, output)
        kept, finish_reason = cut_block(block, room=room - len(text), stop_ids=stop_ids)
        text += kept
        run.append(kept)
        watch.mark()
        spans = watch.read()
        rounds.append(RoundRecord(len(proposal.tokens), accepted, len(kept), *spans))
    return Generation(text, finish_reason, rounds, time.perf_counter() - started, prefill_seconds)


def _start(
    target: TargetModel,
    draft: Drafter | None,
    input_ids: Tensor,
    room: int,
    sampling: SamplingSettings,
    generator: torch.Generator | None,
) -> _Decoding:
    """An empty cache, and a buffer for the whole text that begins with the prompt."""
    prompt_length = input_ids.shape[1]
    size = (1, prompt_length + room)
    tokens = torch.zeros(size, dtype=torch.long, device=target.device)
    tokens[:, :prompt_length] = input_ids
    return _Decoding(
        target, draft, sampling, generator, tokens, prompt_length, cache=target.new_cache()
    )
