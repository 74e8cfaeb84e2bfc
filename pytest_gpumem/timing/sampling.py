"""Takes a sample of a step's time: rounds of several steps, until the median is known well enough or the time is spent."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from pytest_gpumem.timing.samples import FEWEST_ROUNDS, Round, Sample
from pytest_gpumem.timing.validity import disturbance, load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.timing.allowance import TimeAllowance

SECONDS_A_ROUND = 0.02
"""A round is made of enough steps to last this long, so that the clock's resolution and a launch do not count."""
PRECISION = 0.005
"""Sampling stops when the median is known to this ratio, to either side, with a confidence of 95 %."""
ROUNDS_BEFORE_A_STOP = 12
ROUNDS_OF_PHASES = 3
_SHORTEST = 1e-9
"""Seconds of a round for which the clock did not move: it has no ratio to another one otherwise."""


def sample_step(step: Callable[[], object], device: Device, seconds: float, fewest: int = 1) -> Sample:
    """A sample of ``step``, for which about ``seconds`` may be spent; at least ``fewest`` rounds are taken.

    The first step of all finds out how many make a round, and counts only when it filled one by itself. A round that
    something disturbed is kept and does not count, and sampling goes on without it while there is time.
    """
    begun = before = device.conditions()
    first = device.time(step)
    # Not before: the clock of a GPU at rest is another one.
    paces = [device.pace()]
    steps = max(1, math.ceil(SECONDS_A_ROUND / first)) if first > 0 else 1
    rounds: list[Round] = []
    spent, took = first, first

    def keep() -> None:
        nonlocal before
        after = device.conditions()
        paces.append(device.pace())
        rounds.append(Round(max(took, _SHORTEST) / steps, _between(paces[-2:]), disturbance(before, after)))
        before = after

    if steps == 1:
        keep()
    else:
        before = device.conditions()
    if first * steps < 2 * SECONDS_A_ROUND:
        # However little time is left, short rounds are enough of them to say something.
        fewest = max(fewest, FEWEST_ROUNDS)
    while len(rounds) < fewest or (spent < seconds and not _is_known(rounds)):
        took = device.time(lambda: _repeat(step, steps))
        spent += took
        keep()
    sample = Sample(tuple(rounds), steps)
    few = sum(one.disturbed is None for one in rounds) < min(FEWEST_ROUNDS, len(rounds))
    return Sample(sample.rounds, steps, (sample.most_disturbed_by if few else None) or load(begun, before))


def time_phases(
    phases: Sequence[tuple[str, Callable[[], object]]], device: Device, steps: int, allowance: TimeAllowance
) -> Mapping[str, float]:
    """Median seconds of each phase of a step, from rounds of ``steps`` steps. Phases of one name are one.

    There are `ROUNDS_OF_PHASES`, or fewer when the share of the ``allowance`` is spent. Nothing is run for a single phase.
    They are not taken from the rounds of a sample: reading the clock at every border would be in them.
    """
    seconds: dict[str, list[float]] = {name: [] for name, _ in phases}
    if len(seconds) == 1:
        return {}
    share, spent = allowance.share, 0.0
    for _ in range(ROUNDS_OF_PHASES):
        if spent and spent >= share:
            break
        laps = device.laps([run for _ in range(steps) for _, run in phases])
        took = dict.fromkeys(seconds, 0.0)
        for number, lap in enumerate(laps):
            took[phases[number % len(phases)][0]] += lap
        for name, lap in took.items():
            seconds[name].append(lap / steps)
        spent += sum(laps)
    allowance.spend(spent)
    return {name: statistics.median(rounds) for name, rounds in seconds.items()}


def _is_known(rounds: Sequence[Round]) -> bool:
    quiet = [one.seconds for one in rounds if one.disturbed is None]
    if len(quiet) < ROUNDS_BEFORE_A_STOP:
        return False
    sample = Sample(tuple(rounds))
    low, high = sample.interval(0.95)
    return high - low <= 2 * PRECISION * sample.median


def _between(paces: Sequence[float | None]) -> float | None:
    known = [pace for pace in paces if pace is not None]
    return statistics.fmean(known) if len(known) == len(paces) else None


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()
