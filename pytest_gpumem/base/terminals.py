"""Decide whether output is coloured, and whether a line on the terminal can be redrawn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_gpumem.base.variables import FORCE_COLOR, NO_COLOR, PY_COLORS, TERM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO


def wants_colour(environment: Mapping[str, str]) -> bool | None:
    """Return whether environment variables switch colours on or off; ``None`` if they do neither.

    If the result is ``None``, output to a terminal has colours, and other output has none. As in pytest, the variables are
    checked in this order: ``PY_COLORS`` (0 or 1), ``NO_COLOR`` and ``FORCE_COLOR`` (not empty), ``TERM`` (``dumb``). For
    example, ``NO_COLOR=1 FORCE_COLOR=1`` means no colours.
    """
    if environment.get(PY_COLORS) in ("0", "1"):
        return environment[PY_COLORS] == "1"
    if environment.get(NO_COLOR):
        return False
    if environment.get(FORCE_COLOR):
        return True
    return False if environment.get(TERM) == "dumb" else None


def can_redraw(stream: TextIO) -> bool:
    """Return whether a line that was already written can be replaced: not in a file, and not if ``TERM`` is ``dumb``."""
    return stream.isatty() and os.environ.get(TERM) != "dumb"
