"""What a command says on standard output: lines that the stream can show, in colours where it has them."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

from pytest_gpumem.reports.layout import Span
from pytest_gpumem.reports.text_width import Screen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.reports.layout import Line, Style

_COLOURS: dict[Style | None, str] = {"good": "green", "bad": "red", "doubtful": "yellow"}


def screen() -> Screen:
    """What standard output can show. A file, a pipe and a CI's log have lines of any length."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Screen(width, getattr(sys.stdout, "encoding", None) or "utf-8")


def tell(lines: Iterable[Line | str]) -> None:
    """Write lines to standard output; texts among them are made legible first."""
    shows = screen()
    for line in lines:
        spans = (Span(shows.legible(line)),) if isinstance(line, str) else line
        click.echo("".join(_styled(span) for span in spans))


def _styled(span: Span) -> str:
    if span.style is None:
        return span.text
    return click.style(span.text, fg=_COLOURS.get(span.style), bold=True if span.style == "heading" else None)
