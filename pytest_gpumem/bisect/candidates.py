"""Rows of variants to search in: the commits between two revisions, releases of a package, and packages that differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pytest_gpumem.ab.variants import Variant
from pytest_gpumem.git import GitError, Revision, git
from pytest_gpumem.requirements.releases import between
from pytest_gpumem.requirements.requirement_set import RequirementSet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.ab.checkout import Checkout

_FIELD = "\x1f"
AT = "@ "
"""The beginning of a release that lies at an address: ``"@ git+https://..."``."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of a row. ``name`` is short, ``told`` says more of it: the commit's subject, author and day."""

    variant: Variant
    name: str
    told: str = ""
    parents: int = 1
    """The number of a commit's parents: several of a merge."""
    package: str = ""
    """The package that it is a release of."""
    backwards: bool = False
    """True if its row leads back in time, from a good one to an earlier bad one: something between mended it."""

    @property
    def title(self) -> str:
        """The name with all that is known of it: ``transformers 4.38.2``."""
        return " ".join(filter(None, [self.package, self.name, self.told]))


def commits(checkout: Checkout, good: Revision, bad: Revision, *, first_parent: bool = True) -> list[Candidate]:
    """Return the commits from ``good`` to ``bad``, both included.

    Args:
        checkout: The checkout.
        good: The first one.
        bad: The last one. It may be the earlier one: a commit that mended something is found as well.
        first_parent: Whether a merge stands for all that it brought.

    Raises:
        GitError: Neither is an ancestor of the other, or both are the same commit.
    """
    if good.commit == bad.commit:
        raise GitError(f"{good} and {bad} are the same commit")
    if _is_ancestor(checkout.top, good, bad):
        return _history(checkout.top, good, bad, first_parent=first_parent)
    if _is_ancestor(checkout.top, bad, good):
        row = _history(checkout.top, bad, good, first_parent=first_parent)
        return [replace(one, backwards=True) for one in reversed(row)]
    raise GitError(
        f"{good} is no ancestor of {bad}: name a commit that {bad.name} comes from, say {_common(checkout.top, good, bad)}"
    )


def _history(top: Path, first: Revision, last: Revision, *, first_parent: bool) -> list[Candidate]:
    """Return the commits from one to a later one, both included, the oldest first."""
    listed = ["--first-parent"] if first_parent else ["--topo-order"]
    form = f"--format=%H{_FIELD}%P{_FIELD}%s{_FIELD}%an{_FIELD}%as"
    lines = git(top, "log", "--reverse", *listed, form, f"{first.commit}..{last.commit}").splitlines()
    lines = [git(top, "log", "-1", form, first.commit).strip("\n"), *lines]
    found = []
    for line in lines:
        commit, parents, subject, author, day = line.split(_FIELD)
        named = {first.commit: first, last.commit: last}.get(commit, Revision(commit, commit))
        found.append(Candidate(Variant(named), commit[:9], f"{subject} ({author}, {day})", len(parents.split())))
    return found


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
        return "one of its own history"


def releases(
    package: str, listed: Sequence[str], good: str, bad: str, beside: Mapping[str, str] | None = None
) -> list[Candidate]:
    """Return the releases of ``package`` among those ``listed`` from ``good`` to ``bad``, both included.

    What lies at an address, as ``"@ git+https://..."``, comes after all that are no pre-releases. ``beside`` are releases that
    other packages have in all of them.
    """
    if bad.startswith(AT):
        found = [*between(listed, good, max([good, *listed], key=_final_version)), bad]
    else:
        found = between(listed, good, bad)
    backwards = not bad.startswith(AT) and Version(good) > Version(bad)
    return [
        Candidate(
            Variant(None, _pinned({**(beside or {}), package: release}, _line(package, release))),
            release.removeprefix(AT),
            package=package,
            backwards=backwards,
        )
        for release in found
    ]


def packages(good: Mapping[str, str], bad: Mapping[str, str]) -> tuple[list[str], list[Candidate]]:
    """Return the packages that differ, sorted, and a row in which one after another gets the release that it has in ``bad``.

    What only one of both has is not changed.
    """
    differ = sorted(name for name in good.keys() & bad.keys() if good[name] != bad[name])
    row = []
    for number in range(len(differ) + 1):
        pins = {**{name: good[name] for name in differ}, **{name: bad[name] for name in differ[:number]}}
        changed = _words(differ[number - 1], bad[differ[number - 1]]) if number else "all as they were"
        row.append(Candidate(Variant(None, _pinned(pins, changed)), changed))
    return differ, row


def _pinned(pins: Mapping[str, str], name: str) -> RequirementSet:
    # A local version, as of a build of torch for the CPU, is on no index.
    return RequirementSet(tuple(_line(one, pins[one]) for one in sorted(pins)), name=name)


def _line(package: str, release: str) -> str:
    return f"{package} {release}" if release.startswith(AT) else f"{package}=={release.partition('+')[0]}"


def _words(package: str, release: str) -> str:
    return f"{package} {release.removeprefix(AT)}"


def _final_version(release: str) -> Version:
    """Return a release for comparison, in which one that is not final comes before all that are."""
    try:
        version = Version(release)
    except InvalidVersion:
        return Version("0.dev0")
    return Version("0.dev0") if version.is_prerelease else version


def pins_of(wanted: RequirementSet) -> dict[str, str]:
    """Return the releases that a lock file pins, by normalized name."""
    return {
        str(canonicalize_name(one.name)): next(iter(one.specifier)).version
        for one in wanted.requirements
        if len(one.specifier) == 1 and next(iter(one.specifier)).operator in ("==", "===")
    }
