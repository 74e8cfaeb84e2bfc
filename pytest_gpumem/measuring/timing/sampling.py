"""Sample a step's time: run rounds with several steps, until the median is known well enough or the time budget is spent."""

from __future__ import annotations

import functools
import math
import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.times import FEWEST_ROUNDS, Round, Sample, Times
from pytest_gpumem.measuring.timing import validity
from pytest_gpumem.measuring.timing.validity import disturbance, tick_disturbance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.measuring.devices.contract import Device


DEFAULT_SECONDS = 2.0


class TimeBudget:
    """The remaining seconds for timing in a test. A step may use half of them, so later steps also have time."""

    __slots__ = ("_left", "_left_for_second_samples", "_seconds")

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = self._left = self._left_for_second_samples = seconds

    @property
    def share(self) -> float:
        """The seconds for the next step's first sample: half of the remaining seconds."""
        return self._left / 2

    @property
    def second_sample(self) -> float:
        """The seconds for a step's second sample: as many as for the first sample in the test's first step."""
        return self._seconds / 2

    @property
    def may_sample_again(self) -> bool:
        """True if time remains for a second sample that cannot fail the test.

        A second sample that can fail the test is always taken.
        """
        return self._left_for_second_samples > 0

    def spend_on_second_sample(self, seconds: float) -> None:
        """Subtract the ``seconds`` that a second sample took."""
        self._left_for_second_samples -= seconds

    def spend(self, seconds: float) -> None:
        """Subtract the ``seconds`` that timing took."""
        self._left = max(0.0, self._left - seconds)


SECONDS_A_ROUND = 0.02
"""The minimum seconds in a round. A round this long is not affected by the clock's resolution or by a kernel launch."""
PRECISION = 0.005
"""Sampling stops when the median is known to plus or minus this share, with 95 % confidence."""
ROUNDS_BEFORE_A_STOP = 12
ROUNDS_OF_PHASES = 3
_SHORTEST = 1e-9
"""The seconds for a step that was too short for the clock, because ratios need a time above 0."""


def sample_step(step: Callable[[], object], device: Device, seconds: float, fewest: int = 1) -> Sample:
    """Take a sample of ``step``.

    The time of the first step decides how many steps make a round. The first step counts only if it is as long as a round. If
    the first step was unusually slow, the next round is far too short. Then this short round decides the number of steps, and
    neither the first step nor the short round counts. A disturbed round is stored but does not count, and sampling continues
    if time remains.

    All ranks run the same number of steps in the same number of rounds, until the median is known on each rank. The slowest
    rank's times decide these numbers. A rank may wait for other ranks in a step, so a disturbance on one rank counts on all
    ranks.

    Args:
        step: Runs one step.
        device: The step's device.
        seconds: The approximate time for the sample.
        fewest: The minimum number of rounds.

    Example:
        The first step takes 4 ms, so a round has 5 steps and takes 20 ms. In 1 s there is time for about 50 rounds. Sampling
        stops after 12 or more rounds if the median is known to 0.5 %.
    """
    rounds = _Rounds(device)
    seconds = max(device.consensus.exchange(seconds))
    own_seconds = device.time(step)
    took = spent = max(device.consensus.exchange(own_seconds))
    steps = _steps_a_round(took)
    rounds.read_pace()
    if steps == 1:
        rounds.keep(own_seconds, took)
    else:
        rounds.begin()
    sized = False
    while len(rounds.timed) < max(fewest, _fewest_rounds(took)) or (spent < seconds and not rounds.are_enough()):
        own_seconds = device.time(functools.partial(_repeat, step, steps))
        took = max(device.consensus.exchange(own_seconds))
        spent += took
        if sized or took >= SECONDS_A_ROUND / 2:
            rounds.keep(own_seconds / steps, took)
        else:
            steps = max(steps, _steps_a_round(took / steps))
            rounds.read_pace()
            rounds.begin()
        sized = True
    rounds.end()
    sample = Sample(tuple(rounds.timed), steps)
    few = sum(timed.disturbed is None for timed in sample.rounds) < min(FEWEST_ROUNDS, len(sample.rounds))
    invalid = (sample.most_disturbed_by if few else None) or device.consensus.first(rounds.load())
    if invalid is None:
        return sample
    return Sample(sample.rounds, steps, invalid, rounds.slowdown(disturbed=few))


