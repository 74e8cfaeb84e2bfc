"""Virtual environments that hold a set of requirements, kept in the user's cache by what they hold."""

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

from pytest_gpumem.processes import POLL_SECONDS, run
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.requirements.installed import by_module
from pytest_gpumem.requirements.installers import Installer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from filelock import FileLock

    from pytest_gpumem.processes import Stop
    from pytest_gpumem.requirements.requirement_set import RequirementSet

_DONE = "environment.json"
_LAYER = "gpumem-layer.pth"


@dataclass(frozen=True, slots=True)
class VirtualEnvironment:
    """An environment in the cache: its folder, the set that it was made for, and the releases installed in it, by name."""

    folder: Path
    name: str
    packages: Mapping[str, str]
    made: float
    """When, in seconds since 1970."""
    modules: frozenset[str] = frozenset()
    """The modules of these packages, by their first names: ``{"transformers", "tokenizers"}``."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return interpreter(self.folder)

    @property
    def site_folders(self) -> tuple[Path, ...]:
        """The folders of installed packages that it sees, its own first."""
        own = [*self.folder.glob("lib*/python*/site-packages"), *self.folder.glob("Lib/site-packages")]
        is_layer = any((one / _LAYER).exists() for one in own)
        return (*own, *(site_folders_here() if is_layer else ()))


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink() and path.is_file())


def interpreter(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def cache_folder() -> Path:
    """Return the folder of the user's cache that environments are kept in."""
    import platformdirs

    return platformdirs.user_cache_path("pytest-gpumem") / "environments"


