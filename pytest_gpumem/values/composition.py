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

CATEGORIES = {
    "parameter": "Found on a module that ran, or that the test's fixtures or the function passed to `measure` lead to.",
    "buffer": "Found there as a buffer.",
    "gradient": "Found there as a gradient. With `DistributedDataParallel` in a rank that runs alone, a bucket in "
    "which it sends gradients is a gradient as well.",
    "optimizer state": "Found on an optimizer that ran, or that the test's fixtures lead to.",
    "input": "Allocated before the recording, and found on the batch, on the function passed to `measure`, or on a"
    " fixture's value.",
    "activation": "Made by Python code in forward, or in a part that is recomputed, and still alive when the innermost "
    "module that made it returned: passed on, saved for backward, or kept. Outside of all modules: still "
    "alive when backward begins its next node.",
    "temporary": "Made there and freed before, but after its operator returned; or allocated by a node of the autograd "
    "graph in backward; or allocated and freed in an optimizer's step.",
    "workspace": "Freed before the operator that allocated it, or the call of it, returned. Also the backend's own "
    "memory from earlier steps, without module and line.",
    "other": "Allocated before the recording without any of these; or made outside of modules without a backward "
    "after it; or made by an optimizer and kept.",
    "unattributed": "Bytes of the step that were never seen one by one, in one row.",
}
"""The uses of a block, and the rule of each."""

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
    """Raised if the composition of a measurement was not recorded. The message says how to record it."""


