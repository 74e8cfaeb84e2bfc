"""Compare step times: a sample with a baseline's runs, or two revisions with each other. All functions are pure.

A step is slower if its samples are slower. Uncertain samples do not contradict two slower samples. A sample is *slower* if all
of the following conditions are true:

- The ratio (current / earlier) is beyond the tolerance, both in seconds and in clock cycles.
- The ratio in seconds is still beyond the tolerance without the part that a slower clock explains (`PACE`).
- The whole confidence interval is beyond the tolerance, in seconds or in cycles.
- The whole confidence interval in cycles is above 1, because seconds also vary with the machine's speed.

If other work disturbed a sample, or if the clock runs slower than in every baseline run, the largest slowdown that this can
explain is subtracted first (`pytest_gpumem.measuring.timing.validity`). If the ratio in seconds is beyond the tolerance, but
another condition is not true, the sample is *uncertain*.

Example: the tolerance is 5 %. A step took 20.0 ms in the baseline and takes 21.6 ms now: +8.0 % (+5.5 % to +10.5 %) in
seconds, and +7.9 % (+5.2 % to +10.6 %) in cycles. The step is slower. With the interval +1.0 % to +15.0 % in both, the step
would be uncertain. With a clock at 2.4 instead of 2.6 GHz, +8.0 % in seconds is -0.3 % in cycles: the machine is slower, not
the step, so the step is uncertain.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.facts.values.interference import PACE, Slowdown
from pytest_gpumem.judging.times.intervals import ratio_of_pairs, ratio_to_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.facts.values.times import Round, Sample, Times
    from pytest_gpumem.judging.times.intervals import Interval

SpeedOutcome = Literal["slower", "not slower", "faster", "uncertain"]

MOST_UNKNOWN = 0.25
"""If the ratio is within the tolerance, but its interval reaches beyond a 25 % slowdown, the comparison is uncertain.
For a tolerance above 12.5 %, the limit is twice the tolerance."""
MOST_UNKNOWN_IN_TURNS = 2
"""The same limit for an A/B comparison, as a multiple of the tolerance. It is lower, because more pairs of runs can narrow the
interval."""
SLOWER_MACHINE = 0.03
"""If the clock runs slower than in the baseline's slowest run by more than this share, the effect of the slower clock is
subtracted from a slowdown. A smaller difference is not subtracted, because it is already part of the variation between runs."""
SLOWER_RUN = 0.10
"""If the clock runs slower than the baseline's clock by more than this share, the run is not added to the baseline. Otherwise
five such runs, half as many as a baseline can have (`MOST_RUNS`), would hide a slowdown."""
SLOWER_IN_TURNS = 0.02
"""In an A/B comparison, the clock in the head's runs may be slower than in the base's runs by at most this share (the median
over pairs). Otherwise the comparison counts as disturbed.

This share is smaller than `SLOWER_MACHINE`, because the two runs in a pair follow each other."""
AGREEING = 2
"""This many slower samples prove a slowdown if the other samples are uncertain."""
FEWEST_PAIRS = 4
MOST_RUNS = 10
_CANNOT_EXPLAIN = "which cannot explain the slowdown"


@dataclass(frozen=True, slots=True)
class Runs:
    """Medians from a baseline's runs, oldest first: seconds per step, and cycles per step if the clock was read."""

    seconds: tuple[float, ...]
    cycles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.cycles and len(self.cycles) != len(self.seconds):
            raise ValueError(f"there are seconds for {len(self.seconds)} runs, but cycles for {len(self.cycles)}")

    @property
    def median(self) -> float:
        """Median seconds per step over all runs."""
        return statistics.median(self.seconds)

    @property
    def pace(self) -> float | None:
        """The median clock rate in cycles per second; ``None`` if the clock was not read."""
        return statistics.median(self._paces) if self.cycles else None

    @property
    def slowest_pace(self) -> float | None:
        """The lowest clock rate in any run; ``None`` if the clock was not read."""
        return min(self._paces) if self.cycles else None

    @property
    def _paces(self) -> list[float]:
        return [cycles / seconds for cycles, seconds in zip(self.cycles, self.seconds, strict=True)]

    def extended_by(self, later: Runs) -> Runs:
        """Return these runs followed by the ``later`` runs. The result contains at most the last `MOST_RUNS` runs.

        The result has cycles for all runs or for no run. If only these runs or only the ``later`` runs have cycles, the runs
        without cycles are left out. Otherwise a single run without cycles would remove the cycles from all runs, and slower
        clocks would go unnoticed.
        """
        if not later.cycles and self.cycles:
            return self
        if later.cycles and not self.cycles:
            return later
        return Runs((*self.seconds, *later.seconds)[-MOST_RUNS:], (*self.cycles, *later.cycles)[-MOST_RUNS:])


