"""Growth among rows that a baseline sums up as ``smaller rows``, and rows proven to be new by the sums. Pure.

A baseline lists its largest rows. For all other rows it keeps only their bytes and block count.

Example: the smaller rows of a baseline have 8 MB in 4 blocks. Now ``to_v`` and ``last_hidden`` have 8 MB in 4 blocks each.
Either row may be new.
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
"""The most alternatives for a growth. If more rows may have grown, only a proven row has a line."""
MAY_BE_ALL = 0.8
"""A row with this share of the growth may have grown alone."""
MAY_BE_A_PART = 0.1
"""A row with this share of the growth may have grown together with other rows."""
_NEGLIGIBLE = 0.01
"""A growth by less than this share of the sum has no alternatives. Example: a counter with 4 B beside 40 rows names no row."""


class Attribution(NamedTuple):
    """Rows with proven growth, and rows with possible growth."""

    grown: tuple[tuple[Row | None, Row], ...] = ()
    """Each proven row, after its part in the baseline's sum: for example 4 of its 12 blocks, or ``None``."""
    alternatives: tuple[Row, ...] = ()
    """The rows that may have grown by the remaining bytes, the largest first."""


def attribution(rows: Sequence[Row], sum_bytes: int, growth: int, blocks: int) -> Attribution:
    """Return which rows grew.

    A row certainly grew if only its blocks add up to the growth, and all other rows are unchanged. Otherwise a row certainly
    grew only if it is larger than the sum. This rule does not depend on the listed rows, so growth without a line is never
    much larger than the sum.

    Example:
        Workspaces of 33.5 MB are listed, and the sum has 65.5 kB. A row with 6.5 MB is larger than the sum, so this row is new.

    Args:
        rows: The rows that the baseline does not list. The smallest listed row is at least as large as each of them.
        sum_bytes: Bytes of the sum.
        growth: Bytes by which the rows exceed the sum.
        blocks: Blocks by which the rows exceed the sum, or 0 if the baseline does not record a block count.
    """
    if growth <= 0:
        return Attribution()
    larger = tuple(row for row in rows if row.nbytes > sum_bytes)
    new_blocks = _new_blocks(rows, growth, blocks)
    if new_blocks and {row for alike, _ in new_blocks for row in alike}.issuperset(larger):
        return _attributed(new_blocks)
    remaining = growth - sum(row.nbytes for row in larger)
    if len(larger) == 1 and remaining < 0 and blocks < larger[0].count:
        # The other rows cannot fill the sum, so this row already had the missing bytes in the baseline.
        (row,) = larger
        return Attribution(((replace(row, nbytes=-remaining, tensor="", count=row.count - max(blocks, 0)), row),))
    smaller = [row for row in rows if row not in larger]
    remaining_blocks = blocks - sum(row.count for row in larger)
    alternatives = _alternatives(smaller, remaining, remaining_blocks) if remaining > _NEGLIGIBLE * sum_bytes else ()
    return Attribution(tuple((None, row) for row in larger), alternatives)


class _Blocks(NamedTuple):
    """New blocks in rows with equal block sizes."""

    rows: list[Row]
    number: int


def _new_blocks(rows: Sequence[Row], growth: int, blocks: int) -> list[_Blocks]:
    """Return the new blocks if the sums prove them.

    If the largest blocks add up to the growth, they are proven, because all other blocks have fewer bytes. Otherwise blocks of
    equal size are proven, unless two rows add up to the same bytes and blocks.
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
    """Return the rows that may have grown alone, or else the rows that may have grown together.

    A row cannot have grown alone if it has fewer blocks than the growth.
    """
    alone = [row for row in rows if row.nbytes >= MAY_BE_ALL * growth and row.count >= blocks]
    return _at_most(alone or [row for row in rows if row.nbytes >= MAY_BE_A_PART * growth])


def _at_most(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.text()))) if len(rows) <= MOST_ALTERNATIVES else ()
