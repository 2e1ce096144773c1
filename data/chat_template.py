"""A chat template's text, and its ids with exactly one BOS.

Every place that turns messages into what the target reads goes through here, so that training rows
start with the very ids that inference reads.

Check: tests/test_chat_mask.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from draftsmith.data.conversations import RowError

# A chat template is a program that came with the model: these are the ways in which it says no.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with the tokenizer's chat template.

    Raises:
        RowError: the template refused them.
    """
    try:
        # A list of one conversation: an empty conversation is refused outside of a list.
        return tokenizer.apply_chat_template(
            [list(messages)],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **dict(template_kwargs or {}),
        )[0]
    except TEMPLATE_ERRORS as error:
        raise RowError(
            "the chat template refused it", f"{type(error).__name__}: {error}"
        ) from error


def encode_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids that the target reads before it answers: same BOS rule as the training rows.

    Raises:
        RowError: the template refused the messages.
    """
    text = render_chat(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=True,
        template_kwargs=template_kwargs,
    )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return bos_to_add(tokenizer, added_special_ids(tokenizer)[0], text) + list(ids)


def added_special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer adds on its own before and after a text: (prefix ids, suffix ids)."""
    probe = "a"
    bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    dressed = list(tokenizer(probe)["input_ids"])
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    raise ValueError(
        f"The tokenizer encodes {probe!r} as {bare} without and {dressed} with special tokens; "
        "expected the same ids with others around them."
    )


def bos_to_add(tokenizer: Any, prefix_ids: Sequence[int], text: str) -> list[int]:
    """Exactly one BOS: the tokenizer's own is added only where the text does not start with it."""
    bos = tokenizer.bos_token
    return [] if bos and text.startswith(bos) else list(prefix_ids)
