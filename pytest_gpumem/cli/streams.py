"""What commands read and write: the reports that they are given, lines on standard output, and errors of usage."""

from __future__ import annotations

import glob
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.reports.layout import Screen, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.reports.layout import Line, Style
    from pytest_gpumem.reports.session_report import SessionReport


class InputError(click.ClickException):
    """Something that was given cannot be used; the message says what, and what would be right.

    Each of ``lines`` is made legible, since ids of tests may be in it: a line of theirs could command whoever reads logs.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
        super().__init__("\n".join(map(screen.legible, lines)))


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


def read_report(path: Path) -> SessionReport:
    """The report in a JSON file. Raises `InputError`, which names the file."""
    from pytest_gpumem.reports.json_report import ReportError, from_json

    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name the files in it: {path}/*.json") from None
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; `pytest --gpumem-report={path}` writes one") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8, and so no JSON report of pytest-gpumem") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return from_json(text, str(path))
    except ReportError as error:
        raise InputError(str(error)) from None


def files_of(given: Sequence[str]) -> list[Path]:
    """The files that are named, patterns taken apart where no shell did. Raises `InputError`.

    A file that is given twice is a mistake: it would count for two shards.
    """
    found: dict[Path, str] = {}
    for name in given:
        if Path(name).exists() or not glob.has_magic(name):
            paths = [name]
        else:
            paths = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - a pattern may be absolute
            if not paths:
                raise InputError(f"{name} matches no file")
        for path in paths:
            real = Path(path).resolve()
            if real in found:
                raise InputError(f"{path} is given twice{'' if found[real] == path else f', also as {found[real]}'}")
            found[real] = path
    return [Path(path) for path in found.values()]