def run_of(times: Times) -> Runs | None:
    """Return the current run as a baseline's run, without the time that other work may have taken.

    Returns:
        The run; ``None`` if other work disturbed it too much.
    """
    sample = times.best
    if not sample.is_a_measure:
        return None
    cycles = _cycles([replace(timed, seconds=timed.own) for timed in sample.counted])
    return Runs((sample.own,), () if cycles is None else (statistics.median(cycles),))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on a step's speed. If the outcome is uncertain, ``reason`` is a clause with the reason."""

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


def compare(samples: Sequence[Sample], baseline: Runs, tolerance: float) -> Comparison:
    """Compare this run's samples with earlier runs.

    ``samples[0]`` is the step's first sample, and the other samples were taken later. If there is only one sample and it is
    slower, the step counts as slower, and the caller takes further samples. With several samples, the step is slower if two
    are slower and no sample is *not slower*. The step is faster only if all samples are faster. Interference only adds time, so
    the sample with the smallest slowdown decides.

    Args:
        samples: This run's samples.
        baseline: The earlier runs.
        tolerance: The tolerated slowdown as a share: 0.05 is 5 %.
    """
    comparisons = [_compare_sample(sample, baseline, tolerance) for sample in samples]
    if any(comparison.outcome != "faster" for comparison in comparisons):
        comparisons = [
            replace(comparison, outcome="not slower") if comparison.outcome == "faster" else comparison
            for comparison in comparisons
        ]
    by_importance: list[SpeedOutcome] = ["not slower", "faster", "uncertain", "slower"]
    decisive = min(comparisons, key=lambda comparison: (by_importance.index(comparison.outcome), comparison.ratio))
    slower = [comparison for comparison in comparisons if comparison.outcome == "slower"]
    if decisive.outcome == "uncertain" and len(slower) >= AGREEING:
        # An uncertain sample does not contradict the slower samples.
        return min(slower, key=lambda comparison: comparison.ratio)
    return decisive


def is_undecided(samples: Sequence[Sample], baseline: Runs, tolerance: float) -> bool:
    """Return whether a further sample may decide, because one sample is slower and another is uncertain."""
    outcomes = {_compare_sample(sample, baseline, tolerance).outcome for sample in samples}
    return outcomes == {"slower", "uncertain"} and compare(samples, baseline, tolerance).outcome == "uncertain"


def compare_pairs(pairs: Sequence[tuple[Sample, Sample]], tolerance: float) -> Comparison:
    """Compare two revisions, base and head, that ran in turns.

    If the machine becomes slower from pair to pair, this cancels out in the ratios. If there are enough undisturbed pairs,
    pairs with an invalid sample do not count. The interval comes from a bootstrap over pairs and over the rounds in each pair.
    Because there are few pairs, the interval is widened by Student's t.

    Args:
        pairs: Consecutive runs (base, head), at least one pair.
        tolerance: The tolerated slowdown as a share: 0.05 is 5 %.
    """
    usable = _usable_pairs(pairs)
    basis = f"estimated from {counted(len(usable), 'pair of runs', 'pairs of runs')}"
    most = MOST_UNKNOWN_IN_TURNS * tolerance
    seconds, cycles = _seconds_and_cycles([(base.counted, head.counted) for base, head in usable])
    if len(pairs) < FEWEST_PAIRS:
        too_few = f"only {len(pairs)} of {FEWEST_PAIRS} pairs of runs"
        return _judge(seconds, cycles, tolerance, _first_disturbance(pairs) or too_few, basis, most_unknown=most)
    why_not = _first_disturbance(usable) or (_slower_in_turns(usable) if cycles is not None else None)
    comparison = _judge(seconds, cycles, tolerance, why_not, basis, most_unknown=most)
    if why_not is None or comparison.outcome != "uncertain":
        return comparison
    remaining = _seconds_and_cycles([(base.counted, _without_interference(head, _pace(base))) for base, head in usable])
    return _decided(comparison, _judge(*remaining, tolerance, None, basis, most_unknown=most))


