"""Files of a proposal, written all or none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError, write_lines
from pytest_gpumem.open_folder import open_folder
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.init.proposal import Edit


def check_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Raise `InputError` for the first file that cannot be written, or that only a symbolic link in the repository leads to.

    A stranger's branch can have such a link. A diff of the file behind it would show what is not the repository's.
    """
    for edit in edits:
        _check_writable(*_placed(root, edit))


def write_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Write all files, or none: each is checked before the first is written. Raises `InputError`."""
    check_edits(root, edits)
    written: list[Edit] = []
    try:
        for edit in edits:
            written.append(edit)
            top, path = _placed(root, edit)
            write_whole(path, edit.after, root=top, errors="surrogateescape")
    except OSError as error:
        for edit in written:
            _put_back(*_placed(root, edit), edit.before)
        raise InputError(
            f"{edits[len(written) - 1].path} cannot be written: {error.strerror}; nothing was written"
        ) from None
    write_lines([f"wrote {os.path.normpath(edit.path)}" for edit in edits])


def _placed(root: Path, edit: Edit) -> tuple[Path, Path]:
    """Return the path of an edited file, after the folder that has both this file and the project."""
    project = root.resolve()
    path = Path(os.path.normpath(project / edit.path))
    return Path(os.path.commonpath([project, path])), path


def _check_writable(top: Path, path: Path) -> None:
    *folders, name = path.relative_to(top).parts
    try:
        # What does not exist yet can be made.
        with suppress(FileNotFoundError, NotADirectoryError), open_folder(top, folders) as folder:
            folder.refuse_link(name)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}; nothing was written") from None
    there = next(one for one in (path, *path.parents) if one.exists())
    what = "a file" if path == there else "a folder"
    if path != there and not there.is_dir():
        raise InputError(f"{path} cannot be written: {there} is a file, expected a folder; nothing was written")
    # A file is replaced, for which its folder is written to.
    for one in {there, path.parent if path == there else there}:
        if not os.access(one, os.W_OK):
            raise InputError(
                f"{path} cannot be written: {one} is {what} that you may not write to; nothing was written"
            )


def _put_back(top: Path, path: Path, before: str | None) -> None:
    try:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, before, root=top, errors="surrogateescape")
    except OSError as error:
        click.echo(f"{path} could not be put back: {error.strerror}", err=True)
