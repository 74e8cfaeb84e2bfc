"""``benchmarks/beside.py``: what its tables say, and that the text beside the results has what the results give today."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import beside
import pytest

RESULTS = Path(beside.RESULTS)
REAL = RESULTS / "nvidia-h100-80gb-hbm3"


def test_a_row_has_both_ends_and_the_case_that_is_farthest_off():
    real = beside.Kept(
        {"net/a": {"reserved": 100}, "net/b": {"reserved": 100}, "net/c": {"reserved": 100}}, frozenset()
    )
    emulated = beside.Kept(
        {"net/a": {"reserved": 95}, "net/b": {"reserved": 102}, "net/c": {"reserved": 100}}, frozenset()
    )
    (row,) = beside.summary(list(beside.pairs(real, emulated)))
    assert row == ("net", "reserved", "3", "1", "1", "-5.00 %", "+2.00 %", "net/a")


@pytest.mark.parametrize("emulated", ["emulated-h100-80gb", "emulated-h100-80gb-without-cudnn"])
def test_the_text_beside_the_results_has_the_table_that_they_give(emulated):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert beside.compare(Namespace(real=REAL, emulated=RESULTS / emulated, all=False)) == 0
    rows = [line for line in printed.getvalue().splitlines() if line and " beside " not in line]
    text = (REAL / "beside.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) > 5
    assert [row for row in rows if row not in text] == []
