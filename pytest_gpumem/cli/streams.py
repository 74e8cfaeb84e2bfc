"""Input and output of commands: reports that they read, lines on standard output, and errors of usage."""

from __future__ import annotations

import glob
import shutil
import sys
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.cli.files import name_of, path_of, read_text
from pytest_gpumem.reports.errors import ReportError
from pytest_gpumem.reports.json_report import from_json
from pytest_gpumem.reports.layout import Screen
from pytest_gpumem.terminals import can_redraw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.reports.layout import Line, Style
    from pytest_gpumem.reports.session_report import SessionReport
_Function = TypeVar("_Function", bound="Callable[..., Any]")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class InputError(click.ClickException):
    """An error about an input. The message names the input, and a correct one.

    Each of ``lines`` is sanitized, because a test's id in it could contain a command for the log of a CI.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
        super().__init__("\n".join(map(screen.legible, lines)))


class WholeNumber(click.IntRange):
    """A whole number in ASCII digits, because Python also reads the digits of other scripts."""

    def get_metavar(self, *_context: Any, **_parameter: Any) -> str:
        """Return the placeholder for its values in a help text."""
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.isascii():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


def format_option(*formats: str) -> Callable[[_Function], _Function]:
    """Return the option ``--format`` for a command that prints a table, or the same figures in one of ``formats``."""
    purposes = {
        "json": "`json` for programs, with all figures in bytes and seconds",
        "markdown": "`markdown` for a comment",
        "html": "`html` for a page with charts of the memory over the step",
    }
    return click.option(
        "--format",
        "form",
        type=click.Choice(("text", *formats)),
        default="text",
        show_default=True,
        help=f"Print {', '.join(['`text` for a terminal', *(purposes[name] for name in formats)])}.",
    )


@contextmanager
def input_errors(*errors: type[Exception]) -> Iterator[None]:
    """Raise each of ``errors`` as an `InputError` with its message."""
    try:
        yield
    except errors as error:
        raise InputError(str(error)) from None


def parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that parses an option. ``parse`` raises ``ValueError`` with a sentence about the mistake."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


_COLOURS: dict[Style | None, str] = {"good": "green", "bad": "red", "doubtful": "yellow"}


def screen() -> Screen:
    """Return the width and encoding of standard output; a file, a pipe and a CI's log have lines of any length."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Screen(width, getattr(sys.stdout, "encoding", None) or "utf-8")


def write_lines(lines: Iterable[Line | str]) -> None:
    """Write lines to standard output; texts among them are sanitized first."""
    shows = screen()
    for line in lines:
        for text, style in [(shows.legible(line), None)] if isinstance(line, str) else map(astuple, line):
            bold = True if style == "heading" else None
            click.echo(text if style is None else click.style(text, fg=_COLOURS.get(style), bold=bold), nl=False)
        click.echo()


class WholeLines:
    """Writes to standard error in whole lines, since torch writes warnings of its own there in between.

    A terminal shows a line that has begun as well, and the whole line in its place once it ends.
    """

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> None:
        """Write a text, which ends a line or is continued by the next one."""
        self._begun += text
        has_ended = self._begun.endswith("\n")
        if can_redraw(sys.stderr):
            click.echo(f"\r\x1b[K{self._begun}", nl=False, err=True)
        elif has_ended:
            click.echo(self._begun, nl=False, err=True)
        self._begun = "" if has_ended else self._begun


def read_report(path: Path) -> SessionReport:
    """Return the report in a JSON file, or on standard input. Raises `InputError`, which names the file."""
    name = name_of(path)
    try:
        text = read_text(path)
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name the files in it: {path}/*.json") from None
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; `pytest --gpumem-report={path}` writes one") from None
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8, and so no JSON report of pytest-gpumem") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    with input_errors(ReportError):
        return from_json(text, name)


def files_of(given: Sequence[str]) -> list[Path]:
    """Return the files that are named, with patterns expanded where no shell did; ``-`` is standard input.

    Raises:
        InputError: A pattern matches nothing, or a file is given twice, which would count for two shards.
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
    return [path_of(path) for path in found.values()]
