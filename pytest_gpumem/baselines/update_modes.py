"""The words of ``--gpumem-update``."""

from __future__ import annotations

from typing import Literal

UpdateMode = Literal["new", "improved", "all"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("new", "improved", "all")
