r"""Escape texts for GitHub's Markdown and logs, so every character is shown and no character is markup. Pure.

For example, `plain` turns ``*a* @user`` into ``\*a\* <span>@</span>user``, which GitHub shows as ``*a* @user``.
"""

from __future__ import annotations

import html
import re
import unicodedata

_UNSEEN = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
"""Unicode's categories for invisible characters: controls, direction marks, lone surrogates, line separators."""
_MARKUP = re.compile(r"([\\`*_\[\]|~])")
_LIVE = re.compile(r"[@#$]|GH(?=-\d)|(?::(?=[\w+-]+:))", re.IGNORECASE)
"""Texts that GitHub replaces in the rendered HTML: mentions, references, formulas, emoji.

A backslash does not prevent the replacement, because GitHub removes the backslash first. A ``<span>`` around the
characters prevents the replacement, as GitHub's documentation shows for the dollar sign.
"""
_AT_THE_START = re.compile(r"^(\d{0,9})([-+.)](?=\s|$)|[-=](?=[-=\s]*$))")
"""The beginning of a list item (``- a``, ``1. a``), or a line that Markdown shows as a rule or a title (``---``, ``===``)."""
_ADDRESS = re.compile(r"(:)(?=//)|((?<=www)\.)", re.IGNORECASE)


def visible(text: str, keep: str = "") -> str:
    r"""Return ``text`` with invisible characters escaped as in Python: ``\n``, ``\x1b``, ``\ud800``.

    Characters in ``keep`` are not escaped.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in _UNSEEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def one_line(text: str) -> str:
    """Return ``text`` with each run of white space replaced by a single space."""
    return " ".join(text.split())


def code(text: str) -> str:
    """Return ``text`` as a Markdown code span. For a table's cell, use `code_in_table`."""
    text = visible(text)
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    # Markdown strips a space from both ends of a code span, unless the span consists only of spaces.
    padded = "`" in (text[0], text[-1]) or (text[0] == text[-1] == " " and not text.isspace())
    pad = " " if padded else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def code_in_table(text: str) -> str:
    """Return ``text`` as a code span for a table cell, with a backslash before each pipe. GitHub removes the backslashes."""
    return code(text).replace("|", "\\|")


def html_code(text: str) -> str:
    """Return ``text`` as code in HTML, for example for a ``<summary>``."""
    return f"<code>{html.escape(visible(text), quote=False)}</code>"


def plain(text: str) -> str:
    """Return ``text`` on a single line, with markup, mentions and addresses escaped."""
    escaped = _MARKUP.sub(r"\\\1", html.escape(visible(one_line(text)), quote=False))
    escaped = _AT_THE_START.sub(r"\1\\\2", escaped)
    escaped = _ADDRESS.sub(lambda match: f"\\{match.group()}", escaped)
    # The entities above contain no "#" (`html.escape` writes ``&lt;``), so this replacement does not break them.
    return _LIVE.sub(lambda match: f"<span>{match.group()}</span>", escaped)


def block(text: str, language: str = "text") -> str:
    """Return ``text`` as a code block."""
    lines = [visible(line, keep="\t") for line in text.replace("\r\n", "\n").split("\n")]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def table(header: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Return a Markdown table from cells that are already escaped. Columns in ``left`` are aligned left, others right."""
    rule = ["---" if number in left else "---:" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def details(summary: str, body: str) -> str:
    """Return ``body`` as a folded section with the title ``summary``, which is HTML."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
