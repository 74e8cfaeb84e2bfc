"""Make the relative paths in requirements absolute, so pip can run in another folder.

As in pip, a relative path begins at the current folder. Only the path to a folder with wheels (``--find-links``) is first
looked for beside the requirements file (https://pip.pypa.io/en/stable/reference/requirements-file-format/).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from pytest_gpumem.base.errors import PathNotFound

_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")
_WITH_EXTRAS = re.compile(r"(.+?)(\[[^\[\]]*\])?")
_SPLITS = re.compile(r"[\s'\"\\]")
_FIND_LINKS = ("-f", "--find-links")
_EDITABLE = ("-e", "--editable")


def is_path(line: str) -> bool:
    """Return whether a line from `named_path` is still a path. Such a package's name is unknown before the package is built."""
    return Path(line).is_absolute()


def named_path(line: str) -> str:
    """Replace a path in a requirement by the package's name and address. Return other requirements unchanged.

    Example: ``./models-1.0-py3-none-any.whl`` becomes ``models @ file:///home/ada/models-1.0-py3-none-any.whl``. For a folder
    with a project, the package's name is unknown, so ``./models`` becomes ``/home/ada/models``.

    Raises:
        PathNotFound: The path does not exist.
        InvalidRequirement: A file's name ends in ``.whl``, but is not a valid name for a wheel.
    """
    bare, sign, options = line.partition(" --")
    target, semicolon, marker = bare.partition(";")
    match = _WITH_EXTRAS.fullmatch(target.strip())
    if match is None or not _is_local(match.group(1)):
        return line
    path, extras = Path(match.group(1)).absolute(), match.group(2) or ""
    if not path.exists():
        raise PathNotFound(path)
    name = _name_of(path)
    address = f"{name}{extras} @ {path.as_uri()}" if name else f"{_normal(path)}{extras}"
    return f"{address}{f' ; {marker.strip()}' if semicolon else ''}{sign}{options}"


def _is_local(text: str) -> bool:
    """Return whether pip regards a requirement as a path. The requirement must not have a marker or extras."""
    if "://" in text:
        return False
    if text.endswith(_ARCHIVES) and Path(text).is_file():
        return True
    try:
        Requirement(text)
    except InvalidRequirement:
        return "@" not in text and (os.sep in text or "/" in text or text.startswith("."))
    return False


def _name_of(path: Path) -> str | None:
    """Return the package name from a wheel's or source distribution's file name; ``None`` for any other path."""
    try:
        if path.suffix == ".whl":
            return parse_wheel_filename(path.name)[0]
        return parse_sdist_filename(path.name)[0] if path.is_file() else None
    except InvalidWheelFilename as error:
        raise InvalidRequirement(str(error)) from None
    except InvalidSdistFilename:
        return None


def option_from(line: str, folder: Path) -> str:
    """Make the paths in an option line absolute. The line comes from a requirements file in ``folder``.

    Example: ``--find-links wheels`` becomes ``--find-links /home/ada/project/wheels``.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        # A closing quote is missing. pip reports this error.
        return line
    resolved: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        short = word[:2] if word[:2] in ("-f", "-e") and len(word) > 2 and not equals else ""
        if short:
            resolved += [short, _absolute(short, word[2:], folder)]
        elif equals and name in (*_FIND_LINKS, *_EDITABLE):
            resolved += [name, _absolute(name, value, folder)]
        else:
            resolved.append(_absolute(option, word, folder))
        option = word
    # uv does not understand quotes, so quote only words with spaces, quotes or backslashes.
    if resolved == words:
        return line
    return " ".join(shlex.quote(word) if _SPLITS.search(word) else word for word in resolved)


def _absolute(option: str, value: str, folder: Path) -> str:
    """Make an option's value an absolute path if the path exists; otherwise return the value unchanged."""
    if option in _FIND_LINKS:
        existing = next((path for path in (folder / value, Path(value)) if path.exists()), None)
        return value if existing is None else str(_normal(existing))
    parts = _WITH_EXTRAS.fullmatch(value)
    if option in _EDITABLE and parts is not None and Path(parts.group(1)).is_dir():
        return f"{_normal(Path(parts.group(1)))}{parts.group(2) or ''}"
    return value


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
