"""Read the project in the current folder: its settings, as pytest would read them, and the store with its baselines."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import pytest

from pytest_gpumem.base.errors import BackendError, GitError, SettingsError, StoreError
from pytest_gpumem.base.git import restoring_command
from pytest_gpumem.base.units import nearest
from pytest_gpumem.emulating.emulated_process.before_torch import described_gpus
from pytest_gpumem.facts.values.option_words import DEFAULT_DEVICE
from pytest_gpumem.judging.baselines.folder import Folder, GitBackend
from pytest_gpumem.judging.baselines.location import backend_of, is_url
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.plugin.config.project_files import project_files
from pytest_gpumem.plugin.config.settings import check_readable, is_loaded, own_gpus_in, read_table
from pytest_gpumem.reporting.reports.file_kinds import kind_of_file
from pytest_gpumem.reporting.reports.stored import StoredBaseline
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.console.streams import InputError, input_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.judging.baselines.backend import Backend
    from pytest_gpumem.measuring.devices.registry import DeviceFactory
    from pytest_gpumem.plugin.config.project_files import ProjectFiles
    from pytest_gpumem.plugin.config.settings import Settings

QUIET = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""Arguments for pytest to hide a warning: this plugin was imported before pytest could rewrite the plugin's assertions."""

NOT_LOADED = (
    "pytest does not load pytest-gpumem here: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set, addopts has -p no:gpumem, or the package "
    "is not installed (pip install pytest-gpumem); -p pytest_gpumem.plugin in addopts loads it in any case"
)
"""The error message if pytest does not load this plugin. It says how to fix this."""

T = TypeVar("T")


class _NotEmulating:
    """A pytest plugin to set the device to the default, so this package's plugin never emulates a GPU."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, None, None]:
        # The main plugin emulates a GPU if these arguments name one. The user's device is not lost, because pytest parses all
        # options again later.
        early_config.known_args_namespace.gpumem_device = DEFAULT_DEVICE
        return (yield)


def files_around() -> ProjectFiles:
    """Return the configuration files of the project around the current folder, and run no code from the project.

    Raises:
        InputError: A file cannot be read, or contains a wrong setting.
    """
    with input_errors(SettingsError):
        return project_files(Path.cwd(), os.environ)


def project_settings(store: str | None = None) -> Settings:
    """Return the settings of the project around the current folder, with ``addopts``, and run no code from the project.

    Settings that pytest does not read, for example in a table with a mistyped name, are reported on standard error.

    Args:
        store: The value of ``--store``, which replaces the store in the settings. It is relative to the current folder.

    Raises:
        InputError: A setting is wrong, or a file cannot be read.
    """
    files = files_around()
    with input_errors(SettingsError):
        settings = files.settings
    if files.unread is not None:
        click.echo(f"gpumem: {files.unread}", err=True)
    return with_store(settings, store)


def with_store(settings: Settings, store: str | None) -> Settings:
    """Return ``settings`` with the store replaced by the value of ``--store``, relative to the current folder.

    Raises:
        InputError: ``store`` is empty.
    """
    return settings if store is None else replace(settings, store=_checked(store), store_base=Path.cwd())


def backend_in(store: str | None) -> Backend:
    """Return the backend that reads and writes a store.

    Args:
        store: The value of ``--store``, relative to the current folder. If it is ``None``, the project's settings name the
            store. Otherwise, the settings are not read.

    Raises:
        InputError: The location is not a store, or a setting is wrong.
    """
    if store is not None:
        return backend_at(_checked(store), Path.cwd())
    settings = project_settings()
    return backend_at(settings.store, settings.store_base)


def backend_at(location: str, base: Path) -> Backend:
    """Return the backend that reads and writes a store.

    Args:
        location: A folder or a URL.
        base: The folder from which a relative path is resolved.

    Raises:
        InputError: The location is not a store. If it is a file from pytest-gpumem, for example a report, the message says so.
    """
    try:
        return backend_of(location, base)
    except BackendError as error:
        kind = None if is_url(location) else kind_of_file(base / location)
        raise InputError(str(error) if kind is None else f"{error}; it is {kind}") from None


def _checked(store: str) -> str:
    if not store:
        raise InputError("--store is empty, expected a folder or a URL")
    return store


def store_backend(settings: Settings) -> Backend:
    """Return the backend for the project's store. Raises `InputError` if the store does not exist."""
    backend = backend_at(settings.store, settings.store_base)
    if isinstance(backend, Folder) and not backend.root.is_dir():
        restore = restoring_command(backend.root)
        restored = f"restore it from git with `{restore}`, " if restore is not None else ""
        raise InputError(
            f"there is no store at {backend.root}; {restored}record baselines with `pytest --gpumem-update=new`, or name "
            "another store with --store PATH"
        )
    return backend


def read_baselines(backend: Backend, device: str | None = None) -> list[StoredBaseline]:
    """Return the baselines in a store, sorted by test and slug.

    Args:
        backend: The store.
        device: The slug of a device. If it is given, only the baselines from this device are returned.

    Raises:
        InputError: The store cannot be read, or has no baseline from the device.
    """
    store = Store(backend)
    with input_errors(StoreError, BackendError):
        keys = store.keys()
        slugs = sorted({slug for slug, _ in keys})
        if device is not None and device not in slugs:
            raise InputError(
                f"--slug {device}: the store has no baseline from this device; "
                + (nearest(device, slugs) if slugs else "it is empty")
            )
        entries = [(slug, key, store.find(key, slug)) for slug, key in keys if device in (None, slug)]
    baselines = [StoredBaseline(slug, key, entry) for slug, key, entry in entries if isinstance(entry, Baseline)]
    return sorted(baselines, key=lambda baseline: (baseline.key, baseline.slug))


