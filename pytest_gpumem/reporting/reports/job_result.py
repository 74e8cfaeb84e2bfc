"""Return a job's result in Markdown, from a session's report or the JSON from `gpumem ab` or `gpumem bisect`. Pure.

The JSON may come from a stranger's pull request, so texts are escaped and unexpected content raises an error.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.base.units import counted, format_ratio
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports import escaping
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.reporting.reports.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from pytest_gpumem.reporting.reports.session_report import SessionReport

MOST_BYTES = 32 * 2**20
"""The maximum size of a JSON file in bytes. Larger files are refused, because parsing needs several times their size."""
_MOST_ROWS = 50
_MOST_OF_A_TEXT = 1_000
_SHOWN = {Outcome.REGRESSED.value, Outcome.IMPROVED.value, Outcome.UNCERTAIN.value, Outcome.STALE.value}


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
        return _of_bisection(_checked(plain, name, "bisect"))
    if isinstance(plain, dict) and "not_compared" in plain:
        return _of_comparison(_checked(plain, name, "ab"))
    report = from_json(text, name)
    return JobResult(report.passed, lambda most: markdown(report, most=most), session=report)


_TEXT = {"type": "string"}
_NO_NUMBER = ("Infinity", "-Infinity", "NaN")
_NUMBER = {"anyOf": [{"type": "number", "minimum": -1e18, "maximum": 1e18}, {"enum": [None, *_NO_NUMBER]}]}
_FORMAT = {"const": 1}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _schemas() -> dict[str, dict[str, Any]]:
    """Return a schema for each command's JSON. A schema checks only the keys read by this module."""
    release = {"type": ["string", "null"]}
    metric = _object(
        {
            "metric": {"enum": list(METRICS)},
            "outcome": {"enum": [outcome.value for outcome in Outcome]},
            "base": _NUMBER,
            "head": _NUMBER,
            "ratio": _NUMBER,
        }
    )
    return {
        "bisect": _object({"format": _FORMAT, "found": {"type": "boolean"}}, result=_TEXT, why=_TEXT, test=release),
        "ab": _object(
            {
                "format": _FORMAT,
                "accounting": _TEXT,
                "passed": {"type": "boolean"},
                "tests": _array(_object({"file": _TEXT, "test": _TEXT, "metrics": _array(metric)})),
                "not_compared": _array(_object({"test": _TEXT, "reason": release})),
            },
            why=_TEXT,
            packages=_array(_object({"name": _TEXT, "base": release, "head": release})),
        ),
    }


@functools.cache
def _validator(command: str) -> Callable[[Any], Any]:
    import fastjsonschema

    validator: Callable[[Any], Any] = fastjsonschema.compile(_schemas()[command], use_default=False)
    return validator


def _checked(plain: dict[str, Any], name: str, command: str) -> dict[str, Any]:
    from fastjsonschema import JsonSchemaValueException

    try:
        _validator(command)(plain)
    except JsonSchemaValueException as error:
        path = escaping.visible(str(error.name)[:_MOST_OF_A_TEXT].removeprefix("data.").removeprefix("data"))
        wrong = f"its {path} is" if path else "it is"
        raise ReportError(f"{name}: {wrong} not what this version's `gpumem {command} --report` writes") from None
    return plain


def _of_bisection(plain: dict[str, Any]) -> JobResult:
    if not plain["found"]:
        why = _plain(_first_line(plain.get("why", "")))
        return JobResult(passed=False, markdown=_fitting([f"### gpumem bisect: nothing was found\n\n{why}"]))
    title = _cut(escaping.visible(escaping.one_line(plain.get("result", ""))))
    test = f"\n\nSearched with {escaping.code(_cut(plain['test']))}." if plain.get("test") else ""
    return JobResult(passed=False, markdown=_fitting([f"### gpumem bisect\n\n{_plain(title)}.{test}"]), title=title)


def _of_comparison(plain: dict[str, Any]) -> JobResult:
    accounting = plain["accounting"].removeprefix("gpumem ab: ") or "nothing was compared"
    head = [f"### gpumem ab: {_plain(accounting)}"]
    if why := _first_line(plain.get("why", "")):
        head.append(_plain(why))
    packages = [
        f"{package['name']} {package['head'] or 'gone'}, was {package['base'] or 'not there'}"
        for package in plain.get("packages", ())
    ]
    if packages:
        head.append(f"Packages: {_plain('; '.join(packages))}")
    rows = list(_rows(plain))
    notes = [
        f"- {_plain(test['test'])}: {_plain(test['reason'])}"
        for test in plain["not_compared"]
        if test["reason"] is not None
    ]
    table = [escaping.table(["test", "metric", "base", "head", "change", "verdict"], rows[:_MOST_ROWS], (0, 1, 5))]
    more = [f"{counted(len(rows) - _MOST_ROWS, 'more row')} in the whole report."] if len(rows) > _MOST_ROWS else []
    parts = [*head, *(table if rows else []), *more, *(["\n".join(notes[:_MOST_ROWS])] if notes else [])]
    return JobResult(plain["passed"], _fitting(parts))


def _rows(plain: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each changed metric."""
    for test in plain["tests"]:
        for change in test["metrics"]:
            if change["outcome"] in _SHOWN:
                metric = change["metric"]
                base, head, ratio = (_finite(change[key]) for key in ("base", "head", "ratio"))
                yield [
                    escaping.code_in_table(_cut(f"{test['file']}::{test['test']}")),
                    METRICS[metric].title,
                    shown(metric, base, "si"),
                    shown(metric, head, "si"),
                    "" if ratio is None else format_ratio(ratio - 1),
                    change["outcome"],
                ]


def _finite(plain: float | str | None) -> float | None:
    return None if isinstance(plain, str) else plain


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
