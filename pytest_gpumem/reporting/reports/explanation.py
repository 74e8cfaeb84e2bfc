"""Make tables that explain a figure: the growth, the peak, the leftover bytes, or the operators behind a count.

Every report format lays out the same `PartTable`. This module also turns it into lines of text. Pure.

Example: a test's peak grew by 1.00 GB::

    what grew    baseline      now    change  module         line        operator  tensors
    activations   1.00 GB  2.00 GB  +1.00 GB  blocks.*.attn  model.py:88  _softmax  4 x float32[8, 4, 256, 256]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted, format_bytes, format_bytes_change
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import CATEGORIES, REST, Composition, Explanation
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS, NOWHERE, total
from pytest_gpumem.judging.gate.difference import CHANGED_LINE, LEAST_SHARE
from pytest_gpumem.judging.gate.difference import difference as difference_of
from pytest_gpumem.judging.gate.growths import LEAST, kept_rows
from pytest_gpumem.judging.gate.smaller_rows import MAY_BE_ALL
from pytest_gpumem.judging.gate.verdict import FAILING, Outcome
from pytest_gpumem.reporting.reports.layout import Column, Span, Table, plain_lines
from pytest_gpumem.reporting.reports.values import difference, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.composition import Holder, Row
    from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
    from pytest_gpumem.judging.gate.difference import Change, Difference, PeakMove
    from pytest_gpumem.judging.gate.growths import KeptRows
    from pytest_gpumem.judging.gate.verdict import Verdict

MOST_ROWS = 5
MOST_HOLDERS = 3
LEAST_HELD = 0.01
"""A holder is shown if it keeps at least this share of the retained bytes."""
FILLED_ONCE = (
    "the test that runs first fills it, and later tests find it full: fill it in a session's fixture, "
    "or accept the kept bytes"
)
"""The note on a holder filled by its first use, such as a cache."""

PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
}
"""The names of categories in reports. Other categories keep their name."""

_NO_COMPOSITION = (
    "the baseline has no composition to compare with; accepting the figures stores a composition "
    "(not under --gpumem-explain=never)"
)
_NOT_LISTED = "the baseline does not list them"
_PLACES = (
    Column("module", left=True, least=10),
    Column("line", left=True, least=10),
    Column("operator", left=True, least=10, weight=0),
    Column("tensors", left=True, least=24, weight=1),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a `PartTable`, as texts: equal memory blocks, their change, or an operator's calls."""

    name: str
    """The category, or the operator."""
    figures: tuple[str, ...]
    places: tuple[str, ...]
    """The module and the line; blocks also have the operator and the tensors."""
    reason: str = ""
    share: float = 0.0
    """The part's size relative to the largest part."""
    bar: str = ""
    """The CSS class of its bar in HTML: ``grew``, ``shrank``, or the class for the category's colour."""


@dataclass(frozen=True, slots=True)
class PartTable:
    """The largest parts of an amount (bytes, a count, or a change), and the sum of all other parts."""

    title: str
    figures: tuple[str, ...]
    """The titles of the columns with figures."""
    parts: tuple[Part, ...]
    others_title: str = ""
    """The name for the other parts; empty if every part has a row."""
    rest: str = ""
    """The other parts' sum."""
    note: str = ""
    sentences: tuple[str, ...] = ()
    """Sentences before the table, such as a changed graph that explains every row."""
    of_blocks: bool = True
    """True if the parts are memory blocks; False for operator calls."""

    @property
    def changes(self) -> bool:
        """True if the parts are changed blocks."""
        return len(self.figures) > 1

    @property
    def rest_line(self) -> str:
        together = " together" if self.changes or not self.of_blocks else ""
        return f"{self.others_title}: {self.rest}{together}" if self.others_title else ""

    @property
    def last(self) -> tuple[str, ...]:
        """Sentences after the table in text: the sum of the other parts, and the note."""
        return tuple(filter(None, [self.rest_line, self.note and f"note: {self.note}"]))


