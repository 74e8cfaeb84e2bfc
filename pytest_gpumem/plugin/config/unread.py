"""Find settings without effect, because their file is above pytest's root directory, or because the name of their table is
mistyped.

Every run loads this module, so it imports only the standard library.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

_TABLE = re.compile(rb"^[ \t]*\[\[?[ \t]*tool[ \t]*\.[ \t]*gpumem\b", re.MULTILINE)
_HEADER = re.compile(rb"^[ \t]*\[\[?[ \t]*([\w.:\"' \t-]*(?:gpu|mem)[\w.:\"' \t-]*)\]", re.MULTILINE | re.IGNORECASE)
"""A header of a table or section that may be a mistyped ``[tool.gpumem]``."""
_RIGHT = "gpumem"
_SIMILAR = 0.8
"""A name counts as mistyped if its similarity to "gpumem" (a `difflib` ratio) is at least this value: "gpumen" has 0.83,
"gpumon" 0.67."""


def unread_settings(config: pytest.Config) -> str | None:
    """Return a warning about settings without effect in or above pytest's root directory; ``None`` if there are none."""
    return unread_around(config.rootpath, config.inipath, config.invocation_params.dir)


def unread_around(root: Path, settings_file: Path | None, started_in: Path) -> str | None:
    """Return a warning about settings without effect; ``None`` if there are none.

    For example, ``packages/a/pytest.ini`` makes ``packages/a`` the root directory, so ``[tool.gpumem]`` in the repository's
    pyproject.toml has no effect. If the root directory itself has the table, there is no warning. Otherwise the function
    searches the folders above the root directory for a table, up to the repository's top folder. Outside a repository, the
    search goes up to the folder in which pytest was started, if that folder contains the root directory. A mistyped table in
    the root directory, such as ``[tool.gpumen]``, is reported as well.

    Args:
        root: pytest's root directory.
        settings_file: The file with pytest's settings, if there is one.
        started_in: The folder in which pytest was started. Paths in the warning are relative to this folder, because
            reports contain the warning.
    """
    path = root / "pyproject.toml"
    if _has_table(path):
        return None
    for file in dict.fromkeys((path, settings_file or path)):
        for name in _mistyped(file):
            mend = f"did you mean [tool.{_RIGHT}]?" if file == path else f"write [tool.{_RIGHT}] into {path.name}"
            return f"[{name}] in {os.path.relpath(file, started_in)} has no effect; {mend}"
    around = (root, *root.parents)
    outermost = started_in if started_in in around else root
    last = next((folder for folder in around if (folder / ".git").exists()), outermost)
    for folder in around[1 : around.index(last) + 1]:
        if _has_table(folder / "pyproject.toml"):
            return _sentence(folder, root, settings_file, started_in)
    return None


def _mistyped(path: Path) -> Iterator[str]:
    """Yield the names of tables and sections that look like a mistyped ``[tool.gpumem]``."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError:
        return
    for header in _HEADER.findall(content):
        name = header.decode("utf-8", "backslashreplace").strip()
        parts = [part.strip(" \t\"'") for part in re.split("[.:]", name)]
        # Ignore names such as [tool.hatch.envs.gpumem], which belong to other tools.
        leading_parts = parts[2:3] if parts[:2] == ["tool", "pytest"] else parts[:2]
        if any(map(_is_similar, leading_parts)):
            yield name


def _is_similar(name: str) -> bool:
    import difflib

    word = name.lower().replace("-", "_").removeprefix("pytest_")
    return difflib.SequenceMatcher(None, word, _RIGHT).ratio() >= _SIMILAR


def _has_table(path: Path) -> bool:
    try:
        return path.is_file() and _TABLE.search(path.read_bytes()) is not None
    except OSError:
        return False


def _sentence(folder: Path, root: Path, settings_file: Path | None, started_in: Path) -> str:
    because = "" if settings_file is None else f" ({settings_file.name})"
    table, parent, root_shown = (
        os.path.relpath(place, started_in) for place in (folder / "pyproject.toml", folder, root)
    )
    return (
        f"[tool.gpumem] in {table} has no effect: pytest's root directory is {root_shown}{because}; "
        f"move the table into the pyproject.toml of that folder, or add --rootdir={parent}"
    )
