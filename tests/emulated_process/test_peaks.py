"""What is live where most is, from an allocator's history."""

from __future__ import annotations

from pytest_gpumem.emulating.emulated_process.peaks import NOWHERE, at_peak, line_of


def entry(action: str, addr: int, size: int, *lines: str) -> dict:
    frames = [{"filename": line.partition(":")[0], "line": int(line.partition(":")[2]), "name": "f"} for line in lines]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_blocks_are_those_of_the_highest_moment_by_the_line_that_made_them():
    trace = [
        entry("segment_alloc", 1, 2**21),
        entry("alloc", 1, 100, "/torch/nn.py:1", "/mine/train.py:7"),
        entry("alloc", 2, 300, "/mine/train.py:8"),
        entry("free_requested", 2, 300),
        entry("free_completed", 2, 300),
        entry("alloc", 2, 250, "/mine/train.py:9"),
        entry("alloc", 3, 250, "/mine/train.py:9"),
        entry("free_completed", 1, 100),
        entry("alloc", 4, 50, "/mine/train.py:10"),
    ]
    peak = at_peak(trace, "/torch")
    assert peak.nbytes == 600
    assert peak.by_line == {"/mine/train.py:7 f": 100, "/mine/train.py:9 f": 500}
    assert peak.blocks == {"/mine/train.py:7 f": 1, "/mine/train.py:9 f": 2}


def test_without_an_allocation_nothing_is_live():
    assert at_peak([], "/torch").nbytes == 0
    assert at_peak([entry("free_completed", 1, 10)], "/torch").nbytes == 0


def test_a_block_of_no_line_of_the_program_says_so():
    assert line_of([{"filename": "/torch/nn.py", "line": 1, "name": "f"}], "/torch") == NOWHERE
    assert line_of([], "/torch") == NOWHERE
