"""Steps that are timed again at once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sample is not put off: nothing here depends on what else is at work."""
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.SECONDS_BETWEEN_SAMPLES", 0.0)
