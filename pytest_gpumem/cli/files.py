"""Files that commands read and write: each takes ``-`` for standard input or output."""

from __future__ import annotations

import errno
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.open_folder import LinkFound
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STANDARD = Path("-")
"""Standard input or output, in place of a file. A file of this name is written ``./-``."""
LARGEST_REPORT = 2**29
"""Characters of the largest report that is read. One of three million numbers has 60 million."""
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
        return
    try:
        write_whole(file, text)
    except LinkFound:
        raise LinkFound(file, "name the file that it leads to, or - for standard output") from None


def read_text(file: Path) -> str:
    """Return the text of a report's file, or of standard input.

    Raises:
        OSError: The file cannot be read, or has more than 512 MB.
        UnicodeDecodeError: The file is not UTF-8.
    """
    if file != STANDARD:
        with file.open(encoding="utf-8") as opened:
            return _bounded(opened.read(LARGEST_REPORT + 1), name_of(file))
    # A command may look at a report twice, and a stream has it once.
    meta = click.get_current_context().meta
    if _STDIN not in meta:
        meta[_STDIN] = _bounded(sys.stdin.buffer.read(LARGEST_REPORT + 1).decode("utf-8"), name_of(file))
    text: str = meta[_STDIN]
    return text


def _bounded(text: str, name: str) -> str:
    if len(text) > LARGEST_REPORT:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST_REPORT} characters, and a report has fewer", name)
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
