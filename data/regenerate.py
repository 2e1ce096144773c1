"""draftsmith-regenerate: the target answers the prompts itself (self-distillation data).

A draft learns to imitate one target, so the answers it trains on should be that target's own.
Data flow: prompts (JSONL with `turns`) -> chat template -> models.generation.generate_batch, turn
by turn, each turn seeing the target's own earlier answers -> one JSONL row per conversation:
{"id", "sample", "category", "messages", "finish_reasons"}. Rows are appended as they finish and a
second run keeps them, so a stopped run loses only the conversations in flight. Answers cut by
max_new_tokens say "length", and draftsmith-prepare does not teach an end of turn there.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from draftsmith.conf.schema import RegenerateConfig

CONVERSATIONS_PER_SLOT = 32
"""Conversations per batch slot that are worked on together (our choice): later turns start when all
of these have their earlier ones, and the batch runs empty once per such group."""


@dataclass
class PromptRow:
    """One line of a prompt file."""

    id: str
    category: str
    turns: list[str]


@dataclass
class Conversation:
    """A prompt on its way to a finished row."""

    prompt: PromptRow
    sample: int
    messages: list[dict[str, str]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return (self.prompt.id, self.sample)

    @property
    def waits_for(self) -> str | None:
        """The next user turn; None when all are answered or an answer was cut."""
        done = len(self.finish_reasons)
        if done == len(self.prompt.turns) or (done and self.finish_reasons[-1] == "length"):
            # What would follow a cut answer is not something a user would have written.
            return None
        return self.prompt.turns[done]

    def to_row(self) -> dict[str, Any]:
        return {
            "id": self.prompt.id,
            "sample": self.sample,
            "category": self.prompt.category,
            "messages": self.messages,
            "finish_reasons": self.finish_reasons,
        }


def read_prompts(source: str) -> list[PromptRow]:
    """Reads `bundled` (the training prompts of this package) or a JSONL file of prompts.

    Raises:
        ValueError: a missing file, a line that is no prompt (file and line are named), or an id
            that occurs twice.
    """
    if source == "bundled":
        folder = importlib.resources.files("draftsmith.data") / "prompts"
        files = sorted(
            (entry for entry in folder.iterdir() if entry.name.endswith(".jsonl")),
            key=lambda entry: entry.name,
        )
        texts = [(entry.name, entry.read_text(encoding="utf-8")) for entry in files]
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(
                f"prompts={source} is not a file. Give a JSONL file with one "
                '{"id": ..., "category": ..., "turns": [...]} a line, or prompts=bundled.'
            )
        texts = [(source, path.read_text(encoding="utf-8-sig"))]
    rows, seen = [], set()
    for name, text in texts:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                row = _parse_prompt(line, f"{name}, line {number}")
                if row.id in seen:
                    raise ValueError(f"{name}, line {number}: the id {row.id!r} occurs twice.")
                seen.add(row.id)
                rows.append(row)
    return rows


def _parse_prompt(line: str, place: str) -> PromptRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg}).") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError(f'{place}: expected "turns" to be a list of at least one text.')
    identity = str(row.get("id") or hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16])
    return PromptRow(id=identity, category=str(row.get("category", "")), turns=turns)


def row_seed(seed: int, key: tuple[str, int], turn: int) -> int:
    """A seed of its own for each answer: independent of order, batch and resuming."""
    text = f"{seed}/{key[0]}/{key[1]}/{turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def answer_settings(config: RegenerateConfig) -> dict[str, Any]:
    """The settings that decide what the answers are; kept beside the output."""
    names = ("prompts", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    settings = {name: getattr(config, name) for name in names}
    return settings | {
        "samples_per_prompt": config.samples_per_prompt,
        "template_kwargs": config.template_kwargs,
        "target": config.target.name_or_path,
        "dtype": config.target.dtype,
    }


def finished_keys(output: Path, settings: dict[str, Any]) -> set[tuple[str, int]]:
    """Which conversations an earlier run has written; a torn last line is cut off.

    Raises:
        ValueError: the earlier run had other settings.
    """
    settings_file = output.with_suffix(".settings.json")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        settings_file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return set()
    earlier = (
        json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
    )
    changed = sorted(name for name in settings if earlier.get(name) != settings[name])
    if changed:
        found = ", ".join(f"{n}={earlier.get(n)!r} (now {settings[n]!r})" for n in changed)
        raise ValueError(
            f"{output} was written with other settings: {found}. Give another output, or delete "
            f"{output} and {settings_file.name} to start again."
        )
    kept, keys = [], set()
    for line in output.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # the writer was stopped in the middle of this line
        row = json.loads(line)
        keys.add((row["id"], row["sample"]))
        kept.append(line)
    temporary = output.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(output)
    return keys


def chunks(items: Sequence[Conversation], size: int) -> Iterator[Sequence[Conversation]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class AnswerWriter:
    """Lets the target answer conversations turn by turn and appends each finished one."""

    def __init__(self, config: RegenerateConfig, target: Any, output: TextIO) -> None:
        self.config = config
        self.target = target
        self.output = output
        self.num_tokens = 0
        self.num_answers = 0
        self.num_cut = 0

    def encode(self, conversation: Conversation) -> list[int]:
        """The prompt of the next answer, as the chat template gives it."""
        from draftsmith.data.chat_template import encode_prompt

        return encode_prompt(
            self.target.tokenizer,
            conversation.messages,
            template_kwargs=self.config.template_kwargs,
        )

    def run(self, conversations: Sequence[Conversation], progress: Any, task: Any) -> None:
        """Answers all turns of these conversations; rows are written as soon as they end."""
        waiting = list(conversations)
        while waiting:
            for conversation in waiting:
                turn = conversation.waits_for
                assert turn is not None, "only unfinished conversations wait"
                conversation.messages.append({"role": "user", "content": turn})
            self._answer(waiting, progress, task)
            waiting = [item for item in waiting if item.waits_for is not None]

    def _answer(self, waiting: list[Conversation], progress: Any, task: Any) -> None:
        from draftsmith.models.generation import GeneratedAnswer, generate_batch
        from draftsmith.models.protocols import SamplingSettings

        def record(index: int, answer: GeneratedAnswer) -> None:
            conversation = waiting[index]
            text = self.target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.finish_reasons.append(answer.finish_reason)
            self.num_tokens += len(answer.token_ids)
            self.num_answers += 1
            self.num_cut += answer.finish_reason == "length"
            if conversation.waits_for is None:
                self.output.write(json.dumps(conversation.to_row()) + "\n")
                self.output.flush()
                progress.advance(task)
            progress.update(task, description=f"answers ({self.num_tokens} tokens)")

        config = self.config
        generate_batch(
            self.target.model,
            [self.encode(conversation) for conversation in waiting],
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=self.target.eos_token_ids,
            pad_id=self.target.eos_token_ids[0],
            batch_size=config.batch_size,
            sampling=SamplingSettings(config.temperature, config.top_k, config.top_p),
            seeds=[row_seed(config.seed, item.key, len(item.finish_reasons)) for item in waiting],
            on_finished=record,
        )


def run(config: RegenerateConfig) -> None:
    """Answers every prompt that the output file does not hold yet."""
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from draftsmith.models.target import TargetModel

    prompts = read_prompts(config.prompts)[: config.limit]
    output = Path(config.output)
    done = finished_keys(output, answer_settings(config))
    missing = [
        conversation
        for sample in range(config.samples_per_prompt)
        for prompt in prompts
        if (conversation := Conversation(prompt, sample)).key not in done
    ]
    console = Console(stderr=True)
    total = len(prompts) * config.samples_per_prompt
    console.print(f"{total} conversations, {total - len(missing)} of them already in {output}")
    if not missing:
        return
    target = TargetModel.load(**asdict(config.target))
    if not target.tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {config.target.name_or_path} has no chat template, so there is no "
            "way to put a question to it. Use an instruct model."
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    start = time.perf_counter()
    with (
        closing(output.open("a", encoding="utf-8")) as stream,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        task = progress.add_task("answers", total=len(missing))
        writer = AnswerWriter(config, target, stream)
        for chunk in chunks(missing, CONVERSATIONS_PER_SLOT * config.batch_size):
            writer.run(chunk, progress, task)
    seconds = time.perf_counter() - start
    console.print(
        f"{writer.num_answers} answers, {writer.num_tokens} tokens in {seconds:.0f} s "
        f"({writer.num_tokens / seconds:.0f} tokens/s); "
        f"{writer.num_cut / writer.num_answers:.1%} were cut at {config.max_new_tokens} tokens"
    )
