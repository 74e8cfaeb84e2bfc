"""Simulated comparisons of a step with itself, on machines that drift, are disturbed in bursts, or change their clock."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from time_judged import PairedTrial, Trial, in_order
from time_recorded import Reading, Series

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

CORES = 8
CORES_UNDER_LOAD = 2
SERIES_SECONDS = 3.2
READING_SECONDS = 0.0012
PACE = 4000.0
BETWEEN_RUNS, WITHIN_RUN, OF_PACE = 0.01, 0.006, 0.005
"""Standard deviations of logarithms."""
MOST_BASELINE_RUNS = 10


@dataclass
class Moment:
    """Effect of a machine on a round: the factor on its time, that on the pace, and the share that the thread waited."""

    longer: float = 1.0
    pace: float = 1.0
    waited: float = 0.0
    others: float = 0.0


@dataclass
class Machine:
    """``moment(seconds)`` is the machine at a time; ``noise()`` the factor on a round that is its own."""

    chance: random.Random
    moment: Callable[[float], Moment] = field(default=lambda _: Moment())
    noise: Callable[[], float] | None = None

    def run(self, step_seconds: float, began: float, seconds_to_run: float = SERIES_SECONDS) -> Series:
        """A run of a step, as one that was recorded."""
        chance = self.chance
        steps = max(1, math.ceil(0.02 / step_seconds))
        step_seconds *= math.exp(chance.gauss(0, BETWEEN_RUNS))
        at = waited = others = 0.0
        seconds: list[float] = []
        readings = [self._reading(0.0, self.moment(began), 0.0, 0.0)]
        while at < seconds_to_run:
            now = self.moment(began + at)
            noise = self.noise() if self.noise is not None else math.exp(chance.gauss(0, WITHIN_RUN))
            took = step_seconds * now.longer * noise
            elapsed = took * (steps if seconds else 1) + READING_SECONDS
            at, waited, others = at + elapsed, waited + now.waited * elapsed, others + now.others * elapsed
            seconds.append(took)
            readings.append(self._reading(at, now, waited, others))
        return Series(steps, tuple(seconds), tuple(readings))

    def _reading(self, at: float, now: Moment, waited: float, others: float) -> Reading:
        pace = PACE * now.pace * math.exp(self.chance.gauss(0, OF_PACE))
        return Reading(at, pace, waited, 0.0, others)


def _trial(chance: random.Random, before: Machine, after: Machine, apart: float = 3600.0) -> Trial:
    """A step on one machine, ``apart`` seconds from run to run, and then on another."""
    step_seconds = math.exp(chance.uniform(math.log(0.003), math.log(0.06)))
    count = chance.randint(1, MOST_BASELINE_RUNS)
    baseline = tuple(before.run(step_seconds, apart * number) for number in range(count))
    return Trial(baseline, after.run(step_seconds, apart * count), CORES)


def _in_turns(chance: random.Random, machine: Machine, pairs: int) -> PairedTrial:
    """A step in pairs of runs on one machine, 5 to 30 seconds from run to run."""
    step_seconds, apart = math.exp(chance.uniform(math.log(0.003), math.log(0.06))), chance.uniform(5, 30)
    runs = [machine.run(step_seconds, apart * number) for number in range(2 * pairs)]
    neighbours = zip(runs[::2], runs[1::2], strict=True)
    return PairedTrial(tuple(in_order(number, both) for number, both in enumerate(neighbours)), CORES)


def drift(chance: random.Random) -> Trial:
    """The clock rises and falls by 2 to 10 %, once in 2 to 60 minutes."""
    machine = _drifting(chance)
    return _trial(chance, machine, machine, apart=chance.uniform(60, 3600))


def drift_in_turns(chance: random.Random, pairs: int) -> PairedTrial:
    """As `drift`, while the runs take turns."""
    return _in_turns(chance, _drifting(chance), pairs)


def _drifting(chance: random.Random) -> Machine:
    depth, period = chance.uniform(0.02, 0.10), chance.uniform(120, 3600)
    phase = chance.uniform(0, 2 * math.pi)

    def moment(seconds: float) -> Moment:
        clock = math.exp(depth * math.sin(2 * math.pi * seconds / period + phase))
        return Moment(1 / clock, clock)

    return Machine(chance, moment)


def bursts(chance: random.Random) -> Trial:
    """Neighbours work for 0.2 to 3 s and rest as long: they take the core for a part of each round, or disturb the caches.

    The yardstick is as often hit as not, since it takes the best of a few.
    """
    return _trial(chance, _disturbed(chance), _disturbed(chance), apart=97.3)


def bursts_in_turns(chance: random.Random, pairs: int) -> PairedTrial:
    """As `bursts`, while the runs take turns."""
    return _in_turns(chance, _disturbed(chance), pairs)


def _disturbed(chance: random.Random) -> Machine:
    takes_the_core = chance.random() < 0.5
    by = chance.uniform(1.2, 2.5) if takes_the_core else chance.uniform(1.03, 1.3)
    borders, working = [0.0], chance.random() < 0.5
    while borders[-1] < 60:
        borders.append(borders[-1] + chance.uniform(0.2, 3.0))

    def moment(seconds: float) -> Moment:
        place = bisect.bisect_right(borders, seconds % 60)
        if (place % 2 == 0) == working:
            return Moment()
        if takes_the_core:
            return Moment(by, waited=1 - 1 / by, others=1.0)
        return Moment(by, pace=by**-0.5, others=1.0)

    return Machine(chance, moment)


def moderate_load(chance: random.Random, runs: int) -> Trial:
    """A neighbour works for a third of the time, in turns of 0.2 to 1 s, beside ``runs`` runs and the one that is judged.

    It takes a tenth to a third of the core meanwhile, or makes the step up to 12 % longer through the caches, of which the pace
    shows half. Series are long enough for three samples.
    """
    takes_the_core = chance.random() < 0.5
    by = chance.uniform(1.1, 1.5) if takes_the_core else chance.uniform(1.0, 1.12)

    def machine() -> Machine:
        began, turn = chance.uniform(0, 3), chance.uniform(0.2, 1.0)

        def moment(seconds: float) -> Moment:
            if (seconds + began) % (3 * turn) >= turn:
                return Moment()
            if takes_the_core:
                return Moment(by, waited=1 - 1 / by, others=1.0)
            return Moment(by, pace=by**-0.5, others=1.0)

        return Machine(chance, moment)

    step_seconds = math.exp(chance.uniform(math.log(0.003), math.log(0.06)))
    baseline = tuple(machine().run(step_seconds, 60.0 * number) for number in range(runs))
    now = machine().run(step_seconds, 60.0 * runs, seconds_to_run=3 * SERIES_SECONDS / 2)
    return Trial(baseline, now, CORES_UNDER_LOAD)


def frequency_step(chance: random.Random) -> Trial:
    """The clock is 10 to 30 % lower in the whole of the run that is judged, and the pace tells."""
    clock = 1 - chance.uniform(0.10, 0.30)
    return _trial(chance, Machine(chance), Machine(chance, lambda _: Moment(1 / clock, clock)))


def frequency_step_in_turns(chance: random.Random, pairs: int) -> PairedTrial:
    """As `frequency_step`, with the clock falling at some moment while the runs take turns."""
    clock, since = 1 - chance.uniform(0.10, 0.30), chance.uniform(0, 240)
    machine = Machine(chance, lambda seconds: Moment(1 / clock, clock) if seconds > since else Moment())
    return _in_turns(chance, machine, pairs)


def heavy_tails(chance: random.Random) -> Trial:
    """Rounds are late by Student's t of two degrees of freedom, and one in ten by a Pareto distribution without a variance."""

    def noise() -> float:
        student = chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1, 1))
        outlier = 0.1 * (chance.paretovariate(1.5) - 1) if chance.random() < 0.1 else 0.0
        return math.exp(min(0.01 * abs(student) + outlier, 3.0))

    machine = Machine(chance, noise=noise)
    return _trial(chance, machine, machine)


SCENARIOS: dict[str, Callable[[random.Random], Trial]] = {
    "drift": drift,
    "bursts": bursts,
    "frequency steps": frequency_step,
    "heavy tails": heavy_tails,
}
SCENARIOS_IN_TURNS: dict[str, Callable[[random.Random, int], PairedTrial]] = {
    "drift": drift_in_turns,
    "bursts": bursts_in_turns,
    "frequency steps": frequency_step_in_turns,
}
"""Those in which a machine changes from run to run."""
