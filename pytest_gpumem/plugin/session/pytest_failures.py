"""Shorten a failure in pytest's own report if an earlier failure shows the same cause in full.

For example, in the example project six tests fail because of ``blocks.*.attention`` at ``tiny_models/gpt.py:38``. The first
failure shows this cause in full. The other five are short and name the first test.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import counted
from pytest_gpumem.reporting.reports.short_failures import short_failures
from pytest_gpumem.reporting.reports.view import headline

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

    from pytest_gpumem.reporting.reports.session_report import SessionReport

MOST_SHORT = 20
"""The maximum number of shortened failures in pytest's report. If there are more, pytest shows only their number. With
``-v`` it shows them all."""


def shorten_repeated_failures(reporter: Any, report: SessionReport) -> None:
    """Let pytest show each cause in only one failure. Other plugins have already got the complete texts, and -vv shows
    them.

    Args:
        reporter: pytest's terminal reporter, which has not shown the failures yet.
        report: The session's report.
    """
    verbosity = reporter.config.get_verbosity()
    if verbosity > 1:
        return
    verdicts = {result.verdict.nodeid: result.verdict for result in report.results if result.verdict.failure}
    # A subtest's failure has the same id as its test, so the failure's text is compared as well.
    failures = {
        failure.nodeid: failure
        for failure in reporter.stats.get("failed", ())
        if failure.nodeid in verdicts and headline(verdicts[failure.nodeid].failure or "") in failure.longreprtext
    }
    # Keep the order in which pytest shows the failures.
    failed = [verdicts[nodeid] for nodeid in failures]
    texts = short_failures(report.causes, failed, report.terms.units)
    for nodeid, text in texts.items():
        failures[nodeid].longrepr = ShortFailure(text)
    if len(texts) > MOST_SHORT and not verbosity:
        _leave_out(reporter, [failures[nodeid] for nodeid in texts])


def _leave_out(reporter: Any, failures: Collection[pytest.TestReport]) -> None:
    """Let pytest's report and its summary show only the number of these failures.

    pytest's own statistics are not changed, because other plugins read them. Instead, a copy of the reporter with fewer
    failures shows the two sections.
    """
    left_out = set(map(id, failures))
    more = f"... and {counted(len(failures), 'more failure')} that the causes in the table explain (-v shows all)"

    def show(section: str) -> None:
        # End an unfinished line before the reporter is copied. Otherwise the reporter and its copy would both end it.
        reporter.ensure_newline()
        copied = copy(reporter)
        shown = [failure for failure in reporter.stats["failed"] if id(failure) not in left_out]
        copied.stats = {**reporter.stats, "failed": shown}
        getattr(type(reporter), section)(copied)
        reporter.write_line(more)

    if reporter.config.option.tbstyle != "no":
        reporter.summary_failures = partial(show, "summary_failures")
    if reporter.hasopt("f"):
        reporter.short_test_summary = partial(show, "short_test_summary")


class ShortFailure:
    """A shortened failure for pytest's report. pytest's summary shows the first line of its text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.reprcrash = SimpleNamespace(message=text.partition("\n")[0])

    def __str__(self) -> str:
        return self._text

    def toterminal(self, writer: Any) -> None:
        """Write the text to the terminal. pytest calls this method to show a failure."""
        for line in self._text.split("\n"):
            writer.line(line)
