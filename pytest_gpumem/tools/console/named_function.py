"""Import a user's function by its name ``MODULE:FUNCTION``, for example ``my_project.models:make_gpt``."""

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
    """Import the module in a text ``module:function``, and return the function.

    The module may be in the current folder.

    Raises:
        click.UsageError: There is no such module or function. The message suggests a similar name, or lists the functions.
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
    """Check that a text has the form ``module:function``. No module is imported.

    Raises:
        click.UsageError: The text has another form. The message suggests what the user may have meant. For example, for
            ``org/name`` it suggests the model ``hf:org/name``.
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
            f"there is no file {text}; a configuration file is written 'hf:{text}', and a model on the hub hf:ORG/NAME; {form}"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None:
        raise click.UsageError(f"{text!r}: did you mean 'hf:{text}'? {form}")
    sources = ", ".join(f"{source}:NAME" for source in SOURCES)
    raise click.UsageError(
        f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt, or a model by name: {sources}"
    )


def _nearest_source(word: str) -> str | None:
    """Return the source of models with a name similar to ``word``, for example ``timm`` for ``tim``.

    The result is ``None`` if no source has a similar name.
    """
    return next(iter(difflib.get_close_matches(word, list(SOURCES), n=1, cutoff=0.5)), None)


def _is_configuration(path: Path) -> bool:
    """Return whether a path is a model's configuration: an existing JSON file, or a folder with a ``config.json``."""
    return (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()


def _callables(module: ModuleType) -> list[str]:
    """Return the names of all callables in a module: the module's functions, then its classes, then imported callables."""
    callables = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}

    def order(name: str) -> tuple[bool, bool, str]:
        is_own = getattr(callables[name], "__module__", None) == module.__name__
        return not is_own, isinstance(callables[name], type), name

    return sorted(callables, key=order)


def _as_module(path: str, function: str) -> str:
    """Return what to write instead of a file and a function: ``"sub.models:make"`` instead of ``sub/models.py:make``."""
    parts = Path(os.path.relpath(path)).with_suffix("").parts
    if len(parts) == 1 and parts[0] in SOURCES:
        return (
            f"a module with another name that contains `from {parts[0]} import {function}`, because {parts[0]}: means a "
            "library's model here"
        )
    outside = os.pardir in parts
    return f"{parts[-1]}:{function}, in the folder of the file" if outside else f"{'.'.join(parts)}:{function}"
