"""Fixtures for tests that measure many steps of small models."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.steps.counting import NOTHING_COUNTED
from pytest_gpumem.values.times import Round, Sample


@pytest.fixture
def _the_same_weights_and_data() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``--gpumem-no-time``. What is timed has the machine to itself, and the suite's other worker waits for it."""
    for module in ("steps.runner", "timing.sampling"):
        monkeypatch.setattr(f"pytest_gpumem.{module}.sample_step", lambda *_: Sample((Round(1.0),)))
    monkeypatch.setattr("pytest_gpumem.timing.sampling.time_phases", lambda *_: {})


@pytest.fixture
def _without_times(_untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counted either: where a test says nothing about it, steps are not repeated."""
    monkeypatch.setattr("pytest_gpumem.steps.runner.count_step", lambda *_, **__: NOTHING_COUNTED)
