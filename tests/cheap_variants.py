"""Variants of `gpumem ab` and `gpumem bisect` that cost little, for tests of what is made of their runs.

A run of pytest is a fork of a process that has loaded it, in place of an interpreter of its own, and a release is unpacked, or
listed, without pip. Each is as it is in tests that have none of these.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, parse_wheel_filename

from pytest_gpumem.processes import POLL_SECONDS, run
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.requirements.installers import Installer
from tests import preloaded
from tests.heap import hide_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pytest
    from packaging.requirements import Requirement
    from packaging.version import Version

    from pytest_gpumem.processes import Stop
    from pytest_gpumem.requirements.requirement_set import RequirementSet


_NO_OTHERS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_gpumem.plugin"}
"""To look for plugins takes a quarter of a fork's time."""


def fork_runs(patch: pytest.MonkeyPatch) -> None:
    """Have runs of pytest be forks."""
    preloaded.load()  # not in the threads that start them
    patch.setattr("pytest_gpumem.ab.runs.run", _run)


def unpack_releases(patch: pytest.MonkeyPatch, index: Path, *, listed: bool = True) -> None:
    """Have environments get the newest release in the folder ``index`` that fits.

    ``listed`` says whether pip is not asked for the releases of a package, either.
    """

    def install(installer: Installer, wanted: RequirementSet, *, layered: bool, emulated: bool) -> None:
        assert layered
        assert not emulated
        assert not wanted.constraints
        for requirement in wanted.requirements:
            zipfile.ZipFile(_newest(index, requirement)).extractall(_packages(installer.python))

    def releases_of(package: str, environment: Mapping[str, str], stop: Stop) -> list[str]:
        return [str(version) for version, _ in sorted(_wheels(index, package))]

    patch.setattr(Installer, "install", install)
    if listed:
        patch.setattr("pytest_gpumem.cli.bisect.releases_of", releases_of)


def _newest(index: Path, requirement: Requirement) -> Path:
    fitting = [one for one in _wheels(index, requirement.name) if requirement.specifier.contains(one[0])]
    if not fitting:
        raise NotInstalled("there is no such release")
    return max(fitting)[1]


def _wheels(index: Path, package: str) -> Iterator[tuple[Version, Path]]:
    for path in index.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(path.name)
        if name == canonicalize_name(package):
            yield version, path


def _packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def _run(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    stop: Stop,
    tick: Callable[[], None] = lambda: None,
) -> int:
    if isinstance(command, str):
        return run(command, folder=folder, environment=environment, output=output, stop=stop, tick=tick)
    python, *arguments = command
    assert arguments[:2] == ["-m", "pytest"]
    path = os.pathsep.join([environment["PYTHONPATH"], str(_packages(Path(python)))])
    process = preloaded.start(
        *arguments, cwd=folder, env={**environment, **_NO_OTHERS, "PYTHONPATH": path}, before=hide_what_is_loaded
    )
    try:
        while process.poll() is None:
            stop.check()
            tick()
            process.wait(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
        said = process.communicate()
    with output.open("a", encoding="utf-8") as file:
        file.writelines(said)
    assert process.returncode is not None
    return process.returncode
