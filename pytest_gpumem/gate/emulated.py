"""What the figures of an emulated GPU can be held to where the baselines are a real one's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.metrics import Tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST: Mapping[str, Tolerance] = {
    "peak_allocated": Tolerance(relative=0.005),
    "peak_reserved": Tolerance(relative=0.02),
}
"""Of peaks between 4 and 176 GB that others measured on a B200 nine of ten are equal to the byte; the tenth is 0.016 % off in
what is allocated and 0.53 % in what is reserved. What is allocated moves by up to 0.37 % from one step to the next at the same
requested bytes (benchmarks/results/emulated-b200)."""
_ANOTHER_COUNT = frozenset({"launches"})
"""A product of cuBLAS is one launch there, and on a GPU sometimes two."""


def tolerances_of_emulated(tolerances: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the tolerances of emulated figures against measured ones: at least those that the benchmark supports."""
    return {
        name: _at_least(tolerance, LEAST.get(name))
        for name, tolerance in tolerances.items()
        if name not in _ANOTHER_COUNT
    }


def _at_least(tolerance: Tolerance, least: Tolerance | None) -> Tolerance:
    if least is None:
        return tolerance
    return Tolerance(max(tolerance.relative, least.relative), max(tolerance.absolute, least.absolute))
