"""Draws trials from recorded runs: of a step with itself, and with a planted slowdown."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from time_judged import PairedTrial, Trial, in_order

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from time_recorded import Recording, Run

MOST_BASELINE_RUNS = 10
QUIET = "quiet"
ANY_LOAD = "any load"
SECONDS_OF_NEIGHBOURS = 60
"""From the beginning of a run to that of the next one."""


def same_step(recording: Recording, chance: random.Random, count: int) -> Iterator[Trial]:
    """Comparisons of a step with itself: up to 10 runs beside any one load, and another run beside any other, or the same."""
    by_load: dict[str, list[Run]] = defaultdict(list)
    for run in recording.runs:
        if run.is_plain:
            by_load[run.load].append(run)
    loads = [load for load, runs in by_load.items() if len(runs) >= 3]
    if not loads:
        return
    for _ in range(count):
        before, after = (by_load[chance.choice(loads)] for _ in range(2))
        now = chance.choice(after)
        others = [run for run in before if run is not now]
        yield _trial(recording, chance, others, now, chance.randint(1, MOST_BASELINE_RUNS))


def planted(recording: Recording, chance: random.Random, percent: int, runs: int, count: int) -> Iterator[Trial]:
    """Comparisons of quiet runs with a planted slowdown and a baseline of ``runs`` quiet runs without, not of one block."""
    quiet = [run for run in recording.runs if run.load == QUIET and run.wait == 0]
    slow = [run for run in quiet if run.percent == percent]
    plain = [run for run in quiet if run.percent == 0]
    if not slow or any(len(_apart(plain, run)) < runs for run in slow):
        return
    for _ in range(count):
        now = chance.choice(slow)
        yield _trial(recording, chance, _apart(plain, now), now, runs)


def _apart(runs: list[Run], one: Run) -> list[Run]:
    return [run for run in runs if run.block != one.block]


def in_turns(
    recording: Recording, chance: random.Random, percent: int, pairs: int, count: int
) -> Iterator[PairedTrial]:
    """Quiet blocks ABBA, each of which is two pairs of neighbours (base, head)."""
    blocks: dict[int, dict[int, Run]] = defaultdict(dict)
    for run in recording.runs:
        if run.load == QUIET and run.wait == 0:
            blocks[run.block][run.place] = run
    whole = [runs for runs in blocks.values() if len(runs) == 4 and runs[1].percent == runs[2].percent == percent]
    if len(whole) < pairs // 2:
        return
    for _ in range(count):
        step = chance.choice(sorted(whole[0][0].series))
        chosen = chance.sample(whole, pairs // 2)
        neighbours = ((runs[base], runs[head]) for runs in chosen for base, head in ((0, 1), (3, 2)))
        yield PairedTrial(tuple((base.series[step], head.series[step]) for base, head in neighbours), recording.cores)


def same_in_turns(
    recording: Recording, chance: random.Random, loads: str, pairs: int, count: int
) -> Iterator[PairedTrial]:
    """Pairs of neighbouring runs of the same step, quiet or, with `ANY_LOAD`, whatever ran beside them."""
    runs = [run for run in recording.runs if loads in (run.load, ANY_LOAD)]
    neighbours = [
        (before, after)
        for before, after in itertools.pairwise(runs)
        if (before.percent, before.wait) == (after.percent, after.wait)
        and after.began - before.began < SECONDS_OF_NEIGHBOURS
    ]
    for _ in range(count):
        chosen: list[tuple[Run, Run]] = []
        for pair in chance.sample(neighbours, len(neighbours)):
            if len(chosen) < pairs and not any(run in one for run in pair for one in chosen):
                chosen.append(pair)
        if len(chosen) < pairs:
            return
        step = chance.choice(sorted(chosen[0][0].series))
        yield PairedTrial(
            tuple(
                in_order(number, (first.series[step], second.series[step]))
                for number, (first, second) in enumerate(chosen)
            ),
            recording.cores,
        )


def _trial(recording: Recording, chance: random.Random, before: list[Run], now: Run, runs: int) -> Trial:
    step = chance.choice(sorted(now.series))
    chosen = chance.sample(before, min(runs, len(before)))
    baseline = tuple(run.series[step] for run in sorted(chosen, key=lambda run: run.began))
    return Trial(baseline, now.series[step], recording.cores)
