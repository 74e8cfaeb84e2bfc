"""A session's report in GitHub's Markdown: for a file, a job's summary and a comment in a pull request. Pure.

The most important parts are first. Where there is not room for all, whole parts are left out, and the last line names them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import unused_line
from pytest_gpumem.gate.verdict import CHANGED, FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.causes import causes_in, causes_in_markdown
from pytest_gpumem.reports.escaping import block, code, code_in_table, details, html_code, plain, table
from pytest_gpumem.reports.explanation import explained, grown_counts
from pytest_gpumem.reports.layout import without_empty
from pytest_gpumem.reports.matrix import legend_of, matrices, matrix_cells
from pytest_gpumem.reports.places import first_row
from pytest_gpumem.reports.ranks import peaks_by_rank, rank_cells
from pytest_gpumem.reports.summary import device_lines, reasons
from pytest_gpumem.reports.told_causes import told_before
from pytest_gpumem.reports.values import change, peaks_by_device, shown, texts_of
from pytest_gpumem.reports.view import measured_in, origin_line, rows_of, state_of
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pytest_gpumem.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.reports.explanation import PartTable
    from pytest_gpumem.reports.matrix import MatrixRow
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import ReportRow, ShownMeasurement
    from pytest_gpumem.units import UnitSystem

MOST_OF_A_SUMMARY = 2**20
"""Bytes of a step's summary. Of more GitHub shows nothing, and reports an error:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits."""
MOST_OF_A_COMMENT = 65_536
"""Characters of a comment; with more it is refused: ``Body is too long (maximum is 65536 characters)``."""
MOST_FOLDED = 50
"""Tests that are listed where others tell their causes."""
FEWEST = 300
"""Bytes in which a verdict always has room."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the report that can be left out whole: those of the highest ``rank`` first, of one rank the last first."""

    rank: int
    what: str
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
"""The end of a line within a paragraph."""
_VERDICTS = {"passed": "✅ gpumem passed", "failed": "❌ gpumem failed", "idle": "⚪ gpumem gated nothing"}


def markdown(report: SessionReport, *, most: int | None = None) -> str:
    r"""Return GitHub's Markdown.

    Its parts are: the verdict and the accounting line; other reasons for a red session; the causes; each test that failed,
    with the first row of its explanation, and with its metrics, the growth and the accepting command folded away; changes
    that fail nothing; reasons why something was not compared; the store; and, folded away, all measured tests, the matrices
    and the environment.

    A comment holds 65,536 characters and a step's summary 1 MiB. If there is no room, whole parts are left out, the table of
    all tests first, and the last line names them. The verdict is never left out. Texts of tests are shown character by
    character: invisible characters, and characters that change others, are written as in Python: ``\n``, ``\x1b``,
    ``\u202e``.

    Args:
        report: The report.
        most: The room in bytes of UTF-8; no limit by default.

    Raises:
        ValueError: ``most`` is too little for the verdict.
    """
    if most is not None and most < FEWEST:
        raise ValueError(f"most is {most}, and a verdict needs {FEWEST} bytes")
    parts = list(_parts(report))
    text = _joined(parts, [])
    if most is None or _size(text) <= most:
        return text
    kept = dict(enumerate(parts))
    left_out: list[_Part] = []
    # Sizes are added up, so that a report of many tests is not joined over and over.
    size = sum(_size(part.text) + 2 for part in parts)
    for number in sorted(kept, key=lambda number: (-parts[number].rank, -number)):
        if parts[number].rank == _HEAD or size + _size(_omitted(left_out)) <= most:
            break
        left_out.append(kept.pop(number))
        size -= _size(left_out[-1].text) + 2
    text = _joined(list(kept.values()), left_out)
    # An accounting line of kilobytes: reasons that tests gave.
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
    others = [row for row in rows if not row.status.fails]
    changed = _changed_table([one for row in others for one in row.measured], units)
    if changed:
        title = "Changed, and not failed for it"
        yield _Part(_CHANGED, "what changed without failing", f"#### {title}\n\n{changed}")
    why_not = reasons(
        (result.verdict for result in report.results if not result.failed), report.terms.units, report.terms.update
    )
    why_not += report.of_measuring
    if why_not:
        yield _Part(_NOT_COMPARED, "what was not compared", "\n".join(f"- {plain(reason)}" for reason in why_not))
    unused = [unused_line(report.unused)] if report.unused and report.passed else []
    store = [*report.of_store, *report.warnings, *unused]
    if store:
        yield _Part(_STORE, "what became of the store", "\n".join(f"- {plain(one)}" for one in store))
    every = _all_tests(rows, units)
    if every:
        yield _Part(_ALL, "the table of all tests", details("All measured tests", every))
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
        cells = [[code_in_table(name), *map(plain, others)] for name, *others in lines]
        found = table(header, cells, (0, len(header) - 1))
        yield _Part(_RANKS, "the table of ranks", details("Peaks of ranks", found))


