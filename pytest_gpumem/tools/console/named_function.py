"""Find the project's function from its name ``MODULE:FUNCTION``, for example ``my_project.models:make_gpt``."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.measuring.models.sources import SOURCES
from pytest_gpumem.reporting.reports.file_kinds import kind_of_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def named_function(text: str) -> Callable[[], Any]:
    """Import the module in ``module:function``, and return the function.

    The module is also searched in the current folder. Raises ``click.UsageError``, which names a near match.
    """
    check_form(text)
    module_name, _, name = text.partition(":")
    if module_name.endswith(".py"):
        raise click.UsageError(f"{text!r} names a file; write {_as_module(module_name, name)}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        close = _nearest_source(module_name)
        hint = f"; did you mean '{close}:{name}'?" if close else ""
        raise click.UsageError(f"there is no module {error.name!r}, neither installed nor in {folder}{hint}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(_callables(module)[:8]) or "none"
        raise click.UsageError(f"{module_name} has no function {name!r}; it has {functions}")
    return function  # type: ignore[no-any-return]


def check_form(text: str) -> None:
    """Raise ``click.UsageError`` if a text is not like ``module:function``. Import nothing.

    The error suggests a meaning of the text. For example, ``org/name`` may be the model ``hf:org/name``.
    """
    module_name, colon, name = text.partition(":")
    if module_name and colon and name.isidentifier():
        return
    form = "a function is written MODULE:FACTORY, like my_project.models:make_gpt"
    close = _nearest_source(module_name) if colon and name else None
    if close is not None:
        raise click.UsageError(f"{text!r}: did you mean '{close}:{name}'? {form}")
    kind = kind_of_file(Path(text))
    if kind is not None:
        raise click.UsageError(f"{text} is {kind}, expected a model; {form}")
    if not colon and _is_configuration(Path(text)):
        raise click.UsageError(f"{text} is a configuration: did you mean 'hf:{text}'? {form}")
    if not colon and text.endswith(".json"):
        raise click.UsageError(
            f"there is no file {text}; a configuration is named with its source, 'hf:{text}', and a model of the hub as "
            f"hf:ORG/NAME; {form}"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None:
        raise click.UsageError(f"{text!r}: did you mean 'hf:{text}'? {form}")
    sources = ", ".join(f"{source}:NAME" for source in SOURCES)
    raise click.UsageError(
        f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt, or a model by name: {sources}"
    )


def _nearest_source(word: str) -> str | None:
    """Return the source of models with a similar spelling, for example ``timm`` for ``tim``; ``None`` if there is none."""
    return next(iter(difflib.get_close_matches(word, list(SOURCES), n=1, cutoff=0.5)), None)


def _is_configuration(path: Path) -> bool:
    """Return whether a path is a model's configuration: a JSON file, or a folder with ``config.json``."""
    return (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()


def _callables(module: ModuleType) -> list[str]:
    """Return the names of a module's callables: its own functions, its own classes, then imported ones."""
    callables = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}

    def order(name: str) -> tuple[bool, bool, str]:
        is_own = getattr(callables[name], "__module__", None) == module.__name__
        return not is_own, isinstance(callables[name], type), name

    return sorted(callables, key=order)


def _as_module(path: str, function: str) -> str:
    """Return the text to write instead of ``path.py:function``: ``"sub.models:make"`` for ``sub/models.py`` and ``make``."""
    parts = Path(os.path.relpath(path)).with_suffix("").parts
    if len(parts) == 1 and parts[0] in SOURCES:
        return f"it under another module's name, because {parts[0]}: is a source of models: from {parts[0]} import {function}"
    outside = os.pardir in parts
    return f"{parts[-1]}:{function}, in the folder of the file" if outside else f"{'.'.join(parts)}:{function}"
