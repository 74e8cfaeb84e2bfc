"""A session's report as what its page shows: texts, fractions of bars, and data of charts. Pure, frozen values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.reports.html.charts import matrix_chart
from pytest_gpumem.reports.html.panels import Panel, panel_of
from pytest_gpumem.reports.html.texts import anchor_of, in_lines, in_one_line, unique
from pytest_gpumem.reports.matrix import matrices, matrix_cells, said_of
from pytest_gpumem.reports.results import recording_notes
from pytest_gpumem.reports.values import change, shown
from pytest_gpumem.reports.view import rows_of, state_of

if TYPE_CHECKING:
    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Row, Status
    from pytest_gpumem.units import UnitSystem

_HEADLINES = {"passed": "The gate passed", "failed": "The gate failed", "idle": "Nothing was gated"}
_METRICS = ("peak_allocated", "step_time")


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in the table. ``sort`` is ``None`` where there is none, which sorts last; ``bad`` is the gate's word."""

    text: str = ""
    sort: float | None = None
    bad: bool = False


@dataclass(frozen=True, slots=True)
class TestRow:
    """A test: its line of the table, and what opens beneath it."""

    __test__ = False

    anchor: str
    file: str
    test: str
    status: Status
    device: str = ""
    part: str = ""
    """Which of its measurements the figures are of, where it has several."""
    cells: tuple[Cell, ...] = ()
    """Peak and its change, step time and its change."""
    panels: tuple[Panel, ...] = ()
    failure: str = ""
    accept: str = ""
    """The command that accepts what failed."""
    headline: str = ""
    """Why it failed, in a line."""
    said: tuple[str, ...] = ()
    """What else there is to say of the whole test."""
    line: str = ""


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A matrix of step configs: its table, and its chart where saving and cost are known."""

    title: str
    anchor: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    said: str
    chart: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class EnvironmentView:
    """Where tests ran, and how many of them."""

    device: str
    details: tuple[tuple[str, str], ...]
    tests: int


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on the page."""

    verdict: Literal["passed", "failed", "idle"]
    """``idle`` where nothing failed because nothing was held against anything."""
    accounting: str
    problems: tuple[str, ...]
    """Why it failed, in a few sentences."""
    facts: tuple[tuple[str, str], ...]
    statuses: tuple[tuple[Status, int], ...]
    tests: tuple[TestRow, ...]
    timed: bool
    """Whether any test has a step time: else there are no columns for it."""
    several_devices: bool
    matrices: tuple[MatrixView, ...]
    environments: tuple[EnvironmentView, ...]
    said: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        return _HEADLINES[self.verdict]


def page_of(report: SessionReport) -> Page:
    """What the page of ``report`` shows. Tests that fail come first."""
    units = report.terms.units
    tests = [_row(row, units) for row in rows_of(report)]
    tests.sort(key=lambda row: (not row.status.fails, -row.status.severity, row.file, row.test))
    tests = [
        replace(row, anchor=anchor) for row, anchor in zip(tests, unique(row.anchor for row in tests), strict=True)
    ]
    counts = Counter(row.status.words for row in tests)
    first = {row.status.words: row.status for row in tests}
    counted = sorted(((first[words], count) for words, count in counts.items()), key=lambda one: -one[0].severity)
    return Page(
        verdict=state_of(report),
        accounting=in_lines(report.accounting.removeprefix("gpumem: ")),
        problems=_problems(report, sum(result.failed for result in report.results)),
        facts=_facts(report),
        statuses=tuple(counted),
        tests=tuple(tests),
        timed=any(row.cells[2].text for row in tests),
        several_devices=len({row.device for row in tests if row.device}) > 1,
        matrices=tuple(_matrix(title, rows, units) for title, rows in matrices(report.results).items()),
        environments=_environments(report),
        said=tuple(in_lines(line) for line in report.said),
        unused=tuple(in_one_line(f"{slug}: {key}") for slug, key in report.unused),
        notes=tuple(in_lines(note) for note in (*report.selection.idle_budgets, *recording_notes(report.results))),
    )


