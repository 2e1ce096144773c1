"""draftsmith-evaluate: what a draft model is worth on a target, measured.

    draftsmith-evaluate target=smollm2 draft=runs/train output=runs/evaluation

Decodes prompts with the draft model, times plain decoding of some of them in between (so that a
disturbance of the machine hits both), compares greedy answers with the target's own, and writes
results.json and the table. Every number is defined in draftsmith.eval.metrics.
"""

from __future__ import annotations

import importlib.metadata
import platform
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from draftsmith.conf.schema import EvaluateConfig
from draftsmith.eval.prompt_lookup import replay_prompt_lookup
from draftsmith.eval.prompts import Prompt, encode_turn, load_prompts
from draftsmith.eval.report import write_report
from draftsmith.eval.results import (
    EvaluationResult,
    EvaluationSettings,
    PromptResult,
    TurnResult,
    describe_answer,
)
from draftsmith.inference.decode import Generation, RoundRecord, generate
from draftsmith.inference.plain import GreedyAnswers, plain_generate
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import Drafter, SamplingSettings
from draftsmith.models.target import Fingerprint, TargetModel

WARM_UP_TOKENS = 8
"""Tokens decoded both ways before anything is timed: first calls allocate and compile."""


def check_target(recorded: Mapping[str, str] | None, target: TargetModel) -> None:
    """Insists that a draft model belongs to this target.

    Args:
        recorded: the fingerprint in the draft model's config; None for one that was never trained.
        target: the loaded target.

    Raises:
        ValueError: weights, tokenizer or chat template differ.
    """
    if recorded is None:
        return
    trained_on = Fingerprint(**recorded)
    differing = trained_on.differences(target.fingerprint)
    if differing:
        raise ValueError(
            f"The draft model was trained for another target: {', '.join(differing)} differ. It "
            f"records {trained_on.describe()}; {target.name_or_path} has "
            f"{target.fingerprint.describe()}. Evaluate it on its own target, or train one for "
            "this target."
        )


