"""Virtual environments for sets of requirements, in the user's cache.

The folder name is a hash over the set and the packages in the current environment, so the same set is installed only once.
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

from pytest_gpumem.base.processes import POLL_SECONDS, run
from pytest_gpumem.base.requirements.errors import InstallationError
from pytest_gpumem.base.requirements.installed import by_module
from pytest_gpumem.base.requirements.installers import Installer
from pytest_gpumem.base.user_cache import CacheError, cache_root, check_private_folder, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from filelock import FileLock

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.base.requirements.requirement_set import RequirementSet

_RECORD = "environment.json"
_LAYER = "gpumem-layer.pth"


@dataclass(frozen=True, slots=True)
class VirtualEnvironment:
    """An environment in the cache: its folder, its requirement set's name, and the releases installed in it, by package."""

    folder: Path
    name: str
    packages: Mapping[str, str]
    created: float
    """Creation time, in seconds since 1970."""
    modules: frozenset[str] = frozenset()
    """The top-level modules in these packages: ``{"transformers", "tokenizers"}``."""

    @property
    def python(self) -> Path:
        """The interpreter's path."""
        return interpreter(self.folder)

    @property
    def site_folders(self) -> tuple[Path, ...]:
        """The package folders on its path, its own first."""
        own = [*self.folder.glob("lib*/python*/site-packages"), *self.folder.glob("Lib/site-packages")]
        is_layer = any((folder / _LAYER).exists() for folder in own)
        return (*own, *(site_folders_here() if is_layer else ()))


def bytes_in(folder: Path) -> int:
    """Return the bytes in a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink() and path.is_file())


def interpreter(folder: Path) -> Path:
    """Return a virtual environment's interpreter."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def cache_folder() -> Path:
    """Return the folder for environments in the user's cache."""
    return cache_root() / "environments"


@dataclass(frozen=True)
class Environments:
    """The environments in a folder."""

    folder: Path
    environment: Mapping[str, str]
    """The environment variables for installers."""

    def finished(self) -> list[VirtualEnvironment]:
        """Return the finished environments, the latest first."""
        environments = (_read(path.parent) for path in self.folder.glob(f"*/{_RECORD}"))
        return sorted(
            (environment for environment in environments if environment is not None),
            key=lambda environment: -environment.created,
        )

    def unfinished(self) -> list[Path]:
        """Return environment folders whose installation is in progress or was interrupted."""
        finished = {environment.folder for environment in self.finished()}
        return [path for path in sorted(self.folder.glob("*")) if path.is_dir() and path not in finished]

    def find(self, requirements: RequirementSet, *, emulated: bool = False) -> VirtualEnvironment | None:
        """Return the cached environment for a set with exact releases; ``None`` if there is none.

        Sets with other requirements are never cached. For example, ``transformers>=4.38`` may install another release tomorrow.

        Raises:
            InstallationError: Other users could have changed the environment.
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
        """Return an environment with the requirements: the cached environment, or a new one.

        A set without exact releases is always installed anew, because a new release may exist. This process keeps
        the environment until its end. A later installation of the same set removes the old environment. If an
        installation fails, its folder is removed.

        Args:
            requirements: The set.
            stop: Ends the installation on a signal.
            emulated: True to install torch for an emulated GPU, without NVIDIA's libraries.
            tick: A function that is called repeatedly during the installation.

        Raises:
            InstallationError: A package cannot be installed, or the cache cannot be used.
            StopSignal: A signal was noted.
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
"""Locks on environments that only this process uses. The system releases them when the process ends, even after a crash."""


def _lock(folder: Path) -> FileLock:
    from filelock import FileLock

    # The lock is not bound to the thread, because the thread that makes an environment ends before the process.
    return FileLock(folder.with_suffix(".lock"), thread_local=False)


def _locked(folder: Path, stop: Stop) -> FileLock:
    """Wait until no other process uses an environment, and return its lock. Raises `StopSignal`."""
    from filelock import Timeout

    lock = _lock(folder)
    while not lock.is_locked:
        stop.check()
        with suppress(Timeout):
            lock.acquire(timeout=POLL_SECONDS)
    return lock


def _remove_unused(folder: Path) -> None:
    """Remove the environments of a set without exact releases, unless a process uses them."""
    from filelock import Timeout

    for environment in folder.parent.glob(f"{folder.name}-*"):
        if environment.is_dir():
            with suppress(Timeout), _lock(environment).acquire(timeout=0) as lock:
                shutil.rmtree(environment, ignore_errors=True)
                Path(lock.lock_file).unlink()


def _key(requirements: RequirementSet, *, emulated: bool) -> str:
    """Return an environment's folder name: a hash over its requirements and the current environment's packages."""
    beneath = packages_here()
    # With another Python, only this plugin comes from the current environment.
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
    """Return the installed packages in this environment: ``["torch==2.13.0", ...]``."""
    return sorted(f"{name}=={version}" for folder in site_folders_here() for name, version in _installed_in(folder))


def site_folders_here() -> list[Path]:
    """Return this interpreter's existing package folders."""
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in map(Path, own) if folder.is_dir()]


def _layer() -> str:
    """Return the ``.pth`` file that adds the current environment's packages to a new environment, below its own."""
    return "".join(f"import site; site.addsitedir({str(folder)!r})\n" for folder in site_folders_here())


def _site_folder(python: Path) -> Path:
    """Return a virtual environment's package folder."""
    command = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _installed_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and release for each package in a folder, as its metadata folder spells them."""
    for info in sorted(folder.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        yield name, version


def _read(folder: Path) -> VirtualEnvironment | None:
    """Return a finished environment; ``None`` if it does not exist or its record cannot be read."""
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
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
