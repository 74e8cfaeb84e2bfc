"""Rows of variants to search in: the commits between two revisions, releases of a package, and packages that differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pytest_gpumem.ab.variants import Variant
from pytest_gpumem.bisect.search import Graph
from pytest_gpumem.git import GitError, Revision, git
from pytest_gpumem.requirements.releases import between, is_same, public
from pytest_gpumem.requirements.requirement_set import RequirementSet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.ab.checkout import Checkout

_FIELDS = ("%m", "%H", "%P", "%as", "%an", "%s")
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
    after: tuple[str, ...] | None = None
    """The commits that it comes from, of a search in branches; ``None`` where it comes from the one before it in its row."""
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
        first_parent: Whether a merge stands for all that it brought. Without it the commits of merged branches are there, too,
            and each says what it comes from.

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
    """Return the commits from one to a later one, both included, the oldest first.

    With branches the commits that they left before the first one stand behind it, as its parents: it has all of them.
    """
    (start,) = _log(top, "--max-count=1", first.commit)
    listed = ["--first-parent"] if first_parent else ["--topo-order", "--boundary"]
    others = [
        one for one in _log(top, "--reverse", *listed, f"{first.commit}..{last.commit}") if one.hash != start.hash
    ]
    left = [one for one in others if one.is_boundary]
    inner = [one for one in others if not one.is_boundary]

    def candidate(one: _Commit, after: tuple[str, ...]) -> Candidate:
        named = {first.commit: first, last.commit: last}.get(one.hash, Revision(one.hash, one.hash))
        told = f"{one.subject} ({one.author}, {one.day})"
        return Candidate(Variant(named), one.hash[:9], told, len(one.parents), after=None if first_parent else after)

    return [
        candidate(start, tuple(one.hash for one in left)),
        *(candidate(one, ()) for one in left),
        *(candidate(one, one.parents) for one in inner),
    ]


class _Commit(NamedTuple):
    """A commit as git lists it. One at the boundary is listed since another that is comes from it."""

    is_boundary: bool
    hash: str
    parents: tuple[str, ...]
    day: str
    author: str
    subject: str


def _log(top: Path, *which: str) -> list[_Commit]:
    """Return the commits that ``git log`` lists. Raises `GitError`."""
    # No text of a commit has the character 0, and some have any other that ends a line.
    form = f"--format=tformat:{'%x00'.join(_FIELDS)}"
    texts = git(top, "-c", "log.showSignature=false", "log", "-z", form, *which).split("\0")[:-1]
    rows = (texts[at : at + len(_FIELDS)] for at in range(0, len(texts), len(_FIELDS)))
    return [
        _Commit(mark == "-", commit, tuple(parents.split()), day, author, subject)
        for mark, commit, parents, day, author, subject in rows
    ]


def graph_of(row: Sequence[Candidate]) -> Graph:
    """Return how the candidates of a row come from one another."""
    if any(one.after is None for one in row):
        return Graph.line(len(row))
    places = {one.variant.revision.commit: at for at, one in enumerate(row) if one.variant.revision is not None}
    parents = [tuple(places[name] for name in one.after or () if name in places) for one in row]
    return Graph(parents, backwards=any(one.backwards for one in row))


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

    What only one of both has is not changed, and neither is what is `one_release`.
    """
    differ = sorted(name for name in good.keys() & bad.keys() if not is_same(good[name], bad[name]))
    row = []
    for number in range(len(differ) + 1):
        pins = {**{name: good[name] for name in differ}, **{name: bad[name] for name in differ[:number]}}
        changed = _words(differ[number - 1], bad[differ[number - 1]]) if number else "all as they were"
        row.append(Candidate(Variant(None, _pinned(pins, changed)), changed))
    return differ, row


def one_release(good: Mapping[str, str], bad: Mapping[str, str]) -> list[str]:
    """Return a sentence for each package of which both have another build of one release, which no index tells apart."""
    same = sorted(
        name for name in good.keys() & bad.keys() if good[name] != bad[name] and is_same(good[name], bad[name])
    )
    return [f"{name} {good[name]} and {bad[name]} are one release on the index" for name in same]


def _pinned(pins: Mapping[str, str], name: str) -> RequirementSet:
    return RequirementSet(tuple(_line(one, pins[one]) for one in sorted(pins)), name=name)


def _line(package: str, release: str) -> str:
    return f"{package} {release}" if release.startswith(AT) else f"{package}=={public(release)}"


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
