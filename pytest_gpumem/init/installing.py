"""The requirements of a project that the gate installs: files, extras and lines that pip can install. Pure."""

from __future__ import annotations

import configparser
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from pytest_gpumem.init.workflow import REQUIREMENTS, requirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_EXTRAS = ("test", "tests", "testing", "dev")
REQUIREMENTS_FILES = (
    REQUIREMENTS,
    *(f"{pattern}.txt" for extra in _EXTRAS for pattern in (f"requirements-{extra}", f"requirements_{extra}")),
    *(f"{extra}-requirements.txt" for extra in _EXTRAS),
    *(f"requirements/{extra}.txt" for extra in ("base", *_EXTRAS)),
    "tests/requirements.txt",
)
"""Files of requirements, by the names that projects give them."""
_OF_A_RELEASE = ("torch", "torchvision", "torchaudio")
"""Packages of which a release asks for one release of torch."""
# fmt: off
_NO_PACKAGES = frozenset((
    "ci", "bin", "debian", "doc", "docs", "documentation", "manpages", "news", "newsfragments", "changelog", "test",
    "tests", "unit_test", "unit_tests", "example", "examples", "scripts", "tools", "util", "utils", "python",
    "build", "benchmark", "benchmarks", "exercise", "exercises", "htmlcov",
))
# fmt: on
"""Folders that setuptools takes for no packages of a project (`FlatLayoutPackageFinder.DEFAULT_EXCLUDE`)."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that a project is installed from."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The content of its pyproject.toml."""
    setup_cfg: str | None = None
    has_setup_py: bool = False
    folders: Sequence[str] = ()
    """The folders at its top."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The texts of its files of requirements, by path."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The table ``[project]``."""
        found = self.settings.get("project")
        return found if isinstance(found, dict) else {}

    @property
    def is_package(self) -> bool:
        """True if pip can install the project."""
        tools = _table(self.settings, "tool")
        poetry = _table(tools, "poetry")
        if _table(tools, "uv").get("package") is False or poetry.get("package-mode") is False:
            return False
        if self.has_setup_py or _has_name(self.setup_cfg):
            return True
        if "name" in self.metadata and ("version" in self.metadata or "version" in _dynamic(self.metadata)):
            return not self._is_refused_by_setuptools
        return "name" in poetry or "metadata" in _table(tools, "flit")

    @property
    def _is_refused_by_setuptools(self) -> bool:
        """True if setuptools has to find the packages itself, and there are several in a flat layout."""
        build = _table(self.settings, "build-system")
        if not str(build.get("build-backend", "setuptools")).startswith("setuptools"):
            return False
        own = _table(_table(self.settings, "tool"), "setuptools")
        if not own.keys().isdisjoint({"packages", "py-modules"}) or "src" in self.folders:
            return False
        names = [one for one in self.folders if one.isidentifier() and not one.startswith("_")]
        return len([one for one in names if one not in _NO_PACKAGES]) > 1


def lines_of(sources: Sources, release: str | None) -> Iterator[str]:
    """Yield the lines that install a project with what its tests need, beside a release of torch.

    Requirements that ask for another release of torch cannot be installed with it: such a line, and those of what belongs to a
    release of torch, are left out of an extra, which then stands there line by line.
    """
    for path in REQUIREMENTS_FILES:
        if path in sources.files:
            yield f"-r {path}"
    extras = _table(sources.metadata, "optional-dependencies")
    extra = next((one for one in _EXTRAS if one in extras), None)
    of_extra = [str(one) for one in extras[extra]] if extra is not None else []
    fits = all(_fits(one, release) for one in of_extra)
    if sources.is_package:
        yield f"-e .[{extra}]" if extra is not None and fits else "-e ."
    else:
        dependencies = sources.metadata.get("dependencies")
        yield from _of_lines(dependencies if isinstance(dependencies, list) else [], release)
    if not fits or not sources.is_package:
        yield from _of_lines(of_extra, release)
    groups = _table(sources.settings, "dependency-groups")
    group = next((one for one in _EXTRAS if one in groups), None)
    if group is not None and isinstance(groups[group], list):
        yield from _of_lines([one for one in groups[group] if isinstance(one, str)], release)


def unfit_of(sources: Sources, release: str | None) -> Iterator[tuple[str, str]]:
    """Yield the requirements of a project that no release of torch fulfils together with this one, each with its place."""
    dependencies = sources.metadata.get("dependencies")
    if sources.is_package and isinstance(dependencies, list):
        yield from (("pyproject.toml", str(one)) for one in dependencies if not _fits(str(one), release))
    for path, text in sources.files.items():
        yield from ((path, line.strip()) for line in text.splitlines() if not _fits(line, release))


def _of_lines(lines: Sequence[object], release: str | None) -> Iterator[str]:
    """Yield these lines, without those of torch, and of what belongs to a release of torch where one of them is of another."""
    fits = all(_fits(str(one), release) for one in lines)
    for one in map(str, lines):
        read = requirement(one)
        name = None if read is None else canonicalize_name(read.name)
        if name not in (_OF_A_RELEASE[:1] if fits else _OF_A_RELEASE):
            yield one


def _fits(line: str, release: str | None) -> bool:
    """Return whether a requirement, if it is of torch, is fulfilled by a release."""
    read = requirement(line)
    if read is None or release is None or canonicalize_name(read.name) != "torch":
        return True
    applies = read.marker is None or read.marker.evaluate()
    return not applies or read.specifier.contains(release, prereleases=True)


def _table(within: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = within.get(key)
    return found if isinstance(found, dict) else {}


def _dynamic(metadata: Mapping[str, Any]) -> Sequence[object]:
    found = metadata.get("dynamic")
    return found if isinstance(found, list) else []


def _has_name(setup_cfg: str | None) -> bool:
    """Return whether a setup.cfg describes a package, and is not only read by other tools."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(setup_cfg or "")
    except configparser.Error:
        return False
    return parser.has_option("metadata", "name")
