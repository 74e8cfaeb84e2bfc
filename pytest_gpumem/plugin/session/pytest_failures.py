"""Shorten a failure in pytest's own report if an earlier failure shows the same cause in full.

For example, in the example project six tests fail because of ``blocks.*.attention`` at ``tiny_models/gpt.py:38``. The first
failure shows this cause in full. The other five are short and name the first test.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import counted
from pytest_gpumem.reporting.reports.short_failures import short_failures
from pytest_gpumem.reporting.reports.view import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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
    """Do not show some failures in pytest's report and in its summary, but only their number.

    ``stats`` keeps them for other plugins.
    """
    left_out = set(map(id, failures))
    more = f"... and {counted(len(failures), 'more failure')} that the causes in the table explain (-v shows all)"

    def shortened(section: Callable[[], None]) -> Callable[[], None]:
        def show() -> None:
            all_failures = reporter.stats["failed"]
            reporter.stats["failed"] = [failure for failure in all_failures if id(failure) not in left_out]
            try:
                section()
            finally:
                reporter.stats["failed"] = all_failures
            reporter.write_line(more)

        return show

    if reporter.config.option.tbstyle != "no":
        reporter.summary_failures = shortened(reporter.summary_failures)
    if reporter.hasopt("f"):
        reporter.short_test_summary = shortened(reporter.short_test_summary)


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
