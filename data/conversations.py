"""Conversations of any common layout, normalised to the messages that a chat template expects.

What: one row of a file (OpenAI messages, ShareGPT, Alpaca, prompt/response, plain text) becomes one
`Conversation`, or a `RowError` that says why the row cannot be used. Nothing is repaired by leaving
something out: a turn is never removed from the middle of a conversation (STYLE rule 19).

Field names: OpenAI chat completions (messages, tool_calls, finish_reason, weight); ShareGPT
(conversations, from, value, tools, system); Alpaca (instruction, input, output, history, system).

Check: tests/test_conversations.py. The files themselves are read by data/row_files.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROLE_ALIASES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_call": "function_call",
}
"""Role names in use -> the four that templates know. `function_call` (ShareGPT) is an assistant
turn whose text is a call written as JSON. Compared in lower case."""

MESSAGE_LIST_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog")
ANSWER_KEYS = ("response", "completion", "output", "answer")
_CONSUMED_KEYS = frozenset(
    {"role", "from", "content", "value", "text", "tool_calls", "function_call", "finish_reason"}
    | {"finish_reasons", "weight", "reasoning", "thinking", "reasoning_content"}
)


class RowError(ValueError):
    """One row cannot be used.

    Attributes:
        reason: a short phrase under which rows are counted.
        detail: what exactly was found in this row.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass
class Conversation:
    """One normalised row: either `messages` or (plain text) `text`."""

    identity: str
    """The row's own id, else where it was read."""
    category: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Roles system, user, assistant, tool; `content` is always a string."""
    tools: list[dict[str, Any]] | None = None
    """Tool descriptions in OpenAI's layout, or None."""
    text: str | None = None
    """A plain document, supervised as a whole."""
    cut_turns: frozenset[int] = frozenset()
    """Indices of assistant messages that a length limit cut: their end of turn is not taught."""
    untrained_turns: frozenset[int] = frozenset()
    """Indices of assistant messages with weight 0: context only."""


def parse_conversation(
    row: Mapping[str, Any], *, input_format: str = "auto", origin: str = ""
) -> Conversation:
    """Normalises one row.

    Args:
        row: the row's fields.
        input_format: auto (decided per row by its keys), messages, sharegpt, alpaca,
            prompt_response or text.
        origin: where the row was read; the id of a row that has none.

    Raises:
        RowError: the row cannot be used; `reason` is what it is counted under.
    """
    chosen = detect_format(row) if input_format == "auto" else input_format
    identity = str(next((row[k] for k in ("id", "conversation_id") if _filled(row.get(k))), origin))
    category = row.get("category")
    conversation = Conversation(identity, category if isinstance(category, str) else "")
    if chosen == "text":
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise RowError("no text", f"field text is {_kind(text)}; expected a text")
        conversation.text = text
        return conversation
    raw_messages = _READERS[chosen](row)
    if not raw_messages:
        raise RowError("no messages", "the conversation is empty")
    conversation.messages = [_message(raw, n) for n, raw in enumerate(raw_messages)]
    conversation.tools = _tools(row)
    answers = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if not answers:
        raise RowError(
            "no assistant turn",
            f"roles are {', '.join(m['role'] for m in conversation.messages)}; "
            "run draftsmith-regenerate to let the target answer prompts",
        )
    conversation.cut_turns = _cut_turns(row, raw_messages, answers)
    conversation.untrained_turns = frozenset(n for n in answers if _weight(raw_messages[n], n) == 0)
    return conversation


def detect_format(row: Mapping[str, Any]) -> str:
    """Names the layout of a row by its keys.

    Raises:
        RowError: no layout matches, or the row holds prompts without answers.
    """
    for key in MESSAGE_LIST_KEYS:
        value = row.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            first = value[0] if value else {}
            keyed = isinstance(first, Mapping) and "from" in first
            return "sharegpt" if keyed else "messages"
    if "instruction" in row and _answer_key(row):
        return "alpaca"
    if ("prompt" in row or "question" in row) and _answer_key(row):
        return "prompt_response"
    if "text" in row:
        return "text"
    if "turns" in row or "prompt" in row:
        raise RowError(
            "prompts without answers",
            f"fields are {_keys(row)}; run draftsmith-regenerate to let the target answer them",
        )
    raise RowError(
        "unknown layout",
        f"fields are {_keys(row)}; expected messages, conversations, instruction + output, "
        "prompt + response or text",
    )


