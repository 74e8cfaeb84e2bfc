"""Composition of the bytes live at a peak: category x module x line x dtype and shape. Frozen values, and their text."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.units import counted, format_bytes, nearest
from pytest_gpumem.values.layers import Layers, Numbers, apart, kinds_of, members, named
from pytest_gpumem.values.module_calls import Caller, Calls, outermost
from pytest_gpumem.values.plain import Form, FrozenValue
from pytest_gpumem.values.source_lines import Chain, all_chains, chains_from_text, chains_to_text, line_of
from pytest_gpumem.values.timeline import OverTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

CATEGORIES = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "input",
    "activation",
    "temporary",
    "workspace",
    "other",
    "unattributed",
)
"""Uses of a block.

``parameter``, ``buffer``, ``gradient``, ``optimizer state``, ``input``: found on the model, its optimizer and its batch.
``activation``: made in forward (or recomputed) and still there when the module that made it has returned: passed on, saved
for backward, or kept. ``temporary``: made in forward and freed before that, or made in backward. ``workspace``: given back
before the operator that took it returned. ``unattributed``: of the step, but never seen one by one.
"""

KEPT_SHARE = 0.95
"""The share of the peak that a baseline's rows make up."""
MOST_KEPT = 100
"""The most rows that a baseline keeps. Of a transformer 30 make up 95 %, of a U-Net, whose blocks differ, 100 to 190."""
MOST_TIED = 50
"""The most further rows that a baseline keeps because they have the size of its last row."""
REST = "smaller rows"
"""The operator of a row that stands for all rows of its category that were not kept."""

_SEPARATOR = " | "
_DIGITS = re.compile(r"\d+")


NOT_EXPLAINED = "it could not be run again to tell what its peak is made of"
"""Prefix of the note of a step that raised when it was run once more."""


class MissingComposition(AttributeError):
    """A measurement was asked for a composition that was not recorded."""


class CompositionError(ValueError):
    """A text that is not the row of a composition; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Row:
    """Blocks that are alike in category, module, line, operator, dtype and shape."""

    category: str
    nbytes: int
    module: str = ""
    """The path of the module with layer numbers folded (``blocks.*.attn``), the model's class for itself; empty for none.

    It may be given with those of its layers: ``blocks.{0,2}.attn``.
    """
    site: str = ""
    """File and line of the innermost frame that is the user's own code (``model.py:88``); empty where there is none."""
    library: str = ""
    """Package, file and line of the model library's frame beneath it, if there is one:
    ``transformers 4.38.2: models/gpt2/modeling_gpt2.py:123``."""
    operator: str = ""
    """The operator that allocated (``_softmax``), or the node of the autograd graph in backward (``MulBackward0``)."""
    tensor: str = ""
    """Dtype and shape: ``float32[8, 12, 1024, 1024]``; empty where no tensor was seen in it."""
    count: int = 1
    layers: Layers = ()
    """The layers of the module that it is of, ``((0, 2),)``, where it is not the same in all of them."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The lines that led to its line, innermost first. They do not tell rows apart, and no baseline keeps them."""
    named: str = field(default="", compare=False)
    """The caller that is named before its line, for example because the caller has changed."""

    def __post_init__(self) -> None:
        if not self.layers:
            module, layers = apart(self.module)
            object.__setattr__(self, "module", module)
            object.__setattr__(self, "layers", layers)

    @property
    def path(self) -> str:
        """The path of the module with the layers that it is of: ``blocks.{0,2}.attn``, or ``blocks.*.attn`` for all."""
        return named(self.module, self.layers)

    @property
    def dtype(self) -> str:
        """``float32``; empty where it is not known."""
        return self.tensor.partition("[")[0]

    @property
    def shape(self) -> str:
        """``[8, 12, 1024, 1024]``; empty where it is not known."""
        return self.tensor[len(self.dtype) :]

    @property
    def where(self) -> str:
        """The line as a person reads it: the library's own, and from which of the user's lines it was reached."""
        return line_of(self.site, self.library, self.named)

    @property
    def what(self) -> str:
        """``24 x float32[8, 12, 1024, 1024]``, or what is known of it."""
        return f"{self.count} x {self.tensor or 'block'}"

    def text(self) -> str:
        """Return one line, for the store; `row_from_text` is the inverse."""
        parts = (self.category, self.path, self.operator, self.site, self.library, self.what, str(self.nbytes))
        return _SEPARATOR.join(part.replace("|", "/") for part in parts)


