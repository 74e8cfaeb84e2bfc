"""Words that a shell completes: tests and devices of the store, cards and files.

Nothing of the project is run: pressing the tab key is no consent. So only a store in a folder is read, and the devices that a
conftest.py adds are not known.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from pytest_gpumem.baselines.errors import BackendError, StoreError
from pytest_gpumem.baselines.location import backend_of, is_url
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli.project import own_gpus_around
from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.options import DEFAULT_STORE
from pytest_gpumem.config.settings import read_table
from pytest_gpumem.devices.registry import AUTO, BUILT_IN
from pytest_gpumem.emulation.gpus import EVERY, known_words
from pytest_gpumem.values.option_words import EMULATED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.gate.baseline import Key


def tests(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of tests with baselines that begin with ``incomplete``, or else their names without the file."""
    ids = sorted({f"{key.file}::{key.test}" for _, key in _stored(context)})
    return _beginning(ids, incomplete) or _beginning((one.partition("::")[2] for one in ids), incomplete)


def slugs(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of devices' folders in the store."""
    return _beginning((slug for slug, _ in _stored(context)), incomplete)


def slugs_and_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of devices' folders in the store, and have the shell complete files."""
    found = slugs(context, parameter, incomplete)
    return [*map(CompletionItem, found), *files(context, parameter, incomplete)]


def cards(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words of GPUs that can be emulated: ``l4``."""
    return _beginning(_cards(), incomplete)


def devices(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words of devices: ``cuda``, ``emulated:l4``."""
    emulated = (f"{EMULATED}{card}" for card in (EVERY, *_cards()))
    return _beginning((*BUILT_IN, AUTO, *emulated), incomplete)


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the path of a file."""
    return [CompletionItem(incomplete, type="file")]


def folders(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the path of a folder."""
    return [CompletionItem(incomplete, type="dir")]


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that begin so, each once. A shell reads lines, so a word with the end of a line in it is left out."""
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete) and word.isprintable()))


def _cards() -> tuple[str, ...]:
    try:
        return known_words(own_gpus_around())
    except click.ClickException:
        return known_words()


def _stored(context: click.Context) -> list[tuple[str, Key]]:
    """Return every baseline of the store as (slug, key); none if the store is no folder, or cannot be read."""
    try:
        location, base = _store_of(context)
        return [] if is_url(location) else Store(backend_of(location, base)).keys()
    except (BackendError, StoreError, SettingsError):
        return []


def _store_of(context: click.Context) -> tuple[str, Path]:
    """Return the location that ``--store`` or the nearest pyproject.toml names, and what it is relative to."""
    here, typed = Path.cwd(), context.params.get("store")
    if typed:
        return typed, here
    for folder in (here, *here.parents):
        table = read_table(folder / "pyproject.toml")
        if table is not None:
            named = table.get("store", DEFAULT_STORE)
            return named if isinstance(named, str) else DEFAULT_STORE, folder
    return DEFAULT_STORE, here
