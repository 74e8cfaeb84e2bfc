"""A session's report in GitHub's Markdown: for a file, a job's summary, or a comment in a pull request. Pure.

The most important parts come first. If the report is too long, complete parts are omitted, and the last line names
the omitted parts.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.selecting import unused_line
from pytest_gpumem.judging.gate.verdict import CHANGED, FAILING, Outcome
from pytest_gpumem.reporting.reports.causes import causes_in_markdown
from pytest_gpumem.reporting.reports.escaping import block, code, code_in_table, details, html_code, plain, table
from pytest_gpumem.reporting.reports.explanation import explained_tables, grown_counts
from pytest_gpumem.reporting.reports.layout import without_empty
from pytest_gpumem.reporting.reports.matrix import legend_of, matrices, matrix_cells
from pytest_gpumem.reporting.reports.places import first_row
from pytest_gpumem.reporting.reports.ranks import peaks_by_rank, rank_cells
from pytest_gpumem.reporting.reports.short_failures import explained_before
from pytest_gpumem.reporting.reports.summary import device_lines, reasons, unmeasured_processes
from pytest_gpumem.reporting.reports.values import change, has_column, peaks_by_device, remarks_on, shown, texts_of
from pytest_gpumem.reporting.reports.view import origin_line, rows_of, shown_measurements, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.reporting.reports.explanation import PartTable
    from pytest_gpumem.reporting.reports.matrix import MatrixRow
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ReportRow, ShownMeasurement

SUMMARY_LIMIT = 2**20
"""GitHub's size limit for a step summary, in bytes. Instead of a larger summary, GitHub shows an error:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits."""
COMMENT_LIMIT = 65_536
"""GitHub's limit for a comment, in characters. A longer comment is refused: ``Body is too long (maximum is 65536 ...)``."""
MOST_FOLDED = 50
"""A folded list names at most this many failed tests with the same causes."""
LEAST_BYTES = 300
"""The smallest size limit for a report, in bytes. The verdict always fits into it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a report, which may be omitted if the report is too long.

    The part with the highest ``rank`` is omitted first. Among parts with the same rank, the last part is omitted first.
    """

    rank: int
    title: str
    text: str


(
    _HEAD,
    _PROBLEM,
    _CAUSES,
    _FAILED,
    _NOT_RUN,
    _DETAILS,
    _CHANGED,
    _NOT_COMPARED,
    _STORE,
    _RANKS,
    _ENVIRONMENT,
    _MATRIX,
    _ALL,
) = range(13)
_MANY = {
    _PROBLEM: "problems",
    _FAILED: "tests that failed",
    _NOT_RUN: "files with tests that did not finish",
    _DETAILS: "tests' details",
    _MATRIX: "tables of configs",
}
_METRICS = ("metric", "baseline", "now", "change", "allowed", "budget", "verdict")
_LINE_END = "  \n"
"""Markdown's line break within a paragraph."""
_VERDICTS = {"passed": "✅ gpumem passed", "failed": "❌ gpumem failed", "idle": "⚪ gpumem gated nothing"}


def markdown(report: SessionReport, *, most: int | None = None) -> str:
    r"""Return the report in GitHub's Markdown.

    The report shows, in this order:

    - the verdict and the accounting line
    - other reasons for a red session
    - the causes of growth
    - each failed test with the first row of its explanation
    - changes in tests that did not fail
    - reasons why figures were not compared
    - changes to the store

    Folded sections contain each failed test's metrics, growth and accepting command, the table of all tests, the matrices and
    the environment.

    GitHub allows 65,536 characters in a comment and 1 MiB in a step's summary. If a report is too long, complete parts are
    omitted, first the table of all tests, and the last line names the omitted parts. The verdict is never omitted. Texts from
    tests are shown as they are, but invisible and reordering characters are escaped as in Python: ``\n``, ``\x1b``,
    ``\u202e``.

    Args:
        report: The report.
        most: The maximum size in bytes of UTF-8; no limit by default.

    Raises:
        ValueError: ``most`` is too small for the verdict.
    """
    if most is not None and most < LEAST_BYTES:
        raise ValueError(f"`most` must be at least {LEAST_BYTES} bytes, the space for a verdict, but it is {most}")
    parts = list(_parts(report))
    text = _joined(parts, [])
    if most is None or _size(text) <= most:
        return text
    remaining = dict(enumerate(parts))
    left_out: list[_Part] = []
    # Add up the sizes, because joining a report with many tests again and again would be slow.
    size = sum(_size(part.text) + 2 for part in parts)
    for number in sorted(remaining, key=lambda number: (-parts[number].rank, -number)):
        if parts[number].rank == _HEAD or size + _size(_omitted(left_out)) <= most:
            break
        left_out.append(remaining.pop(number))
        size -= _size(left_out[-1].text) + 2
    text = _joined(list(remaining.values()), left_out)
    # The accounting line contains reasons from tests, so it can be several kilobytes long. If it does not fit, it is omitted.
    return text if _size(text) <= most else f"### {_VERDICTS[state_of(report)]}\n\n{_omitted([])}\n"


