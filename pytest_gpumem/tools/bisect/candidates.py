"""List the candidates for a bisection, from the good to the bad candidate.

The candidates are the commits between two revisions, a package's releases, or mixtures of two sets of releases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import Revision, git
from pytest_gpumem.base.requirements.releases import is_same_release, releases_between, without_local_version
from pytest_gpumem.base.requirements.requirement_set import RequirementSet
from pytest_gpumem.tools.ab.variants import Variant
from pytest_gpumem.tools.bisect.search import Graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.tools.checkout import Checkout

_FIELDS = ("%m", "%H", "%P", "%as", "%an", "%s")
ADDRESS_PREFIX = "@ "
"""Prefix of a release that is an address instead of a version: ``"@ git+https://..."``."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant to run in a bisection, with a short name and a description.

    Example: the commit ``1f3c9ab04`` with the description ``Add a cache (Ada, 2026-11-02)``.
    """

    variant: Variant
    name: str
    description: str = ""
    parents: int = 1
    """The number of a commit's parents. A merge has two or more."""
    parent_commits: tuple[str, ...] | None = None
    """The hashes of the parent commits, if branches are searched. ``None`` if the only parent is the previous candidate."""
    package: str = ""
    """The package name, if the candidate is a release."""
    backwards: bool = False
    """True if the candidates lead back in time, from a later good to an earlier bad candidate. The search then finds the
    change that fixed the test."""

    @property
    def title(self) -> str:
        """The package, the name and the description in one text: ``transformers 4.38.2``."""
        return " ".join(filter(None, [self.package, self.name, self.description]))


def commits(checkout: Checkout, good: Revision, bad: Revision, *, first_parent: bool = True) -> list[Candidate]:
    """Return the commits from ``good`` to ``bad``, both included.

    Args:
        checkout: A checkout of the repository.
        good: The good commit, which comes first in the result.
        bad: The bad commit, which comes last. If ``good`` descends from ``bad``, the candidates lead back in time, and a
            search finds the commit that fixed the test.
        first_parent: True to leave out commits from merged branches, so a merge commit stands for its branch. False to
            include these commits. Each candidate then names its parents.

    Raises:
        GitError: ``good`` and ``bad`` are the same commit, or neither is an ancestor of the other.
    """
    if good.commit == bad.commit:
        raise GitError(f"{good} and {bad} are the same commit")
    if _is_ancestor(checkout.top, good, bad):
        return _history(checkout.top, good, bad, first_parent=first_parent)
    if _is_ancestor(checkout.top, bad, good):
        row = _history(checkout.top, bad, good, first_parent=first_parent)
        return [replace(candidate, backwards=True) for candidate in reversed(row)]
    raise GitError(
        f"{good} is not an ancestor of {bad}: name an ancestor of {bad.name}, for example {_common(checkout.top, good, bad)}"
    )


def _history(top: Path, first: Revision, last: Revision, *, first_parent: bool) -> list[Candidate]:
    """Return the commits from ``first`` to ``last``, both included, the oldest first.

    If ``first_parent`` is False, a merged branch may start at a commit older than ``first``. This older commit follows right
    after ``first``, and counts as a parent of ``first``, because ``first`` contains its code. So if ``first`` is good, the
    search excludes the older commit.
    """
    (start,) = _log(top, "--max-count=1", first.commit)
    listed = ["--first-parent"] if first_parent else ["--topo-order", "--boundary"]
    later_commits = [
        commit
        for commit in _log(top, "--reverse", *listed, f"{first.commit}..{last.commit}")
        if commit.hash != start.hash
    ]
    branch_points = [commit for commit in later_commits if commit.is_boundary]
    inner = [commit for commit in later_commits if not commit.is_boundary]

    def candidate(commit: _Commit, parents: tuple[str, ...]) -> Candidate:
        revision = {first.commit: first, last.commit: last}.get(commit.hash, Revision(commit.hash, commit.hash))
        description = f"{commit.subject} ({commit.author}, {commit.day})"
        return Candidate(
            Variant(revision),
            commit.hash[:9],
            description,
            len(commit.parents),
            parent_commits=None if first_parent else parents,
        )

    return [
        candidate(start, tuple(commit.hash for commit in branch_points)),
        *(candidate(commit, ()) for commit in branch_points),
        *(candidate(commit, commit.parents) for commit in inner),
    ]


class _Commit(NamedTuple):
    """A commit from ``git log``. If ``is_boundary`` is True, the commit lies just before the requested range."""

    is_boundary: bool
    hash: str
    parents: tuple[str, ...]
    day: str
    author: str
    subject: str


def _log(top: Path, *arguments: str) -> list[_Commit]:
    """Return the commits that ``git log`` lists. Raises `GitError`."""
    # The null character separates the fields, because a commit's subject or author never contains this character.
    form = f"--format=tformat:{'%x00'.join(_FIELDS)}"
    texts = git(top, "-c", "log.showSignature=false", "log", "-z", form, *arguments).split("\0")[:-1]
    rows = (texts[start : start + len(_FIELDS)] for start in range(0, len(texts), len(_FIELDS)))
    return [
        _Commit(mark == "-", commit, tuple(parents.split()), day, author, subject)
        for mark, commit, parents, day, author, subject in rows
    ]


def graph_of(row: Sequence[Candidate]) -> Graph:
    """Return the graph with the parents of each candidate. Candidates are identified by their positions in ``row``."""
    if any(candidate.parent_commits is None for candidate in row):
        return Graph.line(len(row))
    positions = {
        candidate.variant.revision.commit: position
        for position, candidate in enumerate(row)
        if candidate.variant.revision is not None
    }
    parents = [
        tuple(positions[name] for name in candidate.parent_commits or () if name in positions) for candidate in row
    ]
    return Graph(parents, backwards=any(candidate.backwards for candidate in row))


def _is_ancestor(top: Path, earlier: Revision, later: Revision) -> bool:
    try:
        git(top, "merge-base", "--is-ancestor", earlier.commit, later.commit)
    except GitError:
        return False
    return True


def _common(top: Path, good: Revision, bad: Revision) -> str:
    try:
        return git(top, "merge-base", good.commit, bad.commit).strip()[:9]
    except GitError:
        return "a commit from its own history"


def releases(
    package: str, listed: Sequence[str], good: str, bad: str, pinned_releases: Mapping[str, str] | None = None
) -> list[Candidate]:
    """Return a package's releases from ``good`` to ``bad``, both included.

    Args:
        package: The package's name.
        listed: All the package's releases on the package index.
        good: The good release, which comes first.
        bad: The bad release, which comes last. An address such as ``"@ git+https://..."`` counts as newer than all final
            releases.
        pinned_releases: Releases of other packages, by name. Every candidate pins these releases, too.
    """
    if bad.startswith(ADDRESS_PREFIX):
        chosen = [*releases_between(listed, good, max([good, *listed], key=_final_version)), bad]
    else:
        chosen = releases_between(listed, good, bad)
    backwards = not bad.startswith(ADDRESS_PREFIX) and Version(good) > Version(bad)
    return [
        Candidate(
            Variant(None, _pinned({**(pinned_releases or {}), package: release}, _line(package, release))),
            release.removeprefix(ADDRESS_PREFIX),
            package=package,
            backwards=backwards,
        )
        for release in chosen
    ]


def packages(good: Mapping[str, str], bad: Mapping[str, str]) -> tuple[list[str], list[Candidate]]:
    """Return the sorted names of the packages to search, and the candidates. Each candidate changes one more package.

    A package is left out if only ``good`` or only ``bad`` contains it, or if both contain builds of the same release.

    Example: with ``{"numpy": "1.26.4", "torch": "2.5.0"}`` and ``{"numpy": "2.0.1", "torch": "2.6.0"}``, the first candidate
    pins numpy 1.26.4 and torch 2.5.0, the second numpy 2.0.1 and torch 2.5.0, and the third numpy 2.0.1 and torch 2.6.0.
    """
    differ = sorted(name for name in good.keys() & bad.keys() if not is_same_release(good[name], bad[name]))
    row = []
    for number in range(len(differ) + 1):
        pins = {**{name: good[name] for name in differ}, **{name: bad[name] for name in differ[:number]}}
        changed = _title(differ[number - 1], bad[differ[number - 1]]) if number else "no package changed"
        row.append(Candidate(Variant(None, _pinned(pins, changed)), changed))
    return differ, row


def same_release_notes(good: Mapping[str, str], bad: Mapping[str, str]) -> list[str]:
    """Return a clause for each package whose good and bad versions are builds of the same release.

    Example: ``2.6.0+cpu`` and ``2.6.0+cu126``. A package index does not distinguish such builds.
    """
    same = sorted(
        name for name in good.keys() & bad.keys() if good[name] != bad[name] and is_same_release(good[name], bad[name])
    )
    return [f"{name} {good[name]} and {bad[name]} are one release on the index" for name in same]


def _pinned(pins: Mapping[str, str], name: str) -> RequirementSet:
    return RequirementSet(tuple(_line(package, pins[package]) for package in sorted(pins)), name=name)


def _line(package: str, release: str) -> str:
    return (
        f"{package} {release}" if release.startswith(ADDRESS_PREFIX) else f"{package}=={without_local_version(release)}"
    )


def _title(package: str, release: str) -> str:
    return f"{package} {release.removeprefix(ADDRESS_PREFIX)}"


def _final_version(release: str) -> Version:
    """Return a sort key for a release. Every pre-release comes before every final release."""
    try:
        version = Version(release)
    except InvalidVersion:
        return Version("0.dev0")
    return Version("0.dev0") if version.is_prerelease else version


def pins_of(lock_file: RequirementSet) -> dict[str, str]:
    """Return the releases that a lock file pins, by normalized name."""
    return {
        str(canonicalize_name(requirement.name)): next(iter(requirement.specifier)).version
        for requirement in lock_file.requirements
        if len(requirement.specifier) == 1 and next(iter(requirement.specifier)).operator in ("==", "===")
    }
