"""draftsmith-calibrate: makes the confidences of DSpark's head mean what they say.

    draftsmith-calibrate target=smollm2 draft=runs/train output=runs/calibration

Decodes held-out prompts with every drafted token verified, fits sequential temperature scaling on
one half of them (draftsmith.eval.calibrate_fit), judges it on the other, and writes the
temperatures into the draft's config.json, where drafting reads them. The head's weights stay as
they were: setting `confidence_temperatures` to null there undoes it, and a later calibration starts
from the raw logits again.

What lies behind a drafted end-of-text token is left out of a round: it can never be emitted. That
depends on the draft alone, so it does not bias what is left.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from draftsmith.conf.schema_calibrate import CalibrateConfig
from draftsmith.eval.calibrate_fit import (
    Observations,
    ObservedRound,
    few_observations,
    fit_temperatures,
    judge,
)
from draftsmith.eval.calibrate_report import Calibration, write_calibration
from draftsmith.eval.conditions import describe_conditions
from draftsmith.eval.evaluate import load_draft_for
from draftsmith.eval.prompts import Prompt, encode_turn, load_prompts
from draftsmith.eval.report import report_console, write_aside
from draftsmith.eval.settings import describe_sampling
from draftsmith.inference.engine import Engine, Request, room_for_text
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import Generation
from draftsmith.models.load import draft_folder
from draftsmith.models.protocols import BlockDrafter, Draft, DraftContext, SamplingSettings
from draftsmith.models.target import TargetModel

CONFIG_KEY = "confidence_temperatures"


@dataclass
class _RecordedState:
    """One sequence: the draft model's own state, and all it has drafted so far."""

    own: Any
    drafts: list[Draft] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    """Committed tokens at the first draft."""


class RecordingDrafter:
    """A block drafter that keeps what it drafts, sequence by sequence."""

    def __init__(self, draft: BlockDrafter) -> None:
        self.draft = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.states: list[_RecordedState] = []
        """Of all sequences, in the order in which they were started."""

    def start(self, max_length: int) -> _RecordedState:
        """See `BlockDrafter`."""
        self.states.append(_RecordedState(self.draft.start(max_length)))
        return self.states[-1]

    def propose(
        self,
        contexts: Sequence[DraftContext],
        states: Sequence[_RecordedState],
        **asked: Any,
    ) -> list[Draft]:
        """See `BlockDrafter`."""
        found = self.draft.propose(contexts, [state.own for state in states], **asked)
        for context, state, draft in zip(contexts, states, found, strict=True):
            state.start = state.start or context.token_ids[0].tolist()
            # Not the distributions: those of all rounds would fill the memory.
            state.drafts.append(
                Draft(tokens=draft.tokens, confidence_logits=draft.confidence_logits)
            )
        return found


def observed_rounds(
    drafts: Sequence[Draft], generation: Generation, stop_ids: Sequence[int]
) -> list[ObservedRound]:
    """What one answer's rounds say about the confidences.

    Args:
        drafts: All that was drafted for it, in order.
        generation: The answer.
        stop_ids: Tokens behind which nothing counts.
    """
    drafted = [draft for draft in drafts if len(draft.tokens)]
    verified = [record for record in generation.rounds if record.proposed]
    assert [len(draft.tokens) for draft in drafted] == [one.proposed for one in verified], (
        "every drafted token is verified"
    )
    found = []
    for draft, record in zip(drafted, verified, strict=True):
        assert draft.confidence_logits is not None, "the draft has a confidence head"
        tokens, logits = draft.tokens.tolist(), draft.confidence_logits.tolist()
        ends = [place + 1 for place, token in enumerate(tokens) if token in stop_ids]
        count = min([len(tokens), *ends])
        found.append(ObservedRound(tuple(logits[:count]), min(record.accepted, count)))
    return found


def sampling_of(config: CalibrateConfig) -> SamplingSettings:
    """How the target samples."""
    return SamplingSettings(
        config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty
    )