def _parts(report: SessionReport) -> Iterator[_Part]:
    units = report.terms.units
    rows = rows_of(report)[: len(report.results)]
    line = report.accounting.removeprefix("gpumem: ")
    yield _Part(_HEAD, "", f"### {_VERDICTS[state_of(report)]}: {plain(line)}")
    for problem in report.problems:
        yield _Part(_PROBLEM, "the problems", f"- **{plain(problem)}**")
    for file, tests in groupby(report.not_run, key=lambda test: test[0]):
        ids = ", ".join(code(f"{file}::{test}") for _, test in tests)
        yield _Part(_NOT_RUN, "the tests that did not finish", f"- Did not finish: {ids}")
    yield from _failed(report, [row for row in rows if row.status.fails])
    not_failed = [row for row in rows if not row.status.fails]
    changed = _changed_table([measured for row in not_failed for measured in row.measured], units)
    if changed:
        title = "Changed without failing the test"
        yield _Part(_CHANGED, "what changed without failing", f"#### {title}\n\n{changed}")
    not_compared = reasons(
        (result.verdict for result in report.results if not result.failed), report.terms.units, report.terms.update
    )
    not_compared += [*report.of_measuring, *unmeasured_processes(result.verdict for result in report.results)]
    if not_compared:
        yield _Part(_NOT_COMPARED, "what was not compared", "\n".join(f"- {plain(reason)}" for reason in not_compared))
    unused = [unused_line(report.unused)] if report.unused and report.passed else []
    store = [*report.of_store, *report.warnings, *unused]
    if store:
        yield _Part(_STORE, "the notes on the store", "\n".join(f"- {plain(sentence)}" for sentence in store))
    all_tests = _all_tests(rows, units)
    if all_tests:
        yield _Part(_ALL, "the table of all tests", details("All measured tests", all_tests))
    yield from _ranks(report)
    for title, configs in matrices(report.results).items():
        yield _Part(
            _MATRIX, "a table of configs", details(f"Configs of {html_code(title)}", _matrix_table(configs, units))
        )
    yield _Part(_ENVIRONMENT, "the environment", details("Environment", _environment(report)))


def _ranks(report: SessionReport) -> Iterator[_Part]:
    ranks = peaks_by_rank(report.results)
    if ranks:
        header, lines = rank_cells(ranks, report.terms.units)
        cells = [[code_in_table(name), *map(plain, row_cells)] for name, *row_cells in lines]
        rank_table = table(header, cells, (0, len(header) - 1))
        yield _Part(_RANKS, "the table of ranks", details("Peaks of ranks", rank_table))


def _figures(row: ReportRow, units: UnitSystem) -> str:
    """Return a test's metrics, their explanations, and the commands to bisect or accept the changes."""
    blocks = []
    for measured in row.measured:
        verdict = measured.verdict
        if len(row.measured) > 1:
            blocks.append(f"**{plain(verdict.measurement.name)}**")
        blocks.append(_metrics(measured, units))
        blocks += _explained(verdict, units)
        notes = [*(metric.reason for metric in verdict.metrics if metric.reason), *remarks_on(verdict.measurement)]
        by_device = peaks_by_device(verdict.measurement, units)
        notes += [] if by_device is None else [by_device]
        if notes:
            blocks.append("\n".join(f"- {plain(note)}" for note in dict.fromkeys(notes)))
        if verdict.origin is not None:
            blocks.append(f"Baseline: {plain(origin_line(verdict.origin, reason=True))}")
    if row.bisect:
        blocks.append(f"To find the package that caused it:\n\n{block(row.bisect)}")
    if row.accept:
        blocks.append(f"To accept the new figures:\n\n{block(row.accept)}")
    return "\n\n".join(blocks)


