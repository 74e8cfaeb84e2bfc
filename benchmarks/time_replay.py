"""Plays a recorded series to the package's own sampling: what is judged is the real gate, and not a model of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.measure.timed_steps import ROUNDS_TO_DECIDE, SECONDS_BETWEEN_SAMPLES
from pytest_gpumem.measuring.timing.sampling import SECONDS_A_ROUND, TimeBudget, sample_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from time_recorded import Series

    from pytest_gpumem.facts.values.times import Sample
    from pytest_gpumem.measuring.devices.contract import Device


class Replay:
    """A device on which time passes as it did in a series, for what `sample_step` asks of one."""

    seconds_between_readings = CpuDevice.seconds_between_readings
    consensus = CpuDevice.consensus

    def __init__(self, series: Series, cores: int) -> None:
        self._series = series
        self._cores = cores
        self.played = 0
        """Rounds that have been taken."""

    @property
    def left(self) -> float:
        """Seconds of the rounds to come, as `sample_step` counts them: its first call is of one step."""
        if self.played == len(self._series.seconds):
            return 0.0
        first, *rounds = self._series.seconds[self.played :]
        return first + sum(rounds) * max(1, math.ceil(SECONDS_A_ROUND / first))

    def conditions(self) -> Conditions:
        one = self._series.readings[self.played]
        return Conditions(one.at, waited=one.waited, stolen=one.stolen, other_cpu_seconds=one.others, cores=self._cores)

    def pace(self) -> float:
        return self._series.readings[self.played].pace

    def time(self, run: Callable[[], object]) -> float:
        self._steps = 0
        run()
        # A sample takes a round at least: where the series has ended, its last one once more.
        self.played = min(self.played + 1, len(self._series.seconds))
        return self._series.seconds[self.played - 1] * self._steps

    def step(self) -> None:
        """Let time pass by the recording; this is what is timed."""
        self._steps += 1

    def rest(self, seconds: float, leaving: float) -> None:
        """Let ``seconds`` of the series pass, if at least ``leaving`` are left of it then."""
        readings = self._series.readings
        until = readings[self.played].at + seconds
        if readings[-1].at - until >= leaving:
            self.played = next(number for number, one in enumerate(readings) if one.at >= until)

    def sample(self, seconds: float, fewest: int = 1) -> Sample:
        """The next sample, for which ``seconds`` may be spent; a shorter one where the series ends before."""
        return sample_step(self.step, cast("Device", self), min(seconds, self.left), fewest)


class Timed:
    """A run of a step as the gate sees it: a sample, and re-measurements when they are asked for."""

    def __init__(self, series: Series, cores: int) -> None:
        self._replay = Replay(series, cores)
        time_budget = TimeBudget()
        self.first = self._replay.sample(time_budget.share)
        self._second_look = time_budget.second_sample
        self._again: list[Sample] = []

    @property
    def again(self) -> Sample:
        """The re-measurement, from rounds behind the first sample: after the gate's pause, where the series is that long."""
        if not self._again:
            self._look_again()
        return self._again[0]

    @property
    def once_more(self) -> Sample | None:
        """A third sample; ``None`` where the series is too short for one."""
        _ = self.again
        if len(self._again) == 1 and self._replay.left < self._second_look / 2:
            return None
        if len(self._again) == 1:
            self._look_again()
        return self._again[1]

    def _look_again(self) -> None:
        self._replay.rest(SECONDS_BETWEEN_SAMPLES, leaving=self._second_look)
        self._again.append(self._replay.sample(self._second_look, ROUNDS_TO_DECIDE))
