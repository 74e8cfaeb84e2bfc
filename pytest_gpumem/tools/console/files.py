"""Read and write the files in a user's arguments and options. ``-`` means standard input or output."""

from __future__ import annotations

import errno
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.base.errors import SymbolicLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STANDARD = Path("-")
"""The path for standard input or output instead of a file. A user writes ``./-`` for a file named ``-``."""
LARGEST_REPORT = 2**29
"""Maximum characters in a report, 537 million. A report with three million numbers has only 60 million characters."""
_STDIN = "pytest_gpumem.stdin"
"""The key in click's context under which the text from standard input is stored."""


class FilePath(click.Path):
    """The click type for the path of a file, or ``-`` for standard input or output."""

    def __init__(self, *, exists: bool = False, writable: bool = False) -> None:
        super().__init__(exists=exists, writable=writable, dir_okay=False, allow_dash=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        super().convert(value, param, ctx)
        return path_of(value)


def path_of(name: str | Path) -> Path:
    """Return the path for a user's text: `STANDARD` for ``-``, and a file in the current folder for ``./-``."""
    path = Path(name)
    return Path.cwd() / path if path == STANDARD and name not in ("-", STANDARD) else path


def suffix_of(file: Path) -> str:
    """Return a file's suffix, which selects its format. Standard input and output are always ``.json``."""
    return ".json" if file == STANDARD else file.suffix


def check_one_stream(files: Sequence[Path]) -> None:
    """Raise ``click.BadParameter`` if ``-`` is in ``files`` more than once, because there is a single standard output."""
    if files.count(STANDARD) > 1:
        raise click.BadParameter("- is given twice, but there is only one standard output; name a file instead")


def write_file(file: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to a file or to standard output. A file is replaced atomically. Raises ``OSError``."""
    if file == STANDARD:
        click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
        return
    try:
        write_atomically(file, text)
    except SymbolicLinkError:
        raise SymbolicLinkError(file, "name the target of the link, or - for standard output") from None


def read_text(file: Path) -> str:
    """Return the text of a report in a file or on standard input.

    Raises:
        OSError: The file cannot be read, or has more than 2**29 characters.
        UnicodeDecodeError: The file is not UTF-8.
    """
    if file != STANDARD:
        with file.open(encoding="utf-8") as opened:
            return _bounded(opened.read(LARGEST_REPORT + 1), name_of(file))
    # Store the text, because a command may read the report twice, and standard input can be read only once.
    meta = click.get_current_context().meta
    if _STDIN not in meta:
        meta[_STDIN] = _bounded(sys.stdin.buffer.read(LARGEST_REPORT + 1).decode("utf-8"), name_of(file))
    text: str = meta[_STDIN]
    return text


def _bounded(text: str, name: str) -> str:
    if len(text) > LARGEST_REPORT:
        raise OSError(errno.EFBIG, f"the report has more than {LARGEST_REPORT} characters, the limit", name)
    return text


def name_of(file: Path) -> str:
    """Return a file's name for a message: ``"standard input"`` for ``-``, otherwise the path."""
    return "standard input" if file == STANDARD else str(file)


@contextmanager
def text_beside(files: Sequence[Path]) -> Iterator[None]:
    """Send printed lines to standard error if ``files`` contains ``-``, because a report then needs standard output."""
    if STANDARD in files:
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield
