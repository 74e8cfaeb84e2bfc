"""Select the requirement lines with which the gate's workflow installs a project. Pure functions."""

from __future__ import annotations

import configparser
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from pytest_gpumem.tools.init.workflow import REQUIREMENTS, requirement

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
"""Common paths of requirements files."""
_BOUND_TO_TORCH = ("torch", "torchvision", "torchaudio")
"""Packages whose releases require exactly one torch release each."""
# fmt: off
_NO_PACKAGES = frozenset((
    "ci", "bin", "debian", "doc", "docs", "documentation", "manpages", "news", "newsfragments", "changelog", "test",
    "tests", "unit_test", "unit_tests", "example", "examples", "scripts", "tools", "util", "utils", "python",
    "build", "benchmark", "benchmarks", "exercise", "exercises", "htmlcov",
))
# fmt: on
"""Names of folders that setuptools does not take for packages (`FlatLayoutPackageFinder.DEFAULT_EXCLUDE`)."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The files from which a project is installed."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The parsed pyproject.toml."""
    setup_cfg: str | None = None
    has_setup_py: bool = False
    folders: Sequence[str] = ()
    """The folders beside pyproject.toml."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The text of each requirements file, by path."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The table ``[project]`` in pyproject.toml. Empty if the table is missing."""
        table = self.settings.get("project")
        return table if isinstance(table, dict) else {}

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
        """True if setuptools refuses to install the project, because several folders look like packages."""
        build = _table(self.settings, "build-system")
        if not str(build.get("build-backend", "setuptools")).startswith("setuptools"):
            return False
        own = _table(_table(self.settings, "tool"), "setuptools")
        if not own.keys().isdisjoint({"packages", "py-modules"}) or "src" in self.folders:
            return False
        names = [folder for folder in self.folders if folder.isidentifier() and not folder.startswith("_")]
        return len([name for name in names if name not in _NO_PACKAGES]) > 1


def lines_of(sources: Sources, release: str | None) -> Iterator[str]:
    """Yield the requirement lines for installing a project and its test dependencies together with a torch release.

    pip cannot install an extra that requires another torch release. Instead of such an extra, the lines in the extra are
    yielded, except those for torch, torchvision and torchaudio.

    Args:
        sources: The project's files.
        release: The torch release, such as ``"2.13.0"``, or ``None`` if unknown.

    Example:
        With the extra ``test = ["torch==2.11.0", "numpy"]`` and the release ``"2.13.0"``, a package gets the lines
        ``-e .`` and ``numpy``. If the extra did not pin torch, the line would be ``-e .[test]``.
    """
    for path in REQUIREMENTS_FILES:
        if path in sources.files:
            yield f"-r {path}"
    extras = _table(sources.metadata, "optional-dependencies")
    extra = next((name for name in _EXTRAS if name in extras), None)
    extra_lines = [str(line) for line in extras[extra]] if extra is not None else []
    fits = all(_fits(line, release) for line in extra_lines)
    if sources.is_package:
        yield f"-e .[{extra}]" if extra is not None and fits else "-e ."
    else:
        dependencies = sources.metadata.get("dependencies")
        yield from _without_torch(dependencies if isinstance(dependencies, list) else [], release)
    if not fits or not sources.is_package:
        yield from _without_torch(extra_lines, release)
    groups = _table(sources.settings, "dependency-groups")
    group = next((name for name in _EXTRAS if name in groups), None)
    if group is not None and isinstance(groups[group], list):
        yield from _without_torch([line for line in groups[group] if isinstance(line, str)], release)


def unfit_of(sources: Sources, release: str | None) -> Iterator[tuple[str, str]]:
    """Yield the requirements for another torch release, as pairs of a file's path and a line in this file."""
    dependencies = sources.metadata.get("dependencies")
    if sources.is_package and isinstance(dependencies, list):
        yield from (("pyproject.toml", str(line)) for line in dependencies if not _fits(str(line), release))
    for path, text in sources.files.items():
        yield from ((path, line.strip()) for line in text.splitlines() if not _fits(line, release))


def _without_torch(lines: Sequence[object], release: str | None) -> Iterator[str]:
    """Yield the requirement lines except torch. If a line requires another torch release, also omit torchvision and
    torchaudio.
    """
    fits = all(_fits(str(line), release) for line in lines)
    for text in map(str, lines):
        read = requirement(text)
        name = None if read is None else canonicalize_name(read.name)
        if name not in (_BOUND_TO_TORCH[:1] if fits else _BOUND_TO_TORCH):
            yield text


def _fits(line: str, release: str | None) -> bool:
    """Return False if a requirement line is for torch and excludes the release, and True otherwise."""
    read = requirement(line)
    if read is None or release is None or canonicalize_name(read.name) != "torch":
        return True
    applies = read.marker is None or read.marker.evaluate()
    return not applies or read.specifier.contains(release, prereleases=True)


def _table(within: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = within.get(key)
    return table if isinstance(table, dict) else {}


def _dynamic(metadata: Mapping[str, Any]) -> Sequence[object]:
    fields = metadata.get("dynamic")
    return fields if isinstance(fields, list) else []


def _has_name(setup_cfg: str | None) -> bool:
    """Return whether a setup.cfg describes a package. Many files contain only settings for other tools."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(setup_cfg or "")
    except configparser.Error:
        return False
    return parser.has_option("metadata", "name")
