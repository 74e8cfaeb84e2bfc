"""Comparison of step times: a sample with the runs accepted as a baseline, or two revisions with each other. Pure.

Slower needs everything at once, in every sample that was taken: the ratio is beyond the tolerance in seconds and in cycles of
the clock that the step ran by, with its whole interval in one of the two; the interval in cycles is above 1 in any case, since
seconds also vary with the machine's speed. Where something else was at work, or the clock runs slower than in each of the
baseline's runs, that has to hold of what is left when all that this can explain is taken off (`pytest_gpumem.timing.validity`).
What looks slower and is not shown to be is *uncertain*.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.timing.intervals import ratio_of_pairs, ratio_to_runs
from pytest_gpumem.timing.validity import percent
from pytest_gpumem.units import agreeing, counted
from pytest_gpumem.values.interference import PACE, Slowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.timing.intervals import Interval
    from pytest_gpumem.values.times import Round, Sample, Times

SpeedOutcome = Literal["slower", "not slower", "faster", "uncertain"]

MOST_UNKNOWN = 0.25
"""A slowdown that is not excluded and larger than this leaves a comparison uncertain, though nothing looks slower."""
MOST_UNKNOWN_IN_TURNS = 2
"""The same limit for an A/B, as a multiple of the tolerance. More pairs of runs can narrow that interval."""
SLOWER_MACHINE = 0.03
"""The share by which the clock may run slower than in the slowest of a baseline's runs before the effect is taken off a
slowdown. Up to the slowest of them, the interval over runs has what a slower clock does."""
SLOWER_RUN = 0.10
"""The share by which it may run slower in a run that is added to a baseline: five slow ones would hide a slowdown."""
SLOWER_IN_TURNS = 0.02
"""The same of one side of an A/B, whose runs are neighbours: by the median over pairs."""
AGREEING = 2
"""Samples that show a slowdown, beside uncertain ones, are enough for one."""
FEWEST_PAIRS = 4
MOST_RUNS = 10
_BEYOND = "which cannot account for it"


@dataclass(frozen=True, slots=True)
class Runs:
    """Medians of the runs that were accepted, the latest last: seconds a step, and cycles of its clock where it was read."""

    seconds: tuple[float, ...]
    cycles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.cycles and len(self.cycles) != len(self.seconds):
            raise ValueError(f"{len(self.seconds)} runs in seconds and {len(self.cycles)} in cycles")

    @property
    def median(self) -> float:
        """Median seconds a step, of all runs."""
        return statistics.median(self.seconds)

    @property
    def pace(self) -> float | None:
        """Median rate of the clock that steps ran by; ``None`` where it was not read."""
        return statistics.median(self._paces) if self.cycles else None

    @property
    def slowest_pace(self) -> float | None:
        """The rate of the clock in the run where it was lowest; ``None`` where it was not read."""
        return min(self._paces) if self.cycles else None

    @property
    def _paces(self) -> list[float]:
        return [cycles / seconds for cycles, seconds in zip(self.cycles, self.seconds, strict=True)]

    def and_then(self, later: Runs) -> Runs:
        """Return these runs and ``later`` ones, the last `MOST_RUNS` of them. Either all of them have cycles or none.

        A run without cycles is not taken among those that have them, and one with cycles begins anew where they were not
        known: a single run would else leave all the others without the control that they are.
        """
        if not later.cycles and self.cycles:
            return self
        if later.cycles and not self.cycles:
            return later
        return Runs((*self.seconds, *later.seconds)[-MOST_RUNS:], (*self.cycles, *later.cycles)[-MOST_RUNS:])


def run_of(times: Times) -> Runs | None:
    """Return this run as one of a baseline, without the time that waiting took; ``None`` if it was too disturbed."""
    sample = times.best
    if not sample.is_a_measure:
        return None
    cycles = _cycles([replace(one, seconds=one.own) for one in sample.counted])
    return Runs((sample.own,), () if cycles is None else (statistics.median(cycles),))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on a step's speed. ``reason`` is a clause where it is uncertain."""

    outcome: SpeedOutcome
    seconds: Interval
    cycles: Interval | None = None
    reason: str | None = None

    @property
    def ratio(self) -> float:
        return self.seconds.ratio

    @property
    def low(self) -> float:
        return self.seconds.low

    @property
    def high(self) -> float:
        return self.seconds.high


