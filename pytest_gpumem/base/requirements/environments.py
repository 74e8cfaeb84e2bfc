"""Make virtual environments for sets of requirements, in the user's cache.

An environment's folder name is a hash over the requirements and the packages in the current environment. So if the same exact
requirements are needed again, the environment already exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import CacheError, InstallationError
from pytest_gpumem.base.processes import POLL_SECONDS, run
from pytest_gpumem.base.requirements.installed import by_module
from pytest_gpumem.base.requirements.installers import Installer
from pytest_gpumem.base.user_cache import cache_root, check_private_folder, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from filelock import FileLock

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.base.requirements.requirement_set import RequirementSet

_RECORD = "environment.json"
_LAYER = "gpumem-layer.pth"


@dataclass(frozen=True, slots=True)
class VirtualEnvironment:
    """A virtual environment in the cache.

    ``name`` has the requirements as the user wrote them, and ``packages`` has each installed package's release.
    """

    folder: Path
    name: str
    packages: Mapping[str, str]
    created: float
    """The installation's time, in seconds since 1970."""
    modules: frozenset[str] = frozenset()
    """The top-level modules in the installed packages: ``{"transformers", "tokenizers"}``."""

    @property
    def python(self) -> Path:
        """The path to the environment's Python interpreter."""
        return interpreter(self.folder)

    @property
    def site_folders(self) -> tuple[Path, ...]:
        """The folders from which the environment imports packages, its own folders first."""
        own = [*self.folder.glob("lib*/python*/site-packages"), *self.folder.glob("Lib/site-packages")]
        is_layer = any((folder / _LAYER).exists() for folder in own)
        return (*own, *(site_folders_here() if is_layer else ()))


def bytes_in(folder: Path) -> int:
    """Return the bytes in a folder's files, including files in subfolders. Symbolic links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink() and path.is_file())


def interpreter(folder: Path) -> Path:
    """Return the path to the interpreter in a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def cache_folder() -> Path:
    """Return the folder for virtual environments in the user's cache."""
    return cache_root() / "environments"


