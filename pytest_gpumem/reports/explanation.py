"""Tables that explain a figure: what grew, what is there at a peak or was left behind, and which operators a count has more of.

Each format lays out the same `PartTable`; here it becomes lines of text. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import CHANGED_LINE, LEAST_SHARE
from pytest_gpumem.gate.difference import difference as difference_of
from pytest_gpumem.gate.growths import LEAST, kept_rows
from pytest_gpumem.gate.smaller_rows import MAY_BE_ALL
from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Span, Table, plain_lines
from pytest_gpumem.reports.values import difference, shown
from pytest_gpumem.units import counted, format_bytes, format_bytes_change
from pytest_gpumem.values.composition import CATEGORIES, REST, Composition, Explanation
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS, NOWHERE, total

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pytest_gpumem.gate.difference import Change, Difference, Moved
    from pytest_gpumem.gate.growths import KeptRows
    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.composition import Holder, Row
    from pytest_gpumem.values.operator_counts import OperatorSite, Tally

MOST_ROWS = 5
MOST_HOLDERS = 3
LEAST_HELD = 0.01
"""The share of the retained bytes that a holder keeps at least, to be shown."""
FILLED_ONCE = (
    "the test that runs first fills it, and later tests find it full: fill it in a session's fixture, "
    "or accept what is kept"
)
"""The note on a holder that the first use fills."""

PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
}
"""Names of categories in every report; the others are called as they are."""

_NO_COMPOSITION = (
    "the baseline keeps no composition to compare with; one is kept when it is next accepted "
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
    """Blocks that are alike, a change of such, or calls of an operator, as texts."""

    name: str
    """The category, or the operator."""
    figures: tuple[str, ...]
    places: tuple[str, ...]
    """Module and line, and of blocks the operator and the tensors."""
    reason: str = ""
    share: float = 0.0
    """Size relative to the largest part."""
    bar: str = ""
    """The class of its bar in HTML: ``grew``, ``shrank``, or that of the category's colour."""


@dataclass(frozen=True, slots=True)
class PartTable:
    """The largest parts of a number of bytes or of a count, or of its change, and what the others make up together."""

    title: str
    figures: tuple[str, ...]
    """The titles of the columns of figures."""
    parts: tuple[Part, ...]
    others: str = ""
    """The name of the others; empty where there are none."""
    rest: str = ""
    """The sum of the others."""
    note: str = ""
    first: tuple[str, ...] = ()
    """Sentences that stand before the table: what all of it follows from."""
    of_blocks: bool = True
    """True if it is of blocks of memory, or else of calls of operators."""

    @property
    def changes(self) -> bool:
        """True if the parts are changes of blocks."""
        return len(self.figures) > 1

    @property
    def rest_line(self) -> str:
        together = " together" if self.changes or not self.of_blocks else ""
        return f"{self.others}: {self.rest}{together}" if self.others else ""

    @property
    def last(self) -> tuple[str, ...]:
        """Sentences after the table in text: the sum of the others, and the note."""
        return tuple(filter(None, [self.rest_line, self.note and f"note: {self.note}"]))


