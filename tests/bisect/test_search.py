"""Search in a row, and among commits of branches, of which some cannot be judged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.tools.bisect.search import Bounds, Graph, bounds, next_positions


def searched(count, first_bad, skipped=frozenset(), jobs=1):
    """Search a row, and return its bounds, the number of rounds of runs, and all that is known."""
    graph = Graph.line(count)
    answers = {0: "good", count - 1: "bad"}
    rounds = 0
    while positions := next_positions(graph, answers, jobs):
        assert len(positions) <= jobs
        rounds += 1
        for position in positions:
            assert position not in answers, "nothing is run twice"
            answers[position] = "skipped" if position in skipped else "bad" if position >= first_bad else "good"
    return bounds(graph, answers), rounds, answers


@given(st.integers(2, 300).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count - 1))))
def test_the_first_bad_one_is_found_in_as_many_runs_as_halving_takes(row):
    count, first_bad = row
    result, rounds, _ = searched(count, first_bad)
    assert (result.good, result.bad) == (first_bad - 1, first_bad)
    assert rounds <= math.ceil(math.log2(count - 1)) if count > 2 else rounds == 0


def test_of_64_commits_eight_are_run_with_both_ends():
    assert max(searched(64, first_bad)[1] for first_bad in range(1, 64)) + 2 == 8


@given(st.integers(1, 62), st.sets(st.integers(1, 62), max_size=20))
def test_what_is_skipped_does_not_hide_the_first_bad_one_but_where_it_lies_beside(first_bad, skipped):
    result, _, answers = searched(64, first_bad, skipped)
    assert result.good < first_bad <= result.bad
    assert result.between == tuple(range(result.good + 1, result.bad))
    assert all(answers[position] == "skipped" for position in result.between)


def test_a_row_with_nothing_between_needs_no_run():
    assert next_positions(Graph.line(2), {0: "good", 1: "bad"}) == ()


@given(st.integers(1, 62), st.integers(2, 8))
def test_several_at_a_time_divide_what_is_left(first_bad, jobs):
    result, rounds, _ = searched(64, first_bad, jobs=jobs)
    assert (result.good, result.bad) == (first_bad - 1, first_bad)
    assert rounds <= math.ceil(math.log(63, jobs + 1)) + 1


MERGED = Graph(((), (0,), (0,), (2,), (3,), (4,), (5,), (6,), (1, 7), (8,)))
"""The culprit is 1, on the main branch. 2 to 7 are of a branch that left before it, and 8 merges it."""


def searched_in(graph, culprit, skipped=frozenset(), jobs=1):
    """Search a graph in which `culprit` and all that comes from it is bad; return its bounds and all that is known."""
    count = len(graph.parents)
    has_it = [bool(graph.ancestors[position] >> culprit & 1) for position in range(count)]
    answers = {0: "good", count - 1: "bad"}
    if graph.backwards:
        has_it = [not flag for flag in has_it]
    while positions := next_positions(graph, answers, jobs):
        assert len(positions) <= jobs
        for position in positions:
            assert position not in answers, "nothing is run twice"
            answers[position] = "skipped" if position in skipped else "bad" if has_it[position] else "good"
    return bounds(graph, answers), answers


@pytest.mark.parametrize("culprit", range(1, 10))
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_branch_that_left_before_the_culprit_does_not_hide_it(culprit, jobs):
    result, answers = searched_in(MERGED, culprit, jobs=jobs)
    assert (result.bad, result.between) == (culprit, ())
    assert result.good == MERGED.parents[culprit][0]
    assert answers[result.good] == "good", "it was run"


def test_a_merge_that_did_it_is_compared_with_its_first_parent():
    result, _ = searched_in(MERGED, 8)
    assert (result.good, result.bad) == (1, 8)


def test_a_culprit_beside_what_cannot_be_run_is_one_of_those_that_remain():
    result, _ = searched_in(MERGED, 5, skipped={4, 5})
    assert (result.good, result.bad, result.between) == (3, 6, (4, 5))
    first, _ = searched_in(MERGED, 1, skipped={1})
    assert (first.good, first.bad, first.between) == (0, 8, (1,)), "all of the branch is good"


def test_a_parent_that_only_seemed_good_is_run_and_searched_before():
    """2 and 3 come from 1. 3 has something that makes up for it, so that 2 is taken for the culprit at first."""
    graph = Graph(((), (0,), (1,), (1,), (2, 3)))
    answers = {0: "good", 4: "bad", 3: "good", 2: "bad"}
    assert next_positions(graph, answers) == (1,)
    answers[1] = "bad"
    assert next_positions(graph, answers) == ()
    assert bounds(graph, answers) == Bounds(0, 1)


def test_one_that_makes_up_for_it_clears_nothing_that_the_bad_one_comes_from():
    """4 comes from 2, which is bad, and is good: whether 1 is bad, too, is not known by it."""
    graph = Graph(((), (0,), (1,), (2,), (2,), (3, 4)))
    assert next_positions(graph, {0: "good", 5: "bad", 4: "good", 3: "bad", 2: "bad"}) == (1,)


@st.composite
def graphs(draw):
    count = draw(st.integers(2, 24))
    parents = [()]
    for position in range(1, count):
        some = draw(st.sets(st.integers(0, position - 1), min_size=1, max_size=2))
        parents.append(tuple(draw(st.permutations(sorted(some)))))
    return Graph(tuple(parents))


@given(graphs(), st.data())
def test_in_any_graph_the_culprit_is_found_or_beside_what_cannot_be_run(graph, data):
    last = len(graph.parents) - 1
    culprit = data.draw(
        st.sampled_from([position for position in range(1, last + 1) if graph.ancestors[last] >> position & 1])
    )
    skipped = data.draw(st.sets(st.integers(1, max(1, last - 1)), max_size=6)) - {last}
    result, answers = searched_in(graph, culprit, skipped, jobs=data.draw(st.integers(1, 4)))
    assert culprit in {result.bad, *result.between}
    assert all(answers[position] == "skipped" for position in result.between)
    assert answers[result.good] == "good"
    if not skipped:
        assert (result.bad, result.between) == (culprit, ())
        assert result.good == graph.parents[culprit][0]


@given(graphs(), st.data())
def test_what_mended_it_is_found_the_same_way(graph, data):
    """The row leads back in time: its first is the latest."""
    last = len(graph.parents) - 1
    turned = [tuple(last - flag for flag in graph.parents[last - position]) for position in range(last + 1)]
    backwards = Graph(turned, backwards=True)
    mended = data.draw(
        st.sampled_from([position for position in range(last) if backwards.ancestors[0] >> position & 1])
    )
    result, _ = searched_in(backwards, mended)
    assert (result.good, result.bad, result.between) == (mended, turned[mended][0], ())
