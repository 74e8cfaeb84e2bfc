"""A function of a project's own that a command names as ``MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.models.sources import SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def named_function(text: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` names. Raises ``click.UsageError``."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise click.UsageError(f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt")
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
        raise click.UsageError(f"there is no module {error.name!r}, neither installed nor in {here}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(_callables(module)[:8]) or "none"
        raise click.UsageError(f"{module_name} has no function {name!r}; it has {there}")
    return function  # type: ignore[no-any-return]


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
