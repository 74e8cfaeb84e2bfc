"""Fixtures for tests that measure many steps of small models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.measuring.measure.counting import NO_COUNTS
from tests.models.architectures import BERT, GPT2, LLAMA, VIT
from tests.support.processes import own_objects_out_of_sight

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def _transformers_are_loaded() -> None:
    """Before the suite's own objects are hidden from collections: its modules are as many objects as torch's.

    A run within this process would forget them, too, and load them anew.
    """
    for architecture in (GPT2, LLAMA, BERT, VIT):
        architecture.build()


@pytest.fixture(autouse=True)
def _what_earlier_tests_loaded_is_out_of_sight(suites_objects_hidden: None) -> Iterator[None]:
    """As what was there before the module's tests: a compiler is as many objects again."""
    with own_objects_out_of_sight():
        yield


@pytest.fixture
def _the_same_weights_and_data() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``--no-gpumem-time``. What is timed has the machine to itself, and the suite's other worker waits for it."""
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.time_step", lambda *_: None)


@pytest.fixture
def _without_times(_untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counted either: where a test says nothing about it, steps are not repeated."""
    monkeypatch.setattr("pytest_gpumem.measuring.measure.prepared.count_step", lambda *_, **__: NO_COUNTS)
