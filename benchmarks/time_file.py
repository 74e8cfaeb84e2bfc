"""Recorded times: what each round of a run took and what was read around it, and the JSON file that runs are kept in."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.values.interference import Conditions

FORMAT = 1
_COUNTERS = {"at": 1e-4, "waited": 1e-5, "stolen": 0.01, "others": 0.01}
"""What a reading has that only grows, and the seconds that it is kept in; the last two are counted in ticks of 10 ms."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read before the first round and after each: when, as counters of seconds, and the machine's pace."""

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

    def to_plain(self) -> dict[str, Any]:
        """Integers, four digits of what varies: seconds and pace in units of their own, of counters the growth."""
        return {
            "steps": self.steps,
            "seconds": _digits(self.seconds),
            "pace": _digits([one.pace for one in self.readings]),
            **{name: _growth([getattr(one, name) for one in self.readings], unit) for name, unit in _COUNTERS.items()},
        }


def series_from_plain(plain: Mapping[str, Any]) -> Series:
    """The series that `Series.to_plain` turned into plain values, counters beginning at 0."""
    pace = _values(plain["pace"])
    counters = {name: _counter(plain[name], unit) for name, unit in _COUNTERS.items()}
    if counters["at"] is None:
        raise ValueError("nothing says when the readings were taken")
    readings = tuple(
        Reading(
            **{name: None if values is None else values[number] for name, values in counters.items()},  # type: ignore[arg-type]
            pace=one,
        )
        for number, one in enumerate(pace)
    )
    return Series(plain["steps"], tuple(_values(plain["seconds"])), readings)


def reading_of(conditions: Conditions, pace: float | None) -> Reading:
    """What is kept of a CPU device's conditions."""
    if pace is None:
        raise ValueError("these recordings are of a device whose pace can be read")
    return Reading(conditions.seconds, pace, conditions.waited, conditions.stolen, conditions.others)


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
    def key(self) -> tuple[str, int, int, int, int]:
        return self.load, self.percent, self.block, self.place, self.wait

    @property
    def is_plain(self) -> bool:
        """Whether nothing was planted."""
        return self.percent == self.wait == 0

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers only; `run_from_plain` is the way back."""
        return {
            "load": self.load,
            "percent": self.percent,
            **({"wait": self.wait} if self.wait else {}),
            "block": self.block,
            "place": self.place,
            "began": round(self.began),
            "series": {name: series.to_plain() for name, series in self.series.items()},
        }


def run_from_plain(plain: Mapping[str, Any]) -> Run:
    """The run that `Run.to_plain` turned into plain values."""
    series = {name: series_from_plain(one) for name, one in plain["series"].items()}
    numbers = (plain[name] for name in ("block", "place", "percent", "began"))
    return Run(plain["load"], *numbers, series, plain.get("wait", 0))


@dataclass(frozen=True, slots=True)
class Recording:
    """Runs on one machine, in the order in which they were recorded."""

    machine: Mapping[str, str]
    cores: int
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all: one line a run."""
        head = json.dumps({"format": FORMAT, "cores": self.cores, "machine": dict(self.machine)}, sort_keys=True)[:-1]
        lines = ",\n".join(json.dumps(run.to_plain(), separators=(",", ":")) for run in self.runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(f'{head}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")
        beside.replace(path)


def read(path: Path) -> Recording:
    """The recording in a file. Raises ``OSError``, and ``ValueError`` for a file that holds something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = tuple(run_from_plain(one) for one in document["runs"])
        recording = Recording(document["machine"], document["cores"], runs)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no recording of times ({error!r}); move it away") from None
    if document["format"] != FORMAT:
        raise ValueError(f"{path} has the format {document['format']}, and this reads {FORMAT}; move it away")
    return recording


def _digits(values: Sequence[float]) -> list[int]:
    """A power of ten, and the values in units of it: the largest has four digits."""
    power = math.floor(math.log10(max(values))) - 3
    return [power, *(round(one / 10.0**power) for one in values)]


def _values(digits: Sequence[int]) -> list[float]:
    power, *values = digits
    return [one * 10.0**power for one in values]


def _growth(counter: Sequence[float | None], unit: float) -> list[int] | None:
    """By how many units the counter grew from one reading to the next; nothing is lost by rounding over all of them."""
    known = [one for one in counter if one is not None]
    if len(known) < len(counter):
        return None
    units = [round((one - known[0]) / unit) for one in known]
    return [after - before for before, after in itertools.pairwise(units)]


def _counter(growth: Sequence[int] | None, unit: float) -> list[float] | None:
    if growth is None:
        return None
    return [total * unit for total in itertools.accumulate(growth, initial=0)]