def text_with_callers(row: Row) -> str:
    """Return the text of a row, followed by the callers and the named caller if there are any."""
    if not row.callers and not row.named:
        return row.text()
    more = (chains_to_text(row.callers), row.named)
    return _SEPARATOR.join([row.text(), *(part.replace("|", "/") for part in more)])


def row_from_text(text: str) -> Row:
    """Return the row that `Row.text` or `text_with_callers` wrote. Raises `CompositionError`."""
    parts = text.split(_SEPARATOR)
    if len(parts) not in (7, 9):
        raise CompositionError(
            f"{text!r} has {len(parts)} parts, expected 7: category | module | operator | line | library's line | "
            "count x dtype[shape] | bytes"
        )
    category, module, operator, site, library, what, nbytes = parts[:7]
    callers, named = parts[7:] or ("", "")
    if category not in CATEGORIES:
        raise CompositionError(f"{text!r}: {category!r} is no category; {nearest(category, list(CATEGORIES))}")
    count, times, tensor = what.partition(" x ")
    if not times or not count.isdecimal():
        raise CompositionError(f"{text!r}: {what!r} is no count of tensors, like '4 x float32[8, 64]'")
    # What is known one by one may be more than what was counted as the step's, and nothing else can be negative.
    digits = nbytes.removeprefix("-") if category == "unattributed" else nbytes
    if not digits.isdecimal():
        raise CompositionError(f"{text!r}: {nbytes!r} is no number of bytes")
    return Row(
        category,
        int(nbytes),
        module,
        site,
        library,
        operator,
        "" if tensor == "block" else tensor,
        int(count),
        callers=chains_from_text(callers),
        named=named,
    )


RowText = Annotated[Row, Form(str, text_with_callers, row_from_text)]
"""A row that is written as its text, with its callers."""


@dataclass(frozen=True, slots=True, repr=False)
class Composition(FrozenValue):
    """Composition of the bytes live at one moment. ``rows``, largest first, and ``rest`` add up to ``total`` exactly."""

    total: int
    rows: tuple[RowText, ...]
    recomputed: Mapping[str, int] = field(default_factory=dict)
    """Modules that ran once more in backward (activation checkpointing), by folded path: how many calls."""
    notes: tuple[str, ...] = ()
    no_grad: Mapping[str, Calls] = field(default_factory=dict)
    """The calls of each module, by folded path: how many of them ran with grad mode off."""
    no_backward: Mapping[str, Calls] = field(default_factory=dict)
    """The calls in forward with grad mode on: how many of them backward did not reach."""
    phase: str = ""
    """The step's phase that the moment is in: ``backward``; empty where it is not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=_order)))
        self._freeze(
            **{name: dict(sorted(getattr(self, name).items())) for name in ("recomputed", "no_grad", "no_backward")}
        )

    def __repr__(self) -> str:
        # Short, since it stands in every failed assertion about it.
        return f"<Composition: {format_bytes(self.total)} in {counted(len(self.rows), 'row')}>"

    @property
    def rest(self) -> int:
        """Bytes that are in no row: none, unless only the largest were kept."""
        return self.total - sum(row.nbytes for row in self.rows)

    def of(self, category: str, module: str = "*") -> int:
        """Return the bytes of a category, of the modules that match a pattern (``"blocks.*.attn"``) and what is within them.

        Raises ``ValueError`` for a category that there is not.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category; {nearest(category, list(CATEGORIES))}")
        return sum(row.nbytes for row in self.rows if row.category == category and _within(row, module))

    def dtypes(self, module: str = "*", category: str | None = None) -> frozenset[str]:
        """Return the dtypes of the tensors in modules that match a pattern (``"*.attn"``) and in what is within them."""
        return frozenset(
            row.dtype for row in self.rows if row.dtype and category in (None, row.category) and _within(row, module)
        )

    def kept(self) -> Composition:
        """Return what a baseline keeps: the largest rows, at most 100, and modules that are unlike those around them.

        The rows make up 95 % of all bytes, and 95 % of those beside workspaces, which on a GPU are more than a small model.
        Those that are not kept are joined to one of each category (`REST`).

        If up to 50 further rows have the size of the last row, they are kept, too. Example: ``to_q``, ``to_k`` and ``to_v``
        have equal sizes. Without ``to_v`` a new row with this size would look like ``to_v``. A larger tie is split.
        """
        workspaces = sum(row.nbytes for row in self.rows if row.category == "workspace")
        # Keep negative rows; without them the kept rows could add up to more than the total.
        kept = [row for row in self.rows if row.nbytes < 0]
        rests = [row for row in self.rows if row.nbytes >= 0 and row.operator == REST]
        rows = [row for row in self.rows if row.nbytes >= 0 and row.operator != REST]
        missing = self.total - sum(row.nbytes for row in kept)
        missing_beside = missing - workspaces
        number = 0
        while number < len(rows) and len(kept) + number < MOST_KEPT:
            row = rows[number]
            if missing <= (1 - KEPT_SHARE) * self.total and missing_beside <= (1 - KEPT_SHARE) * (
                self.total - workspaces
            ):
                break
            number += 1
            missing -= row.nbytes
            missing_beside -= row.nbytes if row.category != "workspace" else 0
        tied = [row for row in rows[number:] if number and row.nbytes == rows[number - 1].nbytes]
        number += len(tied) if len(tied) <= MOST_TIED else 0
        kept, others = [*kept, *rows[:number]], [*rests, *rows[number:]]
        joined = merged(Row(row.category, row.nbytes, operator=REST, count=row.count) for row in others)
        return replace(
            self, rows=(*kept, *joined), no_grad=outermost(self.no_grad), no_backward=outermost(self.no_backward)
        )


def merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows with those joined that differ in nothing but count and bytes."""
    found: dict[Row, tuple[int, int, dict[Chain, None]]] = {}
    for row in rows:
        key = replace(row, nbytes=0, count=0)
        nbytes, count, chains = found.get(key, (0, 0, {}))
        found[key] = nbytes + row.nbytes, count + row.count, chains | dict.fromkeys(row.callers)
    return tuple(
        replace(key, nbytes=nbytes, count=count, callers=all_chains(chains))
        for key, (nbytes, count, chains) in found.items()
    )


def each_layer(row: Row) -> dict[Numbers, Row]:
    """Return a row for each layer that is named, by its numbers; nothing where none is, or they cannot be alike."""
    of = members(row.layers) or set()
    if not of or row.nbytes % len(of) or row.count % len(of):
        return {}
    one = replace(row, nbytes=row.nbytes // len(of), count=row.count // len(of))
    return {numbers: replace(one, layers=tuple((number,) for number in numbers)) for numbers in of}


def joined(rows: Iterable[Row], there: Mapping[str, Collection[Numbers]]) -> tuple[Row, ...]:
    """Return rows of single layers with those joined that are alike but for their layer, as few as that takes.

    Args:
        rows: The rows.
        there: The layers that there are of each module.
    """
    found: dict[Row, dict[Numbers, tuple[int, ...]]] = {}
    callers: dict[Row, dict[Chain, None]] = {}
    whole = []
    for row in rows:
        layers_of_row = each_layer(row)
        key = replace(row, nbytes=0, count=0, layers=())
        for numbers, one in layers_of_row.items():
            found.setdefault(key, {})[numbers] = one.nbytes, one.count
        callers.setdefault(key, {}).update(dict.fromkeys(row.callers))
        whole += [] if layers_of_row else [row]
    for key, each in found.items():
        for layers, number, (nbytes, count) in kinds_of(each, there.get(key.module, ())):
            chains = all_chains(callers[key])
            whole.append(replace(key, nbytes=nbytes * number, count=count * number, layers=layers, callers=chains))
    return merged(whole)


def item_bits(dtype: str) -> int:
    """Return the bits of an element of a dtype: 32 of ``float32``, 8 of ``bool`` and ``float8_e5m2``; 0 where unknown."""
    found = _DIGITS.search(dtype)
    return 8 if dtype == "bool" else int(found.group()) if found else 0


def _order(row: Row) -> tuple[int, str]:
    return -row.nbytes, row.text()


def _within(row: Row, pattern: str) -> bool:
    """Return whether a row's module, with layers folded or named, or one that it is in matches the pattern."""
    parts = [path.split(".") for path in {row.module, row.path}]
    return any(
        fnmatch.fnmatchcase(".".join(some[:count]), pattern) for some in parts for count in range(1, len(some) + 1)
    )


KEPT_IN = "kept in"
HOLDER_NOT_FOUND = "holder not found"
MOST_ALTERNATIVES = 3
"""The most alternatives that the path of a holder names."""
FIRST_USE = "filled by the first use"
"""Says of a holder that the measured run gave tensors to it, and the next run none: a cache."""


