"""Decodes prompts in one or several ways, turn by turn, so that machine noise hits all alike.

A *lane* is one way to decode: a draft model, a policy, sampling settings. Prompts are taken in
waves: one prompt when answers are decoded one at a time, one category when they are batched. Within
a wave each turn is decoded by every lane and, where the wave is timed, plainly, one right after the
other and in an order that rotates from wave to wave. Plain runs are shared by all lanes that ask
for the same prompt with the same sampling.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track

from draftsmith.eval.prompts import Prompt, encode_turn
from draftsmith.eval.results import PromptResult, TurnResult, describe_answer
from draftsmith.eval.settings import EvaluationSettings
from draftsmith.eval.token_texts import token_texts
from draftsmith.inference.engine import Engine, Request, room_for_text
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import Generation
from draftsmith.models.protocols import Drafter, SamplingSettings
from draftsmith.models.target import TargetModel

WARM_UP_TOKENS = 8
"""Tokens decoded in every way before anything is timed, at least: first calls allocate and compile.
A deeper tree takes as many as it is deep, so that it is grown in full."""


@dataclass(frozen=True)
class Lane:
    """One way to decode."""

    draft: Drafter | None
    """With the target attached; None is plain decoding."""
    settings: EvaluationSettings
    name: str | None = None
    """How reports call the draft model."""


@dataclass(frozen=True)
class PlannedPrompt:
    """A prompt and what is done with it."""

    index: int
    """Its place among all prompts."""
    prompt: Prompt
    timed: bool
    """Decoded plainly too."""


def plan_prompts(prompts: Sequence[Prompt], settings: EvaluationSettings) -> list[PlannedPrompt]:
    """Every prompt in order; the first ones of each category are timed."""
    limit = settings.timed_prompts_per_category
    seen: Counter[str] = Counter()
    planned = []
    for index, prompt in enumerate(prompts):
        timed = limit is None or seen[prompt.category] < limit
        seen[prompt.category] += 1
        planned.append(PlannedPrompt(index, prompt, timed))
    return planned


def make_waves(planned: Sequence[PlannedPrompt], batch_size: int) -> list[list[PlannedPrompt]]:
    """Prompts that are decoded together: each alone, or in batches the timed (and the untimed)
    prompts of one category, so that a category has a speed of its own."""
    if batch_size == 1:
        return [[one] for one in planned]
    waves: dict[tuple[str, bool], list[PlannedPrompt]] = {}
    for one in planned:
        waves.setdefault((one.prompt.category, one.timed), []).append(one)
    return list(waves.values())


@dataclass(frozen=True)
class _Job:
    """One answer to be decoded; equal jobs have equal answers when decoded plainly."""

    key: str
    """Prompt and turn: what the seed of the answer depends on."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings


@dataclass(frozen=True)
class _Answer:
    generation: Generation
    seconds: float


