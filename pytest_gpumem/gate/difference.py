"""The difference of two compositions: its changes add up to the peak's, and a refactoring has none. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_gpumem.gate.graph_changes import GraphChange, GraphChanges
from pytest_gpumem.gate.smaller_rows import Attribution, attribution
from pytest_gpumem.values.composition import REST, Composition, Row, RowText, each_layer, item_bits, joined
from pytest_gpumem.values.layers import Numbers
from pytest_gpumem.values.source_lines import file_and_line, one_of, without_release

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.values.module_calls import Caller


T = TypeVar("T")
Key = Callable[[Row], object]
_BACKWARD = re.compile(r"Backward\d*$")
"""The name of a node of the autograd graph, such as ``MulBackward0``."""
CHANGED_LINE = "changed line"
"""Beginning of the reason of an increase whose line is not in both versions of the code."""
AMONG_SMALLER = "among smaller rows in the baseline"
"""Reason of an increase whose earlier bytes are part of a sum, so that the baseline does not list them."""


def _of_no_layer(row: Row) -> Row:
    """Return what tells a row from others that are of as many layers, bytes and tensors, in whichever release of a package."""
    return replace(_of_no_release(row), nbytes=0, count=0, layers=())


def _of_no_release(row: Row) -> Row:
    return replace(row, library=without_release(row.library))


def _file_and_line(row: Row) -> tuple[str, int]:
    return file_and_line(row.library or row.site)


_SAME: tuple[Key, ...] = (
    _of_no_layer,
    # Moved lines.
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # Renamed modules.
    lambda row: (row.category, row.operator, row.tensor, *_line(row)),
    lambda row: (row.category, row.operator, row.tensor),
    # The same by another operator (``x.softmax()`` and ``F.softmax(x)`` are one; ``a * b`` and ``torch.addcmul`` are not).
    lambda row: (row.category, row.module, row.tensor),
    lambda row: (row.category, row.tensor),
)
"""Keys by which rows are equal, from the strictest to the loosest."""

_MOVED: tuple[Key, ...] = (
    # What is passed on between modules otherwise, but is as large.
    lambda row: (row.category, row.tensor, row.nbytes, row.count),
    lambda row: (row.tensor, row.nbytes, row.count),
)
"""Keys by which a row that is gone from its place is one that is new at another."""

_GREW: tuple[Key, ...] = (
    _of_no_layer,
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # Another dtype, or another shape, at the same place.
    lambda row: (row.category, row.module, row.operator, row.shape, *_line(row)),
    lambda row: (row.category, row.module, row.operator, row.shape),
    lambda row: (row.category, row.module, row.operator, row.dtype, *_line(row)),
    lambda row: (row.category, row.module, row.operator, row.dtype),
    # What was freed early and is not any more.
    lambda row: (row.module, row.operator, row.tensor),
    # Renamed and grown.
    lambda row: (row.category, row.operator, row.tensor),
    # Another dtype, made by another operator: ``x > 0`` and ``(x > 0).float()``.
    lambda row: (row.category, row.module, row.shape, row.count) if row.shape else row,
)
"""Keys by which a row is an earlier one that has changed."""


class Change(NamedTuple):
    """A row that appeared (``before`` is ``None``), disappeared (``after`` is ``None``) or became another."""

    before: RowText | None
    after: RowText | None
    reason: str = ""
    """A clause that says why, where it can be known: ``"was bfloat16, now float32"``."""
    alternatives: tuple[RowText, ...] = ()
    """Rows that may have grown, the largest first, if `REST` grew and nothing proves which row did."""

    @property
    def nbytes(self) -> int:
        """The change in bytes; negative when it shrank."""
        return (self.after.nbytes if self.after else 0) - (self.before.nbytes if self.before else 0)

    @property
    def row(self) -> Row:
        """The row as it is now, or was."""
        row = self.after or self.before
        assert row is not None, "a change has at least one side"
        return row

    def among(self, rows: Collection[Row]) -> tuple[Change, ...]:
        """Return the change if only ``rows`` may have grown. A single row takes as many bytes as it can."""
        if len(rows) != 1:
            return (self._replace(alternatives=tuple(rows)),)
        (row,) = rows
        grown = min(self.nbytes, row.nbytes)
        earlier = Row(row.category, row.nbytes - grown, operator=REST) if row.nbytes > grown else None
        rest = self.nbytes - grown
        sums = [Change(self.before, replace(self.row, nbytes=self.row.nbytes - grown))] if rest else []
        return Change(earlier, row, AMONG_SMALLER if earlier is not None else ""), *sums


@dataclass(frozen=True, slots=True)
class Moved:
    """A peak that moved to another phase of the step."""

    before: str
    """The phase of the baseline's peak: ``backward``."""
    after: str
    """The phase of this peak."""
    compared: str
    """The phase in which the two peaks are compared: ``after``, if the baseline recorded the live tensors of that phase."""
    peak_before: int | None = None
    """Bytes of this step's peak in the phase ``before``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes of a peak's composition."""

    before: int
    """The baseline's peak in bytes; if the peak moved, the peak in the compared phase."""
    after: int
    """This peak in bytes; if the peak moved, the peak in the compared phase."""
    changes: tuple[Change, ...]
    """Each change as ``[row before, row after, reason, alternatives]``, the largest growth first. They add up to the change.
    If both versions of the code are known, changes at changed lines come before the others. The alternatives are the rows
    behind a sum of smaller rows that grew, if nothing proves which of them grew.
    """
    moved: Moved | None = None
    """The phases of the peak, if it moved; otherwise ``None``."""
    graph: tuple[GraphChange, ...] = ()
    """Modules that autograd records now and did not record in the baseline, if rows grew because of it."""

    def __post_init__(self) -> None:
        if any(one.before is None and one.after is None for one in self.changes):
            raise ValueError("growth.changes: a change needs a row before or a row after")

    @property
    def nbytes(self) -> int:
        """The change in bytes; negative when it shrank."""
        return self.after - self.before

    def explaining(self, share: float = 0.8, at_least: int = 3, at_most: int = 5) -> tuple[Change, ...]:
        """Return the rows with more bytes that explain ``share`` of the change, and a few more if they matter."""
        grown = [change for change in self.changes if change.nbytes > 0]
        wanted = share * self.nbytes
        chosen: list[Change] = []
        explained = 0
        for change in grown[:at_most]:
            small = change.nbytes < 0.01 * self.nbytes
            if explained >= wanted and (len(chosen) >= at_least or small):
                break
            chosen.append(change)
            explained += change.nbytes
        return tuple(chosen)


