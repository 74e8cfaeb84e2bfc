"""``@pytest.mark.gpumem_configs(precision=[...], checkpoint=[...])``: a test for each combination of step configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.session.options import CONFIG_FIXTURE, CONFIG_MARKER

if TYPE_CHECKING:
    from pytest_gpumem.gate.verdict import Cell


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the test a parameter for each combination. Raises ``pytest.UsageError`` for a marker that makes none."""
    from pytest_gpumem.steps.config import ConfigError, combinations

    mark = metafunc.definition.get_closest_marker(CONFIG_MARKER)
    wants = CONFIG_FIXTURE in metafunc.fixturenames
    where = metafunc.definition.nodeid
    if mark is None:
        return
    if not wants:
        if any(own.name == CONFIG_MARKER for own in metafunc.definition.own_markers):
            raise pytest.UsageError(f"{where}: @pytest.mark.{CONFIG_MARKER} needs the argument {CONFIG_FIXTURE}")
        # On a class or module, tests without the argument are meant to be left alone.
        return
    if mark.args:
        raise pytest.UsageError(
            f"{where}: @pytest.mark.{CONFIG_MARKER} takes keyword arguments only, got {mark.args[0]!r}; "
            "write precision=['fp32', 'amp-bf16'], say"
        )
    axes = {name: values for name, values in mark.kwargs.items() if name != "skip"}
    skip = mark.kwargs.get("skip", ())
    try:
        configs = combinations(axes, (skip,) if isinstance(skip, str) else skip)
    except ConfigError as error:
        raise pytest.UsageError(f"{where}: @pytest.mark.{CONFIG_MARKER}: {error}") from None
    metafunc.parametrize(CONFIG_FIXTURE, configs, ids=[config.id for config in configs])


def cell_of(item: pytest.Item, nodeid: str) -> Cell | None:
    """The test's place in its matrix; ``None`` when it has none."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.get_closest_marker(CONFIG_MARKER) is None or CONFIG_FIXTURE not in callspec.params:
        return None
    from pytest_gpumem.gate.verdict import Cell

    config = callspec.params[CONFIG_FIXTURE]
    return Cell(_without(nodeid, config.id), str(config), callspec.indices[CONFIG_FIXTURE])


def _without(nodeid: str, config_id: str) -> str:
    """The id that the tests of a matrix have in common: that of one of them, less its config."""
    test, _, parameters = nodeid.removesuffix("]").partition("[")
    rest = f"-{parameters}-".replace(f"-{config_id}-", "-", 1).strip("-")
    return f"{test}[{rest}]" if rest else test
