"""What changed from one composition to another: a refactoring shows nothing, and the changes add up to the peak's. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpumem.composition import Composition, Row, row_from_text

_ITEM_SIZE = re.compile(r"(\d+)")
_SIZES = {"bool": 8}
_COPYING = frozenset({"clone", "contiguous"})

Key = Callable[[Row], object]

_SAME: tuple[Key, ...] = (
    lambda row: replace(row, nbytes=0, count=0),
    # Moved lines.
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # Renamed modules.
    lambda row: (row.category, row.operator, row.tensor, row.site, row.library),
    lambda row: (row.category, row.operator, row.tensor),
    # The same by another operator (``x.softmax()`` and ``F.softmax(x)`` are one; ``a * b`` and ``torch.addcmul`` are not).
    lambda row: (row.category, row.module, row.tensor),
    lambda row: (row.category, row.tensor),
)
"""By what two sets of rows are the same, from the strictest to the loosest."""

_MOVED: tuple[Key, ...] = (
    # What is passed on between modules otherwise, but is as large.
    lambda row: (row.category, row.tensor, row.nbytes, row.count),
    lambda row: (row.tensor, row.nbytes, row.count),
)
"""By what a row that is at its place no more is another that was not at its place before."""

_GREW: tuple[Key, ...] = (
    lambda row: replace(row, nbytes=0, count=0),
    lambda row: (row.category, row.module, row.operator, row.tensor),
    # Another dtype, or another shape, at the same place.
    lambda row: (row.category, row.module, row.operator, row.shape, row.site, row.library),
    lambda row: (row.category, row.module, row.operator, row.shape),
    lambda row: (row.category, row.module, row.operator, row.dtype, row.site, row.library),
    lambda row: (row.category, row.module, row.operator, row.dtype),
    # What was freed early and is not any more.
    lambda row: (row.module, row.operator, row.tensor),
    # Renamed and grown.
    lambda row: (row.category, row.operator, row.tensor),
    # Another dtype, made by another operator: ``x > 0`` and ``(x > 0).float()``.
    lambda row: (row.category, row.module, row.shape, row.count) if row.shape else row,
)
"""By what a row is an earlier one that has changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """A row that appeared (``before`` is ``None``), disappeared (``after`` is ``None``) or became another."""

    before: Row | None
    after: Row | None
    reason: str = ""
    """A clause that says why, where it can be known: ``"was bfloat16, now float32"``."""

    @property
    def nbytes(self) -> int:
        """By how much it grew; negative when it shrank."""
        return (self.after.nbytes if self.after else 0) - (self.before.nbytes if self.before else 0)

    @property
    def row(self) -> Row:
        """What it is now, or was."""
        row = self.after or self.before
        assert row is not None, "a change has at least one side"
        return row


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes from ``before`` to ``after`` bytes, largest growth first; they add up to the change exactly."""

    before: int
    after: int
    changes: tuple[Change, ...]

    @property
    def growth(self) -> int:
        """In bytes."""
        return self.after - self.before

    def explaining(self, share: float = 0.8, at_least: int = 3, at_most: int = 5) -> tuple[Change, ...]:
        """The growing rows that explain ``share`` of the growth, and a few more if they matter."""
        grown = [change for change in self.changes if change.nbytes > 0]
        wanted = share * self.growth
        told: list[Change] = []
        explained = 0
        for change in grown[:at_most]:
            small = change.nbytes < 0.01 * self.growth
            if explained >= wanted and (len(told) >= at_least or small):
                break
            told.append(change)
            explained += change.nbytes
        return tuple(told)

    def to_plain(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "changes": [
                [
                    change.before.text() if change.before else None,
                    change.after.text() if change.after else None,
                    change.reason,
                ]
                for change in self.changes
            ],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Difference:
        changes = tuple(
            Change(row_from_text(before) if before else None, row_from_text(after) if after else None, reason)
            for before, after, reason in plain["changes"]
        )
        return cls(plain["before"], plain["after"], changes)


def difference(before: Composition, after: Composition) -> Difference:
    """What changed. ``before`` may be what a baseline kept; what it did not keep is compared as one row."""
    old, new = list(before.rows), list(after.rows)
    for key in _SAME:
        old, new = _without_equals(old, new, key)
    for key in _MOVED:
        old, new = _without_moved(old, _fewest_news_first(old, new), key)
    if before.rest:
        new = _folded_into_rest(new, smallest=min((row.nbytes for row in before.rows), default=0), most=before.rest)
        old.append(Row("other", before.rest, operator=REST))
    if after.rest:
        new.append(Row("other", after.rest, operator=REST))
    changes: list[Change] = []
    for key in _GREW:
        old, new, found = _paired(old, _fewest_news_first(old, new), key)
        changes += found
    changes += [Change(row, None) for row in old]
    changes += [Change(None, row) for row in new]
    told = [replace(change, reason=_reason(change, before, after)) for change in changes if change.nbytes != 0]
    return Difference(before.total, after.total, _ranked(told))


def _ranked(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Largest growth first; of those alike, what is at the line that grew most in all."""
    changes = list(changes)
    at_line = _at_line((change.row, change.nbytes) for change in changes)
    return tuple(sorted(changes, key=lambda one: (-one.nbytes, -at_line[_line(one.row)], one.row.text())))


REST = "smaller rows"
"""The operator's name in the row that stands for all that a baseline did not keep."""


