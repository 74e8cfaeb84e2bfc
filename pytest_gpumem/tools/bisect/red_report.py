"""Find the first regressed test in a report, and the packages whose releases differ between its good and its bad run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import NothingToSearch, ReportError
from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import UNKNOWN_RELEASE, Outcome
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.tools.bisect.candidates import ADDRESS_PREFIX
from pytest_gpumem.tools.bisect.driver import JUDGED_METRICS, STEP_TIME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.judging.gate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RegressedTest:
    """A measurement that regressed.

    ``good_releases`` and ``bad_releases`` contain the old and the new release of each package that differs, by name. ``gated``
    is True if the measurement was compared with a baseline. Then a commit may also be the cause. ``gated`` is False if
    `gpumem ab` compared two variants. Then only packages are searched.
    """

    key: Key
    slug: str
    metrics: tuple[str, ...]
    """The metrics that regressed."""
    good_releases: Mapping[str, str] = field(default_factory=dict)
    bad_releases: Mapping[str, str] = field(default_factory=dict)
    gated: bool = False
    other_tests: int = 0
    """The number of other regressed tests."""

    @property
    def nodeid(self) -> str:
        return f"{self.key.file}::{self.key.test}"

    @property
    def metric(self) -> str | None:
        """The metric to search by: ``step_time`` if only the time regressed; ``None`` if the search chooses the metric."""
        return None if {*self.metrics} & {*JUDGED_METRICS} - {STEP_TIME} else STEP_TIME

    @property
    def notes(self) -> list[str]:
        """Clauses about the search: the test that runs, and the number of other regressed tests."""
        other_tests = f"; {counted(self.other_tests, 'other test')} also regressed" if self.other_tests else ""
        return [f"searched with {self.nodeid}, the first test that regressed{other_tests}"]


def regressed_test_of(text: str, name: str) -> RegressedTest:
    """Return the first regressed test in a report. Tests whose bytes or counts regressed come before tests of which only the
    time regressed.

    Args:
        text: The JSON report from a session or from ``gpumem ab``.
        name: The file's name for messages.

    Raises:
        ReportError: The text is not a report.
        NothingToSearch: No test regressed.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        plain = None
    of_ab = isinstance(plain, dict) and "not_compared" in plain
    try:
        regressed = list(_in_comparison(plain)) if of_ab else list(_in_session(text, name))
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{name}: this file is not a report from this version of gpumem ab: {error!r}") from None
    if not regressed:
        raise NothingToSearch(f"no test in {name} regressed, so there is nothing to search for{_why(plain)}")
    # Prefer a test with worse bytes or counts, which repeat exactly. So a single run per candidate is enough.
    first = next((red for red in regressed if red.metric is None), regressed[0])
    other_tests = len({red.nodeid for red in regressed} - {first.nodeid})
    return RegressedTest(
        first.key, first.slug, first.metrics, first.good_releases, first.bad_releases, first.gated, other_tests
    )


def _why(plain: Any) -> str:
    """Return why a report failed without a regression, as ``"; <reason>"``, or an empty text if no reason is known."""
    if not isinstance(plain, dict):
        return ""
    broken = [test for test in plain.get("not_compared", ()) if isinstance(test, dict) and test.get("broken")]
    reasons = (
        [plain["why"].splitlines()[0]] if plain.get("why") else [f"{test['test']}: {test['reason']}" for test in broken]
    )
    return f"; {reasons[0]}" if reasons else ""


def _in_comparison(plain: dict[str, Any]) -> Iterator[RegressedTest]:
    """Yield the regressed measurements in a report from ``gpumem ab``."""
    packages = [
        package for package in plain.get("packages", ()) if package["base"] is not None and package["head"] is not None
    ]
    # Leave out dependencies that changed along with a requested package, because they may not be installable separately.
    requested = [package for package in packages if package["requested"]] or packages
    good = {package["name"]: package["base"] for package in requested}
    bad = {
        package["name"]: f"{ADDRESS_PREFIX}{package['url']}" if package["url"] else package["head"]
        for package in requested
    }
    for test in plain["tests"]:
        if test["outcome"] == Outcome.REGRESSED.value:
            metrics = tuple(
                change["metric"] for change in test["metrics"] if change["outcome"] == Outcome.REGRESSED.value
            )
            yield RegressedTest(Key(test["file"], test["test"], test["name"]), "", metrics, good, bad)


def _in_session(text: str, name: str) -> Iterator[RegressedTest]:
    """Yield the regressed measurements in a session's report."""
    for result in from_json(text, name).results:
        for verdict in result.verdict.verdicts:
            metrics = tuple(_regressed(verdict))
            if metrics:
                measurement = verdict.measurement
                key = Key(result.verdict.file, result.verdict.test, measurement.name)
                yield RegressedTest(key, measurement.environment.slug, metrics, *_releases(verdict), gated=True)


def _regressed(verdict: Verdict) -> Iterable[str]:
    return (
        metric.metric
        for metric in verdict.metrics
        if metric.outcome is Outcome.REGRESSED and metric.allowed is not None
    )


def _releases(verdict: Verdict) -> tuple[dict[str, str], dict[str, str]]:
    """Return the packages whose releases differ: each package's release in the baseline, and its release in the session."""
    if verdict.origin is None:
        return {}, {}
    torch = {} if verdict.origin.torch == UNKNOWN_RELEASE else {"torch": verdict.origin.torch}
    old, new = {**verdict.origin.packages, **torch}, verdict.measurement.environment.releases
    differ = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    return {name: old[name] for name in differ}, {name: new[name] for name in differ}
