"""The page report.html as text: what is in it, and that a model's text stays in its place.

tests/test_page_browser.py drives the same page in a browser.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.eval import answer_cards
from draftsmith.eval.answer_cards import show_white_space
from draftsmith.eval.charts import (
    Curve,
    Reference,
    Series,
    axis_ticks,
    bar_chart,
    grouped_bar_chart,
    line_chart,
    percent,
    row_chart,
)
from draftsmith.eval.markup import Markup, element, escape, show_invisible
from draftsmith.eval.page import render_page, write_page

ROOT = Path(__file__).parent.parent
VOID = {"meta", "link", "input"}


@pytest.fixture(scope="module")
def results(page_results: ModuleType) -> dict[str, Any]:
    return json.loads(json.dumps(page_results.make_results()))


class Page(HTMLParser):
    """A strict reader: every element is closed in its place, and keeps its attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(html)
        self.close()
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.elements[index][2].append(data)

    def having(self, attribute: str) -> list[tuple[dict[str, str | None], str]]:
        """(attributes, text) of the elements with an attribute."""
        return [(found, "".join(text)) for _, found, text in self.elements if attribute in found]

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(found, "".join(text)) for name, found, text in self.elements if name == tag]

    def tokens(self) -> list[tuple[dict[str, str | None], str]]:
        """Tokens of all answers, in order; the legend has swatches without a round."""
        return [(found, text) for found, text in self.having("data-d") if "data-r" in found]


@pytest.fixture(scope="module")
def page(results: dict[str, Any]) -> Page:
    return Page(render_page(results))


@pytest.mark.parametrize("status", ["equal", "near_ties", "different"])
def test_each_number_shown_is_the_one_in_the_json(page_results: ModuleType, status: str) -> None:
    found = json.loads(json.dumps(page_results.make_results(status=status)))
    shown = Page(render_page(found)).having("data-key")
    for attributes, text in shown:
        value = page_results.value_at_pointer(found, attributes["data-key"])
        assert page_results.is_shown_as(value, text), (
            f"{attributes['data-key']}: {value!r} as {text!r}"
        )
    keys = {attributes["data-key"] for attributes, _ in shown}
    groups = ["/overall", *(f"/by_category/{name}" for name in ("chat", "code", "maths"))]
    for group in groups:
        for key in ("acceptance/accepted_length", "timed/speed_up", "lossless/equal"):
            assert f"{group}/{key}" in keys
    assert '/by_category/odd "<category>" a~1b~0c/num_prompts' in keys


def test_the_numbers_at_the_bottom_are_the_json(results: dict[str, Any], page: Page) -> None:
    ((_, text),) = [found for found in page.having("id") if found[0]["id"] == "json"]
    assert json.loads(text) == {key: value for key, value in results.items() if key != "prompts"}


def test_results_from_memory_and_from_a_file_give_the_same_page(page_results: ModuleType) -> None:
    """Histograms have numbers as keys in memory and text in a file."""
    memory = page_results.make_results()
    assert render_page(memory) == render_page(json.loads(json.dumps(memory)))


def test_each_token_says_its_depth_round_and_probabilities(
    results: dict[str, Any], page: Page
) -> None:
    expected = [
        entry
        for prompt in results["prompts"]
        for turn in prompt["turns"]
        for entry in zip(*turn["tokens"].values(), strict=True)
    ]
    shown = page.tokens()
    assert len(shown) == len(expected) > 300
    for (attributes, text), (wanted, depth, number, draft, target) in zip(
        shown, expected, strict=True
    ):
        assert text == show_invisible(wanted)
        assert (attributes["data-d"], attributes["data-r"]) == (str(depth), str(number))
        assert attributes["data-p"] == f"{target:.4g}"
        assert attributes.get("data-q") == (None if draft is None else f"{draft:.4g}")
    depths = {attributes["data-d"] for attributes, _ in shown}
    assert depths == {"0", "1", "2", "3", "4", "5"}


def test_one_token_of_each_answer_takes_part_in_tab(results: dict[str, Any], page: Page) -> None:
    answers = sum(len(prompt["turns"]) for prompt in results["prompts"])
    assert [text for found, text in page.tokens() if found.get("tabindex") == "0"] == [
        turn["tokens"]["texts"][0] for prompt in results["prompts"] for turn in prompt["turns"]
    ]
    assert answers == 6


def test_text_of_models_and_prompts_stays_text(page_results: ModuleType, page: Page) -> None:
    assert len(page.named("script")) == 1
    assert not page.named("img")
    assert {text for _, text in page.named("b")} == {"system", "user"}
    prompts = [text for found, text in page.having("class") if found["class"] == "prompt"]
    assert page_results.HOSTILE_PROMPT in prompts
    assert "systemYou are <b>brief</b>." in prompts
    for _, found, _ in page.elements:
        assert not [name for name in found if name.startswith("on") or name == "style"]


