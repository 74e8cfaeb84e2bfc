"""Write the proposed files of ``gpumem init``. If a file cannot be written, restore all files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.base.open_folder import open_folder
from pytest_gpumem.tools.console.streams import InputError, write_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.tools.init.proposal import Edit


def check_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Check whether all files can be written, and whether a path below the project contains a symbolic link.

    A branch from a stranger can contain a link to a file outside the repository. The diff would show the content of this file.

    Raises:
        InputError: A file cannot be written, or its path contains a link. The message names the first such file.
    """
    for edit in edits:
        _check_writable(*_placed(root, edit))


def write_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Check all files, and then write them. If a write fails, restore all files written so far.

    Raises:
        InputError: A file cannot be written.
    """
    check_edits(root, edits)
    written: list[Edit] = []
    try:
        for edit in edits:
            written.append(edit)
            top, path = _placed(root, edit)
            write_atomically(path, edit.after, root=top, errors="surrogateescape")
    except OSError as error:
        for edit in written:
            _restore(*_placed(root, edit), edit.before)
        raise InputError(
            f"{edits[len(written) - 1].path} cannot be written: {error.strerror}; nothing was written"
        ) from None
    write_lines([f"wrote {os.path.normpath(edit.path)}" for edit in edits])


def _placed(root: Path, edit: Edit) -> tuple[Path, Path]:
    """Return the nearest folder that contains both the project and the edited file, and the absolute path of the file."""
    project = root.resolve()
    path = Path(os.path.normpath(project / edit.path))
    return Path(os.path.commonpath([project, path])), path


def _check_writable(top: Path, path: Path) -> None:
    *folders, name = path.relative_to(top).parts
    try:
        # If a folder is missing, `write_atomically` creates it later.
        with suppress(FileNotFoundError, NotADirectoryError), open_folder(top, folders) as folder:
            folder.refuse_link(name)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}; nothing was written") from None
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    kind = "a file" if path == existing else "a folder"
    if path != existing and not existing.is_dir():
        raise InputError(f"{path} cannot be written: {existing} is a file, expected a folder; nothing was written")
    # An existing file is replaced by a new file in the same folder, so the folder must be writable as well.
    for target in {existing, path.parent if path == existing else existing}:
        if not os.access(target, os.W_OK):
            raise InputError(
                f"{path} cannot be written: {target} is {kind} that you may not write to; nothing was written"
            )


def _restore(top: Path, path: Path, before: str | None) -> None:
    try:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, before, root=top, errors="surrogateescape")
    except OSError as error:
        click.echo(f"{path} could not be restored: {error.strerror}", err=True)