def composition_table(
    title: str,
    composition: Composition,
    units: UnitSystem,
    most: int = MOST_ROWS,
    rows: Sequence[Row] | None = None,
) -> PartTable:
    """Return the largest rows of a composition, whose bytes are never more than its total.

    ``rows`` are the rows in another order.
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
    # If other owners' blocks were freed meanwhile, a row is negative. People cannot use it.
    return [row for row in composition.rows if row.operator != REST and row.nbytes > 0]


def _without_bytes(rows: Iterable[Row], nbytes: int) -> list[Row]:
    """Return rows, the largest first, after so many bytes are taken from the largest."""
    smaller = []
    for row in rows:
        taken = min(row.nbytes, nbytes)
        nbytes -= taken
        smaller += [replace(row, nbytes=row.nbytes - taken)] if taken < row.nbytes else []
    return sorted(smaller, key=lambda row: -row.nbytes)


def change_table(
    difference: Difference, units: UnitSystem, most: int | None = None, title: str = "what grew"
) -> PartTable:
    """Return the ``most`` largest changes of a composition, or those that explain most of the increase, with their reasons."""
    changes = difference.explaining() if most is None else difference.changes[:most]
    largest = max((abs(one.nbytes) for one in changes), default=0)
    others = len(difference.changes) - len(changes)
    rest = difference.nbytes - sum(one.nbytes for one in changes)
    parts = [part for change in changes for part in _parts_of(change, units, largest)]
    return PartTable(
        title,
        ("baseline", "now", "change"),
        tuple(parts),
        counted(others, "other change") if others else "",
        format_bytes_change(rest, units) if others else "",
        first=_sentences(difference),
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
    others = len(alternatives) - MOST_ROWS
    if others > 0:
        yield Part(f"- {counted(others, 'other row')}", ("", "", ""), ("", "", "", ""))


def alternatives_title(change: Change) -> str:
    """Return a title. Example: ``one of these 2 rows``, if each row may have grown alone."""
    number = len(change.alternatives)
    if all(row.nbytes >= MAY_BE_ALL * change.nbytes for row in change.alternatives):
        return f"one of these {number} rows" if number > 1 else "this row or smaller ones"
    return f"some of these {number} rows" if number > 1 else "this row and smaller ones"


def count_tables(
    verdict: Verdict, metrics: Collection[str], units: UnitSystem, most: int = MOST_ROWS
) -> list[PartTable]:
    """Return the operators by which each count among ``metrics`` is more, or of which it is made if the baseline lacks them."""
    tables = []
    for name in sorted(MADE_OF_OPERATORS, key=lambda name: METRICS[name].precedence):
        title = METRICS[name].title
        changes = verdict.count_changes.get(name)
        made_of = verdict.measurement.by_operator.get(name, ())
        if name not in metrics or not (made_of if changes is None else changes):
            continue
        if changes is not None:
            tables.append(_count_table(f"more {title}", name, changes, units, most, tells_lines=_tells_lines(made_of)))
        else:
            note = f"the baseline does not say what its {title} were; it will when it is next accepted"
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
    tells_lines: bool = False,
) -> PartTable:
    largest_first = ranked(tallies)[:most]
    largest = max((abs(one.amount) for one in largest_first), default=1)
    others = len(tallies) - len(largest_first)
    text_of = shown if note else difference
    parts = (
        Part(
            one.operator,
            (text_of(metric, one.amount, units),),
            _place_of(one.place, tells_lines=tells_lines),
            one.place.reason,
            share=abs(one.amount) / largest,
            bar="shrank" if one.amount < 0 else "grew",
        )
        for one in largest_first
    )
    return PartTable(
        title,
        ("now" if note else "change",),
        tuple(parts),
        counted(others, "other") if others else "",
        text_of(metric, total(tallies) - total(largest_first), units) if others else "",
        note,
        of_blocks=False,
    )


def ranked(tallies: Collection[Tally]) -> list[Tally]:
    """Return a count's parts, the largest first. Parts at changed lines precede them if they are a fair share."""
    increase = sum(max(0, one.amount) for one in tallies)

    def rank(one: Tally) -> tuple[bool, int]:
        named_first = one.place.reason.startswith(CHANGED_LINE) and one.amount >= LEAST_SHARE * increase
        return not named_first, -one.amount

    return sorted(tallies, key=rank)


def _tells_lines(tallies: Collection[Tally]) -> bool:
    return any(one.place != NOWHERE for one in tallies)


def _place_of(place: OperatorSite, *, tells_lines: bool) -> tuple[str, str]:
    """Return the module and the line of calls; what is not at a line that is known is at one of the others."""
    module = place.module or ("(no module)" if place.where else "")
    return module, place.where or ("(other lines)" if tells_lines else "")


def grown_counts(verdict: Verdict) -> list[str]:
    """Return the counts that are beyond what is allowed, whether the test fails by them or not."""
    beyond = FAILING | {Outcome.UNCERTAIN}
    return [one.metric for one in verdict.metrics if one.metric in MADE_OF_OPERATORS and one.outcome in beyond]


