"""Shell completion for tests and devices in the store, cards, and files.

No code from the project runs, because a press of the tab key is not consent. So a store at a URL is not read, and devices
from a conftest.py are not completed.

For example, ``gpumem why tests/test_gpt.py::t<TAB>`` offers ``tests/test_gpt.py::test_train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from pytest_gpumem.emulating.emulation.gpus import EVERY, known_words
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.baselines.errors import BackendError, StoreError
from pytest_gpumem.judging.baselines.location import backend_of, is_url
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN
from pytest_gpumem.plugin.config.errors import SettingsError
from pytest_gpumem.plugin.config.options import DEFAULT_STORE
from pytest_gpumem.plugin.config.settings import read_table
from pytest_gpumem.tools.console.project import own_gpus_around

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.judging.gate.baseline import Key


def tests(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return test ids with baselines that begin with ``incomplete``. If no id does, return test names without the file."""
    ids = sorted({f"{key.file}::{key.test}" for _, key in _stored(context)})
    return _beginning(ids, incomplete) or _beginning((test_id.partition("::")[2] for test_id in ids), incomplete)


def slugs(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the devices in the store by their slugs, for example ``nvidia-h100-80gb-hbm3``."""
    return _beginning((slug for slug, _ in _stored(context)), incomplete)


def slugs_and_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the devices in the store by their slugs, and let the shell complete files."""
    stored_slugs = slugs(context, parameter, incomplete)
    return [*map(CompletionItem, stored_slugs), *files(context, parameter, incomplete)]


def cards(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words for emulated GPUs, for example ``l4``."""
    return _beginning(_cards(), incomplete)


def devices(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words for devices, for example ``cuda`` and ``emulated:l4``."""
    emulated = (f"{EMULATED}{card}" for card in (EVERY, *_cards()))
    return _beginning((*BUILT_IN, AUTO, *emulated), incomplete)


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the path of a file."""
    return [CompletionItem(incomplete, type="file")]


def folders(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the path of a folder."""
    return [CompletionItem(incomplete, type="dir")]


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that begin with ``incomplete``, without duplicates.

    A word with an unprintable character, for example a line break, is left out, because a shell reads a word per line.
    """
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete) and word.isprintable()))


def _cards() -> tuple[str, ...]:
    try:
        return known_words(own_gpus_around())
    except click.ClickException:
        return known_words()


def _stored(context: click.Context) -> list[tuple[str, Key]]:
    """Return the slug and key of each baseline. Empty if the store is not a folder, or cannot be read."""
    try:
        location, base = _store_of(context)
        return [] if is_url(location) else Store(backend_of(location, base)).keys()
    except (BackendError, StoreError, SettingsError):
        return []


def _store_of(context: click.Context) -> tuple[str, Path]:
    """Return the store's location from ``--store`` or the nearest pyproject.toml, and the folder in which a relative path
    starts.
    """
    current_folder, typed = Path.cwd(), context.params.get("store")
    if typed:
        return typed, current_folder
    for folder in (current_folder, *current_folder.parents):
        table = read_table(folder / "pyproject.toml")
        if table is not None:
            named = table.get("store", DEFAULT_STORE)
            return named if isinstance(named, str) else DEFAULT_STORE, folder
    return DEFAULT_STORE, current_folder