def difference_of_peaks(
    before: Composition,
    after: Composition,
    phases_before: Mapping[str, Composition],
    phases: Mapping[str, Composition],
    callers: Mapping[str, Sequence[Caller]] | None = None,
    function_at: Mapping[str, str] | None = None,
) -> Difference:
    """Return what changed between two peaks; of peaks in different phases, what changed in one of these.

    What is live in both phases now did not grow because the peak moved from one to the other.

    Args:
        before: What was live at the peak, in a baseline.
        after: What is live at the peak now.
        phases_before: What was live at the peaks of other phases, as far as the baseline has it.
        phases: What is live at the peaks of all other phases.
        callers: The callers of modules and functions in the step as it is now.
        function_at: The function of each line now.
    """
    graph = GraphChanges(before, after, callers or {}, function_at or {})
    found = _difference_of_peaks(before, after, phases_before, phases, graph)
    # If a part of the step has a backward now, the peak may move there although nothing grew in the phase that is compared.
    is_open = found.moved is not None and not found.graph
    recorded = [row for row in after.rows if graph.explain_for_certain(row)] if is_open else []
    is_cause = sum(row.nbytes for row in recorded) >= LEAST_SHARE * (after.total - before.total)
    return replace(found, graph=graph.of_rows(recorded)) if recorded and is_cause else found


def _difference_of_peaks(
    before: Composition,
    after: Composition,
    phases_before: Mapping[str, Composition],
    phases: Mapping[str, Composition],
    graph: GraphChanges,
) -> Difference:
    there = phases.get(before.phase)
    if not before.phase or not after.phase or before.phase == after.phase:
        return difference(before, after, graph)
    moved = Moved(before.phase, after.phase, after.phase, None if there is None else there.total)
    if after.phase in phases_before:
        return replace(difference(phases_before[after.phase], after, graph), moved=moved)
    if there is not None:
        return replace(difference(before, there, graph), moved=replace(moved, compared=before.phase))
    return difference(before, after, graph)


LEAST_SHARE = 0.1
"""Share of the increase from which on a row at a line that has changed is named before larger ones at lines that have not."""


