"""Made-up sessions for the tests of reports: one that has everything, with a given text wherever a text may stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import REST, Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.module_calls import Calls
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally, from_texts, to_texts
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.difference import Change, Difference, PeakMove
from pytest_gpumem.judging.gate.verdict import Cell, Location, MetricVerdict, Origin, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import SessionReport, StoreState, Terms

GB = 10**9
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0", "driver": "580.1"})
ORIGIN = Origin("2026-11-02", H100.device, "2.10.0", "abc123456")
ENDED = "2026-11-21T16:20:05Z"


def peak(outcome: Outcome, now: float = 9.31 * GB, then: float | None = 8.12 * GB, **changes: Any) -> MetricVerdict:
    now, then = round(now), None if then is None else round(then)
    allowed = None if then is None else 0.005 * then
    return MetricVerdict("peak_allocated", outcome, now, then, allowed, **changes)


def measured(*metrics: MetricVerdict, name: str = "train_step", **changes: Any) -> Verdict:
    measurement = Measurement(
        name, Workload("train_step", "amp-bf16"), H100, {one.metric: one.value for one in metrics}
    )
    return Verdict(replace(measurement, **changes.pop("measurement", {})), metrics, **changes)


def result(
    *verdicts: Verdict,
    test: str = "test_a",
    file: str = "tests/test_gpt.py",
    failure: str | None = None,
    **changes: Any,
) -> TestResult:
    verdict = TestVerdict(file, test, verdicts, location=Location(file, 7), failure=failure, **changes)
    failed = failure is not None or verdict.failed_by_itself
    return TestResult(verdict, passed=not failed, failed=failed)


def session(*results: TestResult, **changes: Any) -> SessionReport:
    return replace(SessionReport(ENDED, "0.1.0", "abc123456", Terms(baseline=True), results), **changes)


OK = result(measured(peak(Outcome.OK, 8.12 * GB)))
REGRESSED = result(
    measured(peak(Outcome.REGRESSED), origin=ORIGIN),
    test="test_b",
    failure="GPU memory regressed: peak 9.31 GB, baseline 8.12 GB\n\n  metric ...\n\n"
    '  accept:   pytest "tests/test_gpt.py::test_b" --gpumem-update=all',
    accept='pytest "tests/test_gpt.py::test_b" --gpumem-update=all',
)
UNEXPLAINED = replace(
    REGRESSED,
    verdict=replace(
        REGRESSED.verdict, verdicts=(measured(peak(Outcome.REGRESSED), origin=replace(ORIGIN, torch="2.11.0")),)
    ),
)
"""One whose growth no line and no package explains."""


def explained(text: str) -> Explanation:
    """A peak of which every text is ``text``."""
    rows = (
        Row("activation", 5 * GB, text, text, text, text, text, 24),
        Row("parameter", 3 * GB, text, text, "", text, "float32[8, 8]", 2),
    )
    over_time = OverTime(
        (0, 10, 20),
        (1, 8 * GB, 2),
        {"activation": (1, 5 * GB, 1), "parameter": (0, 3 * GB, 1)},
        1,
        (PhaseSpan("forward", 0, 10), PhaseSpan(text, 10, 20)),
    )
    composition = Composition(9 * GB, rows, {text: 2}, (text,), *[{"(all)": Calls(1, 3), text: Calls(1, 2)}] * 2)
    composition = replace(composition, phase=text)
    phases = {text: composition}
    holders = (Holder(text, composition, first_use=True, alternatives=(text,)),)
    return Explanation(composition, composition, composition, (text,), 1, over_time, holders, holders, text, phases)


def made_of(text: str) -> tuple[Tally, ...]:
    """A count of which every text is ``text``, as it is when it has been written and read."""
    return from_texts(to_texts([Tally(text, 7, OperatorSite(text, text, text)), Tally(text, 2)]))


def everything(text: str) -> SessionReport:
    """A session that has everything there is to say, with ``text`` wherever a text may stand."""
    explanation = explained(text)
    old, new = explanation.peak.rows[1], explanation.peak.rows[0]
    changes = (Change(None, new, text), Change(old, None, text), Change(old, old))
    changes += (Change(None, Row("activation", 3, operator=REST), "", (new, old)),)
    growth = Difference(8 * GB, 9 * GB, changes, PeakMove(text, text, text, 7 * GB))
    times = Times(
        (Sample((Round(0.1, 1e9, text, 1.5), Round(0.2)), 3, text, Slowdown(1.2, 1.1)), Sample((Round(0.3),))),
        {"forward": 0.1, text: 0.2},
    )
    environment = Environment(text, text, {f"a {text}": text, "count": 3})
    measurement = Measurement(
        text,
        Workload(text, text, 124, text),
        environment,
        {"peak_allocated": 9 * GB, "step_time": 0.1, "throughput": 12.5},
        settled=False,
        notes=(text,),
        recomputed=4,
        explanation=explanation,
        times=times,
        work={"samples": 8, text: 2.5},
        by_operator={"operators": made_of(text)},
        by_device={text: {"peak_allocated": 9 * GB}, f"{text}2": {"peak_allocated": 8 * GB, "retained": 1}},
        step_peaks=StepPeaks((8 * GB, 9 * GB), (9 * GB,), 1),
        step_peaks_by_device={text: StepPeaks((8 * GB,))},
        lowest_counts={"syncs": 3},
    )
    metrics = (
        peak(Outcome.REGRESSED, reason=text, gpu=text),
        MetricVerdict("step_time", Outcome.UNCERTAIN, 0.1, 0.2, 0.004, None, text, (0.9, 1.1)),
        MetricVerdict("throughput", Outcome.OVER_BUDGET, 12.5, budget=20, of=text),
        MetricVerdict("operators", Outcome.REGRESSED, 9, 5, 0),
        MetricVerdict("syncs", Outcome.UNCERTAIN, 7, 0, 0, reason=text),
    )
    origin = Origin(text, text, text, text, text)
    verdict = Verdict(measurement, metrics, origin, text, (text,), growth, {"operators": made_of(text)})
    cell = Cell(text, text, 1)
    location = Location(text, 7)
    failing = TestVerdict(
        text,
        text,
        (verdict, verdict),
        None,
        relations=2,
        cell=cell,
        location=location,
        failure=text,
        accept=text,
        gpu_uses=(GpuUse(text, (GpuProcess(7, 8, text), GpuProcess(9)), True, 10),),
        jobs_beside_torch={text: 11},
    )
    results = (
        TestResult(failing, passed=False, failed=True, failed_in="teardown"),
        TestResult(replace(failing, test=f"b{text}", failure=None, cell=replace(cell, index=0)), passed=True),
        TestResult(TestVerdict(text, f"c{text}", unmeasured=text, failed_by_itself=True), passed=False, failed=True),
        TestResult(TestVerdict(text, f"d{text}", unmeasured=text, cell=cell), passed=True),
    )
    return SessionReport(
        text,
        text,
        text,
        Terms(baseline=True, strict=True, update="all", units="iec"),
        results,
        ((text, text),),
        Selection(
            frozenset({(text, text)}), frozenset({text}), (text,), text, frozenset({(text, "e")}), frozenset({text})
        ),
        StoreState(((text, Key(text, text, text)),), frozenset({text})),
        (text,),
        (text,),
        text,
        (text,),
        3,
    )
