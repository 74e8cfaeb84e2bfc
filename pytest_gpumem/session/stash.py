"""The key under which pytest's config keeps the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.session.process import GpumemSession

SESSION: pytest.StashKey[GpumemSession] = pytest.StashKey()
"""This process's session."""