def _problems(report: SessionReport, failed: int) -> tuple[str, ...]:
    problems = [in_lines(problem) for problem in report.problems]
    for count, what in ((failed, "failed"), (len(report.not_run), "did not finish")):
        if count:
            problems.append(f"{count} test{'' if count == 1 else 's'} {what}")
    return tuple(problems)


def _row(row: Row, units: UnitSystem) -> TestRow:
    # The figures in the table are those of the measurement with the worst outcome, and of such the first.
    verdicts = [one.verdict for one in row.measured]
    telling = max(verdicts, key=lambda one: list(Outcome).index(one.outcome), default=None)
    test = None if row.result is None else row.result.verdict
    where = None if test is None else test.location
    return TestRow(
        anchor_of(row.title),
        in_one_line(row.file),
        in_one_line(row.test),
        row.status,
        device="" if telling is None else in_one_line(telling.measurement.environment.device),
        part=in_one_line(telling.measurement.name) if telling is not None and len(verdicts) > 1 else "",
        cells=_cells(telling, units),
        panels=tuple(panel_of(one, units) for one in verdicts),
        failure=in_lines(test.failure or "") if test is not None else "",
        accept=in_lines(row.accept),
        headline=in_one_line(row.headline),
        said=tuple(map(in_lines, row.notes)),
        line="" if where is None else in_one_line(f"{where.file}:{where.line}"),
    )


def _cells(verdict: Verdict | None, units: UnitSystem) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for name in _METRICS:
        metric = None if verdict is None else verdict.of(name)
        if metric is None:
            cells += [Cell(), Cell()]
            continue
        ratio = metric.value / metric.baseline - 1 if metric.baseline else None
        cells += [
            Cell(shown(name, metric.value, units, metric.of), metric.value, bad=metric.outcome is Outcome.OVER_BUDGET),
            Cell(change(metric, units), ratio, bad=metric.outcome in FAILING),
        ]
    return tuple(cells)


def _matrix(title: str, rows: list[Any], units: UnitSystem) -> MatrixView:
    header, cells = matrix_cells(rows, units)
    return MatrixView(
        in_one_line(title),
        anchor_of(f"matrix of {title}"),
        ("config", *header),
        tuple(tuple(in_one_line(cell) for cell in row) for row in cells),
        in_one_line(said_of(rows) or ""),
        matrix_chart(title, rows, units),
    )


def _facts(report: SessionReport) -> tuple[tuple[str, str], ...]:
    terms = report.terms
    asked = [
        *(["--gpumem-baseline"] if terms.baseline else []),
        *(["--gpumem-strict"] if terms.strict else []),
        *([f"--gpumem-update={terms.update}"] if terms.update else []),
    ]
    facts = [
        ("ended", report.ended.replace("T", " ").replace("Z", " UTC")),
        ("commit", report.commit or ""),
        ("asked for", " ".join(asked) or "measuring only"),
        ("shards", str(report.shards) if report.shards > 1 else ""),
        ("pytest-gpumem", report.version),
    ]
    return tuple((name, in_one_line(value)) for name, value in facts if value)


def _environments(report: SessionReport) -> tuple[EnvironmentView, ...]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], set[str]] = {}
    for result in report.results:
        for one in result.verdict.verdicts:
            environment = one.measurement.environment
            found.setdefault((in_one_line(environment.device), _details(environment)), set()).add(result.verdict.nodeid)
    return tuple(EnvironmentView(device, details, len(tests)) for (device, details), tests in sorted(found.items()))


def _details(environment: Environment) -> tuple[tuple[str, str], ...]:
    return (
        ("folder of baselines", in_one_line(environment.slug)),
        *((in_one_line(name), in_one_line(str(value))) for name, value in environment.details.items()),
    )
