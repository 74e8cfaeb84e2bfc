"""What one run of pytest in a worktree gave, read from what the collector wrote. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from pytest_gpumem.reports.results import PROPERTY, Results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.gate.verdict import TestVerdict

Side = Literal["base", "head"]
BASE: Side = "base"
HEAD: Side = "head"
Key = tuple[str, str]
"""A test: its file and its id in it."""


class RunFailed(Exception):
    """A run gave nothing that could be compared; the message says why, and what mends it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The measured tests of one run of a revision. ``root`` is pytest's root directory."""

    side: Side
    tests: Mapping[Key, TestVerdict]
    root: str

    @property
    def measured(self) -> int:
        """How many tests gave figures."""
        return sum(not verdict.unmeasured and bool(verdict.verdicts) for verdict in self.tests.values())


def run_of(side: Side, lines: Iterable[str], status: int) -> Run:
    """The run in ``lines``, which ended with pytest's exit ``status`` (a negative number is the signal that ended it).

    Raises `RunFailed` when it ended before its tests had run, or ran another code than that of its revision.
    """
    reports, end = _read(lines)
    if end is None or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RunFailed(_why_it_ended(status))
    foreign_modules: Mapping[str, str] = end["foreign_modules"]
    if foreign_modules:
        raise RunFailed(_foreign_code(foreign_modules))
    results = Results()
    try:
        for report in reports:
            results.add(cast("pytest.TestReport", report))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFailed(
            f"its pytest-gpumem is of another version, whose figures this one cannot read: {error!r}"
        ) from None
    verdicts = [result.verdict for result in results.all()]
    return Run(side, {(verdict.file, verdict.test): verdict for verdict in verdicts}, end["root"])


def _read(lines: Iterable[str]) -> tuple[list[SimpleNamespace], dict[str, Any] | None]:
    """The reports that were written, and what was written at the end of the session."""
    reports: list[SimpleNamespace] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            # Cut off when the process was killed.
            break
        if "status" in line:
            return reports, line
        report = SimpleNamespace(
            nodeid=line["nodeid"],
            when=line["when"],
            outcome=line["outcome"],
            user_properties=[(PROPERTY, line["verdict"])],
        )
        if line["xfail"]:
            report.wasxfail = ""
        reports.append(report)
    return reports, None


_ENDS = {
    pytest.ExitCode.INTERRUPTED: "pytest could not collect the tests, or was interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "pytest had an internal error",
    pytest.ExitCode.USAGE_ERROR: "pytest did not understand its arguments or settings",
    pytest.ExitCode.NO_TESTS_COLLECTED: "pytest collected no tests",
}


def _why_it_ended(status: int) -> str:
    if status < 0:
        return f"pytest was ended by signal {-status}"
    told = _ENDS.get(cast("pytest.ExitCode", status))
    return f"{told} (exit status {status})" if told else f"pytest ended with exit status {status} before its end"


def _foreign_code(foreign_modules: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name} from {file}" for name, file in list(foreign_modules.items())[:3])
    more = f" and {len(foreign_modules) - 3} more" if len(foreign_modules) > 3 else ""
    return (
        f"it did not run the code of its revision: it imported {shown}{more}. "
        "A project that is installed in editable mode is imported from there: install each revision before its runs "
        "(--setup 'pip install -e .'), uninstall it, or let PYTHONPATH lead to the code by a path relative to the "
        "folder of the run"
    )
