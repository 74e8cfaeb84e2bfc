"""The markers ``gpumem`` and ``gpumem_configs``: their arguments, and the budget or the tests that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.config.errors import BudgetError
from pytest_gpumem.config.marker_arguments import MARKER_ARGUMENTS
from pytest_gpumem.config.options import CELL, CONFIG_FIXTURE, CONFIG_MARKER, MARKER
from pytest_gpumem.gate.baseline import Budget
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.gate.verdict import Cell


def budget_from_arguments(arguments: Mapping[str, Any]) -> Budget:
    """Return the budget that a marker's arguments, or a settings entry's keys, make. Raises `BudgetError`."""
    limits: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in MARKER_ARGUMENTS:
            raise BudgetError(f"unknown argument {name!r}; {nearest(name, list(MARKER_ARGUMENTS))}")
        if value is None:
            raise BudgetError(f"{name} is None, which is no limit; leave it out where there is none")
        argument = MARKER_ARGUMENTS[name]
        values = limits if argument.target in METRICS else others
        if argument.target in values:
            raise BudgetError("max_gb and max_memory say the same thing; give one of them")
        try:
            values[argument.target] = argument.read(value)
        except ValueError as error:
            raise BudgetError(f"{name}: {error}") from None
    return Budget(limits, **others)


TIMED_LIMITS = ("max_slowdown", "min_throughput")
"""The arguments that hold the time of a step."""


def sets_itself(item: pytest.Item, limit: str) -> bool:
    """Return whether a test's own marker, and not that of its class or module, gives the argument ``limit``."""
    return any(mark.kwargs.get(limit) for node, mark in item.iter_markers_with_node(MARKER) if node is item)


def check_of_a_call(item: pytest.Item) -> None:
    """Raise `BudgetError` for limits in a test's own marker that cannot hold its call, which is run once and cold.

    Those of its class or module are for the other tests there.
    """
    idle = [name for name in TIMED_LIMITS if sets_itself(item, name)]
    if idle:
        raise BudgetError(
            f"{idle[0]} holds the time of a step, and this test has none: a call runs once, and is not timed; "
            "measure a step with the gpumem fixture (gpumem.measure, train_step, infer_step)"
        )


_KNOWN = pytest.StashKey[tuple[pytest.Mark, ...]]()
"""A test's markers when its session decided what to measure."""


def remember_markers(item: pytest.Item) -> None:
    """Note the markers that a test is measured by."""
    item.stash[_KNOWN] = tuple(item.iter_markers(MARKER))


def report_late_marker(item: pytest.Item, *, gates: bool) -> None:
    """Fail a test that got a marker later than its session could measure by it; warn of it where nothing ``gates``.

    A gate must not skip a test that was meant to be gated without a failure.
    """
    if tuple(item.iter_markers(MARKER)) == item.stash.get(_KNOWN, ()):
        return
    message = (
        f"@pytest.mark.{MARKER} was added to this test when it was running already, and has no effect: add it while tests "
        "are collected, in pytest_collection_modifyitems or pytest_itemcollected of a conftest.py"
    )
    if gates:
        pytest.fail(message, pytrace=False)
    item.warn(pytest.PytestWarning(f"{item.nodeid}: {message}"))


def budget_of_marks(item: pytest.Item) -> Budget | None:
    """Return the budget of a test's markers, the closest one first for each limit; ``None`` when it has no such marker.

    Raises `BudgetError`.
    """
    budget: Budget | None = None
    for mark in item.iter_markers(MARKER):
        if mark.args:
            raise BudgetError(
                f"@pytest.mark.gpumem takes keyword arguments only, got {mark.args[0]!r}; write max_gb=6.5, say"
            )
        one = budget_from_arguments(mark.kwargs)
        budget = one if budget is None else budget.or_else(one)
    return budget


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the test a parameter for each combination. Raises ``pytest.UsageError`` for a marker that makes none."""
    from pytest_gpumem.step_config.config import combinations
    from pytest_gpumem.step_config.errors import ConfigError

    mark = metafunc.definition.get_closest_marker(CONFIG_MARKER)
    wants = CONFIG_FIXTURE in metafunc.fixturenames
    where = metafunc.definition.nodeid
    assert mark is not None, "pytest asks for parameters of such tests"
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
    """Return the test's cell in its matrix; ``None`` when it has none."""
    if CELL in item.stash:
        return item.stash[CELL]
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.get_closest_marker(CONFIG_MARKER) is None or CONFIG_FIXTURE not in callspec.params:
        return None
    from pytest_gpumem.gate.verdict import Cell

    config = callspec.params[CONFIG_FIXTURE]
    return Cell(_without(nodeid, config.id), str(config), callspec.indices[CONFIG_FIXTURE])


def _without(nodeid: str, config_id: str) -> str:
    """Return the id that the tests of a matrix have in common: that of one of them, less its config."""
    test, _, parameters = nodeid.removesuffix("]").partition("[")
    rest = f"-{parameters}-".replace(f"-{config_id}-", "-", 1).strip("-")
    return f"{test}[{rest}]" if rest else test
