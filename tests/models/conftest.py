"""Fixtures for tests that measure many steps of small models."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.timing.sampling import Times


@pytest.fixture
def _the_same_weights_and_data() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``--gpumem-no-time``: steps are not repeated for their time, where a test says nothing about it."""
    monkeypatch.setattr("pytest_gpumem.steps.runner.time_step", lambda *_: Times((1.0,)))
