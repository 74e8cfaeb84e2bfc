"""Sampling of a step's time: rounds of several steps until the median is known well enough or the time budget is spent."""

from __future__ import annotations

import functools
import math
import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.timing import validity
from pytest_gpumem.timing.validity import disturbance, load
from pytest_gpumem.values.interference import Slowed
from pytest_gpumem.values.times import FEWEST_ROUNDS, Round, Sample, Times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.devices.contract import Device


DEFAULT_SECONDS = 2.0


class TimeBudget:
    """The seconds that a test has left for timing. A step may take half of it, so that there is some for the ones to come."""

    __slots__ = ("_left", "_left_for_second_samples", "_seconds")

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = self._left = self._left_for_second_samples = seconds

    @property
    def share(self) -> float:
        """Seconds for the next sample."""
        return self._left / 2

    @property
    def second_sample(self) -> float:
        """Seconds for a second sample of a step: as long as a first one, whatever is left."""
        return self._seconds / 2

    @property
    def may_sample_again(self) -> bool:
        """True if seconds are left for second samples that decide nothing. One that fails the test is always taken."""
        return self._left_for_second_samples > 0

    def spend_on_second_sample(self, seconds: float) -> None:
        """Subtract the ``seconds`` that a second sample took."""
        self._left_for_second_samples -= seconds

    def spend(self, seconds: float) -> None:
        """Subtract the ``seconds`` that timing took."""
        self._left = max(0.0, self._left - seconds)


SECONDS_A_ROUND = 0.02
"""A round is made of enough steps to last this long, so that the clock's resolution and a launch do not count."""
PRECISION = 0.005
"""Sampling stops when the median is known to this ratio, to either side, with a confidence of 95 %."""
ROUNDS_BEFORE_A_STOP = 12
ROUNDS_OF_PHASES = 3
_SHORTEST = 1e-9
"""Seconds of a step for which the clock did not move: it has no ratio to another one otherwise."""


def sample_step(step: Callable[[], object], device: Device, seconds: float, fewest: int = 1) -> Sample:
    """Take a sample of ``step`` in about ``seconds``, of at least ``fewest`` rounds.

    The first step of all finds out how many make a round, and counts only when it filled one by itself. When it was slow
    to start, so that the round after it is far too short, that one finds it out instead, and neither counts. A round that
    something disturbed is kept and does not count, and sampling goes on without it while there is time.

    On several ranks all run as many steps in as many rounds, by the longest time that a round took on one of them, until the
    median is known on each. As they may wait for one another in a step, what disturbed one of them disturbed all.
    """
    rounds = _Rounds(device)
    seconds = max(device.consensus.exchange(seconds))
    mine = device.time(step)
    took = spent = max(device.consensus.exchange(mine))
    steps = _steps_a_round(took)
    rounds.read_pace()
    if steps == 1:
        rounds.keep(mine, took)
    else:
        rounds.begin()
    sized = False
    while len(rounds.kept) < max(fewest, _needed(took)) or (spent < seconds and not rounds.are_enough()):
        mine = device.time(functools.partial(_repeat, step, steps))
        took = max(device.consensus.exchange(mine))
        spent += took
        if sized or took >= SECONDS_A_ROUND / 2:
            rounds.keep(mine / steps, took)
        else:
            steps = max(steps, _steps_a_round(took / steps))
            rounds.read_pace()
            rounds.begin()
        sized = True
    rounds.end()
    sample = Sample(tuple(rounds.kept), steps)
    few = sum(one.disturbed is None for one in sample.rounds) < min(FEWEST_ROUNDS, len(sample.rounds))
    invalid = (sample.most_disturbed_by if few else None) or device.consensus.first(rounds.load())
    if invalid is None:
        return sample
    return Sample(sample.rounds, steps, invalid, rounds.slowed(disturbed=few))


