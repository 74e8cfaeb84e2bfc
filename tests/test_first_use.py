"""Caches that their first use fills: the test that runs first is red, and says what holds the tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CACHES = {
    "lib.MASKS[...]": "MASKS.setdefault(0, torch.ones(300, 300))",
    "lru_cache of table[...]": "table(300)",
    "lru_cache of unbounded[...]": "unbounded(300)",
    "Rotary.memo[...]": "Rotary.memo or Rotary.memo.append(torch.ones(300, 300))",
    "lib.ROTARY -> Rotary.cos": "ROTARY(torch.ones(300, 300))",
    "default(memo=...)[...]": "default()",
    "around.<locals>.held": "closure()",
    "lib.LAZY -> Lazy.mask": "LAZY.mask",
    "lib.QUEUE[...]": "QUEUE or QUEUE.append(torch.ones(300, 300))",
    "lib.ORDERED[...]": "ORDERED.setdefault(0, torch.ones(300, 300))",
    "lib.SLOTS -> Slots.table": "SLOTS.fill()",
    "ContextVar('local')": "LOCAL.get(None) is None and LOCAL.set(torch.ones(300, 300))",
    "lib.SUSPENDED[...]": "SUSPENDED or SUSPENDED.append(started())",
    "lib.PARTIAL[...]": "PARTIAL or PARTIAL.append(functools.partial(print, torch.ones(300, 300)))",
    "lib.ERRORS[...]": "ERRORS or ERRORS.append(raised())",
    "lib.METHODS[...] -> Owner.table": "METHODS or METHODS.append(Owner().read)",
}
"""Statements that fill a cache when they run first, by the path to what then holds the tensor."""

LIBRARY = """
import collections
import contextvars
import dataclasses
import functools

import torch

MASKS, ORDERED, QUEUE = {}, collections.OrderedDict(), collections.deque()
SUSPENDED, PARTIAL, ERRORS, METHODS = [], [], [], []
LOCAL = contextvars.ContextVar("local", default=None)


@functools.lru_cache
def table(size):
    return torch.ones(size, size)


@functools.cache
def unbounded(size):
    return torch.ones(size, size)


class Rotary(torch.nn.Module):
    memo = []

    def forward(self, x):
        if not hasattr(self, "cos"):
            self.register_buffer("cos", torch.ones(300, 300), persistent=False)
        return x * self.cos


def default(memo={}):
    return memo.setdefault(0, torch.ones(300, 300))


def around():
    held = None

    def inner():
        nonlocal held
        if held is None:
            held = torch.ones(300, 300)
        return held

    return inner


class Lazy:
    @functools.cached_property
    def mask(self):
        return torch.ones(300, 300)


@dataclasses.dataclass(slots=True)
class Slots:
    table: torch.Tensor | None = None

    def fill(self):
        if self.table is None:
            self.table = torch.ones(300, 300)


class Owner:
    def __init__(self):
        self.table = torch.ones(300, 300)

    def read(self):
        pass


def started():
    def suspended():
        held = torch.ones(300, 300)
        yield
        del held

    generator = suspended()
    next(generator)
    return generator


def raised():
    held = torch.ones(300, 300)
    try:
        raise ValueError
    except ValueError as error:
        return error


ROTARY, closure, LAZY, SLOTS = Rotary(), around(), Lazy(), Slots()
"""


@pytest.fixture
def caches(project):
    """A project with a test for each cache, which the test fills."""
    project.write(LIBRARY, "lib.py")
    tests = "\n".join(
        f"@pytest.mark.gpumem(max_retained='64 kB')\ndef test_{n}():\n    fill_{n}()\n" for n in range(len(CACHES))
    )
    fills = "\n".join(f"def fill_{n}():\n    {statement}\n" for n, statement in enumerate(CACHES.values()))
    project.write(f"from lib import *\nfrom lib import functools\n\n\n{fills}\n{tests}")
    return project


def test_the_first_use_of_a_cache_tells_the_holder_and_no_line(caches):
    result = caches.run("--gpumem-report=report.json", "-p", "no:randomly")
    result.assert_outcomes(failed=len(CACHES))
    results = json.loads(Path("report.json").read_text(encoding="utf-8"))["results"]
    verdicts = {one["verdict"]["test"]: one["verdict"]["verdicts"][0] for one in results}
    for number, path in enumerate(CACHES):
        explanation = verdicts[f"test_{number}"]["measurement"]["explanation"]
        rows = ["other |  |  |  |  | 1 x float32[300, 300] | 360000"]
        assert explanation["retained"]["rows"] == rows
        (holder,) = explanation["holders"]
        assert (holder["path"], holder["first_use"], holder["kept"]["rows"]) == (path, True, rows)
    assert "  filled by the first use: lib.MASKS[...]" in result.outlines


ONCE = """
CACHE = {}


@pytest.mark.gpumem(max_retained="64 kB")
def test_it():
    assert not CACHE
    CACHE["mask"] = torch.ones(300, 300)
"""


def test_the_holder_is_a_note_if_the_call_cannot_run_again(project):
    project.write(ONCE)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["  note: kept in: test_it.CACHE?...?", "  note: the measured code could not be run again *"]
    )


LAST = """
import torch

PLANTED = False


class Flip(torch.nn.Module):
    def forward(self, x):
        flipped = x.flip(-1)
        if PLANTED:
            self.last = flipped
        return flipped


MODEL = Flip()


class Last:
    value = None
"""
KEEPS_LAST = """
import flips


@pytest.mark.gpumem
def test_call():
    flips.MODEL(torch.rand(300, 300))


@pytest.mark.gpumem
def test_replaces():
    flips.Last.value = None
    flips.Last.value = torch.ones(300, 300) if flips.PLANTED else None
    torch.ones(300, 300)


def test_region(gpumem):
    model = flips.Flip()
    with gpumem.track():
        model(torch.rand(300, 300))


def test_step(gpumem):
    model = flips.Flip()
    gpumem.measure(lambda: model(torch.rand(300, 300)))
"""


def test_what_keeps_the_last_result_is_told_of_calls_regions_and_inputs_of_steps(project):
    project.write(LAST, "flips.py")
    project.write(KEEPS_LAST)
    project.run("--gpumem-update=new", "--no-gpumem-time").assert_outcomes(passed=4)
    project.write(LAST.replace("PLANTED = False", "PLANTED = True"), "flips.py")
    result = project.run("--gpumem-baseline", "--no-gpumem-time", "-vv", "-p", "no:randomly")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*test_call*",
            "  activations *360.00 kB *Flip *flips.py:13 *flip *1 x float32?300, 300?",
            "  kept in: flips.MODEL -> Flip.last",
            "*test_replaces*",
            "  other *360.00 kB *1 x float32?300, 300?",
            "  kept in: Last.value",
            "*test_region*",
            "  note: kept in: Flip.last",
            "*test_step*",
            "  inputs *360.00 kB *Flip *flips.py:13 *flip *1 x float32?300, 300?",
            "  kept in: Flip.last",
        ]
    )
