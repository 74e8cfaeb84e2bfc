"""Recorded times (``results/<cpu>/time-samples*.json``): what each round of a run took, and what was read around it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_COUNTERS = {"at": 1e-4, "waited": 1e-5, "stolen": 0.01, "others": 0.01}
"""Counters of a reading that only grow, and the seconds that they are kept in; the last two are counted in ticks of 10 ms."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading before the first round or after one: when, as counters of seconds, and the machine's pace."""

    at: float
    pace: float
    waited: float | None = None
    stolen: float | None = None
    others: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Rounds of one step in one run, one after another. The first was of one step, the others of ``steps``.

    ``seconds`` a step; of ``readings`` there is one more than of rounds.
    """

    steps: int
    seconds: tuple[float, ...]
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One process: every step once. ``block`` and ``place`` tell which runs were neighbours.

    Planted were ``percent`` more of the step's own work, and a busy wait of ``wait`` percent of its time.
    """

    load: str
    block: int
    place: int
    percent: int
    began: float
    series: Mapping[str, Series]
    """By step."""
    wait: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether nothing was planted."""
        return self.percent == self.wait == 0


@dataclass(frozen=True, slots=True)
class Recording:
    """Runs on one machine, in the order in which they were recorded."""

    machine: Mapping[str, str]
    cores: int
    runs: tuple[Run, ...]


def read(path: Path) -> Recording:
    """Return the recording in a file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return Recording(document["machine"], document["cores"], tuple(map(_run, document["runs"])))


def _run(plain: Mapping[str, Any]) -> Run:
    series = {name: _series(one) for name, one in plain["series"].items()}
    return Run(
        plain["load"], plain["block"], plain["place"], plain["percent"], plain["began"], series, plain.get("wait", 0)
    )


def _series(plain: Mapping[str, Any]) -> Series:
    """Return the series of integers: seconds and pace with a power of ten before them, of counters the growth."""
    counters = {name: _counter(plain[name], unit) for name, unit in _COUNTERS.items()}
    readings = (Reading(pace=pace, **_at(number, counters)) for number, pace in enumerate(_values(plain["pace"])))
    return Series(plain["steps"], tuple(_values(plain["seconds"])), tuple(readings))


def _at(number: int, counters: Mapping[str, Sequence[float] | None]) -> dict[str, Any]:
    return {name: None if values is None else values[number] for name, values in counters.items()}


def _values(digits: Sequence[int]) -> list[float]:
    power, *values = digits
    return [one * 10.0**power for one in values]


def _counter(growth: Sequence[int] | None, unit: float) -> list[float] | None:
    if growth is None:
        return None
    return [total * unit for total in itertools.accumulate(growth, initial=0)]
