"""Names from before the first release, for messages only: who types one is told the name that it has now."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGUMENTS: Mapping[str, str] = MappingProxyType({"max_growth": "tolerance"})
"""Arguments of the marker and keys of ``[[tool.gpumem.budget]]``."""
KEYS: Mapping[str, str] = MappingProxyType({"measure": "mark"})
"""Keys of ``[tool.gpumem]``."""
REPLACED: Mapping[str, str] = MappingProxyType({"no_time": "time = false"})
"""Keys of ``[tool.gpumem]`` in place of which another one has another value."""
OPTIONS: Mapping[str, str] = MappingProxyType({"--gpumem-no-time": "--no-gpumem-time"})
"""pytest's options."""
METHODS: Mapping[str, str] = MappingProxyType({"steps": "loop"})
"""Methods of the fixture."""


def hint(name: str, renamed: Mapping[str, str], known: list[str]) -> str:
    """Return a clause for a name that is not ``known``: what it is called now, or else the known ones that come near."""
    from pytest_gpumem.units import nearest

    if name in REPLACED:
        return f"write {REPLACED[name]}"
    return f"it is called {renamed[name]!r} now" if name in renamed else nearest(name, known)
