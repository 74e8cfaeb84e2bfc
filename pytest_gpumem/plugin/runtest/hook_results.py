"""Check the results from plugins and conftest.py files for the hooks in `hookspecs`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import HookError
from pytest_gpumem.facts.metrics import Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pluggy
    import pytest

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.measuring.devices.contract import Device

_RESERVED = ("slug", "device")


def checked_tolerance(result: object, metric: str, default: Tolerance, hook: pluggy.HookCaller) -> Tolerance:
    """Check the hook ``pytest_gpumem_tolerance``'s result for ``metric``, and return it, or ``default`` if the result is
    ``None``.

    Raises:
        HookError: The result is not a tolerance, or one of its two numbers is negative or not finite.
    """
    if result is None:
        return default
    if isinstance(result, Tolerance) and _is_amount(result.relative) and _is_amount(result.absolute):
        return result
    raise HookError(
        f"{_called(hook)} returned {result!r} for {metric}, "
        "expected None or a Tolerance of finite ratios and amounts that are not negative, like Tolerance(relative=0.05)"
    )


def environment_of(device: Device, config: pytest.Config) -> Environment:
    """Return a device's environment, with the details from the hook ``pytest_gpumem_environment`` added.

    Raises `HookError`.
    """
    environment = device.environment()
    hook = config.hook.pytest_gpumem_environment
    details = {**environment.details, **checked_details(hook(config=config, device=device), hook)}
    return replace(environment, details=details)


def checked_details(results: Iterable[object], hook: pluggy.HookCaller) -> dict[str, str | int]:
    """Combine the details from all ``pytest_gpumem_environment`` hooks. Raises `HookError` for a wrong result."""
    details: dict[str, str | int] = {}
    for result in results:
        if not isinstance(result, Mapping):
            raise HookError(f"{_called(hook)} returned {result!r}, expected a mapping of names to strings or ints")
        for name, value in result.items():
            if name in _RESERVED:
                # The device sets these names. For example, its slug is the name of the folder for its baselines.
                raise HookError(f"{_called(hook)} returned {name!r}, which is the device's own; give it another name")
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (str, int)):
                raise HookError(f"{_called(hook)} returned {name!r}: {value!r}, expected a name and a string or an int")
            details[name] = value
    return details


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _called(hook: pluggy.HookCaller) -> str:
    """Return the names of a hook and of all plugins with this hook, because pluggy does not say which plugin returned a
    result.

    For example, ``pytest_gpumem_tolerance (/project/conftest.py or my_plugin)``.
    """
    names = [str(implementation.plugin_name) for implementation in hook.get_hookimpls()]
    return f"{hook.name} ({' or '.join(names)})" if names else hook.name