@dataclass(frozen=True, slots=True)
class Holder(FrozenValue):
    """An attribute, variable or autograd graph that keeps tensors alive, and the tensors.

    Example:
        ``Holder("Net.seen[...]", Composition(4096, (Row("activation", 4096, site="net.py:12"),)))``
    """

    path: str
    """``"Net.seen[...]"``, ``"the autograd graph of losses[...]"``; empty if no holder was found.

    ``"Net.seen[...] or Net.last"`` and ``"perhaps Net.seen[...]"`` name `alternatives`.
    """
    kept: Composition
    """The tensors."""
    first_use: bool = False
    """True for a cache: the next run finds it full (`FIRST_USE`)."""
    alternatives: tuple[str, ...] = ()
    """The paths to several possible holders, if nothing proves which of them keeps the tensors; else empty.

    An empty path stands for a holder that was not found.
    """

    @property
    def text(self) -> str:
        """``"kept in: Net.seen[...]"``, as every report names the holder."""
        if not self.path:
            return HOLDER_NOT_FOUND
        return f"{FIRST_USE if self.first_use else KEPT_IN}: {self.path}"


def holder_at(paths: Iterable[str], kept: Composition) -> Holder:
    """Return the holder at a path, or a holder with alternatives if there are several paths."""
    alternatives = tuple(sorted(set(paths)))
    if len(alternatives) < 2:
        return Holder("".join(alternatives), kept)
    named = [path for path in alternatives if path]
    more = len(named) - MOST_ALTERNATIVES
    text = " or ".join([*named[:MOST_ALTERNATIVES], *([counted(more, "other")] if more > 0 else [])])
    return Holder(text if len(named) == len(alternatives) else f"perhaps {text}", kept, alternatives=alternatives)


def ranked(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Return holders in the order of the bytes that they keep, the most first."""
    return tuple(sorted(holders, key=lambda holder: (-holder.kept.total, holder.path)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of a recorded run of a step."""

    peak: Composition
    """Composition of the peak; where the run ended with an out-of-memory error, of that moment."""
    retained: Composition = field(default_factory=lambda: Composition(0, ()))
    """Composition of the bytes that the step left behind, after garbage was collected."""
    garbage: Composition = field(default_factory=lambda: Composition(0, ()))
    """Composition of the bytes that only Python's cyclic collector freed."""
    cycles: tuple[str, ...] = ()
    """The types in the reference cycles that held it: ``"Trainer -> dict -> function"``."""
    asked: int | None = None
    """The bytes that were asked for when memory ran out; ``None`` where it did not."""
    over_time: OverTime | None = None
    """The step's bytes from its beginning to its end, where a report shows them."""
    holders: tuple[Holder, ...] = ()
    """The holders of the tensors of ``retained``, `ranked`. Their rows add up to those of ``retained``."""
    holders_of_inputs: tuple[Holder, ...] = ()
    """The holders of inputs that each step frees and makes anew, such as ``self.last_output``."""
    gpu: str | None = None
    """The GPU that it is of, ``"cuda:1"``, in a process that sees several."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict)
    """Compositions of the peaks of the other phases."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict)
    """Callers of each module and function that was called with grad mode on, by folded path. No baseline keeps them."""
    function_at: Mapping[str, str] = field(default_factory=dict)
    """The function of each line that ran with grad mode on, but in a module's ``forward``: ``Net.target()``, ``step()``."""

    def kept(self) -> Explanation:
        """Return it with the largest rows only, and of other phases those whose peaks are half of the step's or more.

        For the way out of this process, and for a baseline: the step's peak may move to such a phase. The peak keeps all calls
        of modules, of which a baseline keeps fewer.
        """
        near = {phase: one.kept() for phase, one in self.other_phases.items() if 2 * one.total >= self.peak.total}
        return replace(
            self,
            peak=replace(self.peak.kept(), no_grad=self.peak.no_grad, no_backward=self.peak.no_backward),
            retained=self.retained.kept(),
            garbage=self.garbage.kept(),
            holders=tuple(replace(holder, kept=holder.kept.kept()) for holder in self.holders),
            holders_of_inputs=tuple(replace(holder, kept=holder.kept.kept()) for holder in self.holders_of_inputs),
            other_phases=near,
        )


def without_callers(composition: Composition) -> Composition:
    """Return a composition without the callers of its rows' lines."""
    return replace(composition, rows=tuple(replace(row, callers=()) for row in composition.rows))


def explanation_without_callers(explanation: Explanation) -> Explanation:
    """Return an explanation without the callers of its rows' lines."""

    def without(holders: Iterable[Holder]) -> tuple[Holder, ...]:
        return tuple(replace(holder, kept=without_callers(holder.kept)) for holder in holders)

    return replace(
        explanation,
        peak=without_callers(explanation.peak),
        retained=without_callers(explanation.retained),
        garbage=without_callers(explanation.garbage),
        holders=without(explanation.holders),
        holders_of_inputs=without(explanation.holders_of_inputs),
        other_phases={phase: without_callers(one) for phase, one in explanation.other_phases.items()},
    )
