"""The arguments of the markers ``gpumem`` and ``gpumem_configs``, with their help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.units import format_bytes, parse_gigabytes, parse_rate, parse_ratio, parse_size
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.plugin.config.options import MARKER

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.facts.metrics import Unit


def _size(value: object) -> int:
    if value == 0 and not isinstance(value, (bool, str)):
        return 0
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a size; write it with its unit, like '{_with_unit(value)}'")
    return parse_size(value)


def _with_unit(value: object) -> str:
    """Return a size to suggest for a number without a unit: ``"6.5 GB"`` for 6.5, and ``"8.00 GB"`` for 8,000,000,000."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        return "6.5 GB"
    return f"{value:g} GB" if value < 10**6 else format_bytes(int(value))


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < float("inf"):
        raise ValueError(f"{value!r} is not a ratio of 1 or more; write a number like 1.2")
    return float(value)


def _device(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a device; write 'cuda' or 'cpu'")
    return value


class MarkerArgument(NamedTuple):
    """An argument of the marker ``gpumem``."""

    target: str
    """The metric that the argument limits, or the field in `Budget` that the argument sets."""
    read: Callable[[Any], object]
    """Converts the argument's value to a limit. Raises ``ValueError`` for a wrong value."""
    example: str
    """An example of a value, as Python code."""
    help: str


_LIMITS: dict[Unit, tuple[Callable[[Any], float], str, str]] = {
    "bytes": (_size, '"8 GB"', "A limit as a size with a unit."),
    "ratio": (_factor, "1.2", "A limit as a number of 1 or more."),
}
"""For each unit of a metric with a limit, the function that reads a limit, an example and the help."""
MARKER_ARGUMENTS = {
    "max_gb": MarkerArgument(
        "peak_allocated",
        parse_gigabytes,
        "6.5",
        "A limit as a number of GB (10⁹ bytes). Use either `max_gb` or `max_memory`.",
    ),
    **{
        metric.budget: MarkerArgument(name, *_LIMITS[metric.unit])
        for name, metric in METRICS.items()
        if metric.budget is not None
    },
    "tolerance": MarkerArgument(
        "tolerance",
        parse_ratio,
        '"2 %"',
        "The allowed growth of `peak_allocated` over its baseline. It replaces both parts of the metric's tolerance.",
    ),
    "max_slowdown": MarkerArgument(
        "max_slowdown",
        parse_ratio,
        '"10 %"',
        "The allowed growth of `step_time` over its baseline. It replaces the metric's tolerance. With "
        "`--gpumem-baseline` a test fails if its own marker has this argument and the test times no step.",
    ),
    "min_throughput": MarkerArgument(
        "min_throughput",
        parse_rate,
        '"1200 samples/s"',
        "The lower limit for `throughput`, in `samples/s`, `tokens/s`, `steps/s` or `items/s`. If the test passes a number as "
        "`items=`, this number is used for any of these units. A test fails if its steps cannot be counted in the given unit.",
    ),
    "device": MarkerArgument(
        "device", _device, '"cpu"', "The device for this test, instead of the device in `--gpumem-device`."
    ),
}
"""The arguments of the marker ``gpumem``, by name."""
MARKER_DETAILS = """ Put `@pytest.mark.gpumem(...)` on a test or a class, or on a module by `pytestmark`. With the marker,
the test's call is measured. If the test also has the fixture `gpumem`, only the fixture's measurements are taken, and the
marker's budget applies to each of them.

All arguments are optional keyword arguments. The value `None` is an error, because it sets no limit. If a test has several
markers, each argument comes from the closest marker with this argument. A `conftest.py` may add the marker in
`pytest_itemcollected` or `pytest_collection_modifyitems`. A marker that is added later has no effect. In a gate, the test
then fails.

A size is a number and a unit: `B`, `kB`, `MB`, `GB`, `TB` (powers of 1000) or `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024),
in upper or lower case. `0` needs no unit. A test passes if its value is equal to the limit.

`max_slowdown` and `min_throughput` limit the steps that the fixture times. In a marker on a test without the fixture they
are a usage error, because the test's call runs once and is not timed. An unknown argument or a wrong value is a usage error
at collection, even if the test is deselected: `unknown argument 'max_bg'; did you mean 'max_gb'?`

```python
@pytest.mark.gpumem(max_gb=6.5, max_retained="1 MB")
def test_forward():
    output = GPT()(batch)
```
"""
"""The rules for the marker ``gpumem``, as Markdown for the reference page."""
CONFIG_MARKER_DETAILS = """ Put `@pytest.mark.gpumem_configs(...)` on a test, a class or a module. A test with the argument
`gpumem_config` runs once for every combination of the marker's values, and gets the combination as a `StepConfig`. If there
are several markers, only the closest marker applies.

The marker's keyword arguments are the [axes of a step config](step-configs.md), each with a value or a list of values.
Combinations are ordered like nested loops, with the last axis as the inner loop. The id of each test ends with the config's
id (`test_matrix[fp32-ckpt-ops]`), so each test has its own baseline. If the test has other parameters, there is a separate
matrix for each of their values.

```python
@pytest.mark.gpumem_configs(
    precision=["fp32", "fp16"], checkpoint=["none", "ops"], skip=["fp16,checkpoint=ops"]
)
def test_matrix(gpumem, gpumem_config):
    gpumem.train_step(GPT, batch, config=gpumem_config)
```

An unknown axis, an unknown value, and a marker on a test without `gpumem_config` are usage errors. A run without
`--gpumem-baseline`, or with `-v`, ends with [a table for each matrix](../guide/matrix.md). Each config has a row. Its
saving, cost and ROI are `Measurement.saves`, `Measurement.costs` and `Measurement.roi`, compared with the first measured
row. A `*` marks the rows worth choosing: any other row with less memory takes more time, and any faster row takes more
memory.
"""
"""The rules for the marker ``gpumem_configs``, as Markdown for the reference page."""
SKIP_HELP = (
    "A config text, or a list of texts. A combination with all settings of a text is left out. A text that leaves no "
    "combination out is a usage error."
)
"""The help for the argument ``skip`` of the marker ``gpumem_configs``."""
MARKER_HELP = (
    f"{MARKER}({', '.join(f'{name}=...' for name in MARKER_ARGUMENTS)}): measure the GPU memory of the test, and the speed of "
    "its steps, and fail when it is over budget or regresses"
)
CONFIG_MARKER_HELP = (
    "gpumem_configs(precision=None, checkpoint=None, ..., skip=()): run the test once for each combination of step configs, "
    "which the argument gpumem_config contains"
)
