"""Settings above pytest's root directory, which no run reads. Needs nothing but the standard library, as every run asks."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_TABLE = re.compile(rb"^[ \t]*\[\[?[ \t]*tool[ \t]*\.[ \t]*gpumem\b", re.MULTILINE)


def unread_settings(config: pytest.Config) -> str | None:
    """Return a sentence on the settings of a project around pytest's root directory; ``None`` if there are none.

    For example ``packages/a/pytest.ini`` makes ``packages/a`` the root directory, so ``[tool.gpumem]`` in the
    repository's pyproject.toml has no effect. The root directory's own table takes its place. The search ends where the
    repository does; outside of a repository, in the folder in which pytest was started, if that is around the root directory.
    """
    root, started = config.rootpath, config.invocation_params.dir
    around = (root, *root.parents)
    outermost = started if started in around else root
    last = next((folder for folder in around if (folder / ".git").exists()), outermost)
    for folder in around:
        path = folder / "pyproject.toml"
        if _has_table(path):
            return None if folder == root else _sentence(path, config)
        if folder == last:
            return None
    return None


def _has_table(path: Path) -> bool:
    try:
        return path.is_file() and _TABLE.search(path.read_bytes()) is not None
    except OSError:
        return False


def _sentence(path: Path, config: pytest.Config) -> str:
    """Return the sentence, with paths from where pytest was started: it is kept in reports."""
    because = "" if config.inipath is None else f" ({config.inipath.name})"
    table, folder, root = (
        os.path.relpath(place, config.invocation_params.dir) for place in (path, path.parent, config.rootpath)
    )
    return (
        f"[tool.gpumem] in {table} has no effect: pytest's root directory is {root}{because}; "
        f"move the table into the pyproject.toml of that folder, or add --rootdir={folder}"
    )
