"""What the figures of an emulated GPU can be held to where the baselines are a real one's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS, Tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping


def tolerances_of_emulated(tolerances: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the tolerances of emulated figures against measured ones: at least those that the benchmark supports."""
    return {
        name: Tolerance(max(tolerance.relative, least.relative), max(tolerance.absolute, least.absolute))
        for name, tolerance in tolerances.items()
        if (least := METRICS[name].emulated) is not None
    }