def category_of(row: Row) -> str:
    """Return the name of a row's category: ``activations``."""
    category = PLURALS.get(row.category, row.category)
    if row.operator != REST:
        return category
    return REST if row.category == "other" else f"{REST} of {category}"


def _places_of(row: Row) -> tuple[str, ...]:
    """Return the module, the line, the operator and the tensors of blocks; of the smaller rows nothing is known."""
    if row.operator == REST:
        return "", "", "", ""
    return row.path or ("(no module)" if row.where else ""), row.where, row.operator, row.what


def part_layout(table: PartTable, indent: int = 0) -> Table:
    """Return the layout in text. Of changes and counts, columns that say nothing of any part are left out."""
    rows = [(part.name, *(text or "-" for text in part.figures), *part.places, part.reason) for part in table.parts]
    lines = tuple(tuple(map(Span, row)) for row in rows)
    places = _PLACES if table.of_blocks else _PLACES[:2]
    columns = (Column(table.title, left=True), *map(Column, table.figures), *places, Column("", left=True))
    always = range(len(columns) - 1 if table.figures == ("bytes",) else 1 + len(table.figures))
    return Table(columns, lines, indent).without_empty(always)


def part_lines(table: PartTable) -> list[str]:
    """Return a table as lines of text, with the sentences before and after it."""
    return [*table.first, *plain_lines(part_layout(table)), *table.last]


