"""The project that a command was started in: its settings as pytest would find them, and its store."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import pytest

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.baselines.errors import BackendError, StoreError
from pytest_gpumem.baselines.folder import Folder, GitBackend
from pytest_gpumem.baselines.location import backend_of, is_url
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli.streams import InputError, input_errors
from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.project_files import project_files
from pytest_gpumem.config.settings import check_readable, is_loaded, own_gpus_in, read_table
from pytest_gpumem.emulated_process.before_torch import gpu_told
from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.git import GitError, restoring_command
from pytest_gpumem.reports.file_kinds import kind_of_file
from pytest_gpumem.reports.stored import StoredBaseline
from pytest_gpumem.units import nearest
from pytest_gpumem.values.option_words import DEFAULT_DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from pytest_gpumem.baselines.backend import Backend
    from pytest_gpumem.config.project_files import ProjectFiles
    from pytest_gpumem.config.settings import Settings
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.emulation.gpus import Gpu

QUIET = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""A command has imported the plugin before pytest could, of which pytest warns."""

NOT_LOADED = (
    "pytest does not load pytest-gpumem here: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set, addopts has -p no:gpumem, or the package "
    "is not installed (pip install pytest-gpumem); -p pytest_gpumem.plugin in addopts loads it in any case"
)
"""An error, and what to do."""

T = TypeVar("T")


class _NotEmulating:
    """A plugin by which the plugin emulates no GPU, whatever options and settings say."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, None, None]:
        # What is known so early decides about emulation; options are parsed once more afterwards.
        early_config.known_args_namespace.gpumem_device = DEFAULT_DEVICE
        return (yield)


def files_around() -> ProjectFiles:
    """Return the files of the project around this folder. Its code is not run. Raises `InputError`."""
    with input_errors(SettingsError):
        return project_files(Path.cwd(), os.environ)


def project_settings(store: str | None = None) -> Settings:
    """Return the settings of the project around this folder, with ``addopts``. Its code is not run.

    Settings that are not read are pointed out on stderr.

    Args:
        store: Replaces the store of the settings; relative to this folder.

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
    """Return settings with the store that was typed, relative to this folder, if one was. Raises `InputError`."""
    return settings if store is None else replace(settings, store=_named(store), store_base=Path.cwd())


def backend_in(store: str | None) -> Backend:
    """Return the backend of the store that is named, relative to this folder, or of the project around it.

    If it is named, the project's settings are not read. Raises `InputError`.
    """
    if store is not None:
        return backend_at(_named(store), Path.cwd())
    settings = project_settings()
    return backend_at(settings.store, settings.store_base)


def backend_at(location: str, base: Path) -> Backend:
    """Return the backend for a location. Raises `InputError`, which says what a file is that is given for a store."""
    try:
        return backend_of(location, base)
    except BackendError as error:
        kind = None if is_url(location) else kind_of_file(base / location)
        raise InputError(str(error) if kind is None else f"{error}; it is {kind}") from None


def _named(store: str) -> str:
    if not store:
        raise InputError("--store is empty, expected a folder or a URL")
    return store


def store_backend(settings: Settings) -> Backend:
    """Return the backend with the project's baselines. Raises `InputError` when there is no store there."""
    backend = backend_at(settings.store, settings.store_base)
    if isinstance(backend, Folder) and not backend.root.is_dir():
        restore = restoring_command(backend.root)
        restored = f"restore it from git with `{restore}`, " if restore is not None else ""
        raise InputError(
            f"there is no store at {backend.root}; {restored}record baselines with `pytest --gpumem-update=new`, or say where "
            "they are: --store PATH"
        )
    return backend


def read_baselines(backend: Backend, device: str | None = None) -> list[StoredBaseline]:
    """Return the baselines in ``backend``, or those of the device with this slug, sorted. Raises `InputError`."""
    store = Store(backend)
    with input_errors(StoreError, BackendError):
        keys = store.keys()
        slugs = sorted({slug for slug, _ in keys})
        if device is not None and device not in slugs:
            raise InputError(
                f"--slug {device}: the store has no baseline of it; "
                + (nearest(device, slugs) if slugs else "it is empty")
            )
        found = [(slug, key, store.find(key, slug)) for slug, key in keys if device in (None, slug)]
    baselines = [StoredBaseline(slug, key, entry) for slug, key, entry in found if isinstance(entry, Baseline)]
    return sorted(baselines, key=lambda one: (one.key, one.slug))


