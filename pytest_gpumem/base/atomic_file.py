"""Replace a file atomically: a reader sees either the complete old or the complete new content, even after a crash."""

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
"""Suffix of the temporary file that replaces the old file as soon as it is complete. Its name begins with a dot."""


def write_atomically(
    path: Path, text: str, *, root: Path | None = None, errors: str = "backslashreplace", is_lasting: bool = True
) -> None:
    r"""Write ``text`` to a file as UTF-8, without changing line ends. Missing folders are created.

    Args:
        path: The file, which must not be a symbolic link.
        text: The content.
        root: A trusted folder above the file. No folder between this folder and the file may be a symbolic link
            (`open_folder`). The default is the file's folder.
        errors: Python's error handler for lone surrogates, which UTF-8 cannot encode. By default they are written as
            escapes such as ``\udc80``. With ``strict`` they raise an error.
        is_lasting: As for `replacing`.

    Raises:
        OSError: The file cannot be written, or is a link.
        UnicodeEncodeError: The text has a lone surrogate, and ``errors`` is ``strict``.
    """
    with replacing(path, root=root, is_lasting=is_lasting) as draft:
        draft.write(text.encode("utf-8", errors))


@contextmanager
def replacing(path: Path, *, root: Path | None = None, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty temporary file that replaces ``path`` at the end of the ``with`` block.

    If the block raises an exception, the temporary file is removed, and ``path`` is not changed.

    Args:
        path: The file to replace, which must not be a symbolic link. Missing folders are created.
        root: A trusted folder above the file, as in `write_atomically`.
        is_lasting: Whether to wait until the content is on the disk, so it survives a crash of the system.

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
        # The operating system removes the permissions in the process's umask from 0o666.
        descriptor = folder.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                yield file
                file.flush()
                if is_lasting:
                    os.fsync(file.fileno())
            folder.replace(name, draft)
        except BaseException:
            folder.remove(draft)
            raise
