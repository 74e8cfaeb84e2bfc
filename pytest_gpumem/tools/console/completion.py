"""Functions with which a shell completes tests, devices, emulated GPUs and files in the arguments of ``gpumem``.

For example, ``gpumem why tests/test_gpt.py::t<TAB>`` offers ``tests/test_gpt.py::test_train``.

Pressing the tab key must not run code from the project or open a connection. So devices from a conftest.py are not completed,
and a store at a URL is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from pytest_gpumem.base.errors import BackendError, SettingsError, StoreError
from pytest_gpumem.emulating.emulation.gpus import EVERY, known_words
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.baselines.location import backend_of, is_url
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN
from pytest_gpumem.plugin.config.options import DEFAULT_STORE
from pytest_gpumem.plugin.config.settings import read_table
from pytest_gpumem.tools.console.project import own_gpus_around

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.judging.gate.baseline import Key


def tests(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of tests with baselines, if they begin with ``incomplete``.

    If no id begins with this text, return the matching names without the file: ``test_train`` for ``test_t``.
    """
    ids = sorted({f"{key.file}::{key.test}" for _, key in _stored(context)})
    return _beginning(ids, incomplete) or _beginning((test_id.partition("::")[2] for test_id in ids), incomplete)


def slugs(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return slugs of devices in the store: ``nvidia-h100-80gb-hbm3`` if ``incomplete`` is ``nv``."""
    return _beginning((slug for slug, _ in _stored(context)), incomplete)


def slugs_and_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching slugs of devices in the store, and also let the shell complete the names of files."""
    stored_slugs = slugs(context, parameter, incomplete)
    return [*map(CompletionItem, stored_slugs), *files(context, parameter, incomplete)]


def cards(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return names of emulated GPUs: ``l4`` and ``l40s`` if ``incomplete`` is ``l``."""
    return _beginning(_cards(), incomplete)


def devices(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return values of ``--device``: ``cuda`` if ``incomplete`` is ``cu``, ``emulated:l4`` if it is ``emulated:l``."""
    emulated = (f"{EMULATED}{card}" for card in (EVERY, *_cards()))
    return _beginning((*BUILT_IN, AUTO, *emulated), incomplete)


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the path of a file."""
    return [CompletionItem(incomplete, type="file")]


def folders(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the path of a folder."""
    return [CompletionItem(incomplete, type="dir")]


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the different words that begin with ``incomplete``.

    Words with an unprintable character, for example a line break, are skipped, because the shell reads one word from each line.
    """
    return list(dict.fromkeys(word for word in words if word.startswith(incomplete) and word.isprintable()))


def _cards() -> tuple[str, ...]:
    try:
        return known_words(own_gpus_around())
    except click.ClickException:
        return known_words()


def _stored(context: click.Context) -> list[tuple[str, Key]]:
    """Return the slug and the key of each stored baseline. The list is empty if the store is no folder or cannot be read."""
    try:
        location, base = _store_of(context)
        return [] if is_url(location) else Store(backend_of(location, base)).keys()
    except (BackendError, StoreError, SettingsError):
        return []


def _store_of(context: click.Context) -> tuple[str, Path]:
    """Return the store's path or URL from ``--store`` or the nearest pyproject.toml, and the folder from which a relative path
    is resolved.
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
