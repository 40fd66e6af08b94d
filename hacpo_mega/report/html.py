"""HTML from Python with escaping by construction: a plain string is text, only `Html` is markup."""

import html

from hacpo_mega.models.files.visible import visible


class Html(str):
    """Markup that is safe to write as it is."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Html:
    """`<name ...>children</name>`. Strings are escaped, also in attributes; `class_` and `aria_label` lose the `_`."""
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{pairs}>{join(*children)}</{name}>")


def join(*children: str) -> Html:
    """Children one after the other, text escaped."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children))


def table(head: list[str], rows: list[list[str]], **attributes: str) -> Html:
    """A table with a head; a wide one scrolls by itself instead of widening the page."""
    top = tag("thead", tag("tr", *(tag("th", cell) for cell in head)))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    return tag("div", tag("table", top, body, **attributes), class_="wide")


def _text(text: str) -> str:
    """Text as a browser shows it, without characters that hide or reorder their neighbours."""
    return html.escape(visible(text))
