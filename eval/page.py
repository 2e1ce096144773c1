"""report.html: an evaluation on one page, each token coloured by who wrote it.

The page is one file without network access: style and script lie in it, and its content security
policy allows nothing else, by their hashes, so that not even text that escaped the escaping could
run. It is drawn from the dictionary of results.json (`eval.report_json.to_json`) and shows nothing
that is not in it: each number is an element whose data-key is the JSON pointer (RFC 6901) of its
value. All text stands in the HTML; the script adds the note at a token, arrow keys and filters.

Parts: eval/page/ (template, styles, script), eval/answer_cards.py (the coloured text),
eval/charts.py (plots), eval/markup.py (escaping).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from draftsmith.eval.answer_cards import answer_cards, category_filter, color_legend
from draftsmith.eval.charts import (
    Curve,
    Format,
    Reference,
    Series,
    bar_chart,
    chart_style,
    grouped_bar_chart,
    line_chart,
    percent,
    row_chart,
    two_decimals,
)
from draftsmith.eval.markup import (
    MISSING,
    Markup,
    element,
    escape,
    join,
    separated,
    several,
    show_value,
    value_at,
)

MAX_BAR_POSITIONS = 8
"""Draft positions that bars are drawn for; a block of 16 gets curves."""
PLAIN = Reference(1.0, "plain decoding: 1")

VERDICTS = {
    "equal": ("good", "Yes"),
    "near_ties": ("warn", "Near ties"),
    "different": ("bad", "No"),
    "by_construction": ("good", "By construction"),
    "not_checked": ("warn", "Not checked"),
}
"""Status of the losslessness verdict -> class of its card, and its short name."""


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Writes the page; a file that is there already is replaced in one step."""
    aside = path.with_name(f"{path.name}.tmp")
    # Bytes: the hashes in the policy are of the text with bare newlines, on every system.
    aside.write_bytes(render_page(results).encode("utf-8"))
    aside.replace(path)


def render_page(results: Mapping[str, Any]) -> str:
    """Draws the page.

    Args:
        results: what `to_json` returns, or a results.json read back. Answers of older files without
            "tokens" are shown as text only.

    Returns:
        HTML, without characters that UTF-8 cannot write.

    Raises:
        ValueError: an answer's "tokens" have lists of different lengths.
    """
    style = _no_comments(chart_style() + _part("page.css"))
    script = _part("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        style=style,
        script=script,
        title=escape(_title(results)),
        heading=_heading(results),
        headline=_headline(results),
        warnings=_warnings(results) or "",
        categories=_category_table(results),
        charts=join(*_charts(results)),
        costs=_costs(results),
        category_filter=category_filter(results),
        legend=color_legend(results) or "",
        answers=join(*answer_cards(results)),
        conventions=_conventions(results),
        conditions=_conditions(results),
        definitions=_pairs(results["definitions"].items()),
        numbers=_numbers_as_json(results),
    )


def _part(name: str) -> str:
    folder = importlib.resources.files("draftsmith.eval") / "page"
    return (folder / name).read_text(encoding="utf-8")


def _no_comments(css: str) -> str:
    return re.sub(r"/\*.*?\*/\n*", "", css, flags=re.DOTALL)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _three_decimals(value: float) -> str:
    return f"{value:.3f}"


def _one_decimal(value: float) -> str:
    return f"{value:.1f}"


def _percent_tenths(value: float) -> str:
    return f"{value:.1%}"


def _times(value: float) -> str:
    return f"{value:.2f}x"


# ---- top of the page ------------------------------------------------------------------------


def _title(results: Mapping[str, Any]) -> str:
    return f"{results['draft'] or 'No draft model'} on {results['target']}"


def _drafting_words(settings: Mapping[str, Any]) -> str:
    """The drafting policy; files from before there were policies have a chain's length."""
    policy = settings.get("policy")
    if policy is None:
        return f"{settings['num_draft_tokens']} draft tokens"
    threshold = settings.get("confidence_threshold")
    cut = "" if threshold is None else f" cut at confidence {threshold:g}"
    return f"{policy['name']}{cut}"