def checkout_of(backend: Backend) -> tuple[Checkout, str]:
    """Return the checkout that the store lies in, and the store's path from its top. Raises `InputError`."""
    if not isinstance(backend, Folder):
        raise InputError(f"the store {backend.shown('')} is no folder: only in a git repository does it have a history")
    try:
        checkout = Checkout.around(backend.root)
    except GitError as error:
        raise InputError(f"the store {backend.root} is in no git repository: {error}") from None
    return checkout, checkout.folder.as_posix()


def committed(revision: str, backend: Backend, hint: str = "") -> tuple[str, Backend]:
    """Return a revision as people write it, and the store as it is there. Raises `InputError`."""
    checkout, folder = checkout_of(backend)
    try:
        found = checkout.revision(revision)
        return str(found), GitBackend(checkout.top, found.commit, folder, revision)
    except GitError as error:
        raise InputError(f"{error}{hint}") from None
    except BackendError as error:
        raise InputError(str(error)) from None


def devices_of_plugins(*, conftest: bool = True) -> list[Mapping[str, DeviceFactory]]:
    """Return the devices that installed plugins add, and if ``conftest`` is set those of the project's conftest.py.

    Raises `InputError`.
    """

    def devices(config: pytest.Config) -> list[Mapping[str, DeviceFactory]]:
        found: list[Mapping[str, DeviceFactory]] = config.hook.pytest_gpumem_devices(config=config)
        return found

    return _from_pytest(devices) if conftest else read_config(devices)


def read_config(read: Callable[[pytest.Config], T]) -> T:
    """Return what ``read`` finds in pytest's config of the project around this folder; no conftest.py is run.

    Raises `InputError`.
    """
    return _from_pytest(read, "--noconftest", "-o", "addopts=", emulates=False)


def own_gpus_around() -> dict[str, Gpu]:
    """Return the GPUs that the nearest pyproject.toml with settings defines, in this folder or one around it, by name.

    Nothing of the project is run for them, as a program on an emulated GPU need not be pytest's. Raises `InputError`.
    """
    here = Path.cwd()
    with input_errors(SettingsError):
        for folder in (here, *here.parents):
            table = read_table(folder / "pyproject.toml") if _is_there(folder / "pyproject.toml") else None
            if table is not None:
                return {**gpu_told(), **own_gpus_in(table, f"{folder / 'pyproject.toml'}: [tool.gpumem]")}
    return dict(gpu_told())


def run_pytest(arguments: Sequence[str], plugin: object) -> int:
    """Run pytest in this process with a plugin, and return its exit status.

    Raises `InputError` where pytest ends by a pyproject.toml that cannot be read: it expects one that can, with a table `tool`.
    """
    try:
        return int(pytest.main([*arguments, *QUIET], plugins=[plugin]))
    except Exception:
        check_pyproject()
        raise


def check_pyproject() -> None:
    """Raise `InputError` where the nearest pyproject.toml, in this folder or one around it, cannot be read."""
    here = Path.cwd()
    path = next((each / "pyproject.toml" for each in (here, *here.parents) if _is_there(each / "pyproject.toml")), None)
    if path is not None:
        with input_errors(SettingsError):
            check_readable(path)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # it cannot be looked at, which reading it says


def _from_pytest(read: Callable[[pytest.Config], T], *arguments: str, emulates: bool = True) -> T:
    """Start pytest, which finds the root folder, and stop it before it collects; return what ``read`` finds in its config."""
    found: list[T | SettingsError] = []

    class Reader:
        def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
            # The one that is registered last is called first.
            if not emulates and getattr(plugin, "__name__", None) == "pytest_gpumem.plugin":
                manager.register(_NotEmulating())

        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode:
            if not is_loaded(config):
                found.append(SettingsError(NOT_LOADED))
                return pytest.ExitCode.OK
            try:
                found.append(read(config))
            except SettingsError as error:
                found.append(error)
            return pytest.ExitCode.OK

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        run_pytest(["-s", *arguments], Reader())
    if not found:
        raise InputError("pytest cannot be started here:", *output.getvalue().strip().splitlines())
    if isinstance(found[0], SettingsError):
        raise InputError(str(found[0]))
    return found[0]
