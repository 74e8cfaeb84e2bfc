"""Compare the rows in the baseline's composition with the rows in the current composition. Pure.

The bytes of all changes add up to the change of the peak. A refactoring that allocates the same tensors causes no changes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_gpumem.facts.values.annotations import ADDED
from pytest_gpumem.facts.values.composition import REST, Composition, Row, RowText, each_layer, item_bits, join_layers
from pytest_gpumem.facts.values.layers import Numbers
from pytest_gpumem.facts.values.source_lines import alternatives_clause, file_and_line, without_release
from pytest_gpumem.judging.gate.graph_changes import GraphChange, GraphChanges
from pytest_gpumem.judging.gate.smaller_rows import Attribution, attribution

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.facts.values.module_calls import Caller


T = TypeVar("T")
Key = Callable[[Row], object]
_BACKWARD = re.compile(r"Backward\d*$")
"""The end of an autograd node's name, such as ``MulBackward0``."""
CHANGED_LINE = "changed line"
"""The beginning of a reason for an increase, if the code at the row's line or at a caller's line has changed."""
AMONG_SMALLER = "among smaller rows in the baseline"
"""The reason for an increase if the baseline does not list the row, but has its earlier bytes in the sum over smaller rows."""


def _without_amounts(row: Row) -> Row:
    """Return a key for a row, without its layers, bytes, tensor count and package release."""
    return replace(_without_release(row), nbytes=0, count=0, layers=())


def _without_release(row: Row) -> Row:
    return replace(row, library=without_release(row.library))


def _file_and_line(row: Row) -> tuple[str, int]:
    return file_and_line(row.library or row.site)


_EQUAL_BY: tuple[Key, ...] = (
    _without_amounts,
    # An edit above a line moves the line, so this key does not contain the line.
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # A module may have been renamed.
    lambda row: (row.category, row.operator, row.tensor, *_line(row)),
    lambda row: (row.category, row.operator, row.tensor),
    # Another operator may compute the same tensor. Example: ``a * b + c`` became ``torch.addcmul(c, a, b)``.
    lambda row: (row.category, row.module, row.tensor),
    lambda row: (row.category, row.tensor),
)
"""Keys for finding the baseline's rows among the current rows, from the strictest to the loosest.

Example: an edit above ``model.py:88`` moves the line to ``model.py:90``. For a row at this line, the first key is different
now. The second key does not contain the line, so the row ``activation | blocks.*.attn | _softmax`` is found."""

_MOVED_BY: tuple[Key, ...] = (
    # The same tensors now come from another module or operator.
    lambda row: (row.category, row.tensor, row.nbytes, row.count),
    # The same tensors are now in another category.
    lambda row: (row.tensor, row.nbytes, row.count),
)
"""Keys for finding moved rows. If a disappeared row and a new row have the same key, the tensors only moved."""

_CHANGED_BY: tuple[Key, ...] = (
    _without_amounts,
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # The tensor from the same module and operator has another dtype or another shape.
    lambda row: (row.category, row.module, row.operator, row.shape, *_line(row)),
    lambda row: (row.category, row.module, row.operator, row.shape),
    lambda row: (row.category, row.module, row.operator, row.dtype, *_line(row)),
    lambda row: (row.category, row.module, row.operator, row.dtype),
    # The tensor has another category. Example: a temporary tensor became an activation.
    lambda row: (row.module, row.operator, row.tensor),
    # The module was renamed, and the row grew.
    lambda row: (row.category, row.operator, row.tensor),
    # Another operator makes another dtype: ``x > 0`` became ``(x > 0).float()``.
    lambda row: (row.category, row.module, row.shape, row.count) if row.shape else row,
)
"""Keys for finding changed rows. A row in the baseline and a current row with the same key become one change.

Example: autocast was lost, so ``bfloat16[8, 4, 256, 256]`` from ``_softmax`` is now ``float32[8, 4, 256, 256]``. The
third key contains the shape, but not the dtype. So the two rows are one change: ``was bfloat16, now float32``."""