def test_the_page_loads_nothing_and_lets_nothing_else_run(page: Page) -> None:
    (policy,) = [str(found["content"]) for found, _ in page.named("meta") if "http-equiv" in found]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed.pop("default-src") == "'none'"
    assert set(allowed) == {"style-src", "script-src", "img-src", "base-uri", "form-action"}
    for tag in ("style", "script"):
        ((_, text),) = page.named(tag)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
        assert "http" not in text
        assert "url(" not in text
    links = [
        found[name] for _, found, _ in page.elements for name in ("src", "href") if name in found
    ]
    assert sorted(map(str, links)) == ["#answers", "data:,"]


def test_ids_are_unique_and_every_reference_has_its_element(page: Page) -> None:
    ids = [found["id"] for found, _ in page.having("id")]
    assert len(ids) == len(set(ids))
    for name in ("aria-labelledby", "aria-describedby"):
        references = [found[name] for found, _ in page.having(name)]
        assert references
        assert set(references) <= set(ids)


def test_the_verdict_and_the_warnings_are_in_the_headline(page_results: ModuleType) -> None:
    good, bad = (
        render_page(page_results.make_results(status=status)) for status in ("equal", "different")
    )
    assert ">Yes<" in good
    assert '<li class="bad">' not in good
    assert ">No<" in bad
    assert '<li class="bad">' in bad
    for html in (good, bad):
        assert "answers run in a loop" in html
    assert [text for found, text in Page(bad).tokens() if found.get("class") == "differs"] == [
        "\n\n"
    ]


def test_an_older_file_without_origins_shows_plain_answers(results: dict[str, Any]) -> None:
    older = copy.deepcopy(results)
    for prompt in older["prompts"]:
        for turn in prompt["turns"]:
            del turn["tokens"], turn["prompt"]
        del prompt["given"]
    for key in ("warnings", "spec_bench", "simulated", "template"):
        del older[key]
    page = Page(render_page(older))
    assert not page.having("data-d")
    texts = [text for found, text in page.having("class") if found["class"] == "tokens"]
    assert texts[0] == results["prompts"][0]["turns"][0]["text"]


def test_origins_of_another_length_are_refused(results: dict[str, Any]) -> None:
    broken = copy.deepcopy(results)
    broken["prompts"][1]["turns"][0]["tokens"]["depths"].pop()
    with pytest.raises(ValueError, match=r"Answer to code-1: .*different lengths.*'depths': 98"):
        render_page(broken)


def test_plain_decoding_has_a_page_too(results: dict[str, Any]) -> None:
    plain = copy.deepcopy(results)
    plain["draft"] = None
    group = plain["overall"]
    group["timed"] = None
    group["acceptance"]["joint_acceptance"] = group["acceptance"]["conditional_acceptance"] = []
    html = render_page(plain)
    assert "no answer was decoded both ways" in html
    assert "Acceptance by draft position" not in html
    assert "chain of" not in Page(html).named("ul")[0][1]


def test_long_blocks_get_curves_instead_of_bars(results: dict[str, Any]) -> None:
    long = copy.deepcopy(results)
    acceptance = long["overall"]["acceptance"]
    acceptance["joint_acceptance"] = [0.9**i for i in range(16)]
    acceptance["conditional_acceptance"] = [0.9] * 15 + [None]
    html = render_page(long)
    assert html.count('class="marker s1"') == 16 + 1
    assert html.count('class="marker s2"') == 15 + 1
    assert 'class="curve s1"' not in render_page(results)


def test_deeper_tokens_than_colours_are_in_the_legend(results: dict[str, Any]) -> None:
    deep = copy.deepcopy(results)
    deep["prompts"][0]["turns"][0]["tokens"]["depths"][3] = 11
    legend = [
        text for found, text in Page(render_page(deep)).having("data-d") if "data-r" not in found
    ]
    assert legend == ["target\u2019s own", "depth 1", *"234567", "8+"]


def test_every_colour_of_a_depth_is_in_the_style_sheet() -> None:
    css = (ROOT / "eval/page/page.css").read_text(encoding="utf-8")
    for depth in range(1, answer_cards.DEEPEST_COLOR + 1):
        assert css.count(f"--depth-{depth}:") == 2, "one for light, one for dark"
        assert f"var(--depth-{depth})" in css


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the", "the"),
        (" the", " the"),
        (" ", '<i class="sp"> </i>'),
        ("    ", '<i class="sp">    </i>'),
        ("\n", '<i class="nl">\n</i>'),
        (".\n\n", '.<i class="nl">\n</i><i class="nl">\n</i>'),
        ("\n  ", '<i class="nl">\n</i><i class="sp">  </i>'),
        ("\t", '<i class="tab">\t</i>'),
        ("", '<i class="empty"></i>'),
        ("\r", "[U+000D]"),
        ("\u2028", "[U+2028]"),
        ("<b>\n", '&lt;b&gt;<i class="nl">\n</i>'),
    ],
)
def test_white_space_can_be_seen(text: str, shown: str) -> None:
    assert show_white_space(text) == shown


