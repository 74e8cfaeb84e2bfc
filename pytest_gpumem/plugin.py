"""pytest's hooks in the order in which pytest calls them; wiring only.

A run that measures nothing must cost nothing: whatever is not needed for finding that out is imported later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.options import add_options

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpumem.fixture import Gpumem
    from pytest_gpumem.session import GpumemSession

SESSION: pytest.StashKey[GpumemSession] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_gpumem import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    from pytest_gpumem.marker import MARKER_HELP
    from pytest_gpumem.session import GpumemSession

    config.addinivalue_line("markers", MARKER_HELP)
    config.stash[SESSION] = session = GpumemSession(config)
    config.pluginmanager.register(CollectedFiles(session), "gpumem-collected-files")


class CollectedFiles:
    """Tells the session which files were collected; `pytest_collectreport` does not know of a config by itself."""

    def __init__(self, session: GpumemSession) -> None:
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed and "::" not in report.nodeid:
            self._session.collected_file(report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    # First of all, before anybody deselects: a wrong marker is told on every run. Last of all, what is left is measured.
    session = config.stash[SESSION]
    session.collected(items)
    yield
    session.selected(items)


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> Gpumem:
    """Measure GPU memory and throughput of steps: ``gpumem.train_step(model, batch)``, ``.measure(fn)``, ``.track()``."""
    from pytest_gpumem.fixture import Gpumem
    from pytest_gpumem.measuring import refuse, run_of

    return Gpumem(run_of(request.node), lambda: refuse(request.node))


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[SESSION].finished()