class _Rounds:
    """The rounds of a sample, some at a time between two readings of the clock that steps run by and of what may disturb it."""

    def __init__(self, device: Device) -> None:
        self.kept: list[Round] = []
        self._read = 0
        """The number of rounds that are followed by a reading."""
        self._slowed_on_gpu = 1.0
        self._device = device
        self._begun = self._before = device.conditions()
        self._pace: float | None = None
        self._unread = 0.0
        """Seconds of the rounds since the latest reading."""

    def read_pace(self) -> None:
        """Read how fast the clock runs. Not before the first step: the clock of a GPU at rest is another one."""
        self._pace = self._device.pace()

    def begin(self) -> None:
        """Discard what was timed so far."""
        self.kept.clear()
        self._read, self._slowed_on_gpu = 0, 1.0
        self._unread = 0.0
        self._before = self._device.conditions()

    def keep(self, seconds: float, took: float) -> None:
        """Keep a round of steps of so many seconds each, which ``took`` so many on the slowest rank."""
        self._unread += took
        self.kept.append(Round(max(seconds, _SHORTEST)))
        if self._unread >= self._device.seconds_between_readings:
            self.end()

    def end(self) -> None:
        """Read clock and interference, and assign them to the rounds since the last reading."""
        unread = self.kept[self._read :]
        if not unread:
            return
        pace = self._pace
        # In this order: reading the conditions takes so long that a GPU may have come to rest.
        self.read_pace()
        now = self._device.conditions()
        disturbed = self._device.consensus.first(disturbance(self._before, now))
        pace = _lowest(self._device.consensus.exchange(_between(pace, self._pace)))
        taken = 1.0 if disturbed is None else max(self._device.consensus.exchange(validity.taken(self._before, now)))
        self.kept[self._read :] = [replace(one, pace=pace, disturbed=disturbed, taken=taken) for one in unread]
        self._read, self._slowed_on_gpu = (
            len(self.kept),
            max(self._slowed_on_gpu, validity.slowed_on_gpu(self._before, now)),
        )
        self._before, self._unread = now, 0.0

    def are_enough(self) -> bool:
        """Return whether the median is known. Only called after a reading: between two rounds as little as possible is done."""
        return self._read == len(self.kept) and self._device.consensus.all(_is_known(self.kept))

    def load(self) -> str | None:
        """Return what kept the machine busy during the whole sample, as a clause."""
        return load(self._begun, self._before)

    def slowed(self, *, disturbed: bool) -> Slowed:
        """Return the largest factors by which interference slowed the steps; ``disturbed``: also in the rounds that count."""
        on_host = validity.slowed(self._begun, self._before)
        shared = max(on_host.shared, self._slowed_on_gpu) if disturbed else on_host.shared
        everywhere = self._device.consensus.exchange([shared, on_host.refilled])
        return Slowed(*(max(factors) for factors in zip(*everywhere, strict=True)))


def _steps_a_round(seconds: float) -> int:
    return max(1, math.ceil(SECONDS_A_ROUND / seconds)) if seconds > 0 else 1


def _needed(took: float) -> int:
    """Return the fewest rounds to take, whatever time is left, when the latest ``took`` so many seconds."""
    return FEWEST_ROUNDS if took < 2 * SECONDS_A_ROUND else 1


def time_step(
    step: Callable[[], object],
    phases: Sequence[tuple[str, Callable[[], object]]],
    device: Device,
    time_budget: TimeBudget,
) -> Times:
    """Return the first sample of the time of ``step`` and the times of its ``phases``, with the device to itself."""
    with to_themselves(device) as refused:
        sample = sample_step(step, device, time_budget.share)
        time_budget.spend(sample.spent)
        laps = time_phases(phases, device, sample.steps, time_budget)
    return Times((invalid_if(refused, sample, device),), laps)


@contextmanager
def to_themselves(device: Device) -> Iterator[str | None]:
    """Keep measured tests of others off the devices of all ranks; yields why not, as `Device.exclusive` does."""
    with ExitStack() as stack:
        with device.consensus.in_turn():
            refused = stack.enter_context(device.exclusive())
        yield device.consensus.first(refused)


def invalid_if(refused: str | None, sample: Sample, device: Device) -> Sample:
    """Return ``sample``, which is invalid if the device was ``refused`` to it, as that clause of `to_themselves` says."""
    if refused is None:
        return sample
    slowed = sample.slowed or Slowed()
    shared = max(slowed.shared, validity.contended(device.conditions()))
    return replace(sample, invalid=refused, slowed=replace(slowed, shared=shared))


def time_phases(
    phases: Sequence[tuple[str, Callable[[], object]]],
    device: Device,
    steps: int,
    time_budget: TimeBudget,
) -> Mapping[str, float]:
    """Return the median seconds of each phase of a step, from rounds of ``steps`` steps. Phases of one name are one.

    There are `ROUNDS_OF_PHASES`, or fewer when the share of the ``time_budget`` is spent. Nothing is run for a single phase.
    They are not taken from the rounds of a sample: reading the clock at every boundary would be in them.
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
    quiet = [one.seconds for one in rounds if one.disturbed is None]
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