@dataclass(frozen=True)
class Environments:
    """The virtual environments in ``folder``."""

    folder: Path
    environment: Mapping[str, str]
    """The environment variables with which pip and uv run."""

    def finished(self) -> list[VirtualEnvironment]:
        """Return the completely installed environments, the latest first."""
        environments = (_read(path.parent) for path in self.folder.glob(f"*/{_RECORD}"))
        return sorted(
            (environment for environment in environments if environment is not None),
            key=lambda environment: -environment.created,
        )

    def unfinished(self) -> list[Path]:
        """Return the folders in which an installation is in progress or was interrupted."""
        finished = {environment.folder for environment in self.finished()}
        return [path for path in sorted(self.folder.glob("*")) if path.is_dir() and path not in finished]

    def find(self, requirements: RequirementSet, *, emulated: bool = False) -> VirtualEnvironment | None:
        """Return the cached environment for requirements with exact releases; ``None`` if the cache does not have it.

        Without exact releases the result is always ``None``, because a requirement such as ``transformers>=4.38`` may install
        another release tomorrow.

        Raises:
            InstallationError: Other users could have changed the files in the environment.
        """
        environment = _read(self.folder / _key(requirements, emulated=emulated)) if requirements.is_exact else None
        if environment is not None:
            try:
                check_private_folder(environment.folder)
            except CacheError as error:
                raise InstallationError(str(error)) from None
        return environment

    def make(
        self,
        requirements: RequirementSet,
        stop: Stop,
        *,
        emulated: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> VirtualEnvironment:
        """Return an environment in which the requirements are installed: the cached environment, or a new one.

        Requirements without exact releases are always installed again, because there may be a new release. This process then
        locks the new environment until the process ends. After that, the next installation with the same requirements removes
        the environment. If an installation fails, its folder is removed.

        Args:
            requirements: The requirements to install.
            stop: Ends the installation if the process receives a signal, such as SIGTERM.
            emulated: True to install torch for an emulated GPU, without NVIDIA's libraries.
            tick: A function to call repeatedly during the installation.

        Raises:
            InstallationError: A package cannot be installed, or the cache cannot be used.
            StopSignal: The process received a signal.
        """
        try:
            return self._make(requirements, stop, tick, emulated=emulated)
        except CacheError as error:
            raise InstallationError(str(error)) from None
        except OSError as error:
            raise InstallationError(f"{self.folder} cannot be written: {error.strerror}") from None

    def _make(
        self, requirements: RequirementSet, stop: Stop, tick: Callable[[], None], *, emulated: bool
    ) -> VirtualEnvironment:
        make_private_folder(self.folder)
        folder = self.folder / _key(requirements, emulated=emulated)
        if not requirements.is_exact:
            _remove_unused(folder)
            folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}")
        lock = _locked(folder, stop)
        try:
            cached = self.find(requirements, emulated=emulated)
            if cached is not None:
                return cached
            shutil.rmtree(folder, ignore_errors=True)
            try:
                self._fill(folder, requirements, stop, tick, emulated=emulated)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            environment = _read(folder)
            assert environment is not None, "the record has been written"
            return environment
        finally:
            if requirements.is_exact:
                lock.release()
            else:
                _in_use.append(lock)

    def _fill(
        self, folder: Path, requirements: RequirementSet, stop: Stop, tick: Callable[[], None], *, emulated: bool
    ) -> None:
        layered = requirements.python is None
        creating = [requirements.python or sys.executable, "-m", "venv", "--without-pip", str(folder)]
        folder.mkdir(mode=0o700)
        log = folder.with_suffix(".log")
        try:
            if run(creating, folder=self.folder, environment=self.environment, output=log, stop=stop, tick=tick):
                raise InstallationError(f"{creating[0]} could not make a virtual environment: {_last_line(log)}")
        except OSError as error:
            raise InstallationError(f"{creating[0]} cannot be run: {error.strerror}") from None
        finally:
            log.unlink(missing_ok=True)
        python = interpreter(folder)
        if not python.exists():
            raise InstallationError(f"{creating[0]} is not a Python interpreter: it made no virtual environment")
        own = _site_folder(python)
        if layered:
            (own / _LAYER).write_text(_layer(), encoding="utf-8")
        installer = Installer(python, folder, self.environment, stop, tick)
        installer.install(requirements, layered=layered, emulated=emulated)
        if not layered:
            installer.install_plugin()
        modules = sorted(by_module(str(own)))
        record = {
            "name": str(requirements),
            "packages": dict(_installed_in(own)),
            "modules": modules,
            "made": time.time(),
        }
        (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


_in_use: list[FileLock] = []
"""The locks on environments for this process only. The operating system releases them when the process ends, even after a
crash."""


def _lock(folder: Path) -> FileLock:
    from filelock import FileLock

    # Do not bind the lock to a thread, because the thread that makes an environment ends before this process does.
    return FileLock(folder.with_suffix(".lock"), thread_local=False)


def _locked(folder: Path, stop: Stop) -> FileLock:
    """Wait until no other process holds an environment's lock, acquire the lock, and return it. Raises `StopSignal`."""
    from filelock import Timeout

    lock = _lock(folder)
    while not lock.is_locked:
        stop.check()
        with suppress(Timeout):
            lock.acquire(timeout=POLL_SECONDS)
    return lock


def _remove_unused(folder: Path) -> None:
    """Remove earlier environments for the same requirements without exact releases, unless a running process uses them."""
    from filelock import Timeout

    for environment in folder.parent.glob(f"{folder.name}-*"):
        if environment.is_dir():
            with suppress(Timeout), _lock(environment).acquire(timeout=0) as lock:
                shutil.rmtree(environment, ignore_errors=True)
                Path(lock.lock_file).unlink()


def _key(requirements: RequirementSet, *, emulated: bool) -> str:
    """Return an environment's folder name: a hash over the requirements and the current environment's packages."""
    beneath = packages_here()
    # With another Python, only this plugin comes from the current environment. So only the plugin's release counts.
    plugin = [package for package in beneath if package.startswith("pytest_gpumem==")]
    identity = [
        [requirements.python, *plugin] if requirements.python else [sys.executable, sys.version, *beneath],
        *requirements.lines,
        "with",
        *requirements.constraints,
        emulated,
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def packages_here() -> list[str]:
    """Return the packages installed for this interpreter: ``["torch==2.13.0", ...]``."""
    return sorted(f"{name}=={version}" for folder in site_folders_here() for name, version in _installed_in(folder))


def site_folders_here() -> list[Path]:
    """Return the folders from which this interpreter imports packages, if they exist."""
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in map(Path, own) if folder.is_dir()]


def _layer() -> str:
    """Return the text of a ``.pth`` file for a new environment.

    The file appends this interpreter's package folders to ``sys.path``, so the new environment finds its own packages first.
    """
    return "".join(f"import site; site.addsitedir({str(folder)!r})\n" for folder in site_folders_here())


def _site_folder(python: Path) -> Path:
    """Return the folder into which packages are installed for an interpreter."""
    command = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _installed_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each package's name and release from a folder, as its ``.dist-info`` folder spells them."""
    for info in sorted(folder.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        yield name, version


def _read(folder: Path) -> VirtualEnvironment | None:
    """Return the environment in ``folder``; ``None`` if its installation did not finish, or if its record cannot be read."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        environment = VirtualEnvironment(
            folder, record["name"], record["packages"], record["made"], frozenset(record["modules"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return environment if environment.python.exists() else None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed no reason")
