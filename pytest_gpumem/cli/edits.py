"""Files of a proposal, written all or none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError, write_lines
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.init.proposal import Edit


def write_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Write all files, or none: each is checked before the first is written. Raises `InputError`."""
    for edit in edits:
        _check_writable(root / edit.path)
    written: list[Edit] = []
    try:
        for edit in edits:
            written.append(edit)
            write_whole(root / edit.path, edit.after, errors="surrogateescape")
    except OSError as error:
        for edit in written:
            _put_back(root / edit.path, edit.before)
        raise InputError(
            f"{edits[len(written) - 1].path} cannot be written: {error.strerror}; nothing was written"
        ) from None
    write_lines([f"wrote {os.path.normpath(edit.path)}" for edit in edits])


def _check_writable(path: Path) -> None:
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


def _put_back(path: Path, before: str | None) -> None:
    try:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, before, errors="surrogateescape")
    except OSError as error:
        click.echo(f"{path} could not be put back: {error.strerror}", err=True)
