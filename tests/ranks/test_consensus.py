"""What ranks decide together."""

from __future__ import annotations

import time

from tests.ranks.side_by_side import side_by_side


def test_ranks_exchange_values_in_their_order():
    assert side_by_side(3, lambda consensus: consensus.exchange(consensus.rank.number)) == [[0, 1, 2]] * 3


def test_the_first_clause_names_its_rank():
    clauses = [None, "it waited", "another"]
    assert (
        side_by_side(3, lambda consensus: consensus.first(clauses[consensus.rank.number]))
        == ["on rank 1 of 3: it waited"] * 3
    )
    assert side_by_side(2, lambda consensus: consensus.first(None)) == [None, None]


def test_ranks_run_in_turn_though_the_first_comes_last():
    order = []

    def run(consensus):
        time.sleep(0.05 * (2 - consensus.rank.number))
        with consensus.in_turn():
            order.append(consensus.rank.number)
            time.sleep(0.01)
            order.append(consensus.rank.number)
        return consensus.exchange(consensus.point.step)

    assert side_by_side(3, run) == [[1, 1, 1]] * 3
    assert order == [0, 0, 1, 1, 2, 2]