def composition_table(
    title: str,
    composition: Composition,
    units: UnitSystem,
    most: int = MOST_ROWS,
    rows: Sequence[Row] | None = None,
) -> PartTable:
    """Return a composition's largest rows as a table. The rows' bytes never exceed the composition's total.

    Args:
        title: The table's title.
        composition: The bytes to explain.
        units: The unit system for bytes.
        most: The number of rows to show.
        rows: The rows in another order; by default the largest come first.
    """
    listed = [*(listed_rows(composition) if rows is None else rows)][:most]
    rest = composition.total - sum(row.nbytes for row in listed)
    rows = _without_bytes(listed, -rest) if rest < 0 else listed
    note = (
        f"without {format_bytes(-rest, units)}, because memory of other owners was freed meanwhile" if rest < 0 else ""
    )
    rest = max(0, rest)
    largest = max((row.nbytes for row in rows), default=0)
    parts = (
        Part(
            category_of(row),
            (format_bytes(row.nbytes, units),),
            _places_of(row),
            share=max(0.0, row.nbytes / largest) if largest else 0.0,
            bar=f"c-{row.category.replace(' ', '-')}" if row.category in CATEGORIES else "c-",
        )
        for row in rows
    )
    return PartTable(
        title, ("bytes",), tuple(parts), "the rest" if rest else "", format_bytes(rest, units) if rest else "", note
    )


def listed_rows(composition: Composition) -> list[Row]:
    """Return the rows for a table, the largest first, without sums of smaller rows."""
    # A row is negative if blocks from before the step were freed meanwhile. Such a row does not help readers.
    return [row for row in composition.rows if row.operator != REST and row.nbytes > 0]


def _without_bytes(rows: Iterable[Row], nbytes: int) -> list[Row]:
    """Return the rows, the largest first, after removing ``nbytes`` from the rows in their order."""
    smaller = []
    for row in rows:
        taken = min(row.nbytes, nbytes)
        nbytes -= taken
        smaller += [replace(row, nbytes=row.nbytes - taken)] if taken < row.nbytes else []
    return sorted(smaller, key=lambda row: -row.nbytes)


def change_table(
    difference: Difference, units: UnitSystem, most: int | None = None, title: str = "what grew"
) -> PartTable:
    """Return the changes in a composition with their reasons.

    Args:
        difference: The change from the baseline's composition.
        units: The unit system for bytes.
        most: The number of changes to show, the largest first; ``None`` to explain most of the increase.
        title: The table's title.
    """
    changes = difference.explaining() if most is None else difference.changes[:most]
    largest = max((abs(change.nbytes) for change in changes), default=0)
    other_count = len(difference.changes) - len(changes)
    rest = difference.nbytes - sum(change.nbytes for change in changes)
    parts = [part for change in changes for part in _parts_of(change, units, largest)]
    return PartTable(
        title,
        ("baseline", "now", "change"),
        tuple(parts),
        counted(other_count, "other change") if other_count else "",
        format_bytes_change(rest, units) if other_count else "",
        sentences=_sentences(difference),
    )


def _sentences(difference: Difference) -> tuple[str, ...]:
    return tuple(change.sentence for change in difference.graph)


def _parts_of(change: Change, units: UnitSystem, largest: int) -> Iterator[Part]:
    """Yield the part for a change, then a part for each alternative."""
    alternatives = change.alternatives
    yield Part(
        alternatives_title(change) if alternatives else category_of(change.row),
        (
            *("" if row is None else format_bytes(row.nbytes, units) for row in (change.before, change.after)),
            format_bytes_change(change.nbytes, units),
        ),
        _places_of(change.row),
        _NOT_LISTED if alternatives else change.reason,
        abs(change.nbytes) / largest if largest else 0.0,
        "shrank" if change.nbytes < 0 else "grew",
    )
    for row in alternatives[:MOST_ROWS]:
        yield Part(f"- {category_of(row)}", ("", format_bytes(row.nbytes, units), ""), _places_of(row))
    other_count = len(alternatives) - MOST_ROWS
    if other_count > 0:
        yield Part(f"- {counted(other_count, 'other row')}", ("", "", ""), ("", "", "", ""))


def alternatives_title(change: Change) -> str:
    """Return a title, such as ``one of these 2 rows`` if each row alone may have grown."""
    number = len(change.alternatives)
    if all(row.nbytes >= MAY_BE_ALL * change.nbytes for row in change.alternatives):
        return f"one of these {number} rows" if number > 1 else "this row or smaller ones"
    return f"some of these {number} rows" if number > 1 else "this row and smaller ones"


