"""The project that a command was started in: its settings as pytest would find them, and its store."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.cli.streams import InputError
from pytest_gpumem.session.settings import SettingsError, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.ab.checkout import Checkout
    from pytest_gpumem.baselines.backend import Backend
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.reports.stored import StoredBaseline
    from pytest_gpumem.session.settings import Settings

QUIET = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""A command has imported the plugin before pytest could, of which pytest warns."""


def project_settings(store: str | None = None) -> Settings:
    """The settings of the project around this folder, with ``addopts``; ``store`` replaces theirs, counted from here.

    pytest says which folder is the root: it is started, and stopped before it loads or collects a file of the project.
    Raises `InputError`.
    """
    found = _Settings()
    said = _started(found, "--noconftest")
    if found.error is None and found.settings is None:
        # addopts may have an option that a conftest.py adds.
        said = _started(found)
    if found.error is not None:
        raise InputError(found.error)
    if found.settings is None:
        raise InputError("pytest cannot be started here:", *said.splitlines())
    if store is None:
        return found.settings
    if not store:
        raise InputError("--store is empty, expected a folder or a URL")
    return replace(found.settings, store=store, store_base=Path.cwd())


def place_of_store(settings: Settings) -> Backend:
    """Where the project's baselines lie. Raises `InputError` when there is no such place."""
    from pytest_gpumem.baselines.backend import BackendError, Folder, backend_of

    try:
        backend = backend_of(settings.store, settings.store_base)
    except BackendError as error:
        raise InputError(str(error)) from None
    if isinstance(backend, Folder) and not backend.root.is_dir():
        raise InputError(
            f"there is no store at {backend.root}; record baselines with `pytest --gpumem-update=new`, or say where they are: "
            "--store PATH"
        )
    return backend


def read_baselines(backend: Backend, device: str | None = None) -> list[StoredBaseline]:
    """The baselines in ``backend``, those of the device with this slug if one is given; sorted. Raises `InputError`."""
    from pytest_gpumem.baselines.backend import BackendError
    from pytest_gpumem.baselines.store import Store, StoreError
    from pytest_gpumem.gate.baseline import Baseline
    from pytest_gpumem.reports.stored import StoredBaseline
    from pytest_gpumem.units import nearest

    store = Store(backend)
    try:
        keys = store.keys()
        slugs = sorted({slug for slug, _ in keys})
        if device is not None and device not in slugs:
            raise InputError(
                f"--device {device}: the store has no baseline of it; "
                + (nearest(device, slugs) if slugs else "it is empty")
            )
        found = [(slug, key, store.find(key, slug)) for slug, key in keys if device in (None, slug)]
    except (StoreError, BackendError) as error:
        raise InputError(str(error)) from None
    baselines = [StoredBaseline(slug, key, entry) for slug, key, entry in found if isinstance(entry, Baseline)]
    return sorted(baselines, key=lambda one: (one.key, one.slug))


def checkout_of(backend: Backend) -> tuple[Checkout, str]:
    """The checkout that the store lies in, and the store's path from its top. Raises `InputError`."""
    from pytest_gpumem.ab.checkout import Checkout
    from pytest_gpumem.baselines.backend import Folder
    from pytest_gpumem.git import GitError

    if not isinstance(backend, Folder):
        raise InputError(f"the store {backend.shown('')} is no folder: only in a git repository does it have a history")
    try:
        checkout = Checkout.around(backend.root)
    except GitError as error:
        raise InputError(f"the store {backend.root} is in no git repository: {error}") from None
    return checkout, checkout.folder.as_posix()


def committed(revision: str, backend: Backend, hint: str = "") -> tuple[str, Backend]:
    """The store as it is in a revision, and what to call that. Raises `InputError`."""
    from pytest_gpumem.baselines.backend import BackendError, GitBackend
    from pytest_gpumem.git import GitError

    checkout, folder = checkout_of(backend)
    try:
        found = checkout.revision(revision)
        return str(found), GitBackend(checkout.top, found.commit, folder, revision)
    except GitError as error:
        raise InputError(f"{error}{hint}") from None
    except BackendError as error:
        raise InputError(str(error)) from None


def devices_of_plugins() -> list[Mapping[str, DeviceFactory]]:
    """The devices that the project's conftest.py and installed plugins add. Raises `InputError`."""
    found = _Devices()
    said = _started(found)
    if found.devices is None:
        raise InputError("pytest cannot be started here:", *said.splitlines())
    return found.devices


def _started(plugin: object, *arguments: str) -> str:
    """What pytest, and plugins that were loaded, had to say."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        pytest.main(["-s", *QUIET, *arguments], plugins=[plugin])
    return said.getvalue().strip()


class _Settings:
    """A plugin that reads the settings and ends pytest, which has read its command line and no more."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.error: str | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode:
        try:
            self.settings = settings_of(config)
        except SettingsError as error:
            self.error = str(error)
        return pytest.ExitCode.OK


class _Devices:
    """A plugin that asks the others for devices and ends pytest."""

    def __init__(self) -> None:
        self.devices: list[Mapping[str, DeviceFactory]] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode:
        self.devices = config.hook.pytest_gpumem_devices(config=config)
        return pytest.ExitCode.OK
