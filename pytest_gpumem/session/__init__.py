"""One process of a pytest session: its plugins, its ranks and its store. pytest keeps the session by a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.session.process import GpumemSession

SESSION: pytest.StashKey[GpumemSession] = pytest.StashKey()
"""The session of this process."""
