"""The page of metrics, made from the rows of `pytest_gpumem.facts.metrics`."""

from __future__ import annotations

from pytest_gpumem.base.units import format_bytes, format_ratio
from pytest_gpumem.facts.metrics import METRICS, Metric, MetricAttributes, Tolerance
from pytest_gpumem.judging.gate.doubts import MOST_BY_ENVIRONMENT
from reference.markdown import attribute_docstrings, page, paragraphs, table

INTRODUCTION = """
A metric is a figure of a measurement, and an attribute of `Measurement`. A metric that a step or device does not have is
missing.

A metric is `regressed` if it is worse than its baseline by more than its tolerance. Its relative part is a ratio of the
baseline, its absolute part is in the metric's unit, and the larger part holds. A metric without a tolerance is recorded and
shown, and not judged. The settings (`[tool.gpumem.tolerance]`), the marker and the hook `pytest_gpumem_tolerance` change a
tolerance.

Pages on the concepts: [measuring a peak](../concepts/measuring.md), [step time](../concepts/step-time.md),
[verdicts](../concepts/verdicts.md).
"""


def metrics_page() -> str:
    """Return the page of the metrics: a table of them, and an entry for each."""
    helps = attribute_docstrings(MetricAttributes)
    rows = [(f"[`{name}`](#{name})", row.unit, _tolerance(row), _budget(row)) for name, row in METRICS.items()]
    heads = ("metric", "unit", "default tolerance", "marker argument")
    return page(
        "Metrics",
        paragraphs(INTRODUCTION),
        table(heads, rows),
        *(f"## `{name}`\n\n{_facts(row)}\n\n{paragraphs(helps[name])}" for name, row in METRICS.items()),
    )


def _facts(row: Metric) -> str:
    """Return the sentences that follow from a row's fields."""
    facts = [f"Unit: {row.unit}.", f"Tolerance: {_tolerance(row)}."]
    if _budget(row):
        facts.append(f"Budget: {_budget(row)}.")
    if row.larger_is_better:
        facts.append("More is better.")
    if row.depends_on:
        facts.append(
            f"A worse value is `uncertain` if {_names(row.depends_on)} of the environment changed as well"
            + (
                f", and it is at most {format_ratio(MOST_BY_ENVIRONMENT).lstrip('+')} worse."
                if row.unit == "bytes"
                else "."
            )
        )
    if row.decided_by:
        facts.append(f"A change is always `uncertain` if {_names(row.decided_by)} changed as well.")
    if row.emulated is None:
        facts.append("An emulated GPU's value is not compared with a real GPU's.")
    elif row.emulated.relative:
        facts.append(f"The tolerance is {_of(row.emulated)} or more if an emulated GPU is compared with a real GPU.")
    return " ".join(facts)


def _names(details: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in details)


def _budget(row: Metric) -> str:
    arguments = {
        "peak_allocated": "`max_gb`, `max_memory`",
        "step_time": "`max_slowdown`",
        "throughput": "`min_throughput`",
    }
    return arguments.get(row.name, f"`{row.budget}`" if row.budget else "")


def _tolerance(row: Metric) -> str:
    return "not judged" if row.tolerance is None else _of(row.tolerance, row)


def _of(tolerance: Tolerance, row: Metric | None = None) -> str:
    relative = format_ratio(tolerance.relative).lstrip("+")
    if not tolerance.relative and not tolerance.absolute:
        return "0"
    if not tolerance.absolute:
        return relative
    least = (
        format_bytes(int(tolerance.absolute)) if row is not None and row.unit == "bytes" else f"{tolerance.absolute:g}"
    )
    return f"{relative}, at least {least}" if tolerance.relative else least
