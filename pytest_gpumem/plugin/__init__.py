"""The pytest hooks of this plugin, in the order in which pytest calls them. Each hook only calls other modules.

A run without measured tests must not become slower because this plugin is installed. So this module imports only the
modules for finding measured tests.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.plugin.config.options import (
    CONFIG_FIXTURE,
    CONFIG_MARKER,
    MARKER,
    OPTIONS,
    PARSER,
    add_options,
    check_words,
    is_measured,
)
from pytest_gpumem.plugin.session import BEGAN, SESSION

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.plugin.fixture import Gpumem
    from pytest_gpumem.plugin.session.process import GpumemSession


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_gpumem.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    early_config.stash[PARSER] = parser
    if hasattr(time, "CLOCK_BOOTTIME"):
        early_config.stash[BEGAN] = time.clock_gettime(time.CLOCK_BOOTTIME)
    # Run this before any conftest.py, because a conftest.py may import torch.
    if is_emulated(early_config):
        from pytest_gpumem.plugin.session.emulating import emulate_gpu_of_settings

        emulate_gpu_of_settings(early_config)
    try:
        loaded = yield
    except Exception as error:
        # pytest ends after this error, so no later hook could print the hint.
        if (hint := _emulation_hint([str(getattr(error, "cause", error))])) is not None:
            sys.stderr.write(f"gpumem: {hint}\n")
        raise
    check_words(parser, args)
    return loaded


def _emulation_hint(errors: Iterable[str]) -> str | None:
    """Return a hint if an error shows that this build of torch can only be imported with an emulated GPU; otherwise
    ``None``.
    """
    error = next((text for text in errors if "cannot open shared object file" in text), None)
    if error is None or "torch" in sys.modules:
        return None
    from pytest_gpumem.emulating.emulation.load import emulation_hint

    return emulation_hint(error)


def is_emulated(config: pytest.Config) -> bool:
    """Return whether ``--gpumem-device`` names an emulated GPU.

    Without this option, return whether ``pyproject.toml`` contains ``emulated:``.
    """
    option = getattr(config.known_args_namespace, "gpumem_device", None)
    if option is not None:
        return str(option).startswith("emulated:")
    return _settings_have(config, b"emulated:")


def _settings_have(config: pytest.Config, words: bytes) -> bool:
    try:
        return words in (config.rootpath / "pyproject.toml").read_bytes()
    except OSError:
        return False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int | None, int | None]:
    # This wrapper surrounds the whole pytest run, so it decides the exit status after all tests and all other hooks.
    has_passed = False
    try:
        status = yield
        if status is not None:
            status = _final_status(config, status)
        has_passed = not status
        return status
    except SystemExit as end:
        if end.code in (0, None):
            end.code = _final_status(config, 0)
        has_passed = end.code == 0
        raise
    finally:
        if SESSION in config.stash:
            config.stash[SESSION].leave(passed=has_passed)


def _final_status(config: pytest.Config, status: int) -> int:
    session = config.stash.get(SESSION, None)
    if hasattr(config, "workerinput") or (session is None and not config.getoption("gpumem_baseline", None)):
        return status
    from pytest_gpumem.plugin.session.exit_status import final_status

    return final_status(config, session, status)


def pytest_configure(config: pytest.Config) -> None:
    _register_markers(config)
    collecting = Collecting(config)
    config.pluginmanager.register(collecting, "gpumem-collecting")
    if is_concerned(config):
        settings = collecting.session().settings
        if settings.models or settings.model:
            from pytest_gpumem.plugin.model_tests import ModelTests

            config.pluginmanager.register(ModelTests(config, settings), "gpumem-models")


def _register_markers(config: pytest.Config) -> None:
    """Register the markers.

    Their help is made from the table of metrics. Only ``pytest --markers`` prints it, so all other runs register the markers
    without help, and do not import the table.
    """
    lines = MARKER, CONFIG_MARKER
    if config.getoption("markers", default=False):
        from pytest_gpumem.plugin.config.marker_arguments import CONFIG_MARKER_HELP, MARKER_HELP

        lines = MARKER_HELP, CONFIG_MARKER_HELP
    for line in lines:
        config.addinivalue_line("markers", line)


def is_concerned(config: pytest.Config) -> bool:
    """Return whether to create the `GpumemSession` before tests are collected.

    It is created early if the user set an option or a setting of this plugin, or if this process is pytest-xdist's
    controller. A worker has the same options as its controller. A worker without options or settings creates its session
    later, if it collects a measured test.
    """
    if any(config.getoption(option.dest, None) is not None for option in OPTIONS):
        return True
    distributes = config.getoption("numprocesses", None) or config.getoption("tx", None)
    if distributes and not hasattr(config, "workerinput"):
        return True
    return _settings_have(config, b"gpumem")


class Collecting:
    """A plugin that searches the collected tests for measured tests, and creates the `GpumemSession` when it finds one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: set[str] = set()
        self._not_collected: set[str] = set()
        self._skipped: set[str] = set()
        self._collected: list[pytest.Item] = []

    def session(self) -> GpumemSession:
        """Return the session. The first call creates it."""
        if SESSION not in self._config.stash:
            from pytest_gpumem.plugin.session.process import GpumemSession

            files = self._files, self._not_collected, self._skipped
            self._config.stash[SESSION] = GpumemSession(self._config, *files)
        return self._config.stash[SESSION]

    def pytest_report_header(self) -> list[str]:
        from pytest_gpumem.plugin.config.unread import unread_settings

        unread = unread_settings(self._config)
        header = self.session().header() if SESSION in self._config.stash else None
        return [*([] if header is None else [header]), *([] if unread is None else [f"gpumem: {unread}"])]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if SESSION in self._config.stash and collector.parent is not None:
            self.session().has_collected(collector.parent)
        report = yield
        if SESSION in self._config.stash:
            self.session().has_collected(collector)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed and "::" not in report.nodeid:
            self._files.add(report.nodeid)
        if report.failed:
            self._not_collected.add(report.nodeid)
        if report.skipped and "::" not in report.nodeid:
            self._skipped.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        # This code runs before any plugin deselects tests. So `-m gpumem` also selects tests that got the marker from the
        # settings, and wrong markers on deselected tests are reported.
        self._collected = list(items)
        if SESSION in self._config.stash:
            self.session().mark(items)
        yield
        if SESSION in self._config.stash:
            self.session().keep_measured(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # At this point, all hooks in conftest.py files have added their markers.
        everything = list(dict.fromkeys([*self._collected, *session.items]))
        if SESSION in self._config.stash or any(map(is_measured, everything)):
            self.session().collected(everything, session.items)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        failed = [*terminalreporter.getreports("error"), *terminalreporter.getreports("failed")]
        if (hint := _emulation_hint(report.longreprtext for report in failed)) is not None:
            terminalreporter.write_line(f"gpumem: {hint}", red=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        if item.get_closest_marker(MARKER) is not None:
            from pytest_gpumem.plugin.config.marker import report_late_marker

            session = self._config.stash.get(SESSION, None)
            report_late_marker(item, gates=session is not None and session.settings.gates)
        return result


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> Gpumem:
    """Measure the GPU memory and throughput of steps: ``gpumem.train_step(model, batch)``, ``gpumem.measure(fn)``,
    ``gpumem.track()``.
    """
    from pytest_gpumem.plugin.fixture import Gpumem
    from pytest_gpumem.plugin.runtest.hooks import refuse, run_of

    return Gpumem(run_of(request.node), lambda why: refuse(request.node, why))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker(CONFIG_MARKER) is not None:
        from pytest_gpumem.plugin.config.marker import parametrize

        parametrize(metafunc)


@pytest.fixture
def gpumem_config() -> StepConfig:
    """The step config of this test, from its marker ``@pytest.mark.gpumem_configs(...)``."""
    pytest.fail(
        f"{CONFIG_FIXTURE} has no config: give the test @pytest.mark.{CONFIG_MARKER}(precision=['fp32', 'amp-bf16'], ...)",
        pytrace=False,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SESSION in session.config.stash:
        session.config.stash[SESSION].finished()
