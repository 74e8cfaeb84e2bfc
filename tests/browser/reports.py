"""Sessions for a browser to show: a small one with every kind of chart, and one of many tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Outcome
from tests.reports.sessions import GB, ORIGIN, measured, peak, result, session

if TYPE_CHECKING:
    from pytest_gpumem.reporting.reports.session_report import SessionReport

MOMENTS = 300
"""As many as a report keeps of a step."""
SCORES = Row("activation", 4 * GB, "blocks.*.attention", "gpt.py:38", "", "_softmax", "float32[8, 12, 1024, 1024]", 24)
WEIGHTS = Row("parameter", 3 * GB, "blocks.*.mlp", "", "", "", "float32[4096, 1024]", 48)


def step(moments: int = MOMENTS) -> OverTime:
    """A step that rises to its peak in the middle and falls again."""
    half = moments // 2
    activations = [4 * GB * min(at, moments - at) // half for at in range(moments)]
    weights = [3 * GB] * moments
    total = [sum(pair) for pair in zip(activations, weights, strict=True)]
    times = tuple(100_000 * at for at in range(moments))
    return OverTime(
        times,
        tuple(total),
        {"parameter": tuple(weights), "activation": tuple(activations)},
        total.index(max(total)),
        (PhaseSpan("forward", 0, times[half]), PhaseSpan("backward", times[half], times[-1])),
    )


def times(seconds: float = 0.0123) -> Times:
    """A sample of 14 rounds, of which two were disturbed."""
    rounds = [Round(seconds * (1 + 0.002 * (number % 5))) for number in range(12)]
    rounds += [Round(seconds * 1.4, None, "another process used the GPU"), Round(seconds * 1.2, None, "it was hot")]
    return Times((Sample(tuple(rounds)),))


def explained(name: str = "train_step", peak_bytes: float = 9 * GB, seconds: float = 0.0123, **changes):
    """A measurement with everything there is to draw."""
    explanation = Explanation(Composition(7 * GB, (SCORES, WEIGHTS)), over_time=step())
    metrics = (
        peak(Outcome.REGRESSED, peak_bytes, budget=12 * GB),
        MetricVerdict("step_time", Outcome.OK, seconds, 0.0121, 0.0005, interval=(0.99, 1.03)),
    )
    difference = Difference(3 * GB, 7 * GB, (Change(None, SCORES, "was bfloat16, now float32"),))
    return measured(
        *metrics,
        name=name,
        measurement={"explanation": explanation, "times": times(seconds)},
        difference=difference,
        origin=ORIGIN,
        **changes,
    )


ACCEPT = 'pytest "tests/test_gpt.py::test_b[fp32]" --gpumem-update=all'
FAILURE = f"""\
GPU memory regressed: peak 9.00 GB, baseline 8.12 GB: +880.00 MB (+10.8 %), allowed +0.5 %

  accept:   {ACCEPT}"""


def small() -> SessionReport:
    """Five tests of four outcomes, and a matrix of two configs."""
    cells = [Cell("tests/test_gpt.py::test_b", config, number) for number, config in enumerate(("fp32", "amp-bf16"))]
    return session(
        result(measured(peak(Outcome.OK, 2 * GB, 2 * GB)), test="test_a"),
        result(explained(), test="test_b[fp32]", failure=FAILURE, accept=ACCEPT, cell=cells[0]),
        result(
            explained(peak_bytes=5 * GB, seconds=0.011),
            test="test_b[amp-bf16]",
            failure=FAILURE,
            accept=ACCEPT,
            cell=cells[1],
        ),
        result(measured(peak(Outcome.IMPROVED, 1 * GB, 4 * GB)), test="test_c", file="tests/test_resnet.py"),
        result(test="test_d", unmeasured="no CUDA device"),
    )


def many(count: int, *, every: int = 1) -> SessionReport:
    """``count`` tests; each ``every``-th of them failed and was explained, the others are in order."""
    return session(
        *(
            result(
                explained(peak_bytes=(1 + number % 90) * GB / 10),
                test=f"test_step[{number}]",
                failure=FAILURE,
                accept=ACCEPT,
            )
            if number % every == 0
            else result(measured(peak(Outcome.OK, 2 * GB + number, 2 * GB)), test=f"test_step[{number}]")
            for number in range(count)
        )
    )