def _figures(row: ReportRow, units: UnitSystem) -> str:
    """Return the metrics of a test, what explains them, and the command that accepts them."""
    found = []
    for measured in row.measured:
        one = measured.verdict
        if len(row.measured) > 1:
            found.append(f"**{plain(one.measurement.name)}**")
        found.append(_metrics(measured, units))
        found += _explained(one, units)
        notes = [*(metric.reason for metric in one.metrics if metric.reason), *one.measurement.notes]
        by_device = peaks_by_device(one.measurement, units)
        notes += [] if by_device is None else [by_device]
        if notes:
            found.append("\n".join(f"- {plain(note)}" for note in dict.fromkeys(notes)))
        if one.origin is not None:
            found.append(f"Baseline: {plain(origin_line(one.origin, reason=True))}")
    if row.bisect:
        found.append(f"To find the package that did it:\n\n{block(row.bisect)}")
    if row.accept:
        found.append(f"To accept it:\n\n{block(row.accept)}")
    return "\n\n".join(found)


def _omitted(left_out: list[_Part]) -> str:
    if not left_out:
        return "*The rest has no room here; the JSON and HTML reports have it.*"
    words = []
    for rank, parts in groupby(sorted(left_out, key=lambda part: part.rank), key=lambda part: part.rank):
        same = list(parts)
        words.append(same[0].what if len(same) == 1 else f"{len(same)} {_MANY[rank]}")
    return f"*Left out for want of room: {', '.join(words)}. The JSON and HTML reports have it all.*"


def _joined(parts: list[_Part], left_out: list[_Part]) -> str:
    texts = [part.text for part in parts]
    return "\n\n".join([*texts, *([_omitted(left_out)] if left_out else [])]) + "\n"


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def _metrics(measured: ShownMeasurement, units: UnitSystem) -> str:
    """Return the table of a measurement's metrics."""
    rows = [
        [
            *map(plain, astuple(texts_of(one, units))[:-1]),
            "" if one.outcome is Outcome.RECORDED else _loud(measured, one.outcome),
        ]
        for one in measured.verdict.metrics
    ]
    header, rows = without_empty(_METRICS, rows, (0, 2, 6))
    return table(header, rows, (0, len(header) - 1))


def _loud(measured: ShownMeasurement, outcome: Outcome) -> str:
    words = measured.words_of(outcome)
    return f"**{words}**" if outcome in FAILING - measured.accepted else words


def _explained(verdict: Verdict, units: UnitSystem) -> list[str]:
    """Return tables of what was left behind, what grew or is there at the peak, and the operators of grown counts."""
    metrics = ("retained", "peak_allocated", "cyclic_garbage", *grown_counts(verdict))
    found: list[str] = []
    for one in explained(verdict, metrics, units):
        found += map(plain, one.table.first)
        if one.table.parts or one.table.changes:
            found.append(_part_table(one.table))
        if one.lines or one.notes:
            found.append("\n".join(f"- {plain(line)}" for line in (*one.lines, *one.notes)))
    return found


def _part_table(of: PartTable) -> str:
    name = plain if of.of_blocks else code_in_table
    why = ["why"] if of.changes else []
    header = [
        plain(of.title),
        *of.figures,
        *("module", "line", "operator", "tensors")[: 4 if of.of_blocks else 2],
        *why,
    ]
    rows = [
        [
            name(part.name),
            *map(plain, part.figures),
            *map(code_in_table, part.places),
            *([plain(part.reason)] if why else []),
        ]
        for part in of.parts
    ]
    if of.others:
        first = [of.others, *[""] * (len(of.figures) - 1), of.rest] if of.of_blocks else [plain(of.rest_line)]
        rows.append([*first, *[""] * (len(header) - len(first))])
    numbers = range(1, 1 + len(of.figures))
    found = table(header, rows, tuple(number for number in range(len(header)) if number not in numbers))
    return f"{found}\n\n{plain(of.note)}" if of.note else found