def count_tables(
    verdict: Verdict, metrics: Collection[str], units: UnitSystem, most: int = MOST_ROWS
) -> list[PartTable]:
    """Return an operator table for each count among ``metrics``.

    A table lists the operators that run more often than in the baseline, or all operators if the baseline does not list them.
    For example, ``copy_`` ran 48 times more at ``model.py:88``.
    """
    tables = []
    for name in sorted(MADE_OF_OPERATORS, key=lambda name: METRICS[name].precedence):
        title = METRICS[name].title
        changes = verdict.count_changes.get(name)
        made_of = verdict.measurement.by_operator.get(name, ())
        if name not in metrics or not (made_of if changes is None else changes):
            continue
        if changes is not None:
            tables.append(_count_table(f"more {title}", name, changes, units, most, has_lines=_has_lines(made_of)))
        else:
            note = f"the baseline does not list its {title}; accepting the figures stores them"
            note = note if verdict.origin is not None else ""
            tables.append(_count_table(f"all {title}", name, made_of, units, most, note))
    return tables


def _count_table(
    title: str,
    metric: str,
    tallies: Collection[Tally],
    units: UnitSystem,
    most: int,
    note: str = "",
    *,
    has_lines: bool = False,
) -> PartTable:
    largest_first = ranked(tallies)[:most]
    largest = max((abs(tally.amount) for tally in largest_first), default=1)
    other_count = len(tallies) - len(largest_first)
    text_of = shown if note else difference
    parts = (
        Part(
            tally.operator,
            (text_of(metric, tally.amount, units),),
            _place_of(tally.place, has_lines=has_lines),
            tally.place.reason,
            share=abs(tally.amount) / largest,
            bar="shrank" if tally.amount < 0 else "grew",
        )
        for tally in largest_first
    )
    return PartTable(
        title,
        ("now" if note else "change",),
        tuple(parts),
        counted(other_count, "other") if other_count else "",
        text_of(metric, total(tallies) - total(largest_first), units) if other_count else "",
        note,
        of_blocks=False,
    )


def ranked(tallies: Collection[Tally]) -> list[Tally]:
    """Return a count's parts, the largest first. Parts at changed lines come first if they explain
    enough of the change.
    """
    increase = sum(max(0, tally.amount) for tally in tallies)

    def rank(tally: Tally) -> tuple[bool, int]:
        named_first = tally.place.reason.startswith(CHANGED_LINE) and tally.amount >= LEAST_SHARE * increase
        return not named_first, -tally.amount

    return sorted(tallies, key=rank)


def _has_lines(tallies: Collection[Tally]) -> bool:
    return any(tally.place != NOWHERE for tally in tallies)


def _place_of(place: OperatorSite, *, has_lines: bool) -> tuple[str, str]:
    """Return the module and the line for an operator's calls. An unknown line becomes ``(other lines)`` beside known lines."""
    module = place.module or ("(no module)" if place.where else "")
    return module, place.where or ("(other lines)" if has_lines else "")


def grown_counts(verdict: Verdict) -> list[str]:
    """Return the counts beyond their allowed change. Some, such as uncertain counts, do not fail the test."""
    beyond = FAILING | {Outcome.UNCERTAIN}
    return [
        metric.metric for metric in verdict.metrics if metric.metric in MADE_OF_OPERATORS and metric.outcome in beyond
    ]


def category_of(row: Row) -> str:
    """Return the name for a row's category, such as ``activations``."""
    category = PLURALS.get(row.category, row.category)
    if row.operator != REST:
        return category
    return REST if row.category == "other" else f"{REST} of {category}"


def _places_of(row: Row) -> tuple[str, ...]:
    """Return the module, line, operator and tensors for equal blocks; all empty for a sum of smaller rows."""
    if row.operator == REST:
        return "", "", "", ""
    return row.path or ("(no module)" if row.where else ""), row.where, row.operator, row.what