def _omitted(left_out: list[_Part]) -> str:
    if not left_out:
        return "*The report is too long to be shown here. The JSON and HTML reports are complete.*"
    words = []
    for rank, parts in groupby(sorted(left_out, key=lambda part: part.rank), key=lambda part: part.rank):
        same = list(parts)
        words.append(same[0].title if len(same) == 1 else f"{len(same)} {_MANY[rank]}")
    return (
        f"*Left out, because the text would be too long: {', '.join(words)}. The JSON and HTML reports are complete.*"
    )


def _joined(parts: list[_Part], left_out: list[_Part]) -> str:
    texts = [part.text for part in parts]
    return "\n\n".join([*texts, *([_omitted(left_out)] if left_out else [])]) + "\n"


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def _metrics(measured: ShownMeasurement, units: UnitSystem) -> str:
    """Return a table with a measurement's metrics."""
    rows = [
        [
            *map(plain, astuple(texts_of(metric, units))[:-1]),
            "" if metric.outcome is Outcome.RECORDED else _loud(measured, metric.outcome),
        ]
        for metric in measured.verdict.metrics
    ]
    header, rows = without_empty(_METRICS, rows, (0, 2, 6))
    return table(header, rows, (0, len(header) - 1))


def _loud(measured: ShownMeasurement, outcome: Outcome) -> str:
    words = measured.words_of(outcome)
    return f"**{words}**" if outcome in FAILING - measured.accepted else words


def _explained(verdict: Verdict, units: UnitSystem) -> list[str]:
    """Return tables that explain the retained bytes, the peak (its growth, if a baseline exists), and grown counts."""
    metrics = ("retained", "peak_allocated", "cyclic_garbage", *grown_counts(verdict))
    blocks: list[str] = []
    for explanation in explained_tables(verdict, metrics, units):
        blocks += map(plain, explanation.table.sentences)
        if explanation.table.parts or explanation.table.changes:
            blocks.append(_part_table(explanation.table))
        if explanation.lines or explanation.notes:
            blocks.append("\n".join(f"- {plain(line)}" for line in (*explanation.lines, *explanation.notes)))
    return blocks


def _part_table(part_table: PartTable) -> str:
    name = plain if part_table.of_blocks else code_in_table
    why = ["why"] if part_table.changes else []
    header = [
        plain(part_table.title),
        *part_table.figures,
        *("module", "line", "operator", "tensors")[: 4 if part_table.of_blocks else 2],
        *why,
    ]
    rows = [
        [
            name(part.name),
            *map(plain, part.figures),
            *map(code_in_table, part.places),
            *([plain(part.reason)] if why else []),
        ]
        for part in part_table.parts
    ]
    if part_table.others_title:
        first = (
            [part_table.others_title, *[""] * (len(part_table.figures) - 1), part_table.rest]
            if part_table.of_blocks
            else [plain(part_table.rest_line)]
        )
        rows.append([*first, *[""] * (len(header) - len(first))])
    numbers = range(1, 1 + len(part_table.figures))
    text = table(header, rows, tuple(number for number in range(len(header)) if number not in numbers))
    return f"{text}\n\n{plain(part_table.note)}" if part_table.note else text


def _failed(report: SessionReport, rows: Sequence[ReportRow]) -> Iterator[_Part]:
    """Yield the causes if several tests grew, and then each failed test. Tests that these causes fully explain are folded."""
    units = report.terms.units
    if report.causes.concern_several_tests:
        yield _Part(_CAUSES, "the causes", f"#### Causes\n\n{causes_in_markdown(report.causes, units)}")
    explained_tests = explained_before(report.causes, (row.result.verdict for row in rows if row.result is not None))
    folded = [row for row in rows if row.result is not None and row.result.verdict.nodeid in explained_tests]
    for row in rows:
        if row in folded:
            continue
        first = first_row(row, units)
        lines = [code(row.title), plain(row.headline), *([] if first is None else [plain(first.text)])]
        yield _Part(_FAILED, "a test that failed", f"❌ {_LINE_END.join(lines)}")
        figures = _figures(row, units)
        if figures:
            yield _Part(_DETAILS, "a test's details", details("What was measured", figures))
    if folded:
        lines = [f"- {code(row.title)}: {plain(row.headline)}" for row in folded[:MOST_FOLDED]]
        lines += [f"- and {counted(len(folded) - MOST_FOLDED, 'other')}"] if len(folded) > MOST_FOLDED else []
        title = f"❌ {counted(len(folded), 'more test')} that failed only because of these causes"
        yield _Part(_FAILED, "the tests that failed by the same causes", details(title, "\n".join(lines)))


