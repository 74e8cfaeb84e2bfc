"""Decide which rows grew if the baseline does not list them, but may include them in its sum over smaller rows. Pure.

A baseline lists its largest rows. For all other rows together, it stores only the sum of their bytes and blocks.

Example: the baseline's sum has 8 MB in 4 blocks. Now ``to_v`` and ``last_hidden`` have 8 MB in 4 blocks each. Either row may be
new. If the baseline's sum has only 1 MB, both rows are new.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.facts.values.composition import Row

MOST_ALTERNATIVES = 100
"""If more rows than this may have grown, none is named."""
MAY_BE_ALL = 0.8
"""A row whose bytes are at least this share of the growth may be the only row that grew."""
MAY_BE_A_PART = 0.1
"""A row whose bytes are at least this share of the growth may have grown together with other rows."""
_NEGLIGIBLE = 0.01
"""If the growth is below this share of the baseline's sum, no alternatives are named. For example, a new counter has 4 bytes,
and any of 40 rows in the composition could have grown by 4 bytes."""


class Attribution(NamedTuple):
    """The rows that certainly grew, and the rows that may have grown."""

    grown: tuple[tuple[Row | None, Row], ...] = ()
    """For each row that certainly grew: the part of the row that the baseline's sum already included, and the current row. For
    example, the part has 4 of the row's 12 blocks. The part is ``None`` if the row is new."""
    alternatives: tuple[Row, ...] = ()
    """The rows that may have grown by the remaining bytes, the largest first."""


def attribution(rows: Sequence[Row], sum_bytes: int, growth: int, blocks: int) -> Attribution:
    """Return which of ``rows`` grew since the baseline.

    If only one set of blocks has ``growth`` bytes and the number ``blocks``, the rows with these blocks certainly grew. If
    there are several such sets, a row certainly grew only if it has more bytes than the baseline's sum.

    Example:
        A baseline lists a workspace of 33.5 MB, and its sum over smaller rows has 65.5 kB. Now there is a row with 6.5 MB. It
        has more bytes than the sum, so it must be new.

    Args:
        rows: Current rows that the baseline does not list. Each has at most the bytes of the baseline's smallest listed row.
        sum_bytes: The bytes of the baseline's sum.
        growth: The bytes by which ``rows`` together exceed the baseline's sum.
        blocks: By how many blocks ``rows`` together exceed the baseline's sum; 0 if the baseline's number is unknown.
    """
    if growth <= 0:
        return Attribution()
    larger = tuple(row for row in rows if row.nbytes > sum_bytes)
    new_blocks = _new_blocks(rows, growth, blocks)
    if new_blocks and {row for alike, _ in new_blocks for row in alike}.issuperset(larger):
        return _attributed(new_blocks)
    remaining = growth - sum(row.nbytes for row in larger)
    if len(larger) == 1 and remaining < 0 and blocks < larger[0].count:
        # All other rows have fewer bytes than the baseline's sum. So some bytes of this row were already in the sum.
        (row,) = larger
        return Attribution(((replace(row, nbytes=-remaining, tensor="", count=row.count - max(blocks, 0)), row),))
    smaller = [row for row in rows if row not in larger]
    remaining_blocks = blocks - sum(row.count for row in larger)
    alternatives = _alternatives(smaller, remaining, remaining_blocks) if remaining > _NEGLIGIBLE * sum_bytes else ()
    return Attribution(tuple((None, row) for row in larger), alternatives)


class _Blocks(NamedTuple):
    """A number of new blocks with the same size, and the rows that may contain these blocks."""

    rows: list[Row]
    number: int


def _new_blocks(rows: Sequence[Row], growth: int, blocks: int) -> list[_Blocks]:
    """Return the only set of blocks with ``growth`` bytes and the number ``blocks``; empty if there are several such sets.

    Example:
        4 blocks and 8 MB are new. If the 4 largest blocks have 2 MB each, they must be new, because any other 4 blocks have
        fewer bytes. If there are larger blocks, the blocks of 2 MB are new unless two rows together have 4 blocks and 8 MB.
    """
    if blocks <= 0:
        return []
    of_size: dict[Fraction, list[Row]] = defaultdict(list)
    for row in rows:
        of_size[Fraction(row.nbytes, max(row.count, 1))].append(row)
    largest: list[_Blocks] = []
    for size in sorted(of_size, reverse=True):
        missing = blocks - sum(number for _, number in largest)
        if missing:
            largest.append(_Blocks(of_size[size], min(_count(of_size[size]), missing)))
    if sum(number for _, number in largest) == blocks and sum(map(_nbytes, largest)) == growth:
        return largest
    alike = of_size.get(Fraction(growth, blocks), [])
    sums = Counter((row.nbytes, row.count) for row in rows)
    two_rows_fit = any(sums[growth - row.nbytes, blocks - row.count] for row in rows if row not in alike)
    return [] if two_rows_fit or _count(alike) < blocks else [_Blocks(alike, blocks)]


def _nbytes(new_blocks: _Blocks) -> Fraction:
    row = new_blocks.rows[0]
    return new_blocks.number * Fraction(row.nbytes, max(row.count, 1))


def _count(rows: Collection[Row]) -> int:
    return sum(max(row.count, 1) for row in rows)


def _attributed(new_blocks: Sequence[_Blocks]) -> Attribution:
    grown: list[tuple[Row | None, Row]] = []
    alternatives: list[Row] = []
    for alike, number in new_blocks:
        if number == _count(alike):
            grown += [(None, row) for row in alike]
            continue
        fitting = [row for row in alike if row.count >= number] or alike
        (row, *other_fitting) = fitting
        if other_fitting or number <= _count(alike) - row.count:
            alternatives += fitting
            continue
        old_count = row.count - number
        old_part = replace(row, nbytes=row.nbytes * old_count // row.count, count=old_count) if old_count else None
        grown.append((old_part, row))
    return Attribution(tuple(grown), _at_most(alternatives))


def _alternatives(rows: Sequence[Row], growth: int, blocks: int) -> tuple[Row, ...]:
    """Return each row that may be the only row that grew. If there is none, return rows that may have grown together.

    A row with fewer blocks than ``blocks`` cannot have grown alone.
    """
    alone = [row for row in rows if row.nbytes >= MAY_BE_ALL * growth and row.count >= blocks]
    return _at_most(alone or [row for row in rows if row.nbytes >= MAY_BE_A_PART * growth])


def _at_most(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.text()))) if len(rows) <= MOST_ALTERNATIVES else ()