def _request(
    target: TargetModel, prompt: Prompt, answers: Sequence[str], config: CalibrateConfig
) -> Request:
    """The first turn of a prompt that has no answer yet.

    Raises:
        ValueError: it cannot be encoded or leaves no room for an answer (named).
    """
    turn = len(answers)
    # The seed of an answer depends on its prompt, not on how many prompts came before.
    seed = zlib.crc32(f"{config.seed}/{prompt.id}/{turn}".encode())
    try:
        request = Request(
            encode_turn(target.tokenizer, prompt, answers, template_kwargs=config.template_kwargs),
            config.max_new_tokens,
            sampling_of(config),
            generator=torch.Generator(device=target.device).manual_seed(seed),
        )
        room_for_text(target, request)
    except ValueError as error:
        raise ValueError(f"Prompt {prompt.id}, turn {turn + 1}: {error}") from error
    return request


def record_rounds(
    target: TargetModel,
    draft: Any,
    prompts: Sequence[Prompt],
    config: CalibrateConfig,
    *,
    show_progress: bool = False,
) -> list[list[ObservedRound]]:
    """Decodes all turns of all prompts; the rounds of each prompt.

    Raises:
        ValueError: a prompt that cannot be encoded or leaves no room for an answer (named).
    """
    recorder = RecordingDrafter(draft)
    policy = ChainPolicy(draft.config.num_steps)
    engine = Engine(target, recorder, policy, batch_size=config.batch_size)  # type: ignore[arg-type]
    found: list[list[ObservedRound]] = [[] for _ in prompts]
    answers: list[list[str]] = [[] for _ in prompts]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not show_progress) as progress:
        task = progress.add_task("answers", total=sum(len(one.turns) for one in prompts))
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            going = [index for index, one in enumerate(prompts) if turn < len(one.turns)]
            requests = [_request(target, prompts[index], answers[index], config) for index in going]
            recorder.states.clear()
            made = engine.run(requests, on_finished=lambda *_: progress.advance(task))
            told = zip(going, requests, recorder.states, made, strict=True)
            for index, request, state, generation in told:
                length = len(request.input_ids)
                assert not state.start or state.start[:length] == list(request.input_ids), (
                    "sequences are started in the order of the requests"
                )
                found[index] += observed_rounds(state.drafts, generation, target.eos_token_ids)
                text = target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
                answers[index].append(str(text))
    return found


