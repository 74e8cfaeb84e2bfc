"""Open a session's store. If the session compares or writes baselines, check the store before any test runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.errors import BackendError, StoreError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.judging.baselines.location import backend_of, is_url
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.reporting.reports.file_kinds import kind_of_file

if TYPE_CHECKING:
    from pytest_gpumem.plugin.config.settings import Settings


def open_store(settings: Settings) -> Store:
    """Return the store from the settings. Raises ``pytest.UsageError`` if its folder or URL does not exist."""
    try:
        return Store(backend_of(settings.store, settings.store_base))
    except BackendError as error:
        kind = None if is_url(settings.store) else kind_of_file(settings.store_base / settings.store)
        raise pytest.UsageError(str(error) if kind is None else f"{error}; it is {kind}") from None


def check_store(store: Store, settings: Settings) -> None:
    """Read the whole store, so mistakes in its files are reported before any test runs.

    Raises:
        pytest.UsageError: A file has a mistake, or the store has no baselines for the device in ``--gpumem-against``.
    """
    try:
        store.check()
        stored = store.keys() if settings.against is not None else []
    except (StoreError, BackendError) as error:
        raise pytest.UsageError(str(error)) from None
    slugs = sorted({slug for slug, _ in stored})
    if settings.against is not None and settings.against not in slugs:
        hint = nearest(settings.against, slugs) if slugs else "it is empty"
        raise pytest.UsageError(
            f"--gpumem-against={settings.against}: the store has no baseline for that device; {hint}"
        )
