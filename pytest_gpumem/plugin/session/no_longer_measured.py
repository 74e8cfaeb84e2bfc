"""Find tests with baselines which no longer have the marker or the fixture, and fail them in a gate.

The failure is raised at the end of the test's call, so a skipped test stays skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.judging.gate.verdict import NOT_MARKED
from pytest_gpumem.plugin.config.options import is_measured
from pytest_gpumem.plugin.config.selection import MeasuredTest, location_of, without_group
from pytest_gpumem.plugin.runtest.judging import Judging
from pytest_gpumem.plugin.runtest.recorded_verdict import complete_report, forget_verdict

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.one_process import OneProcess
    from pytest_gpumem.plugin.session.session_baselines import SessionBaselines

Names = tuple[str, ...]


def no_longer_measured(
    items: Iterable[pytest.Item], stored: SessionBaselines
) -> dict[pytest.Item, tuple[MeasuredTest, Names]]:
    """Return the tests in ``items`` which have baselines but are not measured, with the names of their measurements in the
    store.

    Args:
        items: The selected tests.
        stored: The baselines for this session.
    """
    unmeasured = {without_group(item): item for item in items if not is_measured(item)}
    names_by_test: dict[str, list[str]] = {}
    for _, key in stored.keys({nodeid.partition("::")[0] for nodeid in unmeasured}):
        nodeid = f"{key.file}::{key.test}"
        if nodeid in unmeasured:
            names_by_test.setdefault(nodeid, []).append(key.name)
    return {
        unmeasured[nodeid]: (_measured(unmeasured[nodeid], nodeid), tuple(names))
        for nodeid, names in names_by_test.items()
    }


def _measured(item: pytest.Item, nodeid: str) -> MeasuredTest:
    file, _, test = nodeid.partition("::")
    return MeasuredTest(file, test, Budget(), has_fixture=False, location=location_of(item))


@dataclass(eq=False, repr=False)
class NoLongerMeasured:
    """A plugin that fails tests which have baselines but are not measured any more, at the end of their calls.

    The session registers the plugin if such tests were selected.
    """

    config: pytest.Config
    settings: Settings
    store: Store
    tests: Mapping[pytest.Item, tuple[MeasuredTest, Names]]
    ranks: OneProcess

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item in self.tests:
            forget_verdict(item)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        if item not in self.tests:
            return result
        measured, names = self.tests[item]
        judging = Judging(self.config, self.settings, self.store, item, measured, self.ranks)
        judging.conclude(replace(measured.not_measured(NOT_MARKED), missing=names))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item in self.tests:
            complete_report(item, self.tests[item][0], call, report)
        return report
