"""Markdown as GitHub shows it: tables and raw HTML, read back into tags and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
_VOID = ("br", "hr", "img", "input")


@dataclass
class Page:
    """``tags`` are all that begin, but for the spans that keep characters apart; ``rows`` are those of tables."""

    tags: list[str] = field(default_factory=list)
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.attributes += attrs
        if tag != "span":
            self.page.tags.append(tag)
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "tr":
            self.page.rows.append([])
        if tag in ("th", "td"):
            self.page.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID, f"<{tag}/> is not closed"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> closes {self._open[-1]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.page.text += data
        if "td" in self._open or "th" in self._open:
            self.page.rows[-1][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment hides {data!r}")

    def close(self) -> None:
        super().close()
        assert not self._open, f"{self._open} are not closed"


def read(markdown: str) -> Page:
    """The page that ``markdown`` becomes. Fails where its HTML is not well-formed, or hides something."""
    reader = _Reader()
    reader.feed(_MARKDOWN.render(markdown))
    reader.close()
    return reader.page