class CompositionError(ValueError):
    """A text that is not the row of a composition; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Row:
    """Memory blocks with the same category, module, line, operator, dtype and shape.

    In backward, module and line are those of the forward operator that made the node. Code that backward calls (a checkpointed
    part, the ``backward`` of a ``torch.autograd.Function``) has its own module and line.

    Example:
        ``Row("parameter", 65536, "blocks.*.0", "model.py:9", tensor="float32[64, 64]", count=4)``
    """

    category: str
    """The use of the blocks, such as ``activation``; see [the categories](#categories)."""
    nbytes: int
    """Bytes of all blocks together, as they were asked for."""
    module: str = ""
    """The path of the innermost module that made the blocks, with layer numbers folded: ``blocks.*.attn``. The model itself
    has the name of its class. If several models ran, the path begins with the class of a further model: ``Discriminator.fc``.
    Empty outside of modules.
    """
    site: str = ""
    """File and line of the innermost frame in your own code, from pytest's root directory: ``model.py:88``. Empty for none."""
    library: str = ""
    """Package with release, file and line of the library's frame beneath it:
    ``transformers 4.38.2: models/llama/modeling_llama.py:1074``. Empty if your code called torch itself."""
    operator: str = ""
    """The operator that allocated (``_softmax``), or the node of the autograd graph in backward (``MulBackward0``). It is
    ``autocast's cached cast`` for the copy of a weight that an operator such as ``linear`` makes at its first use."""
    tensor: str = ""
    """Dtype and shape: ``float32[8, 12, 1024, 1024]``. Empty if no tensor was seen in the blocks."""
    count: int = 1
    """The number of blocks."""
    layers: Layers = ()
    """The numbers of the layers that the row comes from, if layers differ: ``((0, 2),)``. There is one tuple for each ``*`` in
    ``module``; an empty tuple stands for all layers."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The lines that led to the line, innermost first, one tuple for each way:
    ``(("gpytorch 1.13: models/exact_gp.py:426", "train.py:9"),)``. There are at most 4 ways. Rows with different callers are
    equal, and baselines do not keep callers."""
    named: str = field(default="", compare=False)
    """The caller that is named before the line, for example because it has changed. Empty for none."""

    def __post_init__(self) -> None:
        if not self.layers:
            module, layers = apart(self.module)
            object.__setattr__(self, "module", module)
            object.__setattr__(self, "layers", layers)

    @property
    def path(self) -> str:
        """``module`` with ``layers``: ``blocks.{0,2}.attn``, or ``blocks.*.attn`` for all layers."""
        return named(self.module, self.layers)

    @property
    def dtype(self) -> str:
        """The dtype in ``tensor``: ``float32``. Empty if unknown."""
        return self.tensor.partition("[")[0]

    @property
    def shape(self) -> str:
        """The shape in ``tensor``: ``[8, 12, 1024, 1024]``. Empty if unknown."""
        return self.tensor[len(self.dtype) :]

    @property
    def where(self) -> str:
        """``named``, ``library`` and ``site`` in one text."""
        return line_of(self.site, self.library, self.named)

    @property
    def what(self) -> str:
        """``count`` and ``tensor`` in one text: ``24 x float32[8, 12, 1024, 1024]``."""
        return f"{self.count} x {self.tensor or 'block'}"

    def text(self) -> str:
        """Return the row as a line in the store.

        Its form is ``category | module | operator | line | library's line | count x dtype[shape] | bytes``.
        """
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
    """The bytes that are live at one moment, a frozen value. ``rows`` and ``rest`` add up to ``total`` exactly.

    A pattern of modules matches the folded path of a module, or of a module around it: ``blocks.*.attn`` includes
    ``blocks.*.attn.qkv``. ``*`` matches dots as well. The ``path`` of a row that names its layers may match, too.

    Memory that earlier steps left behind (a list of losses) counts as kept by this step. On CUDA, memory from before the
    recording is known only if the step or the test holds it.

    Example::

        def test_parameters(gpumem):
            composition = gpumem.train_step(GPT, batch, config="fp32", explain=True).composition
            assert composition.of("parameter") == 16_640 * 4
            assert composition.of("optimizer state", "blocks.*") > 2 * 16_640 * 4
            assert "float32" in composition.dtypes()
    """

    total: int
    """Bytes of all blocks."""
    rows: tuple[RowText, ...]
    """The rows, the largest first."""
    recomputed: Mapping[str, int] = field(default_factory=dict)
    """The number of calls that backward repeated, by the folded path of their module."""
    notes: tuple[str, ...] = ()
    """Clauses, for example if the recorded run had another peak than the measured run."""
    no_grad: Mapping[str, Calls] = field(default_factory=dict)
    """The calls with grad mode off (``no_grad``, ``inference_mode``), by module: ``(1, 1)`` is 1 of 1 call. For a function
    (``step()``) they are the torch functions that it calls itself."""
    no_backward: Mapping[str, Calls] = field(default_factory=dict)
    """The calls in forward with grad mode on that backward did not reach (``detach``, parameters without gradients), by
    module. Calls that neither made a part of the graph nor allocated are left out.
    """
    phase: str = ""
    """The phase of the moment: forward, backward or optimizer, also in code without phases. Empty if unknown."""

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
        """Bytes that are in no row: 0, unless only the largest rows were kept."""
        return self.total - sum(row.nbytes for row in self.rows)

    def of(self, category: str, module: str = "*") -> int:
        """Return the bytes of a category in the modules that match a pattern.

        Args:
            category: One of [the categories](#categories).
            module: A pattern: ``"blocks.*.attn"``.

        Raises:
            ValueError: The category is unknown.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category; {nearest(category, list(CATEGORIES))}")
        return sum(row.nbytes for row in self.rows if row.category == category and _within(row, module))

    def dtypes(self, module: str = "*", category: str | None = None) -> frozenset[str]:
        """Return the dtypes of the tensors in the modules that match a pattern: ``{"bfloat16", "float32"}``.

        Args:
            module: A pattern: ``"*.attn"``.
            category: One of [the categories](#categories); ``None`` for all.
        """
        return frozenset(
            row.dtype for row in self.rows if row.dtype and category in (None, row.category) and _within(row, module)
        )

    def kept(self) -> Composition:
        """Return the composition as a baseline keeps it: the largest rows, at most 100.

        The rows make up 95 % of all bytes, and 95 % of the bytes beside workspaces. The other rows are joined to one row for
        each category, with the operator ``smaller rows``. In ``no_grad`` and ``no_backward`` the modules that differ from the
        module around them are kept, with ``(all)`` for the sum.

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
    """An attribute, variable or autograd graph that keeps tensors alive, with the tensors.

    Example:
        ``Holder("Net.seen[...]", Composition(4096, (Row("activation", 4096, site="net.py:12"),)))``
    """

    path: str
    """``"Net.seen[...]"``, ``"the autograd graph of losses[...]"``; empty if no holder was found.

    ``"Net.seen[...] or Net.last"`` and ``"perhaps Net.seen[...]"`` name `alternatives`.
    """
    kept: Composition
    """The composition of the tensors."""
    first_use: bool = False
    """True for a cache: the measured run filled it, and the next run finds it full."""
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
    """The result of one recorded run of a step, a frozen value."""

    peak: Composition
    """The composition of the peak, as `Measurement.composition`. If memory ran out, that of the moment before."""
    retained: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of the memory that the step left behind, after garbage was collected."""
    garbage: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of the memory that only Python's cyclic collector freed."""
    cycles: tuple[str, ...] = ()
    """The types in the reference cycles that held the garbage, at most 5: ``"Trainer -> dict -> method -> Trainer"``."""
    asked: int | None = None
    """The bytes that were asked for when memory ran out; ``None`` if it did not."""
    over_time: OverTime | None = None
    """The step's bytes over time, if a report is written (``--gpumem-report``). ``None`` otherwise, and if a step is
    explained only to be accepted later.
    """
    holders: tuple[Holder, ...] = ()
    """The holders of the tensors in ``retained``, the most bytes first. Their rows add up to the rows of ``retained``."""
    holders_of_inputs: tuple[Holder, ...] = ()
    """The holders of inputs that each step frees and makes anew, such as ``self.last_output``. A failure names them under
    ``what grew`` with the line that makes the inputs, unless several lines make tensors of this size."""
    gpu: str | None = None
    """The GPU of the run, ``"cuda:1"``, if the process sees several."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict)
    """The composition at the peak of each other phase in which anything was allocated."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict)
    """Callers of each module and function (``step()``, ``Net.target()``) that was called with grad mode on, by folded path."""
    function_at: Mapping[str, str] = field(default_factory=dict)
    """The function of each line that ran with grad mode on, except lines in a module's ``forward``: ``step()``."""

    def kept(self) -> Explanation:
        """Return the explanation with the largest rows of each composition only, as `Composition.kept`.

        Other phases are kept if their peak is half of the step's or more, because the peak may move there. The composition of
        the peak keeps all calls of modules.
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
