"""Draws trials on a machine that others use, too: of a step with itself, and with a slowdown, by what was at work meanwhile."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from time_judged import Trial, runs_of
from time_recorded import Series
from time_simulated import moderate_load

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from time_recorded import Recording, Run

BASELINE_RUNS, FEWEST_MEASURES = 5, 3
FEWEST_SERIES = 5
"""Of a row: fewer say more of themselves than of the rule."""
MOST_BASELINE_RUNS = 10
IDLE, MODERATE, HEAVY, CROWDED = "idle", "moderate load", "heavy load", "crowded"
LOADS = (IDLE, MODERATE, HEAVY, CROWDED)
IDLE_WAITED, IDLE_OTHERS = 0.02, 0.25
"""Of the time, and in cores beside the step's: less is an idle machine."""
MODERATE_WAITED, MODERATE_OTHERS = 0.20, 0.75
"""As much is a moderate load, and more a heavy one: a neighbour that works half of the time uses up to 0.75 in 5 seconds."""
HEAVY_WAITED = 0.5
"""More is a machine with more than two processes for each core."""
SIMULATED = "simulated moderate load"
WORK, WAIT = "work", "busy wait"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """``percent`` more, of the step's work or as a busy wait: really ``planted``, or reckoned from a run without.

    A planted wait is as long beside any load as where nothing is at work: beside a heavy one the step takes less than
    ``percent`` longer, since a wait on the clock ends while the thread waits for a core. A reckoned one is a share of what
    the step takes beside its load.
    """

    form: str
    percent: int
    planted: bool

    def __str__(self) -> str:
        return f"+{self.percent} % {self.form}, {'planted' if self.planted else 'reckoned'}"


def load_of(series: Series, cores: int) -> str:
    """Describes what was at work while a series was recorded, by its own readings."""
    first, last = series.readings[0], series.readings[-1]
    seconds = last.at - first.at
    waited = ((last.waited or 0.0) - (first.waited or 0.0)) / seconds
    # Those that ran while the thread waited are no others beside it.
    beside = (((last.others or 0.0) - (first.others or 0.0)) / seconds - waited) / max(cores - 1, 1)
    if waited <= IDLE_WAITED and beside <= IDLE_OTHERS:
        return IDLE
    if waited <= MODERATE_WAITED and beside <= MODERATE_OTHERS:
        return MODERATE
    return HEAVY if waited <= HEAVY_WAITED else CROWDED


def longer(series: Series, work: float = 0.0, wait: float = 0.0) -> Series:
    """The series of a step with a share of ``work`` more, or ``wait`` seconds, and the same share of the load."""
    factors = [1 + work + wait / seconds for seconds in series.seconds]
    readings = [series.readings[0]]
    for factor, (before, after) in zip(factors, itertools.pairwise(series.readings), strict=True):
        grown: dict[str, Any] = {
            name: None if now is None or then is None else getattr(readings[-1], name) + factor * (now - then)
            for name in ("at", "waited", "stolen", "others")
            for then, now in [(getattr(before, name), getattr(after, name))]
        }
        readings.append(replace(after, **grown))
    return Series(
        series.steps,
        tuple(seconds * factor for seconds, factor in zip(series.seconds, factors, strict=True)),
        tuple(readings),
    )


def reckoned(series: Series, slowdown: Slowdown) -> Series:
    """The series of the step with a slowdown, beside the same load."""
    share = slowdown.percent / 100
    if slowdown.form == WORK:
        return longer(series, share)
    return longer(series, wait=share * statistics.median(series.seconds))


def itself(recording: Recording, chance: random.Random, load: str, count: int) -> Iterator[Trial]:
    """Comparisons of a step with itself: up to 10 runs beside any load, and another run beside a ``load``."""
    drawn = _Drawn(recording)
    for now, step in drawn.choices(chance, [run for run in recording.runs if run.is_plain], load, count):
        yield drawn.trial(chance, now, step, now.series[step], chance.randint(1, MOST_BASELINE_RUNS))


def slower(recording: Recording, chance: random.Random, slowdown: Slowdown, load: str, count: int) -> Iterator[Trial]:
    """Comparisons of a step that has become slower, beside a ``load``, with 5 accepted runs beside any."""
    drawn = _Drawn(recording)
    work = slowdown.percent if slowdown.form == WORK else 0
    wait = slowdown.percent if slowdown.form == WAIT else 0
    kind = (work, wait) if slowdown.planted else (0, 0)
    for now, step in drawn.choices(
        chance, [run for run in recording.runs if (run.percent, run.wait) == kind], load, count
    ):
        series = now.series[step]
        if not slowdown.planted:
            series = reckoned(series, slowdown)
        yield drawn.trial(chance, now, step, series, BASELINE_RUNS, only_measures=True)


def simulated(chance: random.Random, slowdown: Slowdown | None, count: int) -> Iterator[Trial]:
    """Comparisons beside a simulated moderate load, of a step with itself or with a slowdown, with 5 runs beside the same."""
    for _ in range(count):
        trial = moderate_load(chance, BASELINE_RUNS)
        if slowdown is not None:
            trial = replace(trial, now=reckoned(trial.now, slowdown))
        yield trial


class _Drawn:
    """Draws from the plain runs of a recording for baselines, and from others for what is judged."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._plain = [run for run in recording.runs if run.is_plain]
        self._measures = {
            step: [run for run in self._plain if runs_of([run.series[step]], recording.cores) is not None]
            for step in recording.runs[0].series
        }

    def choices(self, chance: random.Random, runs: Sequence[Run], load: str, count: int) -> Iterator[tuple[Run, str]]:
        cores = self._recording.cores
        fitting = [(run, step) for run in runs for step, one in run.series.items() if load_of(one, cores) == load]
        fitting = [(run, step) for run, step in fitting if len(self._measures[step]) >= FEWEST_MEASURES]
        if len(fitting) < FEWEST_SERIES:
            return
        for _ in range(count):
            yield chance.choice(fitting)

    def trial(
        self, chance: random.Random, now: Run, step: str, series: Series, runs: int, *, only_measures: bool = False
    ) -> Trial:
        of = self._measures[step] if only_measures else self._plain
        others = [run for run in of if run is not now]
        chosen = sorted(chance.sample(others, min(runs, len(others))), key=lambda run: run.began)
        return Trial(tuple(run.series[step] for run in chosen), series, self._recording.cores)