def checkout_of(backend: Backend) -> tuple[Checkout, str]:
    """Return the git checkout around the store, and the store's path below the top of the checkout.

    Raises:
        InputError: The store is not a folder, or is not in a git repository.
    """
    if not isinstance(backend, Folder):
        raise InputError(
            f"the store {backend.shown('')} is not a folder, but only a folder in a git repository has a history; name such a "
            "store with --store PATH"
        )
    try:
        checkout = Checkout.around(backend.root)
    except GitError as error:
        raise InputError(
            f"the store {backend.root} is not in a git repository, so it has no history: {error}"
        ) from None
    return checkout, checkout.folder.as_posix()


def committed(revision: str, backend: Backend, hint: str = "") -> tuple[str, Backend]:
    """Return a readable name for a git revision, and a backend that reads the store at this revision.

    Args:
        revision: The revision, for example ``"main"``.
        backend: The store in the current checkout.
        hint: The end of the error message if git does not know the revision.

    Raises:
        InputError: git does not know the revision, or the store is not in a git repository.
    """
    checkout, folder = checkout_of(backend)
    try:
        resolved = checkout.revision(revision)
        return str(resolved), GitBackend(checkout.top, resolved.commit, folder, revision)
    except GitError as error:
        raise InputError(f"{error}{hint}") from None
    except BackendError as error:
        raise InputError(str(error)) from None


def devices_of_plugins(*, conftest: bool = True) -> list[Mapping[str, DeviceFactory]]:
    """Call the hook ``pytest_gpumem_devices``, and return the devices from each plugin by name.

    Args:
        conftest: True to also run the project's conftest.py, and to return its devices.

    Raises:
        InputError: pytest cannot be started here.
    """

    def devices(config: pytest.Config) -> list[Mapping[str, DeviceFactory]]:
        factories: list[Mapping[str, DeviceFactory]] = config.hook.pytest_gpumem_devices(config=config)
        return factories

    return _from_pytest(devices) if conftest else read_config(devices)


def read_config(read: Callable[[pytest.Config], T]) -> T:
    """Call ``read`` with pytest's config for the project around the current folder, and return the result.

    No conftest.py runs, and no GPU is emulated. For example, ``read_config(lambda config: config.rootpath)`` returns pytest's
    root directory.

    Raises:
        InputError: pytest cannot be started here, or ``read`` raised a `SettingsError`.
    """
    return _from_pytest(read, "--noconftest", "-o", "addopts=", emulates=False)


def own_gpus_around() -> dict[str, Gpu]:
    """Return the project's own GPUs in ``[tool.gpumem.gpus]``, by name.

    They come from the nearest pyproject.toml with a table ``[tool.gpumem]``, in the current folder or its parents. pytest is
    not started, because a program on an emulated GPU need not be in a project with tests.

    Raises:
        InputError: A pyproject.toml cannot be read, or defines a GPU wrongly.
    """
    current_folder = Path.cwd()
    with input_errors(SettingsError):
        for folder in (current_folder, *current_folder.parents):
            table = read_table(folder / "pyproject.toml") if _exists(folder / "pyproject.toml") else None
            if table is not None:
                return {**described_gpus(), **own_gpus_in(table, f"{folder / 'pyproject.toml'}: [tool.gpumem]")}
    return dict(described_gpus())


def run_pytest(arguments: Sequence[str], plugin: object) -> int:
    """Run pytest in this process with an additional plugin, and return pytest's exit status.

    Raises:
        InputError: pytest failed because the nearest pyproject.toml cannot be read, or its ``tool`` is not a table.
    """
    try:
        return int(pytest.main([*arguments, *QUIET], plugins=[plugin]))
    except Exception:
        check_pyproject()
        raise


def check_pyproject() -> None:
    """Raise `InputError` if the nearest pyproject.toml, in this folder or its parents, cannot be read."""
    current_folder = Path.cwd()
    paths = (folder / "pyproject.toml" for folder in (current_folder, *current_folder.parents))
    path = next(filter(_exists, paths), None)
    if path is not None:
        with input_errors(SettingsError):
            check_readable(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # The later read of the file raises the same error, and its message names the file.


def _from_pytest(read: Callable[[pytest.Config], T], *arguments: str, emulates: bool = True) -> T:
    """Start pytest with its command-line ``arguments``, call ``read`` with its config, and stop before tests are collected."""
    results: list[T | SettingsError] = []

    class Reader:
        def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
            # Register _NotEmulating after the main plugin, because pytest calls the hooks of later plugins first.
            if not emulates and getattr(plugin, "__name__", None) == "pytest_gpumem.plugin":
                manager.register(_NotEmulating())

        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode:
            if not is_loaded(config):
                results.append(SettingsError(NOT_LOADED))
                return pytest.ExitCode.OK
            try:
                results.append(read(config))
            except SettingsError as error:
                results.append(error)
            return pytest.ExitCode.OK

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        run_pytest(["-s", *arguments], Reader())
    if not results:
        raise InputError("pytest cannot be started here:", *output.getvalue().strip().splitlines())
    if isinstance(results[0], SettingsError):
        raise InputError(str(results[0]))
    return results[0]