class LaneRunner:
    """Decodes prompts in all lanes; the lanes share everything but policy and sampling."""

    def __init__(self, target: TargetModel, lanes: Sequence[Lane]) -> None:
        """Prepares one engine per lane and one for plain decoding.

        Raises:
            ValueError: the target cannot be read in packed forwards.
        """
        self.target = target
        self.lanes = list(lanes)
        self.settings = lanes[0].settings
        for lane in lanes:
            shared = ("max_new_tokens", "seed", "batch_size", "template_kwargs")
            for name in shared:
                assert getattr(lane.settings, name) == getattr(self.settings, name), name
        size = self.settings.batch_size
        self._engines = [
            Engine(
                target,
                lane.draft,
                lane.settings.policy,
                batch_size=size,
                lengths=None if lane.draft is None else lane.settings.lengths(),
            )
            for lane in lanes
        ]
        self._plain_engine = Engine(target, None, ChainPolicy(), batch_size=size)

    def run(
        self, planned: Sequence[PlannedPrompt], *, show_progress: bool = False
    ) -> list[list[tuple[int, PromptResult]]]:
        """Per lane, (index, result) of every prompt, in the order in which they were decoded.

        Raises:
            ValueError: a prompt that cannot be answered, named.
        """
        waves = make_waves(planned, self.settings.batch_size)
        found: list[list[tuple[int, PromptResult]]] = [[] for _ in self.lanes]
        shown = track(
            waves,
            description="evaluating",
            console=Console(stderr=True),
            disable=not show_progress,
        )
        for number, wave in enumerate(shown):
            for results, new in zip(found, self._wave(number, wave), strict=True):
                results += [(one.index, result) for one, result in zip(wave, new, strict=True)]
        return found

    def warm_up(self, prompts: Sequence[Prompt]) -> str:
        """Decodes a little in every way; returns what was done, for the report."""
        settings = self.settings
        deepest = max(lane.settings.policy.max_depth for lane in self.lanes)
        tokens = min(max(WARM_UP_TOKENS, deepest + 2), settings.max_new_tokens)
        batch = list(prompts[: settings.batch_size])
        for lane, engine in [
            *zip(self.lanes, self._engines, strict=True),
            (self.lanes[0], self._plain_engine),
        ]:
            jobs = [self._job(lane, PromptResult(prompt), "warm-up") for prompt in batch]
            self._decode(engine, jobs, tokens)
        ways = "both ways" if len(self.lanes) == 1 else f"in all {len(self.lanes) + 1} ways"
        which = "first prompt" if len(batch) == 1 else f"first {len(batch)} prompts"
        return f"{tokens} tokens of the {which} {ways}, not counted"

    def _wave(self, number: int, wave: Sequence[PlannedPrompt]) -> list[list[PromptResult]]:
        """All turns of a wave's prompts in all lanes."""
        results = [[PromptResult(one.prompt) for one in wave] for _ in self.lanes]
        for turn in range(max(len(one.prompt.turns) for one in wave)):
            rows = [row for row, one in enumerate(wave) if turn < len(one.prompt.turns)]
            jobs = [
                [self._job(lane, own[row], f"{wave[row].prompt.id}/{turn}") for row in rows]
                for lane, own in zip(self.lanes, results, strict=True)
            ]
            answers, plain = self._decode_turn(number, jobs, timed=wave[0].timed)
            for lane, own, lane_jobs, found in zip(self.lanes, results, jobs, answers, strict=True):
                for row, job, answer in zip(rows, lane_jobs, found, strict=True):
                    beside = None if lane.draft is None else plain.get(job)
                    own[row].turns.append(self._describe(job, answer, beside))
        return results

    def _decode_turn(
        self, number: int, jobs: Sequence[Sequence[_Job]], *, timed: bool
    ) -> tuple[list[Sequence[_Answer]], dict[_Job, _Answer]]:
        """One turn of a wave: the answers of each lane, and the plain ones.

        A lane without a draft model takes the plain answers: they are not decoded twice.
        """
        plain_jobs = [
            job
            for lane, lane_jobs in zip(self.lanes, jobs, strict=True)
            if timed or lane.draft is None
            for job in lane_jobs
        ]
        distinct = list(dict.fromkeys(plain_jobs))
        plain: dict[_Job, _Answer] = {}
        decoded: dict[int, Sequence[_Answer]] = {}
        for place in self._order(number):
            if place is None:
                answers = self._decode(self._plain_engine, distinct)
                plain = dict(zip(distinct, answers, strict=True))
            elif self.lanes[place].draft is not None:
                decoded[place] = self._decode(self._engines[place], jobs[place])
        found = [
            decoded[place] if place in decoded else [plain[job] for job in lane_jobs]
            for place, lane_jobs in enumerate(jobs)
        ]
        return found, plain

    def _order(self, number: int) -> Iterator[int | None]:
        """The lanes, None for the plain runs, starting elsewhere in each wave."""
        places: list[int | None] = [None, *range(len(self.lanes))]
        start = number % len(places)
        return iter(places[start:] + places[:start])

    def _job(self, lane: Lane, result: PromptResult, key: str) -> _Job:
        """The next turn of a prompt.

        Raises:
            ValueError: the turn cannot be encoded or leaves no room for an answer.
        """
        answers = [turn.text for turn in result.turns]
        try:
            ids = encode_turn(
                self.target.tokenizer,
                result.prompt,
                answers,
                template_kwargs=self.settings.template_kwargs,
            )
            job = _Job(key, tuple(ids), lane.settings.sampling)
            room_for_text(self.target, self._request(job, self.settings.max_new_tokens))
        except ValueError as error:
            raise ValueError(
                f"Prompt {result.prompt.id}, turn {len(answers) + 1}: {error}"
            ) from error
        return job

    def _request(self, job: _Job, max_new_tokens: int) -> Request:
        # The seed of an answer depends on its prompt, not on how many prompts came before.
        seed = zlib.crc32(f"{self.settings.seed}/{job.key}".encode())
        generator = torch.Generator(device=self.target.device).manual_seed(seed)
        return Request(job.prompt_ids, max_new_tokens, sampling=job.sampling, generator=generator)

    def _decode(
        self, engine: Engine, jobs: Sequence[_Job], max_new_tokens: int | None = None
    ) -> list[_Answer]:
        """Answers of all jobs, with the seconds that count for each."""
        if not jobs:
            return []
        limit = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        requests = [self._request(job, limit) for job in jobs]
        if self.settings.batch_size == 1:
            # One after the other: each run is clocked from a quiet device to its last token.
            answers = []
            for request in requests:
                seconds, (generation,) = self._clocked(engine, [request])
                answers.append(_Answer(generation, seconds))
            return answers
        seconds, generations = self._clocked(engine, requests)
        per_token = seconds / sum(len(generation.token_ids) for generation in generations)
        return [
            _Answer(generation, per_token * len(generation.token_ids)) for generation in generations
        ]

    def _clocked(
        self, engine: Engine, requests: Sequence[Request]
    ) -> tuple[float, list[Generation]]:
        """Wall-clock seconds of a run, the device idle before and after."""
        self._synchronise()
        started = time.perf_counter()
        generations = engine.run(requests)
        self._synchronise()
        return time.perf_counter() - started, generations

    def _synchronise(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _describe(self, job: _Job, answer: _Answer, plain: _Answer | None) -> TurnResult:
        turn = describe_answer(
            list(job.prompt_ids),
            answer.generation,
            self._text(answer.generation),
            token_texts=token_texts(self.target.tokenizer, answer.generation.token_ids),
            seconds=answer.seconds,
        )
        if plain is not None:
            turn.plain, turn.plain_seconds = plain.generation, plain.seconds
            turn.plain_text = self._text(plain.generation)
        return turn

    def _text(self, generation: Generation) -> str:
        """Without special tokens."""
        ids = generation.token_ids
        return str(self.target.tokenizer.decode(ids, skip_special_tokens=True))