def _usable_pairs(pairs: Sequence[tuple[Sample, Sample]]) -> Sequence[tuple[Sample, Sample]]:
    """Return the undisturbed pairs, or all pairs if too few are undisturbed."""
    undisturbed = [(base, head) for base, head in pairs if base.invalid is None and head.invalid is None]
    return undisturbed if len(undisturbed) >= FEWEST_PAIRS else pairs


def typical_seconds(pairs: Sequence[tuple[Sample, Sample]]) -> tuple[float, float]:
    """Return the seconds per step in base and in head. Their ratio equals the ratio from `compare_pairs` exactly.

    Both values are geometric means over the pairs. Medians over all runs of a revision would include a drift from pair to pair,
    so they could show a speedup although `compare_pairs` shows a slowdown.
    """
    sides = zip(*_usable_pairs(pairs), strict=True)
    base, head = (
        statistics.geometric_mean(statistics.median(_seconds(sample.counted)) for sample in side) for side in sides
    )
    return base, head


def _first_disturbance(pairs: Sequence[tuple[Sample, Sample]]) -> str | None:
    return next((sample.invalid for pair in pairs for sample in pair if sample.invalid is not None), None)


def _seconds_and_cycles(
    pairs: Sequence[tuple[Sequence[Round], Sequence[Round]]],
) -> tuple[Interval, Interval | None]:
    """Return the ratio head / base in seconds, and in cycles if the clock was read in all rounds."""
    seconds = ratio_of_pairs([(_seconds(base), _seconds(head)) for base, head in pairs])
    all_cycles = [(_cycles(base), _cycles(head)) for base, head in pairs]
    pairs_in_cycles = [(base, head) for base, head in all_cycles if base is not None and head is not None]
    return seconds, ratio_of_pairs(pairs_in_cycles) if len(pairs_in_cycles) == len(pairs) else None


def _slower_in_turns(pairs: Sequence[tuple[Sample, Sample]]) -> str | None:
    """Return a clause if the machine ran slower in the head's runs than in the base's runs; otherwise ``None``."""
    paces = [(_pace(head), _pace(base)) for base, head in pairs]
    change = (
        statistics.median(
            head_pace / base_pace for head_pace, base_pace in paces if head_pace is not None and base_pace is not None
        )
        - 1
    )
    return (
        f"the machine ran {-100 * change:.0f} % slower in the runs of the head" if change < -SLOWER_IN_TURNS else None
    )


def _compare_sample(sample: Sample, baseline: Runs, tolerance: float) -> Comparison:
    runs = len(baseline.seconds)
    basis = word_form(runs, "estimated from a single run", f"estimated from {runs} runs")

    current = Runs((sample.median,), () if sample.cycles is None else (sample.cycles,))

    def against_runs(rounds: Sequence[Round]) -> tuple[Interval, Interval | None]:
        cycles = _cycles(rounds) if baseline.cycles else None
        return (
            ratio_to_runs(_seconds(rounds), baseline.seconds),
            None if cycles is None else ratio_to_runs(cycles, baseline.cycles),
        )

    why_not = sample.invalid or slower_machine(current, baseline.slowest_pace)
    pace = baseline.slowest_pace
    lost = 1.0 if current.pace is None or pace is None else max(pace / current.pace, 1.0)
    comparison = _judge(*against_runs(sample.counted), tolerance, why_not, basis, lost)
    if why_not is None or comparison.outcome != "uncertain":
        return comparison
    return _decided(comparison, _judge(*against_runs(_without_interference(sample, pace)), tolerance, None, basis, 1.0))


def _decided(comparison: Comparison, remaining: Comparison) -> Comparison:
    """Return the verdict on a disturbed step.

    ``remaining`` compares the time that is left without interference. If this comparison is slower, the step is slower.
    """
    if remaining.outcome != "slower":
        return comparison
    return replace(comparison, outcome="slower", reason=f"{comparison.reason}, {_CANNOT_EXPLAIN}")


