"""The measured times of a step: a `Round` times some steps together, a `Sample` has rounds, and `Times` has samples.

All classes here are frozen dataclasses. Example: a sample with 20 rounds of 10 steps each has timed 200 steps.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.facts.values.annotations import Count, Form, NotEmpty
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.plain import FrozenValue

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_ROUNDS = 6
"""The smallest number of rounds for a confidence interval at 95 %. The true median is between the smallest and the largest of
six times with a probability of 1 - 2 / 2**6 = 96.9 %."""
MOST_SLOWDOWN_OF_RUN, MOST_TIME_FACTOR_OF_RUN = 1.25, 1.1
"""Upper bounds on other work's interference with a run whose times become a baseline.

The slowdown by other work (`Sample.slowed`) may be at most a factor of 1.25. The time that other work took, for example on the
same core, may have made the rounds longer by at most a factor of 1.1 (`Round.taken`). The first bound is higher, because a
slowdown is only estimated, but the time that other work took is measured (`pytest_gpumem.measuring.timing.validity`)."""


@dataclass(frozen=True, slots=True)
class Round:
    """One timing of several consecutive steps, which take about 20 ms together."""

    seconds: float
    """Seconds per step."""
    pace: float | None = None
    """The processor's speed in this round: on a GPU the SM clock in Hz, on the CPU how often per second a fixed piece of work
    ran. ``seconds * pace`` is a step's time in cycles."""
    disturbed: str | None = None
    """A text about the other work that disturbed this round; ``None`` if the round was undisturbed."""
    taken: float = 1.0
    """Other work made this round longer by at most this factor."""

    @property
    def own(self) -> float:
        """Seconds per step, minus the time that other work may have taken."""
        return self.seconds / self.taken

    @property
    def cycles(self) -> float | None:
        """Cycles per step; ``None`` if the processor's speed was not read."""
        return None if self.pace is None else self.seconds * self.pace


@dataclass(frozen=True, slots=True)
class Sample:
    """Rounds that were timed one after the other. Only an invalid sample has values for ``invalid`` and ``slowed``."""

    rounds: tuple[Round, ...]
    """All rounds, in the order in which they ran."""
    steps: int = 1
    """The number of steps in each round."""
    invalid: str | None = None
    """The reason for which this sample alone cannot decide a verdict, for example because the GPU was throttled. ``None`` for
    a valid sample."""
    slowed: Slowdown | None = None
    """Upper bounds on the factors by which other work slowed an invalid sample."""

    def __post_init__(self) -> None:
        if (self.invalid is None) != (self.slowed is None):
            raise ValueError(
                f"times.samples: invalid is {self.invalid!r} and slowed is {self.slowed}; give both or neither"
            )

    @property
    def counted(self) -> tuple[Round, ...]:
        """The rounds that the sample's figures come from: the undisturbed rounds if there are at least 6, otherwise all."""
        quiet = tuple(timed for timed in self.rounds if timed.disturbed is None)
        return quiet if len(quiet) >= FEWEST_ROUNDS else self.rounds

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per step in each round of `counted`."""
        return tuple(timed.seconds for timed in self.counted)

    @property
    def median(self) -> float:
        """The median of the seconds per step over the rounds in `counted`."""
        return statistics.median(self.seconds)

    @property
    def at_least(self) -> float:
        """A lower bound on the seconds per step on an undisturbed machine, computed from this sample."""
        return self.own / (self.slowed or Slowdown()).alone

    @property
    def is_a_measure(self) -> bool:
        """True if other work disturbed this sample so little that the sample can become a baseline for later runs."""
        taken = statistics.median(timed.taken for timed in self.counted)
        return self.slowed is None or (self.slowed.by(1.0) <= MOST_SLOWDOWN_OF_RUN and taken <= MOST_TIME_FACTOR_OF_RUN)

    @property
    def own(self) -> float:
        """The median of the seconds per step, minus the time for other work, such as waiting for a core."""
        return statistics.median(timed.own for timed in self.counted)

    @property
    def spent(self) -> float:
        """The total time of all rounds in seconds."""
        return sum(timed.seconds for timed in self.rounds) * self.steps

    @property
    def cycles(self) -> float | None:
        """The median of the cycles per step; ``None`` if a round in `counted` has no clock rate."""
        cycles = [timed.cycles for timed in self.counted]
        return None if None in cycles else statistics.median(value for value in cycles if value is not None)

    def percentile(self, percent: float) -> float:
        """Return a percentile of the seconds per step over all rounds, by the nearest rank. 50 returns about the median."""
        ordered = sorted(timed.seconds for timed in self.rounds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval for the median of the seconds per step. ``level`` is the confidence: 0.95 for 95 %."""
        return interval_of_median(self.seconds, level)

    @property
    def most_disturbed_by(self) -> str | None:
        """The text in `Round.disturbed` that most disturbed rounds have; ``None`` if no round was disturbed."""
        counts = Counter(timed.disturbed for timed in self.rounds if timed.disturbed is not None)
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """A sample as JSON stores it: a list for each field of `Round`, instead of a list of rounds.

    Fields that most rounds do not need are mappings from the round's number to the value.
    """

    seconds: Annotated[tuple[float, ...], NotEmpty()]
    """`Round.seconds` of every round."""
    pace: Annotated[tuple[float | None, ...], NotEmpty()]
    """`Round.pace` of every round."""
    disturbed: Mapping[str, str]
    """`Round.disturbed` by round number. Undisturbed rounds have no entry."""
    taken: Mapping[str, float]
    """`Round.taken` by round number. Rounds with the value 1 have no entry."""
    steps: Count
    """`Sample.steps`."""
    invalid: str | None
    """`Sample.invalid`."""
    slowed: Slowdown | None
    """`Sample.slowed`."""


