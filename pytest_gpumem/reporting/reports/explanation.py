"""Make tables that explain a figure: the growth, the peak, the leftover bytes, or the operators behind a count.

Every report format shows the same `PartTable`. Functions in this module also turn the table into lines of text. Pure.

Example: a test's peak grew by 1.00 GB::

    what grew    baseline      now    change  module         line        operator  tensors
    activations   1.00 GB  2.00 GB  +1.00 GB  blocks.*.attn  model.py:88  _softmax  4 x float32[8, 4, 256, 256]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted, format_bytes, format_bytes_change
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import REST, Composition, Explanation
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
    "the test that runs first fills this holder, and later tests find it full; fill it in a session-scoped fixture, "
    "or accept the kept bytes"
)
"""The note on a holder, such as a cache, whose first use fills it."""

PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
}
"""The plural names of categories, for reports. Other categories have no plural, and reports show them unchanged."""

_NO_COMPOSITION = (
    "the baseline has no composition to compare with; accepting the figures stores a composition "
    "(not under --gpumem-explain=never)"
)
_NOT_LISTED = "the baseline does not list these rows"
_PLACES = (
    Column("module", left=True, least=10),
    Column("line", left=True, least=10),
    Column("operator", left=True, least=10, weight=0),
    Column("tensors", left=True, least=24, weight=1),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A row of a `PartTable`, formatted as text: equal memory blocks, a change in such blocks, or an operator's calls.

    Memory blocks are equal if they have the same category, module, line, operator and tensors. Example: 12 blocks with the
    category ``activation`` and ``float32[8, 12, 1024, 1024]``, which ``_softmax`` allocated at ``model.py:88``.
    """

    name: str
    """The blocks' category, or the operator's name."""
    figures: tuple[str, ...]
    places: tuple[str, ...]
    """The module and the line of code, and for blocks also the operator and the tensors."""
    reason: str = ""
    share: float = 0.0
    """The part's size divided by the size of the largest part."""
    bar: str = ""
    """The CSS class of the part's bar in HTML: ``grew``, ``shrank``, or the class with the category's colour."""


