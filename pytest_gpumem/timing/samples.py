"""What timing a step gave: rounds, a sample of them, and the times of a measurement. Frozen values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FEWEST_ROUNDS = 6
"""From so many rounds on, the smallest and the largest enclose the median in 96.9 % of all samples (1 - 2 / 2**6)."""


@dataclass(frozen=True, slots=True)
class Round:
    """Several steps that were timed as one.

    ``seconds`` a step; ``pace`` is the rate of the clock that steps run by (the GPU's SM clock in Hz; on the CPU the runs
    per second of a fixed piece of work), so that ``seconds * pace`` is a step's time in that clock's cycles.
    ``disturbed`` is a clause that says what else was at work meanwhile.
    """

    seconds: float
    pace: float | None = None
    disturbed: str | None = None

    @property
    def cycles(self) -> float | None:
        return None if self.pace is None else self.seconds * self.pace


@dataclass(frozen=True, slots=True)
class Sample:
    """Rounds of ``steps`` steps each, one after another. ``invalid`` says, as a clause, why no verdict may rest on them."""

    rounds: tuple[Round, ...]
    steps: int = 1
    invalid: str | None = None
    at_least: float | None = None
    """Of an invalid sample: seconds a step that it takes at the least were nothing else at work, where that is known."""

    @property
    def counted(self) -> tuple[Round, ...]:
        """The rounds that count: those that nothing disturbed, if there are enough of them, or else all."""
        quiet = tuple(one for one in self.rounds if one.disturbed is None)
        return quiet if len(quiet) >= FEWEST_ROUNDS else self.rounds

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds a step of the rounds that count."""
        return tuple(one.seconds for one in self.counted)

    @property
    def median(self) -> float:
        """Median seconds a step."""
        return statistics.median(self.seconds)

    @property
    def spent(self) -> float:
        """Seconds that all rounds took."""
        return sum(one.seconds for one in self.rounds) * self.steps

    @property
    def cycles(self) -> float | None:
        """Median cycles a step; ``None`` where the clock could not be read in every round that counts."""
        cycles = [one.cycles for one in self.counted]
        return None if None in cycles else statistics.median(value for value in cycles if value is not None)

    def percentile(self, percent: float) -> float:
        """Seconds a step that ``percent`` of all rounds do not exceed (nearest rank), disturbed ones included."""
        ordered = sorted(one.seconds for one in self.rounds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval of the median, in seconds; see `interval_of_median`."""
        return interval_of_median(self.seconds, level)

    @property
    def most_disturbed_by(self) -> str | None:
        """What disturbed most of the rounds."""
        counts = Counter(one.disturbed for one in self.rounds if one.disturbed is not None)
        return counts.most_common(1)[0][0] if counts else None

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers only; `sample_from_plain` is the way back."""
        return {
            "seconds": [one.seconds for one in self.rounds],
            "pace": [one.pace for one in self.rounds],
            "disturbed": {str(number): one.disturbed for number, one in enumerate(self.rounds) if one.disturbed},
            "steps": self.steps,
            "invalid": self.invalid,
            "at_least": self.at_least,
        }


def sample_from_plain(plain: Mapping[str, Any]) -> Sample:
    """The sample that `Sample.to_plain` turned into plain values."""
    disturbed = plain["disturbed"]
    rounds = tuple(
        Round(seconds, pace, disturbed.get(str(number)))
        for number, (seconds, pace) in enumerate(zip(plain["seconds"], plain["pace"], strict=True))
    )
    return Sample(rounds, plain["steps"], plain["invalid"], plain["at_least"])


@dataclass(frozen=True, slots=True)
class Times:
    """The samples of a step, a second one where the first was doubted, and the median seconds of each phase."""

    samples: tuple[Sample, ...]
    phases: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))

    def __reduce__(self) -> tuple[Any, ...]:
        return times_from_plain, (self.to_plain(),)

    @property
    def best(self) -> Sample:
        """The sample to go by: whatever else is at work only adds time, so the fastest.

        Also one that is not valid: what it took is no less true, and it is what a comparison believes. Whoever keeps it as a
        measure for later runs has to ask whether it is valid.
        """
        return min(self.samples, key=lambda sample: sample.median)

    @property
    def median(self) -> float:
        """Median seconds a step."""
        return self.best.median

    @property
    def rounds(self) -> tuple[float, ...]:
        """Seconds a step, round by round, disturbed ones included."""
        return tuple(one.seconds for one in self.best.rounds)

    def percentile(self, percent: float) -> float:
        """Seconds a step that ``percent`` of the rounds do not exceed."""
        return self.best.percentile(percent)

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers only; `times_from_plain` is the way back."""
        return {"samples": [sample.to_plain() for sample in self.samples], "phases": dict(self.phases)}


def times_from_plain(plain: Mapping[str, Any]) -> Times:
    """The times that `Times.to_plain` turned into plain values."""
    return Times(tuple(sample_from_plain(sample) for sample in plain["samples"]), plain["phases"])


def interval_of_median(values: Sequence[float], level: float) -> tuple[float, float]:
    """An interval that encloses the median of what ``values`` were drawn from with a probability of at least ``level``.

    By ranks, for any distribution: the number of values below the median is binomial with p = 1/2. With too few values
    for ``level``, the smallest and the largest.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0.0, 0
    # `below` values are cut off on each side while no more than (1 - level) / 2 of all samples are lost on that side.
    while below < (count - 1) // 2:
        outside += math.comb(count, below) / 2**count
        if outside > (1 - level) / 2:
            break
        below += 1
    low = max(0, below - 1)
    return ordered[low], ordered[count - 1 - low]
