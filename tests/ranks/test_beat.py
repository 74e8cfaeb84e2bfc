"""Which rank is stuck, by the signs of life of all of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pytest_gpumem.measuring.ranks.beat import Beat, Position, is_stuck, position_of, stuck_text
from pytest_gpumem.measuring.ranks.consensus import Point
from pytest_gpumem.measuring.ranks.watch import _missing_text

STEP = "test_it.py::test_step (call)"
SLEEPS = Position("test_it.py:18 in step")
REDUCES = Position("test_it.py:20 in step", "all_reduce", collective=True)


MEASURES = Point(1, 2)


def beat(place: Position = SLEEPS, *, point: Point = MEASURES, where: str = STEP, measures: bool = True) -> Beat:
    return Beat(7, where, point, measures, place)


def told(*beats: Beat | None, failed: dict[int, str] | None = None, silent: tuple[float, ...] = ()) -> list[str]:
    return stuck_text(beats, silent or (0.1,) * len(beats), 5, failed or {}).splitlines()


def test_the_others_wait_in_a_collective_for_the_rank_that_does_not():
    assert told(beat(REDUCES), beat(REDUCES), beat(REDUCES), beat()) == [
        "rank 3 of 4 made no progress within 5 s (--gpumem-rank-timeout), and the others wait for it",
        "  rank 3: in test_it.py::test_step (call), at test_it.py:18 in step",
        "  ranks 0 to 2: in test_it.py::test_step (call), at test_it.py:20 in step, within all_reduce",
    ]


def test_the_others_wait_for_a_decision():
    waits = beat(point=Point(1, 3, waits=True))
    lines = told(waits, beat(), waits)
    assert lines[0].startswith("rank 1 of 3 made no progress within 5 s")
    assert "ranks 0 and 2: in test_it.py::test_step (call), waiting for the others" in lines[2]


def test_a_rank_that_waits_for_less_than_others_is_stuck():
    assert told(beat(point=Point(2, 1, waits=True)), beat(point=Point(1, 9, waits=True)))[0].startswith("rank 1 of 2")


def test_of_several_ranks_each_is_named():
    lines = told(beat(REDUCES), beat(), beat(Position("test_it.py:30 in other")))
    assert lines[0].startswith("ranks 1 and 2 of 3 made no progress")
    assert lines[0].endswith("and the others wait for them")


def test_where_all_call_the_same_but_one_that_one_is_named():
    assert told(beat(), beat(), beat(Position("test_it.py:99 in loop")))[0].startswith("rank 2 of 3 ")


def test_where_it_cannot_be_told_nobody_is_blamed():
    assert told(beat(REDUCES), beat(REDUCES))[0] == "none of 2 ranks made progress within 5 s (--gpumem-rank-timeout)"
    assert told(beat(), beat(Position("test_it.py:99 in loop")))[0].startswith("none of 2 ranks")


def test_a_rank_that_never_came_and_one_that_is_silent():
    lines = told(beat(REDUCES), None, beat(), silent=(0.1, 60, 30))
    assert lines[0].startswith("ranks 1 and 2 of 3 ")
    assert lines[1] == "  rank 1: has not started its measured tests"
    assert lines[2].endswith("no sign of life for 30 s")


def test_a_rank_that_failed_is_named_with_its_failure_though_it_waits():
    ended = beat(point=Point(1, 2, waits=True))
    lines = told(beat(REDUCES), ended, failed={1: "in its call: ValueError: boom\n\n>  raise ValueError"})
    assert lines[0] == "rank 1 of 2 failed by itself in its call: ValueError: boom"
    assert lines[-1] == ">  raise ValueError"


@pytest.mark.parametrize(
    ("beats", "stuck"),
    [
        ([beat(), beat()], True),
        ([beat(measures=False), beat(measures=False)], False),
        ([beat(measures=False), beat(measures=False, point=Point(1, 2, waits=True))], True),
        ([beat(measures=False), None], True),
    ],
    ids=["in a measured test", "in a test that is not measured", "one waits", "one has not come"],
)
def test_only_ranks_that_others_may_wait_for_are_stuck(beats, stuck):
    assert is_stuck(beats) is stuck


def test_the_place_of_a_thread_is_its_innermost_line_in_the_project():
    event, ready = threading.Event(), threading.Event()

    def stands_here() -> None:
        ready.set()
        event.wait()

    thread = threading.Thread(target=stands_here)
    thread.start()
    try:
        ready.wait()
        place = _place_within(thread, "wait")
    finally:
        event.set()
        thread.join()
    assert place.line.startswith("ranks/test_beat.py:")
    assert place.line.endswith(" in stands_here")
    assert not place.collective


def _place_within(thread: threading.Thread, function: str) -> Position:
    while True:
        place = position_of(thread.ident or 0, Path(__file__).parents[1])
        if place.within == function:
            return place


def test_a_rank_that_is_gone_was_where_it_came_to_after_its_last_sign_of_life():
    beat = Beat(3, "test_it.py::test_step (set-up)", Point(), True, Position("test_it.py:3 in model"))
    seen = [(None, 0.0), (beat, 0.0), (None, 0.0), (beat, 0.0)]
    works = {1: "test_it.py::test_step (call)", 2: None, 3: beat.where}
    assert _missing_text([1, 2, 3], seen, works).splitlines()[1:] == [
        "  rank 1: last in test_it.py::test_step (call)",
        "  rank 2: never started its measured tests",
        "  rank 3: last in test_it.py::test_step (set-up), at test_it.py:3 in model",
    ]
