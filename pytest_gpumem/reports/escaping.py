"""Escaping of texts for GitHub's Markdown and logs: all of a text is shown, and no part of it takes effect. Pure."""

from __future__ import annotations

import html
import re
import unicodedata

_UNSEEN = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
"""Unicode's categories of what is not seen, or changes what is: controls, marks of direction, lone surrogates, lines' ends."""
_MARKUP = re.compile(r"([\\`*_\[\]|~])")
_LIVE = re.compile(r"[@#$]|GH(?=-\d)|(?::(?=[\w+-]+:))", re.IGNORECASE)
"""Texts that GitHub acts on after Markdown is HTML, so that no backslash helps: mentions, references, formulas, emoji.

An element of its own keeps it apart from what follows, as GitHub's documentation shows for the dollar sign.
"""
_AT_THE_START = re.compile(r"^(\d{0,9})([-+.)](?=\s|$)|[-=](?=[-=\s]*$))")
"""The beginning of a list, ``- a`` and ``1. a``, and a line that draws a rule or underlines a title: ``---``, ``===``."""
_ADDRESS = re.compile(r"(:)(?=//)|((?<=www)\.)", re.IGNORECASE)


def visible(text: str, keep: str = "") -> str:
    r"""Return ``text`` with invisible characters but those in ``keep`` as Python writes them: ``\n``, ``\x1b``, ``\ud800``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in _UNSEEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def one_line(text: str) -> str:
    """Return ``text`` with each run of white space as one space."""
    return " ".join(text.split())


def code(text: str) -> str:
    """Return ``text`` as a code span. Not for a cell of a table: see `code_in_table`."""
    text = visible(text)
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    # Markdown takes a space away at both ends, unless there are nothing but spaces.
    padded = "`" in (text[0], text[-1]) or (text[0] == text[-1] == " " and not text.isspace())
    pad = " " if padded else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def code_in_table(text: str) -> str:
    """Return ``text`` as a code span in a cell of a table, where pipes have a backslash that is not part of the code."""
    return code(text).replace("|", "\\|")


def html_code(text: str) -> str:
    """Return ``text`` as code within HTML, as in the summary of a ``<details>``."""
    return f"<code>{html.escape(visible(text), quote=False)}</code>"


def plain(text: str) -> str:
    """Return ``text`` on one line, without any markup, mention or address in it taking effect."""
    escaped = _MARKUP.sub(r"\\\1", html.escape(visible(one_line(text)), quote=False))
    escaped = _AT_THE_START.sub(r"\1\\\2", escaped)
    escaped = _ADDRESS.sub(lambda found: f"\\{found.group()}", escaped)
    # The entities that `html.escape` made have no "#" in them.
    return _LIVE.sub(lambda found: f"<span>{found.group()}</span>", escaped)


def block(text: str, language: str = "text") -> str:
    """Return ``text`` as a block of code, line by line."""
    lines = [visible(line, keep="\t") for line in text.replace("\r\n", "\n").split("\n")]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def table(header: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Return a table in Markdown of escaped cells; numbers are aligned right, the columns in ``left`` left."""
    rule = ["---" if number in left else "---:" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def details(summary: str, body: str) -> str:
    """Return ``body`` folded away under ``summary``, which is HTML."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
