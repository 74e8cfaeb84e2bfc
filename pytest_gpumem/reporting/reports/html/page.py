"""Make the HTML page for a session's report."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.verdict import FAILING, Outcome
from pytest_gpumem.reporting.reports.causes import cause_cells, cause_notes
from pytest_gpumem.reporting.reports.html.charts import matrix_chart
from pytest_gpumem.reporting.reports.html.document import document
from pytest_gpumem.reporting.reports.html.panels import Panel, panel_of
from pytest_gpumem.reporting.reports.matrix import legend_of, matrices, matrix_cells
from pytest_gpumem.reporting.reports.ranks import peaks_by_rank, rank_cells
from pytest_gpumem.reporting.reports.summary import recording_notes
from pytest_gpumem.reporting.reports.values import change, change_or_value, shown
from pytest_gpumem.reporting.reports.view import rows_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.causes import Causes
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.reporting.reports.causes import CauseCells
    from pytest_gpumem.reporting.reports.matrix import MatrixRow
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ReportRow, Status

_HEADLINES = {"passed": "The gate passed", "failed": "The gate failed", "idle": "Nothing was gated"}
_METRICS = ("peak_allocated", "step_time")
"""The metrics with their own columns in the table of tests."""
_LONGEST = 60
"""An anchor contains at most this many characters from a test's name."""


def anchor_of(nodeid: str) -> str:
    """Return a test's anchor from its name and a digest of its complete id: ``"test_train_step-amp-bf16-1f0c9a3b"``."""
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9_]+", "-", nodeid.rpartition("::")[2]).strip("-")[:_LONGEST]
    return f"{words or 'test'}-{digest}"


def unique(anchors: Iterable[str]) -> list[str]:
    """Return ``anchors`` with a number after each repetition, because several shards may have run the same test."""
    seen: Counter[str] = Counter()
    numbered = []
    for anchor in anchors:
        seen[anchor] += 1
        numbered.append(anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor]}")
    return numbered


@dataclass(frozen=True, slots=True)
class HtmlCell:
    """A figure in the table. Sorting puts cells with ``sort=None`` last. ``bad`` marks a figure beyond its limit."""

    text: str = ""
    sort: float | None = None
    bad: bool = False
    metric: str = ""
    """The title of the cell's metric, if the cell shows another metric than its column."""


@dataclass(frozen=True, slots=True)
class TestRow:
    """A test's row in the table, and the panels below the row."""

    __test__ = False

    report_row: ReportRow
    anchor: str
    device: str
    part: str
    """The name of the measurement in ``cells``, if the test has several measurements."""
    cells: tuple[HtmlCell, ...]
    """The peak, the change in the peak or in the deciding metric, the step time, and the change in the step time."""
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class CauseView:
    """A cause of growth on the page: its figures, and its tests with their anchors."""

    cells: CauseCells
    anchor: str
    tests: tuple[tuple[str, str], ...]
    most: str
    """The test that grew most because of this cause. The page shows the test's chart of memory over time."""
    chart: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A matrix of step configs: its table, and its chart if saving and cost are known."""

    title: str
    anchor: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str
    chart: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Page:
    """The page's content, in addition to the report itself."""

    verdict: Literal["passed", "failed", "idle"]
    """``idle`` if nothing was compared and nothing failed."""
    problems: tuple[str, ...]
    """The reasons why the session failed, and the counts of failed and unfinished tests."""
    facts: tuple[tuple[str, str], ...]
    causes: tuple[CauseView, ...]
    """The causes of growth; none if only a single test grew, because the test's own panel explains its growth."""
    cause_notes: tuple[str, ...]
    statuses: tuple[tuple[Status, int], ...]
    tests: tuple[TestRow, ...]
    timed: bool
    """True if any test has a step time. If no test has one, the page omits the columns for step times."""
    several_devices: bool
    ranks: tuple[Sequence[str], Sequence[Sequence[str]]]
    """The titles and rows of the table with peaks by rank; no rows in a session without ranks."""
    opened: str
    """The anchor of the only failed test, whose details are open when the page loads; empty unless exactly one test failed."""
    matrices: tuple[MatrixView, ...]
    environments: tuple[tuple[str, tuple[tuple[str, str], ...], int], ...]
    """The device, the details and the test count for each environment."""
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        return _HEADLINES[self.verdict]


def html(report: SessionReport) -> str:
    """Return an HTML page in a single file that fetches nothing. 1.2 MB of the file are plotly.js, which draws the charts.

    The Content-Security-Policy forbids every request, and every script but the page's own. Without JavaScript the page has
    everything but the charts.

    - The headline says whether the gate passed or failed, or that nothing was gated. The accounting line and the reasons
      follow.
    - The table has a line for each test, failing tests first. If a test has several measurements, the figures come from the
      measurement with the worst verdict. If a metric without a column decided the verdict, its change replaces the peak's
      change, with the metric's name. If only one test failed, its details are open when the page loads.
    - A test's details begin with the folded failure text. Each measurement follows, with tables that explain changed metrics, a
      chart of memory over the step by category, a bar for each metric, the composition at the peak, and a chart of the timed
      rounds. A bar ends at twice the baseline, or without a baseline at twice the budget, and marks baseline, tolerance and
      budget. The chart of rounds marks disturbed rounds, the median with its 95 % interval, and the baseline's median. Tables
      have up to 30 rows.
    - A matrix of configs has a table and, if the configs were timed, a chart of saving against cost.
    - A test's anchor consists of the test's name and a digest of its id, so links to a test work in every report.
    """
    return document("page.html.jinja", page=page_of(report), report=report)


