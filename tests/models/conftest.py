"""Fixtures for tests that measure many steps of small models."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.steps.counting import NOTHING_COUNTED
from pytest_gpumem.timing.samples import Round, Sample
from tests.heap import own_objects_out_of_sight

if TYPE_CHECKING:
    from collections.abc import Generator

_SIGHT = pytest.StashKey[ExitStack]()


# Tests here are measured themselves, from before their fixtures are set up until after these are torn down.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_SIGHT] = ExitStack()
    item.stash[_SIGHT].enter_context(own_objects_out_of_sight())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with item.stash[_SIGHT]:
        return (yield)


@pytest.fixture
def _the_same_weights_and_data() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``--gpumem-no-time``. What is timed has the machine to itself, and the suite's other worker waits for it."""
    monkeypatch.setattr("pytest_gpumem.steps.runner.sample_step", lambda *_: Sample((Round(1.0),)))
    monkeypatch.setattr("pytest_gpumem.steps.runner.time_phases", lambda *_: {})


@pytest.fixture
def _without_times(_untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counted either: where a test says nothing about it, steps are not repeated."""
    monkeypatch.setattr("pytest_gpumem.steps.runner.count_step", lambda *_, **__: NOTHING_COUNTED)
