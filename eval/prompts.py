"""Prompts to evaluate on, and how a conversation becomes token ids.

Bundled: eval/prompts/*.jsonl, written for this project, none of them in the training prompts. Files
of one's own are JSONL, one prompt a line, with `id` (or `question_id`) and `category` if wanted:

    {"prompt": "..."}                   one turn
    {"turns": ["...", "..."]}           several; MT-Bench's and Spec-Bench's question.jsonl
    {"messages": [{"role": ...}, ...]}  OpenAI's; a system message and given answers are kept

`datasets` names and folders are read by draftsmith.eval.prompt_datasets, with the same three forms.

With several turns, each later prompt contains the model's own answers to the earlier ones. The chat
template is the target tokenizer's, never one chosen by a model's name or path.
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
FORMS = ("prompt", "messages", "turns")
"""Keys of a row that hold what is asked."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of OpenAI's messages that a prompt may have -> what chat templates call them."""

Message = Mapping[str, str]
"""{"role": system, user or assistant; "content": text}."""


@dataclass(frozen=True)
class Prompt:
    """One conversation: what the user says, turn by turn, and what else is given."""

    id: str
    category: str
    turns: tuple[str, ...]
    """User texts that the model answers."""
    given: tuple[tuple[Message, ...], ...] = ()
    """Per turn, messages that stand before its user text: a system message, turns whose answers
    are given. Empty when there are none in the whole conversation."""

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The conversation up to the first turn without an answer, its user text last.

        Args:
            answers: the model's own, to the first turns; fewer than there are turns.
        """
        assert len(answers) < len(self.turns), "a turn is left to be answered"
        found: list[dict[str, str]] = []
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            if self.given:
                found += [dict(message) for message in self.given[number]]
            found.append({"role": "user", "content": turn})
            if number < len(answers):
                found.append({"role": "assistant", "content": answers[number]})
        return found


def _is_text(value: Any) -> bool:
    # JSON can escape half of a surrogate pair, which is no character and no tokenizer reads.
    return (
        isinstance(value, str)
        and bool(value.strip())
        and not any("\ud800" <= character <= "\udfff" for character in value)
    )


def _content(message: Mapping[str, Any], place: str) -> str:
    """Text of one message; OpenAI's list of parts is joined when all parts are text."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"{place}: a message's content is {type(content).__name__}; expected text (pictures, "
            "sound and tool calls cannot be evaluated)."
        )
    return content


def split_messages(
    messages: Any, place: str
) -> tuple[tuple[str, ...], tuple[tuple[Message, ...], ...]]:
    """OpenAI messages -> (turns, given) of a `Prompt`.

    A user message that an assistant message follows is given; the others are turns.

    Raises:
        ValueError: no messages, an unknown role, a content that is not text, an assistant message
            that answers nothing, or a last message that is not the user's.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: messages is empty or no list; expected OpenAI messages.")
    read: list[Message] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"{place}: a message has role {role!r}; prompts may have {', '.join(ROLES)}."
            )
        read.append({"role": ROLES[role], "content": _content(message, place)})
    roles = [message["role"] for message in read]
    if roles[-1] != "user" or not _is_text(read[-1]["content"]):
        raise ValueError(
            f"{place}: the last message is from the {roles[-1]}"
            f"{' and empty' if roles[-1] == 'user' else ''}; the last one must be the user's, and "
            "is what the model answers. Remove what follows it."
        )
    turns: list[str] = []
    given: list[tuple[Message, ...]] = []
    before: list[Message] = []
    for number, message in enumerate(read):
        if message["role"] == "assistant" and (number == 0 or roles[number - 1] != "user"):
            raise ValueError(
                f"{place}: message {number + 1} is an assistant's, but no user message stands "
                "before it."
            )
        answered = number + 1 < len(roles) and roles[number + 1] == "assistant"
        if message["role"] == "user" and not answered:
            turns.append(message["content"])
            given.append(tuple(before))
            before = []
        else:
            before.append(message)
    return tuple(turns), tuple(given) if any(given) else ()


def _turns(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: turns is empty or no list; expected a list of texts.")
    if not all(_is_text(turn) for turn in value):
        raise ValueError(f"{place}: a turn is empty or not text; each must be a non-empty string.")
    return tuple(value)


def _read_form(
    value: Any, form: str, place: str
) -> tuple[tuple[str, ...], tuple[tuple[Message, ...], ...]]:
    """(turns, given) of a value in one of the three forms."""
    if form == "messages":
        return split_messages(value, place)
    if form == "turns":
        return _turns(value, place), ()
    if not _is_text(value):
        raise ValueError(f"{place}: the prompt is empty or not text; expected a non-empty string.")
    return (value,), ()


def _form_of(value: Any) -> str:
    """Which of the three forms a column's value has, by its type."""
    if not isinstance(value, list):
        return "prompt"
    return "messages" if value and isinstance(value[0], Mapping) else "turns"


