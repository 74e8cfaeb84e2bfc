"""Read ``addopts`` from pytest's settings, and find the files excluded by these options from collection.

The functions are pure: they do not load plugins named in ``addopts``.
"""

from __future__ import annotations

import argparse
import configparser
import glob
import os
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.base.toml import read_toml

if TYPE_CHECKING:
    from collections.abc import Sequence

_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))
_SECTIONS = ("pytest", "tool:pytest")


def addopts_of(name: str, text: str) -> Sequence[str]:
    """Return the words in ``addopts`` from a settings file, or an empty list if the file has no ``addopts``.

    Args:
        name: The file's name, which decides the format: TOML or INI.
        text: The file's content.

    Example:
        For ``addopts = "-q --ignore=tests/slow"`` the words are ``["-q", "--ignore=tests/slow"]``.
    """
    value = _addopts_in_toml(text) if name.endswith(".toml") else _addopts_in_ini(text)
    if isinstance(value, list):
        return [str(word) for word in value]
    try:
        return shlex.split(str(value or ""))
    except ValueError:  # an unclosed quote, with which pytest itself stops
        return []


def _addopts_in_toml(text: str) -> object:
    for names in _TABLES:
        table: object = read_toml(text)
        for name in (*names, "addopts"):
            table = table.get(name) if isinstance(table, dict) else None
        if table is not None:
            return table
    return None


def _addopts_in_ini(text: str) -> object:
    parser = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    return next(
        (parser[section].get("addopts") for section in _SECTIONS if parser.has_option(section, "addopts")), None
    )


def ignored_by(words: Sequence[str], folder: str) -> list[str]:
    """Return the patterns in ``--ignore`` and ``--ignore-glob`` options, relative to the root directory.

    Args:
        words: Pytest options.
        folder: The folder in which pytest starts, as a path from the root directory. The patterns are relative to this folder.

    Example:
        ``--ignore=slow`` in the folder ``"tests"`` is the pattern ``"tests/slow"``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--ignore", action="append", default=[], type=glob.escape)
    parser.add_argument("--ignore-glob", action="append", default=[])
    try:
        options, _ = parser.parse_known_args(list(words))
    except argparse.ArgumentError:  # an option without its path, with which pytest itself stops
        return []
    return [
        PurePath(os.path.normpath(f"{folder}/{pattern}")).as_posix()
        for pattern in (*options.ignore, *options.ignore_glob)
    ]
