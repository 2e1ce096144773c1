"""A self-contained HTML page of tables and charts, without script; colours are the report's."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence

from draftsmith.eval.charts import chart_style
from draftsmith.eval.markup import Markup, element


def render_plain_page(kind: str, title: str, *sections: str | None) -> str:
    """Draws the page; its content security policy allows its own style and nothing else.

    Args:
        kind: small line above the title, such as "draftsmith profile".
        title: of the page.
        sections: markup; other text is escaped, None is left out.

    Returns:
        HTML.
    """
    folder = importlib.resources.files("draftsmith.eval") / "page"
    style = chart_style() + (folder / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(style)),
    )
    header = element("header", element("p", kind, class_="soft"), element("h1", title))
    body = element("body", header, element("main", *sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def number_table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table in a box that scrolls where the page is narrow; each row starts with its heading."""
    head = element("tr", *(element("th", one, scope="col") for one in heads))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", one) for one in row[1:]))
        for row in rows
    ]
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="box", tabindex=0, role="region", aria_label=name)