def _filled(value: Any) -> bool:
    return value is not None and value != ""


def _kind(value: Any) -> str:
    """How a value is named in an error: its JSON type, shortened."""
    names = {type(None): "missing or null", bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "(none)"


def _answer_key(row: Mapping[str, Any]) -> str | None:
    return next((key for key in ANSWER_KEYS if key in row), None)


# Each layout gives a list of raw messages; `_message` then normalises them all alike.


def _read_message_list(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """OpenAI messages and ShareGPT: the first key that holds a list."""
    for key in MESSAGE_LIST_KEYS:
        value = row.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            messages = list(value)
            break
    else:
        raise RowError(
            "unknown layout", f"no list of messages; fields are {_keys(row)}, expected messages"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RowError("message is not an object", f"message {number} is {_kind(message)}")
    return _with_system(row, messages)


def _with_system(
    row: Mapping[str, Any], messages: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Puts the row's own `system` field in front, unless the messages already start with one."""
    system = row.get("system", row.get("system_prompt"))
    if not _filled(system):
        return messages
    first = messages[0] if messages else {}
    if str(first.get("role", first.get("from", ""))).lower() in ("system", "developer"):
        raise RowError("two system prompts", "field system and a system message in the same row")
    return [{"role": "system", "content": system}, *messages]


def _read_alpaca(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """instruction [+ input] -> output; `history` is a list of (question, answer) pairs."""
    instruction, extra = row.get("instruction"), row.get("input")
    if not isinstance(instruction, str):
        raise RowError(
            "unknown layout", f"instruction is {_kind(instruction)}; fields are {_keys(row)}"
        )
    # The input is the material that the instruction speaks of: without it the prompt is senseless.
    if _filled(extra) and not isinstance(extra, str):
        raise RowError("content is not text", f"input is {_kind(extra)}; expected a string")
    prompt = "\n\n".join(part for part in (instruction, extra) if part)
    messages: list[Mapping[str, Any]] = []
    for number, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RowError("unknown layout", f"history {number} is not a (question, answer) pair")
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    messages += [{"role": "user", "content": prompt}, _answer_message(row)]
    return _with_system(row, messages)


def _answer_message(row: Mapping[str, Any]) -> dict[str, Any]:
    """The answer field as an assistant message."""
    key = _answer_key(row)
    if key is None or row[key] is None:
        raise RowError(
            "no assistant turn", f"no answer; fields are {_keys(row)}, expected {ANSWER_KEYS[0]}"
        )
    return {"role": "assistant", "content": row[key]}


def _read_prompt_response(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """prompt + response; either side may itself be a list of messages."""
    prompt = row.get("prompt", row.get("question"))
    if prompt is None:
        raise RowError("unknown layout", f"no prompt; fields are {_keys(row)}, expected prompt")
    sides: list[Mapping[str, Any]] = []
    for message in ({"role": "user", "content": prompt}, _answer_message(row)):
        value = message["content"]
        if isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m for m in value):
            sides += value
        else:
            sides.append(message)
    return _with_system(row, sides)


_READERS: dict[str, Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]] = {
    "messages": _read_message_list,
    "sharegpt": _read_message_list,
    "alpaca": _read_alpaca,
    "prompt_response": _read_prompt_response,
}


def _message(raw: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One raw message -> role, content (a string) and what else the template may read."""
    role_name = raw.get("role", raw.get("from"))
    role = ROLE_ALIASES.get(role_name.strip().lower()) if isinstance(role_name, str) else None
    if role is None:
        raise RowError("unknown role", f"message {number} has role {role_name!r}")
    content = next((raw[key] for key in ("content", "value", "text") if key in raw), None)
    message: dict[str, Any] = {"role": role, "content": content_text(content, number)}
    calls = raw.get("tool_calls")
    if role == "function_call":
        call = _json_field(message["content"], "bad tool call", f"message {number}")
        message |= {"role": "assistant", "content": ""}
        calls = call if isinstance(call, list) else [call]
    elif isinstance(raw.get("function_call"), Mapping):
        calls = [raw["function_call"]]
    if calls:
        if isinstance(calls, str):
            calls = _json_field(calls, "bad tool call", f"message {number}")
        if not isinstance(calls, list):
            raise RowError("bad tool call", f"message {number}: tool_calls is {_kind(calls)}")
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    named = (raw.get(key) for key in ("reasoning_content", "reasoning", "thinking"))
    reasoning = next((value for value in named if _filled(value)), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RowError("content is not text", f"message {number}: reasoning is not a string")
        message["reasoning_content"] = reasoning
    message |= {k: v for k, v in raw.items() if k not in _CONSUMED_KEYS and v is not None}
    return message


def content_text(content: Any, number: int) -> str:
    """The text of a message's content.

    A list of parts is joined by line breaks, which is what vLLM does for templates that take
    strings. null is the empty text (OpenAI writes it on turns that only call tools).

    Raises:
        RowError: a number, an object, or a part that is not text (an image is never str()-ed).
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(
            "content is not text",
            f"message {number}: content is {_kind(content)}; expected a string",
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type", "?") if isinstance(part, Mapping) else _kind(part)
            raise RowError(
                "content part is not text",
                f"message {number} has a part of type {kind}; the target reads text only",
            )
    return "\n".join(texts)


def _json_field(text: str, reason: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(reason, f"{where}: not JSON ({error}): {text[:80]!r}") from error


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """One tool call with its arguments as a mapping (OpenAI sends them as a JSON string)."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("bad tool call", f"message {number}: a tool call without a function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _json_field(
            arguments, "bad tool arguments", f"message {number}, tool {function['name']}"
        )
    if arguments in (None, "") or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowError(
            "bad tool arguments",
            f"message {number}, tool {function['name']}: arguments are {_kind(arguments)}; "
            "expected an object or its JSON text",
        )
    normalised = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        normalised["id"] = call["id"]
    return normalised


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The row's tools as a list in OpenAI's layout; a JSON string and a list mean the same."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json_field(tools, "bad tools", "field tools") if tools.strip() else None
    if tools is None:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("bad tools", f"field tools is {_kind(tools)}; expected a list of objects")
    wrapped = [
        dict(tool)
        if "function" in tool or "name" not in tool
        # A bare description and a wrapped one are the same tool; templates look for the wrapped.
        else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
    ]
    return wrapped or None


def _weight(raw: Mapping[str, Any], number: int) -> float:
    """OpenAI fine-tuning's `weight` (0 or 1) of an assistant message."""
    weight = raw.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise RowError("bad weight", f"message {number} has weight {weight!r}; expected 0 or 1")
    return weight


def _cut_turns(
    row: Mapping[str, Any], raw_messages: Sequence[Mapping[str, Any]], answers: Sequence[int]
) -> frozenset[int]:
    """Which assistant turns a length limit cut.

    `finish_reason` on a message speaks for it; on the row, for the last answer; `finish_reasons` on
    the row is a list with one entry per answer that was generated, the last ones of the row.
    """
    cut = {n for n in answers if raw_messages[n].get("finish_reason") == "length"}
    if row.get("finish_reason") == "length":
        cut.add(answers[-1])
    reasons = row.get("finish_reasons")
    if reasons is not None:
        if not isinstance(reasons, list) or len(reasons) > len(answers):
            raise RowError(
                "bad finish_reasons",
                f"{reasons!r} for {len(answers)} answers; expected a list, one entry per answer",
            )
        matched = answers[len(answers) - len(reasons) :]
        cut.update(n for n, reason in zip(matched, reasons, strict=True) if reason == "length")
    return frozenset(cut)