def with_changed_lines(
    difference: Difference, mark: Callable[[Row], str], is_own: Callable[[Row], bool] = lambda _: True
) -> Difference:
    """Return a difference that says which increases are at lines that have changed, with these first.

    What grew at a line that is as it was is a consequence of a change elsewhere. If alternatives are at changed lines, only
    these remain.

    Args:
        difference: The difference.
        mark: The clause for a row if the code at its line, or at one of the line's callers, has changed; else empty. It begins
            with `CHANGED_LINE`.
        is_own: Whether it is the line itself. Such rows come first, because a caller may lead to many lines.
    """
    changes = [change for one in difference.changes for change in _with_changed_alternatives(one, mark)]
    changed = [
        one._replace(reason=_joined(mark(one.after), one.reason)) if one.nbytes > 0 and one.after is not None else one
        for one in changes
    ]

    def rank(one: Change) -> int:
        if not one.reason.startswith(CHANGED_LINE) or one.nbytes < LEAST_SHARE * difference.nbytes:
            return 2
        return 0 if is_own(one.row) else 1

    return replace(difference, changes=tuple(sorted(changed, key=rank)))


def _with_changed_alternatives(change: Change, mark: Callable[[Row], str]) -> tuple[Change, ...]:
    changed = tuple(filter(mark, change.alternatives))
    return change.among(changed) if changed else (change,)


def with_named_lines(difference: Difference, named: Callable[[Row], Sequence[str]]) -> Difference:
    """Return a difference whose increases and alternatives name a caller before the line that allocates.

    Args:
        difference: The difference.
        named: The lines to name for a row. Of several the first is named, and the reason says that it is one of them.
    """

    def of_alternative(row: Row) -> Row:
        lines = named(row)
        # No reason can say that the line is one of several.
        return replace(row, named=lines[0]) if len(lines) == 1 else row

    def with_name(one: Change) -> Change:
        one = one._replace(alternatives=tuple(map(of_alternative, one.alternatives)))
        lines = named(one.after) if one.nbytes > 0 and one.after is not None else ()
        if one.after is None or not lines:
            return one
        reason = _joined(one.reason, *one_of(lines))
        return one._replace(after=replace(one.after, named=lines[0]), reason=reason)

    return replace(difference, changes=tuple(map(with_name, difference.changes)))