def _sampling_words(sampling: Mapping[str, Any]) -> str:
    """Greedy or sampled, with every processor that does something."""
    neutral = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    active = [
        f"{name} {value}"
        for name, value in sampling.items()
        if name in neutral and value != neutral[name]
    ]
    mode = "sampled" if sampling["temperature"] else "greedy"
    return ", ".join([mode, *active])


def _heading(results: Mapping[str, Any]) -> Markup:
    settings, conditions = results["settings"], results["environment"]
    overall = results["overall"]
    models = element(
        "dl",
        element("dt", "Draft model"),
        element("dd", show_value(results, "draft") if results["draft"] else "none"),
        element("dt", "Target model"),
        element("dd", show_value(results, "target")),
        class_="pair",
    )
    chips = [
        _sampling_words(settings["sampling"]),
        _drafting_words(settings) if results["draft"] else None,
        f"up to {settings['max_new_tokens']} new tokens",
        f"{several(overall['num_prompts'], 'prompt')}, {several(overall['num_answers'], 'answer')}",
        f"batches of {settings['batch_size']}" if settings.get("batch_size", 1) > 1 else None,
        f"{conditions['dtype']} on {conditions['device']}",
    ]
    shown = [element("li", chip) for chip in chips if chip is not None]
    return join(
        element("p", "draftsmith evaluation", class_="soft"),
        element("h1", "What the draft model is worth" if results["draft"] else "Plain decoding"),
        models,
        element("ul", *shown, class_="chips"),
    )


def _card(name: str, big: str, small: str | None, *, kind: str = "", words: bool = False) -> Markup:
    """One headline number."""
    size = "big words" if words else "big"
    parts = [element("dt", name), element("dd", big, class_=size)]
    if small is not None:
        parts.append(element("dd", small, class_="small"))
    return element("div", *parts, class_=f"card {kind}".strip())


def _headline(results: Mapping[str, Any]) -> Markup:
    overall = ("overall",)
    acceptance = (*overall, "acceptance")
    rounds = join(
        "tokens per round, over ",
        show_value(results, *acceptance, "num_rounds"),
        " rounds; plain decoding has 1",
    )
    drafted = "of these were drafted; the rest is the target\u2019s own"
    if results["overall"]["timed"] is None:
        speed = "no answer was decoded both ways"
        big = escape(MISSING)
    else:
        speed = join(
            show_value(results, *overall, "timed", "tokens_per_second", form=_one_decimal),
            " against ",
            show_value(results, *overall, "timed", "plain_tokens_per_second", form=_one_decimal),
            " tokens/s, on ",
            show_value(results, *overall, "timed", "answers"),
            " answers decoded both ways",
        )
        big = show_value(results, *overall, "timed", "speed_up", form=_times)
    kind, verdict = VERDICTS.get(results["overall"]["lossless"]["status"], ("warn", "Unknown"))
    return element(
        "dl",
        _card(
            "Accepted length",
            show_value(results, *acceptance, "accepted_length", form=two_decimals),
            rounds,
        ),
        _card(
            "Accepted draft tokens",
            show_value(results, *acceptance, "accepted_draft_tokens", form=two_decimals),
            drafted,
        ),
        _card("Speed-up", big, speed),
        _card(
            "Lossless",
            verdict,
            show_value(results, *overall, "lossless", "text"),
            kind=kind,
            words=True,
        ),
        class_="cards",
    )


def _warnings(results: Mapping[str, Any]) -> Markup | None:
    """What a reader must know before the numbers are believed."""
    found = [
        element(
            "li",
            show_value(results, "warnings", index),
            class_="bad" if text.startswith("NOT LOSSLESS") else None,
        )
        for index, text in enumerate(results.get("warnings", ()))
    ]
    timed = results["overall"]["timed"]
    if results["draft"] and timed is not None and timed["speed_up"] < 1.0:
        found.append(
            element(
                "li", "Slower than plain decoding under these conditions: see the time split below."
            )
        )
    return element("ul", *found, class_="warnings") if found else None


# ---- tables ---------------------------------------------------------------------------------


