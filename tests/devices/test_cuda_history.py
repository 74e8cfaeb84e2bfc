"""What the profiler and the allocator's history tell of a GPU, joined: sizes, frees, order. All of it made up by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.values.events import NOWHERE, AllocationEvent, SpanBegin, SpanEnd, TensorRecord
from pytest_gpumem.measuring.devices.cuda_history import (
    HistoryEntry,
    Threads,
    history_of,
    in_order_of_time,
    live_blocks,
    numbered_by_thread,
    with_requested_sizes,
)

A, B, C = 0xA000, 0xB000, 0xC000
MS = 1_000_000
unhurried = settings(deadline=None)


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def took(time: int, address: int, nbytes: int) -> AllocationEvent:
    """As the profiler tells of an allocation."""
    return AllocationEvent(time, address, rounded(nbytes))


def gave(time: int, address: int, nbytes: int) -> AllocationEvent:
    return AllocationEvent(time, address, -rounded(nbytes))


def alloc(time: int, address: int, nbytes: int) -> HistoryEntry:
    return HistoryEntry(time, "alloc", address, nbytes)


def apart(time: int, address: int, nbytes: int) -> HistoryEntry:
    """As the history tells of an allocation by a thread that the profiler does not see."""
    return HistoryEntry(time, "alloc", address, nbytes, from_other_thread=True)


def requested(time: int, address: int, nbytes: int) -> HistoryEntry:
    return HistoryEntry(time, "free_requested", address, nbytes)


def completed(time: int, address: int, nbytes: int) -> HistoryEntry:
    return HistoryEntry(time, "free_completed", address, nbytes)


def freed(time: int, address: int, nbytes: int) -> list[HistoryEntry]:
    return [requested(time, address, nbytes), completed(time, address, nbytes)]


def ran_out(time: int, nbytes: int) -> HistoryEntry:
    return HistoryEntry(time, "oom", NOWHERE, nbytes)


def changes(tokens) -> list[tuple[int, int]]:
    return [(token.address, token.nbytes) for token in tokens if isinstance(token, AllocationEvent)]


# Sizes


def test_what_was_there_before_is_freed_with_the_bytes_that_were_asked_for():
    assert with_requested_sizes([gave(2, A, 1001)], freed(2, A, 1001)) == [AllocationEvent(2, A, -1001)]


def test_operators_and_what_they_took_stay_around_their_allocations():
    operator = SpanBegin(1, "operator", "aten::mul")
    tokens = [operator, TensorRecord(B, "float32", (2,)), took(2, A, 8), SpanEnd(3), gave(4, A, 8)]
    told = with_requested_sizes(tokens, [alloc(2, A, 8), *freed(4, A, 8)])
    assert told == [*tokens[:2], AllocationEvent(2, A, 8), SpanEnd(3), AllocationEvent(4, A, -8)]


def test_segments_of_the_cache_and_snapshots_are_no_blocks():
    actions = ("segment_alloc", "segment_map", "segment_unmap", "segment_free", "snapshot")
    cache = [HistoryEntry(1, action, A, 2**21) for action in actions]
    history = [*cache, alloc(2, A, 8), *cache, requested(3, A, 8), *cache, completed(3, A, 8), *cache]
    assert changes(with_requested_sizes([took(2, A, 8), gave(3, A, 8)], history)) == [(A, 8), (A, -8)]


# Frees


@pytest.mark.parametrize("ahead", [0, -5 * MS, 5 * MS], ids=["one clock", "ahead", "behind"])
def test_a_block_that_came_back_late_is_freed_in_what_was_going_on_by_the_clock(ahead):
    marks = [
        SpanBegin(10 * MS, "mark", "", mark=0),
        SpanEnd(20 * MS),
        SpanBegin(30 * MS, "mark", "", mark=1),
        SpanEnd(40 * MS),
    ]
    history = [alloc(1, A, 8), requested(2, A, 8), completed(15 * MS, A, 8)]
    told = with_requested_sizes(
        [took(1, A, 8), gave(2, A, 8), *marks],
        [entry._replace(time_ns=entry.time_ns + ahead) for entry in history],
    )
    assert told == [AllocationEvent(1, A, 8), marks[0], AllocationEvent(10 * MS, A, -8), *marks[1:]]


def test_a_block_that_comes_back_at_once_is_freed_in_the_operator_that_gave_it_back():
    operator, end = SpanBegin(1, "operator", "aten::mm"), SpanEnd(6)
    # The two clocks tick differently: the history's in microseconds.
    history = [alloc(0, A, 8), requested(0, A, 8), completed(1000, A, 8)]
    told = with_requested_sizes([operator, took(2, A, 8), gave(5, A, 8), end], history)
    assert told == [operator, AllocationEvent(2, A, 8), AllocationEvent(5, A, -8), end]


@pytest.mark.parametrize("wrong", [-50 * MS, 50 * MS])
def test_a_clock_that_is_wrong_does_not_move_a_free_past_an_allocation(wrong):
    tokens = [
        *(took(1, A, 8), gave(2, A, 8), SpanBegin(3, "mark", "", mark=0), took(4, B, 8)),
        *(SpanEnd(5), SpanBegin(7, "mark", "", mark=1), took(8, C, 8), SpanEnd(9)),
    ]
    history = [alloc(1, A, 8), requested(2, A, 8), alloc(4, B, 8), completed(6 + wrong, A, 8), alloc(8, C, 8)]
    told = with_requested_sizes(tokens, history)
    assert changes(told) == [(A, 8), (B, 8), (A, -8), (C, 8)]


def test_what_comes_back_after_everything_else_is_freed_at_the_end():
    tokens = [took(1, A, 100), gave(2, A, 100), SpanBegin(3, "mark", "", mark=0), SpanEnd(4)]
    history = [alloc(1, A, 100), requested(2, A, 100), completed(9 * MS, A, 100)]
    assert with_requested_sizes(tokens, history) == [
        AllocationEvent(1, A, 100),
        *tokens[2:],
        AllocationEvent(4, A, -100),
    ]


# Running out of memory


def test_an_allocation_that_failed_is_an_event_of_no_bytes_before_what_it_led_to():
    tokens = [took(1, A, 100), SpanBegin(2, "operator", "aten::empty"), SpanEnd(4), gave(5, A, 100)]
    history = [alloc(1, A, 100), ran_out(3, 2**40), *freed(5, A, 100)]
    assert with_requested_sizes(tokens, history) == [
        AllocationEvent(1, A, 100),
        tokens[1],
        AllocationEvent(2, NOWHERE, 0),
        tokens[2],
        AllocationEvent(5, A, -100),
    ]


def test_an_allocation_that_failed_is_before_the_next_event_if_the_clock_is_silent():
    tokens = [took(1, A, 100), gave(2, A, 100)]
    assert changes(with_requested_sizes(tokens, [alloc(1, A, 100), ran_out(99, 7), *freed(99, A, 100)])) == [
        (A, 100),
        (NOWHERE, 0),
        (A, -100),
    ]


# What does not match


@pytest.mark.parametrize(
    ("tokens", "history", "told"),
    [
        (
            [took(1, A, 8), took(2, B, 8)],
            [alloc(1, A, 8)],
            r"2 GPU allocations .* 1 allocations in .*: allocation 2 has 512 bytes at 0xb000 .* has no further allocation",
        ),
        (
            [took(1, A, 8)],
            [alloc(1, A, 8), alloc(2, B, 9)],
            r"1 GPU allocations .* 2 allocations in .*: the history has another allocation of 9 bytes at 0xb000",
        ),
        (
            [took(1, A, 8), took(2, B, 8)],
            [alloc(1, B, 8), alloc(2, A, 8)],
            r"allocation 1 has 512 bytes at 0xa000 in the profile, but 8 bytes at 0xb000 in the history",
        ),
        (
            [took(1, A, 8)],
            [alloc(1, A, 513)],
            r"allocation 1 has 512 bytes at 0xa000 in the profile, but 513 bytes at 0xa000 in the history",
        ),
        (
            [took(1, A, 8), gave(2, A, 8)],
            [alloc(1, A, 8)],
            r"after allocation 1 the profile has a free of 512 bytes at 0xa000, and the history does not have it",
        ),
        (
            [took(1, A, 8), gave(2, A, 8), took(3, B, 8)],
            [alloc(1, A, 8), alloc(3, B, 8), *freed(4, A, 8)],
            r"after allocation 1 the profile has a free of 512 bytes at 0xa000, and the history does not have it",
        ),
    ],
)
def test_events_and_a_history_that_do_not_match_are_refused_with_where_they_part(tokens, history, told):
    with pytest.raises(MeasuringError, match=told) as raised:
        with_requested_sizes(tokens, history)
    assert "another thread allocated memory" in str(raised.value)


# What threads do that the profiler does not see

THREAD = [{"filename": "work.py", "name": "load"}, {"filename": "/usr/lib/threading.py", "name": "_bootstrap"}]


def test_what_another_thread_allocates_stands_apart_in_the_order_of_the_history():
    tokens = [SpanBegin(1, "operator", "aten::clone"), took(2, A, 8), SpanEnd(3), gave(8, B, 9), gave(9, A, 8)]
    history = [apart(1, B, 9), alloc(2, A, 8), apart(2, C, 7), *freed(8, B, 9), *freed(9, A, 8)]
    told = with_requested_sizes(tokens, history)
    assert changes(told) == [(B, 9), (A, 8), (C, 7), (B, -9), (A, -8)]
    assert [token.address for token in told if isinstance(token, AllocationEvent) and token.from_other_thread] == [B, C]


def test_a_block_of_another_thread_is_not_taken_for_one_of_the_same_place_and_size():
    history = [apart(1, A, 8), *freed(2, A, 8), alloc(3, A, 8)]
    assert with_requested_sizes([took(3, A, 8)], history)[-1] == AllocationEvent(3, A, 8)


def test_a_thread_is_told_by_its_first_frame_where_the_recording_is_in_none():
    entry = {"action": "alloc", "addr": A, "size": 8, "stream": 0, "time_us": 1, "frames": THREAD}
    others = [{**entry, "frames": THREAD[:1]}, {**entry, "frames": []}, {**entry, "action": "free_requested"}]
    assert [one.from_other_thread for one in history_of([entry, *others], threads_apart=True)] == [
        True,
        False,
        False,
        False,
    ]
    assert not any(one.from_other_thread for one in history_of([entry, *others]))


# Anything that an allocator may do


ACTIONS = ["take", "take apart", "give", "give late", "give unseen", "return", "open", "close"]


@st.composite
def programs(draw):
    """Tokens and history of a made-up run, and its live bytes after each change, in the allocator's order.

    Blocks are taken, given back, kept longer by other streams, and taken and freed by threads that are not profiled; the
    history's clock goes wrong.
    """
    tokens, history, live = [], [], []
    held, waiting, free = {}, {}, [A, B, C, 0xD000, 0xE000]
    skew = draw(st.integers(-20 * MS, 20 * MS))
    ticks = draw(st.sampled_from([1, MS]))
    now = total = depth = 0

    def happened(action, address, nbytes, **kwargs):
        history.append(HistoryEntry(now + skew, action, address, nbytes, **kwargs))

    for action in draw(st.lists(st.sampled_from(ACTIONS))):
        now += ticks
        if action.startswith("take") and free:
            address = free.pop(draw(st.integers(0, len(free) - 1)))
            held[address] = nbytes = draw(st.integers(1, 2000))
            tokens += [took(now, address, nbytes)] if action == "take" else []
            happened("alloc", address, nbytes, from_other_thread=action == "take apart")
            total += nbytes
            live.append(total)
        elif action.startswith("give") and held:
            address = draw(st.sampled_from(sorted(held)))
            nbytes = held.pop(address)
            happened("free_requested", address, nbytes)
            if action != "give unseen":
                tokens.append(gave(now, address, nbytes))
            if action == "give late":
                waiting[address] = nbytes
            else:
                happened("free_completed", address, nbytes)
                free.append(address)
                total -= nbytes
                live.append(total)
        elif action == "return" and waiting:
            address = draw(st.sampled_from(sorted(waiting)))
            nbytes = waiting.pop(address)
            happened("free_completed", address, nbytes)
            free.append(address)
            total -= nbytes
            live.append(total)
        elif action == "open":
            tokens.append(SpanBegin(now, "operator", "aten::mul"))
            depth += 1
        elif action == "close" and depth:
            tokens.append(SpanEnd(now))
            depth -= 1
    return tokens, history, live


@unhurried
@given(programs())
def test_live_bytes_are_those_asked_for_by_blocks_that_the_allocator_has_not_back(program):
    tokens, history, live = program
    told = with_requested_sizes(tokens, history)
    sums, total = [], 0
    for _, nbytes in changes(told):
        total += nbytes
        sums.append(total)
    assert sums == live


@unhurried
@given(programs())
def test_what_is_joined_keeps_its_spans_and_where_things_were_allocated(program):
    tokens, history, _ = program

    def without_frees(these):
        return [
            (token.time_ns, token.address) if isinstance(token, AllocationEvent) else token
            for token in these
            if not isinstance(token, AllocationEvent) or (token.nbytes > 0 and not token.from_other_thread)
        ]

    told = with_requested_sizes(tokens, history)
    assert without_frees(told) == without_frees(tokens)
    times = [token.time_ns for token in told]
    assert times == sorted(times)


# Threads


def test_what_backward_does_on_its_own_thread_comes_where_it_was_waited_for():
    # As the profiler's tree has it: the other thread's operators where nothing waits for them.
    waiting, inner = SpanBegin(10, "mark", "", mark=0), SpanBegin(12, "operator", "aten::detach")
    node, later = SpanBegin(20, "node", "MulBackward0"), SpanBegin(50, "operator", "aten::add")
    tree = [
        *(waiting, inner, SpanEnd(13), took(45, C, 8), SpanEnd(46), later, SpanEnd(51)),
        *(node, TensorRecord(A, "float32", (2,)), took(25, B, 8), SpanEnd(30)),
    ]
    assert in_order_of_time(tree) == [
        *(waiting, inner, SpanEnd(13)),
        *(node, TensorRecord(A, "float32", (2,)), took(25, B, 8), SpanEnd(30)),
        *(took(45, C, 8), SpanEnd(46), later, SpanEnd(51)),
    ]


def test_tokens_of_one_moment_stay_as_they_are():
    tokens = [
        *(
            SpanBegin(5, "operator", "a"),
            TensorRecord(A, "float32", ()),
            SpanBegin(5, "operator", "b"),
            took(5, A, 8),
            SpanEnd(5),
        ),
        *(gave(5, A, 8), SpanEnd(5), SpanBegin(5, "operator", "c"), SpanEnd(6)),
    ]
    assert in_order_of_time(tokens) == tokens


def test_a_span_of_which_no_end_was_recorded_ends_where_it_began():
    began, other = SpanBegin(5, "operator", "a"), SpanBegin(7, "operator", "b")
    unended = SpanEnd(-(2**63))
    assert in_order_of_time([began, unended, other, SpanEnd(8)]) == [began, unended, other, SpanEnd(8)]


def test_a_span_in_another_thread_ends_at_the_latest_with_the_waiting_mark():
    mark, waiting, forked = (
        SpanBegin(1, "mark", "", mark=0),
        SpanBegin(2, "operator", "jit"),
        SpanBegin(3, "operator", "forked"),
    )
    later, operator = SpanBegin(10, "mark", "", mark=1), SpanBegin(11, "operator", "exp")
    tree = [
        mark,
        waiting,
        SpanEnd(5),
        SpanEnd(7),
        forked,
        took(4, A, 8),
        SpanEnd(8),
        later,
        operator,
        SpanEnd(12),
        SpanEnd(13),
    ]
    assert in_order_of_time(tree) == [
        *(mark, waiting, forked, took(4, A, 8), SpanEnd(7), SpanEnd(7), SpanEnd(7)),
        *(later, operator, SpanEnd(12), SpanEnd(13)),
    ]


def test_an_operator_begun_before_another_thread_left_its_span_is_told_whole():
    mark, waiting, forked = (
        SpanBegin(1, "mark", "", mark=0),
        SpanBegin(2, "operator", "jit"),
        SpanBegin(3, "operator", "forked"),
    )
    operator = SpanBegin(6, "operator", "exp")
    tree = [
        mark,
        waiting,
        SpanEnd(5),
        operator,
        took(9, B, 8),
        SpanEnd(10),
        SpanEnd(12),
        forked,
        took(4, A, 8),
        SpanEnd(8),
    ]
    assert in_order_of_time(tree) == [
        *(
            mark,
            waiting,
            forked,
            took(4, A, 8),
            operator,
            took(9, B, 8),
            SpanEnd(10),
            SpanEnd(10),
            SpanEnd(10),
            SpanEnd(12),
        ),
    ]


def test_a_span_of_another_thread_that_nothing_waited_for_ends_no_mark():
    forked, mark, operator = (
        SpanBegin(1, "operator", "forked"),
        SpanBegin(2, "mark", "", mark=0),
        SpanBegin(5, "operator", "exp"),
    )
    tree = [mark, operator, took(6, A, 8), SpanEnd(7), SpanEnd(8), forked, SpanEnd(4), took(9, B, 8)]
    assert in_order_of_time(tree) == [
        *(forked, mark, operator, took(6, A, 8), SpanEnd(7), SpanEnd(8), SpanEnd(8), took(9, B, 8)),
    ]


def test_a_node_has_the_number_of_the_operator_that_made_it_on_its_thread():
    made = SpanBegin(1, "operator", "aten::mul", sequence=7)
    again = SpanBegin(2, "operator", "aten::add", sequence=7)
    node = SpanBegin(3, "node", "MulBackward0", sequence=7)
    threads = {1: Threads(1, 0), 2: Threads(2, 0), 3: Threads(2, 1)}
    first, second, third = numbered_by_thread([made, again, node], threads)
    assert first.sequence == third.sequence != second.sequence
    assert (first.name, second.name, third.name) == ("aten::mul", "aten::add", "MulBackward0")


def test_what_has_no_number_or_no_thread_stays_as_it_is():
    made, mark, node = (
        SpanBegin(1, "operator", "aten::empty"),
        SpanBegin(3, "mark", "", mark=0),
        SpanBegin(5, "node", "N", sequence=7),
    )
    tokens = [made, took(2, A, 8), mark, SpanEnd(4), node]
    assert numbered_by_thread(tokens, dict.fromkeys(range(1, 5), Threads(2, 0))) == tokens


# The history as torch gives it


def test_the_history_is_read_from_torchs_own_entries():
    trace = [
        {"action": "segment_alloc", "addr": A, "size": 2**21, "stream": 0, "time_us": 1, "frames": []},
        {"action": "alloc", "addr": A, "size": 1001, "stream": 0, "time_us": 2, "frames": []},
        {"action": "oom", "device_free": 5, "size": 2**40, "stream": 0, "time_us": 3, "frames": []},
        {"action": "free_requested", "addr": A, "size": 1001, "stream": 0, "time_us": 4, "frames": []},
        {"action": "free_completed", "addr": A, "size": 1001, "stream": 0, "time_us": 5, "frames": []},
        {"action": "snapshot", "addr": 0, "size": 1001, "stream": 0, "time_us": 6, "frames": []},
    ]
    assert history_of(trace) == [
        alloc(2000, A, 1001),
        ran_out(3000, 2**40),
        requested(4000, A, 1001),
        completed(5000, A, 1001),
    ]


def test_blocks_of_a_segment_follow_one_another_and_those_nobody_holds_are_none():
    segment = {
        "address": A,
        "blocks": [
            {"state": "active_allocated", "size": 1024, "requested_size": 1001},
            {"state": "inactive", "size": 512, "requested_size": 0},
            {"state": "active_allocated", "size": 512, "requested_size": 8},
            {"state": "active_pending_free", "size": 512, "requested_size": 512},
        ],
    }
    assert live_blocks([segment], "requested_size") == {A: 1001, A + 1536: 8}
    assert live_blocks([segment], "size") == {A: 1024, A + 1536: 512}
