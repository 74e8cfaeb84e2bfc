"""Reports to export: made up, frozen, with what may be hard to write somewhere."""

from __future__ import annotations

import re

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.exports.figures import Figure
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import SessionReport

H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0", "machine": "a box"})
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {})
PEAK = 9_310_000_001
"""More digits than a 32-bit float has."""
SECONDS = (0.010, 0.011, 0.012, 0.013, 0.014, 0.015)


def times_of(*, invalid: str | None = None) -> Times:
    """A median of 12.5 ms, which lies between 10 ms and 15 ms."""
    return Times((Sample(tuple(map(Round, SECONDS)), 1, invalid, None if invalid is None else Slowdown(4.0)),))


def timed(name: str = "train_step", environment: Environment = H100, *, invalid: str | None = None) -> Verdict:
    """A training step of 100 samples."""
    values = {"peak_allocated": PEAK, "retained": 0, "flops": 12, "step_time": 0.0125, "throughput": 8000.0}
    measurement = Measurement(
        name, Workload("train_step", "amp-bf16"), environment, values, times=times_of(invalid=invalid)
    )
    metrics = tuple(
        MetricVerdict(metric, Outcome.RECORDED, value, of="samples" if metric == "throughput" else None)
        for metric, value in values.items()
    )
    return Verdict(measurement, metrics)


def called(environment: Environment = CPU, peak: int = PEAK) -> Verdict:
    """The call of a test with the marker alone."""
    measurement = Measurement("call", Workload("call"), environment, {"peak_allocated": peak})
    return Verdict(measurement, (MetricVerdict("peak_allocated", Outcome.REGRESSED, peak),))


def result(test: str, *verdicts: Verdict, unmeasured: str | None = None) -> TestResult:
    return TestResult(TestVerdict("tests/test_a.py", test, verdicts, unmeasured=unmeasured), passed=True)


def report(*results: TestResult, ended: str = "2026-11-21T16:20:05Z", commit: str | None = "abc1234") -> SessionReport:
    return SessionReport(ended, "0.1.0", commit, results=results)


def figure(test: str, value: float = PEAK, metric: str = "peak_allocated") -> Figure:
    return Figure(test, "call", metric, value, H100, ended="2026-11-21T16:20:05Z", commit="abc1234")


TIMED = report(result("test_train", timed()))


def from_utf8(text: str) -> str:
    """The text that `utf8` made ``text`` of."""
    return re.sub(r"(\\+)(ud[89a-f][0-9a-f]{2})", _unescaped, text)


def _unescaped(found: re.Match[str]) -> str:
    half, odd = divmod(len(found[1]), 2)
    return "\\" * half + (chr(int(found[2][1:], 16)) if odd else found[2])
