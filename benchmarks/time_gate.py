"""Accuracy of the time gate: false alarms and power on recorded times, against a stored baseline and in A/B.

Recorded rounds are played to the package's own sampling, as if they happened now, and its own comparison judges the samples: a
first one, and a re-measurement from the rounds that come next where the gate asks for one, also of a run for the baseline. In
A/B `gpumem ab`'s own loop takes the pairs.

- *False alarms*: a baseline of 1 to 10 runs beside any load against another run beside any load; in A/B pairs of runs of the
  same code that were recorded one after the other.
- *Power*: planted slowdowns, quiet, against a baseline of 1, 3 or 10 runs of other blocks, and in A/B of at most 4 or 8 pairs
  of neighbours.
- *By what was at work* (``--noise`` alone): each series says itself what was. Slowdowns are planted, or reckoned from a run
  without: each round longer by a ratio or by a fixed wait, beside the same share of the load. A baseline is five runs that the
  store would accept.

Beside recorded runs there are simulated ones, on machines that drift, are disturbed in bursts, lower their clock for a whole
run, or have rounds with heavy tails. A row for which too few runs are recorded is left out, and what is claimed of it is missed
(but by what was at work, of which no recording has all). Trials are drawn from fewer runs than there are trials, so the
intervals (Clopper and Pearson's) are those of the drawing.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import time_recorded
from claims import Claim, conclude, parser_of, print_table
from time_judged import counted, ours, ours_in_turns, tolerance, tolerance_in_turns
from time_noise import CROWDED, HEAVY, IDLE, LOADS, MODERATE, SIMULATED, WAIT, WORK, Slowdown, itself, simulated, slower
from time_simulated import SCENARIOS, SCENARIOS_IN_TURNS
from time_trials import ANY_LOAD, QUIET, in_turns, planted, same_in_turns, same_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from time_judged import Outcome, PairedTrial, Score, Trial
    from time_recorded import Recording

RECORDING = Path(__file__).parent / "results" / "cpu-x86_64" / "time-samples.json"
RECORDED = "recorded, any load against any"
RECORDED_IN_TURNS = {"recorded, quiet": QUIET, "recorded, any load": ANY_LOAD}
MOST_FALSE_ALARMS = 1
"""Of a thousand comparisons of a step with itself."""
POWER = 0.95
SLOWDOWNS, LARGE_SLOWDOWNS = (3, 5, 10, 20), (25, 100)
"""Percent that are planted in quiet runs, and beside loads."""
BASELINE_RUNS = (1, 3, 10)
PAIRS = (4, 8)
"""At most, which is ``gpumem ab --rounds``; 8 is its default."""
CLAIMED_STORED, CLAIMED_IN_TURNS = (10, 10), (5, 8)
"""Percent planted, and runs of the baseline or pairs, that power is claimed for."""
ITSELF_BESIDE = "a step with itself, "
SLOWDOWNS_BESIDE = [
    Slowdown(form, percent, planted)
    for planted in (True, False)
    for percent in LARGE_SLOWDOWNS
    for form in (WORK, WAIT)
]
TWICE, QUARTER = 0.99, 0.80
"""The shares of steps twice as long that are caught up to a heavy load, and of those a quarter longer up to a moderate one."""
CHUNK = 50
"""Trials of one task of a worker process."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Trials of one kind, to be drawn in any process: ``name`` chooses how, ``percent`` and ``runs`` are its numbers."""

    name: str
    percent: int = 0
    runs: int = 0
    load: str = ""
    slowdown: Slowdown | None = None

    def drawn(self, recording: Recording, seed: int, count: int) -> Iterable[Trial]:
        """Return trials of this kind; the seed decides which."""
        chance = self._chance(seed)
        if self.load == SIMULATED:
            return simulated(chance, self.slowdown, count)
        if self.slowdown is not None:
            return slower(recording, chance, self.slowdown, self.load, count)
        if self.name == ITSELF_BESIDE:
            return itself(recording, chance, self.load, count)
        if self.name == RECORDED:
            return same_step(recording, chance, count)
        if self.name == "planted":
            return planted(recording, chance, self.percent, self.runs, count)
        return (SCENARIOS[self.name](chance) for _ in range(count))

    def drawn_in_turns(self, recording: Recording, seed: int, count: int) -> Iterable[PairedTrial]:
        """As `drawn`, of runs that take turns; ``runs`` is the number of pairs."""
        chance = self._chance(seed)
        if self.name == "planted":
            return in_turns(recording, chance, self.percent, self.runs, count)
        if self.name in RECORDED_IN_TURNS:
            return same_in_turns(recording, chance, RECORDED_IN_TURNS[self.name], self.runs, count)
        return (SCENARIOS_IN_TURNS[self.name](chance, self.runs) for _ in range(count))

    def _chance(self, seed: int) -> random.Random:
        return random.Random(f"{self} {seed}")  # noqa: S311 - the same command draws the same


