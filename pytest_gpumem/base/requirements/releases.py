"""List a package's releases on a package index, with ``pip index versions``."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from pytest_gpumem.base.errors import InstallationError
from pytest_gpumem.base.processes import run
from pytest_gpumem.base.requirements.installers import reason_in
from pytest_gpumem.base.requirements.pip import pip_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.base.processes import Stop

_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


def releases_of(package: str, environment: Mapping[str, str], stop: Stop) -> list[str]:
    """Return the package releases on the index for this Python version, the oldest first.

    Raises:
        InstallationError: pip finds no release.
        StopSignal: The process received a signal.
    """
    command = [*pip_command(Path(sys.executable), environment), "index", "versions", "--pre", package]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "versions.log")
        status = run(command, folder=Path.cwd(), environment=environment, output=log, stop=stop)
        answer = log.read_text(encoding="utf-8", errors="replace")
    listed = _LISTED.search(answer)
    if status or listed is None:
        raise InstallationError(f"no releases of {package} were found: {reason_in(answer) or 'pip gave no reason'}")
    return sorted((release.strip() for release in listed.group(1).split(",")), key=_version)


def releases_between(releases: Iterable[str], good: str, bad: str) -> list[str]:
    """Return the releases from ``good`` to ``bad``, including both. Pre-releases between them are left out.

    Example: ``releases_between(["1.0", "1.1rc1", "1.1", "1.2"], "1.2", "1.0")`` returns ``["1.2", "1.1", "1.0"]``.
    In this example ``bad`` is the earlier release, so a bisection finds the release that mended a test.
    """
    ends = {Version(good), Version(bad)}
    low, high = min(ends), max(ends)
    versions = {
        version
        for release in releases
        if (version := _version(release)) in ends or (low <= version <= high and not version.is_prerelease)
    }
    ordered = [str(version) for version in sorted(versions | ends)]
    return ordered if Version(good) == low else ordered[::-1]


def without_local_version(release: str) -> str:
    """Return a release without its local part, because indexes have no local parts: ``2.13.0`` for ``2.13.0+cpu``."""
    return release.partition("+")[0]


def is_same_release(release: str, other: str) -> bool:
    """Return whether two releases are the same release on an index, for example ``2.13.0+cpu`` and ``2.13``."""
    try:
        return Version(without_local_version(release)) == Version(without_local_version(other))
    except InvalidVersion:
        return release == other


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")
