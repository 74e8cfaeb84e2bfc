"""Runs as they would be read, for tests of what follows from them."""

from __future__ import annotations

from pytest_gpumem.base.git import Revision
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
from pytest_gpumem.tools.ab.runs import Run

BASE = Revision("main", "1f3c9ab00000")
HEAD = Revision("HEAD", "2b4d8ce00000")
WOBBLE = (1.0, 1.001, 0.999, 1.002, 0.998, 1.0)
"""What rounds of one sample differ by."""


def times(seconds: float, invalid: str | None = None) -> Times:
    return Times(
        (
            Sample(
                tuple(Round(seconds * factor) for factor in WOBBLE),
                invalid=invalid,
                slowed=None if invalid is None else Slowdown(4.0),
            ),
        )
    )


def measurement(
    *,
    peak: int = 10_000_000,
    seconds: float | None = 0.1,
    name: str = "train_step",
    batch: str = "float32[4]",
    slug: str = "toy",
    invalid: str | None = None,
    **metrics: float,
) -> Measurement:
    figures = {"peak_allocated": peak, **metrics}
    if seconds is not None:
        figures["step_time"] = seconds
    return Measurement(
        name,
        Workload("train_step", batch=batch),
        Environment(slug, slug.title()),
        figures,
        times=None if seconds is None else times(seconds, invalid),
    )


def measured(test: str, *measurements: Measurement) -> TestVerdict:
    return TestVerdict("test_it.py", test, tuple(Verdict(one, ()) for one in measurements))


def unmeasured(test: str, why: str, *, failed: bool = False) -> TestVerdict:
    return TestVerdict("test_it.py", test, unmeasured=why, failed_by_itself=failed)


def run(side: str, *tests: TestVerdict, root: str = "/nowhere") -> Run:
    return Run({(test.file, test.test): test for test in tests}, root)


def pair(base: TestVerdict | None, head: TestVerdict | None) -> tuple[Run, Run]:
    """A pair of runs of one test, or of none."""
    return run("base", *([base] if base else [])), run("head", *([head] if head else []))