def judge(path: Path, kind: Kind, seed: int, count: int) -> list[Outcome]:
    """Return what the gate says of each trial."""
    return [ours(trial) for trial in kind.drawn(_read(path), seed, count)]


def judge_in_turns(path: Path, kind: Kind, seed: int, count: int) -> list[Outcome]:
    """Return what `gpumem ab` says of each trial."""
    return [ours_in_turns(trial, tolerance_in_turns()) for trial in kind.drawn_in_turns(_read(path), seed, count)]


@lru_cache(maxsize=1)
def _read(path: Path) -> Recording:
    return time_recorded.read(path)


class Crew:
    """Worker processes that judge trials of a recording, in chunks."""

    def __init__(self, pool: ProcessPoolExecutor, path: Path) -> None:
        self._pool = pool
        self._path = path

    def start(
        self, work: Callable[[Path, Kind, int, int], list[Outcome]], kind: Kind, count: int
    ) -> list[Future[list[Outcome]]]:
        """Begin with ``count`` trials."""
        sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
        return [self._pool.submit(work, self._path, kind, seed, size) for seed, size in enumerate(sizes)]

    def score(self, started: Sequence[Future[list[Outcome]]]) -> Score | None:
        """Return the score of trials that were begun; ``None`` where the recording has too few runs for them."""
        outcomes = [outcome for job in started for outcome in job.result()]
        return counted(outcomes) if outcomes else None


def show_alarms(crew: Crew, trials: int) -> list[Claim]:
    """Print the table of false alarms. Returns what is claimed of them."""
    started = {name: crew.start(judge, Kind(name), trials) for name in (RECORDED, *SCENARIOS)}
    for name in (*RECORDED_IN_TURNS, *SCENARIOS_IN_TURNS):
        started[f"A/B, {name}"] = crew.start(judge_in_turns, Kind(name, runs=CLAIMED_IN_TURNS[1]), trials)
    print(f"False alarms: a step is compared with itself, {trials} times a row\n")
    found = _shown(crew, started)
    return [_alarms_claim(name, found.get(name)) for name in started]


def _alarms_claim(name: str, score: Score | None) -> Claim:
    if score is None:
        return Claim(f"{name}: too few runs are recorded; comparisons that pass", math.inf, 0)
    text = f"{name}: of {score.trials} comparisons of a step with itself, those that fail"
    return Claim(text, score.fails, math.ceil(MOST_FALSE_ALARMS * score.trials / 1000))


