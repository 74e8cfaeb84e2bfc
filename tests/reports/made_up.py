"""Made-up results of sessions, for tests of what is shown of them."""

from __future__ import annotations

import textwrap
from typing import Any

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, NoBaseline
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import Cell, TestVerdict, Verdict
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.results import TestResult

MB, GB = 10**6, 10**9
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
CALL = Workload("call")


def literal_lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def verdict_on(
    now: dict[str, float],
    earlier: dict[str, float] | NoBaseline | None,
    name: str = "call",
    budget: Budget | None = None,
    **more: Any,
) -> Verdict:
    """What the judge says of these metrics against those, or where there is no baseline, or nobody asked for one."""
    baseline = Baseline(CALL, H100, earlier, "2026-11-02") if isinstance(earlier, dict) else earlier
    measurement = Measurement(name, CALL, H100, now, work={"samples": 8}, **more)
    return judge(measurement, budget or Budget(), baseline, DEFAULT_TOLERANCES)


def result(*verdicts: Verdict, test: str = "test_a", file: str = "a.py", **more: Any) -> TestResult:
    return TestResult(TestVerdict(file, test, verdicts, **more), passed=True)


def named(test: str | int) -> str:
    return test if isinstance(test, str) else f"test_{test:03}"


def ok(test: str | int = "test_a") -> TestResult:
    return result(verdict_on({"peak_allocated": GB}, {"peak_allocated": GB}), test=named(test))


def recorded(test: str | int = "test_a") -> TestResult:
    return result(verdict_on({"peak_allocated": GB}, None), test=named(test))


def new(test: str | int = "test_a") -> TestResult:
    return result(verdict_on({"peak_allocated": GB}, NoBaseline()), test=named(test))


def regressed(test: str | int = "test_a", **now: float) -> TestResult:
    verdict = verdict_on({"peak_allocated": 2 * GB, **now}, {"peak_allocated": GB, **now})
    return TestResult(TestVerdict("a.py", named(test), (verdict,)), passed=False, failed=True)


def cell(config: str, index: int, peak: int | None, why_not: str | None = None) -> TestResult:
    """A test of a matrix; one that was not measured says why."""
    verdicts = () if peak is None else (verdict_on({"peak_allocated": peak}, {"peak_allocated": peak}),)
    place = Cell("a.py::test_matrix", config, index)
    return result(*verdicts, test=f"test_matrix[{config}]", unmeasured=why_not, cell=place)


def explained(test: str = "test_a", count: int = 1, **now: float) -> TestResult:
    """``count`` measurements that are explained: 3 GB of activations and 2 GB of parameters."""
    rows = (
        Row("activation", 3 * GB, "blocks.*.attn", "model.py:88", "", "_softmax", "bfloat16[8, 12, 64, 64]", 24),
        Row("parameter", 2 * GB, "blocks.*.attn", tensor="bfloat16[64, 64]", count=24),
    )
    explanation = Explanation(Composition(5 * GB, rows))
    return result(*(verdict_on({"peak_allocated": 5 * GB, **now}, None, explanation=explanation),) * count, test=test)
