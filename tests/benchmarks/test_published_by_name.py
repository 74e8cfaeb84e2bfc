"""Claims of ``benchmarks/published_by_name.py``: each package is compared with on the rows that it has a figure for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import published_by_name

if TYPE_CHECKING:
    from published_by_name import Row

FIRST, SECOND, *OTHERS = published_by_name.PEERS


def row(emulated: int, **peers: int) -> Row:
    every: dict[str, Any] = dict.fromkeys(published_by_name.PEERS)
    return published_by_name.Row("m", "c", "allocated", 100.0, emulated, every | peers)


def test_a_package_is_compared_with_on_its_own_rows_only():
    rows = [row(99, **{FIRST: 97, SECOND: 80}), row(80, **{SECOND: 60})]
    claims = published_by_name.claims_of(rows)
    assert [round(one.value, 3) for one in claims] == [10.5, 0.333, 0.35]
    assert [one.missed for one in claims] == [True, False, False]
    assert published_by_name.summary(rows) == [
        [FIRST, "1", "3.0 %", "3.0 %", "1.0 %", "1.0 %"],
        [SECOND, "2", "30.0 %", "40.0 %", "10.5 %", "20.0 %"],
        ["(all rows)", "2", "", "", "10.5 %", "20.0 %"],
    ]


def test_a_package_that_is_closer_misses_the_claim():
    (_, against) = published_by_name.claims_of([row(98, **{FIRST: 99})])
    assert against.missed
    assert FIRST in against.text