def parse_prompt(row: Any, *, place: str, default_id: str, column: str | None = None) -> Prompt:
    """Reads one row.

    Args:
        row: the decoded JSON value, or the row of a data set.
        place: file and line, for messages.
        default_id: id of a row that has none.
        column: key that holds the prompt in any of the three forms; None: one of `FORMS`.

    Raises:
        ValueError: no prompt in it, more than one form, or one that is not text.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: found {type(row).__name__}, expected an object with 'turns'.")
    keys = ", ".join(map(str, row)) or "(none)"
    if column is not None:
        if column not in row:
            raise ValueError(f"{place}: prompts_column is {column!r}, but the keys are {keys}.")
        turns, given = _read_form(row[column], _form_of(row[column]), place)
    else:
        # Data sets have every column in every row: an empty one is none.
        forms = [form for form in FORMS if row.get(form) is not None]
        if len(forms) != 1:
            found = f"both {' and '.join(map(repr, forms))} filled" if forms else f"keys {keys}"
            raise ValueError(
                f"{place}: {found}; expected one of 'prompt' (text), 'messages' (OpenAI's) and "
                "'turns' (a list of texts). For another key set prompts_column."
            )
        turns, given = _read_form(row[forms[0]], forms[0], place)
    identity = next((row[k] for k in ("id", "question_id") if row.get(k) is not None), default_id)
    category = row.get("category")
    return Prompt(
        id=str(identity),
        category="all" if category is None else str(category),
        turns=turns,
        given=given,
    )


def require_distinct_ids(prompts: Sequence[Prompt], name: str) -> list[Prompt]:
    """The prompts; results are kept by id.

    Raises:
        ValueError: no prompts, or an id used twice.
    """
    if not prompts:
        raise ValueError(f"{name} has no prompts; expected one JSON object a line.")
    twice = [key for key, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise ValueError(f"{name}: id {twice[0]!r} is used twice; results are kept by id.")
    return list(prompts)


def read_prompt_text(text: str, *, name: str, column: str | None = None) -> list[Prompt]:
    """Reads JSONL text; blank lines are allowed.

    Raises:
        ValueError: a line that is not JSON or not a prompt, an id used twice, or no prompt at all.
    """
    prompts = []
    # Not splitlines: JSON may hold line separators of Unicode, such as U+2028, unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error}). Expected one object a line.") from error
        found = parse_prompt(row, place=place, default_id=f"line-{number}", column=column)
        prompts.append(found)
    return require_distinct_ids(prompts, name)


def _bundled_text() -> str:
    folder = importlib.resources.files("draftsmith.eval") / "prompts"
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".jsonl")),
        key=lambda entry: entry.name,
    )
    return "\n".join(entry.read_text(encoding="utf-8") for entry in files)


def load_prompts(
    source: str,
    *,
    limit_per_category: int | None = None,
    subset: str | None = None,
    split: str | None = None,
    column: str | None = None,
) -> list[Prompt]:
    """Loads the bundled prompts, a JSONL file, or a data set.

    Args:
        source: 'bundled', the path of a JSONL file, a folder written by `save_to_disk`, or a name
            for `datasets` (which is imported only then).
        limit_per_category: keep only the first so many of each category; None keeps all.
        subset, split: of a data set.
        column: that holds the prompt; None: see `parse_prompt`.

    Raises:
        ValueError: no such file or data set, a setting that has no effect, or see
            `read_prompt_text`.
    """
    path = Path(source)
    of_file = source == BUNDLED or path.is_file() or path.suffix in (".jsonl", ".json")
    if of_file and (subset is not None or split is not None):
        raise ValueError(
            f"prompts_subset or prompts_split is set, but prompts={source} is no data set. Remove "
            "it."
        )
    if source == BUNDLED:
        prompts = read_prompt_text(_bundled_text(), name="bundled prompts", column=column)
    elif path.is_file():
        text = path.read_text(encoding="utf-8-sig")
        prompts = read_prompt_text(text, name=str(path), column=column)
    elif of_file:
        raise ValueError(
            f"No prompt file at {source}. Give a JSONL file, a `datasets` name, or '{BUNDLED}' for "
            "the prompts that come with draftsmith."
        )
    else:
        from draftsmith.eval.prompt_datasets import read_prompt_dataset

        prompts = read_prompt_dataset(source, subset=subset, split=split, column=column)
    if limit_per_category is None:
        return prompts
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= limit_per_category:
            kept.append(prompt)
    return kept


def template_mode(tokenizer: Any) -> str:
    """How `encode_turn` turns a conversation into text, for reports."""
    return "plain text" if tokenizer.chat_template is None else "chat template of the tokenizer"


def encode_turn(
    tokenizer: Any,
    prompt: Prompt,
    answers: Sequence[str],
    *,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Token ids that ask for the answer to the first turn that has none.

    Args:
        tokenizer: the target's.
        prompt: the conversation.
        answers: the model's answers to the turns before.
        template_kwargs: passed to the chat template (e.g. enable_thinking).

    Raises:
        ValueError: template_kwargs without a chat template to give them to, or a template that
            refuses the messages.
    """
    messages = prompt.messages(answers)
    if tokenizer.chat_template is None:
        if template_kwargs:
            raise ValueError(
                f"template_kwargs is {dict(template_kwargs)}, but this tokenizer has no chat "
                "template. Remove it, or use a chat model's tokenizer."
            )
        # A base model: the conversation is plain text, one paragraph each.
        return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
    return encode_prompt(tokenizer, messages, template_kwargs=template_kwargs)
