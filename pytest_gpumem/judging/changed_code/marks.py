"""Mark the rows and operators at changed lines in a verdict, and list them first. The code has an old and a new version."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, TypeVar

from packaging.utils import canonicalize_name

from pytest_gpumem.facts.values.composition import explanation_without_callers
from pytest_gpumem.facts.values.operator_counts import NOWHERE, tallies_without_callers
from pytest_gpumem.facts.values.source_lines import alternatives_clause, chains_of, file_and_line, package_of
from pytest_gpumem.judging.changed_code.statements import ChangedLine, TwoVersions
from pytest_gpumem.judging.gate.difference import CHANGED_LINE, with_changed_lines, with_named_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.facts.values.operator_counts import Tally
    from pytest_gpumem.facts.values.source_lines import Chain
    from pytest_gpumem.judging.changed_code.sources import Source
    from pytest_gpumem.judging.gate.difference import Change
    from pytest_gpumem.judging.gate.graph_changes import Kind
    from pytest_gpumem.judging.gate.verdict import Verdict

_T = TypeVar("_T")

_MOVED_SHARE = 0.5
"""A new file counts as a renamed old file if the two files have at least this share of their lines in common."""
_MOST_COMPARED = 300
"""A new file is compared with at most this many removed files."""


class Place(Protocol):
    """A place in the code: the line in the user's code (``site``), the line in a library, and the call chains to them."""

    @property
    def site(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def callers(self) -> tuple[Chain, ...]: ...


@dataclass(frozen=True)
class ChangedCode:
    """Finds the lines that the new version of the code contains and the old version lacks."""

    old: Source
    new: Source
    packages: AbstractSet[str] = frozenset()
    """Normalized names of the packages whose releases differ. The empty name means the project's own code."""
    _files: dict[str, TwoVersions | None] = field(default_factory=dict)

    def with_packages(self, names: Iterable[str]) -> ChangedCode:
        """Return a copy whose ``packages`` are the given names, normalized."""
        return replace(self, packages=frozenset(canonicalize_name(name) for name in names))

    def mark(self, place: Place) -> str:
        """Return a clause if a place's own lines or its callers' lines have changed; an empty text if none has.

        Example: ``changed line``, or ``changed line: `del hidden` is gone``.
        """
        changed = self._innermost(place)
        if not changed:
            return ""
        removed = {line.removed for line in changed.values()}
        return f"{CHANGED_LINE}: `{removed.pop()}` is gone" if len(removed) == 1 and all(removed) else CHANGED_LINE

    def removed_at(self, lines: Iterable[str], kind: Kind) -> str:
        """Return the code whose removal changed all of these lines in this way, or an empty text.

        Example: ``hidden.detach()`` if backward reaches these lines now. A removed ``del hidden`` has no effect on backward.
        """
        all_changed = (changed for line in lines for changed in self._changed(line).values() or [ChangedLine(0)])
        removed = {changed.removed if changed.kind == kind else "" for changed in all_changed}
        return removed.pop() if len(removed) == 1 else ""

    def is_own(self, place: Place) -> bool:
        """Return whether the line of the place itself has changed, in the user's code or in a library."""
        return any(line in self._changed(line) for line in (place.library, place.site) if line)

    def lines(self, place: Place) -> tuple[str, ...]:
        """Return, for each call chain to a place, the changed line nearest to the place."""
        return tuple(self._innermost(place))

    def named(self, place: Place) -> tuple[str, ...]:
        """Return the lines to show first for a place, at most one for each call chain to the place.

        These are the changed lines from `lines`. If no line has changed, these are the lines nearest to the place in packages
        whose releases differ. For example, rotary-embedding-torch calls einops, and einops allocates. If only
        rotary-embedding-torch has another release, its line is shown, and not the line in einops.
        """
        return self.lines(place) or tuple(_first_on_chains(place, self._of_compared_package))

    def _innermost(self, place: Place) -> dict[str, ChangedLine]:
        return _first_on_chains(place, self._changed)

    def _of_compared_package(self, line: str) -> dict[str, None]:
        return {line: None} if canonicalize_name(package_of(line)) in self.packages else {}

    def _changed(self, line: str) -> dict[str, ChangedLine]:
        """Return the changed line with an effect on ``line``, possibly ``line`` itself; empty if there is none."""
        file, number = file_and_line(line)
        if file not in self._files:
            self._files[file] = self._versions(line)
        versions = self._files[file]
        changed = versions.changed_at(number) if versions is not None and number > 0 else None
        return {} if changed is None else {f"{line.rpartition(':')[0]}:{changed.number}": changed}

    def _versions(self, line: str) -> TwoVersions | None:
        """Return both versions of the file with ``line``, or ``None`` if a version is unknown."""
        new = self.new.lines(line)
        old = self.old.lines(line) if new else None
        if not new or old is None:
            return None
        return TwoVersions(old or self._moved(line, new), new)

    def _moved(self, line: str, new: Sequence[str]) -> Sequence[str]:
        """Return the old version of the file with ``line``, if it was renamed. If it is a new file, return no lines."""
        name = PurePosixPath(file_and_line(line)[0].partition(": ")[2] or file_and_line(line)[0]).name
        listed = {*self.new.neighbours(line)}
        removed = [file for file in self.old.neighbours(line) if file not in listed and not self.new.lines(file)]
        removed.sort(key=lambda file: PurePosixPath(file_and_line(file)[0]).name != name)
        new_texts = _texts(new)
        best: Sequence[str] = []
        share = _MOVED_SHARE
        for candidate in removed[:_MOST_COMPARED]:
            lines = self.old.lines(candidate) or []
            old_texts = _texts(lines)
            common = (new_texts & old_texts).total() / max(new_texts.total(), old_texts.total(), 1)
            if common >= share and (common > share or not best):
                best, share = lines, common
        return best


def _texts(lines: Sequence[str]) -> Counter[str]:
    return Counter(text for line in lines if (text := line.strip()))


def _first_on_chains(place: Place, lookup: Callable[[str], dict[str, _T]]) -> dict[str, _T]:
    """Return, for each call chain, the first line with a result from ``lookup``. A chain starts at the place itself."""
    chains = chains_of(place.site, place.library, place.callers)
    firsts = (next(filter(None, map(lookup, chain)), {}) for chain in chains)
    return {line: value for first in firsts for line, value in first.items()}


def with_changed_code(verdict: Verdict, changed: ChangedCode) -> Verdict:
    """Return a verdict in which increases at changed lines are marked and come first."""
    difference = verdict.difference
    if difference is not None:
        difference = with_changed_lines(difference, changed.mark, changed.is_own)
        difference = with_named_lines(difference, changed.named)
        graph = tuple(
            replace(change, removed=changed.removed_at(change.lines, change.kind)) for change in difference.graph
        )
        difference = replace(difference, graph=graph)
    counts = {
        name: tuple(_marked(tally, changed) for tally in tallies) for name, tallies in verdict.count_changes.items()
    }
    return replace(verdict, difference=difference, count_changes=counts)


def without_callers(verdict: Verdict) -> Verdict:
    """Remove callers from a verdict. They are only needed for marking changed lines."""
    measurement, difference = verdict.measurement, verdict.difference
    explanation = measurement.explanation
    counted = (tally.place for tallies in measurement.by_operator.values() for tally in tallies)
    if explanation is None and difference is None and not any(place.callers for place in counted):
        return verdict
    if difference is not None:
        difference = replace(difference, changes=tuple(map(_change_without_callers, difference.changes)))
    return replace(
        verdict,
        measurement=replace(
            measurement,
            explanation=None if explanation is None else explanation_without_callers(explanation),
            by_operator=_without_callers(measurement.by_operator),
        ),
        difference=difference,
        count_changes=_without_callers(verdict.count_changes),
    )


def _change_without_callers(change: Change) -> Change:
    before, after = (None if row is None else replace(row, callers=()) for row in (change.before, change.after))
    alternatives = tuple(replace(row, callers=()) for row in change.alternatives)
    return change._replace(before=before, after=after, alternatives=alternatives)


def _without_callers(counts: Mapping[str, tuple[Tally, ...]]) -> dict[str, tuple[Tally, ...]]:
    return {name: tallies_without_callers(tallies) for name, tallies in counts.items()}


def _marked(tally: Tally, changed: ChangedCode) -> Tally:
    place = tally.place
    named = changed.named(place) if tally.amount > 0 and place != NOWHERE else ()
    if not named:
        return tally
    reason = "; ".join(filter(None, [changed.mark(place), *alternatives_clause(named)]))
    return replace(tally, place=replace(place, named=named[0], reason=reason))
