"""Show the causes of growth in a session's tests, for every report format. Pure.

For example, the peaks of six tests grew because of ``blocks.*.attention`` at ``tiny_models/gpt.py:38``. A report shows this
cause once, and not six times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import FIRST_USE, HOLDER_NOT_FOUND, KEPT_IN
from pytest_gpumem.reporting.reports import escaping
from pytest_gpumem.reporting.reports.explanation import MOST_ROWS, PLURALS
from pytest_gpumem.reporting.reports.layout import Column, Span, Table, without_empty
from pytest_gpumem.reporting.reports.values import difference, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.causes import Cause, Causes

MOST_CAUSES = 10
"""A table shows at most this many causes, unless the user asks for all of them."""


class CauseCells(NamedTuple):
    """The texts in a table's row for a cause. The default values are the column titles."""

    number: str = "#"
    """The number for `gpumem accept --cause`."""
    name: str = "cause"
    tests: str = "tests"
    total: str = "in all"
    largest: str = "most"
    metric: str = "metric"
    module: str = "module"
    operator: str = "operator"
    tensors: str = "tensors"
    first: str = "first test"


HEADER = CauseCells()
_ALWAYS = 6
"""The table always shows this many columns from the left, and omits later columns if all their cells are empty."""


def name_of(cause: Cause, units: UnitSystem) -> str:
    """Return a cause's short name: its packages, budget, holder or line; without these, the tensors' module or category."""
    if cause.kind == "packages":
        return "; ".join(cause.packages)
    if cause.kind == "budget":
        metric, _, limit = cause.tensors.partition(" ")
        return f"budget of {METRICS[metric].title}: {shown(metric, float(limit), units)}"
    if cause.holder:
        return f"{FIRST_USE if cause.reason == FIRST_USE else KEPT_IN}: {cause.holder}"
    place = cause.lines[0] if cause.lines else cause.module or PLURALS.get(cause.category, cause.category)
    return f"{HOLDER_NOT_FOUND}; made at {place}" if cause.lacks_holder and cause.lines else place


def cause_cells(causes: Causes, units: UnitSystem, most: int | None = MOST_CAUSES) -> list[CauseCells]:
    """Return the table's rows for the first ``most`` causes, or for all causes if ``most`` is ``None``."""
    return [
        CauseCells(
            str(number),
            name_of(cause, units),
            f"{len(cause.tests)} of {causes.measured}",
            difference(cause.metric, cause.total, units),
            difference(cause.metric, cause.largest.amount, units),
            METRICS[cause.metric].title,
            cause.module if cause.lines else "",
            cause.operator,
            cause.tensors if cause.has_tensors else "",
            cause.tests[0],
        )
        for number, cause in enumerate(causes.causes[:most], start=1)
    ]


def cause_notes(causes: Causes, units: UnitSystem, most: int | None = MOST_CAUSES, *, hint: str = "") -> list[str]:
    """Return the notes below a table of causes.

    The notes add details to causes, count the omitted causes, and name growth without a cause.

    Args:
        causes: The causes.
        units: The unit system for bytes.
        most: The number of causes to show; ``None`` for all.
        hint: The option that shows the omitted causes, as a clause: ``-v shows all``; empty if no option shows them.
    """
    lines = []
    for cause in causes.causes[:most]:
        made_at = cause.lines[:1] if cause.holder else ()
        also = cause.lines[1:]
        more = [
            *(f"made at {place}" for place in made_at),
            *([f"also {', '.join(also)}"] if also else []),
            *([cause.reason] if cause.reason not in ("", FIRST_USE) else []),
            *cause.only_on,
            *([f"packages: {', '.join(cause.packages)}"] if cause.packages and cause.has_tensors else []),
        ]
        lines += [f"{name_of(cause, units)}: {'; '.join(more)}"] if more else []
    more_causes = 0 if most is None else len(causes.causes) - most
    if more_causes > 0:
        lines.append(f"... and {counted(more_causes, 'other cause')}{f' ({hint})' if hint else ''}")
    unproven_amounts = Counter[Any]()
    for alternatives in causes.unproven:
        unproven_amounts.update({share.growth: share.amount for share in alternatives.shares})
    rests = (replace(share, amount=share.amount - unproven_amounts[share.growth]) for share in causes.unexplained)
    unexplained = [share for share in rests if share.needs_cause]
    notes: list[tuple[str, Sequence[Any]]] = [("not explained", unexplained)] if unexplained else []
    notes += [
        (f"not certain: {' or '.join(alternatives.lines[:MOST_ROWS])}", alternatives.shares)
        for alternatives in causes.unproven[:most]
    ]
    for title, shares in notes:
        tests = sorted({share.growth.test for share in shares})
        other_tests = f" and {counted(len(tests) - 1, 'other')}" if len(tests) > 1 else ""
        lines.append(f"{title}: {_sums(shares, units)} in {counted(len(tests), 'test')}: {tests[0]}{other_tests}")
    return lines


def _sums(shares: Sequence[Any], units: UnitSystem) -> str:
    metrics = dict.fromkeys(share.growth.metric for share in shares)
    return ", ".join(
        f"{METRICS[name].title} {difference(name, sum(share.amount for share in shares if share.growth.metric == name), units)}"
        for name in sorted(metrics, key=lambda name: METRICS[name].precedence)
    )


def cause_table(causes: Causes, units: UnitSystem, most: int | None = MOST_CAUSES) -> Table:
    """Return the causes as a table for the terminal. A narrow terminal omits columns from the right."""
    # In a narrow terminal the first column gets a line of its own, so the first column includes the cause's number.
    columns = (
        Column(f"{HEADER.number} {HEADER.name}", left=True, least=24),
        Column(HEADER.tests),
        Column(HEADER.total),
        Column(HEADER.largest, weight=3),
        Column(HEADER.metric, left=True, weight=5),
        Column(HEADER.module, left=True, weight=4),
        Column(HEADER.operator, left=True, weight=2),
        Column(HEADER.tensors, left=True, weight=0),
        Column(HEADER.first, left=True, weight=1),
    )
    rows = [(f"{cells.number} {cells.name}", *cells[2:]) for cells in cause_cells(causes, units, most)]
    return Table(columns, tuple(tuple(map(Span, row)) for row in rows)).without_empty(range(_ALWAYS - 1))


def causes_in_markdown(causes: Causes, units: UnitSystem) -> str:
    """Return a table of the causes in GitHub's Markdown, and the notes on the causes as a list below the table."""
    rows = [
        [
            cells.number,
            escaping.code_in_table(cells.name),
            *map(escaping.plain, cells[2:6]),
            *(escaping.code_in_table(cell) if cell else "" for cell in cells[6:]),
        ]
        for cells in cause_cells(causes, units)
    ]
    notes = [f"- {escaping.plain(note)}" for note in cause_notes(causes, units)]
    if not rows:
        return "\n".join(notes)
    header, rows = without_empty(HEADER, rows, range(_ALWAYS))
    text = escaping.table(list(header), rows, (1, *range(5, len(header))))
    return "\n".join([text, "", *notes]) if notes else text
