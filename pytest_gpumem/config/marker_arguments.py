"""The arguments of the marker: the limit that each sets, the function that reads it, and the help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.config.options import MARKER
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import format_bytes, parse_gigabytes, parse_rate, parse_ratio, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable


def _size(value: object) -> int:
    if value == 0 and not isinstance(value, (bool, str)):
        return 0
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a size; write it with its unit, like '{_with_unit(value)}'")
    return parse_size(value)


def _with_unit(value: object) -> str:
    """Return the size that a number may mean: GB, or bytes if it is a million or more. For example 6.5 is ``"6.5 GB"``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        return "6.5 GB"
    return f"{value:g} GB" if value < 10**6 else format_bytes(int(value))


def _device(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a device; write 'cuda' or 'cpu'")
    return value


MARKER_ARGUMENTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "max_gb": ("peak_allocated", parse_gigabytes),
    **{metric.budget: (name, _size) for name, metric in METRICS.items() if metric.budget is not None},
    "tolerance": ("tolerance", parse_ratio),
    "max_slowdown": ("max_slowdown", parse_ratio),
    "min_throughput": ("min_throughput", parse_rate),
    "device": ("device", _device),
}
"""The metric that each argument limits, or the field of `Budget` that it sets, and the function that reads it."""
MARKER_HELP = (
    f"{MARKER}({', '.join(f'{name}=...' for name in MARKER_ARGUMENTS)}): measure the GPU memory of the test, and the speed of "
    "its steps, and fail when it is over budget or regresses"
)
CONFIG_MARKER_HELP = (
    "gpumem_configs(precision=None, checkpoint=None, ..., skip=()): run the test once for each combination of step configs, "
    "which it gets as gpumem_config"
)
