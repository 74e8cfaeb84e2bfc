"""The route of one training step through the package: how many files and frames it takes, and how often it is judged."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_gpumem
from pytest_gpumem.facts.measurement import Measurement
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.measuring.measure.prepared import FURTHER_STEPS, PreparedStep
from pytest_gpumem.measuring.measure.reading import Figures
from pytest_gpumem.plugin.fixture import Gpumem
from pytest_gpumem.plugin.runtest.judging import Judging
from pytest_gpumem.plugin.runtest.time_policy import TimePolicy

if TYPE_CHECKING:
    from types import CodeType, FrameType

PACKAGE = str(Path(pytest_gpumem.__file__).parent)
STEP = """
def test_it(gpumem):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    gpumem.train_step(model, torch.ones(8, 16), config="fp32", loss=lambda output, _: output.sum())
"""
MOST_FILES = 57
"""20 files make and measure the step, 9 are the plugin's, 8 support torch (5 with its private names), 6 judge, and 5 are values.
7 look for other processes, because only this shows whether the step uses some, and publish the bytes of this process beside theirs.

A feature that the step's config, its test or its session does not have is none of them, for example checkpointing, another rank,
a hook, times, or values that an emulated GPU does not compute."""
LONGEST_CHAIN = 14
"""Frames of the package that call one another without any other code in between: down to a figure of the report."""
DEEPEST = 20
"""Frames of the package in all, with those that torch calls back while operators are counted. One is `Gpumem._measured_step`,
which measures the step of every method."""


@dataclass
class Route:
    """The functions of the package that ran from `Gpumem.train_step` to the verdict on the test."""

    files: set[str] = field(default_factory=set)
    calls: Counter[CodeType] = field(default_factory=Counter)
    deepest: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    _stack: list[FrameType] = field(default_factory=list)

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or _is_inlined(code):
            return
        if event == "call":
            self.files.add(code.co_filename)
            self.calls[code] += 1
            self._stack.append(frame)
            if len(self._stack) > len(self.deepest):
                self.deepest = _names(self._stack)
            own = self._stack[self._begins() :]
            if len(own) > len(self.chain):
                self.chain = _names(own)
        elif event == "return":
            self._stack.pop()

    def _begins(self) -> int:
        """The place in the stack from which on every frame was called by the one before."""
        place = len(self._stack) - 1
        while place > 0 and _caller(self._stack[place]) is self._stack[place - 1]:
            place -= 1
        return place

    def times(self, function: Any) -> int:
        return self.calls[function.__code__]


def _is_inlined(code: CodeType) -> bool:
    """Return whether it is a part of a function, which Python has inlined since 3.12."""
    return code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>")


def _caller(frame: FrameType) -> FrameType | None:
    """Return the frame of the function that called one's."""
    back = frame.f_back
    while back is not None and _is_inlined(back.f_code):
        back = back.f_back
    return back


def _names(stack: list[FrameType]) -> tuple[str, ...]:
    return tuple(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}" for frame in stack)


@pytest.fixture
def route(monkeypatch):
    """The route that the next step takes. Other tests' children, such as a server of theirs, are no part of it."""
    monkeypatch.setattr("pytest_gpumem.measuring.jobs.child_watch._has_children", lambda: False)
    taken = Route()
    train_step, conclude = Gpumem.train_step, Judging.conclude

    def begins(*args, **kwargs):
        sys.setprofile(taken.profile)
        return train_step(*args, **kwargs)

    def ends(*args):
        try:
            return conclude(*args)
        finally:
            sys.setprofile(None)

    def follow() -> Route:
        monkeypatch.setattr(Gpumem, "train_step", begins)
        monkeypatch.setattr(Judging, "conclude", ends)
        return taken

    yield follow
    sys.setprofile(None)


@pytest.fixture
def recorded(project, monkeypatch):
    """A project with one step, and a baseline of it, with a torch that needs no packages, as its builds for CUDA do."""
    monkeypatch.setattr("pytest_gpumem.plugin.runtest.explaining.needed_by_torch", frozenset)
    project.write(STEP)
    assert project.run("--gpumem-update=new").ret == 0
    return project


def test_a_step_takes_so_many_files_and_frames_and_is_judged_once(recorded, route, record_property):
    route = route()
    assert recorded.run("--gpumem-baseline").ret == 0
    record_property("files of a training step", len(route.files))
    assert len(route.files) <= MOST_FILES, "\n".join(sorted(route.files))
    assert route.deepest[0] == "fixture.train_step"
    assert 10 < len(route.chain) <= LONGEST_CHAIN, route.chain
    assert len(route.deepest) <= DEEPEST, route.deepest
    assert [route.times(one) for one in (judge, Measurement.__post_init__, Store.find)] == [1, 1, 1]
    # The first two are compared, and each of those further ones with the one before it.
    assert route.times(Figures.memory_metrics) == 2 * (1 + FURTHER_STEPS) + 1


def test_a_step_that_is_explained_is_judged_once(recorded, route):
    route = route()
    assert recorded.run("--gpumem-baseline", "--gpumem-explain=always").ret == 0
    # What it is made of is put into the measurement that was judged.
    assert [route.times(one) for one in (judge, Measurement.__post_init__, Store.find)] == [1, 3, 1]


def test_a_step_is_judged_once_more_after_each_other_sample_of_its_time(recorded, route, monkeypatch):
    recorded.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    doubts = iter([True, True, False])
    monkeypatch.setattr(TimePolicy, "should_time_again", lambda *_: next(doubts))
    route = route()
    assert recorded.run("--gpumem-baseline", "--gpumem-time", "--junitxml=report.xml", timed=True).ret == 0
    (verdict,) = recorded.verdicts()["test_it"]["verdicts"]
    assert len(verdict["measurement"]["times"]["samples"]) == 3
    assert route.times(judge) == 4, "once before it is explained, and after each sample"


def test_a_step_is_explained_before_it_is_timed(recorded, monkeypatch):
    asked = []
    recorded.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    for method in ("explain", "time"):
        original = getattr(PreparedStep, method)

        def noted(*args, method=method, original=original):
            asked.append(method)
            return original(*args)

        monkeypatch.setattr(PreparedStep, method, noted)
    arguments = ("--gpumem-baseline", "--gpumem-explain=always", "--gpumem-time", "--junitxml=report.xml")
    assert recorded.run(*arguments, timed=True).ret == 0
    assert asked == ["explain", "time"]
    (verdict,) = recorded.verdicts()["test_it"]["verdicts"]
    assert verdict["measurement"]["explanation"] is not None
    assert len(verdict["measurement"]["times"]["samples"]) >= 1