class _Rounds:
    """A sample's rounds. The clock rate and the interference counters are read after every few rounds."""

    def __init__(self, device: Device) -> None:
        self.timed: list[Round] = []
        self._read = 0
        """The number of rounds that were followed by a reading."""
        self._gpu_slowdown = 1.0
        self._device = device
        self._begun = self._before = device.conditions()
        self._pace: float | None = None
        self._unread = 0.0
        """The total seconds of the rounds since the latest reading."""

    def read_pace(self) -> None:
        """Read the clock rate. Call this method after the first step, because an idle GPU has another clock rate."""
        self._pace = self._device.pace()

    def begin(self) -> None:
        """Discard all rounds so far."""
        self.timed.clear()
        self._read, self._gpu_slowdown = 0, 1.0
        self._unread = 0.0
        self._before = self._device.conditions()

    def keep(self, seconds: float, took: float) -> None:
        """Add a round.

        Args:
            seconds: Seconds per step on this rank.
            took: The round's seconds on the slowest rank.
        """
        self._unread += took
        self.timed.append(Round(max(seconds, _SHORTEST)))
        if self._unread >= self._device.seconds_between_readings:
            self.end()

    def end(self) -> None:
        """Read the clock rate and the interference counters, and add the results to the rounds since the last reading."""
        unread = self.timed[self._read :]
        if not unread:
            return
        pace = self._pace
        # Read the clock rate first. Reading the interference counters takes so long that the GPU may be idle afterwards.
        self.read_pace()
        conditions = self._device.conditions()
        disturbed = self._device.consensus.first(disturbance(self._before, conditions))
        pace = _lowest(self._device.consensus.exchange(_between(pace, self._pace)))
        taken = (
            1.0
            if disturbed is None
            else max(self._device.consensus.exchange(validity.time_factor(self._before, conditions)))
        )
        self.timed[self._read :] = [replace(timed, pace=pace, disturbed=disturbed, taken=taken) for timed in unread]
        self._read, self._gpu_slowdown = (
            len(self.timed),
            max(self._gpu_slowdown, validity.gpu_slowdown(self._before, conditions)),
        )
        self._before, self._unread = conditions, 0.0

    def are_enough(self) -> bool:
        """Return whether the median is known well enough.

        The median is only computed after a reading, to keep the pause between other rounds short.
        """
        return self._read == len(self.timed) and self._device.consensus.all(_is_known(self.timed))

    def load(self) -> str | None:
        """Return a clause if other work kept the machine busy during the sample; otherwise ``None``."""
        return tick_disturbance(self._begun, self._before)

    def slowdown(self, *, disturbed: bool) -> Slowdown:
        """Return the largest factors by which interference slowed the steps.

        Args:
            disturbed: True if some of the counted rounds were disturbed.
        """
        on_host = validity.slowdown(self._begun, self._before)
        shared = max(on_host.shared, self._gpu_slowdown) if disturbed else on_host.shared
        everywhere = self._device.consensus.exchange([shared, on_host.refilled])
        return Slowdown(*(max(factors) for factors in zip(*everywhere, strict=True)))


def _steps_a_round(seconds: float) -> int:
    return max(1, math.ceil(SECONDS_A_ROUND / seconds)) if seconds > 0 else 1


def _fewest_rounds(took: float) -> int:
    """Return the minimum number of rounds, given the seconds in the last round. Long rounds need only one."""
    return FEWEST_ROUNDS if took < 2 * SECONDS_A_ROUND else 1


def time_step(
    step: Callable[[], object],
    phases: Sequence[tuple[str, Callable[[], object]]],
    device: Device,
    time_budget: TimeBudget,
) -> Times:
    """Time a step while no other measured test uses the device.

    Args:
        step: Runs one step.
        phases: The step's phases by name, each with a function to run the phase.
        device: The step's device.
        time_budget: The remaining seconds for timing.

    Returns:
        A sample with the step's time, and the phases' times.
    """
    with exclusive_use(device) as refused:
        sample = sample_step(step, device, time_budget.share)
        time_budget.spend(sample.spent)
        laps = time_phases(phases, device, sample.steps, time_budget)
    return Times((invalidate_if_refused(refused, sample, device),), laps)


@contextmanager
def exclusive_use(device: Device) -> Iterator[str | None]:
    """Keep other measured tests from using the devices of all ranks. Yield the reason if this fails, otherwise ``None``."""
    with ExitStack() as stack:
        with device.consensus.in_turn():
            refused = stack.enter_context(device.exclusive())
        yield device.consensus.first(refused)


def invalidate_if_refused(refused: str | None, sample: Sample, device: Device) -> Sample:
    """Return the sample, marked as invalid if other tests could use the device. ``refused`` comes from `exclusive_use`."""
    if refused is None:
        return sample
    slowed = sample.slowed or Slowdown()
    shared = max(slowed.shared, validity.contention_factor(device.conditions()))
    return replace(sample, invalid=refused, slowed=replace(slowed, shared=shared))


def time_phases(
    phases: Sequence[tuple[str, Callable[[], object]]],
    device: Device,
    steps: int,
    time_budget: TimeBudget,
) -> Mapping[str, float]:
    """Return the median seconds for each phase in a step. Phases with the same name are added up.

    The phases run in separate rounds, because the clock readings between phases would make a sample's rounds longer. For a step
    with a single phase, nothing runs and the result is empty.

    Args:
        phases: The phases by name, each with a function that runs the phase.
        device: The step's device.
        steps: The number of steps in a round.
        time_budget: The remaining seconds. Phases get half the seconds. If this half is spent early, fewer than
            `ROUNDS_OF_PHASES` rounds run.
    """
    seconds: dict[str, list[float]] = {name: [] for name, _ in phases}
    if device.consensus.all(len(seconds) == 1):
        return {}
    share, spent = time_budget.share, 0.0
    for _ in range(ROUNDS_OF_PHASES):
        if device.consensus.any(spent > 0 and spent >= share):
            break
        laps = device.laps([run for _ in range(steps) for _, run in phases])
        took = dict.fromkeys(seconds, 0.0)
        for number, lap in enumerate(laps):
            took[phases[number % len(phases)][0]] += lap
        for name, lap in took.items():
            seconds[name].append(lap / steps)
        spent += sum(laps)
    time_budget.spend(spent)
    return {name: statistics.median(rounds) for name, rounds in seconds.items()}


def _is_known(rounds: Sequence[Round]) -> bool:
    quiet = [timed.seconds for timed in rounds if timed.disturbed is None]
    if len(quiet) < ROUNDS_BEFORE_A_STOP:
        return False
    sample = Sample(tuple(rounds))
    low, high = sample.interval(0.95)
    return high - low <= 2 * PRECISION * sample.median


def _lowest(paces: Sequence[float | None]) -> float | None:
    read = [pace for pace in paces if pace is not None]
    return min(read) if len(read) == len(paces) else None


def _between(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else (first + second) / 2


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()