class Change(NamedTuple):
    """A row that appeared (``before`` is ``None``), disappeared (``after`` is ``None``) or changed.

    Example:
        ``Change(Row("activation", 4096, tensor="bfloat16[8, 256]"), Row("activation", 8192, tensor="float32[8, 256]"))`` has
        4096 more bytes.
    """

    before: RowText | None
    after: RowText | None
    reason: str = ""
    """A clause with the reason, or an empty text if the reason is unknown: ``"was bfloat16, now float32"``."""
    alternatives: tuple[RowText, ...] = ()
    """Rows that may have grown, the largest first, if a sum of smaller rows (`REST`) grew and nothing proves which row did."""

    @property
    def nbytes(self) -> int:
        """The change in bytes; negative if the row shrank or disappeared."""
        return (self.after.nbytes if self.after else 0) - (self.before.nbytes if self.before else 0)

    @property
    def row(self) -> Row:
        """The current row, or the baseline's row if the row disappeared."""
        row = self.after or self.before
        assert row is not None, "a change has a row before or a row after"
        return row

    def among(self, rows: Collection[Row]) -> tuple[Change, ...]:
        """Return this change in a sum over smaller rows, after it became known that only ``rows`` may have grown.

        Several rows become the change's alternatives. A single row gets its own change, with at most the row's bytes, and the
        remaining bytes stay in the sum's change.

        Example:
            The sum grew by 900 bytes, and the only row has 700 bytes. Then the row has grown by 700 bytes, and the sum by 200
            bytes.
        """
        if len(rows) != 1:
            return (self._replace(alternatives=tuple(rows)),)
        (row,) = rows
        grown = min(self.nbytes, row.nbytes)
        earlier = Row(row.category, row.nbytes - grown, operator=REST) if row.nbytes > grown else None
        rest = self.nbytes - grown
        sums = [Change(self.before, replace(self.row, nbytes=self.row.nbytes - grown))] if rest else []
        return Change(earlier, row, AMONG_SMALLER if earlier is not None else ""), *sums


@dataclass(frozen=True, slots=True)
class PeakMove:
    """A move of the step's peak from one phase, in the baseline, to another phase in the current step."""

    before: str
    """The phase with the baseline's peak: ``backward``."""
    after: str
    """The phase with the current peak: ``optimizer``."""
    compared: str
    """The phase in which the two peaks are compared: ``after`` if the baseline recorded that phase's live tensors, otherwise
    ``before``."""
    peak_before: int | None = None
    """The current step's peak within the phase ``before``, in bytes; ``None`` if it is unknown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes between the baseline's peak and the current peak, row by row.

    Example:
        The peak grew from 5,000 to 7,000 bytes. A new ``clone`` has 2,500 bytes, and a buffer is 500 bytes smaller. So
        ``changes`` has two changes with +2,500 and -500 bytes, and ``nbytes`` is 2,000.
    """

    before: int
    """The baseline's peak in bytes. If the peak moved to another phase, the baseline's peak in the compared phase."""
    after: int
    """The current peak in bytes. If the peak moved to another phase, the current peak in the compared phase."""
    changes: tuple[Change, ...]
    """The changes, the largest growth first. Their bytes add up to the difference. If both versions of the code are known,
    changes at changed lines come first, unless they have less than 10 % of the growth.

    In JSON, a change is ``[row before, row after, reason, alternatives]``.
    """
    moved: PeakMove | None = field(default=None, metadata=ADDED)
    """The phases before and after the move, if the peak moved to another phase; otherwise ``None``."""
    graph: tuple[GraphChange, ...] = field(default=(), metadata=ADDED)
    """Modules whose calls autograd records now and did not record in the baseline, if rows grew because of this."""

    def __post_init__(self) -> None:
        if any(change.before is None and change.after is None for change in self.changes):
            raise ValueError("growth.changes: a change needs a row before or a row after")

    @property
    def nbytes(self) -> int:
        """The change of the peak in bytes; negative if the peak shrank."""
        return self.after - self.before

    def explaining(self, share: float = 0.8, at_least: int = 3, at_most: int = 5) -> tuple[Change, ...]:
        """Return the first increases that together explain a share of the difference.

        Args:
            share: The share to explain: 0.8 is 80 %.
            at_least: The number of increases to return even if fewer explain the share. Of these, increases below 1 % of the
                difference are left out once the share is explained.
            at_most: The upper bound for the number of increases, even if they do not explain the share.
        """
        grown = [change for change in self.changes if change.nbytes > 0]
        target = share * self.nbytes
        chosen: list[Change] = []
        explained = 0
        for change in grown[:at_most]:
            small = change.nbytes < 0.01 * self.nbytes
            if explained >= target and (len(chosen) >= at_least or small):
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
    """Return the changes between the baseline's peak and the current peak.

    If the peaks are in different phases, two peaks in the same phase are compared instead. A comparison of peaks in different
    phases would report unchanged tensors as new, only because the peak moved to their phase.

    Example:
        The baseline's peak of 40 MB is in backward. Now the optimizer's peak is 42 MB and the peak in backward is still 40
        MB. If the baseline recorded 38 MB in the optimizer, the difference is 42 - 38 = 4 MB, from the optimizer's tensors. If
        the baseline recorded nothing in the optimizer, both peaks in backward are compared, and the difference is 0.

    Args:
        before: The composition of the baseline's peak.
        after: The composition of the current peak.
        phases_before: The baseline's compositions at the peaks of phases other than ``before``'s.
        phases: The current step's compositions at the peaks of phases other than ``after``'s.
        callers: The callers of modules and functions in the current step.
        function_at: The function around each line in the current step, such as ``step()``.
    """
    graph = GraphChanges(before, after, callers or {}, function_at or {})
    changes = _difference_of_peaks(before, after, phases_before, phases, graph)
    # A lost no_grad may add a backward pass, and the peak may move into this pass although no row grew in the compared phase.
    # So look for rows from a graph change at the current peak.
    lacks_cause = changes.moved is not None and not changes.graph
    recorded = [row for row in after.rows if graph.explain_for_certain(row)] if lacks_cause else []
    is_cause = sum(row.nbytes for row in recorded) >= LEAST_SHARE * (after.total - before.total)
    return replace(changes, graph=graph.of_rows(recorded)) if recorded and is_cause else changes


