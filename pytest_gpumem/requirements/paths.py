"""Paths in requirements, which pip takes from the current folder, as paths that are the same from any.

Where a file of requirements names a folder of wheels, pip looks for it beside that file first (``--find-links`` in
https://pip.pypa.io/en/stable/reference/requirements-file-format/).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")
_WITH_EXTRAS = re.compile(r"(.+?)(\[[^\[\]]*\])?")
_SPLITS = re.compile(r"[\s'\"\\]")
_FIND_LINKS = ("-f", "--find-links")
_EDITABLE = ("-e", "--editable")


class NoSuchPath(ValueError):
    """A requirement is a path that nothing lies at; the message is the path."""


def is_path(line: str) -> bool:
    """Return whether a line, as `named_path` gives it, is a path of a package whose name is not known before it is built."""
    return Path(line).is_absolute()


def named_path(line: str) -> str:
    """Return a requirement that is a path as one with a name and an address; any other as it is.

    ``./models-1.0-py3-none-any.whl`` becomes ``models @ file:///...``. A folder of a project has no name that is known, and
    becomes an absolute path. Raises `NoSuchPath`, and ``InvalidRequirement`` where a wheel is called like none.
    """
    bare, sign, options = line.partition(" --")
    given, semicolon, marker = bare.partition(";")
    found = _WITH_EXTRAS.fullmatch(given.strip())
    if found is None or not _is_local(found.group(1)):
        return line
    path, extras = Path(found.group(1)).absolute(), found.group(2) or ""
    if not path.exists():
        raise NoSuchPath(path)
    name = _name_of(path)
    where = f"{name}{extras} @ {path.as_uri()}" if name else f"{_normal(path)}{extras}"
    return f"{where}{f' ; {marker.strip()}' if semicolon else ''}{sign}{options}"


def _is_local(text: str) -> bool:
    """Return whether pip takes a requirement without marker and extras for a path."""
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
    """Return the name of the package in a wheel or a source distribution; ``None`` where the file's name does not tell it."""
    try:
        if path.suffix == ".whl":
            return parse_wheel_filename(path.name)[0]
        return parse_sdist_filename(path.name)[0] if path.is_file() else None
    except InvalidWheelFilename as error:
        raise InvalidRequirement(str(error)) from None
    except InvalidSdistFilename:
        return None


def option_from(line: str, folder: Path) -> str:
    """Return a line of options of a file in ``folder`` with each local path in it as an absolute one."""
    try:
        words = shlex.split(line)
    except ValueError:
        # A quote is missing: pip tells it.
        return line
    made: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        short = word[:2] if word[:2] in ("-f", "-e") and len(word) > 2 and not equals else ""
        if short:
            made += [short, _moved(short, word[2:], folder)]
        elif equals and name in (*_FIND_LINKS, *_EDITABLE):
            made += [name, _moved(name, value, folder)]
        else:
            made.append(_moved(option, word, folder))
        option = word
    # uv reads no quotes: only where nothing else tells where a word ends.
    return " ".join(shlex.quote(word) if _SPLITS.search(word) else word for word in made) if made != words else line


def _moved(option: str, value: str, folder: Path) -> str:
    """Return the value of an option as an absolute path where it is a local one that exists."""
    if option in _FIND_LINKS:
        found = next((one for one in (folder / value, Path(value)) if one.exists()), None)
        return value if found is None else str(_normal(found))
    parts = _WITH_EXTRAS.fullmatch(value)
    if option in _EDITABLE and parts is not None and Path(parts.group(1)).is_dir():
        return f"{_normal(Path(parts.group(1)))}{parts.group(2) or ''}"
    return value


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))
