"""Shorten failures in pytest's own report if another test's failure shows the same cause in full.

For example, in the example project six tests fail because of ``blocks.*.attention`` at ``tiny_models/gpt.py:38``. The first
failure shows this cause in full. The other five are short and name the first test.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import counted
from pytest_gpumem.reporting.reports.causes import causes_in
from pytest_gpumem.reporting.reports.short_failures import short_failures
from pytest_gpumem.reporting.reports.view import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import pytest

    from pytest_gpumem.reporting.reports.session_report import SessionReport

MOST_SHORT = 20
"""The most shortened failures in pytest's report. If there are more, pytest shows only their number, or all with ``-v``."""


def shorten_repeated_failures(reporter: Any, report: SessionReport) -> None:
    """Let pytest show each cause in one failure only. Other plugins already got the whole texts, and -vv shows them.

    Args:
        reporter: pytest's terminal reporter, before it shows failures.
        report: The session.
    """
    verbosity = reporter.config.get_verbosity()
    if verbosity > 1:
        return
    verdicts = {result.verdict.nodeid: result.verdict for result in report.results if result.verdict.failure}
    # A subtest's failure has its test's id.
    failures = {
        failure.nodeid: failure
        for failure in reporter.stats.get("failed", ())
        if failure.nodeid in verdicts and headline(verdicts[failure.nodeid].failure or "") in failure.longreprtext
    }
    # pytest shows failures in this order.
    failed = [verdicts[nodeid] for nodeid in failures]
    texts = short_failures(causes_in(report).causes, failed, report.terms.units)
    for nodeid, text in texts.items():
        failures[nodeid].longrepr = ShortFailure(text)
    if len(texts) > MOST_SHORT and not verbosity:
        _leave_out(reporter, [failures[nodeid] for nodeid in texts])


def _leave_out(reporter: Any, failures: Collection[pytest.TestReport]) -> None:
    """Replace failures in both of pytest's lists by a line with their number. ``stats`` keeps them for other plugins."""
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
    """A failure in pytest's report, as text. pytest's summary shows the first line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.reprcrash = SimpleNamespace(message=text.partition("\n")[0])

    def __str__(self) -> str:
        return self._text

    def toterminal(self, writer: Any) -> None:
        """Write the text, as pytest expects from a failure."""
        for line in self._text.split("\n"):
            writer.line(line)
