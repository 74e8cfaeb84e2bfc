"""Files that commands read and write: each takes ``-`` for standard input or output."""

from __future__ import annotations

import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STANDARD = Path("-")
"""Standard input or output, in place of a file. A file of this name is written ``./-``."""
_STDIN = "pytest_gpumem.stdin"
"""The key in click's context under which the text of standard input is kept."""


class FilePath(click.Path):
    """The path of a file, or ``-`` for standard input or output."""

    def __init__(self, *, exists: bool = False, writable: bool = False) -> None:
        super().__init__(exists=exists, writable=writable, dir_okay=False, allow_dash=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        super().convert(value, param, ctx)
        return path_of(value)


def path_of(name: str | Path) -> Path:
    """Return the path that a user typed, and `STANDARD` only for ``-`` itself: ``./-`` is a file."""
    path = Path(name)
    return Path.cwd() / path if path == STANDARD and name not in ("-", STANDARD) else path


def suffix_of(file: Path) -> str:
    """Return the suffix that says the format of ``file``. A standard stream has JSON."""
    return ".json" if file == STANDARD else file.suffix


def check_one_stream(files: Sequence[Path]) -> None:
    """Raise ``click.BadParameter`` if ``-`` is among ``files`` twice."""
    if files.count(STANDARD) > 1:
        raise click.BadParameter("- is given twice, and there is one standard output")


def write_file(file: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``file``, which is replaced whole, or to standard output. Raises ``OSError``."""
    if file == STANDARD:
        click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
    else:
        write_whole(file, text)


def read_text(file: Path) -> str:
    """Return the UTF-8 text of ``file``, or of standard input. Raises ``OSError`` and ``UnicodeDecodeError``."""
    if file != STANDARD:
        return file.read_text(encoding="utf-8")
    # A command may look at a report twice, and a stream has it once.
    meta = click.get_current_context().meta
    if _STDIN not in meta:
        meta[_STDIN] = sys.stdin.buffer.read().decode("utf-8")
    text: str = meta[_STDIN]
    return text


def name_of(file: Path) -> str:
    """Return the name of a file that is read, for messages."""
    return "standard input" if file == STANDARD else str(file)


@contextmanager
def text_beside(files: Sequence[Path]) -> Iterator[None]:
    """Print to standard error, within the context, if one of ``files`` is standard output."""
    if STANDARD in files:
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield
