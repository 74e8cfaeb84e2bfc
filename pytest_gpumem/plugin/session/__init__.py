"""The session in one pytest process: its plugins, its ranks and its store. pytest stashes the session under `SESSION`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session.process import GpumemSession

SESSION: pytest.StashKey[GpumemSession] = pytest.StashKey()
"""The key for this process's session."""
