"""The page report.html in headless Chromium: what it shows, keys, filters, sizes and colours.

Every page that a test opens must stay without messages in the console, without errors, without
dialogs and without any request but the one for the file itself. Where there is no Chromium (or no
playwright) these tests are skipped; with DRAFTSMITH_REQUIRE_BROWSER=1 they fail instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.eval.page import render_page

pytestmark = pytest.mark.browser

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)
TIMEOUT_MS = 30_000
DEPTHS = tuple(range(10))

# WCAG 2: contrast of an element's text with the first filled box behind it.
CONTRAST = """
(element) => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const [r, g, b] = parse(color).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(element);
  const ink = element instanceof SVGElement ? style.fill : style.color;
  let box = element;
  const clear = (color) => parse(color)[3] === 0;
  while (clear(getComputedStyle(box).backgroundColor)) box = box.parentElement;
  const [a, b] = [luminance(ink), luminance(getComputedStyle(box).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""


@pytest.fixture(scope="module")
def results(page_results: ModuleType) -> dict[str, Any]:
    return json.loads(json.dumps(page_results.make_results()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    missing = None
    if importlib.util.find_spec("playwright") is None:
        missing = "playwright is not installed (pip install -e '.[dev]')"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing = "no chromium on PATH (Debian: apt install chromium)"
    if missing is not None:
        if os.environ.get("DRAFTSMITH_REQUIRE_BROWSER") == "1":
            pytest.fail(f"DRAFTSMITH_REQUIRE_BROWSER=1, but {missing}")
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield started
        started.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, results: dict[str, Any], tmp_path: Path) -> Iterator[Open]:
    """Factory `open_page(html=None, width=1200, ...)`; checks its pages at the end."""
    noticed: list[str] = []
    requests: list[str] = []
    visited: list[str] = []

    def open_(
        html: str | None = None, *, width: int = 1200, scheme: str = "light", touch: bool = False
    ) -> Any:
        path = tmp_path / f"report-{len(visited)}.html"
        path.write_bytes((html or render_page(results)).encode("utf-8"))
        context = stack.enter_context(
            browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch
            )
        )
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: noticed.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: noticed.append(f"error: {error}"))
        page.on("request", lambda request: requests.append(request.url))

        def refuse(dialog: Any) -> None:
            noticed.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("dialog", refuse)
        visited.append(path.as_uri())
        page.goto(path.as_uri())
        return page

    with ExitStack() as stack:
        yield open_
        assert not noticed
        assert requests == visited


def focused(page: Any) -> dict[str, Any]:
    """Index of the focused token in its answer, index of the answer, and what it says."""
    return page.evaluate(
        """() => {
          const one = document.activeElement;
          const answer = one.closest(".tokens");
          return {
            token: answer ? [...answer.children].indexOf(one) : null,
            answer: [...document.querySelectorAll(".tokens")].indexOf(answer),
            describedby: one.getAttribute("aria-describedby"),
          };
        }"""
    )


def enter_first_answer(page: Any) -> None:
    """Tab from the search box on, as a reader would."""
    page.locator("#search").focus()
    for _ in range(5):
        page.keyboard.press("Tab")
        if focused(page)["answer"] == 0:
            return
    raise AssertionError("Tab does not reach the first answer")


def note(page: Any) -> dict[str, str]:
    """The note at a token: its token under "", and its rows."""
    tip = page.locator("#tip")
    assert tip.is_visible()
    names = tip.locator("dt").all_inner_texts()
    values = tip.locator("dd").all_inner_texts()
    return {"": tip.locator("p").inner_text()} | dict(zip(names, values, strict=True))


def expected_note(results: dict[str, Any], prompt: int, turn: int, index: int) -> dict[str, str]:
    """What the note must say, from the JSON."""
    tokens = results["prompts"][prompt]["turns"][turn]["tokens"]
    depth, number = tokens["depths"][index], tokens["rounds"][index]
    said = {"": json.dumps(tokens["texts"][index], ensure_ascii=False)}
    said["Origin"] = (
        f"drafted at depth {depth}, accepted"
        if depth
        else "the target's own" + (", from prefill" if number == 0 else "")
    )
    said["Round"] = str(number) if number else "before the first"
    if depth:
        said["Draft probability"] = f"{tokens['draft_probs'][index]:.4g}"
    said["Target probability"] = f"{tokens['target_probs'][index]:.4g}"
    return said


def test_numbers_on_the_screen_are_those_of_the_json(
    open_page: Open, results: dict[str, Any], page_results: ModuleType
) -> None:
    page = open_page()
    shown = page.evaluate(
        "() => [...document.querySelectorAll('[data-key]')]"
        ".map((one) => [one.dataset.key, one.textContent])"
    )
    assert len(shown) > 60
    for key, text in shown:
        assert page_results.is_shown_as(page_results.value_at_pointer(results, key), text), key
    headline = page.locator(".card .big").all_inner_texts()
    overall = results["overall"]
    wanted = [
        overall["acceptance"]["accepted_length"],
        overall["acceptance"]["accepted_draft_tokens"],
        overall["timed"]["speed_up"],
    ]
    assert all(map(page_results.is_shown_as, wanted, headline))
    assert headline[3] == "Yes"


def test_plots_print_the_values_of_the_json(
    open_page: Open, results: dict[str, Any], page_results: ModuleType
) -> None:
    page = open_page()
    plots = {
        figure.locator("figcaption").inner_text(): figure.locator(".value").all_text_contents()
        for figure in page.locator("figure").all()
    }
    overall = results["overall"]
    acceptance = overall["acceptance"]
    counts = {int(key): count for key, count in acceptance["histogram"].items()}
    shares = [counts.get(n, 0) / sum(counts.values()) for n in range(1, max(counts) + 1)]
    pairs = zip(acceptance["joint_acceptance"], acceptance["conditional_acceptance"], strict=True)
    groups = [*results["by_category"].values(), overall]
    expected = {
        "Tokens per round": shares,
        "Acceptance by draft position": [value for pair in pairs for value in pair],
        "Accepted length by category": [one["acceptance"]["accepted_length"] for one in groups],
        "Time split": list(overall["seconds"].values()),
    }
    assert list(plots) == list(expected)
    for name, values in expected.items():
        texts = [text.partition(" s,")[0] for text in plots[name]]
        assert len(texts) == len(values)
        assert all(map(page_results.is_shown_as, values, texts)), name


def test_pointing_at_a_token_shows_where_it_comes_from(
    open_page: Open, results: dict[str, Any]
) -> None:
    page = open_page()
    depths = results["prompts"][1]["turns"][0]["tokens"]["depths"]
    answer = page.locator(".tokens").nth(2)
    for index in (0, depths.index(1), depths.index(4), depths.index(0, 5)):
        answer.locator(":scope > span").nth(index).hover()
        assert note(page) == expected_note(results, 1, 0, index)
        number = results["prompts"][1]["turns"][0]["tokens"]["rounds"][index]
        mates = results["prompts"][1]["turns"][0]["tokens"]["rounds"].count(number)
        assert page.locator(".mate").count() == mates
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    assert page.locator(".mate").count() == 0


def test_a_touch_opens_the_note_and_another_one_closes_it(
    open_page: Open, results: dict[str, Any]
) -> None:
    page = open_page(width=390, touch=True)
    page.locator(".tokens").nth(2).locator(":scope > span").nth(3).tap()
    assert note(page) == expected_note(results, 1, 0, 3)
    page.locator(".answer h3").nth(1).tap()
    assert page.locator("#tip").is_hidden()


def test_the_keyboard_walks_through_an_answer(open_page: Open, results: dict[str, Any]) -> None:
    page = open_page()
    enter_first_answer(page)
    assert focused(page) == {"token": 0, "answer": 0, "describedby": "tip"}
    assert note(page) == expected_note(results, 0, 0, 0)
    last = len(results["prompts"][0]["turns"][0]["tokens"]["texts"]) - 1
    for key, index in (
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("ArrowRight", last),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert focused(page)["token"] == index, key
        assert note(page) == expected_note(results, 0, 0, index)
        assert page.locator(".tokens").nth(0).locator("[tabindex]").count() == 1
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert (focused(page)["answer"], focused(page)["token"]) == (1, 0)
    # The place in an answer is kept.
    page.keyboard.press("Shift+Tab")
    assert (focused(page)["answer"], focused(page)["token"]) == (0, 1)


def test_arrows_up_and_down_change_the_line(open_page: Open) -> None:
    page = open_page(width=390)
    enter_first_answer(page)
    box = "() => { const b = document.activeElement.getClientRects()[0]; return [b.left, b.top]; }"
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    start = focused(page)["token"]
    left, top = page.evaluate(box)
    page.keyboard.press("ArrowDown")
    down_left, down_top = page.evaluate(box)
    assert 15 < down_top - top < 40
    assert abs(down_left - left) < 80
    page.keyboard.press("ArrowUp")
    assert abs(focused(page)["token"] - start) <= 1
    assert page.evaluate(box)[1] == pytest.approx(top, abs=1)


def test_escape_closes_the_note_and_keeps_the_place(open_page: Open) -> None:
    page = open_page()
    enter_first_answer(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert focused(page) == {"token": 1, "answer": 0, "describedby": None}
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible()
    page.evaluate("() => document.activeElement.blur()")
    assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize("width", [700, 1200])
def test_focus_can_be_seen_and_is_not_covered(open_page: Open, width: int) -> None:
    """Walking up, the focus comes to the top of the window, where the tool bar is."""
    page = open_page(width=width)
    page.set_viewport_size({"width": width, "height": 320})
    enter_first_answer(page)
    for key in ("Tab", "Tab", "End", *["ArrowUp"] * 12):
        page.keyboard.press(key)
        found = page.evaluate(
            """() => {
              const one = document.activeElement, box = one.getClientRects()[0];
              const top = document.elementFromPoint(box.left + 2, box.top + box.height / 2);
              return [getComputedStyle(one).outlineWidth, one === top || one.contains(top)];
            }"""
        )
        assert found == ["3px", True], key


def test_text_of_models_and_prompts_stays_text(open_page: Open, page_results: ModuleType) -> None:
    page = open_page()
    card = page.locator(".answer").last
    assert card.locator("h3").text_content() == "<i>hostile</i>"
    assert card.locator(".prompt").text_content() == page_results.HOSTILE_PROMPT
    shown = str(card.locator(".tokens").text_content())
    for text in ("<script>alert('model')</script></script>", "onerror=alert(2)", "&lt;b&gt;"):
        assert text in shown
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    card.locator(".tokens > span").nth(1).hover()
    assert note(page)[""] == '"</script>"'
    assert page.locator("#category option").last.inner_text() == 'odd "<category>" a/b~c'


def test_the_policy_stops_what_would_get_past_the_escaping(
    browser: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    html = render_page(results)
    attack = (
        "<script>document.title = 'taken'</script>"
        "<img src='data:,x' onerror=\"document.title = 'taken'\">"
        "<b id='styled' style='color: rgb(1, 2, 3)'>b</b>"
    )
    path = tmp_path / "report.html"
    path.write_bytes(html.replace("</main>", f"{attack}</main>").encode("utf-8"))
    with browser.new_context() as context:
        page = context.new_page()
        refused: list[str] = []
        page.on("console", lambda message: refused.append(message.text))
        page.goto(path.as_uri())
        assert page.title() != "taken"
        assert page.evaluate("() => getComputedStyle(styled).color") != "rgb(1, 2, 3)"
        assert len(refused) >= 3


def test_filters_leave_the_answers_that_fit(open_page: Open) -> None:
    page = open_page()

    def visible() -> list[str]:
        assert page.locator("#none-found").is_visible() == (
            page.locator(".answer:visible").count() == 0
        )
        return page.locator(".answer:visible h3").all_text_contents()

    everything = ["chat-1", "code-1", "maths-1", "loop-1", "<i>hostile</i>"]
    assert visible() == everything
    page.select_option("#category", label="maths")
    assert visible() == ["maths-1", "loop-1"]
    assert page.locator("#shown").inner_text() == "2 of 5 prompts"
    page.fill("#search", "Train COVERS")
    assert visible() == ["maths-1"]
    page.select_option("#category", label="all")
    page.fill("#search", "def running_mean(values):\n    total".partition("\n")[0])
    assert visible() == ["code-1"], "a search spans tokens"
    page.fill("#search", "nowhere to be found")
    assert visible() == []
    page.fill("#search", "")
    page.select_option("#category", label='odd "<category>" a/b~c')
    assert visible() == ["<i>hostile</i>"]


def test_depths_can_be_read_without_colour(open_page: Open) -> None:
    page = open_page()
    token = page.locator('.tokens > [data-d="3"]').first
    digit = "(one) => getComputedStyle(one, '::before').content"
    assert token.evaluate(digit) == "none"
    page.check("#depths")
    assert token.evaluate(digit) == '"3"'


def test_white_space_is_drawn(open_page: Open) -> None:
    page = open_page()
    mark = (
        "(one) => { const s = getComputedStyle(one, '::before'); return [s.display, s.content]; }"
    )
    for kind, sign in (("nl", "\u21b5"), ("tab", "\u21e5"), ("empty", "\u2205")):
        display, content = page.locator(f".tokens .{kind}").first.evaluate(mark)
        assert (display != "none", content) == (True, f'"{sign}"')
    dots = page.locator(".tokens .sp").first
    assert "gradient" in dots.evaluate("(one) => getComputedStyle(one).backgroundImage")


def test_copied_text_is_the_answer(open_page: Open, results: dict[str, Any]) -> None:
    """Marks of white space are drawn, never written."""
    page = open_page()
    text = (
        page.locator(".tokens")
        .nth(2)
        .evaluate(
            "(one) => { getSelection().selectAllChildren(one); return String(getSelection()); }"
        )
    )
    assert text == results["prompts"][1]["turns"][0]["text"]


def test_a_phone_scrolls_down_only(open_page: Open, page_results: ModuleType) -> None:
    for status in ("equal", "different"):
        page = open_page(render_page(page_results.make_results(status=status)), width=390)
        # Answers out of sight are laid out too, for the measurement.
        page.evaluate(
            "() => document.querySelectorAll('.answer')"
            ".forEach((one) => { one.style.contentVisibility = 'visible'; })"
        )
        page.evaluate("() => { document.querySelector('details').open = true; }")
        page.check("#depths")
        page.locator('.tokens > [data-d="5"]').last.hover()
        sizes = page.evaluate(
            """() => {
              const root = document.documentElement, tip = document.getElementById("tip");
              const table = document.querySelector(".box");
              return [
                root.scrollWidth - root.clientWidth,
                table.scrollWidth - table.clientWidth,
                tip.getBoundingClientRect().right - root.clientWidth,
                tip.getBoundingClientRect().left,
              ];
            }"""
        )
        assert sizes[0] <= 0, "the page scrolls sideways"
        assert sizes[1] > 50, "the table scrolls in its box"
        assert sizes[2] <= 0 <= sizes[3], "the note is within the window"


def test_both_colour_schemes_have_enough_contrast(
    open_page: Open, page_results: ModuleType
) -> None:
    backgrounds = []
    bad = page_results.make_results(status="different")
    for number, depth in enumerate(DEPTHS):
        bad["prompts"][0]["turns"][0]["tokens"]["depths"][number] = depth
    for scheme in ("light", "dark"):
        page = open_page(render_page(bad), scheme=scheme)
        backgrounds.append(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        page.locator(".tokens > span").nth(3).hover()
        kinds = (
            *(f'.tokens > [data-d="{depth}"]' for depth in DEPTHS),
            "h1", ".pair dt", ".chips li", ".card .small", ".card.bad .big", ".warnings li",
            ".warnings li.bad", "thead th", "td", ".chart text", ".chart .value", ".chart .key",
            ".intro", "output", "select", "#search", ".facts", ".flag", ".flag.bad", ".prompt",
            ".notes dt", ".notes dd", "#tip p", "#tip dd",
        )  # fmt: skip
        for kind in kinds:
            assert page.locator(kind).first.evaluate(CONTRAST) >= 4.5, (scheme, kind)
        fills = [
            page.locator(f'.tokens > [data-d="{depth}"]').first.evaluate(
                "(one) => getComputedStyle(one).backgroundColor"
            )
            for depth in range(9)
        ]
        assert len(set(fills)) == 9
    assert backgrounds[0] != backgrounds[1]
