"""This plugin's session in a pytest process. pytest's ``config.stash`` stores the session under the key `SESSION`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session.process import GpumemSession

SESSION: pytest.StashKey[GpumemSession] = pytest.StashKey()
"""The key under which ``config.stash`` stores this process's session."""
BEGAN: pytest.StashKey[float] = pytest.StashKey()
"""The key of the time before any ``conftest.py`` was loaded, in seconds since the machine's start. Only Linux tells it."""
