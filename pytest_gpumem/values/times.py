"""Times of a step: rounds, a sample of them, and the times of a measurement. Frozen values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.values.interference import Slowed
from pytest_gpumem.values.plain import Form, FrozenValue

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_ROUNDS = 6
"""Rounds from which on the smallest and the largest enclose the median in 96.9 % of all samples (1 - 2 / 2**6)."""
MOST_SLOWED_RUN, MOST_TAKEN_RUN = 1.25, 1.1
"""A run that was disturbed further than that is no measure for later ones: one that waited for a core a tenth of the time. What
is not known as well as waiting took more (`pytest_gpumem.timing.validity`)."""


@dataclass(frozen=True, slots=True)
class Round:
    """Several steps that were timed as one, about 20 ms in all."""

    seconds: float
    """Seconds per step."""
    pace: float | None = None
    """The rate of the clock that steps run by: the GPU's SM clock in Hz; on the CPU the runs per second of a fixed piece of
    work. ``seconds * pace`` is a step's time in cycles.
    """
    disturbed: str | None = None
    """A clause that names other work on the machine; ``None`` if the round was quiet."""
    taken: float = 1.0
    """The largest factor by which the other work can have made the round longer."""

    @property
    def own(self) -> float:
        """The least seconds per step without the time that other work took."""
        return self.seconds / self.taken

    @property
    def cycles(self) -> float | None:
        """Cycles per step; ``None`` without a pace."""
        return None if self.pace is None else self.seconds * self.pace


@dataclass(frozen=True, slots=True)
class Sample:
    """Rounds one after another. A sample has ``invalid`` and ``slowed``, or neither."""

    rounds: tuple[Round, ...]
    """The rounds in order."""
    steps: int = 1
    """The number of steps in a round."""
    invalid: str | None = None
    """A clause: the reason why no verdict may rest on the sample as it is."""
    slowed: Slowed | None = None
    """The largest factors by which an invalid sample can have been slowed."""

    def __post_init__(self) -> None:
        if (self.invalid is None) != (self.slowed is None):
            raise ValueError(
                f"of an invalid sample it must be known how much that explains: {self.invalid}, {self.slowed}"
            )

    @property
    def counted(self) -> tuple[Round, ...]:
        """The rounds that count: the quiet rounds if there are at least 6, otherwise all."""
        quiet = tuple(one for one in self.rounds if one.disturbed is None)
        return quiet if len(quiet) >= FEWEST_ROUNDS else self.rounds

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per step of the rounds that count."""
        return tuple(one.seconds for one in self.counted)

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def at_least(self) -> float:
        """The least seconds per step on a quiet machine, as far as this sample shows."""
        return self.own / (self.slowed or Slowed()).alone

    @property
    def is_a_measure(self) -> bool:
        """True if later runs may be compared with this sample, because it was disturbed little or not at all."""
        taken = statistics.median(one.taken for one in self.counted)
        return self.slowed is None or (self.slowed.by(1.0) <= MOST_SLOWED_RUN and taken <= MOST_TAKEN_RUN)

    @property
    def own(self) -> float:
        """Median seconds per step without the time that other work took, such as waiting for a core."""
        return statistics.median(one.own for one in self.counted)

    @property
    def spent(self) -> float:
        """Seconds that all rounds took."""
        return sum(one.seconds for one in self.rounds) * self.steps

    @property
    def cycles(self) -> float | None:
        """Median cycles per step; ``None`` if the clock was not read in every round that counts."""
        cycles = [one.cycles for one in self.counted]
        return None if None in cycles else statistics.median(value for value in cycles if value is not None)

    def percentile(self, percent: float) -> float:
        """Return the seconds per step that ``percent`` of all rounds do not exceed (nearest rank)."""
        ordered = sorted(one.seconds for one in self.rounds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of the median, in seconds. ``level`` is its confidence: 0.95 is 95 %."""
        return interval_of_median(self.seconds, level)

    @property
    def most_disturbed_by(self) -> str | None:
        """The other work that disturbed most rounds; ``None`` if no round was disturbed."""
        counts = Counter(one.disturbed for one in self.rounds if one.disturbed is not None)
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """A sample as it is written: series over its rounds, and values of single rounds by their numbers."""

    seconds: tuple[float, ...]
    """`Round.seconds` of each round."""
    pace: tuple[float | None, ...]
    """`Round.pace` of each round."""
    disturbed: Mapping[str, str]
    """`Round.disturbed` by the number of the round, for disturbed rounds."""
    taken: Mapping[str, float]
    """`Round.taken` by the number of the round, if it is not 1."""
    steps: int
    """`Sample.steps`."""
    invalid: str | None
    """`Sample.invalid`."""
    slowed: Slowed | None
    """`Sample.slowed`."""


def _columns(sample: Sample) -> SampleColumns:
    return SampleColumns(
        tuple(one.seconds for one in sample.rounds),
        tuple(one.pace for one in sample.rounds),
        {str(number): one.disturbed for number, one in enumerate(sample.rounds) if one.disturbed},
        {str(number): one.taken for number, one in enumerate(sample.rounds) if one.taken != 1},
        sample.steps,
        sample.invalid,
        sample.slowed,
    )


def _sample(columns: SampleColumns) -> Sample:
    rounds = tuple(
        Round(seconds, pace, columns.disturbed.get(str(number)), columns.taken.get(str(number), 1.0))
        for number, (seconds, pace) in enumerate(zip(columns.seconds, columns.pace, strict=True))
    )
    wrong = next((number for number, one in enumerate(rounds) if not (one.seconds > 0 and one.taken >= 1)), None)
    if wrong is not None:
        raise ValueError(
            f"times.samples: round {wrong} has seconds {rounds[wrong].seconds} and taken {rounds[wrong].taken}, "
            "expected seconds above 0 and a factor of at least 1"
        )
    return Sample(rounds, columns.steps, columns.invalid, columns.slowed)


@dataclass(frozen=True, slots=True)
class Times(FrozenValue):
    """The times of a step."""

    samples: tuple[Annotated[Sample, Form(SampleColumns, _columns, _sample)], ...]
    """One sample, or several if the first was in doubt."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of each phase."""

    def __post_init__(self) -> None:
        self._freeze(phases=self.phases)

    @property
    def best(self) -> Sample:
        """The fastest sample, which counts because other work only adds time. It may be invalid."""
        return min(self.samples, key=lambda sample: sample.median)

    @property
    def median(self) -> float:
        """Median seconds per step of the best sample."""
        return self.best.median

    @property
    def rounds(self) -> tuple[float, ...]:
        """Seconds per step of each round of the best sample, disturbed rounds included."""
        return tuple(one.seconds for one in self.best.rounds)

    def percentile(self, percent: float) -> float:
        """Return the seconds per step that ``percent`` of the best sample's rounds do not exceed."""
        return self.best.percentile(percent)


def interval_of_median(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return a confidence interval of the median of what ``values`` were drawn from, of at least ``level``.

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
