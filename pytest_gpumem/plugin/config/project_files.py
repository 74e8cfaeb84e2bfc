"""Read a project's settings from its files without starting pytest. So no code from a conftest.py, plugin or test runs."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.config.findpaths import determine_setup

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.base.variables import PYTEST_ADDOPTS
from pytest_gpumem.plugin.config.options import OPTIONS, arguments_of
from pytest_gpumem.plugin.config.settings import check_readable, read_table, settings_from
from pytest_gpumem.plugin.config.unread import unread_around

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.plugin.config.settings import Settings

_PLUGIN = ("gpumem", "pytest_gpumem.plugin")
"""The name and the module in this plugin's entry point for pytest."""


@dataclass(frozen=True, slots=True)
class ProjectFiles:
    """The settings that pytest would find if it were started in a folder: the root directory, and the options in
    ``addopts`` and ``PYTEST_ADDOPTS``.

    For example, with ``addopts = "--gpumem-device=cpu"`` in ``pytest.ini``, ``of_addopts["device"]`` is ``"cpu"``.
    """

    root: Path
    started_in: Path
    settings_file: Path | None
    """The file with pytest's settings, for example pytest.ini."""
    of_addopts: Mapping[str, Any]
    """The values of options in ``addopts``, by option name; ``None`` for an option that is not set."""
    of_user: Mapping[str, Any]
    """The values of options in ``PYTEST_ADDOPTS``, in the same form as ``of_addopts``."""
    cache_dir: str
    is_plugin_loaded: bool
    """True if a session in this project loads this plugin."""

    @property
    def settings(self) -> Settings:
        """The settings for a session without typed options. Raises `SettingsError`."""
        values = {name: _joined(self.of_addopts[name], self.of_user[name]) for name in self.of_addopts}
        only_in_file = [name for name in self.of_addopts if self.of_user[name] is None]
        return settings_from(self.root, self.started_in, values, only_in_file)

    @property
    def names_device(self) -> bool:
        """True if an option or a key in ``[tool.gpumem]`` chooses the device. Raises `SettingsError`."""
        options = (self.of_addopts["device"], self.of_user["device"])
        return options != (None, None) or "device" in (read_table(self.root / "pyproject.toml") or {})

    @property
    def unread(self) -> str | None:
        """A warning about settings that pytest does not read, for example in a table with a mistyped name; ``None`` if
        there are none.
        """
        return unread_around(self.root, self.settings_file, self.started_in)

    @property
    def cache(self) -> Path | None:
        """The folder with pytest's cache; ``None`` if ``-p no:cacheprovider`` switches the cache off."""
        blocked = "no:cacheprovider" in (self.of_addopts["plugins"] or []) + (self.of_user["plugins"] or [])
        return None if blocked else cache_folder(self.root, self.cache_dir)


def cache_folder(root: Path, cache_dir: str) -> Path:
    """Return the folder with pytest's cache, from the root directory and pytest's setting ``cache_dir``."""
    return root / os.path.expandvars(Path(cache_dir).expanduser())


def project_files(folder: Path, environment: Mapping[str, str]) -> ProjectFiles:
    """Return the settings of the project that contains a folder.

    Args:
        folder: The folder in which pytest would be started.
        environment: The environment variables, of which ``PYTEST_ADDOPTS`` is read.

    Raises:
        SettingsError: A file cannot be read, or pytest would refuse it.
    """
    of_user = _options(_words(environment.get(PYTEST_ADDOPTS, "")), PYTEST_ADDOPTS)
    nearest = next((path for each in (folder, *folder.parents) if _is_there(path := each / "pyproject.toml")), None)
    if nearest is not None:
        check_readable(nearest)
    root, settings_file, of_pytest = _setup(folder, of_user)
    of_addopts = _options(_words(of_pytest.get("addopts", "")), "addopts")
    pairs = [word.partition("=") for word in (of_addopts["override"] or []) + (of_user["override"] or [])]
    overrides = {name: value for name, _, value in pairs}
    cache_dir = str(overrides.get("cache_dir", of_pytest.get("cache_dir", ".pytest_cache")))
    words = (of_addopts["plugins"] or []) + (of_user["plugins"] or [])
    return ProjectFiles(root, folder, settings_file, of_addopts, of_user, cache_dir, _is_loaded(words, environment))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # reading the file raises the error


def _setup(folder: Path, of_user: Mapping[str, Any]) -> tuple[Path, Path | None, dict[str, Any]]:
    """Return pytest's root directory, the file with pytest's settings, and the settings in this file.

    Raises `SettingsError`.
    """
    arguments: dict[str, Any] = {
        "inifile": of_user["config_file"],
        "override_ini": None,
        "args": [],
        "rootdir_cmd_arg": of_user["rootdir"],
        "invocation_dir": folder,
    }
    # Before pytest 9.0, `determine_setup` has fewer parameters, and returns plain values.
    parameters = inspect.signature(determine_setup).parameters
    try:
        root, file, values, *_ = determine_setup(
            **{name: value for name, value in arguments.items() if name in parameters}
        )
    except (pytest.UsageError, pytest.fail.Exception) as error:
        raise SettingsError(f"pytest cannot read its settings: {' '.join(str(error).split())}") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(f"pytest cannot read its settings: {type(error).__name__}: {error}") from None
    return root, file, {name: getattr(value, "value", value) for name, value in values.items()}


def _words(addopts: object) -> list[str]:
    """Split ``addopts`` into words.

    In TOML, ``addopts`` may be an array. Otherwise it is a text with the quoting rules of a shell.
    """
    if isinstance(addopts, list):
        return [str(word) for word in addopts]
    try:
        return shlex.split(str(addopts))
    except ValueError as error:
        raise SettingsError(f"addopts cannot be split into words: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}")


def _options(words: Sequence[str], where: str) -> dict[str, Any]:
    """Parse this plugin's options in pytest's arguments, and the options ``-p``, ``-o``, ``-c`` and ``--rootdir``."""
    parser = _Parser(prog=where, add_help=False, allow_abbrev=False)
    for option in OPTIONS:
        parser.add_argument(option.flag, dest=option.name, default=None, **arguments_of(option))
    parser.add_argument("-p", dest="plugins", action="append")
    parser.add_argument("-o", "--override-ini", dest="override", action="append")
    parser.add_argument("-c", "--config-file", dest="config_file")
    parser.add_argument("--rootdir")
    return vars(parser.parse_known_args(list(words))[0])


def _joined(in_file: Any, by_user: Any) -> Any:
    """Combine an option's values from ``addopts`` and ``PYTEST_ADDOPTS``.

    Arrays are joined. For other values, ``PYTEST_ADDOPTS`` takes precedence.
    """
    if in_file is None or by_user is None:
        return in_file if by_user is None else by_user
    return [*in_file, *by_user] if isinstance(by_user, list) else by_user


def _is_loaded(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    plugins = [*words, *environment.get("PYTEST_PLUGINS", "").split(",")]
    if any(f"no:{name}" in plugins for name in _PLUGIN):
        return False
    if any(name in plugins for name in _PLUGIN):
        return True
    is_installed = any(point.value == _PLUGIN[1] for point in entry_points(group="pytest11"))
    return is_installed and not environment.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
