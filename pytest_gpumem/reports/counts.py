"""Which operators a count has more of than its baseline, and at which lines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import columns
from pytest_gpumem.reports.values import difference, shown
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS, total

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.operator_counts import Tally

MOST_ROWS = 5


@dataclass(frozen=True, slots=True)
class CountRow:
    """An operator at a line, and how much of the change it is, as texts; ``fewer`` where it went."""

    operator: str
    amount: str
    module: str
    line: str
    share: float
    """Of the largest row."""
    fewer: bool = False


@dataclass(frozen=True, slots=True)
class CountTable:
    """The operators by which a count is more, the largest first; or what it is made of, where its baseline does not say."""

    title: str
    rows: tuple[CountRow, ...]
    others: str
    """What all the others make up together; empty where there are none."""
    note: str = ""


def count_tables(
    verdict: Verdict, metrics: Collection[str], units: UnitSystem, most: int = MOST_ROWS
) -> list[CountTable]:
    """A table for each of ``metrics`` that is a count of operators."""
    return [table for name in MADE_OF_OPERATORS if name in metrics for table in _table(verdict, name, units, most)]


def grown_counts(verdict: Verdict) -> list[str]:
    """The counts that are beyond what is allowed, whether the test fails by them or not."""
    told = FAILING | {Outcome.UNCERTAIN}
    return [one.metric for one in verdict.metrics if one.metric in MADE_OF_OPERATORS and one.outcome in told]


def count_lines(table: CountTable) -> list[str]:
    """A table as lines of text. Columns that say nothing of any row are left out."""
    rows = [(row.operator, row.amount, row.module, row.line) for row in table.rows]
    header = (table.title, "change" if not table.note else "now", "module", "line")
    used = [number for number in range(len(header)) if number < 2 or any(row[number] for row in rows)]
    left = tuple(place for place, number in enumerate(used) if number != 1)
    lines = columns([header[number] for number in used], [[row[number] for number in used] for row in rows], left=left)
    return [*lines, *([table.others] if table.others else []), *([f"note: {table.note}"] if table.note else [])]


def _table(verdict: Verdict, metric: str, units: UnitSystem, most: int) -> list[CountTable]:
    title = METRICS[metric].title
    changes = verdict.count_changes.get(metric)
    if changes is not None:
        return [_of(f"more {title}", metric, changes, units, most)] if changes else []
    made_of = verdict.measurement.by_operator.get(metric, ())
    if not made_of:
        return []
    note = f"the baseline does not say what its {title} were; it will when it is next accepted"
    return [_of(f"all {title}", metric, made_of, units, most, note if verdict.origin is not None else "")]


def _of(
    title: str, metric: str, tallies: Collection[Tally], units: UnitSystem, most: int, note: str = ""
) -> CountTable:
    told = sorted(tallies, key=lambda one: -one.amount)[:most]
    largest = max((abs(one.amount) for one in told), default=1)
    rest = len(tallies) - len(told)
    others = total(tallies) - total(told)
    say = shown if note else difference
    return CountTable(
        title,
        tuple(
            CountRow(
                one.operator,
                say(metric, one.amount, units),
                one.place.module or ("(no module)" if one.place.where else ""),
                one.place.where,
                abs(one.amount) / largest,
                one.amount < 0,
            )
            for one in told
        ),
        f"{rest} other{'s' if rest > 1 else ''}: {say(metric, others, units)} together" if rest else "",
        note,
    )