def difference(before: Composition, after: Composition, graph: GraphChanges | None = None) -> Difference:
    """Return what changed. The rows of a category that a side did not keep, as a baseline's, are compared as one.

    ``graph`` is what autograd records of the step now and did not then; of the two compositions if it is not given.
    """
    graph = graph or GraphChanges(before, after, {}, {})
    was, is_now = _side(before), _side(after)
    old, new = was.rows, is_now.rows
    for key in _SAME:
        old, new = _without_equals(old, new, key)
    old, new = _without_equal_layers(old, new)
    new = _least_increase_first(old, new)
    for key in _MOVED:
        old, new = _without_moved(old, new, key)
    old, new, changes, alternatives = _with_sums(was._replace(rows=old), is_now._replace(rows=new), graph)
    among_smaller = tuple(changes)
    for key in _GREW:
        old, new, found = _paired(old, new, key)
        changes += found
    changes += [Change(row, None) for row in old]
    changes += [Change(None, row) for row in new]
    explained = [
        change._replace(
            reason=_joined(
                reason(change.before, change.after, before, after, graph),
                AMONG_SMALLER if change in among_smaller else "",
            ),
            alternatives=alternatives.get(change.row.category, ()) if change.row.operator == REST else (),
        )
        for change in changes
        if change.nbytes != 0
    ]
    by_graph = [
        change
        for change in explained
        if change.nbytes > 0
        and graph.explain(change.row)
        and not _no_longer_recomputed(change.before, change.row, before, after)
    ]
    # What explains next to nothing of the increase must not stand before all rows.
    is_cause = sum(change.nbytes for change in by_graph) >= LEAST_SHARE * (after.total - before.total)
    graph_changes = graph.of_rows(change.row for change in by_graph) if is_cause else ()
    return Difference(before.total, after.total, _ranked(explained), graph=graph_changes)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _ranked(changes: list[Change]) -> tuple[Change, ...]:
    """Sort the largest increase first.

    Of equal changes forward is before backward, because a tensor in backward follows from one in forward. The others are sorted
    by the increase of their line, counted in changes of this size.
    """
    at_line = _at_line((change.row, change.nbytes) for change in changes)

    def rank(one: Change) -> tuple[int, bool, int, str]:
        is_backward = _BACKWARD.search(one.row.operator) is not None
        return -one.nbytes, is_backward, -(at_line[_line(one.row)] // max(abs(one.nbytes), 1)), one.row.text()

    return tuple(sorted(changes, key=rank))


class _Side(NamedTuple):
    """The listed rows of a composition, and the sums of its other rows."""

    rows: list[Row]
    sums: dict[str, Row]
    """By category. Baselines from older versions have a single sum for all categories, with a count of 0."""
    smallest: int | None
    """Bytes of the smallest listed row. No row in a sum has more. ``None`` if no row is listed."""


def _side(composition: Composition) -> _Side:
    rows = [row for row in composition.rows if row.operator != REST]
    sums = {row.category: row for row in composition.rows if row.operator == REST}
    if composition.rest:
        sums["other"] = Row("other", composition.rest, operator=REST, count=0)
    return _Side(rows, sums, min((row.nbytes for row in rows if row.nbytes > 0), default=None))


def _sum_of(category: str, rows: Iterable[Row]) -> Row:
    rows = list(rows)
    return Row(category, sum(row.nbytes for row in rows), operator=REST, count=sum(row.count for row in rows))


def _without_equals(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Return both sides without the groups of rows that have as many bytes in as many tensors as before."""
    left_old, left_new = [], []
    for mine, theirs in grouped(old, new, key).values():
        if _sums(mine) != _sums(theirs):
            left_old += mine
            left_new += theirs
    return left_old, left_new


def _without_equal_layers(old: list[Row], new: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return both sides without the layers that are as they were, where rows say of which layers they are."""
    left_old, left_new = [], []
    for mine, theirs in grouped(old, new, _SAME[0]).values():
        tells = mine and theirs and any(row.layers for row in (*mine, *theirs))
        different = _different_layers(mine, theirs) if tells else (mine, theirs)
        left_old += different[0]
        left_new += different[1]
    return left_old, left_new


def _different_layers(old: list[Row], new: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return rows that differ in nothing but layers, bytes and counts without what both sides have."""
    (mine, all_mine), (theirs, all_theirs) = _by_layer(old), _by_layer(new)
    of_no_release = {numbers: _of_no_release(row) for numbers, row in theirs.items()}
    same = {numbers for numbers, row in mine.items() if of_no_release.get(numbers) == _of_no_release(row)}
    mine, theirs = ({n: row for n, row in side.items() if n not in same} for side in (mine, theirs))
    all_mine, theirs = _taken_from(all_mine, theirs)
    all_theirs, mine = _taken_from(all_theirs, mine)
    return [*joined(mine.values(), {}), *all_mine], [*joined(theirs.values(), {}), *all_theirs]


def _by_layer(rows: list[Row]) -> tuple[dict[Numbers, Row], list[Row]]:
    """Return a row for each layer that is named, and the rows that are of all of them."""
    of_layer: dict[Numbers, Row] = {}
    whole = []
    for row in rows:
        each = each_layer(row)
        of_layer |= each
        whole += [] if each else [row]
    return of_layer, whole


def _taken_from(whole: list[Row], layers: dict[Numbers, Row]) -> tuple[list[Row], dict[Numbers, Row]]:
    """Return rows of all layers without those of the other side that they hold, the smallest first, and the others."""
    left = dict(layers)
    for numbers, row in sorted(layers.items(), key=lambda pair: (pair[1].count, pair[0])):
        for index, one in enumerate(whole):
            # Blocks of one size: nothing else tells which of them are of this layer.
            if one.count >= row.count and one.nbytes * row.count == row.nbytes * one.count:
                rest = replace(one, nbytes=one.nbytes - row.nbytes, count=one.count - row.count)
                whole = [*whole[:index], *([rest] if rest.count else []), *whole[index + 1 :]]
                del left[numbers]
                break
    return whole, left


def _without_moved(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Return both sides without single rows that only moved; a row whose identity both sides have grew or shrank."""
    stayed = {_identity(row) for row in old} & {_identity(row) for row in new}
    pending = Counter(key(row) for row in old if _identity(row) not in stayed)
    pending &= Counter(key(row) for row in new if _identity(row) not in stayed)

    def left(rows: list[Row]) -> list[Row]:
        remaining = Counter(pending)
        kept = []
        for row in rows:
            if _identity(row) not in stayed and remaining[key(row)] > 0:
                remaining[key(row)] -= 1
            else:
                kept.append(row)
        return kept

    return left(old), left(new)


def _least_increase_first(old: list[Row], new: list[Row]) -> list[Row]:
    """Return ``new`` in an order in which, of equal rows, those are matched first whose line has the least increase.

    So the increase is attributed to as few lines as possible: an edit that saves two tensors more has one line. Of lines with
    an equal increase, those come first that are nearest to where such a row was.
    """
    at_line = _at_line([*((row, row.nbytes) for row in new), *((row, -row.nbytes) for row in old)])
    were: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in old:
        file, number = _file_and_line(row)
        were[file, row.operator, row.tensor].append(number)

    def rank(row: Row) -> tuple[int, int]:
        file, number = _file_and_line(row)
        distances = [abs(number - was) for was in were[file, row.operator, row.tensor]]
        # In rows of this size: a few bytes more at a line are not counted.
        return at_line[_line(row)] // max(row.nbytes, 1), min(distances, default=0)

    return sorted(new, key=rank)


def _at_line(grown: Iterable[tuple[Row, int]]) -> Counter[tuple[str, str]]:
    """Return the change at each line, in bytes."""
    found: Counter[tuple[str, str]] = Counter()
    for row, nbytes in grown:
        found[_line(row)] += nbytes
    return found


def _line(row: Row) -> tuple[str, str]:
    return row.site, without_release(row.library)


def _identity(row: Row) -> tuple[str, str, str, str]:
    return row.category, row.module, row.operator, row.tensor


def _with_sums(
    was: _Side, is_now: _Side, graph: GraphChanges
) -> tuple[list[Row], list[Row], list[Change], dict[str, tuple[Row, ...]]]:
    """Move each row that the other side may have summed up to the sums of its own side.

    Returns:
        The rows and sums on both sides, changes of rows that were partly in a sum, and the alternatives by category.
    """
    old, new = was.rows, is_now.rows
    changes: list[Change] = []
    alternatives: dict[str, tuple[Row, ...]] = {}
    older = any(not row.count for side in (was, is_now) for row in side.sums.values())
    for category in ("other",) if older else sorted({*was.sums, *is_now.sums}):
        sum_before, sum_now = (
            _sum_of(category, side.sums.values() if older else filter(None, [side.sums.get(category)]))
            for side in (was, is_now)
        )
        # A row at a place that both sides list grew or shrank.
        listed = set(map(_of_no_layer, old)) & set(map(_of_no_layer, new))
        of_category = None if older else category
        gone, old = _small_enough(old, of_category, is_now.smallest, 2 * sum_now.nbytes, listed)
        came, new = _small_enough(new, of_category, was.smallest, None, listed)
        before, now = _sum_of(category, [sum_before, *gone]), _sum_of(category, [sum_now, *came])
        blocks = 0 if older else now.count - before.count
        grown, alternatives[category] = _attribution(came, sum_before.nbytes, now.nbytes - before.nbytes, blocks, graph)
        changes += [Change(earlier, row) for earlier, row in grown if earlier is not None]
        old += _rest(before, (earlier for earlier, _ in grown if earlier is not None))
        new += [*(row for earlier, row in grown if earlier is None), *_rest(now, (row for _, row in grown))]
    return old, new, changes, alternatives


def _attribution(rows: list[Row], most: int, growth: int, blocks: int, graph: GraphChanges) -> Attribution:
    """Return which rows grew, as `attribution`. Rows that follow from a change of the ``graph`` come before others.

    Rows of a module that autograd recorded in no call are new for certain. If they have more bytes than the growth, one of
    them grew.
    """
    new = [row for row in rows if graph.is_new(row)]
    left = growth - sum(row.nbytes for row in new)
    if not new or growth <= 0:
        return attribution(rows, most, growth, blocks)
    if left < 0:
        return attribution(new, most, growth, blocks)
    others = [row for row in rows if row not in new]
    of_others = attribution(others, most, left, max(blocks - sum(row.count for row in new), 0))
    return Attribution((*((None, row) for row in new), *of_others.grown), of_others.alternatives)


def _rest(total: Row, others: Iterable[Row]) -> list[Row]:
    """Return the sum without the bytes of other rows, if any bytes remain."""
    nbytes = total.nbytes - sum(row.nbytes for row in others)
    return [Row(total.category, nbytes, operator=REST)] if nbytes else []


def _small_enough(
    rows: Iterable[Row], category: str | None, smallest: int | None, most: int | None, listed: Collection[Row]
) -> tuple[list[Row], list[Row]]:
    """Return the rows that the other side may have in a sum, and the others.

    Args:
        rows: The rows of a side.
        category: The category of the sum; ``None`` for all.
        smallest: Bytes of the smallest row that the other side lists; ``None`` if it lists none.
        most: Bytes that the rows may have together; ``None`` for any.
        listed: Rows without bytes and layers at places that the other side lists.
    """
    small: list[Row] = []
    others: list[Row] = []
    left = most
    for row in sorted(rows, key=lambda row: row.nbytes):
        fits = (smallest is None or row.nbytes <= smallest) and (left is None or row.nbytes <= left)
        if fits and category in (None, row.category) and _of_no_layer(row) not in listed:
            small.append(row)
            left = None if left is None else left - row.nbytes
        else:
            others.append(row)
    return small, others


def _paired(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row], list[Change]]:
    """Return the rows left on both sides when those of a key are paired, the largest with the largest, and the pairs."""
    left_old, left_new, found = [], [], []
    for mine, theirs in grouped(old, new, key).values():
        mine.sort(key=lambda row: -row.nbytes)
        theirs.sort(key=lambda row: -row.nbytes)
        both = min(len(mine), len(theirs))
        found += [Change(before, after) for before, after in zip(mine, theirs, strict=False)]
        left_old += mine[both:]
        left_new += theirs[both:]
    return left_old, left_new, found


def grouped(old: Iterable[T], new: Iterable[T], key: Callable[[T], object]) -> dict[object, tuple[list[T], list[T]]]:
    """Return the elements of both sides by their key."""
    groups: dict[object, tuple[list[T], list[T]]] = defaultdict(lambda: ([], []))
    for side, elements in enumerate((old, new)):
        for one in elements:
            groups[key(one)][side].append(one)
    return groups


def _sums(rows: list[Row]) -> tuple[int, int]:
    return sum(row.nbytes for row in rows), sum(row.count for row in rows)


_COPYING = frozenset({"clone", "contiguous"})


def reason(
    old: Row | None, new: Row | None, before: Composition, after: Composition, graph: GraphChanges | None = None
) -> str:
    """Return a clause that says why ``old`` became ``new``.

    Empty if the reason is not known, if nothing grew, or if the row follows from a change of the ``graph``, which is said once
    for all rows.
    """
    if new is None or new.nbytes <= (old.nbytes if old is not None else 0):
        return ""
    lost = _no_longer_recomputed(old, new, before, after)
    if lost:
        return lost
    if graph is not None and (old is None or old.tensor == new.tensor) and graph.explain(new):
        return ""
    if old is not None:
        return _became(old, new)
    return _appeared(new, before, after)


def _no_longer_recomputed(old: Row | None, new: Row, before: Composition, after: Composition) -> str:
    # Larger or smaller tensors, as of other micro-batches, are called less often as well.
    if new.category != "activation" or (old is not None and old.tensor != new.tensor):
        return ""
    for path, calls in before.recomputed.items():
        now = after.recomputed.get(path, 0)
        related = f"{new.module}.".startswith(f"{path}.") or path.startswith(f"{new.module}.")
        if now < calls and related:
            return f"checkpointing off: {path} was recomputed in {calls} calls, now in {now or 'none'}"
    return ""


def _became(old: Row, new: Row) -> str:
    if old.category == "temporary" and new.category == "activation":
        return "was temporary, now kept"
    if old.tensor and new.tensor and old.shape == new.shape and old.dtype != new.dtype:
        wider = item_bits(new.dtype) > item_bits(old.dtype)
        return f"was {old.dtype}, now {new.dtype}" if wider else f"now {new.dtype}"
    if old.tensor != new.tensor and old.tensor and new.tensor:
        return f"was {old.tensor}, now {new.tensor}"
    if old.count != new.count:
        return f"{old.count} -> {new.count} tensors"
    return ""


def _appeared(new: Row, before: Composition, after: Composition) -> str:
    """Return why a row without a predecessor is there: a copy, another dtype, or a second tensor that is saved."""
    if new.category != "activation" or not new.tensor:
        return ""
    if new.operator in _COPYING:
        return "a copy"
    alike = [row for row in before.rows if row.module == new.module and row.category == new.category]
    saved = {row.operator for row in alike if row.tensor == new.tensor}
    for row in after.rows:
        # At the same line: at another one of the module, what is as large may well be something else.
        beside = (row.module, row.category, row.tensor) == (new.module, new.category, new.tensor)
        same_line = _line(row) == _line(new)
        if beside and same_line and row.operator != new.operator and row.operator in saved:
            return f"saved twice: {row.operator} saves {row.what} as well, as before"
    for row in alike:
        if row.shape == new.shape and 0 < item_bits(row.dtype) < item_bits(new.dtype):
            return f"was {row.dtype} only, now also {new.dtype}"
    return ""
