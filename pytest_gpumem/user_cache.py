"""The folder for things that are made once and kept: compiled stand-ins, environments of requirements, searches."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "GPUMEM_CACHE"
"""Variable that names the folder. The action sets it, so that no job runs what an earlier job left on the machine."""


def user_cache() -> Path:
    """Return the folder that `CACHE` names, else the one of this package in the user's cache (``~/.cache/pytest-gpumem``)."""
    if named := os.environ.get(CACHE):
        return Path(named)
    import platformdirs

    return platformdirs.user_cache_path("pytest-gpumem")
