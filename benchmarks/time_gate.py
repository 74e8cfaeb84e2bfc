"""How well the gate judges times: false alarms, power and cost, beside the rules of pytest-benchmark and asv.

All on the same samples: those that `time_samples.py` recorded, and simulated ones. Recorded rounds are played to the package's
own sampling, whose samples its own comparison judges; the peers' rules are their own code. ``--faithful`` instead holds the
package's step time against a plain loop, here and now.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import time_file
from claims import Claim, claim_of, conclude, parser_of, print_table, ratio_of_medians
from time_cost import cost_of
from time_faithful import faithful_claims
from time_noise import CROWDED, HEAVY, IDLE, LOADS, MODERATE, SIMULATED, WAIT, WORK, Slowdown, itself, simulated, slower
from time_peers import ASV_FACTOR, MEAN_LIMIT, asv_rule, missing, pytest_benchmark_rule
from time_rules import counted, ours, ours_in_turns, tolerance, tolerance_in_turns
from time_samples import NAME, machine
from time_simulated import SCENARIOS, SCENARIOS_IN_TURNS, UNSEEN
from time_steps import LARGE_SLOWDOWNS, SLOWDOWNS
from time_trials import ANY_LOAD, QUIET, in_turns, planted, same_in_turns, same_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from time_cost import Cost
    from time_file import Recording
    from time_rules import Outcome, PairedTrial, Score, Trial

RULES = ("ours", f"pytest-benchmark {MEAN_LIMIT}", f"asv {ASV_FACTOR}")
RECORDED = "recorded here, any load against any"
RECORDED_IN_TURNS = {"recorded here, quiet": QUIET, "recorded here, any load": ANY_LOAD}
MOST_FALSE_ALARMS = 1
"""Of a thousand comparisons of a step with itself."""
POWER = 0.95
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
        """Trials of this kind; the seed decides which."""
        chance = random.Random(f"{self} {seed}")  # noqa: S311 - the same command draws the same
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
        make = {**SCENARIOS, **UNSEEN}[self.name]
        return (make(chance) for _ in range(count))

    def drawn_in_turns(self, recording: Recording, seed: int, count: int) -> Iterable[PairedTrial]:
        """As `drawn`, of runs that take turns; ``runs`` is the number of pairs."""
        chance = random.Random(f"{self} {seed}")  # noqa: S311 - the same command draws the same
        if self.name == "planted":
            return in_turns(recording, chance, self.percent, self.runs, count)
        if self.name in RECORDED_IN_TURNS:
            return same_in_turns(recording, chance, RECORDED_IN_TURNS[self.name], self.runs, count)
        make = SCENARIOS_IN_TURNS[self.name]
        return (make(chance, self.runs) for _ in range(count))


def judge(path: Path, kind: Kind, seed: int, count: int) -> list[tuple[Outcome, ...]]:
    """What each of `RULES` says of each trial."""
    rules = (ours, pytest_benchmark_rule(), asv_rule())
    return [tuple(rule(trial) for rule in rules) for trial in kind.drawn(_read(path), seed, count)]


def judge_by_ours(path: Path, kind: Kind, seed: int, count: int) -> list[tuple[Outcome, ...]]:
    """What the gate says of each trial."""
    return [(ours(trial),) for trial in kind.drawn(_read(path), seed, count)]


def judge_in_turns(path: Path, kind: Kind, seed: int, count: int) -> list[tuple[Outcome, ...]]:
    """What `gpumem ab` says of each trial."""
    trials = kind.drawn_in_turns(_read(path), seed, count)
    return [(ours_in_turns(trial, tolerance_in_turns()),) for trial in trials]


def costs(path: Path, kind: Kind, seed: int, count: int) -> list[Cost]:
    """What each trial costs."""
    return [cost_of(trial) for trial in kind.drawn(_read(path), seed, count)]


@lru_cache(maxsize=1)
def _read(path: Path) -> Recording:
    return time_file.read(path)


def scores_of(verdicts: Iterable[tuple[Outcome, ...]]) -> list[Score]:
    """A score for each rule that judged."""
    return [counted(outcomes) for outcomes in zip(*verdicts, strict=True)]


class Crew:
    """Worker processes that judge trials of a recording, in chunks."""

    def __init__(self, pool: ProcessPoolExecutor, path: Path) -> None:
        self._pool = pool
        self._path = path

    def start(
        self, work: Callable[[Path, Kind, int, int], list[tuple[Outcome, ...]]], kind: Kind, count: int
    ) -> list[Future[list[tuple[Outcome, ...]]]]:
        """Begin with ``count`` trials."""
        sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
        return [self._pool.submit(work, self._path, kind, seed, size) for seed, size in enumerate(sizes)]

    def scores(self, started: Sequence[Future[list[tuple[Outcome, ...]]]]) -> list[Score]:
        """The scores of trials that were begun; none where the recording has too few runs for them."""
        return scores_of(verdict for job in started for verdict in job.result())


def show_alarms(crew: Crew, trials: int) -> list[Claim]:
    """Print the table of false alarms. Returns what is claimed of them."""
    jobs = {name: crew.start(judge, Kind(name), trials) for name in (RECORDED, *SCENARIOS, *UNSEEN)}
    turns = {
        f"A/B, {name}": crew.start(judge_in_turns, Kind(name, runs=CLAIMED_IN_TURNS[1]), trials)
        for name in (*RECORDED_IN_TURNS, *SCENARIOS_IN_TURNS)
    }
    scores = {name: crew.scores(started) for name, started in {**jobs, **turns}.items()}
    print(f"False alarms: a step is compared with itself, {trials} times a row\n")
    _show(scores)
    return [_alarms_claim(name, found) for name, found in scores.items() if name not in UNSEEN]


def _alarms_claim(name: str, found: list[Score]) -> Claim:
    if not found:
        return Claim(f"{name}: comparisons of a step with itself that pass (too few runs are recorded)", math.inf, 0)
    text = f"{name}: of {found[0].trials} comparisons of a step with itself, those that fail"
    return Claim(text, found[0].fails, math.ceil(MOST_FALSE_ALARMS * found[0].trials / 1000))


def show_power(crew: Crew, trials: int) -> list[Claim]:
    """Print the tables of planted slowdowns. Returns what is claimed of them."""
    percents = (0, *SLOWDOWNS)
    stored = {
        (percent, runs): crew.start(judge, Kind("planted", percent, runs), trials)
        for runs in BASELINE_RUNS
        for percent in percents
    }
    turns = {
        (percent, pairs): crew.start(judge_in_turns, Kind("planted", percent, pairs), trials // 2)
        for pairs in PAIRS
        for percent in SLOWDOWNS
    }
    claims = []
    print(f"Power, stored baseline: quiet runs with a planted slowdown, tolerance {tolerance():.1%}\n")
    found = {key: crew.scores(started) for key, started in stored.items()}
    _show({f"{percent} % planted, baseline of {runs}": scores for (percent, runs), scores in found.items()})
    claims += _power_claims(found, CLAIMED_STORED, "quiet, against a stored baseline")
    print(f"Power, A/B: quiet runs in turns, tolerance {tolerance_in_turns():.1%}\n")
    found = {key: crew.scores(started) for key, started in turns.items()}
    _show({f"{percent} % planted, at most {pairs} pairs": scores for (percent, pairs), scores in found.items()})
    return claims + _power_claims(found, CLAIMED_IN_TURNS, "quiet, A/B")


def _power_claims(found: dict[tuple[int, int], list[Score]], claimed: tuple[int, int], where: str) -> list[Claim]:
    scores = found[claimed]
    text = f"{where}: share of slowdowns of {claimed[0]} % that is missed"
    if not scores:
        return [Claim(f"{text} (too few runs are recorded)", 1.0, 1 - POWER)]
    low, high = scores[0].interval()
    return [Claim(text, 1 - scores[0].share, 1 - POWER, 1 - high, 1 - low)]


def show_noise(crew: Crew, trials: int) -> list[Claim]:
    """Print the tables of a machine that others use, too. Returns what is claimed of them."""
    alarms = {
        f"{ITSELF_BESIDE}{load}": crew.start(judge_by_ours, Kind(ITSELF_BESIDE, load=load), trials)
        for load in (*LOADS, SIMULATED)
    }
    slowdowns = {
        (slowdown, load): crew.start(judge_by_ours, Kind("slower", load=load, slowdown=slowdown), trials // 2)
        for slowdown in SLOWDOWNS_BESIDE
        for load in (LOADS if slowdown.planted else (*LOADS, SIMULATED))
    }
    print(f"By what was at work: baselines of 1 to 10 runs beside any load, {trials} comparisons a row\n")
    itself_scores = {name: crew.scores(started) for name, started in alarms.items()}
    _show(itself_scores)
    print(f"By what was at work: slowdowns against 5 runs beside any load, {trials // 2} comparisons a row\n")
    found = {key: crew.scores(started) for key, started in slowdowns.items()}
    _show({f"{slowdown}, {load}": scores for (slowdown, load), scores in found.items()})
    claims = [_alarms_claim(name, scores) for name, scores in itself_scores.items() if scores]
    return claims + [
        _missed_claim(f"{slowdown}, {load}", scores[0], power)
        for (slowdown, load), scores in found.items()
        if scores and (power := _claimed(slowdown, load)) is not None
    ]


def _claimed(slowdown: Slowdown, load: str) -> float | None:
    """The share of slowdowns that are to be caught; ``None`` where nothing is claimed.

    Beside a heavy load a planted busy wait makes no step twice as long: it goes on while the thread waits for a core.
    """
    if slowdown.percent < LARGE_SLOWDOWNS[-1]:
        return QUARTER if load in (IDLE, MODERATE, SIMULATED) else None
    if load == CROWDED or (slowdown.form == WAIT and slowdown.planted and load == HEAVY):
        return None
    return TWICE


def _missed_claim(name: str, score: Score, power: float) -> Claim:
    low, high = score.interval()
    return Claim(f"{name}: share that is missed", 1 - score.share, 1 - power, 1 - high, 1 - low)


def show_cost(path: Path, trials: int) -> list[Claim]:
    """Print the table of costs, over quiet runs. Returns what is claimed of them."""
    taken = costs(path, Kind("planted", 0, BASELINE_RUNS[-1]), 0, trials)
    if not taken:
        return [Claim("seconds until the verdict, quiet (too few runs are recorded)", math.inf, 1.0)]
    print(f"Cost, quiet: medians over {len(taken)} runs (never: in less than half of them)\n")
    rows = [
        (
            "until the verdict, with readings and re-measurement",
            _seconds([one.ours for one in taken]),
            _seconds([one.theirs for one in taken]),
        ),
        (
            "half the 95 % interval (ours: median, theirs: mean)",
            f"{statistics.median(one.our_width for one in taken):.2%}",
            f"{statistics.median(one.their_width for one in taken):.2%}",
        ),
        (
            "until the interval is as narrow as the other's",
            _seconds([one.ours_to_their_width for one in taken]),
            _seconds([one.theirs_to_our_width for one in taken]),
        ),
    ]
    print_table(("", "ours", "pytest-benchmark"), rows)
    ratio = ([one.ours for one in taken], [one.theirs for one in taken])
    return [claim_of("seconds until the verdict over pytest-benchmark's, quiet", ratio_of_medians, ratio, 1.0)]


def _seconds(values: Sequence[float | None]) -> str:
    middle = statistics.median(math.inf if value is None else value for value in values)
    return "never" if math.isinf(middle) else f"{middle:.2f} s"


def _show(scores: dict[str, list[Score]]) -> None:
    rows = []
    for name, found in scores.items():
        if not found:
            rows.append((name, "too few runs are recorded", "", *("" for _ in RULES[1:])))
            continue
        first, *others = (_share(one.fails, one.interval()) for one in found)
        others += [""] * (len(RULES) - 1 - len(others))
        rows.append((name, first, f"{found[0].uncertain / found[0].trials:.1%}", *others))
    print_table(("", "ours: fails", "uncertain", *(f"{rule}: fails" for rule in RULES[1:])), rows)


def _share(fails: int, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{fails} ({low:.1%} to {high:.1%})"


def main() -> int:
    """Judge, print the tables, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=1000)
    parser.add_argument("--recording", type=Path, help="what time_samples.py wrote (default: this machine's)")
    parser.add_argument("--faithful", action="store_true", help="time steps here and now, --rounds turns (default: 12)")
    parser.add_argument("--noise", action="store_true", help="only the tables of a machine that others use, too")
    options = parser.parse_args()
    if options.faithful:
        turns = 12 if options.rounds == parser.get_default("rounds") else options.rounds
        return conclude(faithful_claims(turns), check=options.check)
    lacking = missing()
    if lacking is not None and not options.noise:
        print(lacking, file=sys.stderr)
        return 2
    path = options.recording or Path(__file__).parent / "results" / machine()["slug"] / NAME
    try:
        recording = _read(path)
    except (OSError, ValueError) as error:
        print(f"no times to judge by: {error}; benchmarks/time_samples.py records them", file=sys.stderr)
        return 2
    print(f"{len(recording.runs)} runs on {', '.join(recording.machine.values())}\n")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        crew = Crew(pool, path)
        if options.noise:
            return conclude(show_noise(crew, options.rounds), check=options.check)
        claims = show_alarms(crew, options.rounds) + show_power(crew, options.rounds) + show_noise(crew, options.rounds)
    claims += show_cost(path, min(options.rounds, 200))
    return conclude(claims, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
