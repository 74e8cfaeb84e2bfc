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
    """Several steps that were timed as one.

    ``seconds`` a step; ``pace`` is the rate of the clock that steps run by (the GPU's SM clock in Hz; on the CPU the runs
    per second of a fixed piece of work), so that ``seconds * pace`` is a step's time in that clock's cycles.
    ``disturbed`` is a clause that says what else was at work meanwhile, and ``taken`` by what factor, at most, the round is
    longer for the time that this took.
    """

    seconds: float
    pace: float | None = None
    disturbed: str | None = None
    taken: float = 1.0

    @property
    def own(self) -> float:
        """Seconds a step, at the least, without what took time from it."""
        return self.seconds / self.taken

    @property
    def cycles(self) -> float | None:
        return None if self.pace is None else self.seconds * self.pace


@dataclass(frozen=True, slots=True)
class Sample:
    """Rounds of ``steps`` steps each, one after another.

    ``invalid`` says, as a clause, why no verdict may rest on them as they are, and ``slowed`` by what factors, at most, that
    can have slowed all of them: a sample has both or neither.
    """

    rounds: tuple[Round, ...]
    steps: int = 1
    invalid: str | None = None
    slowed: Slowed | None = None

    def __post_init__(self) -> None:
        if (self.invalid is None) != (self.slowed is None):
            raise ValueError(
                f"of an invalid sample it must be known how much that explains: {self.invalid}, {self.slowed}"
            )

    @property
    def counted(self) -> tuple[Round, ...]:
        """Rounds that count: those that nothing disturbed, if there are enough of them, or else all."""
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
    def at_least(self) -> float:
        """Fewest seconds a step takes with nothing else at work, from this sample alone."""
        return self.own / (self.slowed or Slowed()).alone

    @property
    def is_a_measure(self) -> bool:
        """Return whether later runs may be held against this one: undisturbed, or little by what is not known exactly."""
        taken = statistics.median(one.taken for one in self.counted)
        return self.slowed is None or (self.slowed.by(1.0) <= MOST_SLOWED_RUN and taken <= MOST_TAKEN_RUN)

    @property
    def own(self) -> float:
        """Median seconds a step without what took time from it, such as waiting for a core."""
        return statistics.median(one.own for one in self.counted)

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
        """Return the seconds a step that ``percent`` of all rounds do not exceed (nearest rank), disturbed ones included."""
        ordered = sorted(one.seconds for one in self.rounds)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of the median, in seconds; see `interval_of_median`."""
        return interval_of_median(self.seconds, level)

    @property
    def most_disturbed_by(self) -> str | None:
        """Return the interference that disturbed most of the rounds."""
        counts = Counter(one.disturbed for one in self.rounds if one.disturbed is not None)
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True, slots=True)
class _Columns:
    """A sample as it is written: a series of each thing, and by the number of its round what only some have."""

    seconds: tuple[float, ...]
    pace: tuple[float | None, ...]
    disturbed: Mapping[str, str]
    taken: Mapping[str, float]
    steps: int
    invalid: str | None
    slowed: Slowed | None


def _columns(sample: Sample) -> _Columns:
    return _Columns(
        tuple(one.seconds for one in sample.rounds),
        tuple(one.pace for one in sample.rounds),
        {str(number): one.disturbed for number, one in enumerate(sample.rounds) if one.disturbed},
        {str(number): one.taken for number, one in enumerate(sample.rounds) if one.taken != 1},
        sample.steps,
        sample.invalid,
        sample.slowed,
    )


def _sample(columns: _Columns) -> Sample:
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
    """The samples of a step, a second one where the first was not enough, and the median seconds of each phase."""

    samples: tuple[Annotated[Sample, Form(_Columns, _columns, _sample)], ...]
    phases: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._freeze(phases=self.phases)

    @property
    def best(self) -> Sample:
        """The fastest sample, which counts, since interference only adds time.

        Also one that is not valid: what it took is no less true, and it is what a comparison believes. Whoever keeps it for
        later runs has to ask whether it `is_a_measure`.
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
        """Return the seconds a step that ``percent`` of the rounds do not exceed."""
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