def _without_interference(sample: Sample, other_pace: float | None) -> tuple[Round, ...]:
    """Return the counted rounds without the time that interference can explain.

    The seconds in each round are divided by two factors: for the time that other work took from the step, and for the largest
    slowdown of the running step.

    Args:
        sample: The disturbed sample.
        other_pace: The clock rate in the baseline's slowest run, or in the base's sample; ``None`` if it is unknown.
    """
    own_pace = _pace(sample)
    slowed = sample.slowed or Slowdown()
    if own_pace is None or other_pace is None:
        return tuple(replace(timed, seconds=timed.own / slowed.alone) for timed in sample.counted)
    lost_pace = max(other_pace / own_pace, 1.0)
    return tuple(
        replace(
            timed, seconds=timed.own / slowed.by(lost_pace), pace=None if timed.pace is None else timed.pace * lost_pace
        )
        for timed in sample.counted
    )


def _pace(sample: Sample) -> float | None:
    return None if sample.cycles is None else sample.cycles / sample.median


def slower_machine(current: Runs, pace: float | None, most: float = SLOWER_MACHINE) -> str | None:
    """Return a clause if the clock runs slower than a baseline's ``pace`` by more than ``most``; otherwise ``None``.

    Cycles do not fully correct for a slower machine. The pace is measured with fixed work, and a slower machine
    slows memory accesses by another factor than this work.
    """
    if current.pace is None or pace is None:
        return None
    change = current.pace / pace - 1
    return f"the machine runs {-100 * change:.0f} % slower than in the baseline" if change < -most else None


def _judge(
    seconds: Interval,
    cycles: Interval | None,
    tolerance: float,
    invalid: str | None,
    basis: str,
    lost_pace: float | None = None,
    *,
    most_unknown: float | None = None,
) -> Comparison:
    """Judge ratios between times.

    Args:
        seconds: The ratio in seconds.
        cycles: The ratio in clock cycles; ``None`` if the clock was not read.
        tolerance: The tolerated slowdown as a share: 0.05 is 5 %.
        invalid: A clause with the reason why the samples cannot show a slowdown; ``None`` if they can.
        basis: A clause on the number of runs from which the variation is known: ``estimated from 3 runs``.
        lost_pace: The factor by which the clock ran slower; ``None`` to compute the factor from the two ratios.
        most_unknown: The limit for the interval, as a share: 0.1 is 10 % slower. An interval that reaches beyond it makes the
            comparison uncertain. ``None`` for `MOST_UNKNOWN`.
    """
    slower = 1 + tolerance
    intervals = [seconds] if cycles is None else [seconds, cycles]
    looks_slower = min(interval.ratio for interval in intervals) > slower
    if cycles is not None:
        # A slower clock slows the step by the clock's ratio to the power of `PACE`.
        lost_pace = seconds.ratio / cycles.ratio if lost_pace is None else lost_pace
        looks_slower = looks_slower and seconds.ratio / lost_pace**PACE > slower
    if looks_slower and any(interval.low > slower for interval in intervals) and intervals[-1].low > 1:
        return Comparison("uncertain" if invalid else "slower", seconds, cycles, invalid)
    if seconds.ratio > slower:
        reason = f"within the variation of the times, {basis}: {seconds}"
        if cycles is not None and not looks_slower:
            reason = f"a slower clock may explain the slowdown: {seconds} in seconds is {cycles} in cycles"
        return Comparison("uncertain", seconds, cycles, invalid or reason)
    if seconds.high > 1 + (max(MOST_UNKNOWN, 2 * tolerance) if most_unknown is None else most_unknown):
        return Comparison("uncertain", seconds, cycles, invalid or f"the times vary too much to tell: {seconds}")
    looks_faster = all(interval.ratio < 1 / slower for interval in intervals)
    if looks_faster and invalid is None and any(interval.high < 1 / slower for interval in intervals):
        return Comparison("faster", seconds, cycles)
    return Comparison("not slower", seconds, cycles)


def _seconds(rounds: Sequence[Round]) -> tuple[float, ...]:
    return tuple(timed.seconds for timed in rounds)


def _cycles(rounds: Sequence[Round]) -> tuple[float, ...] | None:
    cycles = [timed.cycles for timed in rounds]
    return None if None in cycles else tuple(value for value in cycles if value is not None)