def _difference_of_peaks(
    before: Composition,
    after: Composition,
    phases_before: Mapping[str, Composition],
    phases: Mapping[str, Composition],
    graph: GraphChanges,
) -> Difference:
    same_phase = phases.get(before.phase)
    if not before.phase or not after.phase or before.phase == after.phase:
        return difference(before, after, graph)
    moved = PeakMove(before.phase, after.phase, after.phase, None if same_phase is None else same_phase.total)
    if after.phase in phases_before:
        return replace(difference(phases_before[after.phase], after, graph), moved=moved)
    if same_phase is not None:
        return replace(difference(before, same_phase, graph), moved=replace(moved, compared=before.phase))
    return difference(before, after, graph)


LEAST_SHARE = 0.1
"""A row at a changed line comes before larger rows at unchanged lines if it has at least this share of the increase.
A graph change is reported only if its rows have at least this share of the increase."""


def with_changed_lines(
    difference: Difference, mark: Callable[[Row], str], is_own: Callable[[Row], bool] = lambda _: True
) -> Difference:
    """Return a difference in which increases at changed lines are marked and come first.

    An increase at an unchanged line follows from an edit at another line. If an increase has several alternatives,
    and some are at changed lines, the alternatives at unchanged lines are removed.

    Args:
        difference: The difference.
        mark: Returns a clause that begins with `CHANGED_LINE` if the code at a row's line, or at one of the line's callers,
            has changed, and an empty text if this code has not changed.
        is_own: Returns whether the row's own line has changed. Such rows come before rows with a changed caller, because a
            caller may lead to many lines.
    """
    changes = [change for unmarked in difference.changes for change in _with_changed_alternatives(unmarked, mark)]
    marked = [
        change._replace(reason=_joined(mark(change.after), change.reason))
        if change.nbytes > 0 and change.after is not None
        else change
        for change in changes
    ]

    def rank(change: Change) -> int:
        if not change.reason.startswith(CHANGED_LINE) or change.nbytes < LEAST_SHARE * difference.nbytes:
            return 2
        return 0 if is_own(change.row) else 1

    return replace(difference, changes=tuple(sorted(marked, key=rank)))


