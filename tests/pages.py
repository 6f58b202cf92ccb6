"""The structure of a page, for tests."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Structure(HTMLParser):
    """Checks that what is opened is closed, and collects ids and references."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labels: list[str | None] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.references += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "data")
        ]
        self.references += [
            match for value in values.values() for match in re.findall(r"url\(([^)]*)\)", value or "")
        ]
        if tag == "svg":
            self.labels.append(values.get("aria-label"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
