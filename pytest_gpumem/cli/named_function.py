"""A function of a project's own that a command names as ``MODULE:FUNCTION``."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.models.sources import SOURCES
from pytest_gpumem.reports.file_kinds import kind_of_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def named_function(text: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` names. Raises ``click.UsageError``."""
    check_form(text)
    module_name, _, name = text.partition(":")
    if module_name.endswith(".py"):
        raise click.UsageError(f"{text!r} names a file; write {_as_module(module_name, name)}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        close = _nearest_source(module_name)
        hint = f"; did you mean '{close}:{name}'?" if close else ""
        raise click.UsageError(f"there is no module {error.name!r}, neither installed nor in {here}{hint}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(_callables(module)[:8]) or "none"
        raise click.UsageError(f"{module_name} has no function {name!r}; it has {there}")
    return function  # type: ignore[no-any-return]


def check_form(text: str) -> None:
    """Raise ``click.UsageError`` for a text that names no function, with the model by name that it may mean. Loads nothing."""
    module_name, colon, name = text.partition(":")
    if module_name and colon and name.isidentifier():
        return
    written = "a function is written MODULE:FACTORY, like my_project.models:make_gpt"
    close = _nearest_source(module_name) if colon and name else None
    if close is not None:
        raise click.UsageError(f"{text!r}: did you mean '{close}:{name}'? {written}")
    kind = kind_of_file(Path(text))
    if kind is not None:
        raise click.UsageError(f"{text} is {kind}, expected a model; {written}")
    if not colon and _is_configuration(Path(text)):
        raise click.UsageError(f"{text} is a configuration: did you mean 'hf:{text}'? {written}")
    if not colon and text.endswith(".json"):
        raise click.UsageError(
            f"there is no file {text}; a configuration is named with its source, 'hf:{text}', and a model of the hub as "
            f"hf:ORG/NAME; {written}"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None:
        raise click.UsageError(f"{text!r}: did you mean 'hf:{text}'? {written}")
    sources = ", ".join(f"{source}:NAME" for source in SOURCES)
    raise click.UsageError(
        f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt, or a model by name: {sources}"
    )


def _nearest_source(word: str) -> str | None:
    """Return the source of models that is spelled like a word."""
    return next(iter(difflib.get_close_matches(word, list(SOURCES), n=1, cutoff=0.5)), None)


def _is_configuration(path: Path) -> bool:
    """Return whether a path leads to the configuration of a model: a JSON file, or a folder with ``config.json``."""
    return (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()


def _callables(module: ModuleType) -> list[str]:
    """Return the names of a module's callables: its own functions, its own classes, then imported ones."""
    found = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}

    def order(name: str) -> tuple[bool, bool, str]:
        own = getattr(found[name], "__module__", None) == module.__name__
        return not own, isinstance(found[name], type), name

    return sorted(found, key=order)


def _as_module(path: str, function: str) -> str:
    """Return ``module:function`` for a function of the file at ``path``."""
    parts = Path(os.path.relpath(path)).with_suffix("").parts
    if len(parts) == 1 and parts[0] in SOURCES:
        return (
            f"it under another module's name, as {parts[0]}: is a source of models: from {parts[0]} import {function}"
        )
    outside = os.pardir in parts
    return f"{parts[-1]}:{function}, in the folder of the file" if outside else f"{'.'.join(parts)}:{function}"