def test_markup_escapes_all_but_itself() -> None:
    assert escape("<a href='x'>&") == "&lt;a href=&#x27;x&#x27;&gt;&amp;"
    inner = element("b", "<", class_='"><script>')
    assert inner == '<b class="&quot;&gt;&lt;script&gt;">&lt;</b>'
    assert element("p", inner, "&", None, data_key=0, hidden=True, lang=None) == (
        f'<p data-key="0" hidden>{inner}&amp;</p>'
    )
    assert element("i", title=Markup("<&>")) == '<i title="&lt;&amp;&gt;"></i>'
    assert escape("a\u202eb\x00\ud800\u200b\tc\n") == "a[U+202E]b[U+0000][U+D800][U+200B]\tc\n"
    family = "\U0001f469\u200d\U0001f467"
    assert escape(family) == family, "a joiner belongs to the emoji"


def test_the_page_replaces_an_older_one_and_is_utf8(
    results: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    write_page(results, path)
    assert path.read_bytes().decode("utf-8") == render_page(results)
    assert b"\r" not in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_long_reports_stay_light(page_results: ModuleType) -> None:
    """100 answers of 300 tokens are then below 4 MB."""
    html = render_page(page_results.make_results(extra=30))
    tokens = html.count("<span data-d=") - 6
    assert tokens > 9_000
    assert len(html) / tokens < 120, "characters per token, everything included"


def test_the_wheel_takes_every_part_of_the_page() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = setup["tool"]["setuptools"]["package-data"]["draftsmith.eval"]
    parts = sorted((ROOT / "eval/page").iterdir())
    assert len(parts) == 4
    for part in parts:
        assert any(fnmatch(f"page/{part.name}", pattern) for pattern in patterns), part


# ---- charts ---------------------------------------------------------------------------------


def printed(figure: str) -> list[str]:
    return re.findall(r'class="value">([^<]*)<', figure)


def test_bars_are_as_high_as_their_values_and_say_them() -> None:
    figure = grouped_bar_chart(
        "T",
        ["a", "b"],
        [Series("one", [0.25, 1.0]), Series("two", [None, 0.5])],
        x_label="x",
        y_label="y",
        value_format=percent,
        y_max=1.0,
    )
    assert printed(figure) == ["25%", "-", "100%", "50%"]
    heights = re.findall(r'height="([\d.]+)" rx="2" class="bar s\d"', figure)
    full = float(heights[2])
    assert [float(height) / full for height in heights[:4]] == pytest.approx([0.25, 0, 1, 0.5])
    assert "one: a 25%, b 100%; two: a not measured, b 50%</desc>" in figure


def test_rows_are_as_long_as_their_values_and_keep_long_names() -> None:
    name = "a very long category, <really> & truly"
    figure = row_chart("T", [name, "b"], [2.0, 4.0], x_label="x", reference=Reference(1.0, "plain"))
    assert printed(figure) == ["2.00", "4.00"]
    lengths = [float(width) for width in re.findall(r' width="([\d.]+)" height="19.0"', figure)]
    assert lengths[0] / lengths[1] == pytest.approx(0.5, abs=0.01)
    assert f"<title>{escape(name)}</title>" in figure
    assert "<really>" not in figure
    assert "plain</span>" in figure


def test_many_bars_widen_the_picture_so_that_their_values_fit() -> None:
    labels = [str(i) for i in range(40)]
    figure = bar_chart("T", labels, [1.0] * 40, x_label="x", y_label="y")
    assert 'class="scroll wide"' in figure
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*class="value"', figure)]
    steps = [b - a for a, b in zip(places, places[1:], strict=False)]
    assert min(steps) > len("1.00") * 6.5


def test_points_of_a_curve_lie_where_their_numbers_are() -> None:
    figure = line_chart(
        "T",
        [Curve("one", [(0, 0.0), (5, 0.5), (10, 1.0)]), Curve("two", [(0, 1.0), (10, 0.0)])],
        x_label="steps",
        y_label="y",
    )
    path = re.findall(r'<path d="M([^"]*)" class="curve s1"', figure)[0]
    (x0, y0), (x1, y1), (x2, y2) = [
        tuple(map(float, point.split(","))) for point in path.split(" L")
    ]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert y2 < y1 < y0
    assert "<title>one: 0.50 at 5</title>" in figure
    assert "two: 1.00 at steps 0, 0.00 at steps 10</desc>" in figure


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.003), (0, 4.09), (1, 9), (-3, 12), (0, 1e6), (2, 2), (0, 0)]
)
def test_ticks_are_even_few_and_enclose(low: float, high: float) -> None:
    ticks = axis_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 9
    steps = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_charts_refuse_what_they_cannot_draw() -> None:
    names = {"x_label": "x", "y_label": "y"}
    with pytest.raises(ValueError, match="'T': series 'y' has 1 values for 2 labels"):
        bar_chart("T", ["a", "b"], [1.0], **names)
    with pytest.raises(ValueError, match="0 labels and 1 series"):
        bar_chart("T", [], [], **names)
    with pytest.raises(ValueError, match="below 0 or NaN"):
        bar_chart("T", ["a"], [float("nan")], **names)
    with pytest.raises(ValueError, match="1 labels and 5 series"):
        grouped_bar_chart("T", ["a"], [Series("s", [1.0])] * 5, **names)
    with pytest.raises(ValueError, match="expected 1 to 4 with points"):
        line_chart("T", [Curve("empty", [])], **names)