def compare(now: Sequence[Sample], baseline: Runs, tolerance: float) -> Comparison:
    """Compare the samples of this run with a baseline of earlier runs; ``tolerance`` is a ratio (0.05 is 5 %).

    Several samples are a first one and its re-measurements: a slowdown is what two of them show and none contradicts, and
    faster is what each of them shows. Interference only adds time, so the sample that shows the least slowdown decides.
    """
    compared = [_compared(sample, baseline, tolerance) for sample in now]
    if any(one.outcome != "faster" for one in compared):
        compared = [replace(one, outcome="not slower") if one.outcome == "faster" else one for one in compared]
    order: list[SpeedOutcome] = ["not slower", "faster", "uncertain", "slower"]
    decisive = min(compared, key=lambda one: (order.index(one.outcome), one.ratio))
    slower = [one for one in compared if one.outcome == "slower"]
    if decisive.outcome == "uncertain" and len(slower) >= AGREEING:
        # An uncertain sample is no contradiction.
        return min(slower, key=lambda one: one.ratio)
    return decisive


def is_undecided(now: Sequence[Sample], baseline: Runs, tolerance: float) -> bool:
    """Return whether a sample shows a slowdown that another neither confirms nor contradicts, so that one more may decide."""
    outcomes = {_compared(sample, baseline, tolerance).outcome for sample in now}
    return outcomes == {"slower", "uncertain"} and compare(now, baseline, tolerance).outcome == "uncertain"


def compare_pairs(pairs: Sequence[tuple[Sample, Sample]], tolerance: float) -> Comparison:
    """Compare two revisions that ran in turns, as at least one pair (base, head) of neighbouring runs.

    What drifts from pair to pair drops out of their ratios. A pair with an invalid sample does not count.
    Their number is small, so the interval is a bootstrap over pairs and over the rounds of each, widened by Student's t over
    the normal distribution.
    """
    shown = _compared_pairs(pairs)
    known = f"as far as {counted(len(shown), 'pair of runs tells', 'pairs of runs tell')}"
    most = MOST_UNKNOWN_IN_TURNS * tolerance
    seconds, cycles = _seconds_and_cycles([(base.counted, head.counted) for base, head in shown])
    if len(pairs) < FEWEST_PAIRS:
        few = f"only {len(pairs)} of {FEWEST_PAIRS} pairs of runs"
        return _judged(seconds, cycles, tolerance, _first_disturbance(pairs) or few, known, most_unknown=most)
    why_not = _first_disturbance(shown) or (_slower_in_turns(shown) if cycles is not None else None)
    found = _judged(seconds, cycles, tolerance, why_not, known, most_unknown=most)
    if why_not is None or found.outcome != "uncertain":
        return found
    left = _seconds_and_cycles([(base.counted, _left(head, _pace(base))) for base, head in shown])
    return _beyond(found, _judged(*left, tolerance, None, known, most_unknown=most))


def _compared_pairs(pairs: Sequence[tuple[Sample, Sample]]) -> Sequence[tuple[Sample, Sample]]:
    """Return the undisturbed pairs, or all pairs if too few are undisturbed."""
    undisturbed = [(base, head) for base, head in pairs if base.invalid is None and head.invalid is None]
    return undisturbed if len(undisturbed) >= FEWEST_PAIRS else pairs


def typical_seconds(pairs: Sequence[tuple[Sample, Sample]]) -> tuple[float, float]:
    """Return a step's seconds in base and in head. Their ratio equals the ratio from `compare_pairs` exactly.

    Both are geometric means over the pairs. Medians over each side's runs can have a ratio with the other sign, because a
    drift from pair to pair stays in them.
    """
    sides = zip(*_compared_pairs(pairs), strict=True)
    base, head = (statistics.geometric_mean(statistics.median(_seconds(one.counted)) for one in side) for side in sides)
    return base, head


def _first_disturbance(pairs: Sequence[tuple[Sample, Sample]]) -> str | None:
    return next((sample.invalid for pair in pairs for sample in pair if sample.invalid is not None), None)


def _seconds_and_cycles(
    pairs: Sequence[tuple[Sequence[Round], Sequence[Round]]],
) -> tuple[Interval, Interval | None]:
    """Return the ratios of rounds (base, head) in seconds, and in cycles where the clock was read in all of them."""
    seconds = ratio_of_pairs([(_seconds(base), _seconds(head)) for base, head in pairs])
    read = [(_cycles(base), _cycles(head)) for base, head in pairs]
    known = [(base, head) for base, head in read if base is not None and head is not None]
    return seconds, ratio_of_pairs(known) if len(known) == len(pairs) else None


def _slower_in_turns(pairs: Sequence[tuple[Sample, Sample]]) -> str | None:
    """Return a clause that says that the machine ran slower during the head's runs; ``None`` if it did not."""
    paces = [(_pace(head), _pace(base)) for base, head in pairs]
    change = statistics.median(now / then for now, then in paces if now is not None and then is not None) - 1
    return f"the machine ran {percent(-change)} slower in the runs of the head" if change < -SLOWER_IN_TURNS else None


