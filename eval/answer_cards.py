"""The answers of a report: each token a <span> that says who wrote it.

    data-d   0: the target's own (from prefill, or the one that ends a round); k: drafted, accepted
             at depth k
    data-r   round, from 1; 0: prefill
    data-q   the draft model's probability of it, where there is one
    data-p   the target's probability of it

Short names, no element besides the span, and one note shared by all (eval/page/page.js): a report
of 100 answers of 300 tokens stays at some megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftsmith.eval.charts import two_decimals
from draftsmith.eval.markup import (
    Markup,
    element,
    escape,
    join,
    separated,
    several,
    show_invisible,
    show_value,
)

DEEPEST_COLOR = 8
"""Tokens drafted deeper than this share its colour (eval/page/page.css)."""
WHITE_SPACE = {"\n": "nl", "\t": "tab"}
"""Character -> class of its mark."""

_WHITE_SPACE = re.compile("(\n|\t)")


def category_filter(results: Mapping[str, Any]) -> Markup:
    """The choice of a category."""
    # "=" before each name, so that a category without a name is not taken for "all".
    options = [element("option", name, value=f"={name}") for name in results["by_category"]]
    everything = element("option", "all", value="")
    select = element("select", everything, *options, id="category", autocomplete="off")
    return element("label", "Category ", select)


def _depths(results: Mapping[str, Any]) -> list[int]:
    return [
        depth
        for prompt in results["prompts"]
        for turn in prompt["turns"]
        for depth in (turn.get("tokens") or {}).get("depths", ())
    ]


def color_legend(results: Mapping[str, Any]) -> Markup | None:
    """Swatches up to the deepest token of the page; None where no answer has origins."""
    depths = _depths(results)
    if not depths:
        return None
    entries = [element("li", element("span", "target\u2019s own", data_d=0))]
    for depth in range(1, min(max(depths), DEEPEST_COLOR) + 1):
        more = "+" if depth == DEEPEST_COLOR < max(depths) else ""
        words = f"depth {depth}{more}" if depth == 1 else f"{depth}{more}"
        entries.append(element("li", element("span", words, data_d=depth)))
    return element("ul", *entries, class_="legend", aria_label="Colours of the tokens")


def answer_cards(results: Mapping[str, Any]) -> Iterator[Markup]:
    """One card per prompt, with all its turns.

    Raises:
        ValueError: an answer's "tokens" have lists of different lengths.
    """
    for index, prompt in enumerate(results["prompts"]):
        turns = [
            _turn(results, (index, number), prompt["id"], turn, alone=len(prompt["turns"]) == 1)
            for number, turn in enumerate(prompt["turns"])
        ]
        head = element(
            "header",
            element("h3", show_value(results, "prompts", index, "id")),
            element("span", prompt["category"], class_="chip"),
            element(
                "span",
                "accepted length ",
                show_value(results, "prompts", index, "accepted_length", form=two_decimals),
                class_="facts",
            ),
        )
        yield element("article", head, *turns, class_="answer", data_category=prompt["category"])


def _turn(
    results: Mapping[str, Any],
    place: tuple[int, int],
    name: str,
    turn: Mapping[str, Any],
    *,
    alone: bool,
) -> Markup:
    """What the user said in a turn, if the file has it, and the answer."""
    index, number = place
    path = ("prompts", index, "turns", number)
    facts: list[str] = [] if alone else [f"turn {number + 1}"]
    facts += [
        several(len(turn["token_ids"]), "token"),
        several(len(turn["rounds"]), "round"),
        join(show_value(results, *path, "seconds", form=two_decimals), " s"),
    ]
    if turn.get("plain_seconds") is not None:
        facts.append(
            join("plain ", show_value(results, *path, "plain_seconds", form=two_decimals), " s")
        )
    facts.append(
        "ended by a stop token" if turn["finish_reason"] == "stop" else "ended by the token limit"
    )
    words = separated(" \u00b7 ", facts)
    given = results["prompts"][index].get("given") or ()
    before = given[number] if number < len(given) else ()
    said = [_said(message["content"], message["role"]) for message in before]
    if turn.get("prompt") is not None:
        said.append(_said(turn["prompt"], "user" if before else None))
    where = f"Answer to {name}" + ("" if alone else f", turn {number + 1}")
    return join(element("p", words, *_flags(turn), class_="facts"), *said, _answer(turn, where))


def _said(text: str, role: str | None) -> Markup:
    """A message of the prompt; the role is shown where it is not the user's alone."""
    speaker = None if role is None else element("b", role)
    return element("div", speaker, text.replace("\r\n", "\n"), class_="prompt", dir="auto")


def _flags(turn: Mapping[str, Any]) -> Iterator[Markup]:
    divergence = turn.get("divergence")
    if divergence is not None:
        tie = divergence["near_tie"]
        said = f"differs from plain decoding at token {divergence['position'] + 1}"
        kind = "chip flag" if tie else "chip flag bad"
        yield join(" ", element("span", said + (" (near tie)" if tie else ""), class_=kind))
    repetition = turn["repetition"]
    if repetition["repetitive"]:
        said = f"loop of {repetition['longest_loop']} tokens"
        yield join(" ", element("span", said, class_="chip flag"))


def _answer(turn: Mapping[str, Any], where: str) -> Markup:
    tokens = turn.get("tokens")
    if tokens is None:
        return join(
            element("div", turn["text"], class_="tokens", dir="auto"),
            element("p", "This file does not record who wrote which token.", class_="soft"),
        )
    lengths = {key: len(values) for key, values in tokens.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f'{where}: "tokens" has lists of different lengths ({lengths}); expected one entry '
            "per generated token in each. Evaluate again to write results.json anew."
        )
    divergence = turn.get("divergence")
    differs = -1 if divergence is None else divergence["position"]
    columns = zip(
        tokens["texts"],
        tokens["depths"],
        tokens["rounds"],
        tokens["draft_probs"],
        tokens["target_probs"],
        strict=True,
    )
    spans = [
        element(
            "span",
            show_white_space(text),
            data_d=depth,
            data_r=round_number,
            data_q=None if draft_prob is None else _probability(draft_prob),
            data_p=None if target_prob is None else _probability(target_prob),
            class_="differs" if index == differs else None,
            tabindex=0 if index == 0 else None,
        )
        for index, (text, depth, round_number, draft_prob, target_prob) in enumerate(columns)
    ]
    return element(
        "div",
        *spans,
        class_="tokens",
        dir="auto",
        role="group",
        aria_label=f"{where}, {several(len(spans), 'token')}; arrow keys move between them",
    )


def _probability(value: float) -> str:
    return f"{value:.4g}"


def show_white_space(text: str) -> Markup:
    """A token with its white space marked; the text itself is kept, for copying and searching."""
    if not text:
        # A token that is part of a character has no text of its own.
        return element("i", class_="empty")
    # A separator that is shown by its name is not empty any more.
    blank = text.isspace() and show_invisible(text) == text
    parts: list[Markup] = []
    for piece in filter(None, _WHITE_SPACE.split(text)):
        if piece in WHITE_SPACE:
            parts.append(element("i", piece, class_=WHITE_SPACE[piece]))
        else:
            # Spaces beside letters show by the token's fill; alone they would be an empty box.
            parts.append(element("i", piece, class_="sp") if blank else escape(piece))
    return join(*parts)
