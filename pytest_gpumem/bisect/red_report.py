"""The first test that regressed in a red report, and the packages that differ from those that it was good with. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.bisect.candidates import AT
from pytest_gpumem.bisect.driver import JUDGED, TIMED, NothingFound
from pytest_gpumem.gate.baseline import Key
from pytest_gpumem.gate.verdict import UNKNOWN_RELEASE, Outcome
from pytest_gpumem.reports.errors import ReportError
from pytest_gpumem.reports.json_report import from_json
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.gate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Red:
    """A measurement that regressed. ``then`` and ``now`` are releases of packages, by name, where they differ.

    ``gated`` says that the good end is a baseline, and not a set of requirements, so that commits may have done it, too.
    """

    key: Key
    slug: str
    metrics: tuple[str, ...]
    """The metrics that regressed."""
    then: Mapping[str, str] = field(default_factory=dict)
    now: Mapping[str, str] = field(default_factory=dict)
    gated: bool = False
    others: int = 0
    """The number of other tests that regressed."""

    @property
    def nodeid(self) -> str:
        return f"{self.key.file}::{self.key.test}"

    @property
    def metric(self) -> str | None:
        """The metric to judge by; ``None`` for the first that is worse, where it is not a time alone."""
        return None if {*self.metrics} & {*JUDGED} - {TIMED} else TIMED

    @property
    def notes(self) -> list[str]:
        """Return what is to be known of the search, as clauses."""
        others = f"; {counted(self.others, 'other test')} regressed, too" if self.others else ""
        return [f"searched with {self.nodeid}, the first test that regressed{others}"]


def red_of(text: str, name: str) -> Red:
    """Return the first test that regressed in the JSON report of a session or of ``gpumem ab``; ``name`` is the file's.

    Raises `ReportError`, and `NothingFound` where none regressed.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        plain = None
    of_ab = isinstance(plain, dict) and "not_compared" in plain
    try:
        found = list(_in_comparison(plain)) if of_ab else list(_in_session(text, name))
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{name}: it is no report of this version of gpumem ab: {error!r}") from None
    if not found:
        raise NothingFound(f"no test in {name} regressed, so that there is nothing to search for{_why(plain)}")
    # Bytes and counts repeat: one run of each candidate tells them apart.
    first = next((one for one in found if one.metric is None), found[0])
    others = len({one.nodeid for one in found} - {first.nodeid})
    return Red(first.key, first.slug, first.metrics, first.then, first.now, first.gated, others)


def _why(plain: Any) -> str:
    """Return why a report is red all the same, as a clause after a semicolon; nothing where it does not say."""
    if not isinstance(plain, dict):
        return ""
    broken = [one for one in plain.get("not_compared", ()) if isinstance(one, dict) and one.get("broken")]
    told = [plain["why"].splitlines()[0]] if plain.get("why") else [f"{one['test']}: {one['reason']}" for one in broken]
    return f"; {told[0]}" if told else ""


def _in_comparison(plain: dict[str, Any]) -> Iterator[Red]:
    packages = [one for one in plain.get("packages", ()) if one["base"] is not None and one["head"] is not None]
    # What else came along is a part of what was asked for: by itself it may not even be installable.
    asked = [one for one in packages if one["requested"]] or packages
    then = {one["name"]: one["base"] for one in asked}
    now = {one["name"]: f"{AT}{one['url']}" if one["url"] else one["head"] for one in asked}
    for one in plain["tests"]:
        if one["outcome"] == Outcome.REGRESSED.value:
            metrics = tuple(each["metric"] for each in one["metrics"] if each["outcome"] == Outcome.REGRESSED.value)
            yield Red(Key(one["file"], one["test"], one["name"]), "", metrics, then, now)


def _in_session(text: str, name: str) -> Iterator[Red]:
    for result in from_json(text, name).results:
        for one in result.verdict.verdicts:
            metrics = tuple(_regressed(one))
            if metrics:
                measurement = one.measurement
                key = Key(result.verdict.file, result.verdict.test, measurement.name)
                yield Red(key, measurement.environment.slug, metrics, *_releases(one), gated=True)


def _regressed(verdict: Verdict) -> Iterable[str]:
    return (one.metric for one in verdict.metrics if one.outcome is Outcome.REGRESSED and one.allowed is not None)


def _releases(verdict: Verdict) -> tuple[dict[str, str], dict[str, str]]:
    """Return the releases of the baseline's packages and of now, of those that differ."""
    if verdict.origin is None:
        return {}, {}
    torch = {} if verdict.origin.torch == UNKNOWN_RELEASE else {"torch": verdict.origin.torch}
    then, now = {**verdict.origin.packages, **torch}, verdict.measurement.environment.releases
    differ = sorted(name for name in then.keys() & now.keys() if then[name] != now[name])
    return {name: then[name] for name in differ}, {name: now[name] for name in differ}
