"""Shares of modules' calls: few entries say it of every module, and a change is one only if it is the module's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.module_calls import (
    EVERYWHERE,
    Calls,
    KindsOfSteps,
    calls_from_text,
    count_calls,
    no_longer,
    outermost,
)

PATHS = st.lists(st.sampled_from(["a", "b", "*", "attn"]), min_size=1, max_size=3).map(".".join)
SHARES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda two: Calls(two[0], two[0] + two[1]))
CALLS = st.dictionaries(PATHS, SHARES.filter(lambda calls: calls.total > 0), max_size=6)


def test_calls_are_counted_by_path():
    assert count_calls([("h.*", True), ("h.*", False), ("head", False)]) == {"h.*": (1, 2), "head": (0, 1)}


def test_what_is_within_a_module_that_is_alike_has_no_entry():
    calls = {"net": Calls(0, 1), "teacher": Calls(1, 1), "teacher.h.*": Calls(6, 6), "teacher.head": Calls(1, 1)}
    assert outermost(calls) == {EVERYWHERE: (8, 9), "teacher": (1, 1)}


def test_what_is_within_a_module_and_unlike_it_has_one():
    calls = {"net": Calls(0, 1), "teacher": Calls(1, 1), "teacher.head": Calls(0, 1)}
    assert outermost(calls) == {EVERYWHERE: (1, 3), "teacher": (1, 1), "teacher.head": (0, 1)}


def test_where_all_are_alike_there_is_one_entry_or_none():
    assert outermost({"a": Calls(2, 2), "b": Calls(1, 1)}) == {EVERYWHERE: (3, 3)}
    assert outermost({"a": Calls(0, 2), "b": Calls(0, 1)}) == {}
    assert outermost({}) == {}


@given(CALLS)
def test_what_was_left_of_calls_is_left_as_it_is(calls):
    assert outermost(outermost(calls)) == outermost(calls)


@given(CALLS, CALLS)
def test_few_entries_say_what_all_of_them_say_of_modules_that_changed_whole(before, now):
    whole = {path: Calls(one.total * (one.these > one.others), one.total) for path, one in before.items()}
    for module in now.keys() & whole.keys():
        told = no_longer(outermost(whole), now, module)
        assert (told is not None) == (no_longer(whole, now, module) is not None)


@given(CALLS)
def test_nothing_changes_where_nothing_does(calls):
    # Of a module that is alike in all its calls; of others the number of calls tells.
    assert not any(no_longer(outermost(calls), calls, module) for module in calls)


@given(CALLS, st.integers(2, 4))
def test_as_many_times_the_calls_are_no_change(calls, times):
    more = {path: Calls(one.these * times, one.total * times) for path, one in calls.items()}
    assert not any(no_longer(outermost(calls), more, module) for module in more)
    assert not any(no_longer(outermost(more), calls, module) for module in calls)


def test_calls_that_are_gone_are_no_change():
    # A teacher of the student's kind was taken away.
    assert no_longer({"h.*": Calls(6, 12)}, {"h.*": Calls(0, 6)}, "h.*") is None
    assert no_longer({"h.*": Calls(6, 12)}, {"h.*": Calls(0, 12)}, "h.*") == (6, 12)
    assert no_longer({"h.*": Calls(6, 12)}, {}, "h.*") is None


@pytest.mark.parametrize("path", ["h.*.attn", "", "a x b", "6 of 12 x h", "two\nlines"])
def test_calls_are_written_and_read_back(path):
    assert calls_from_text(Calls(6, 12).text(path)) == (path, (6, 12))


@pytest.mark.parametrize("text", ["", "h.*", "6 of h.*", "7 of 6 x h", "1.0 of 2 x h", "1 of ² x h"])
def test_what_are_no_calls_is_told(text):
    with pytest.raises(ValueError, match=r"is no share of a module's calls, like '6 of 12 x blocks\.\*'$"):
        calls_from_text(text)


TRAINING = {"net": Calls(0, 1)}, {"net": Calls(0, 1)}
VALIDATION: tuple[dict[str, Calls], dict[str, Calls]] = {"net": Calls(2, 2)}, {}
VALIDATION_WITH_GRAD: tuple[dict[str, Calls], dict[str, Calls]] = {"net": Calls(0, 2)}, {}


def calls_of(*steps):
    kinds = KindsOfSteps()
    for step in steps:
        kinds.add(*step)
    return kinds.no_grad


@given(st.lists(st.sampled_from([TRAINING, VALIDATION])))
def test_calls_of_differing_steps_do_not_depend_on_how_often_each_kind_came(steps):
    assert calls_of(TRAINING, VALIDATION, *steps) == {"net": (2, 3)}


def test_a_validation_that_did_not_come_is_no_lost_no_grad():
    before = calls_of(TRAINING, VALIDATION)
    assert no_longer(before, calls_of(TRAINING, TRAINING), "net") is None
    assert no_longer(before, calls_of(TRAINING, VALIDATION_WITH_GRAD), "net") == (2, 3)


def test_a_part_with_grad_mode_off_that_is_gone_is_no_lost_no_grad():
    before = {"step()": Calls(4, 11), "net": Calls(1, 2)}
    assert no_longer(before, {"step()": Calls(0, 15)}, "step()") is None
    assert no_longer(before, {"net": Calls(0, 3)}, "net") is None
    assert no_longer(before, {"step()": Calls(0, 11)}, "step()") == (4, 11)


def test_functions_with_grad_mode_off_are_kept_and_belong_to_no_module():
    calls = {"net": Calls(1, 1), "step()": Calls(0, 3), "Net.target()": Calls(2, 2)}
    assert outermost(calls) == {EVERYWHERE: (1, 1), "Net.target()": (2, 2)}
    assert no_longer({EVERYWHERE: Calls(1, 1)}, {"step()": Calls(0, 3)}, "step()") is None