def part_layout(table: PartTable, indent: int = 0) -> Table:
    """Return the table's layout in text. Tables of changes and counts omit empty columns."""
    rows = [(part.name, *(text or "-" for text in part.figures), *part.places, part.reason) for part in table.parts]
    lines = tuple(tuple(map(Span, row)) for row in rows)
    places = _PLACES if table.of_blocks else _PLACES[:2]
    columns = (Column(table.title, left=True), *map(Column, table.figures), *places, Column("", left=True))
    always = range(len(columns) - 1 if table.figures == ("bytes",) else 1 + len(table.figures))
    return Table(columns, lines, indent).without_empty(always)


def part_lines(table: PartTable) -> list[str]:
    """Return a table as lines of text, with its sentences."""
    return [*table.sentences, *plain_lines(part_layout(table)), *table.last]


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """A table with its lines, such as ``"kept in: model.cache"``, and notes on how the explanation was recorded."""

    table: PartTable
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def explained_tables(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[ExplainedTable]:
    """Return the explanations for ``metrics``; empty if nothing explains them.

    Leaked bytes come first, because a leak also raises the peaks.

    Args:
        verdict: The verdict on a measurement.
        metrics: The names of metrics to explain.
        units: The unit system for bytes.
    """
    explanation = verdict.measurement.explanation or Explanation(Composition(0, ()))
    on_device = explained_on(verdict)
    explanations = []
    retained = explanation.retained
    if {"growth", "retained"}.intersection(metrics) and (retained.rows or retained.notes):
        retained_rows = kept_rows(verdict)
        table = composition_table(retained_title(verdict) + on_device, retained, units, rows=retained_rows.rows)
        filled = (FILLED_ONCE,) if any(holder.first_use for holder in explanation.holders[:MOST_HOLDERS]) else ()
        lines = holder_lines(retained_rows.holders(explanation.holders), units)
        explanations.append(ExplainedTable(table, lines, (*kept_notes(retained_rows, units), *retained.notes, *filled)))
    if any(METRICS[name].peak for name in metrics):
        explanations += _of_the_peak(verdict, units)
    if "cyclic_garbage" in metrics and explanation.garbage.rows:
        table = composition_table("held by cycles", explanation.garbage, units)
        explanations.append(ExplainedTable(table, tuple(f"cycle: {cycle}" for cycle in explanation.cycles)))
    return [*explanations, *map(ExplainedTable, count_tables(verdict, metrics, units))]


def holder_lines(holders: Collection[Holder], units: UnitSystem) -> tuple[str, ...]:
    """Return a line for each of the first holders: ``"kept in: Net.seen[...]"``. If there are several
    holders, each line also shows the bytes.

    Holders with less than 1 % of the bytes are omitted. For example, a list of losses is tiny beside the autograd graphs.
    """
    total_kept = sum(holder.kept.total for holder in holders)
    large = [holder for holder in holders if holder.kept.total >= LEAST_HELD * total_kept]
    if len(large) < 2:
        return tuple(holder.text for holder in large)
    lines = [f"{holder.text} ({format_bytes(holder.kept.total, units)})" for holder in large[:MOST_HOLDERS]]
    more = len(large) - MOST_HOLDERS
    return (*lines, *([f"and {counted(more, 'other holder')}"] if more > 0 else []))


def kept_notes(retained_rows: KeptRows, units: UnitSystem) -> tuple[str, ...]:
    """Return a note if the baseline already kept some of the bytes, and there are several rows."""
    if retained_rows.before < LEAST * retained_rows.growth or not retained_rows.before or len(retained_rows.rows) < 2:
        return ()
    new_rows = "new rows are first"
    if retained_rows.uncertain:
        verb = "is" if rows_of(retained_rows).startswith("one") else "are"
        new_rows = f"{rows_of(retained_rows)} {verb} new, and nothing proves which"
    return (f"{format_bytes(int(retained_rows.before), units)} of this was kept in the baseline, too; {new_rows}",)


def rows_of(retained_rows: KeptRows) -> str:
    """Return a text for rows that may have grown, such as ``"one of these 2 rows"``."""
    number = len(retained_rows.uncertain)
    is_one = all(row.nbytes >= MAY_BE_ALL * retained_rows.growth for row in retained_rows.uncertain)
    return f"{'one' if is_one else 'some'} of these {number} rows"


def _of_the_peak(verdict: Verdict, units: UnitSystem) -> list[ExplainedTable]:
    difference, explanation = verdict.difference, verdict.measurement.explanation
    notes = () if explanation is None else explanation.peak.notes
    moved = None if difference is None else difference.moved
    if moved is not None:
        notes = (_moved_note(moved, units), *notes)
    tables = []
    if difference is not None and difference.nbytes > 0:
        in_phase = f" in {moved.compared}" if moved is not None else ""
        tables.append(change_table(difference, units, title=f"what grew{in_phase}{explained_on(verdict)}"))
    lines = _holders_of_grown_inputs(verdict)
    # The growth within a phase does not explain why the peak moved to another phase.
    is_all = bool(tables) and (moved is None or moved.compared == moved.after)
    if not is_all and moved is not None and explanation is not None and moved.before in explanation.other_phases:
        only_here = _not_in(explanation.other_phases[moved.before], explanation.peak)
        table = composition_table(f"in {moved.after}, not in {moved.before}{explained_on(verdict)}", only_here, units)
        tables.append(table if tables or difference is None else replace(table, sentences=_sentences(difference)))
    if tables:
        return [*map(ExplainedTable, tables[:-1]), ExplainedTable(tables[-1], lines, notes)]
    if explanation is None:
        return []
    if verdict.origin is not None and difference is None and not notes:
        notes = (_NO_COMPOSITION,)
    title = f"what is there at the peak{explained_on(verdict)}"
    return [ExplainedTable(composition_table(title, explanation.peak, units), notes=notes)]


def _holders_of_grown_inputs(verdict: Verdict) -> tuple[str, ...]:
    """Return a line for each holder of inputs that grew since the baseline: ``"kept in: Net.last_output"``."""
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None or explanation is None:
        return ()
    grown = {
        _places_of(change.row) for change in difference.changes if change.nbytes > 0 and change.row.category == "input"
    }
    return tuple(
        holder.text
        for holder in explanation.holders_of_inputs[:MOST_HOLDERS]
        if holder.path and any(_places_of(row) in grown for row in holder.kept.rows)
    )


def _moved_note(moved: PeakMove, units: UnitSystem) -> str:
    current = "" if moved.peak_before is None else f", where it is {format_bytes(moved.peak_before, units)} now"
    compared = "" if moved.compared == moved.after else f"; the baseline does not list the tensors of {moved.after}"
    return f"the peak is in {moved.after}; it was in {moved.before}{current}{compared}"


def _not_in(other: Composition, composition: Composition) -> Composition:
    """Return the rows of ``composition`` without counterparts in ``other``."""
    changes = difference_of(other, composition).changes
    rows = tuple(change.after for change in changes if change.before is None and change.after is not None)
    return Composition(sum(row.nbytes for row in rows), rows)


def explained_on(verdict: Verdict) -> str:
    """Return ``" on cuda:1"``, the explained GPU, if the step used several GPUs; else an empty text."""
    explanation = verdict.measurement.explanation
    several = len(verdict.measurement.by_device) > 1
    return f" on {explanation.gpu}" if several and explanation is not None and explanation.gpu is not None else ""


def retained_title(verdict: Verdict) -> str:
    """Return the title for a table with bytes left by a step or a call."""
    return "kept by each step" if verdict.measurement.metrics.get("growth") else "what was retained"


def explanation_blocks(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[list[str]]:
    """Return the explanations for ``metrics`` as line blocks."""
    return [
        [*part_lines(explanation.table), *explanation.lines, *(f"note: {note}" for note in explanation.notes)]
        for explanation in explained_tables(verdict, metrics, units)
    ]


def out_of_memory_lines(explanation: Explanation, units: UnitSystem) -> list[str]:
    """Return lines with the live memory at the moment when memory ran out."""
    asked = (
        f" when {format_bytes(explanation.asked, units)} more were asked for" if explanation.asked is not None else ""
    )
    total = format_bytes(explanation.peak.total, units)
    on = "" if explanation.gpu is None else f" on {explanation.gpu}"
    return [
        f"memory ran out{on}{asked}; the step held {total} (run once more, recorded)",
        *part_lines(composition_table("what was there", explanation.peak, units, most=10)),
        *(f"note: {note}" for note in explanation.peak.notes),
    ]