def _failed(report: SessionReport, rows: Sequence[ReportRow]) -> Iterator[_Part]:
    """Yield the causes of what grew, where there are several tests, and each test that failed; folded where others tell it."""
    found, units = causes_in(report), report.terms.units
    verdicts = [row.result.verdict for row in rows if row.result is not None]
    before: Collection[str] = ()
    if found.tell:
        yield _Part(_CAUSES, "the causes", f"#### Causes\n\n{causes_in_markdown(found, units)}")
        before = told_before(found.causes, verdicts)
    folded = [row for row in rows if row.result is not None and row.result.verdict.nodeid in before]
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
        title = f"❌ {counted(len(folded), 'more test')} that failed by these causes only"
        yield _Part(_FAILED, "the tests that failed by the same causes", details(title, "\n".join(lines)))


def _changed_table(measured: Iterable[ShownMeasurement], units: UnitSystem) -> str:
    """Return the table of the metrics that changed; empty where none did."""
    rows = [
        [code_in_table(each.title), *map(plain, astuple(texts_of(one, units))[:4]), _loud(each, one.outcome)]
        for each in measured
        for one in each.verdict.metrics
        if one.outcome in CHANGED
    ]
    return table(["test", "metric", "baseline", "now", "change", "verdict"], rows, (0, 1, 5)) if rows else ""


def _all_tests(tests: Sequence[ReportRow], units: UnitSystem) -> str:
    """Return a table with a row for each measurement, and one for each test that has none; empty where there is no test."""
    verdicts = [one.verdict for row in tests for one in row.measured]
    known = {name: [found for verdict in verdicts if (found := verdict.of(name)) is not None] for name in METRICS}
    used = [
        name
        for name, metric in METRICS.items()
        if metric.has_column(
            [one.value for one in known[name]], changed=any(one.outcome in CHANGED for one in known[name])
        )
    ]
    lines = []
    for row in tests:
        for one in row.measured:
            cells = [cell for name in used for cell in _value_and_change(one.verdict.of(name), units)]
            lines.append([code_in_table(one.title), *cells, _loud(one, one.outcome)])
        if row.result is not None and not row.measured:
            test = row.result.verdict
            why = "held by relations" if test.relations and not test.unmeasured else plain(test.outcome.words)
            lines.append([code_in_table(row.title), *[""] * (2 * len(used)), why])
    header = ["test", *(cell for name in used for cell in (METRICS[name].title, "change")), "verdict"]
    # Where nothing was compared, no column of changes.
    header, lines = without_empty(header, lines, [at for at, title in enumerate(header) if title != "change"])
    peaks = [f"- {plain(line)}" for line in device_lines((one for row in tests for one in row.measured), units)]
    every = table(header, lines, (0, len(header) - 1)) if lines else ""
    return "\n".join([every, "", *peaks]) if peaks else every


def _value_and_change(one: MetricVerdict | None, units: UnitSystem) -> tuple[str, str]:
    return ("", "") if one is None else (plain(shown(one.metric, one.value, units, one.of)), change(one, units))


def _matrix_table(rows: Sequence[MatrixRow], units: UnitSystem) -> str:
    """Return a table of step configs, and a line on its columns."""
    header, cells = matrix_cells(rows, units)
    lines = [[code_in_table(config), *map(plain, others)] for config, *others in cells]
    found = table(["config", *header], lines, (0, len(header)))
    legend = legend_of(rows)
    return f"{found}\n\n{plain(legend)}" if legend else found


def _environment(report: SessionReport) -> str:
    """Return a table of the versions and devices of the session, and when it ended."""
    rows = [["ended", code_in_table(report.ended)], ["pytest-gpumem", code_in_table(report.version)]]
    if report.commit:
        rows.append(["commit", code_in_table(report.commit)])
    if report.shards > 1:
        rows.append(["shards", str(report.shards)])
    seen: list[Environment] = []
    for one in measured_in(report.results):
        environment = one.verdict.measurement.environment
        if environment in seen:
            continue
        seen.append(environment)
        rows.append(["device", plain(environment.device)])
        rows += [[plain(name), plain(str(value))] for name, value in environment.details.items()]
    return table(["", ""], rows, (0, 1))
