"""Read the markers: ``gpumem`` becomes a test's budget, and ``gpumem_configs`` becomes parameters of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import BudgetError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.plugin.config.marker_arguments import MARKER_ARGUMENTS
from pytest_gpumem.plugin.config.options import CELL, CONFIG_FIXTURE, CONFIG_MARKER, MARKER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.judging.gate.verdict import Cell


def budget_from_arguments(arguments: Mapping[str, Any]) -> Budget:
    """Return the budget from a marker's arguments, or from the keys of an entry in the settings.

    For example, ``max_gb=6.5`` is a limit of 6,500,000,000 bytes for ``peak_allocated``.

    Raises:
        BudgetError: An argument is unknown, has a wrong value, or contradicts another argument.
    """
    limits: dict[str, Any] = {}
    other_fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in MARKER_ARGUMENTS:
            raise BudgetError(f"unknown argument {name!r}; {nearest(name, list(MARKER_ARGUMENTS))}")
        if value is None:
            raise BudgetError(f"{name} is None, which is not a limit; give a value, or leave the argument out")
        argument = MARKER_ARGUMENTS[name]
        values = limits if argument.target in METRICS else other_fields
        if argument.target in values:
            raise BudgetError("max_gb and max_memory set the same limit; give only one of them")
        try:
            values[argument.target] = argument.read(value)
        except ValueError as error:
            raise BudgetError(f"{name}: {error}") from None
    return Budget(limits, **other_fields)


TIMED_LIMITS = ("max_slowdown", "min_throughput")
"""The marker's arguments that limit the time of a step."""


def sets_itself(item: pytest.Item, limit: str) -> bool:
    """Return whether a marker sets the argument ``limit`` on the test itself, and not only on its class or module."""
    return any(mark.kwargs.get(limit) for node, mark in item.iter_markers_with_node(MARKER) if node is item)


def check_of_a_call(item: pytest.Item) -> None:
    """Raise `BudgetError` for time limits in the marker of a test without the fixture ``gpumem``. Such a test's call runs
    once and is not timed.

    Time limits in a marker on the test's class or module are allowed, because they may be meant for other tests.
    """
    idle = [name for name in TIMED_LIMITS if sets_itself(item, name)]
    if idle:
        raise BudgetError(
            f"{idle[0]} limits the time of a step, and this test has no step: its call runs once and is not timed; "
            "measure a step with the gpumem fixture (gpumem.measure, train_step, infer_step)"
        )


_MARKERS = pytest.StashKey[tuple[pytest.Mark, ...]]()
"""The stash key for the markers that a test had when the session selected the measured tests."""


def remember_markers(item: pytest.Item) -> None:
    """Store a test's current markers, so `report_late_marker` finds markers that are added later."""
    item.stash[_MARKERS] = tuple(item.iter_markers(MARKER))


def report_late_marker(item: pytest.Item, *, gates: bool) -> None:
    """Fail a test that got its marker after the session had selected the measured tests. Without a gate, only warn.

    Such a marker has no effect. Without this failure, the gate would pass a test that its author wanted to be gated.
    """
    if tuple(item.iter_markers(MARKER)) == item.stash.get(_MARKERS, ()):
        return
    message = (
        f"@pytest.mark.{MARKER} was added to this test when it was already running, so it has no effect; add it during the "
        "collection, in pytest_collection_modifyitems or pytest_itemcollected of a conftest.py"
    )
    if gates:
        pytest.fail(message, pytrace=False)
    item.warn(pytest.PytestWarning(f"{item.nodeid}: {message}"))


def budget_of_marks(item: pytest.Item) -> Budget | None:
    """Return the budget from a test's markers; ``None`` without a marker. Each limit comes from the closest marker with
    this limit.

    Raises:
        BudgetError: A marker's argument is wrong.
    """
    budget: Budget | None = None
    for mark in item.iter_markers(MARKER):
        if mark.args:
            raise BudgetError(
                f"@pytest.mark.gpumem takes keyword arguments only, got {mark.args[0]!r}; write max_gb=6.5, say"
            )
        budget_of_mark = budget_from_arguments(mark.kwargs)
        budget = budget_of_mark if budget is None else budget.or_else(budget_of_mark)
    return budget


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with the step configs from its marker ``gpumem_configs``.

    Raises ``pytest.UsageError`` for a wrong marker.
    """
    from pytest_gpumem.base.errors import ConfigError
    from pytest_gpumem.measuring.step_config.config import combinations

    mark = metafunc.definition.get_closest_marker(CONFIG_MARKER)
    has_argument = CONFIG_FIXTURE in metafunc.fixturenames
    where = metafunc.definition.nodeid
    assert mark is not None, "the caller has checked for the marker"
    if not has_argument:
        if any(own.name == CONFIG_MARKER for own in metafunc.definition.own_markers):
            raise pytest.UsageError(f"{where}: @pytest.mark.{CONFIG_MARKER} needs the argument {CONFIG_FIXTURE}")
        # A marker on a class or module does not apply to tests without the argument `gpumem_config`.
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
    """Return the test's `Cell` in its matrix of step configs; ``None`` if the test is not in a matrix."""
    if CELL in item.stash:
        return item.stash[CELL]
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.get_closest_marker(CONFIG_MARKER) is None or CONFIG_FIXTURE not in callspec.params:
        return None
    from pytest_gpumem.judging.gate.verdict import Cell

    config = callspec.params[CONFIG_FIXTURE]
    return Cell(_without(nodeid, config.id), str(config), callspec.indices[CONFIG_FIXTURE])


def _without(nodeid: str, config_id: str) -> str:
    """Return a test's id without the config's id: ``test_it[fp32-4]`` becomes ``test_it[4]``.

    The result is the same for all tests in a matrix.
    """
    test, _, parameters = nodeid.removesuffix("]").partition("[")
    rest = f"-{parameters}-".replace(f"-{config_id}-", "-", 1).strip("-")
    return f"{test}[{rest}]" if rest else test