def _environment(target: TargetModel) -> dict[str, Any]:
    """What the numbers depend on besides the models."""
    on_cuda = target.device.type == "cuda"
    packages = ("draftsmith", "torch", "transformers")
    return {
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if on_cuda else "cpu",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


class _Decoder:
    """Decodes turns with and without the draft model, under one set of settings."""

    def __init__(
        self, target: TargetModel, draft: Drafter | None, settings: EvaluationSettings
    ) -> None:
        self.target = target
        self.draft = draft
        self.settings = settings

    def _generator(self, key: str) -> torch.Generator:
        # The seed of an answer depends on its prompt, not on how many prompts came before.
        seed = zlib.crc32(f"{self.settings.seed}/{key}".encode())
        return torch.Generator(device=self.target.device).manual_seed(seed)

    def speculative(self, prompt_ids: list[int], key: str, max_new_tokens: int) -> Generation:
        return generate(
            self.target,
            self.draft,
            torch.tensor([prompt_ids]),
            max_new_tokens=max_new_tokens,
            num_draft_tokens=self.settings.num_draft_tokens,
            sampling=self.settings.sampling,
            generator=self._generator(key),
        )

    def plain(self, prompt_ids: list[int], key: str, max_new_tokens: int) -> Generation:
        return plain_generate(
            self.target,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=self.settings.sampling,
            generator=self._generator(key),
        )

    def turn(
        self, prompt_ids: list[int], key: str, *, timed: bool, plain_first: bool
    ) -> TurnResult:
        """One answer; a timed one is decoded both ways, in the order asked for."""
        limit = self.settings.max_new_tokens
        plain = self.plain(prompt_ids, key, limit) if timed and plain_first else None
        generation = self.speculative(prompt_ids, key, limit)
        if timed and not plain_first:
            plain = self.plain(prompt_ids, key, limit)
        text = self.target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return describe_answer(prompt_ids, generation, str(text), plain)

    def prompt(self, prompt: Prompt, *, timed: bool, plain_first: bool) -> PromptResult:
        """All turns of one prompt; later ones contain the answers to earlier ones."""
        result = PromptResult(prompt)
        for number in range(len(prompt.turns)):
            answers = [turn.text for turn in result.turns]
            try:
                prompt_ids = self.encode(prompt, answers)
                key = f"{prompt.id}/{number}"
                turn = self.turn(prompt_ids, key, timed=timed, plain_first=plain_first)
            except ValueError as error:
                raise ValueError(f"Prompt {prompt.id}, turn {number + 1}: {error}") from error
            result.turns.append(turn)
        return result

    def all_prompts(self, prompts: Sequence[Prompt], *, show_progress: bool) -> list[PromptResult]:
        """Every prompt in order; the first ones of each category are timed both ways."""
        results = []
        seen: Counter[str] = Counter()
        shown = track(
            prompts,
            description="evaluating",
            console=Console(stderr=True),
            disable=not show_progress,
        )
        for index, prompt in enumerate(shown):
            timed = seen[prompt.category] < self.settings.baseline_prompts_per_category
            timed = timed and self.draft is not None
            seen[prompt.category] += 1
            results.append(self.prompt(prompt, timed=timed, plain_first=index % 2 == 0))
        return results

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        return encode_turn(
            self.target.tokenizer,
            prompt.turns[: len(answers) + 1],
            answers,
            template_kwargs=self.settings.template_kwargs,
        )

    def warm_up(self, prompt: Prompt) -> str:
        """Decodes a little both ways; returns what was done, for the report."""
        tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        prompt_ids = self.encode(prompt, [])
        self.speculative(prompt_ids, "warm-up", tokens)
        self.plain(prompt_ids, "warm-up", tokens)
        return f"{tokens} tokens of the first prompt both ways, not counted"


def evaluate(
    target: TargetModel,
    draft: Drafter | None,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    *,
    draft_name: str | None = None,
    answers: GreedyAnswers | None = None,
    show_progress: bool = False,
) -> EvaluationResult:
    """Measures a draft model on a target; with no draft model, plain decoding.

    Args:
        target: the frozen target.
        draft: a draft model with the target's embeddings attached, or None.
        prompts: at least one.
        settings: how to decode and what to compare.
        draft_name: how reports call the draft model.
        answers: the target's own greedy answers, to share between evaluations of several draft
            models; None makes them here.
        show_progress: draw a progress bar on stderr.

    Raises:
        ValueError: no prompts, a prompt too long for the target (named), or `answers` made for
            another length limit.
    """
    if not prompts:
        raise ValueError("There are no prompts to evaluate on.")
    if answers is None:
        answers = GreedyAnswers(target, max_new_tokens=settings.max_new_tokens)
    elif answers.max_new_tokens != settings.max_new_tokens:
        raise ValueError(
            f"The greedy answers were made with max_new_tokens {answers.max_new_tokens}, but the "
            f"evaluation uses {settings.max_new_tokens}. Make them with the same limit."
        )
    decoder = _Decoder(target, draft, settings)
    warm_up = decoder.warm_up(prompts[0])
    results = decoder.all_prompts(prompts, show_progress=show_progress)
    if settings.sampling.greedy:
        turns = [turn for result in results for turn in result.turns]
        for turn in turns:
            turn.prompt_lookup_rounds = _prompt_lookup(target, turn, settings)
        if settings.check_lossless and draft is not None:
            _check_lossless(turns, answers)
    return EvaluationResult(
        settings=settings,
        target=target.name_or_path,
        draft=draft_name if draft is not None else None,
        prompts=results,
        environment=_environment(target),
        warm_up=warm_up,
    )


def _prompt_lookup(
    target: TargetModel, turn: TurnResult, settings: EvaluationSettings
) -> list[RoundRecord]:
    """Rounds of prompt lookup on the same answer, after the token from prefill as ours."""
    first, *rest = turn.generation.token_ids
    return replay_prompt_lookup(
        [*turn.prompt_ids, first],
        rest,
        num_draft_tokens=settings.num_draft_tokens,
        max_length=len(turn.prompt_ids) + settings.max_new_tokens,
        stop_token_ids=target.eos_token_ids,
    )


def _check_lossless(turns: Sequence[TurnResult], answers: GreedyAnswers) -> None:
    """Compares every answer with the target's own; plain runs that were timed serve as they are."""
    for turn in turns:
        if turn.plain is not None:
            answers.remember(turn.prompt_ids, turn.plain.token_ids)
    answers.decode([turn.prompt_ids for turn in turns])
    for turn in turns:
        turn.divergence = answers.divergence(turn.prompt_ids, turn.generation.token_ids)
        turn.checked = True


def find_draft_folder(path: str) -> str:
    """The draft model's folder: the path itself, or `draft` inside a training run.

    Raises:
        ValueError: neither holds a config.json.
    """
    for folder in (Path(path), Path(path) / "draft"):
        if (folder / "config.json").is_file():
            return str(folder)
    raise ValueError(
        f"draft is {path}, but neither it nor {path}/draft has a config.json. Give the folder of a "
        "draft model or of a finished training run."
    )


def load_draft_for(path: str, target: TargetModel) -> Any:
    """Loads a draft model, checks that it belongs to the target, and attaches the embeddings.

    Returns:
        A draft model that is both a `TrainableDraft` and a `Drafter`.

    Raises:
        ValueError: see `find_draft_folder`, `load_draft` and `check_target`.
    """
    draft = load_draft(find_draft_folder(path), dtype=target.dtype, device=target.device)
    check_target(draft.config.target_fingerprint, target)
    draft.attach_target(embed_tokens=target.embed_tokens)
    return draft.eval()


def run(config: EvaluateConfig) -> None:
    """The verb: loads, evaluates, prints the table and writes the results."""
    prompts = load_prompts(config.prompts, limit_per_category=config.limit_per_category)
    target = TargetModel.load(**asdict(config.target))
    draft = load_draft_for(config.draft, target) if config.draft is not None else None
    result = evaluate(
        target,
        draft,
        prompts,
        EvaluationSettings(
            max_new_tokens=config.max_new_tokens,
            num_draft_tokens=config.num_draft_tokens,
            sampling=SamplingSettings(config.temperature, config.top_k, config.top_p),
            seed=config.seed,
            baseline_prompts_per_category=config.baseline_prompts_per_category,
            check_lossless=config.check_lossless,
            template_kwargs=config.template_kwargs,
        ),
        draft_name=config.draft,
        show_progress=True,
    )
    write_report(result, Path(config.output), Console())