def _columns(sample: Sample) -> SampleColumns:
    return SampleColumns(
        tuple(timed.seconds for timed in sample.rounds),
        tuple(timed.pace for timed in sample.rounds),
        {str(number): timed.disturbed for number, timed in enumerate(sample.rounds) if timed.disturbed},
        {str(number): timed.taken for number, timed in enumerate(sample.rounds) if timed.taken != 1},
        sample.steps,
        sample.invalid,
        sample.slowed,
    )


def _sample(columns: SampleColumns) -> Sample:
    rounds = tuple(
        Round(seconds, pace, columns.disturbed.get(str(number)), columns.taken.get(str(number), 1.0))
        for number, (seconds, pace) in enumerate(zip(columns.seconds, columns.pace, strict=True))
    )
    wrong = next((number for number, timed in enumerate(rounds) if not (timed.seconds > 0 and timed.taken >= 1)), None)
    if wrong is not None:
        raise ValueError(
            f"times.samples: round {wrong} has seconds {rounds[wrong].seconds} and taken {rounds[wrong].taken}, "
            "expected seconds above 0 and a factor of at least 1"
        )
    return Sample(rounds, columns.steps, columns.invalid, columns.slowed)


@dataclass(frozen=True, slots=True)
class Times(FrozenValue):
    """All timings of a step in one measurement."""

    samples: Annotated[tuple[Annotated[Sample, Form(SampleColumns, _columns, _sample)], ...], NotEmpty()]
    """The step's samples. A second sample is taken if the first does not decide the verdict."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The median of the seconds in each phase: forward, backward and optimizer."""

    def __post_init__(self) -> None:
        self._freeze(phases=self.phases)

    @property
    def best(self) -> Sample:
        """The sample with the lowest median, even if it is invalid.

        Other work only adds time, so the fastest sample is the closest to a sample on an undisturbed machine.
        """
        return min(self.samples, key=lambda sample: sample.median)

    @property
    def median(self) -> float:
        """The median of the seconds per step in the fastest sample."""
        return self.best.median

    @property
    def rounds(self) -> tuple[float, ...]:
        """Seconds per step in each round of the fastest sample, including disturbed rounds."""
        return tuple(timed.seconds for timed in self.best.rounds)

    def percentile(self, percent: float) -> float:
        """Return a percentile of the seconds per step over all rounds of the fastest sample."""
        return self.best.percentile(percent)


def interval_of_median(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return a confidence interval for the median of the distribution from which ``values`` were drawn.

    The bounds are two of the sorted values. The number of values below the true median is binomial with p = 1/2 for any
    distribution, so the interval contains the true median with a probability of at least ``level``. With too few values, the
    smallest and the largest value are returned.

    Example:
        ``interval_of_median([1, 2, 3, 4, 5, 6], 0.95)`` is ``(1, 6)``, with a confidence of 96.9 %.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0.0, 0
    # Remove the `below` smallest and the `below` largest values. The probability that the true median is on one of the two
    # sides is at most (1 - level) / 2.
    while below < (count - 1) // 2:
        outside += math.comb(count, below) / 2**count
        if outside > (1 - level) / 2:
            break
        below += 1
    low = max(0, below - 1)
    return ordered[low], ordered[count - 1 - low]