@dataclass(frozen=True, slots=True)
class Explained:
    """A table, lines that go with it (``"kept in: model.cache"``), and notes on the recording."""

    table: PartTable
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def explained(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[Explained]:
    """Return why ``metrics`` are what they are, nothing where that is not known. A leak is first: peaks grow by it, too."""
    explanation = verdict.measurement.explanation or Explanation(Composition(0, ()))
    where = explained_on(verdict)
    found = []
    retained = explanation.retained
    if {"growth", "retained"}.intersection(metrics) and (retained.rows or retained.notes):
        kept = kept_rows(verdict)
        table = composition_table(retained_title(verdict) + where, retained, units, rows=kept.rows)
        filled = (FILLED_ONCE,) if any(holder.first_use for holder in explanation.holders[:MOST_HOLDERS]) else ()
        lines = holder_lines(kept.holders(explanation.holders), units)
        found.append(Explained(table, lines, (*kept_notes(kept, units), *retained.notes, *filled)))
    if any(METRICS[name].peak for name in metrics):
        found += _of_the_peak(verdict, units)
    if "cyclic_garbage" in metrics and explanation.garbage.rows:
        table = composition_table("held by cycles", explanation.garbage, units)
        found.append(Explained(table, tuple(f"cycle: {cycle}" for cycle in explanation.cycles)))
    return [*found, *map(Explained, count_tables(verdict, metrics, units))]


def holder_lines(holders: Collection[Holder], units: UnitSystem) -> tuple[str, ...]:
    """Return a line for each of the first holders, with its bytes if there are several: ``"kept in: Net.seen[...]"``.

    A holder of less than 1 % of the bytes is left out: the list of losses beside their autograd graphs.
    """
    kept = sum(holder.kept.total for holder in holders)
    large = [holder for holder in holders if holder.kept.total >= LEAST_HELD * kept]
    if len(large) < 2:
        return tuple(holder.text for holder in large)
    lines = [f"{holder.text} ({format_bytes(holder.kept.total, units)})" for holder in large[:MOST_HOLDERS]]
    more = len(large) - MOST_HOLDERS
    return (*lines, *([f"and {counted(more, 'other holder')}"] if more > 0 else []))


def kept_notes(kept: KeptRows, units: UnitSystem) -> tuple[str, ...]:
    """Return a note on bytes that the baseline kept, too, if there are several rows."""
    if kept.before < LEAST * kept.growth or not kept.before or len(kept.rows) < 2:
        return ()
    which = "new rows are first"
    if kept.uncertain:
        verb = "is" if rows_of(kept).startswith("one") else "are"
        which = f"{rows_of(kept)} {verb} new, and nothing proves which"
    return (f"{format_bytes(int(kept.before), units)} of this was kept in the baseline, too; {which}",)


def rows_of(kept: KeptRows) -> str:
    """Return ``"one of these 2 rows"``."""
    number = len(kept.uncertain)
    is_one = all(row.nbytes >= MAY_BE_ALL * kept.growth for row in kept.uncertain)
    return f"{'one' if is_one else 'some'} of these {number} rows"


def _of_the_peak(verdict: Verdict, units: UnitSystem) -> list[Explained]:
    difference, explanation = verdict.difference, verdict.measurement.explanation
    notes = () if explanation is None else explanation.peak.notes
    moved = None if difference is None else difference.moved
    if moved is not None:
        notes = (_moved_note(moved, units), *notes)
    tables = []
    if difference is not None and difference.nbytes > 0:
        where = f" in {moved.compared}" if moved is not None else ""
        tables.append(change_table(difference, units, title=f"what grew{where}{explained_on(verdict)}"))
    lines = _holders_of_grown_inputs(verdict)
    # What grew where the peak was is not all that made it move.
    is_all = bool(tables) and (moved is None or moved.compared == moved.after)
    if not is_all and moved is not None and explanation is not None and moved.before in explanation.other_phases:
        only_here = _not_in(explanation.other_phases[moved.before], explanation.peak)
        table = composition_table(f"in {moved.after}, not in {moved.before}{explained_on(verdict)}", only_here, units)
        tables.append(table if tables or difference is None else replace(table, first=_sentences(difference)))
    if tables:
        return [*map(Explained, tables[:-1]), Explained(tables[-1], lines, notes)]
    if explanation is None:
        return []
    if verdict.origin is not None and difference is None and not notes:
        notes = (_NO_COMPOSITION,)
    title = f"what is there at the peak{explained_on(verdict)}"
    return [Explained(composition_table(title, explanation.peak, units), notes=notes)]


def _holders_of_grown_inputs(verdict: Verdict) -> tuple[str, ...]:
    """Return a line for each holder of inputs that there are more of than in the baseline: ``"kept in: Net.last_output"``."""
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None or explanation is None:
        return ()
    grown = {_places_of(one.row) for one in difference.changes if one.nbytes > 0 and one.row.category == "input"}
    return tuple(
        holder.text
        for holder in explanation.holders_of_inputs[:MOST_HOLDERS]
        if holder.path and any(_places_of(row) in grown for row in holder.kept.rows)
    )


def _moved_note(moved: Moved, units: UnitSystem) -> str:
    now = "" if moved.peak_before is None else f", where it is {format_bytes(moved.peak_before, units)} now"
    compared = "" if moved.compared == moved.after else f"; the baseline does not keep what was there in {moved.after}"
    return f"the peak is in {moved.after}; it was in {moved.before}{now}{compared}"


def _not_in(other: Composition, composition: Composition) -> Composition:
    """Return the rows of a composition that another one has not."""
    changes = difference_of(other, composition).changes
    rows = tuple(one.after for one in changes if one.before is None and one.after is not None)
    return Composition(sum(row.nbytes for row in rows), rows)


def explained_on(verdict: Verdict) -> str:
    """Return ``" on cuda:1"``, the GPU that an explanation is of, where the step used several; else nothing."""
    explanation = verdict.measurement.explanation
    several = len(verdict.measurement.by_device) > 1
    return f" on {explanation.gpu}" if several and explanation is not None and explanation.gpu is not None else ""


def retained_title(verdict: Verdict) -> str:
    """Return the title of a table of bytes that outlived a step, or a call."""
    return "kept by each step" if verdict.measurement.metrics.get("growth") else "what was retained"


def explanation_blocks(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> list[list[str]]:
    """Return why ``metrics`` are what they are, as blocks of lines."""
    return [
        [*part_lines(one.table), *one.lines, *(f"note: {note}" for note in one.notes)]
        for one in explained(verdict, metrics, units)
    ]


def out_of_memory_lines(explanation: Explanation, units: UnitSystem) -> list[str]:
    """Return what held the memory when it ran out, as lines."""
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
