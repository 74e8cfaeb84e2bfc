"""Cost of an HTML report of 1,000 tests: to write it, to open it in Chromium until it is painted, and to open a test in it.

All of them explained, with memory over time and rounds, or one in ten, as where 100 tests failed. Needs the extra `test` and
Debian's `chromium`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from claims import Claim, conclude, parser_of, print_table

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.timeline import MOST_MOMENTS, OverTime, PhaseSpan
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.html.page import html
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms

TESTS = 1000
LIMIT = 2.0
"""Seconds until the page is painted."""
CPU = Environment("cpu", "CPU")
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def session(every: int) -> SessionReport:
    """`TESTS` tests, each ``every``-th of them explained and timed."""
    return SessionReport("", "", None, Terms(baseline=True), tuple(_result(number, every) for number in range(TESTS)))


def _result(number: int, every: int) -> TestResult:
    explained = number % every == 0
    peak = 8_000_000_000 + 1_000_003 * number
    metrics = (
        MetricVerdict("peak_allocated", Outcome.REGRESSED if explained else Outcome.OK, peak, 8e9, 4e7),
        MetricVerdict("step_time", Outcome.OK, 0.012, 0.012, 0.0005),
    )
    measurement = Measurement(
        "train_step",
        Workload("train_step", "amp-bf16", 124_000_000, "int64[8, 1024]"),
        CPU,
        {metric.metric: metric.value for metric in metrics},
        explanation=_explanation(peak) if explained else None,
        times=Times((Sample(tuple(Round(0.012 + 1e-5 * at) for at in range(30))),)) if explained else None,
    )
    verdict = TestVerdict(
        f"tests/test_{number // 50}.py",
        f"test_train_step[{number}]",
        (Verdict(measurement, metrics),),
        failure="GPU memory regressed\n" + "  metric  baseline  now\n" * 20 if explained else None,
    )
    return TestResult(verdict, passed=not explained, failed=explained)


def _explanation(peak: int) -> Explanation:
    rows = tuple(
        Row("activation", peak // 40, f"blocks.{at}.attn", "gpt.py:38", "", "mul", "bf16[8]", 4) for at in range(30)
    )
    series = tuple(peak * min(at, MOST_MOMENTS - at) // MOST_MOMENTS for at in range(MOST_MOMENTS))
    parameters = (peak // 2,) * MOST_MOMENTS
    over_time = OverTime(
        tuple(100_003 * at for at in range(MOST_MOMENTS)),
        tuple(map(sum, zip(series, parameters, strict=True))),
        {"parameter": parameters, "activation": series},
        MOST_MOMENTS // 2,
        (PhaseSpan("forward", 0, 15_000_000), PhaseSpan("backward", 15_000_000, 30_000_000)),
    )
    return Explanation(Composition(peak, rows), over_time=over_time)


def opened(browser: Any, path: Path) -> tuple[float, float]:
    """Seconds until the page is painted, and from the click on a test until its charts are."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(path.as_uri())
    page.evaluate(PAINTED)
    painted = time.perf_counter()
    page.evaluate("document.querySelector('tbody[data-outcome] th button').click()")
    page.evaluate(PAINTED)
    drawn = time.perf_counter()
    context.close()
    return painted - began, drawn - painted


def main() -> int:
    """Write and open both reports, print what that took, and tell whether the claim holds."""
    from playwright.sync_api import sync_playwright

    options = parser_of(__doc__, rounds=7).parse_args()
    rows, claims = [], []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, every in (("all explained", 1), ("one in ten explained", 10)):
            path, began = Path(folder, f"{every}.html"), time.perf_counter()
            path.write_text(html(session(every)), encoding="utf-8")
            written = time.perf_counter() - began
            rounds = [opened(browser, path) for _ in range(options.rounds)]
            opening, drawing = (statistics.median(taken) for taken in zip(*rounds, strict=True))
            size = path.stat().st_size / 1e6
            rows.append((name, f"{size:.1f} MB", f"{written:.2f} s", f"{opening:.2f} s", f"{drawing:.2f} s"))
            claims.append(Claim(f"seconds until {TESTS} tests, {name}, are painted, median", opening, LIMIT))
        browser.close()
    print(f"{TESTS} tests, {options.rounds} rounds\n")
    print_table(("report", "size", "written", "opened", "a test opened"), rows)
    return conclude(claims, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