def page_of(report: SessionReport) -> Page:
    """Return the page's content for ``report``. Failed tests come first."""
    units = report.terms.units
    tests = [_row(row, units) for row in rows_of(report)]
    tests.sort(
        key=lambda row: (
            not row.report_row.status.fails,
            -row.report_row.status.severity,
            row.report_row.file,
            row.report_row.test,
        )
    )
    tests = [
        replace(row, anchor=anchor) for row, anchor in zip(tests, unique(row.anchor for row in tests), strict=True)
    ]
    failing = [row for row in tests if row.report_row.status.fails]
    counts = Counter(row.report_row.status.words for row in tests)
    status_by_words = {row.report_row.status.words: row.report_row.status for row in tests}
    statuses = sorted(
        ((status_by_words[words], count) for words, count in counts.items()),
        key=lambda status_count: -status_count[0].severity,
    )
    failed = sum(result.failed for result in report.results)
    causes = report.causes
    unsuccessful = ((failed, "failed"), (len(report.not_run), "did not finish"))
    return Page(
        verdict=state_of(report),
        problems=(
            *report.problems,
            *(f"{counted(count, 'test')} {outcome}" for count, outcome in unsuccessful if count),
        ),
        facts=_facts(report),
        causes=tuple(_causes(causes, tests, units)) if causes.concern_several_tests else (),
        cause_notes=tuple(cause_notes(causes, units, None)) if causes.concern_several_tests else (),
        statuses=tuple(statuses),
        tests=tuple(tests),
        timed=any(row.cells[2].text for row in tests),
        several_devices=len({row.device for row in tests if row.device}) > 1,
        ranks=rank_cells(peaks_by_rank(report.results), units),
        opened=failing[0].anchor if len(failing) == 1 else "",
        matrices=tuple(_matrix(title, rows, units) for title, rows in matrices(report.results).items()),
        environments=_environments(report),
        notes=(*report.warnings, *report.of_measuring, *recording_notes(report.results)),
    )


def _causes(causes: Causes, tests: Sequence[TestRow], units: UnitSystem) -> Iterator[CauseView]:
    anchors: dict[str, str] = {}
    charts = {}
    for row in tests:
        for measured, panel in zip(row.report_row.measured, row.panels, strict=True):
            measurement = measured.verdict.measurement
            anchors.setdefault(measured.test.nodeid, row.anchor)
            charts[measured.test.nodeid, measurement.name, measurement.environment.device] = panel.over_time
    for cause, cells in zip(causes.causes, cause_cells(causes, units, None), strict=True):
        most = cause.largest.growth
        named = tuple((test, anchors.get(test, "")) for test in cause.tests)
        chart = charts.get((most.test, most.name, most.device))
        yield CauseView(cells, anchor_of(f"cause {cells.name} {cells.module}"), named, most.test, chart)


def _row(row: ReportRow, units: UnitSystem) -> TestRow:
    # The table shows the first measurement with the worst outcome.
    shown_first = max(row.measured, key=lambda measured: measured.outcome.importance, default=None)
    worst = None if shown_first is None else shown_first.verdict
    return TestRow(
        row,
        anchor_of(row.title),
        device="" if worst is None else worst.measurement.environment.device,
        part=worst.measurement.name if worst is not None and len(row.measured) > 1 else "",
        cells=_cells(worst, units),
        panels=tuple(panel_of(measured.verdict, units, measured.accepted) for measured in row.measured),
    )


def _cells(verdict: Verdict | None, units: UnitSystem) -> tuple[HtmlCell, ...]:
    cells: list[HtmlCell] = []
    for name in _METRICS:
        metric = None if verdict is None else verdict.of(name)
        if metric is None:
            cells += [HtmlCell(), HtmlCell()]
            continue
        cells += [
            HtmlCell(
                shown(name, metric.value, units, metric.of), metric.value, bad=metric.outcome is Outcome.OVER_BUDGET
            ),
            _change_cell(metric, change(metric, units)),
        ]
    deciding = None if verdict is None else verdict.deciding
    if deciding is not None and deciding.metric not in _METRICS:
        named = METRICS[deciding.metric].title
        cells[1] = replace(_change_cell(deciding, change_or_value(deciding, units)), metric=named)
    return tuple(cells)


def _change_cell(metric: MetricVerdict, text: str) -> HtmlCell:
    ratio = metric.value / metric.baseline - 1 if metric.baseline and not metric.at_same_time else None
    return HtmlCell(text, ratio, bad=metric.outcome in FAILING)


def _matrix(title: str, rows: list[MatrixRow], units: UnitSystem) -> MatrixView:
    header, cells = matrix_cells(rows, units)
    return MatrixView(
        title,
        anchor_of(f"matrix of {title}"),
        ("config", *header),
        cells,
        legend_of(rows) or "",
        matrix_chart(title, rows, units),
    )


def _facts(report: SessionReport) -> tuple[tuple[str, str], ...]:
    facts = [
        ("ended", report.ended.replace("T", " ").replace("Z", " UTC")),
        ("commit", report.commit or ""),
        ("asked for", report.terms.asked_for),
        ("shards", str(report.shards) if report.shards > 1 else ""),
        ("pytest-gpumem", report.version),
    ]
    return tuple((name, value) for name, value in facts if value)


def _environments(report: SessionReport) -> tuple[tuple[str, tuple[tuple[str, str], ...], int], ...]:
    tests_by_environment: dict[tuple[str, tuple[tuple[str, str], ...]], set[str]] = {}
    for result in report.results:
        for verdict in result.verdict.verdicts:
            environment = verdict.measurement.environment
            details = (
                ("folder of baselines", environment.slug),
                *((name, str(value)) for name, value in environment.details.items()),
            )
            tests_by_environment.setdefault((environment.device, details), set()).add(result.verdict.nodeid)
    return tuple((device, details, len(tests)) for (device, details), tests in sorted(tests_by_environment.items()))
