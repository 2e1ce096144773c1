"""HTML and SVG that cannot be injected into: text is escaped unless it was built here.

`element` nests: its result is `Markup`, which a parent takes as it is; any other text, above all
what a model or a prompt said, is escaped. Characters that no screen shows, or that would reorder
the text around them, are made visible on the way.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MISSING = "-"
"""Shown where there is no value: never 0."""
VOID_ELEMENTS = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "wbr"})
"""HTML elements without an end tag."""

# C0 controls except tab and newline, DEL and C1; zero-width and directional marks (a right-to-left
# override turns the rest of the line around); line and paragraph separators; byte order mark; lone
# surrogates, which UTF-8 cannot write.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff]"
)


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def _name_character(match: re.Match[str]) -> str:
    return f"[U+{ord(match.group()):04X}]"


def show_invisible(text: str) -> str:
    """Replaces control, zero-width, directional and unencodable characters by visible names."""
    return _INVISIBLE.sub(_name_character, text)


def escape(text: str) -> Markup:
    """Text for an element or for a quoted attribute; `Markup` stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(show_invisible(text), quote=True))


def join(*parts: str | None) -> Markup:
    """Parts in a row, escaped where needed; None is left out."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def element(name: str, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """An element with its children.

    Args:
        name: of the element.
        children: escaped unless they are `Markup`; None is left out.
        attributes: `class_` is written class, `data_key` data-key; None and False are left out,
            True is written without a value.

    Returns:
        The element.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        if value is not True:
            # `str` first: an attribute is escaped even where the value happens to be Markup.
            attribute += f'="{html.escape(show_invisible(str(value)), quote=True)}"'
        written.append(attribute)
    if name in VOID_ELEMENTS:
        assert not children, f"<{name}> has no content"
        return Markup(f"<{' '.join(written)}>")
    return Markup(f"<{' '.join(written)}>{join(*children)}</{name}>")


def separated(separator: str, parts: Iterable[str]) -> Markup:
    """Parts with a separator between them, each escaped where needed."""
    return Markup(escape(separator).join(escape(part) for part in parts))


def value_at(document: Mapping[str, Any], path: Sequence[str | int]) -> Any:
    """The value at a path; None where the path ends early (a comparison that was not made)."""
    found: Any = document
    for step in path:
        if found is None:
            return None
        found = found.get(step) if isinstance(found, Mapping) else found[step]
    return found


def show_value(
    document: Mapping[str, Any], *path: str | int, form: Callable[[float], str] | None = None
) -> Markup:
    """The value at a path as an element that names the path; a dash where there is none.

    Args:
        document: a JSON document.
        path: keys and indices.
        form: how a number is written; None: as it is.
    """
    value = value_at(document, path)
    if value is None:
        return escape(MISSING)
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
    written = str(value) if form is None else form(value)
    return element("span", written, data_key=pointer)


def several(count: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