def _changed_table(measured: Iterable[ShownMeasurement], units: UnitSystem) -> str:
    """Return a table with the changed metrics; empty if no metric changed."""
    rows = [
        [
            code_in_table(shown_measurement.title),
            *map(plain, astuple(texts_of(metric, units))[:4]),
            _loud(shown_measurement, metric.outcome),
        ]
        for shown_measurement in measured
        for metric in shown_measurement.verdict.metrics
        if metric.outcome in CHANGED
    ]
    return table(["test", "metric", "baseline", "now", "change", "verdict"], rows, (0, 1, 5)) if rows else ""


def _all_tests(tests: Sequence[ReportRow], units: UnitSystem) -> str:
    """Return a table with a row for each measurement, and for each test without measurements; empty without tests."""
    verdicts = [measured.verdict for row in tests for measured in row.measured]
    metrics = {name: [metric for verdict in verdicts if (metric := verdict.of(name)) is not None] for name in METRICS}
    used = [
        name
        for name in METRICS
        if has_column(
            name,
            [metric.value for metric in metrics[name]],
            changed=any(metric.outcome in CHANGED for metric in metrics[name]),
        )
    ]
    lines = []
    for row in tests:
        for measured in row.measured:
            cells = [cell for name in used for cell in _value_and_change(measured.verdict.of(name), units)]
            lines.append([code_in_table(measured.title), *cells, _loud(measured, measured.outcome)])
        if row.result is not None and not row.measured:
            test = row.result.verdict
            why = "checked by relations" if test.relations and not test.unmeasured else plain(test.outcome.words)
            lines.append([code_in_table(row.title), *[""] * (2 * len(used)), why])
    header = ["test", *(cell for name in used for cell in (METRICS[name].title, "change")), "verdict"]
    # If nothing was compared, omit the columns with changes.
    header, lines = without_empty(header, lines, [number for number, title in enumerate(header) if title != "change"])
    peaks = [
        f"- {plain(line)}" for line in device_lines((measured for row in tests for measured in row.measured), units)
    ]
    all_tests = table(header, lines, (0, len(header) - 1)) if lines else ""
    return "\n".join([all_tests, "", *peaks]) if peaks else all_tests


def _value_and_change(metric: MetricVerdict | None, units: UnitSystem) -> tuple[str, str]:
    if metric is None:
        return "", ""
    return plain(shown(metric.metric, metric.value, units, metric.of)), change(metric, units)


def _matrix_table(rows: Sequence[MatrixRow], units: UnitSystem) -> str:
    """Return a table for step configs with a legend."""
    header, cells = matrix_cells(rows, units)
    lines = [[code_in_table(config), *map(plain, row_cells)] for config, *row_cells in cells]
    config_table = table(["config", *header], lines, (0, len(header)))
    legend = legend_of(rows)
    return f"{config_table}\n\n{plain(legend)}" if legend else config_table


def _environment(report: SessionReport) -> str:
    """Return a table with the versions, the devices, and the time when the session ended."""
    rows = [["ended", code_in_table(report.ended)], ["pytest-gpumem", code_in_table(report.version)]]
    if report.commit:
        rows.append(["commit", code_in_table(report.commit)])
    if report.shards > 1:
        rows.append(["shards", str(report.shards)])
    seen: list[Environment] = []
    for measured in shown_measurements(report.results):
        environment = measured.verdict.measurement.environment
        if environment in seen:
            continue
        seen.append(environment)
        rows.append(["device", plain(environment.device)])
        rows += [[plain(name), plain(str(value))] for name, value in environment.details.items()]
    return table(["", ""], rows, (0, 1))