def split_prompts(prompts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
    """Indices to fit on and to report on: of each category the 1st, 3rd, ... and the others.

    Raises:
        ValueError: a half is empty.
    """
    seen: Counter[str] = Counter()
    halves: tuple[list[int], list[int]] = ([], [])
    for index, prompt in enumerate(prompts):
        halves[seen[prompt.category] % 2].append(index)
        seen[prompt.category] += 1
    if not halves[1]:
        raise ValueError(
            f"{len(prompts)} prompt(s) in {len(seen)} categories cannot be halved; give at least "
            "two of one category."
        )
    return halves


def check_draft(draft: Any, name: str) -> None:
    """Raises ValueError for a draft model without a confidence head."""
    if not getattr(draft.config, "confidence_head", False):
        raise ValueError(
            f"{name} is a {type(draft).__name__} without a confidence head: there is nothing to "
            "calibrate. Train method=dspark with method.confidence_head=true."
        )


def _check_folder(folder: Path) -> None:
    """A training checkpoint notes the sizes of its files and would count as broken."""
    if (folder.parent / "COMPLETE").is_file():
        raise ValueError(
            f"{folder} is part of a training checkpoint, which must stay as it is. Calibrate the "
            "run's own draft (RUN/draft) or a copy of this folder, or set store=false."
        )


def enough_observations(halves: Sequence[Observations], config: CalibrateConfig) -> int:
    """How many positions, from the first, both halves have enough observations of.

    Raises:
        ValueError: not all of them, unless `short_positions` says what to do; or none.
    """
    few = {
        name: few_observations(half, config.min_observations)
        for name, half in zip(("fit", "report"), halves, strict=True)
    }
    short = [position for positions in few.values() for position, _ in positions]
    if not short:
        return halves[0].num_steps
    if config.short_positions == "error" or min(short) == 1:
        told = "; ".join(
            f"{name} half, {half.num_rounds} rounds: "
            + ", ".join(f"position {position} was reached {count} times" for position, count in own)
            for (name, own), half in zip(few.items(), halves, strict=True)
            if own
        )
        raise ValueError(
            f"Too few observations ({told}); expected at least {config.min_observations} of each "
            "position in each half. Give more prompts or a larger max_new_tokens, or set "
            "short_positions=previous (the default; not for position 1) or a smaller "
            "min_observations."
        )
    return min(short) - 1


def store_temperatures(folder: Path, temperatures: Sequence[float] | None) -> None:
    """Writes the temperatures into a draft's config.json, in one step; None removes them.

    Everything else in the file stays as it is.
    """
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entries[CONFIG_KEY] = None if temperatures is None else list(temperatures)
    text = json.dumps(entries, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_aside(folder, "config.json", text)


def calibrate(
    target: TargetModel,
    draft: Any,
    prompts: Sequence[Prompt],
    config: CalibrateConfig,
    *,
    show_progress: bool = False,
) -> Calibration:
    """Decodes, fits on one half of the prompts and judges on the other; stores nothing.

    Args:
        target: The frozen target.
        draft: A block draft with a confidence head, attached to it.
        prompts: Held out from training.
        config: Its sampling, sizes and limits are read.
        show_progress: Draw a progress bar on stderr.

    Raises:
        ValueError: no confidence head, prompts that cannot be halved or answered, or too few
            observations of a position.
    """
    check_draft(draft, config.draft)
    fit_on, report_on = split_prompts(prompts)
    rounds = record_rounds(target, draft, prompts, config, show_progress=show_progress)
    fit_rounds, report_rounds = (
        [one for index in half for one in rounds[index]] for half in (fit_on, report_on)
    )
    steps = draft.config.num_steps
    halves = Observations(fit_rounds, steps), Observations(report_rounds, steps)
    fitted = enough_observations(halves, config)
    temperatures = fit_temperatures(halves[0], num_bins=config.num_bins, fitted_steps=fitted)
    return Calibration(
        draft=config.draft,
        target=target.name_or_path,
        temperatures=temperatures,
        previous=getattr(draft.config, CONFIG_KEY),
        fitted_steps=fitted,
        positions=list(judge(halves[1], temperatures, num_bins=config.num_bins)),
        fit=(len(fit_on), len(fit_rounds)),
        report=(len(report_on), len(report_rounds)),
        report_rounds=report_rounds,
        fit_prompt_ids=[prompts[index].id for index in fit_on],
        sampling=describe_sampling(sampling_of(config)),
        settings=asdict(config),
        environment=describe_conditions(target),
    )


def run(config: CalibrateConfig) -> None:
    """The verb: loads, calibrates, stores the temperatures and writes the report."""
    prompts = load_prompts(
        config.prompts,
        limit_per_category=config.limit_per_category,
        subset=config.prompts_subset,
        split=config.prompts_split,
        column=config.prompts_column,
    )
    split_prompts(prompts)  # A mistake is told before the models are loaded.
    folder = draft_folder(config.draft)
    if config.store:
        _check_folder(folder)
    target = TargetModel.load(**asdict(config.target))
    draft = load_draft_for(config.draft, target)
    found = calibrate(target, draft, prompts, config, show_progress=True)
    if config.store:
        store_temperatures(folder, found.temperatures)
        found.stored_in = str(folder / "config.json")
    write_calibration(found, Path(config.output), report_console())