def show_power(crew: Crew, trials: int) -> list[Claim]:
    """Print the tables of planted slowdowns. Returns what is claimed of them."""
    stored = {
        f"{percent} % planted, baseline of {runs}": crew.start(judge, Kind("planted", percent, runs), trials)
        for runs in BASELINE_RUNS
        for percent in (0, *SLOWDOWNS)
    }
    turns = {
        f"{percent} % planted, at most {pairs} pairs": crew.start(
            judge_in_turns, Kind("planted", percent, pairs), trials // 2
        )
        for pairs in PAIRS
        for percent in SLOWDOWNS
    }
    print(f"Power, stored baseline: quiet runs with a planted slowdown, tolerance {tolerance():.1%}\n")
    found = _shown(crew, stored)
    print(f"Power, A/B: quiet runs in turns, tolerance {tolerance_in_turns():.1%}\n")
    found |= _shown(crew, turns)
    percent, runs = CLAIMED_STORED
    claimed = [f"{percent} % planted, baseline of {runs}"]
    percent, pairs = CLAIMED_IN_TURNS
    claimed.append(f"{percent} % planted, at most {pairs} pairs")
    return [_missed_claim(name, found.get(name), POWER) for name in claimed]


def show_noise(crew: Crew, trials: int) -> list[Claim]:
    """Print the tables of a machine that others use, too. Returns what is claimed of them."""
    alarms = {
        f"{ITSELF_BESIDE}{load}": crew.start(judge, Kind(ITSELF_BESIDE, load=load), trials)
        for load in (*LOADS, SIMULATED)
    }
    beside = {
        f"{slowdown}, {load}": (slowdown, load)
        for slowdown in SLOWDOWNS_BESIDE
        for load in (LOADS if slowdown.planted else (*LOADS, SIMULATED))
    }
    slowdowns = {
        name: crew.start(judge, Kind("slower", load=load, slowdown=slowdown), trials // 2)
        for name, (slowdown, load) in beside.items()
    }
    print(f"By what was at work: baselines of 1 to 10 runs beside any load, {trials} comparisons a row\n")
    claims = [_alarms_claim(name, score) for name, score in _shown(crew, alarms).items()]
    print(f"By what was at work: slowdowns against 5 runs beside any load, {trials // 2} comparisons a row\n")
    found = _shown(crew, slowdowns)
    return claims + [
        _missed_claim(name, score, power)
        for name, score in found.items()
        if (power := claimed_power(*beside[name])) is not None
    ]


def claimed_power(slowdown: Slowdown, load: str) -> float | None:
    """Return the share of slowdowns that are to be caught; ``None`` where nothing is claimed.

    Beside a heavy load a planted busy wait makes no step twice as long: it goes on while the thread waits for a core.
    """
    if slowdown.percent < LARGE_SLOWDOWNS[-1]:
        return QUARTER if load in (IDLE, MODERATE, SIMULATED) else None
    if load == CROWDED or (slowdown.form == WAIT and slowdown.planted and load == HEAVY):
        return None
    return TWICE


def _missed_claim(name: str, score: Score | None, power: float) -> Claim:
    if score is None:
        return Claim(f"{name}: too few runs are recorded; share that is missed", 1.0, 1 - power)
    low, high = score.interval()
    return Claim(f"{name}: share that is missed", 1 - score.share, 1 - power, 1 - high, 1 - low)


def _shown(crew: Crew, started: dict[str, list[Future[list[Outcome]]]]) -> dict[str, Score]:
    """Print the rows that enough runs are recorded for, and return their scores."""
    scores = {name: score for name, jobs in started.items() if (score := crew.score(jobs)) is not None}
    rows = []
    for name, score in scores.items():
        low, high = score.interval()
        rows.append((name, f"{score.fails} ({low:.1%} to {high:.1%})", f"{score.uncertain / score.trials:.1%}"))
    print_table(("", "fails", "uncertain"), rows)
    return scores


def main() -> int:
    """Judge, print the tables, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=1000)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--recording", type=Path, default=RECORDING, help="recorded times (default: %(default)s)")
    parser.add_argument("--noise", action="store_true", help="only the tables of a machine that others use, too")
    options = parser.parse_args()
    recording = _read(options.recording)
    print(f"{len(recording.runs)} runs on {', '.join(recording.machine.values())}\n")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        crew = Crew(pool, options.recording)
        claims = [] if options.noise else show_alarms(crew, options.rounds) + show_power(crew, options.rounds)
        claims += show_noise(crew, options.rounds)
    return conclude(claims, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
