"""Claims of a benchmark, checked against a run of it."""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.reporting.reports.layout import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RESAMPLES = 4000


@dataclass(frozen=True)
class Claim:
    """What was measured is at most ``limit``; ``text`` says what it is, with its unit.

    ``low`` and ``high`` are the ends of its 95 % confidence interval, where it has one. As the gate does with times, a
    claim is only called missed when chance is an unlikely reason: when the whole interval is beyond the limit.
    """

    text: str
    value: float
    limit: float
    low: float | None = None
    high: float | None = None

    @property
    def missed(self) -> bool:
        return (self.value if self.low is None else self.low) > self.limit

    @property
    def holds(self) -> bool:
        return (self.value if self.high is None else self.high) <= self.limit

    def __str__(self) -> str:
        verdict = (
            "holds" if self.holds else "MISSED" if self.missed else "uncertain: more --rounds, or a quieter machine"
        )
        interval = "" if self.low is None else f" (95 %: {self.low:.4g} to {self.high:.4g})"
        return f"{self.text}: {self.value:.4g}{interval}, claimed at most {self.limit:.4g}: {verdict}"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def difference_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) - statistics.median(theirs)


def claim_of(
    text: str,
    statistic: Callable[..., float],
    rounds: Sequence[Sequence[float]],
    limit: float,
) -> Claim:
    """A claim on a statistic of rounds, such as ours and theirs, with its interval: a bootstrap over them (Efron, 1979)."""
    chance = random.Random(0)  # noqa: S311 - resampling
    resampled = sorted(statistic(*(chance.choices(taken, k=len(taken)) for taken in rounds)) for _ in range(RESAMPLES))
    low, high = resampled[round(0.025 * RESAMPLES)], resampled[round(0.975 * RESAMPLES) - 1]
    return Claim(text, statistic(*rounds), limit, low, high)


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often everything is run (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a claim is missed")
    return parser


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header; the first column is text, the others are figures."""
    for line in columns(header, list(rows), left=(0,)):
        print(line)
    print()


def conclude(claims: Iterable[Claim], *, check: bool) -> int:
    """Print the claims. Returns the exit status."""
    missed = 0
    for claim in claims:
        print(claim)
        missed += claim.missed
    return 1 if check and missed else 0