def _table(
    name: str, heads: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str] = ()
) -> Markup:
    """A table in a box of its own that scrolls where the page is narrow."""

    def cells(row: Sequence[str]) -> Markup:
        return element(
            "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
        )

    head = element("tr", *(element("th", head, scope="col") for head in heads))
    foot = element("tfoot", cells(last)) if last else None
    table = element(
        "table", element("thead", head), element("tbody", *(cells(row) for row in rows)), foot
    )
    return element("div", table, class_="box", tabindex=0, role="region", aria_label=name)


def _group_row(results: Mapping[str, Any], name: str, *path: str) -> list[str]:
    def cell(*keys: str, form: Format | None = None) -> Markup:
        return show_value(results, *path, *keys, form=form)

    verdict = value_at(results, (*path, "lossless"))
    mark = {"different": "NO ", "near_ties": "~ "}.get(verdict["status"], "")
    lossless = (
        join(mark, cell("lossless", "equal"), "/", cell("lossless", "checked"))
        if verdict["checked"]
        else escape("sampled" if verdict["status"] == "by_construction" else MISSING)
    )
    timed = value_at(results, (*path, "timed"))
    own_speed = ("tokens_per_second",) if timed is None else ("timed", "tokens_per_second")
    return [
        name,
        cell("num_prompts"),
        cell("new_tokens"),
        cell("acceptance", "accepted_length", form=two_decimals),
        cell("acceptance", "accepted_draft_tokens", form=two_decimals),
        cell(*own_speed, form=_one_decimal),
        cell("timed", "plain_tokens_per_second", form=_one_decimal),
        cell("timed", "speed_up", form=_times),
        lossless,
        cell("repetitive_answers"),
    ]


def _category_table(results: Mapping[str, Any]) -> Markup:
    heads = (
        "Category",
        "Prompts",
        "Tokens",
        "Accepted length",
        "Accepted drafts",
        "Tokens/s",
        "Plain tokens/s",
        "Speed-up",
        "Equal to plain",
        "In a loop",
    )
    rows = [_group_row(results, name, "by_category", name) for name in results["by_category"]]
    return _table("Numbers by category", heads, rows, _group_row(results, "All", "overall"))


def _conventions(results: Mapping[str, Any]) -> Markup:
    """Numbers of other tools, from the same trace: they differ by definition."""
    named: list[tuple[str, tuple[str, ...]]] = [
        ("accepted_length", ("acceptance", "accepted_length")),
        ("macro_accepted_length", ("macro_accepted_length",)),
        ("accepted_length_vllm", ("acceptance", "accepted_length_vllm")),
        ("accepted_length_spec_bench", ("acceptance", "accepted_length_spec_bench")),
        ("prompt_lookup", ("prompt_lookup", "accepted_length")),
    ]
    rows = [
        [element("code", name), show_value(results, "overall", *path, form=_three_decimals)]
        for name, path in named
    ]
    return join(
        element("p", "How each is counted stands under Definitions.", class_="soft"),
        _table("Conventions", ("Convention", "Tokens per round"), rows),
        _spec_bench_table(results),
    )


def _spec_bench_table(results: Mapping[str, Any]) -> Markup | None:
    """Spec-Bench's own groups and means; None in files that lack them."""
    groups = results.get("spec_bench")
    if not groups:
        return None
    heads = ("Spec-Bench group", "Questions", "Mean accepted tokens", "Tokens/s", "Speed-up")
    columns: list[tuple[str, Format | None]] = [
        ("num_questions", None),
        ("mean_accepted_tokens", _three_decimals),
        ("tokens_per_second", _one_decimal),
        ("speed_up", _times),
    ]
    rows = [
        [name, *(show_value(results, "spec_bench", name, key, form=form) for key, form in columns)]
        for name in groups
    ]
    return _table("Spec-Bench groups", heads, rows)


# ---- plots ----------------------------------------------------------------------------------


