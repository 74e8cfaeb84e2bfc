"""Replace a file atomically: a reader sees the whole old or the whole new content, even after a crash."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from pytest_gpumem.base.open_folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DRAFT = ".draft"
"""Suffix of an unfinished file; its name begins with a dot."""


def write_atomically(path: Path, text: str, *, root: Path | None = None, errors: str = "backslashreplace") -> None:
    """Write ``text`` as UTF-8 without changing line ends. A missing folder is created.

    Args:
        path: The file. The function refuses to write if a link is in its place.
        text: The content.
        root: A folder without links below it; the default is the file's folder. See `open_folder`.
        errors: The treatment of lone surrogates, which UTF-8 cannot encode. By default they are written as Python's escapes.
            With ``strict`` they are an error.

    Raises:
        OSError: The file cannot be written, or is a link.
        UnicodeEncodeError: The text has a lone surrogate, and ``errors`` is ``strict``.
    """
    with replacing(path, root=root) as draft:
        draft.write(text.encode("utf-8", errors))


@contextmanager
def replacing(path: Path, *, root: Path | None = None) -> Iterator[BinaryIO]:
    """Yield an empty file that replaces ``path`` at the end of the context, unless the context raises an exception.

    Args:
        path: The file. A link in its place is refused. A missing folder is created.
        root: A folder without links below it; the default is the file's folder. See `open_folder`.

    Raises:
        OSError: The file cannot be written, or is a link.

    Example::

        with replacing(folder / "report.json") as file:
            file.write(b"{}")  # readers still see the old report
    """
    root = path.parent if root is None else root
    *folders, name = path.relative_to(root).parts
    with open_folder(root, folders, make=True) as folder:
        folder.refuse_link(name)
        draft = f".{name[:40]}.{secrets.token_hex(8)}{DRAFT}"
        # The system removes the permissions in the process's umask.
        descriptor = folder.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                yield file
                file.flush()
                os.fsync(file.fileno())
            folder.replace(name, draft)
        except BaseException:
            folder.remove(draft)
            raise
