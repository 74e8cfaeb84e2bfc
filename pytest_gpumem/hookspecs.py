"""Hooks that other plugins and conftest files may implement (pluggy).

A recipe for each stands in its docstring; put the function into a ``conftest.py``, or into a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pluggy

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.measurement import Environment, Measurement
    from pytest_gpumem.metrics import Tolerance


def pytest_gpumem_devices(config: pytest.Config) -> Mapping[str, DeviceFactory]:  # type: ignore[empty-body]
    """Add devices: a name for ``--gpumem-device``, and a function that makes the device (`pytest_gpumem.devices.contract`).

    The function is called when the first test that uses the device runs, and may raise `DeviceUnavailable`::

        def pytest_gpumem_devices(config):
            return {"xpu": make_xpu_device}
    """


def pytest_gpumem_environment(config: pytest.Config, device: Device) -> Mapping[str, str | int]:  # type: ignore[empty-body]
    """Add to the environment that is stored with a baseline, say the version of a library that moves figures::

    def pytest_gpumem_environment(config, device):
        return {"transformers": transformers.__version__}
    """


def pytest_gpumem_measurement(item: pytest.Item, measurement: Measurement) -> None:
    """See every measurement when it has been taken and judged, before its test ends, in the process that runs the test::

    def pytest_gpumem_measurement(item, measurement):
        log.info("%s: %d bytes", item.nodeid, measurement.peak_allocated)
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_tolerance(item: pytest.Item, metric: str, tolerance: Tolerance) -> Tolerance | None:
    """Adjust how far ``metric`` of a test may move against its baseline; ``None`` leaves it to others::

    def pytest_gpumem_tolerance(item, metric, tolerance):
        if metric == "peak_allocated" and "dynamic_shapes" in item.keywords:
            return Tolerance(relative=0.05)
    """


_RESERVED = ("slug", "device")


class HookError(ValueError):
    """Error of a wrong result of a hook; the message names the hook, the plugins that implement it, and what would be right."""


def checked_tolerance(result: object, metric: str, default: Tolerance, hook: pluggy.HookCaller) -> Tolerance:
    """Return the tolerance that ``pytest_gpumem_tolerance`` gave for ``metric``, or the ``default`` for ``None``.

    Raises `HookError` for what is no tolerance, or allows an amount that is not finite or is negative.
    """
    from pytest_gpumem.metrics import Tolerance

    if result is None:
        return default
    if isinstance(result, Tolerance) and _is_amount(result.relative) and _is_amount(result.absolute):
        return result
    raise HookError(
        f"{_called(hook)} returned {result!r} for {metric}, "
        "expected None or a Tolerance of finite ratios and amounts that are not negative, like Tolerance(relative=0.05)"
    )


def environment_of(device: Device, config: pytest.Config) -> Environment:
    """Return the environment of a device with the details that ``pytest_gpumem_environment`` adds. Raises `HookError`."""
    environment = device.environment()
    hook = config.hook.pytest_gpumem_environment
    details = {**environment.details, **checked_details(hook(config=config, device=device), hook)}
    return replace(environment, details=details)


def checked_details(results: Iterable[object], hook: pluggy.HookCaller) -> dict[str, str | int]:
    """Return the details of an environment that ``pytest_gpumem_environment`` added. Raises `HookError`."""
    details: dict[str, str | int] = {}
    for result in results:
        if not isinstance(result, Mapping):
            raise HookError(f"{_called(hook)} returned {result!r}, expected a mapping of names to strings or ints")
        for name, value in result.items():
            if name in _RESERVED:
                # It is where the device's baselines lie.
                raise HookError(f"{_called(hook)} returned {name!r}, which is the device's own; give it another name")
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (str, int)):
                raise HookError(f"{_called(hook)} returned {name!r}: {value!r}, expected a name and a string or an int")
            details[name] = value
    return details


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _called(hook: pluggy.HookCaller) -> str:
    """Return the names of a hook and of the plugins that implement it: pluggy does not say whose result it gave."""
    names = [str(implementation.plugin_name) for implementation in hook.get_hookimpls()]
    return f"{hook.name} ({' or '.join(names)})" if names else hook.name