def _with_changed_alternatives(change: Change, mark: Callable[[Row], str]) -> tuple[Change, ...]:
    changed = tuple(filter(mark, change.alternatives))
    return change.among(changed) if changed else (change,)


def with_named_lines(difference: Difference, named: Callable[[Row], Sequence[str]]) -> Difference:
    """Return a difference in which increases and alternatives show a caller's line before the allocating line.

    Args:
        difference: The difference.
        named: Returns the callers' lines for a row. If there are several, the row shows the first line, and the reason lists
            all of them.
    """

    def of_alternative(row: Row) -> Row:
        lines = named(row)
        # An alternative has no reason, so it cannot list several lines.
        return replace(row, named=lines[0]) if len(lines) == 1 else row

    def with_name(change: Change) -> Change:
        change = change._replace(alternatives=tuple(map(of_alternative, change.alternatives)))
        lines = named(change.after) if change.nbytes > 0 and change.after is not None else ()
        if change.after is None or not lines:
            return change
        reason = _joined(change.reason, *alternatives_clause(lines))
        return change._replace(after=replace(change.after, named=lines[0]), reason=reason)

    return replace(difference, changes=tuple(map(with_name, difference.changes)))


def difference(before: Composition, after: Composition, graph: GraphChanges | None = None) -> Difference:
    """Return the changes between two compositions.

    First, equal rows are removed from both compositions, and then moved rows. A remaining row in the baseline and a current row
    become one change if the current row is a changed form of the baseline's row. A baseline lists only its largest rows. So
    smaller rows are compared by their sum in each category.

    Args:
        before: The baseline's composition.
        after: The current composition.
        graph: The modules whose calls autograd records now and did not record in the baseline. By default they are taken from
            the two compositions.
    """
    graph = graph or GraphChanges(before, after, {}, {})
    baseline, current = _side(before), _side(after)
    old_rows, new_rows = baseline.rows, current.rows
    for key in _EQUAL_BY:
        old_rows, new_rows = _without_equal_groups(old_rows, new_rows, key)
    old_rows, new_rows = _without_equal_layers(old_rows, new_rows)
    new_rows = _least_increase_first(old_rows, new_rows)
    for key in _MOVED_BY:
        old_rows, new_rows = _without_moved(old_rows, new_rows, key)
    old_rows, new_rows, changes, alternatives = _with_sums(
        baseline._replace(rows=old_rows), current._replace(rows=new_rows), graph
    )
    among_smaller = tuple(changes)
    for key in _CHANGED_BY:
        old_rows, new_rows, pairs = _paired(old_rows, new_rows, key)
        changes += pairs
    changes += [Change(row, None) for row in old_rows]
    changes += [Change(None, row) for row in new_rows]
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
        and not _lost_checkpointing(change.before, change.row, before, after)
    ]
    # Leave out graph changes with almost no growth, because reports show graph changes above the table with the rows.
    is_cause = sum(change.nbytes for change in by_graph) >= LEAST_SHARE * (after.total - before.total)
    graph_changes = graph.of_rows(change.row for change in by_graph) if is_cause else ()
    return Difference(before.total, after.total, _ranked(explained), graph=graph_changes)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _ranked(changes: list[Change]) -> tuple[Change, ...]:
    """Return the changes sorted by their increase, the largest first.

    If two increases are equal, a row from forward comes before a row from backward, because tensors in backward follow from
    tensors in forward. If two rows with equal increases are from the same pass, the row whose line grew more in
    total comes first.
    """
    at_line = _growth_by_line((change.row, change.nbytes) for change in changes)

    def rank(change: Change) -> tuple[int, bool, int, str]:
        is_backward = _BACKWARD.search(change.row.operator) is not None
        return (
            -change.nbytes,
            is_backward,
            -(at_line[_line(change.row)] // max(abs(change.nbytes), 1)),
            change.row.text(),
        )

    return tuple(sorted(changes, key=rank))


class _Side(NamedTuple):
    """A composition, divided into the rows that it lists, and its sums over all other rows."""

    rows: list[Row]
    sums: dict[str, Row]
    """The sum over the unlisted rows in each category. Baselines from older versions have a single sum for all categories, with
    a tensor count of 0."""
    smallest: int | None
    """The bytes of the smallest listed row; ``None`` if no row is listed. An unlisted row has at most this many bytes."""


def _side(composition: Composition) -> _Side:
    rows = [row for row in composition.rows if row.operator != REST]
    sums = {row.category: row for row in composition.rows if row.operator == REST}
    if composition.rest:
        sums["other"] = Row("other", composition.rest, operator=REST, count=0)
    return _Side(rows, sums, min((row.nbytes for row in rows if row.nbytes > 0), default=None))


def _sum_of(category: str, rows: Iterable[Row]) -> Row:
    rows = list(rows)
    return Row(category, sum(row.nbytes for row in rows), operator=REST, count=sum(row.count for row in rows))


def _without_equal_groups(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Group rows by ``key``, and drop each group whose bytes and tensor counts are equal in ``old`` and ``new``."""
    unequal_old, unequal_new = [], []
    for old_group, new_group in grouped(old, new, key).values():
        if _sums(old_group) != _sums(new_group):
            unequal_old += old_group
            unequal_new += new_group
    return unequal_old, unequal_new


def _without_equal_layers(old: list[Row], new: list[Row]) -> tuple[list[Row], list[Row]]:
    """Drop the layers whose rows are equal in ``old`` and ``new``, if the rows name their layers."""
    unequal_old, unequal_new = [], []
    for old_group, new_group in grouped(old, new, _EQUAL_BY[0]).values():
        has_layers = old_group and new_group and any(row.layers for row in (*old_group, *new_group))
        different = _different_layers(old_group, new_group) if has_layers else (old_group, new_group)
        unequal_old += different[0]
        unequal_new += different[1]
    return unequal_old, unequal_new


def _different_layers(old: list[Row], new: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the remaining rows of ``old`` and ``new`` after equal layers were removed.

    The rows must come from the same line, so they differ only in their layers, bytes, counts and package release.

    Example:
        The baseline has a row with 4 tensors of 100 bytes each, for all layers. Now layer 3 has 300 bytes, and the layers 0 to
        2 have 100 bytes each. Three layers are equal. So 100 bytes remain from the baseline's row, and the row for layer 3
        remains from the current rows.
    """
    (old_layers, old_unsplit), (new_layers, new_unsplit) = _by_layer(old), _by_layer(new)
    new_by_layer = {numbers: _without_release(row) for numbers, row in new_layers.items()}
    same = {numbers for numbers, row in old_layers.items() if new_by_layer.get(numbers) == _without_release(row)}
    old_layers, new_layers = ({n: row for n, row in side.items() if n not in same} for side in (old_layers, new_layers))
    old_unsplit, new_layers = _without_layers(old_unsplit, new_layers)
    new_unsplit, old_layers = _without_layers(new_unsplit, old_layers)
    return [*join_layers(old_layers.values(), {}), *old_unsplit], [*join_layers(new_layers.values(), {}), *new_unsplit]


def _by_layer(rows: list[Row]) -> tuple[dict[Numbers, Row], list[Row]]:
    """Split rows by layer. Return a row for each named layer, and the rows without named layers or equal parts."""
    of_layer: dict[Numbers, Row] = {}
    unsplit = []
    for row in rows:
        layer_rows = each_layer(row)
        of_layer |= layer_rows
        unsplit += [] if layer_rows else [row]
    return of_layer, unsplit


def _without_layers(unsplit: list[Row], layers: dict[Numbers, Row]) -> tuple[list[Row], dict[Numbers, Row]]:
    """Subtract the rows of ``layers`` from the rows in ``unsplit``, which stand for all layers together.

    One of the two arguments comes from the baseline, and the other from the current step. The layers with the fewest tensors
    are subtracted first.

    Returns:
        The remaining rows in ``unsplit``, and the remaining layers.
    """
    remaining = dict(layers)
    for numbers, row in sorted(layers.items(), key=lambda pair: (pair[1].count, pair[0])):
        for index, candidate in enumerate(unsplit):
            # A layer can be subtracted only from a row whose blocks have the same size.
            if candidate.count >= row.count and candidate.nbytes * row.count == row.nbytes * candidate.count:
                remainder = replace(candidate, nbytes=candidate.nbytes - row.nbytes, count=candidate.count - row.count)
                unsplit = [*unsplit[:index], *([remainder] if remainder.count else []), *unsplit[index + 1 :]]
                del remaining[numbers]
                break
    return unsplit, remaining


def _without_moved(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Drop moved rows: a row in ``old`` and a row in ``new`` with the same ``key`` cancel each other out.

    If ``old`` and ``new`` have rows with the same category, module, operator and tensor, these rows are not dropped, because
    they did not move: they grew or shrank.
    """
    stayed = {_identity(row) for row in old} & {_identity(row) for row in new}
    moved = Counter(key(row) for row in old if _identity(row) not in stayed)
    moved &= Counter(key(row) for row in new if _identity(row) not in stayed)

    def without_moved_rows(rows: list[Row]) -> list[Row]:
        remaining = Counter(moved)
        unmoved = []
        for row in rows:
            if _identity(row) not in stayed and remaining[key(row)] > 0:
                remaining[key(row)] -= 1
            else:
                unmoved.append(row)
        return unmoved

    return without_moved_rows(old), without_moved_rows(new)


def _least_increase_first(old: list[Row], new: list[Row]) -> list[Row]:
    """Return ``new`` sorted by the increase at each row's line, the smallest increase first.

    If several current rows have the same key as a baseline row, the first current row is matched with the baseline row. In this
    order, rows at unchanged lines are matched first, so the increase is reported at few lines. For example, if an edit saves
    two more tensors at a line, only this line is reported. If the increases at two lines are equal, the line nearer to the
    baseline's line comes first.
    """
    at_line = _growth_by_line([*((row, row.nbytes) for row in new), *((row, -row.nbytes) for row in old)])
    old_numbers: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in old:
        file, number = _file_and_line(row)
        old_numbers[file, row.operator, row.tensor].append(number)

    def rank(row: Row) -> tuple[int, int]:
        file, number = _file_and_line(row)
        distances = [abs(number - old_number) for old_number in old_numbers[file, row.operator, row.tensor]]
        # Divide the increase by the row's bytes, so an increase smaller than the row does not change the order.
        return at_line[_line(row)] // max(row.nbytes, 1), min(distances, default=0)

    return sorted(new, key=rank)


def _growth_by_line(row_growths: Iterable[tuple[Row, int]]) -> Counter[tuple[str, str]]:
    """Return the change in bytes at each line, added up over its rows."""
    growth: Counter[tuple[str, str]] = Counter()
    for row, nbytes in row_growths:
        growth[_line(row)] += nbytes
    return growth


def _line(row: Row) -> tuple[str, str]:
    return row.site, without_release(row.library)


def _identity(row: Row) -> tuple[str, str, str, str]:
    return row.category, row.module, row.operator, row.tensor


def _with_sums(
    baseline: _Side, current: _Side, graph: GraphChanges
) -> tuple[list[Row], list[Row], list[Change], dict[str, tuple[Row, ...]]]:
    """Move the rows of a composition into its sum over smaller rows, if the other composition may have them in its own sum.

    Example:
        The baseline lists rows down to 1 MB, and its sum over smaller rows has 8 MB. The current step has two rows with 0.9 MB,
        which the baseline does not list. The baseline's sum may include them, so they are added to the current sum, and only
        the sums are compared.

    Returns:
        The baseline's rows and sums, the current rows and sums, a change for each row with a known part in the baseline's sum,
        and by category the rows that may have grown in a sum.
    """
    old_rows, new_rows = baseline.rows, current.rows
    changes: list[Change] = []
    alternatives: dict[str, tuple[Row, ...]] = {}
    has_single_sum = any(not row.count for side in (baseline, current) for row in side.sums.values())
    for category in ("other",) if has_single_sum else sorted({*baseline.sums, *current.sums}):
        old_sum, new_sum = (
            _sum_of(category, side.sums.values() if has_single_sum else filter(None, [side.sums.get(category)]))
            for side in (baseline, current)
        )
        # A row that both compositions list is neither new nor gone: it grew or shrank, and counts in neither sum.
        listed = set(map(_without_amounts, old_rows)) & set(map(_without_amounts, new_rows))
        of_category = None if has_single_sum else category
        # A row that only the baseline lists may have shrunk, and the current sum then includes it. But if such rows together
        # have more than twice the sum's bytes, the largest rows must have disappeared.
        small_old, old_rows = _split_by_size(old_rows, of_category, current.smallest, 2 * new_sum.nbytes, listed)
        small_new, new_rows = _split_by_size(new_rows, of_category, baseline.smallest, None, listed)
        old_total, new_total = _sum_of(category, [old_sum, *small_old]), _sum_of(category, [new_sum, *small_new])
        blocks = 0 if has_single_sum else new_total.count - old_total.count
        grown, alternatives[category] = _attribution_by_graph(
            small_new, old_sum.nbytes, new_total.nbytes - old_total.nbytes, blocks, graph
        )
        changes += [Change(baseline_part, row) for baseline_part, row in grown if baseline_part is not None]
        old_rows += _remainder(old_total, (baseline_part for baseline_part, _ in grown if baseline_part is not None))
        new_rows += [
            *(row for baseline_part, row in grown if baseline_part is None),
            *_remainder(new_total, (row for _, row in grown)),
        ]
    return old_rows, new_rows, changes, alternatives


def _attribution_by_graph(
    rows: list[Row], sum_bytes: int, growth: int, blocks: int, graph: GraphChanges
) -> Attribution:
    """Return which rows grew. Unlike `attribution`, this function knows the modules whose calls autograd records only now.

    If autograd recorded no call of a module in the baseline, the module's rows must be new. If these rows together have more
    bytes than the growth, only they are passed to `attribution`.
    """
    new_rows = [row for row in rows if graph.is_new(row)]
    remaining_growth = growth - sum(row.nbytes for row in new_rows)
    if not new_rows or growth <= 0:
        return attribution(rows, sum_bytes, growth, blocks)
    if remaining_growth < 0:
        return attribution(new_rows, sum_bytes, growth, blocks)
    other_rows = [row for row in rows if row not in new_rows]
    other_attribution = attribution(
        other_rows, sum_bytes, remaining_growth, max(blocks - sum(row.count for row in new_rows), 0)
    )
    return Attribution((*((None, row) for row in new_rows), *other_attribution.grown), other_attribution.alternatives)


def _remainder(total: Row, listed_rows: Iterable[Row]) -> list[Row]:
    """Subtract the bytes of ``listed_rows`` from a sum. Return the sum as a list, or an empty list if no bytes remain."""
    nbytes = total.nbytes - sum(row.nbytes for row in listed_rows)
    return [Row(total.category, nbytes, operator=REST)] if nbytes else []


def _split_by_size(
    rows: Iterable[Row], category: str | None, smallest: int | None, most: int | None, listed: Collection[Row]
) -> tuple[list[Row], list[Row]]:
    """Divide a composition's rows into rows that the other composition's sum may include, and all other rows.

    Args:
        rows: The rows of a composition.
        category: The category of the other composition's sum; ``None`` if the sum is over all categories.
        smallest: The bytes in the other composition's smallest listed row; ``None`` if it lists no row.
        most: The upper bound for the bytes of all rows in the first returned list together; ``None`` for no bound.
        listed: The keys (`_without_amounts`) of rows listed in both compositions. Such rows are in no sum.
    """
    small: list[Row] = []
    larger: list[Row] = []
    remaining = most
    for row in sorted(rows, key=lambda row: row.nbytes):
        fits = (smallest is None or row.nbytes <= smallest) and (remaining is None or row.nbytes <= remaining)
        if fits and category in (None, row.category) and _without_amounts(row) not in listed:
            small.append(row)
            remaining = None if remaining is None else remaining - row.nbytes
        else:
            larger.append(row)
    return small, larger


def _paired(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row], list[Change]]:
    """Pair rows in ``old`` with rows in ``new`` by key, the largest with the largest.

    Returns:
        The unpaired rows in ``old``, the unpaired rows in ``new``, and a change for each pair.
    """
    unpaired_old, unpaired_new, pairs = [], [], []
    for old_group, new_group in grouped(old, new, key).values():
        old_group.sort(key=lambda row: -row.nbytes)
        new_group.sort(key=lambda row: -row.nbytes)
        paired = min(len(old_group), len(new_group))
        pairs += [Change(before, after) for before, after in zip(old_group, new_group, strict=False)]
        unpaired_old += old_group[paired:]
        unpaired_new += new_group[paired:]
    return unpaired_old, unpaired_new, pairs


def grouped(old: Iterable[T], new: Iterable[T], key: Callable[[T], object]) -> dict[object, tuple[list[T], list[T]]]:
    """Group the elements of ``old`` and ``new`` by key. Each group has a list from ``old`` and a list from ``new``.

    Example:
        ``grouped([1, 2], [3], lambda number: number % 2)`` returns ``{1: ([1], [3]), 0: ([2], [])}``.
    """
    groups: dict[object, tuple[list[T], list[T]]] = defaultdict(lambda: ([], []))
    for side, elements in enumerate((old, new)):
        for element in elements:
            groups[key(element)][side].append(element)
    return groups


def _sums(rows: list[Row]) -> tuple[int, int]:
    return sum(row.nbytes for row in rows), sum(row.count for row in rows)


_COPYING = frozenset({"clone", "contiguous"})


def reason(
    old: Row | None, new: Row | None, before: Composition, after: Composition, graph: GraphChanges | None = None
) -> str:
    """Return a clause with the reason why the row ``old`` became the row ``new``, for example ``"was bfloat16, now float32"``.

    The clause is empty if the reason is unknown, or if the row did not grow. It is also empty if the growth follows from a
    graph change, because a report explains a graph change once for all rows.
    """
    if new is None or new.nbytes <= (old.nbytes if old is not None else 0):
        return ""
    lost_checkpointing = _lost_checkpointing(old, new, before, after)
    if lost_checkpointing:
        return lost_checkpointing
    if graph is not None and (old is None or old.tensor == new.tensor) and graph.explain(new):
        return ""
    if old is not None:
        return _reason_of_change(old, new)
    return _reason_of_new_row(new, before, after)


def _lost_checkpointing(old: Row | None, new: Row, before: Composition, after: Composition) -> str:
    # If the tensors have another size, the batch may have changed, and the module may be called less often for this reason. So
    # fewer recomputed calls prove nothing.
    if new.category != "activation" or (old is not None and old.tensor != new.tensor):
        return ""
    for path, baseline_calls in before.recomputed.items():
        current_calls = after.recomputed.get(path, 0)
        related = f"{new.module}.".startswith(f"{path}.") or path.startswith(f"{new.module}.")
        if current_calls < baseline_calls and related:
            return (
                f"checkpointing off: {path} was recomputed in {baseline_calls} calls, now in {current_calls or 'none'}"
            )
    return ""


def _reason_of_change(old: Row, new: Row) -> str:
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


def _reason_of_new_row(new: Row, before: Composition, after: Composition) -> str:
    """Return why a row is new: its tensors are copies, saved twice, or wider. Empty if the reason is unknown."""
    if new.category != "activation" or not new.tensor:
        return ""
    if new.operator in _COPYING:
        return "a copy"
    alike = [row for row in before.rows if row.module == new.module and row.category == new.category]
    saved = {row.operator for row in alike if row.tensor == new.tensor}
    for row in after.rows:
        # Compare only rows at the same line. A tensor with the same size at another line of the module may be unrelated.
        beside = (row.module, row.category, row.tensor) == (new.module, new.category, new.tensor)
        same_line = _line(row) == _line(new)
        if beside and same_line and row.operator != new.operator and row.operator in saved:
            return f"saved twice: {row.operator} still saves {row.what} as well"
    for row in alike:
        if row.shape == new.shape and 0 < item_bits(row.dtype) < item_bits(new.dtype):
            return f"was {row.dtype} only, now also {new.dtype}"
    return ""
