"""What a step keeps: what the steps after it do not free. From recordings written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.facts.values.composition import Row
from pytest_gpumem.measuring.explain.compose import composition_of_peak, composition_of_retained, holders_in
from pytest_gpumem.measuring.explain.lifetimes import timeline_of
from pytest_gpumem.measuring.explain.survivors import survivors_of
from pytest_gpumem.measuring.explain.trace import Label
from tests.explain.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.measuring.explain.blocks import Timeline


def steps(run: Callable[[Stream, int], None], before: dict[int, int], *, following: int = 4) -> Stream:
    """A recorded step with those after it; ``run`` writes the step of a number, from 0, into the recording."""
    stream = Stream(before)
    run(stream, 0)
    with stream.mark("rest", "garbage"):
        pass
    for number in range(1, following + 1):
        with stream.mark("next"):
            run(stream, number)
            with stream.mark("rest", "garbage"):
                pass
    return stream


def read(run: Callable[[Stream, int], None], before: dict[int, int], *, following: int = 4) -> Timeline:
    return timeline_of(steps(run, before, following=following).trace().apart(following))


def make(stream: Stream, address: int, line: int, nbytes: int = 40) -> None:
    with stream.mark("call", "", f"train.py:{line}"), stream.operator("aten::zeros"):
        stream.alloc(address, nbytes)


def lines(timeline: Timeline, growth: int = 40) -> dict[str, int]:
    """The bytes that are told to be kept, by line."""
    return {row.where: row.nbytes for row in composition_of_retained(timeline, growth).rows}


def leak_beside_target(stream: Stream, number: int) -> None:
    make(stream, 1000 + number, line=9)
    stream.free(2000 + number - 1)
    make(stream, 2000 + number, line=10)


def test_a_step_keeps_what_the_steps_after_it_do_not_free():
    assert lines(read(leak_beside_target, {1999: 40})) == {"train.py:9": 40}


def test_which_of_two_lines_is_kept_is_not_known_without_a_step_after_it():
    stream = Stream({1999: 40}, own={1999})
    leak_beside_target(stream, 0)
    retained = composition_of_retained(stream.timeline())
    assert [(row.where, row.nbytes, row.count) for row in retained.rows] == [("train.py:10 or train.py:9", 40, 1)]
    assert retained.notes == (
        "1 of 2 tensors with 40 B each is kept, but it is not known which, because the step freed 1 older tensor with this size",
    )


@pytest.mark.parametrize("length", [2, 4])
def test_a_list_of_the_latest_entries_is_told_from_a_leak_of_the_same_size(length):
    def step(stream: Stream, number: int) -> None:
        stream.free(1000 + number)
        make(stream, 1000 + number + length, line=3)
        make(stream, 2000 + number, line=4)

    assert lines(read(step, {1000 + n: 40 for n in range(length)})) == {"train.py:4": 40}


def test_a_list_longer_than_the_recording_may_be_what_is_kept():
    def step(stream: Stream, number: int) -> None:
        stream.free(1000 + number)
        make(stream, 1100 + number, line=3)
        make(stream, 2000 + number, line=4)

    timeline = read(step, {1000 + n: 40 for n in range(100)})
    assert lines(timeline) == {"train.py:3 or train.py:4": 40}
    # Nor is it known at the peak which line left an older one.
    stream = steps(step, {1000 + n: 40 for n in range(100)})
    peak = composition_of_peak(timeline_of(stream.trace().apart(4), 4000), 4000)
    assert {row.where for row in peak.rows if row.count > 1} <= {""}


@pytest.mark.parametrize("others", [0, 1])
def test_a_cache_that_a_longer_one_replaces_keeps_the_difference(others):
    def step(stream: Stream, number: int) -> None:
        make(stream, 1001 + number, line=5, nbytes=1000 + 10 * (number + 1))
        stream.free(1000 + number)
        for _ in range(others):
            make(stream, 2000 + number, line=6)

    timeline = read(step, {1000: 1000})
    growth = 10 + 40 * others
    assert lines(timeline, growth) == {"train.py:5": 10, **({"train.py:6": 40} if others else {})}
    retained = composition_of_retained(timeline, growth)
    assert retained.total == growth
    assert [note.partition(":")[0] for note in retained.notes] == [
        "10 B is the difference between a tensor and the smaller tensor that it replaces, as with torch.cat on a cache"
    ]
    assert survivors_of(timeline, growth).replacements[0].latest[0].address == 1005, (
        "the tensor that is there now has a holder"
    )


def test_a_list_that_is_rebuilt_keeps_the_difference():
    def step(stream: Stream, number: int) -> None:
        for entry in range(number + 3):
            make(stream, 1000 + 100 * (number + 1) + entry, line=7)
        for entry in range(number + 2):
            stream.free(1000 + 100 * number + entry)

    assert lines(read(step, {1000: 40, 1001: 40})) == {"train.py:7": 40}


def test_a_buffer_that_doubles_now_and_then_keeps_the_difference():
    def step(stream: Stream, number: int) -> None:
        if number == 2:
            make(stream, 1001, line=8, nbytes=800)
            stream.free(1000)

    timeline = read(step, {1000: 400})
    assert lines(timeline, growth=100) == {"train.py:8": 400}
    assert survivors_of(timeline, 100).step == 2


def test_batches_of_other_sizes_are_not_kept():
    sizes = [500, 300, 400, 500, 300]

    def step(stream: Stream, number: int) -> None:
        make(stream, 1001 + number, line=3, nbytes=sizes[number])
        stream.free(1000 + number)
        make(stream, 2000 + number, line=4)

    assert lines(read(step, {1000: 400})) == {"train.py:4": 40}


def test_a_gradient_that_lives_for_some_steps_replaces_the_one_before():
    def step(stream: Stream, number: int) -> None:
        make(stream, 2000 + number, line=4)
        if not number:
            stream.snapshot(Label(1000, "gradient", "fc"))
            stream.free(1000)
            make(stream, 1001, line=3)
            stream.snapshot(Label(1001, "gradient", "fc"))

    assert lines(read(step, {1000: 40})) == {"train.py:4": 40}


def test_a_step_that_replaces_no_tensor_of_the_size_tells_what_each_step_keeps():
    def step(stream: Stream, number: int) -> None:
        make(stream, 2000 + number, line=4)
        if not number:
            stream.free(1000)
            make(stream, 1001, line=3)

    assert lines(read(step, {1000: 40})) == {"train.py:4": 40}
    assert survivors_of(read(step, {1000: 40}), 40).step == 1


def test_a_leak_of_every_second_step_is_told_from_the_next_that_keeps_bytes():
    def step(stream: Stream, number: int) -> None:
        if number % 2:
            make(stream, 2000 + number, line=4)

    assert lines(read(step, {}), growth=20) == {"train.py:4": 40}
    assert lines(read(step, {}), growth=0) == {}, "a step that is not to keep anything is described alone"


def test_two_leaks_of_one_size_have_a_row_each():
    def step(stream: Stream, number: int) -> None:
        make(stream, 1000 + number, line=3)
        make(stream, 2000 + number, line=4)

    assert lines(read(step, {}), growth=80) == {"train.py:3": 40, "train.py:4": 40}


def test_what_earlier_steps_kept_is_at_the_peak_what_this_one_keeps():
    before = {1000 - n: 40 for n in range(1, 4)} | {1999: 40}
    stream = steps(leak_beside_target, before)
    peak = composition_of_peak(timeline_of(stream.trace().apart(4), 160), 160)
    assert {row.where: row.count for row in peak.rows} == {"train.py:9": 4, "train.py:10": 1}
    assert peak.total == 200


def test_of_what_later_steps_kept_no_row_is_more_than_the_total():
    # The step that was measured held 400 bytes: its inputs, of which later steps keep more, in sizes of their own.
    stream = Stream({n: 100 + n % 2 for n in range(30)}, own=set(range(30)))
    stream.snapshot(*(Label(n, "input") for n in range(30)))
    make(stream, 100, line=4)
    for number in range(4):
        with stream.mark("next"):
            make(stream, 101 + number, line=4)
    peak = composition_of_peak(timeline_of(stream.trace().apart(4), 400), 400)
    assert peak.total == 440
    assert sum(row.nbytes for row in peak.rows) == 440
    assert all(row.nbytes > 0 for row in peak.rows)


def test_the_steps_after_it_change_no_other_figure_of_a_step():
    alone, followed = (read(leak_beside_target, {1999: 40}, following=number) for number in (0, 4))
    assert (followed.live, followed.peak, followed.peak_bytes) == (alone.live, alone.peak, alone.peak_bytes)
    assert composition_of_peak(followed, 40) == composition_of_peak(alone, 40)
    assert len(followed.following) == 4


def test_a_step_that_broke_off_is_none_of_those_after_it():
    stream = steps(leak_beside_target, {1999: 40}, following=2)
    trace = stream.trace()
    assert len(trace.apart(1).following) == 1
    assert trace.apart(1).tokens == trace.apart(2).tokens
    assert stream.trace().apart(0).following == ()


def test_without_steps_after_it_a_trace_is_as_it_was():
    stream = Stream()
    stream.alloc(1)
    assert stream.trace().apart(4) == stream.trace()


def test_a_row_of_one_of_two_lines_has_what_both_have_in_common():
    stream = Stream({1: 40}, own={1})
    for address, module in ((2, "h.0"), (3, "h.1")):
        with stream.mark("call", module, "lib.py:3"), stream.operator("aten::mul"):
            stream.alloc(address, 40)
    stream.free(1)
    (row,) = composition_of_retained(stream.timeline()).rows
    assert row == Row("other", 40, site="lib.py:3", operator="mul")


# Holders of what a step keeps


def held(timeline: Timeline, paths: dict[int, str], growth: int = 0) -> dict[str, dict[str, int]]:
    """The bytes of each line, by the path to the holder."""
    holders = holders_in(timeline, paths, growth)
    assert sum(holder.kept.total for holder in holders) == composition_of_retained(timeline, growth).total
    return {holder.path: {row.where: row.nbytes for row in holder.kept.rows} for holder in holders}


def test_the_holder_of_a_tensor_that_the_next_step_replaces_is_left_out():
    timeline = read(leak_beside_target, {1999: 40})
    assert held(timeline, {1000: "Net.seen[...]", 2000: "Net.target"}) == {"Net.seen[...]": {"train.py:9": 40}}


@pytest.mark.parametrize(
    ("paths", "text", "alternatives"),
    [
        (("Net.target", "Net.seen[...]"), "Net.seen[...] or Net.target", ("Net.seen[...]", "Net.target")),
        (("", "Net.seen[...]"), "perhaps Net.seen[...]", ("", "Net.seen[...]")),
        (("Net.seen[...]", "Net.seen[...]"), "Net.seen[...]", ()),
        (("", ""), "", ()),
    ],
)
def test_the_holder_of_one_of_two_tensors_is_certain_if_both_have_it(paths, text, alternatives):
    stream = Stream({1999: 40}, own={1999})
    leak_beside_target(stream, 0)
    (holder,) = holders_in(stream.timeline(), dict(zip((2000, 1000), paths, strict=True)))
    assert (holder.path, holder.alternatives, holder.kept.total) == (text, alternatives, 40)
    assert [row.where for row in holder.kept.rows] == ["train.py:10 or train.py:9"]


@pytest.mark.parametrize(("more", "path"), [(10, "keys"), (20, "keys or values")])
def test_two_caches_of_one_line_are_told_apart_if_they_are_equally_large(more, path):
    """A cache of keys and a cache of values become longer by 10 bytes and by ``more`` bytes in each step."""

    def step(stream: Stream, number: int) -> None:
        for cache, bytes_a_step in enumerate((10, more)):
            make(stream, 1000 * cache + number + 1, line=5, nbytes=1000 + bytes_a_step * number)
            stream.free(1000 * cache + number)

    before = {0: 990, 1000: 1000 - more}
    told = held(read(step, before), {5: "keys", 1005: "values"}, 10 + more)
    assert told == (
        {path: {"train.py:5": 10}, "values": {"train.py:5": 10}} if more == 10 else {path: {"train.py:5": 30}}
    )


def test_a_block_that_a_failed_step_has_freed_has_no_holder():
    """Its address may be another tensor's by then."""
    stream = steps(leak_beside_target, {1999: 40}, following=2)
    with stream.mark("next"):
        stream.free(1000)
    assert stream.trace().apart(2).freed_at_end == {1000}
    assert stream.trace().apart(3).freed_at_end == frozenset()