def _without_equals(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Without the groups of rows that hold as many bytes in as many tensors as before."""
    groups = _grouped(old, new, key)
    left_old, left_new = [], []
    for mine, theirs in groups.values():
        if _sums(mine) != _sums(theirs):
            left_old += mine
            left_new += theirs
    return left_old, left_new


def _without_moved(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row]]:
    """Without single rows that only changed their place. What has a row at its place on both sides grew or shrank there."""
    stayed = {_place(row) for row in old} & {_place(row) for row in new}
    pending = Counter(key(row) for row in old if _place(row) not in stayed)
    pending &= Counter(key(row) for row in new if _place(row) not in stayed)

    def left(rows: list[Row]) -> list[Row]:
        budget = Counter(pending)
        kept = []
        for row in rows:
            if _place(row) not in stayed and budget[key(row)] > 0:
                budget[key(row)] -= 1
            else:
                kept.append(row)
        return kept

    return left(old), left(new)


def _fewest_news_first(old: list[Row], new: list[Row]) -> list[Row]:
    """``new``, so that of rows alike those are matched first whose line has the least that is new.

    Growth is then told of as few lines as can be: an edit that saves two tensors more has one line.
    """
    at_line = _at_line([*((row, row.nbytes) for row in new), *((row, -row.nbytes) for row in old)])
    return sorted(new, key=lambda row: at_line[_line(row)])


def _at_line(grown: Iterable[tuple[Row, int]]) -> Counter[tuple[str, str]]:
    """What grew at each line, in bytes."""
    found: Counter[tuple[str, str]] = Counter()
    for row, nbytes in grown:
        found[_line(row)] += nbytes
    return found


def _line(row: Row) -> tuple[str, str]:
    return row.site, row.library


def _place(row: Row) -> tuple[str, str, str, str]:
    return row.category, row.module, row.operator, row.tensor


def _folded_into_rest(new: list[Row], smallest: int, most: int) -> list[Row]:
    """Rows so small that the baseline would not have kept them, made one, as far as there is room in its rest.

    They may be more than the rest by less than the smallest row that was kept: among so many, that is nobody's growth.
    """
    kept: list[Row] = []
    small = 0
    for row in sorted(new, key=lambda row: row.nbytes):
        if row.nbytes <= smallest and small + row.nbytes < most + smallest:
            small += row.nbytes
        else:
            kept.append(row)
    return [*kept, Row("other", small, operator=REST)] if small else kept


def _paired(old: list[Row], new: list[Row], key: Key) -> tuple[list[Row], list[Row], list[Change]]:
    """Rows of one key paired, the largest with the largest; what is left, and the pairs."""
    left_old, left_new, found = [], [], []
    for mine, theirs in _grouped(old, new, key).values():
        mine.sort(key=lambda row: -row.nbytes)
        theirs.sort(key=lambda row: -row.nbytes)
        both = min(len(mine), len(theirs))
        found += [Change(before, after) for before, after in zip(mine, theirs, strict=False)]
        left_old += mine[both:]
        left_new += theirs[both:]
    return left_old, left_new, found


def _grouped(old: list[Row], new: list[Row], key: Key) -> dict[object, tuple[list[Row], list[Row]]]:
    groups: dict[object, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for row in old:
        groups[key(row)][0].append(row)
    for row in new:
        groups[key(row)][1].append(row)
    return groups


def _sums(rows: Iterable[Row]) -> tuple[int, int]:
    rows = list(rows)
    return sum(row.nbytes for row in rows), sum(row.count for row in rows)


# Why


def _reason(change: Change, before: Composition, after: Composition) -> str:
    lost = _no_longer_recomputed(change, before, after)
    if lost:
        return lost
    old, new = change.before, change.after
    if new is None or change.nbytes < 0:
        return ""
    if old is not None:
        return _became(old, new)
    return _appeared(new, before, after)


def _no_longer_recomputed(change: Change, before: Composition, after: Composition) -> str:
    if change.nbytes <= 0 or change.row.category != "activation":
        return ""
    for path, calls in before.recomputed.items():
        now = after.recomputed.get(path, 0)
        module = change.row.module
        related = module == path or module.startswith(f"{path}.") or path.startswith(f"{module}.")
        if now < calls and related:
            return f"checkpointing off: {path} was recomputed in {calls} calls, now in {now or 'none'}"
    return ""


def _became(old: Row, new: Row) -> str:
    if old.category != new.category and new.category == "activation":
        return "no longer freed before backward"
    if old.tensor and new.tensor and old.shape == new.shape and old.dtype != new.dtype:
        wider = _bits(new.dtype) > _bits(old.dtype)
        return f"was {old.dtype}, now {new.dtype}" if wider else f"now {new.dtype}"
    if old.tensor != new.tensor and old.tensor and new.tensor:
        return f"was {old.tensor}, now {new.tensor}"
    if old.count != new.count:
        return f"{old.count} -> {new.count} tensors"
    return ""


def _appeared(new: Row, before: Composition, after: Composition) -> str:
    """A row without a predecessor: a copy, a wider one of what was there, or one more of it."""
    if new.category != "activation" or not new.tensor:
        return ""
    if new.operator in _COPYING:
        return "a copy"
    alike = [row for row in before.rows if row.module == new.module and row.category == new.category]
    saved = {row.operator for row in alike if row.tensor == new.tensor}
    for row in after.rows:
        # At the same line: elsewhere in the module, what is as large may well be something else.
        if _line(row) == _line(new) and _beside(row, new) and row.operator in saved:
            return f"saved twice: {row.operator} saves {row.what} as well, as before"
    for row in alike:
        if row.shape == new.shape and 0 < _bits(row.dtype) < _bits(new.dtype):
            return f"was {row.dtype} only, now also {new.dtype}"
    return ""


def _beside(row: Row, new: Row) -> bool:
    return (
        row.operator != new.operator
        and row.module == new.module
        and row.category == new.category
        and row.tensor == new.tensor
    )


def _bits(dtype: str) -> int:
    found = _ITEM_SIZE.search(dtype)
    return _SIZES.get(dtype, int(found.group(1)) if found else 0)
