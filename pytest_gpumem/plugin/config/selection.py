"""Find the measured tests among the collected tests, with their budgets.

Also find ``budget`` and ``mark`` settings without effect.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.errors import BudgetError
from pytest_gpumem.facts.values.option_words import EMULATED, nearest_device
from pytest_gpumem.judging.gate.baseline import Budget, Key
from pytest_gpumem.judging.gate.verdict import Cell, Location, TestVerdict
from pytest_gpumem.plugin.config.marker import TIMED_LIMITS, budget_of_marks, cell_of, check_of_a_call
from pytest_gpumem.plugin.config.options import FIXTURE, MARKER, is_measured
from pytest_gpumem.plugin.config.settings import matches_test

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.plugin.config.settings import Settings

_MATCHES_NONE = (
    "it matches no test; write node ids or files as pytest shows them, from the root directory, or patterns for them"
)


@dataclass(frozen=True, slots=True)
class MeasuredTest:
    """A test with the marker or the fixture ``gpumem``.

    The fields ``file`` and ``test`` are the two parts of its node id (without pytest-xdist's ``@group``). For example, for
    ``tests/test_gpt.py::TestTrain::test_step[fp32]``, ``test`` is ``TestTrain::test_step[fp32]``.
    """

    file: str
    test: str
    budget: Budget
    has_fixture: bool
    cell: Cell | None = None
    location: Location | None = None

    def key(self, name: str) -> Key:
        return Key(self.file, self.test, name)

    def not_measured(self, why: str, *, failed_by_itself: bool = False) -> TestVerdict:
        """Return the verdict that this test was not measured. ``why`` is the reason, as a clause."""
        return TestVerdict(
            self.file,
            self.test,
            unmeasured=why,
            failed_by_itself=failed_by_itself,
            cell=self.cell,
            location=self.location,
            named_device=self.budget.device,
        )


def measured_test_of(item: pytest.Item, settings: Settings, devices: Sequence[str]) -> MeasuredTest | None:
    """Return the measured test for an item; ``None`` if the item has neither the marker nor the fixture.

    Args:
        item: The collected item.
        settings: The session's settings.
        devices: All device names.

    Raises:
        BudgetError: The marker is wrong, or the test's file is outside the root directory. The message begins with the
            test's id.
    """
    if not is_measured(item):
        return None
    has_fixture = FIXTURE in getattr(item, "fixturenames", ())
    try:
        budget = budget_of_marks(item)
        if not has_fixture:
            check_of_a_call(item)
        nodeid = without_group(item)
        if settings.baseline or settings.update is not None:
            _check_below_root(item, nodeid)
        budget = (budget or Budget()).or_else(settings.budget_for(nodeid))
        if budget.device is not None and budget.device not in devices:
            near = _nearest_device(budget.device, devices, settings)
            raise BudgetError(f"device {budget.device!r}: no such device; {near}")
    except BudgetError as error:
        raise BudgetError(f"{item.nodeid}: {error}") from None
    file, _, test = nodeid.partition("::")
    return MeasuredTest(file, test, budget, has_fixture, cell_of(item, nodeid), location_of(item))


def _nearest_device(word: str, devices: Sequence[str], settings: Settings) -> str:
    """Return a clause with a correction for a wrong device in a marker.

    If the marker names an emulated GPU, the clause proposes the option, because emulation replaces CUDA in the whole session
    and not for a single test.
    """
    from pytest_gpumem.emulating.emulation.gpus import emulated_gpu

    try:
        gpu = emulated_gpu(word if word.startswith(EMULATED) else EMULATED + word, settings.gpus)
    except ValueError:
        return nearest_device(word, list(devices))
    return f"to emulate a GPU for the whole session, use --gpumem-device={gpu.device}"


def _check_below_root(item: pytest.Item, nodeid: str) -> None:
    """Raise `BudgetError` if a test's file is outside the root directory.

    In such a test's id, pytest omits the path, but baselines are stored by path.
    """
    if not nodeid.startswith("::"):
        return
    root, path = item.config.rootpath, item.path
    above = os.path.commonpath([root, path.parent])
    raise BudgetError(
        f"the test file {path} is outside of the root directory {root}, and baselines are stored by the path below the root: "
        f"add --rootdir={above}, and --gpumem-store=FOLDER if the store is in another folder"
    )


def location_of(item: pytest.Item) -> Location | None:
    """Return a test's file and line; ``None`` if pytest does not know the line."""
    file, line, _ = item.location
    return None if line is None else Location(file.replace("\\", "/"), line + 1)


def without_group(item: pytest.Item) -> str:
    """Return a test's node id without the suffix ``@group``, which ``--dist loadgroup`` adds for
    ``@pytest.mark.xdist_group``.
    """
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return item.nodeid
    name = mark.args[0] if mark.args else mark.kwargs.get("name", "default")
    return item.nodeid.removesuffix(f"@{name}")


def can_be_marked(item: pytest.Item) -> bool:
    """Return whether patterns in the settings can add the marker to an item: True for test functions and doctests.

    Other items, such as a linter's check of a file, run no code.
    """
    return isinstance(item, pytest.Function | pytest.DoctestItem)


def add_markers(items: Iterable[pytest.Item], patterns: Sequence[str]) -> None:
    """Add the marker to all test functions with a matching pattern."""
    for item in items:
        if can_be_marked(item) and any(matches_test(pattern, without_group(item)) for pattern in patterns):
            item.add_marker(MARKER)


def whole_files_of(config: pytest.Config, files: Iterable[str]) -> frozenset[str]:
    """Return the collected test ``files`` if pytest collected all tests in them; otherwise an empty set."""
    leaves_tests_out = any(getattr(config.option, name, False) for name in ("lf", "stepwise", "gpumem_model"))
    return frozenset() if leaves_tests_out or any("::" in argument for argument in config.args) else frozenset(files)


def _covers(config: pytest.Config, pattern: str) -> bool:
    """Return whether this run collects all possible matches of a pattern.

    For example, ``pytest tests/gpt`` covers ``tests/gpt/*::test_step``, but not ``tests/*::test_step``.
    """
    if any(getattr(config.option, name, None) for name in ("lf", "stepwise", "ignore", "ignore_glob", "gpumem_model")):
        return False
    # If no path was typed, `config.args` contains the `testpaths`, and they mean the whole suite.
    if list(config.args) == config.getini("testpaths"):
        return True
    literal = re.split(r"[*?]|::", pattern, maxsplit=1)[0]
    folder = (config.rootpath / literal.rpartition("/")[0]).resolve()
    return any(folder.is_relative_to(Path(argument).resolve()) for argument in config.args)


def idle_patterns(
    settings: Settings,
    items: Iterable[pytest.Item],
    measured: Mapping[pytest.Item, MeasuredTest],
    config: pytest.Config,
) -> tuple[str, ...]:
    """Return a warning for each ``budget`` entry and each ``mark`` pattern without effect.

    A pattern has no effect if no test matches, although this run collects all tests that could match. A budget also has no
    effect if the tests that it limits are not measured. A time limit has no effect if these tests time no step. Runs with
    paths to files or tests get no warnings.

    Args:
        settings: The settings of the session.
        items: All collected items.
        measured: The measured tests among the items.
        config: pytest's configuration.
    """
    if not all(Path(argument).is_dir() for argument in config.args):
        return ()
    everything = list(items)
    idle = [
        f"mark = {tests!r} marks nothing: {_MATCHES_NONE}"
        for tests in settings.mark
        if _covers(config, tests) and not any(matches_test(tests, without_group(item)) for item in everything)
    ]
    for entry in settings.budgets:
        matching = [item for item in everything if matches_test(entry.tests, without_group(item))]
        limited = [measured[item] for item in matching if item in measured]
        if not matching and _covers(config, entry.tests):
            idle.append(f"the budget for tests = {entry.tests!r} has no effect: {_MATCHES_NONE}")
        elif matching and not limited:
            idle.append(
                f"the budget for tests = {entry.tests!r} has no effect: none of the tests that it matches is measured; "
                "give them @pytest.mark.gpumem, or name them in [tool.gpumem] mark"
            )
        elif limited and not any(test.has_fixture for test in limited):
            idle += [
                f"{limit} of the budget for tests = {entry.tests!r} has no effect: no step is timed in the tests that it "
                "matches; measure a step with the gpumem fixture"
                for limit in TIMED_LIMITS
                if getattr(entry.budget, limit) is not None
            ]
    return tuple(idle)
