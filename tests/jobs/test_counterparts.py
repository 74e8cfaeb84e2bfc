"""A process of a run, and the same process of another run."""

from __future__ import annotations

import pytest

from pytest_gpumem.measuring.jobs.counterparts import counterparts, places


def programs(names):
    """Return programs, of which ``a`` has several workers."""
    return {name: "a" if name in ("a", "a 2", "a 3") else name for name in names}


@pytest.mark.parametrize(
    ("measured", "again", "names"),
    [
        ({"a": 5, "a 2": 9}, {"a": 5, "a 2": 9}, {"a": "a", "a 2": "a 2"}),
        ({"a": 5, "a 2": 9}, {"a": 9, "a 2": 5}, {"a": "a 2", "a 2": "a"}),
        ({"a": 5, "a 2": 5}, {"a": 6, "a 2": 5}, {"a": "a", "a 2": "a 2"}),
        ({"a": 5}, {"a": 6, "b": 5}, {"a": "a"}),
        ({"a": 5, "b": 7}, {"b": 8}, {"b": "b"}),
        (
            {"a rank 0": 5, "a rank 1": 9},
            {"a rank 0": 9, "a rank 1": 5},
            {"a rank 0": "a rank 0", "a rank 1": "a rank 1"},
        ),
    ],
)
def test_processes_of_a_program_that_change_places_are_known_by_their_peaks(measured, again, names):
    assert counterparts(list(measured), programs(again), lambda name, other: measured[name] == again[other]) == names


@pytest.mark.parametrize(
    ("now", "baseline", "names"),
    [
        ({"a": 5, "a 2": 9}, {"a": 5, "a 2": 9}, {"a": "a", "a 2": "a 2"}),
        ({"a": 5, "a 2": 9}, {"a": 9, "a 2": 5}, {"a": "a 2", "a 2": "a"}),
        ({"a": 9, "a 2": 6}, {"a": 5, "a 2": 9}, {"a": "a", "a 2": "a 2"}),
        ({"a": 5, "a 2": 12}, {"a": 5, "a 2": 9}, {"a": "a", "a 2": "a 2"}),
        ({"a": 6, "a 2": 12}, {"a": 5, "a 2": 9}, {"a": "a", "a 2": "a 2"}),
        ({"a": 1, "a 2": 2, "a 3": 3}, {"a": 2, "a 2": 3, "a 3": 1}, {"a": "a 3", "a 2": "a", "a 3": "a 2"}),
        ({"a": 5, "b": 9}, {"a": 9, "b": 5}, {"a": "a", "b": "b"}),
        ({"b 1": 5, "b 2": 9}, {"b 1": 9, "b 2": 5}, {"b 1": "b 1", "b 2": "b 2"}),
        (
            {"a rank 0": 5, "a rank 1": 9},
            {"a rank 0": 9, "a rank 1": 5},
            {"a rank 0": "a rank 0", "a rank 1": "a rank 1"},
        ),
        ({"a": 5, "a 2": 9}, {}, {"a": "a", "a 2": "a 2"}),
    ],
)
def test_workers_change_their_names_if_all_of_them_then_fit_their_baselines(now, baseline, names):
    assert places(programs(now), lambda name, other: now[name] == baseline.get(other)).names == names


@pytest.mark.parametrize(
    ("now", "baseline", "doubtful"),
    [
        ({"a": 24, "a 2": 48}, {"a": 12, "a 2": 24}, {"a": "a 2"}),
        ({"a": 9, "a 2": 6}, {"a": 5, "a 2": 9}, {"a": "a 2"}),
        ({"a": 9, "a 2": 5}, {"a": 5, "a 2": 9}, {}),
        ({"a": 5, "a 2": 12}, {"a": 5, "a 2": 9}, {}),
        ({"a": 6, "a 2": 12}, {"a": 5, "a 2": 9}, {}),
        ({"a": 24, "b": 48}, {"a": 12, "b": 24}, {}),
    ],
)
def test_a_place_is_doubtful_if_a_worker_has_grown_and_another_fits_its_baseline(now, baseline, doubtful):
    found = places(programs(now), lambda name, other: now[name] == baseline.get(other))
    assert found.doubtful == doubtful
