"""Rules for terminals: whether output is coloured, and whether a line can be redrawn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_gpumem.base.variables import FORCE_COLOR, NO_COLOR, PY_COLORS, TERM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO


def wants_colour(environment: Mapping[str, str]) -> bool | None:
    """Return whether output is coloured; ``None`` if no rule applies, so a terminal gets colours and a file does not.

    The rules and their order are pytest's: ``PY_COLORS`` is 1 or 0, ``NO_COLOR`` or ``FORCE_COLOR`` is not empty, ``TERM`` is
    ``dumb``. For example, ``NO_COLOR=1 FORCE_COLOR=1`` means no colours.
    """
    if environment.get(PY_COLORS) in ("0", "1"):
        return environment[PY_COLORS] == "1"
    if environment.get(NO_COLOR):
        return False
    if environment.get(FORCE_COLOR):
        return True
    return False if environment.get(TERM) == "dumb" else None


def can_redraw(stream: TextIO) -> bool:
    """Return whether a written line can be replaced. This is impossible in a file, or if ``TERM`` is
    ``dumb``.
    """
    return stream.isatty() and os.environ.get(TERM) != "dumb"
