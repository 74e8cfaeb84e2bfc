"""Text from tests as a page shows it; that nothing of it is markup is the template's part."""

from __future__ import annotations

from pytest_gpumem.reports.escaping import visible


def in_lines(text: str) -> str:
    """``text`` with its lines and tabs as they are; what cannot be seen, or held by a file, as an escape."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")


def in_one_line(text: str) -> str:
    """``text`` with newlines and tabs as escapes, too: an id in a table."""
    return visible(text)
