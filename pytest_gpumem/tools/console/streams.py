"""Functions for a command's input and output: read reports, print lines, and report errors in the user's input."""

from __future__ import annotations

import glob
import shutil
import sys
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.base.terminals import can_redraw
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.tools.console.files import name_of, path_of, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.reporting.reports.layout import Line, Style
    from pytest_gpumem.reporting.reports.session_report import SessionReport
_Function = TypeVar("_Function", bound="Callable[..., Any]")
INTERRUPTED = 130
"""The exit status after Ctrl-C. As in shells, it is 128 plus 2, the number of the signal SIGINT."""


class InputError(click.ClickException):
    """An error in the user's input, with exit status 2. The message names the wrong input, and shows a correct input.

    Args:
        lines: The lines of the message. The lines are sanitized, because they may contain a test's id, and an id could
            contain a command for the CI runner, for example ``::error::``.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
        super().__init__("\n".join(map(screen.legible, lines)))


class WholeNumber(click.IntRange):
    """The click type for a whole number in ASCII digits. Python's ``int`` would also accept digits such as ``٣``."""

    def get_metavar(self, *_context: Any, **_parameter: Any) -> str:
        """Return the placeholder for the number in the help text."""
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.isascii():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


def format_option(*formats: str) -> Callable[[_Function], _Function]:
    """Return the option ``--format``, with which a command prints its figures as a text or in another format.

    Args:
        formats: The other formats: some of ``"json"``, ``"markdown"`` and ``"html"``.
    """
    purposes = {
        "json": "`json` for programs, with all figures in bytes and seconds",
        "markdown": "`markdown` for a comment on GitHub",
        "html": "`html` for a web page with charts of the memory during the step",
    }
    return click.option(
        "--format",
        "form",
        type=click.Choice(("text", *formats)),
        default="text",
        show_default=True,
        help=f"Print one of these formats: {'; '.join(['`text` for a terminal', *(purposes[name] for name in formats)])}.",
    )


@contextmanager
def input_errors(*errors: type[Exception]) -> Iterator[None]:
    """If the body raises one of ``errors``, raise an `InputError` with the same message instead."""
    try:
        yield
    except errors as error:
        raise InputError(str(error)) from None


def parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback to parse the value of an option.

    Args:
        parse: Returns the parsed value, or raises ``ValueError`` with a sentence about the user's mistake.
    """

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


_COLOURS: dict[Style | None, str] = {"good": "green", "bad": "red", "doubtful": "yellow"}


def screen() -> Screen:
    """Return the width and encoding of standard output. The width is unlimited if standard output is not a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Screen(width, getattr(sys.stdout, "encoding", None) or "utf-8")


def write_lines(lines: Iterable[Line | str]) -> None:
    """Write lines to standard output. Plain strings are sanitized first."""
    target = screen()
    for line in lines:
        for text, style in [(target.legible(line), None)] if isinstance(line, str) else map(astuple, line):
            bold = True if style == "heading" else None
            click.echo(text if style is None else click.style(text, fg=_COLOURS.get(style), bold=bold), nl=False)
        click.echo()


class WholeLines:
    """Writes a line to standard error only when the line is complete, so torch's warnings never split the line.

    On a terminal, an incomplete line is shown at once, and overwritten when the line is complete.

    Example:
        The calls ``write("fp32 ... ")`` and ``write("12.00 GB\\n")`` write the line ``fp32 ... 12.00 GB`` into a file. A
        terminal shows ``fp32 ...`` after the first call.
    """

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> None:
        """Write a text. If the text does not end with a line break, the next call continues the line."""
        self._begun += text
        has_ended = self._begun.endswith("\n")
        if can_redraw(sys.stderr):
            click.echo(f"\r\x1b[K{self._begun}", nl=False, err=True)
        elif has_ended:
            click.echo(self._begun, nl=False, err=True)
        self._begun = "" if has_ended else self._begun

    def show(self, text: str) -> None:
        """Show a text in place of the incomplete line on a terminal. The next call overwrites the text, if it is incomplete.

        In a file, the text is left out, because the next text would not overwrite it. An empty text clears the line.
        """
        self._begun = ""
        if can_redraw(sys.stderr):
            target = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
            text = target.shortened(target.legible(text), shutil.get_terminal_size().columns - 1)
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def read_report(path: Path) -> SessionReport:
    """Return the report in a JSON file or on standard input.

    Raises:
        InputError: The file cannot be read, or is not a report. The message names the file.
    """
    name = name_of(path)
    try:
        text = read_text(path)
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name the reports in it: {path}/*.json") from None
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; `pytest --gpumem-report={path}` writes one") from None
    except UnicodeDecodeError:
        raise InputError(f"{name} is not a JSON report of pytest-gpumem, because it is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    with input_errors(ReportError):
        return from_json(text, name)


def files_of(names: Sequence[str]) -> list[Path]:
    """Return the user's files. ``-`` means standard input.

    If the shell did not expand a pattern, this function does: ``shards/*.json`` becomes ``shards/a.json`` and
    ``shards/b.json``.

    Raises:
        InputError: A pattern matches no file, or a file is named twice, because its report would then count twice.
    """
    files: dict[Path, str] = {}
    for name in names:
        if Path(name).exists() or not glob.has_magic(name):
            paths = [name]
        else:
            paths = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - a pattern may be absolute
            if not paths:
                raise InputError(f"{name} matches no file")
        for path in paths:
            real = Path(path).resolve()
            if real in files:
                raise InputError(f"{path} is given twice{'' if files[real] == path else f', also as {files[real]}'}")
            files[real] = path
    return [path_of(path) for path in files.values()]