def _charts(results: Mapping[str, Any]) -> Iterator[Markup]:
    overall = results["overall"]
    acceptance = overall["acceptance"]
    # Keys are text in a file and numbers in a dictionary that was never written.
    counts = {int(key): count for key, count in acceptance["histogram"].items()}
    if counts:
        emitted = range(1, max(counts) + 1)
        total = sum(counts.values())
        yield bar_chart(
            "Tokens per round",
            [str(number) for number in emitted],
            [counts.get(number, 0) / total for number in emitted],
            x_label="tokens that a round added to the text",
            y_label="share of rounds",
            value_format=percent,
        )
    if acceptance["joint_acceptance"]:
        yield _position_chart(acceptance)
    groups = results["by_category"]
    lengths = [group["acceptance"]["accepted_length"] for group in groups.values()]
    yield row_chart(
        "Accepted length by category",
        [*groups, "All"],
        [*lengths, acceptance["accepted_length"]],
        x_label="tokens per round",
        reference=PLAIN,
    )
    seconds = overall["seconds"]
    whole = sum(seconds.values())
    yield row_chart(
        "Time split",
        list(seconds),
        list(seconds.values()),
        x_label="seconds, all answers",
        value_format=lambda part: f"{part:.1f} s" + (f", {part / whole:.0%}" if whole else ""),
    )


def _position_chart(acceptance: Mapping[str, Any]) -> Markup:
    """Joint and conditional acceptance: bars, or curves where there are too many for bars."""
    title, x_label, y_label = "Acceptance by draft position", "draft position", "share accepted"
    series = [
        Series("joint: this one and all before", acceptance["joint_acceptance"]),
        Series("conditional: given all before", acceptance["conditional_acceptance"]),
    ]
    positions = range(1, len(series[0].values) + 1)
    if len(positions) <= MAX_BAR_POSITIONS:
        return grouped_bar_chart(
            title,
            [str(position) for position in positions],
            series,
            x_label=x_label,
            y_label=y_label,
            value_format=percent,
            y_max=1.0,
        )
    curves = [
        Curve(
            one.name,
            [(x, y) for x, y in zip(positions, one.values, strict=True) if y is not None],
        )
        for one in series
    ]
    return line_chart(title, curves, x_label=x_label, y_label=y_label, y_format=percent, y_max=1.0)


def _costs(results: Mapping[str, Any]) -> Markup:
    """What the plots do not show of a round and of the texts."""
    overall = results["overall"]
    parts: list[str] = []
    if overall.get("round_overhead") is not None:
        cost = show_value(results, "overall", "round_overhead", form=_percent_tenths)
        parts.append(join("A round costs ", cost, " beyond its forwards."))
    if overall["acceptance"].get("verified_nodes") is not None:
        nodes = show_value(results, "overall", "acceptance", "verified_nodes", form=_one_decimal)
        parts.append(join("The target reads ", nodes, " drafted tokens per round."))
    if overall.get("distinct_ratio") is not None:
        distinct = show_value(results, "overall", "distinct_ratio", form=percent)
        loop = show_value(results, "overall", "longest_loop")
        parts.append(
            join(distinct, " of an answer\u2019s tokens are distinct; longest loop ", loop, ".")
        )
    return element("p", separated(" ", parts), class_="soft")


# ---- bottom of the page ---------------------------------------------------------------------


def _pairs(entries: Any, *, form: Callable[[Any], str] = str) -> Markup:
    """Names and what belongs to them."""
    parts = [
        part for name, text in entries for part in (element("dt", name), element("dd", form(text)))
    ]
    return element("dl", *parts, class_="notes")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names; an empty mapping is "none"."""
    if not isinstance(value, Mapping):
        yield name, value
    elif not value:
        yield name, "none"
    else:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _conditions(results: Mapping[str, Any]) -> Markup:
    def written(value: Any) -> str:
        return MISSING if value is None else str(value)

    entries = [
        *_flat(results["environment"]),
        *_flat(results["settings"]),
        *((key, results[key]) for key in ("template", "warm_up") if key in results),
        *_flat(results.get("simulated") or {}, "simulated"),
    ]
    return _pairs(entries, form=written)


def _numbers_as_json(results: Mapping[str, Any]) -> Markup:
    """Everything but the answers, to copy."""
    numbers = {key: value for key, value in results.items() if key != "prompts"}
    text = json.dumps(numbers, indent=1, ensure_ascii=False)
    return element(
        "details",
        element("summary", "Show (the answers are in results.json)"),
        element("pre", element("code", text, id="json"), tabindex=0),
    )
