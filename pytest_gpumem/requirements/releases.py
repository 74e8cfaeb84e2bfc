"""The releases of a package that an index has, as pip finds them."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from pytest_gpumem.processes import run
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.requirements.installers import reason_in
from pytest_gpumem.requirements.pip import pip_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.processes import Stop

_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


def releases_of(package: str, environment: Mapping[str, str], stop: Stop) -> list[str]:
    """Return all releases of a package for this Python, the oldest first.

    Raises `NotInstalled` where pip finds none, and `Stopped`.
    """
    command = [*pip_command(Path(sys.executable), environment), "index", "versions", "--pre", package]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "versions.log")
        status = run(command, folder=Path.cwd(), environment=environment, output=log, stop=stop)
        answer = log.read_text(encoding="utf-8", errors="replace")
    listed = _LISTED.search(answer)
    if status or listed is None:
        raise NotInstalled(f"no releases of {package} were found: {reason_in(answer) or 'pip told none'}")
    return sorted((one.strip() for one in listed.group(1).split(",")), key=_version)


def between(releases: Iterable[str], good: str, bad: str) -> list[str]:
    """Return the releases from ``good`` to ``bad``, both included, without pre-releases other than these, in their order.

    ``bad`` may be the earlier one: a release that mended something is found as well.
    """
    ends = {Version(good), Version(bad)}
    low, high = min(ends), max(ends)
    found = {
        version
        for one in releases
        if (version := _version(one)) in ends or (low <= version <= high and not version.is_prerelease)
    }
    ordered = [str(version) for version in sorted(found | ends)]
    return ordered if Version(good) == low else ordered[::-1]


def public(release: str) -> str:
    """Return a release without its local part, which is on no index: ``2.13.0`` of ``2.13.0+cpu``."""
    return release.partition("+")[0]


def is_same(one: str, other: str) -> bool:
    """Return whether two are one release on an index: ``2.13.0+cpu`` and ``2.13``."""
    try:
        return Version(public(one)) == Version(public(other))
    except InvalidVersion:
        return one == other


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")
