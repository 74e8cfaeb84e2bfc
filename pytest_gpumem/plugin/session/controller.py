"""The plugin that gets all results of a session, updates the store, and writes the reports.

The plugin runs in the process that receives the reports of all tests. With pytest-xdist, this is the controller.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.base.errors import BackendError, StoreError
from pytest_gpumem.base.git import commit_of
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.values.option_words import LACKS_WORKSPACES
from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.verdict import SKIPPED, TestVerdict
from pytest_gpumem.plugin.config.command_line import WORKER_IS_WHOLE, is_whole_run
from pytest_gpumem.plugin.config.options import is_measured
from pytest_gpumem.plugin.session.cached_report import write_cached_report
from pytest_gpumem.plugin.session.left_out import skipped_files
from pytest_gpumem.plugin.session.packing import Packed
from pytest_gpumem.plugin.session.pytest_failures import shorten_repeated_failures
from pytest_gpumem.plugin.session.store_at_end import StoreAtEnd
from pytest_gpumem.reporting.reports.files import ReportFiles
from pytest_gpumem.reporting.reports.github import report_to_github
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.reporting.reports.renamed import with_renamings
from pytest_gpumem.reporting.reports.results import Results, TestResult
from pytest_gpumem.reporting.reports.session_report import STORE, SessionReport, StoreState, Terms
from pytest_gpumem.reporting.reports.terminal import MARKUP, failure_lines, terminal_text
from pytest_gpumem.reporting.reports.view import headline, why_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.plugin.config.settings import Settings


class Controller:
    """The plugin for the process that receives the reports of all tests."""

    def __init__(self, config: pytest.Config, settings: Settings, store: Store) -> None:
        self._config = config
        self._settings = settings
        self._store = StoreAtEnd(store, settings, config.rootpath)
        self._results = Results()
        self._selection: Selection | None = None
        self._packed: list[Callable[[], Packed]] = []
        self._complete = True
        self._deselected = False
        self._not_collected: set[str] = set()
        self._closing: list[str] = []
        self._unused: tuple[str, ...] = ()
        self._began = False
        self._errors: list[str] = []
        self.report: SessionReport | None = None
        """The session's report, written after all tests; ``None`` before, or if pytest only lists tests."""
        self._files = ReportFiles([settings.report_base / file for file in settings.report])
        typed = config.getoption("gpumem_report") is not None
        if (typed or settings.baseline) and not config.option.collectonly:
            self._files.begin()

    def add_error(self, error: str) -> None:
        """Add an error. It makes the session fail, even if all its tests pass."""
        self._errors.append(error)

    def select(self, selection: Selection) -> None:
        """Store which tests a process selected after its collection. All workers have the same selection."""
        self._selection = selection
        if self._selected():
            self._files.begin()

    def packs(self, packed: Callable[[], Packed]) -> None:
        """Store a function that returns how a process packed its tests. It is called at the end of the session."""
        self._packed.append(packed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[WORKER_IS_WHOLE] = is_whole_run(self._config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        packed = output.get("gpumem_packed")
        if packed is not None:
            self.packs(partial(from_plain, Packed, packed))
        plain = output.get("gpumem")
        if plain is not None:
            self.select(from_plain(Selection, plain))
        else:
            self._complete = False

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        # Ignore deselected tests that are not measured, because they have no baselines.
        if any(map(is_measured, items)):
            self._deselected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._not_collected.add(report.nodeid)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._results.add(report):
            self._files.begin()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        self._began = True
        try:
            result = yield
        except BaseException as error:
            # Pytest ended early (Ctrl-C, --maxfail or a crash), so report the measurements so far.
            self._complete = False
            self._finish(session, str(error) or type(error).__name__)
            raise
        if self._selection is not None and self._selection.error is not None:
            self._began = False
            raise pytest.UsageError(self._selection.error)
        self._finish(session)
        return result

    @pytest.hookimpl
    def pytest_sessionfinish(self, exitstatus: int | pytest.ExitCode) -> None:
        """Write a report even if no test began. Otherwise somebody may take an earlier file for this session's report."""
        if self._began or not self._files.has_files:
            return
        error = self._selection.error if self._selection is not None else None
        ended_early = error or f"pytest ended with exit status {int(exitstatus)} before any test ran"
        self._errors += self._files.write(self._reported([], ended_early))

    def _finish(self, session: pytest.Session, ended_early: str | None = None) -> None:
        if self._config.option.collectonly:
            return
        results = self._all_results()
        if self._settings.strict and self._selection is not None:
            self._errors += [*self._selection.omitted, *skipped_files(self._selection.skipped)]
            self._selection = replace(self._selection, omitted=())
        self._errors += [
            f"{result.verdict.nodeid} failed, but a plugin or conftest.py changed its outcome: {headline(why_failed(result))}"
            for result in self._results.rewritten()
            # Without a gate, a project's hooks are allowed to change a failed test's outcome, unless its verdict failed the
            # test.
            if result.verdict.failure is not None or self._settings.gates
        ]
        if self._settings.gates:
            self._check_selected(session, results)
        self._report_missing_store(results)
        if self._settings.update is not None:
            store_update = self._store.write(results, self._settings.update)
            results = store_update.results
            self._closing += store_update.lines
            self._errors += [] if store_update.error is None else [store_update.error]
        self._note_too_low(results)
        if self._packed:
            self._closing.append(reduce(Packed.merged, (packed() for packed in self._packed)).line())
        tests = self._tests_in_use()
        if self._complete and session.testsfailed == 0 and tests is not None:
            with self._or_error():
                self._unused = self._store.unused(results, tests)
        self.report = self._reported(results, ended_early)
        if session.testsfailed and self.report.passed:
            # The report must not show success if pytest fails for another reason, for example because the coverage is too
            # low.
            self._errors.append("another plugin made the session red, although no test failed")
            self.report = replace(self.report, errors=tuple(self._errors))
        self._errors += self._files.write(self.report)
        # `write` returns an error for each unwritten file, so the report has further errors now.
        self.report = replace(self.report, errors=tuple(self._errors))
        self._keep(self.report)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            shorten_repeated_failures(reporter, self.report)
        is_red = not self.report.passed if self._settings.gates else self.report.nothing_done is not None
        if is_red or self._errors:
            session.testsfailed += 1

    def _report_missing_store(self, results: list[TestResult]) -> None:
        if not results or not (self._settings.baseline or self._settings.update):
            return
        with self._or_error():
            sentence = self._store.restorable()
            if sentence is not None and self._settings.update is None:
                self._errors.append(sentence)
            elif sentence is not None:
                # With an update, a missing store is no error, because somebody may have removed it to record all baselines
                # anew.
                self._closing.append(f"{STORE}{sentence}")

    @contextmanager
    def _or_error(self) -> Iterator[None]:
        """Make the session fail if the store cannot be read in the ``with`` block."""
        try:
            yield
        except (StoreError, BackendError) as error:
            self._errors.append(str(error))

    def lost(self, verdict: TestVerdict | None, why: str) -> None:
        """Write the report and the summary of a session that ends early. The store is not updated.

        Args:
            verdict: The verdict on the running test; ``None`` if no measured test is running.
            why: The reason, in one or more lines.
        """
        if self.report is None:
            results = self._results.all()
            if verdict is not None:
                results.append(TestResult(verdict, passed=False, failed=True, failed_in="call"))
                results.sort(key=lambda result: (result.verdict.file, result.verdict.test))
            self.report = self._reported(results, why.partition("\n")[0])
            self._errors += self._files.write(self.report)
            self._keep(self.report)
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write(
                "\n"
            )  # Under -q, pytest has written a line of progress letters without a newline, so end this line.
            self.pytest_terminal_summary(reporter)
            for line in failure_lines(self.report, screen_of(reporter)):
                reporter.write_line("".join(span.text for span in line), red=True)
            for text in why.splitlines():
                reporter.write_line(f"gpumem: {text}", red=True)

    def _keep(self, report: SessionReport) -> None:
        why_not = write_cached_report(self._config, report)
        if why_not is not None:
            self._closing.append(why_not)

    def _all_results(self) -> list[TestResult]:
        """Return the results of all tests, including tests in files that skipped themselves.

        The result of a renamed test contains its likely former name.
        """
        results = self._results.all()
        skipped = self._selection.skipped if self._selection is not None else ()
        ran = {(result.verdict.file, result.verdict.test) for result in results}
        results += [
            TestResult(TestVerdict(*test, unmeasured=SKIPPED), passed=False) for test in skipped if test not in ran
        ]
        results.sort(key=lambda result: (result.verdict.file, result.verdict.test))
        return list(with_renamings(results, self._selection.collected if self._selection is not None else ()))

    def _tests_in_use(self) -> Selection | None:
        """Return the tests whose baselines are in use; ``None`` if this is not known, because another session may run the
        deselected tests.
        """
        selection = self._selection
        if selection is not None and is_whole_run(self._config):
            return replace(selection, measured=selection.collected, files=selection.collected_files)
        return None if self._deselected else selection

    def _check_selected(self, session: pytest.Session, results: list[TestResult]) -> None:
        if self._selection is None:
            self._errors.append("no process reported which tests it selected")
        elif session.testscollected == 0 and not self._selection.collected:
            # If a shard has deselected all its measured tests, `collected` still contains them. That is no error, because
            # other shards run these tests.
            self._errors.append("no test was collected")
        elif self._settings.baseline and not self._settings.strict and not results:
            with self._or_error():
                self._errors += self._store.of_other_devices(self._results.tests_without_result())

    def ended_red(self, status: int) -> None:
        """If the report passed, but another plugin then changed the exit status, add an error and write the report again.

        The exit status for "no tests collected" is ignored, because a shard may contain no tests.
        """
        if self.report is not None and self.report.passed and status != pytest.ExitCode.NO_TESTS_COLLECTED:
            error = f"pytest ended with exit status {int(status)}, although no test failed"
            self.report = replace(self.report, errors=(*self.report.errors, error))
            self._files.write(self.report)

    def _reported(self, results: list[TestResult], ended_early: str | None) -> SessionReport:
        settings, selection = self._settings, self._selection or Selection()
        reported = {(result.verdict.file, result.verdict.test) for result in results}
        stored = StoreState()
        if self._files.has_files:
            with self._or_error():
                stored = self._store.stored(results, self._config.getini("python_functions"))
        return SessionReport(
            ended=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            version=__version__,
            commit=commit_of(self._config.rootpath) if self._files.has_files else None,
            terms=Terms(settings.baseline, settings.strict, settings.update, settings.units, settings.against),
            results=tuple(results),
            not_run=tuple(sorted(selection.measured - reported)),
            selection=selection,
            stored=stored,
            closing_lines=tuple(self._closing),
            errors=tuple(self._errors),
            ended_early=ended_early,
            not_collected=tuple(sorted(self._not_collected)),
            unmeasured_failures=self._results.unmeasured_failures(selection.measured),
        )

    def _note_too_low(self, results: list[TestResult]) -> None:
        """Add a warning if peaks from an emulated GPU are too low, because cuDNN's workspaces for convolutions or recurrent
        layers are not known.
        """
        measurements = [verdict.measurement for result in results for verdict in result.verdict.verdicts]
        convolutions = sum(
            any(note.startswith(LACKS_WORKSPACES) for note in measurement.notes) for measurement in measurements
        )
        recurrent = sum("emulated_rnn" in measurement.environment.details for measurement in measurements)
        if not convolutions and not recurrent:
            return
        from pytest_gpumem.emulating.emulation.cudnn import WHY_RECURRENT
        from pytest_gpumem.emulating.emulation.load import current_emulation

        emulation = current_emulation()
        if emulation is None:
            return
        cudnn = emulation.cudnn
        for title, count, why in (
            ("convolutions", convolutions, cudnn.why_zero()),
            ("recurrent layers", recurrent, cudnn.lacking_of_recurrent() or WHY_RECURRENT),
        ):
            if count:
                self._closing.append(f"{title}: the peaks of {counted(count, 'measurement')} may be too low: {why}")

    def _selected(self) -> int:
        """Return the number of selected measured tests."""
        if self._selection is None or self._config.option.collectonly:
            return 0
        return len(self._selection.measured)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        results = self._all_results()
        idle = self._selection.warnings if self._selection is not None else ()
        if not results and not self._selected() and not self._errors and not idle and not self._settings.baseline:
            return
        report = self.report or SessionReport("", __version__, selection=self._selection or Selection())
        summary = terminal_text(
            # Add what the written report does not contain: errors from writing its files, and unused baselines.
            replace(report, errors=tuple(self._errors), closing_lines=(*self._closing, *self._unused)),
            screen_of(terminalreporter),
            self._config.get_verbosity(),
            explain_all=self._settings.explain == "always",
        )
        if summary.tables:
            terminalreporter.write_sep("=", "gpumem")
        for line in (*summary.tables, *summary.lines):
            terminalreporter.ensure_newline()
            for span in line:
                terminalreporter.write(span.text, **MARKUP[span.style])
            terminalreporter.write("\n")
        for text in report_to_github(report, self._config.rootpath, os.environ):
            terminalreporter.write_line(text)


def screen_of(reporter: pytest.TerminalReporter) -> Screen:
    """Return the width and encoding of pytest's output. Output to a file or a CI log has no width limit."""
    width = reporter.config.get_terminal_writer().fullwidth if reporter.isatty else None
    return Screen(width, getattr(sys.stdout, "encoding", None) or "utf-8")
