"""Step times: rounds, samples with rounds, and a measurement's times. Frozen values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.plain import Form, FrozenValue

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_ROUNDS = 6
"""The number of rounds whose smallest and largest time enclose the median in 96.9 % of all samples (1 - 2 / 2**6)."""
MOST_SLOWDOWN_OF_RUN, MOST_TIME_FACTOR_OF_RUN = 1.25, 1.1
"""The most interference in a run that may become a baseline: a slowdown by 1.25, and a factor of 1.1 for other work's time.

With the factor 1.1, a thread waited a tenth of the time for a core. The first limit is higher, because slowdowns are less
exactly known than waiting (`pytest_gpumem.measuring.timing.validity`)."""


@dataclass(frozen=True, slots=True)
class Round:
    """Several steps timed together, about 20 ms in total."""

    seconds: float
    """Seconds per step."""
    pace: float | None = None
    """The clock rate: the GPU's SM clock in Hz, or on the CPU the runs per second of a fixed
    piece of work. ``seconds * pace`` is a step's time in cycles."""
    disturbed: str | None = None
    """A clause on other work on the machine; ``None`` if the round was quiet."""
    taken: float = 1.0
    """The largest factor by which other work can have made the round longer."""

    @property
    def own(self) -> float:
        """Seconds per step without the longest possible time for other work."""
        return self.seconds / self.taken

    @property
    def cycles(self) -> float | None:
        """Cycles per step; ``None`` without a pace."""
        return None if self.pace is None else self.seconds * self.pace


@dataclass(frozen=True, slots=True)
class Sample:
    """Consecutive rounds. An invalid sample has both ``invalid`` and ``slowed``, and a valid sample has neither."""

    rounds: tuple[Round, ...]
    """The rounds in order."""
    steps: int = 1
    """The number of steps in a round."""
    invalid: str | None = None
    """A clause with the reason why a verdict needs more than this sample; ``None`` for a valid sample."""
    slowed: Slowdown | None = None
    """The largest factors by which an invalid sample can have been slowed."""

    def __post_init__(self) -> None:
        if (self.invalid is None) != (self.slowed is None):
            raise ValueError(
                f"times.samples: invalid is {self.invalid!r} and slowed is {self.slowed}; give both or neither"
            )

    @property
    def counted(self) -> tuple[Round, ...]:
        """The counted rounds: the quiet rounds if there are at least 6, otherwise all rounds."""
        quiet = tuple(timed for timed in self.rounds if timed.disturbed is None)
        return quiet if len(quiet) >= FEWEST_ROUNDS else self.rounds

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per step in each counted round."""
        return tuple(timed.seconds for timed in self.counted)

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def at_least(self) -> float:
        """The least seconds per step that a quiet machine may need, according to this sample."""
        return self.own / (self.slowed or Slowdown()).alone

    @property
    def is_a_measure(self) -> bool:
        """True if other work disturbed this sample at most a little, so later runs may be compared with it."""
        taken = statistics.median(timed.taken for timed in self.counted)
        return self.slowed is None or (self.slowed.by(1.0) <= MOST_SLOWDOWN_OF_RUN and taken <= MOST_TIME_FACTOR_OF_RUN)

    @property
    def own(self) -> float:
        """Median seconds per step without time for other work, such as waiting for a core."""
        return statistics.median(timed.own for timed in self.counted)

    @property
    def spent(self) -> float:
        """Seconds in all rounds together."""
        return sum(timed.seconds for timed in self.rounds) * self.steps

    @property
    def cycles(self) -> float | None:
        """Median cycles per step; ``None`` if the clock was not read in every counted round."""
        cycles = [timed.cycles for timed in self.counted]
        return None if None in cycles else statistics.median(value for value in cycles if value is not None)

    def percentile(self, percent: float) -> float:
        """Return the seconds per step that ``percent`` of all rounds do not exceed (nearest rank)."""
        ordered = sorted(timed.seconds for timed in self.rounds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval for the median in seconds. ``level`` is its confidence: 0.95 is 95 %."""
        return interval_of_median(self.seconds, level)

    @property
    def most_disturbed_by(self) -> str | None:
        """The other work that disturbed most rounds; ``None`` if no round was disturbed."""
        counts = Counter(timed.disturbed for timed in self.rounds if timed.disturbed is not None)
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """A sample in its written form: series over its rounds, and values of single rounds by their numbers."""

    seconds: tuple[float, ...]
    """`Round.seconds` in each round."""
    pace: tuple[float | None, ...]
    """`Round.pace` in each round."""
    disturbed: Mapping[str, str]
    """`Round.disturbed` by round number, for disturbed rounds."""
    taken: Mapping[str, float]
    """`Round.taken` by round number, for values other than 1."""
    steps: int
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
    """The times of a step."""

    samples: tuple[Annotated[Sample, Form(SampleColumns, _columns, _sample)], ...]
    """One sample, or several samples if the first left doubt."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Median seconds by phase."""

    def __post_init__(self) -> None:
        self._freeze(phases=self.phases)

    @property
    def best(self) -> Sample:
        """The fastest sample, possibly invalid. It counts because other work only adds time."""
        return min(self.samples, key=lambda sample: sample.median)

    @property
    def median(self) -> float:
        """Median seconds per step in the best sample."""
        return self.best.median

    @property
    def rounds(self) -> tuple[float, ...]:
        """Seconds per step in each round of the best sample, including disturbed rounds."""
        return tuple(timed.seconds for timed in self.best.rounds)

    def percentile(self, percent: float) -> float:
        """Return the seconds per step that ``percent`` of the best sample's rounds do not exceed."""
        return self.best.percentile(percent)


def interval_of_median(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return a confidence interval for the median of the distribution behind ``values``.

    The interval uses ranks, so it holds for any distribution: the number of values below the median is binomial with p = 1/2.
    Its confidence is at least ``level``. If there are too few values, the smallest and the largest value are returned.

    Example:
        ``interval_of_median([1, 2, 3, 4, 5, 6], 0.95)`` is ``(1, 6)``, with a confidence of 96.9 %.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0.0, 0
    # Cut `below` values off each side. The median is among them with a probability of at most (1 - level) / 2.
    while below < (count - 1) // 2:
        outside += math.comb(count, below) / 2**count
        if outside > (1 - level) / 2:
            break
        below += 1
    low = max(0, below - 1)
    return ordered[low], ordered[count - 1 - low]
