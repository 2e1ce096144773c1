"""Prompts to evaluate on, and how a conversation becomes token ids.

Bundled: eval/prompts/*.jsonl, written for this project, none of them in the training prompts. Files
of one's own are JSONL, one prompt a line: {"prompt": "..."} or {"turns": ["...", "..."]}, with `id`
(or `question_id`) and `category` if wanted; MT-Bench's and Spec-Bench's question.jsonl are of this
kind.

With several turns, each later prompt contains the model's own answers to the earlier ones. The chat
template is the target tokenizer's, never one chosen by a model's name.
"""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.chat_template import encode_prompt

BUNDLED = "bundled"
"""Name of the prompt set that comes with draftsmith."""


@dataclass(frozen=True)
class Prompt:
    """One conversation: what the user says, turn by turn."""

    id: str
    category: str
    turns: tuple[str, ...]


def parse_prompt(row: Any, *, place: str, default_id: str) -> Prompt:
    """Reads one JSONL row.

    Args:
        row: the decoded JSON value.
        place: file and line, for messages.
        default_id: id of a row that has none.

    Raises:
        ValueError: no prompt in it, or one that is not text.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place}: found {type(row).__name__}, expected an object with 'turns'.")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{place}: keys {', '.join(map(str, row)) or '(none)'}; expected 'prompt' (text) or "
            "'turns' (a list of texts)."
        )
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: a turn is empty or not text; each must be a non-empty string.")
    identity = row.get("id", row.get("question_id", default_id))
    return Prompt(id=str(identity), category=str(row.get("category", "all")), turns=tuple(turns))


def read_prompt_text(text: str, *, name: str) -> list[Prompt]:
    """Reads JSONL text; blank lines are allowed.

    Raises:
        ValueError: a line that is not JSON or not a prompt, an id used twice, or no prompt at all.
    """
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error}). Expected one object a line.") from error
        prompts.append(parse_prompt(row, place=place, default_id=f"line-{number}"))
    if not prompts:
        raise ValueError(f"{name} has no prompts; expected one JSON object a line.")
    twice = [key for key, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise ValueError(f"{name}: id {twice[0]!r} is used twice; results are kept by id.")
    return prompts


def load_prompts(source: str, *, limit_per_category: int | None = None) -> list[Prompt]:
    """Loads the bundled prompts or a JSONL file.

    Args:
        source: 'bundled' or a path.
        limit_per_category: keep only the first so many of each category; None keeps all.

    Raises:
        ValueError: no such file, or see `read_prompt_text`.
    """
    if source == BUNDLED:
        folder = importlib.resources.files("draftsmith.eval") / "prompts"
        files = sorted(
            (entry for entry in folder.iterdir() if entry.name.endswith(".jsonl")),
            key=lambda entry: entry.name,
        )
        text = "\n".join(entry.read_text(encoding="utf-8") for entry in files)
        prompts = read_prompt_text(text, name="bundled prompts")
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(
                f"No prompt file at {source}. Give a JSONL file, or '{BUNDLED}' for the prompts "
                "that come with draftsmith."
            )
        prompts = read_prompt_text(path.read_text(encoding="utf-8"), name=str(path))
    if limit_per_category is None:
        return prompts
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= limit_per_category:
            kept.append(prompt)
    return kept


def encode_turn(
    tokenizer: Any,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Token ids that ask for the answer to the last of `turns`.

    Args:
        tokenizer: the target's.
        turns: what the user has said so far, the new turn last.
        answers: the model's answers to all turns but the last.
        template_kwargs: passed to the chat template (e.g. enable_thinking).

    Raises:
        ValueError: template_kwargs without a chat template to give them to.
    """
    assert len(answers) == len(turns) - 1, "every turn but the last has an answer"
    if tokenizer.chat_template is None:
        if template_kwargs:
            raise ValueError(
                f"template_kwargs is {dict(template_kwargs)}, but this tokenizer has no chat "
                "template. Remove it, or use a chat model's tokenizer."
            )
        # A base model: the conversation is plain text, one paragraph each.
        parts = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair]
        return list(tokenizer("\n\n".join(parts[:-1])).input_ids)
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    return encode_prompt(tokenizer, messages, template_kwargs=template_kwargs)
