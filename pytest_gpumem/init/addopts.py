"""Files that ``addopts`` in pytest's settings keeps from being collected. Pure: no plugin that it names is loaded."""

from __future__ import annotations

import argparse
import configparser
import glob
import os
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.toml import read_toml

if TYPE_CHECKING:
    from collections.abc import Sequence

_TABLES = (("tool", "pytest", "ini_options"), ("tool", "pytest"), ("pytest",))
_SECTIONS = ("pytest", "tool:pytest")


def addopts_of(name: str, text: str) -> Sequence[str]:
    """Return the words of ``addopts`` in a file that pytest read its settings from; none where there are none.

    Args:
        name: The name of the file, by which its format is known.
        text: The content of the file.
    """
    written = _of_toml(text) if name.endswith(".toml") else _of_ini(text)
    if isinstance(written, list):
        return [str(one) for one in written]
    try:
        return shlex.split(str(written or ""))
    except ValueError:  # a quote without an end, at which pytest itself stops
        return []


def _of_toml(text: str) -> object:
    for names in _TABLES:
        table: object = read_toml(text)
        for name in (*names, "addopts"):
            table = table.get(name) if isinstance(table, dict) else None
        if table is not None:
            return table
    return None


def _of_ini(text: str) -> object:
    parser = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    return next((parser[one].get("addopts") for one in _SECTIONS if parser.has_option(one, "addopts")), None)


def ignored_by(words: Sequence[str], folder: str) -> list[str]:
    """Return the patterns of ``--ignore`` and ``--ignore-glob`` among options of pytest, from the root directory.

    Args:
        words: The options.
        folder: The folder that pytest is started in, from the root directory: their paths count from there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--ignore", action="append", default=[], type=glob.escape)
    parser.add_argument("--ignore-glob", action="append", default=[])
    try:
        given, _ = parser.parse_known_args(list(words))
    except argparse.ArgumentError:  # an option without its path, at which pytest itself stops
        return []
    return [PurePath(os.path.normpath(f"{folder}/{one}")).as_posix() for one in (*given.ignore, *given.ignore_glob)]