@dataclass(frozen=True)
class Environments:
    """The environments in one folder."""

    folder: Path
    environment: Mapping[str, str]
    """The variables that installers run with."""

    def kept(self) -> list[VirtualEnvironment]:
        """Return the environments that are there, the latest first."""
        found = (_read(path.parent) for path in self.folder.glob(f"*/{_DONE}"))
        return sorted((one for one in found if one is not None), key=lambda one: -one.made)

    def unfinished(self) -> list[Path]:
        """Return the folders of environments that are being made, or that something broke off."""
        finished = {one.folder for one in self.kept()}
        return [path for path in sorted(self.folder.glob("*")) if path.is_dir() and path not in finished]

    def clear(self) -> None:
        """Remove all environments, also those that were not finished. Raises ``OSError``."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def find(self, wanted: RequirementSet, *, emulated: bool = False) -> VirtualEnvironment | None:
        """Return the environment that holds ``wanted``, if there is one that will hold nothing else tomorrow."""
        return _read(self.folder / _key(wanted, emulated=emulated)) if wanted.is_exact else None

    def make(
        self,
        wanted: RequirementSet,
        stop: Stop,
        *,
        emulated: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> VirtualEnvironment:
        """Return an environment that holds ``wanted``: one that is there, or a new one.

        A set that is not of exact releases is installed anew each time, as another release may have come, into an environment
        that stays until the next one of this set, and while this process runs. Nothing is left of an environment that cannot be
        made. Raises `NotInstalled` and `Stopped`.
        """
        try:
            return self._made(wanted, stop, tick, emulated=emulated)
        except OSError as error:
            raise NotInstalled(f"{self.folder} cannot be written: {error.strerror}") from None

    def _made(
        self, wanted: RequirementSet, stop: Stop, tick: Callable[[], None], *, emulated: bool
    ) -> VirtualEnvironment:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = self.folder / _key(wanted, emulated=emulated)
        if not wanted.is_exact:
            _remove_unused(folder)
            folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}")
        lock = _locked(folder, stop)
        try:
            found = self.find(wanted, emulated=emulated)
            if found is not None:
                return found
            shutil.rmtree(folder, ignore_errors=True)
            try:
                self._fill(folder, wanted, stop, tick, emulated=emulated)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            made = _read(folder)
            assert made is not None, "it has been written"
            return made
        finally:
            if wanted.is_exact:
                lock.release()
            else:
                _in_use.append(lock)

    def _fill(
        self, folder: Path, wanted: RequirementSet, stop: Stop, tick: Callable[[], None], *, emulated: bool
    ) -> None:
        layered = wanted.python is None
        creating = [wanted.python or sys.executable, "-m", "venv", "--without-pip", str(folder)]
        folder.mkdir()
        log = folder.with_suffix(".log")
        try:
            if run(creating, folder=self.folder, environment=self.environment, output=log, stop=stop, tick=tick):
                raise NotInstalled(f"{creating[0]} makes no virtual environment: {_last_line(log)}")
        except OSError as error:
            raise NotInstalled(f"{creating[0]} cannot be run: {error.strerror}") from None
        finally:
            log.unlink(missing_ok=True)
        python = interpreter(folder)
        if not python.exists():
            raise NotInstalled(f"{creating[0]} is no Python: it made no virtual environment")
        own = _site_folder(python)
        if layered:
            (own / _LAYER).write_text(_layer(), encoding="utf-8")
        installer = Installer(python, folder, self.environment, stop, tick)
        installer.install(wanted, layered=layered, emulated=emulated)
        if not layered:
            installer.install_plugin()
        modules = sorted(by_module(str(own)))
        record = {"name": str(wanted), "packages": dict(_installed_in(own)), "modules": modules, "made": time.time()}
        (folder / _DONE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


_in_use: list[FileLock] = []
"""Locks of the environments that this process alone uses; the system releases them when it ends, however it does."""


def _lock(folder: Path) -> FileLock:
    from filelock import FileLock

    # Environments are made in threads, which end before the process does.
    return FileLock(folder.with_suffix(".lock"), thread_local=False)


def _locked(folder: Path, stop: Stop) -> FileLock:
    """Return the lock of an environment, for which another process may have to end first. Raises `Stopped`."""
    from filelock import Timeout

    lock = _lock(folder)
    while not lock.is_locked:
        stop.check()
        with suppress(Timeout):
            lock.acquire(timeout=POLL_SECONDS)
    return lock


def _remove_unused(folder: Path) -> None:
    """Remove the environments of a set of no exact releases that no process uses any more."""
    from filelock import Timeout

    for one in folder.parent.glob(f"{folder.name}-*"):
        if one.is_dir():
            with suppress(Timeout), _lock(one).acquire(timeout=0) as lock:
                shutil.rmtree(one, ignore_errors=True)
                Path(lock.lock_file).unlink()


def _key(wanted: RequirementSet, *, emulated: bool) -> str:
    """Return the name of the folder of an environment, by what it holds and what it lies on."""
    beneath = packages_here()
    # Above another Python this plugin is all that comes from here.
    plugin = [one for one in beneath if one.startswith("pytest_gpumem==")]
    known = [
        [wanted.python, *plugin] if wanted.python else [sys.executable, sys.version, *beneath],
        *wanted.lines,
        "with",
        *wanted.constraints,
        emulated,
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def packages_here() -> list[str]:
    """Return the packages of this environment with their releases: ``["torch==2.13.0", ...]``."""
    return sorted(f"{name}=={version}" for folder in site_folders_here() for name, version in _installed_in(folder))


def site_folders_here() -> list[Path]:
    """Return the folders of installed packages of this interpreter that exist."""
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in map(Path, own) if folder.is_dir()]


def _layer() -> str:
    """Return the file by which an environment sees the packages of this one beneath its own, with their ``.pth`` files."""
    return "".join(f"import site; site.addsitedir({str(folder)!r})\n" for folder in site_folders_here())


def _site_folder(python: Path) -> Path:
    """Return the folder of installed packages of a virtual environment."""
    asked = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())


def _installed_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and release of each package that is installed in a folder, by the names of its metadata."""
    for info in sorted(folder.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        yield name, version


def _read(folder: Path) -> VirtualEnvironment | None:
    """Return a finished environment; ``None`` where there is none, or its record cannot be read."""
    try:
        record = json.loads((folder / _DONE).read_text(encoding="utf-8"))
        found = VirtualEnvironment(
            folder, record["name"], record["packages"], record["made"], frozenset(record["modules"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.python.exists() else None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
