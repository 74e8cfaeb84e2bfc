"""Return a job's result in Markdown, from a session's report or the JSON from `gpumem ab` or `gpumem bisect`. Pure.

The JSON may come from a stranger's pull request, so texts are escaped and unexpected content raises an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.base.units import counted, format_ratio
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.annotations import Excerpt, Form
from pytest_gpumem.facts.values.figures import MetricName
from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.facts.values.plain_error import PlainError
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports import escaping
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.reporting.reports.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

    from pytest_gpumem.reporting.reports.session_report import SessionReport

MOST_BYTES = 32 * 2**20
"""The maximum size of a JSON file in bytes. Larger files are refused, because parsing needs several times their size."""
_MOST_ROWS = 50
_MOST_OF_A_TEXT = 1_000
_LARGEST = 10**18
_SHOWN = {Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.STALE}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result, read from a JSON file."""

    passed: bool
    markdown: Callable[[int], str] = field(repr=False)
    """Returns the Markdown in at most the given number of bytes."""
    title: str | None = None
    """A sentence on the change found by `gpumem bisect`; ``None`` for other files."""
    session: SessionReport | None = None
    """The session's report; ``None`` for a file from `gpumem ab` or `gpumem bisect`."""


def job_result(text: str, name: str) -> JobResult:
    """Return the job's result from the text of a JSON file.

    Args:
        text: The file's content.
        name: The file's name, for errors.

    Raises:
        ReportError: The file has unexpected content. No other exception is raised.
    """
    try:
        plain = json.loads(text.removeprefix("\ufeff"), parse_constant=_refused)
    except (ValueError, RecursionError):
        plain = None
    if isinstance(plain, dict) and "found" in plain:
        return _of_bisection(_read(_Bisection, plain, name, "bisect"))
    if isinstance(plain, dict) and "not_compared" in plain:
        return _of_comparison(_read(_Comparison, plain, name, "ab"))
    report = from_json(text, name)
    return JobResult(report.passed, lambda most: markdown(report, most=most), session=report)


def _limited(figure: float) -> float | None:
    if not math.isfinite(figure):
        return None
    if abs(figure) > _LARGEST:
        raise ValueError(f"the number is larger than {_LARGEST}")
    return figure


_Figure = Annotated[float, Form(float, lambda figure: figure, _limited)] | None


@dataclass(frozen=True)
class _Bisection(Excerpt):
    format: Literal[1]
    found: bool
    result: str = ""
    why: str = ""
    test: str | None = None


@dataclass(frozen=True)
class _Change(Excerpt):
    metric: MetricName
    outcome: Outcome
    base: _Figure
    head: _Figure
    ratio: _Figure


@dataclass(frozen=True)
class _Test(Excerpt):
    file: str
    test: str
    metrics: tuple[_Change, ...]


@dataclass(frozen=True)
class _NotCompared(Excerpt):
    test: str
    reason: str | None


@dataclass(frozen=True)
class _Package(Excerpt):
    name: str
    base: str | None
    head: str | None


@dataclass(frozen=True)
class _Comparison(Excerpt):
    format: Literal[1]
    accounting: str
    passed: bool
    tests: tuple[_Test, ...]
    not_compared: tuple[_NotCompared, ...]
    why: str = ""
    packages: tuple[_Package, ...] = ()


def _read(kind: Callable[..., _T], plain: dict[str, Any], name: str, command: str) -> _T:
    try:
        return from_plain(kind, plain)
    except PlainError as error:
        wrong = f"its {escaping.visible(error.path)} is" if error.path else "it is"
        raise ReportError(f"{name}: {wrong} not what this version's `gpumem {command} --report` writes") from None


def _of_bisection(bisection: _Bisection) -> JobResult:
    if not bisection.found:
        why = _plain(_first_line(bisection.why))
        return JobResult(passed=False, markdown=_fitting([f"### gpumem bisect: nothing was found\n\n{why}"]))
    title = _cut(escaping.visible(escaping.one_line(bisection.result)))
    test = f"\n\nSearched with {escaping.code(_cut(bisection.test))}." if bisection.test else ""
    return JobResult(passed=False, markdown=_fitting([f"### gpumem bisect\n\n{_plain(title)}.{test}"]), title=title)


def _of_comparison(comparison: _Comparison) -> JobResult:
    accounting = comparison.accounting.removeprefix("gpumem ab: ") or "nothing was compared"
    head = [f"### gpumem ab: {_plain(accounting)}"]
    if why := _first_line(comparison.why):
        head.append(_plain(why))
    packages = [
        f"{package.name} {package.head or 'gone'}, was {package.base or 'not there'}" for package in comparison.packages
    ]
    if packages:
        head.append(f"Packages: {_plain('; '.join(packages))}")
    rows = list(_rows(comparison))
    notes = [
        f"- {_plain(test.test)}: {_plain(test.reason)}" for test in comparison.not_compared if test.reason is not None
    ]
    table = [escaping.table(["test", "metric", "base", "head", "change", "verdict"], rows[:_MOST_ROWS], (0, 1, 5))]
    more = [f"{counted(len(rows) - _MOST_ROWS, 'more row')} in the whole report."] if len(rows) > _MOST_ROWS else []
    parts = [*head, *(table if rows else []), *more, *(["\n".join(notes[:_MOST_ROWS])] if notes else [])]
    return JobResult(comparison.passed, _fitting(parts))


def _rows(comparison: _Comparison) -> Iterator[list[str]]:
    """Yield a row for each changed metric."""
    for test in comparison.tests:
        for change in test.metrics:
            if change.outcome in _SHOWN:
                yield [
                    escaping.code_in_table(_cut(f"{test.file}::{test.test}")),
                    METRICS[change.metric].title,
                    shown(change.metric, change.base, "si"),
                    shown(change.metric, change.head, "si"),
                    "" if change.ratio is None else format_ratio(change.ratio - 1),
                    change.outcome.value,
                ]


def _refused(text: str) -> NoReturn:
    raise ValueError(f"JSON has no number {text}")


def _fitting(parts: list[str]) -> Callable[[int], str]:
    """Return a function that joins ``parts`` up to a maximum number of bytes.

    The parts at the end are omitted first, and no part is cut.
    """

    def joined(most: int) -> str:
        text = ""
        for part in parts:
            longer = f"{text}\n\n{part}" if text else part
            if len(longer.encode()) > most:
                return f"{text}\n\nThe text is shortened, because the full text would be too long.\n"
            text = longer
        return f"{text}\n"

    return joined


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_OF_A_TEXT else f"{text[:_MOST_OF_A_TEXT]} ..."


def _plain(text: str) -> str:
    return escaping.plain(_cut(text))