@dataclass(frozen=True, slots=True)
class PartTable:
    """The largest parts of an amount (bytes, a count, or a change), and the sum of all other parts."""

    title: str
    figures: tuple[str, ...]
    """The titles of the columns with figures."""
    parts: tuple[Part, ...]
    others_title: str = ""
    """The title of the last row, with the sum of all other parts; empty if the table shows every part."""
    rest: str = ""
    """The sum of all other parts, as a text."""
    note: str = ""
    sentences: tuple[str, ...] = ()
    """Sentences before the table. For example, a sentence says that a changed autograd graph explains every row."""
    of_blocks: bool = True
    """True if the parts are memory blocks; False for operator calls."""

    @property
    def changes(self) -> bool:
        """True if the parts are memory blocks that changed since the baseline."""
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
    """Return a table with a composition's largest rows. Together the rows never exceed the composition's total.

    Args:
        title: The table's title.
        composition: The bytes to explain.
        units: The unit system for bytes.
        most: The number of rows to show.
        rows: The composition's rows in the order of the table; by default the largest come first.
    """
    listed = [*(listed_rows(composition) if rows is None else rows)][:most]
    rest = composition.total - sum(row.nbytes for row in listed)
    rows = _without_bytes(listed, -rest) if rest < 0 else listed
    note = (
        f"{format_bytes(-rest, units)} are left out, because as much older memory was freed meanwhile"
        if rest < 0
        else ""
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
    """Return a composition's rows for a table, the largest first. Rows that sum up smaller rows are left out."""
    # A row has negative bytes if the step freed blocks that it had not allocated. Such a row does not help readers.
    return [row for row in composition.rows if row.operator != REST and row.nbytes > 0]


def _without_bytes(rows: Iterable[Row], nbytes: int) -> list[Row]:
    """Subtract ``nbytes`` from the first rows, and return the remaining rows, the largest first.

    For example, subtracting 5 bytes from rows with 3 and 4 bytes leaves a single row with 2 bytes.
    """
    smaller = []
    for row in rows:
        taken = min(row.nbytes, nbytes)
        nbytes -= taken
        smaller += [replace(row, nbytes=row.nbytes - taken)] if taken < row.nbytes else []
    return sorted(smaller, key=lambda row: -row.nbytes)


def change_table(
    difference: Difference, units: UnitSystem, most: int | None = None, title: str = "what grew"
) -> PartTable:
    """Return a table with a composition's changes since the baseline, and the reasons for the changes.

    Args:
        difference: The difference between the baseline's composition and the current composition.
        units: The unit system for bytes.
        most: The number of changes to show, the largest first; with ``None``, as many as explain most of the increase.
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
    """Yield the table's row for a change. If several rows may have grown, yield a row for each of them as well."""
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
    """Return a title for a change that several rows may explain.

    The title is ``one of these 2 rows`` if each row is large enough for the whole change. If a row is too small for the whole
    change, several rows must have grown, and the title is ``some of these 2 rows``.
    """
    number = len(change.alternatives)
    if all(row.nbytes >= MAY_BE_ALL * change.nbytes for row in change.alternatives):
        return f"one of these {number} rows" if number > 1 else "this row or smaller ones"
    return f"some of these {number} rows" if number > 1 else "this row and smaller ones"


def count_tables(
    verdict: Verdict, metrics: Collection[str], units: UnitSystem, most: int = MOST_ROWS
) -> list[PartTable]:
    """Return a table of operators for each count in ``metrics``.

    A table lists the changes since the baseline by operator and line, or all operators if the baseline does not list any. For
    example, a row says that ``copy_`` ran 48 more times than in the baseline, at ``model.py:88``.
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
    """Return a count's parts, the largest first.

    Parts at changed lines come before all other parts if they explain enough of the increase.
    """
    increase = sum(max(0, tally.amount) for tally in tallies)

    def rank(tally: Tally) -> tuple[bool, int]:
        named_first = tally.place.reason.startswith(CHANGED_LINE) and tally.amount >= LEAST_SHARE * increase
        return not named_first, -tally.amount

    return sorted(tallies, key=rank)


def _has_lines(tallies: Collection[Tally]) -> bool:
    return any(tally.place != NOWHERE for tally in tallies)


def _place_of(place: OperatorSite, *, has_lines: bool) -> tuple[str, str]:
    """Return the module and the line for an operator's calls.

    If the table has lines for other operators, an unknown line becomes ``(other lines)``.
    """
    module = place.module or ("(no module)" if place.where else "")
    return module, place.where or ("(other lines)" if has_lines else "")


def grown_counts(verdict: Verdict) -> list[str]:
    """Return the counts with a failing verdict, or with an uncertain verdict, which fails a test only in strict mode."""
    beyond = FAILING | {Outcome.UNCERTAIN}
    return [
        metric.metric for metric in verdict.metrics if metric.metric in MADE_OF_OPERATORS and metric.outcome in beyond
    ]


def category_of(row: Row) -> str:
    """Return the plural name of a row's category, such as ``activations``."""
    category = PLURALS.get(row.category, row.category)
    if row.operator != REST:
        return category
    return REST if row.category == "other" else f"{REST} of {category}"


def _places_of(row: Row) -> tuple[str, ...]:
    """Return a row's module, line, operator and tensors. All four texts are empty for a row that sums up smaller rows."""
    if row.operator == REST:
        return "", "", "", ""
    return row.path or ("(no module)" if row.where else ""), row.where, row.operator, row.what


def part_layout(table: PartTable, indent: int = 0) -> Table:
    """Return the table in the form that `layout` prints as text. Tables of changes and counts omit empty columns."""
    rows = [(part.name, *(text or "-" for text in part.figures), *part.places, part.reason) for part in table.parts]
    lines = tuple(tuple(map(Span, row)) for row in rows)
    places = _PLACES if table.of_blocks else _PLACES[:2]
    columns = (Column(table.title, left=True), *map(Column, table.figures), *places, Column("", left=True))
    always = range(len(columns) - 1 if table.figures == ("bytes",) else 1 + len(table.figures))
    return Table(columns, lines, indent).without_empty(always)


def part_lines(table: PartTable) -> list[str]:
    """Return a table as lines of text, including the sentences before and after the table."""
    return [*table.sentences, *plain_lines(part_layout(table)), *table.last]


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """A table, the lines below it, such as ``"kept in: model.cache"``, and notes on the recording of the explanation."""

    table: PartTable
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def explained_tables(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[ExplainedTable]:
    """Return the tables that explain ``metrics``; empty if the measurement has no explanation for them.

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
    """Return a line for each of the largest holders: ``"kept in: Net.seen[...]"``.

    If there are several holders, each line also shows the bytes that the holder keeps. Holders with less than 1 % of the kept
    bytes are omitted. For example, a list of losses keeps very little beside a list of outputs.
    """
    total_kept = sum(holder.kept.total for holder in holders)
    large = [holder for holder in holders if holder.kept.total >= LEAST_HELD * total_kept]
    if len(large) < 2:
        return tuple(holder.text for holder in large)
    lines = [f"{holder.text} ({format_bytes(holder.kept.total, units)})" for holder in large[:MOST_HOLDERS]]
    more = len(large) - MOST_HOLDERS
    return (*lines, *([f"and {counted(more, 'other holder')}"] if more > 0 else []))


def kept_notes(retained_rows: KeptRows, units: UnitSystem) -> tuple[str, ...]:
    """Return a note if some of the retained bytes were also retained in the baseline, and the table has several rows."""
    if retained_rows.before < LEAST * retained_rows.growth or not retained_rows.before or len(retained_rows.rows) < 2:
        return ()
    new_rows = "new rows come first"
    if retained_rows.uncertain:
        verb = "is" if rows_of(retained_rows).startswith("one") else "are"
        new_rows = f"{rows_of(retained_rows)} {verb} new, and nothing proves which"
    return (f"{format_bytes(int(retained_rows.before), units)} of this was already kept in the baseline; {new_rows}",)


def rows_of(retained_rows: KeptRows) -> str:
    """Return a text for rows that may be new, such as ``"one of these 2 rows"``."""
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
    # If the peak moved, the growth within the old phase does not explain the new peak. So a second table shows the tensors that
    # only the new phase has.
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
    """Return a line for each holder of inputs, if these inputs grew since the baseline: ``"kept in: Net.last_output"``."""
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
    current = "" if moved.peak_before is None else f", whose peak is now {format_bytes(moved.peak_before, units)}"
    compared = "" if moved.compared == moved.after else f"; the baseline does not list the tensors of {moved.after}"
    return f"the peak is in {moved.after}; in the baseline it was in {moved.before}{current}{compared}"


def _not_in(other: Composition, composition: Composition) -> Composition:
    """Return the rows in ``composition`` that ``other`` does not contain."""
    changes = difference_of(other, composition).changes
    rows = tuple(change.after for change in changes if change.before is None and change.after is not None)
    return Composition(sum(row.nbytes for row in rows), rows)


def explained_on(verdict: Verdict) -> str:
    """Return the GPU whose memory is explained, as ``" on cuda:1"``, if the step used several GPUs; else an empty text."""
    explanation = verdict.measurement.explanation
    several = len(verdict.measurement.by_device) > 1
    return f" on {explanation.gpu}" if several and explanation is not None and explanation.gpu is not None else ""


def retained_title(verdict: Verdict) -> str:
    """Return the title for a table with bytes that are still allocated after a step or a call."""
    return "kept by each step" if verdict.measurement.metrics.get("growth") else "what was retained"


def explanation_blocks(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[list[str]]:
    """Return the explanations for ``metrics``, each as a list of lines."""
    return [
        [*part_lines(explanation.table), *explanation.lines, *(f"note: {note}" for note in explanation.notes)]
        for explanation in explained_tables(verdict, metrics, units)
    ]


def out_of_memory_lines(explanation: Explanation, units: UnitSystem) -> list[str]:
    """Return the text lines that list the live memory after a step ran out of memory."""
    asked = (
        f" when {format_bytes(explanation.asked, units)} more were asked for" if explanation.asked is not None else ""
    )
    total = format_bytes(explanation.peak.total, units)
    on = "" if explanation.gpu is None else f" on {explanation.gpu}"
    return [
        f"memory ran out{on}{asked}; the step held {total} (in another run, which was recorded)",
        *part_lines(composition_table("what was there", explanation.peak, units, most=10)),
        *(f"note: {note}" for note in explanation.peak.notes),
    ]