def _compared(sample: Sample, baseline: Runs, tolerance: float) -> Comparison:
    runs = len(baseline.seconds)
    known = agreeing(runs, "as far as a single run tells", f"as far as {runs} runs tell")

    this = Runs((sample.median,), () if sample.cycles is None else (sample.cycles,))

    def against_runs(rounds: Sequence[Round]) -> tuple[Interval, Interval | None]:
        cycles = _cycles(rounds) if baseline.cycles else None
        return (
            ratio_to_runs(_seconds(rounds), baseline.seconds),
            None if cycles is None else ratio_to_runs(cycles, baseline.cycles),
        )

    why_not = sample.invalid or slower_machine(this, baseline.slowest_pace)
    pace = baseline.slowest_pace
    lost = 1.0 if this.pace is None or pace is None else max(pace / this.pace, 1.0)
    found = _judged(*against_runs(sample.counted), tolerance, why_not, known, lost)
    if why_not is None or found.outcome != "uncertain":
        return found
    return _beyond(found, _judged(*against_runs(_left(sample, pace)), tolerance, None, known, 1.0))


def _beyond(found: Comparison, left: Comparison) -> Comparison:
    """Return the verdict on a disturbed step: slower where what is ``left`` of its time is."""
    if left.outcome != "slower":
        return found
    return replace(found, outcome="slower", reason=f"{found.reason}, {_BEYOND}")


def _left(sample: Sample, pace: float | None) -> tuple[Round, ...]:
    """Return the rounds that count, less what interference can explain, at the ``pace`` of the side compared with.

    Each is less what took time from it, and then less what slowed it or the pace.
    """
    mine = _pace(sample)
    slowed = sample.slowed or Slowed()
    if mine is None or pace is None:
        return tuple(replace(one, seconds=one.own / slowed.alone) for one in sample.counted)
    lost = max(pace / mine, 1.0)
    return tuple(
        replace(one, seconds=one.own / slowed.by(lost), pace=None if one.pace is None else one.pace * lost)
        for one in sample.counted
    )


def _pace(sample: Sample) -> float | None:
    return None if sample.cycles is None else sample.cycles / sample.median


def slower_machine(this: Runs, pace: float | None, most: float = SLOWER_MACHINE) -> str | None:
    """Return a clause that says that the clock runs slower than a baseline's ``pace`` by more than ``most``.

    Cycles alone do not make up for it: work that goes through memory suffers otherwise than the work that is the clock.
    """
    if this.pace is None or pace is None:
        return None
    change = this.pace / pace - 1
    return f"the machine runs {percent(-change)} slower than it did" if change < -most else None


def _judged(
    seconds: Interval,
    cycles: Interval | None,
    tolerance: float,
    invalid: str | None,
    known: str,
    lost: float | None = None,
    *,
    most_unknown: float | None = None,
) -> Comparison:
    """Judge ratios of times.

    Args:
        seconds: The ratio in seconds.
        cycles: The ratio in cycles of the clock; ``None`` where it was not read.
        tolerance: What is tolerated, as a ratio: 0.05 is 5 %.
        invalid: Why the samples cannot show a slowdown; ``None`` if they can.
        known: A clause that says from how many runs the variation of times is known.
        lost: By what factor the clock ran slower; ``None`` to take it from the two ratios.
        most_unknown: The interval may reach up to this slowdown, as a ratio, before the comparison is uncertain; ``None``
            takes the limit for single runs.
    """
    slower = 1 + tolerance
    intervals = [seconds] if cycles is None else [seconds, cycles]
    looks_slower = min(one.ratio for one in intervals) > slower
    if cycles is not None:
        # What slowed the clock slowed the step by a power of that.
        lost = seconds.ratio / cycles.ratio if lost is None else lost
        looks_slower = looks_slower and seconds.ratio / lost**PACE > slower
    if looks_slower and any(one.low > slower for one in intervals) and intervals[-1].low > 1:
        return Comparison("uncertain" if invalid else "slower", seconds, cycles, invalid)
    if seconds.ratio > slower:
        reason = f"within what times vary by, {known}: {seconds}"
        if cycles is not None and not looks_slower:
            reason = f"the clock runs slower than it did: {seconds} in seconds is {cycles} in cycles"
        return Comparison("uncertain", seconds, cycles, invalid or reason)
    if seconds.high > 1 + (max(MOST_UNKNOWN, 2 * tolerance) if most_unknown is None else most_unknown):
        return Comparison("uncertain", seconds, cycles, invalid or f"the times vary too much to tell: {seconds}")
    looks_faster = all(one.ratio < 1 / slower for one in intervals)
    if looks_faster and invalid is None and any(one.high < 1 / slower for one in intervals):
        return Comparison("faster", seconds, cycles)
    return Comparison("not slower", seconds, cycles)


def _seconds(rounds: Sequence[Round]) -> tuple[float, ...]:
    return tuple(one.seconds for one in rounds)


def _cycles(rounds: Sequence[Round]) -> tuple[float, ...] | None:
    cycles = [one.cycles for one in rounds]
    return None if None in cycles else tuple(value for value in cycles if value is not None)
