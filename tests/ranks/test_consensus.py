"""What ranks decide together."""

from __future__ import annotations

import time

from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.measuring.ranks import consensus as module
from pytest_gpumem.measuring.ranks.consensus import Consensus
from tests.ranks.side_by_side import Entries, side_by_side


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


class GivenBehindTheLook(Entries):
    """Rank 1 gives its value, and ends its test, right after rank 0 has looked for it."""

    def has(self, keys):
        there = super().has(keys)
        self.put("test/1/1/1", "its value")
        self.put("test/1/end/1", "its verdict")
        return there


def test_a_rank_that_has_given_its_value_before_it_ended_is_not_lost(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_ROLL_CALLS", 0)
    consensus = Consensus(GivenBehindTheLook(), Rank(0, 2))
    consensus.begin_test()
    assert consensus.exchange("mine") == ["mine", "its value"]
