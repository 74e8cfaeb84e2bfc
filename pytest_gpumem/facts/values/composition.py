"""A peak's composition: one row for each category, module, line, dtype and shape, with the live bytes.

All classes here are frozen dataclasses. Example: if the parameters from line 9 take 65,536 bytes at the peak, their row is
``Row("parameter", 65536, "blocks.*.0", "model.py:9")``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.base.errors import CompositionError
from pytest_gpumem.base.units import counted, format_bytes, nearest
from pytest_gpumem.facts.values.annotations import ADDED, Count, Form
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.layers import Layers, Numbers, kinds_of, numbers_in, split_layers, with_layers
from pytest_gpumem.facts.values.module_calls import Caller, Calls, outermost
from pytest_gpumem.facts.values.plain import FrozenValue
from pytest_gpumem.facts.values.source_lines import Chain, all_chains, chains_from_text, chains_to_text, line_of
from pytest_gpumem.facts.values.timeline import OverTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

KEPT_SHARE = 0.95
"""A baseline stores a peak's largest rows until they cover this share of the peak's bytes."""
MOST_KEPT = 100
"""A baseline stores at most this many rows. In a transformer, 30 rows cover 95 % of the peak. In a U-Net, 100 to 190 rows
cover 95 %, because its layers differ from each other."""
MOST_TIED = 50
"""A baseline stores at most this many rows in addition, if they have exactly as many bytes as the smallest stored row."""
REST = "smaller rows"
"""`Row.operator` in the row for the sum over all small rows in a category."""

_SEPARATOR = " | "
_DIGITS = re.compile(r"\d+")


NOT_EXPLAINED = "the measured code could not be run again to explain its peak"
"""Prefix of the note in a report if the step raised an exception when the plugin ran it once more to record its memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """Memory blocks with the same category, module, line, operator, dtype and shape.

    If an autograd node allocates memory in backward, its row names the module and line from which forward created the node. If
    backward calls Python code, for example in a recomputed checkpoint or a ``torch.autograd.Function``, the row names the
    module and line of this code.

    Example:
        ``Row("parameter", 65536, "blocks.*.0", "model.py:9", tensor="float32[64, 64]", count=4)``
    """

    category: str
    """The blocks' use, for example ``activation``. [The categories](#categories) lists all values."""
    nbytes: int
    """The requested bytes, summed over all blocks in this row."""
    module: str = ""
    """The innermost running module's path, with ``*`` for layer numbers: ``blocks.*.attn``. For the model itself, this is the
    name of the model's class. If a step runs several models, paths in all models after the first begin with the model's class:
    ``Discriminator.fc``. Empty for code outside modules."""
    site: str = ""
    """File and line for the innermost call in your own code, relative to pytest's root directory: ``model.py:88``. Empty if
    your code was not running."""
    library: str = ""
    """The innermost line in an installed package that ``site`` called. The text begins with the package's name and release:
    ``transformers 4.38.2: models/llama/modeling_llama.py:1074``. Empty if your code called torch directly."""
    operator: str = ""
    """The allocating operator (``_softmax``), or in backward the autograd node (``MulBackward0``). Under autocast, the first
    operator with a weight also casts the weight to a lower precision. The row for this cast has the operator ``autocast's
    cached cast``."""
    tensor: str = ""
    """The dtype and shape in each block: ``float32[8, 12, 1024, 1024]``. Empty if no recorded operator had a tensor in these
    blocks as an argument."""
    count: int = 1
    """The number of memory blocks in this row."""
    layers: Layers = ()
    """The layers in this row, as one tuple of numbers for each ``*`` in ``module``: ``((0, 2),)`` means the layers 0 and 2.
    ``()`` means all layers."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The lines from which the allocating line was called, one tuple for each call stack, with the innermost caller first:
    ``(("gpytorch 1.13: models/exact_gp.py:426", "train.py:9"),)``. A row lists at most 4 call stacks. A comparison of two rows
    ignores the callers, and baselines do not store callers."""
    named: str = field(default="", compare=False)
    """A caller for reports to show before the allocating line, for example because the caller's line was changed. Empty to
    show no caller."""

    def __post_init__(self) -> None:
        if not self.layers:
            module, layers = split_layers(self.module)
            object.__setattr__(self, "module", module)
            object.__setattr__(self, "layers", layers)

    @property
    def path(self) -> str:
        """The module path with layer numbers: ``blocks.{0,2}.attn`` for layers 0 and 2, ``blocks.*.attn`` for all layers."""
        return with_layers(self.module, self.layers)

    @property
    def dtype(self) -> str:
        """The dtype of the tensors in this row: ``float32``. Empty if unknown."""
        return self.tensor.partition("[")[0]

    @property
    def shape(self) -> str:
        """The shape of each tensor in this row: ``[8, 12, 1024, 1024]``. Empty if unknown."""
        return self.tensor[len(self.dtype) :]

    @property
    def where(self) -> str:
        """The allocating line as a report shows it: a text made from ``named``, ``library`` and ``site``."""
        return line_of(self.site, self.library, self.named)

    @property
    def what(self) -> str:
        """The blocks' number, dtype and shape: ``24 x float32[8, 12, 1024, 1024]``."""
        return f"{self.count} x {self.tensor or 'block'}"

    def text(self) -> str:
        """Return the row as a text. Baseline files contain these texts.

        The text has the form ``category | module | operator | line | library's line | count x dtype[shape] | bytes``.
        """
        parts = (self.category, self.path, self.operator, self.site, self.library, self.what, str(self.nbytes))
        return _SEPARATOR.join(part.replace("|", "/") for part in parts)


def text_with_callers(row: Row) -> str:
    """Return a row's text, and append the callers and the named caller if the row has them."""
    if not row.callers and not row.named:
        return row.text()
    more = (chains_to_text(row.callers), row.named)
    return _SEPARATOR.join([row.text(), *(part.replace("|", "/") for part in more)])


def row_from_text(text: str) -> Row:
    """Return the row from a text that `Row.text` or `text_with_callers` returned.

    Raises:
        CompositionError: The text is not a row.
    """
    parts = text.split(_SEPARATOR)
    if len(parts) not in (7, 9):
        raise CompositionError(
            f"{text!r} has {len(parts)} parts, expected 7: category | module | operator | line | library's line | "
            "count x dtype[shape] | bytes"
        )
    category, module, operator, site, library, tensors, nbytes = parts[:7]
    callers, named = parts[7:] or ("", "")
    if category not in CATEGORIES:
        raise CompositionError(f"{text!r}: {category!r} is no category; {nearest(category, list(CATEGORIES))}")
    count, times, tensor = tensors.partition(" x ")
    if not times or not count.isdecimal():
        raise CompositionError(f"{text!r}: {tensors!r} is no count of tensors, like '4 x float32[8, 64]'")
    # The bytes of an "unattributed" row are negative if the recorded blocks have more bytes than the step's peak. No other row
    # can be negative.
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
"""A row in JSON reports: a text with callers."""


@dataclass(frozen=True, slots=True, repr=False)
class Composition(FrozenValue):
    """The live memory at a moment in a step, as rows. The rows' bytes and ``rest`` add up to ``total`` exactly.

    Methods with a ``module`` argument select rows by a pattern for the module's path. A pattern also selects all modules
    inside a matching module, so ``blocks.*.attn`` includes ``blocks.*.attn.qkv``. ``*`` matches any text, including dots. If a
    row lists its layers, ``blocks.0`` also matches `Row.path`.

    Memory that earlier steps left behind, for example in a list of losses, is part of this step's composition. On CUDA, memory
    allocated before the recording appears only if the step or the test still refers to its tensors.

    Example::

        def test_parameters(gpumem):
            composition = gpumem.train_step(GPT, batch, config="fp32", explain=True).composition
            assert composition.of("parameter") == 16_640 * 4
            assert composition.of("optimizer state", "blocks.*") > 2 * 16_640 * 4
            assert "float32" in composition.dtypes()
    """

    total: int
    """The bytes in all live blocks together."""
    rows: tuple[RowText, ...]
    """The rows, sorted by bytes. The largest row comes first."""
    recomputed: Mapping[str, Count] = field(default_factory=dict)
    """For each module path (``blocks.*``), how many calls backward repeated because they were checkpointed."""
    notes: tuple[str, ...] = ()
    """Remarks, for example about a recorded run whose peak differs from the measured run."""
    no_grad: Mapping[str, Calls] = field(default_factory=dict)
    """For each module path, how many calls ran with grad mode off (``no_grad``, ``inference_mode``): ``(1, 2)`` means 1 of 2
    calls. For a function (``step()``), the numbers count the function's own calls to torch functions."""
    no_backward: Mapping[str, Calls] = field(default_factory=dict)
    """For each module path, how many forward calls with grad mode on backward did not reach, for example after ``detach``. A
    call is not counted if it added nothing to the autograd graph and allocated nothing."""
    phase: str = field(default="", metadata=ADDED)
    """The phase in which the live memory was recorded: forward, backward or optimizer. Empty if unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=_by_size)))
        self._freeze(
            **{name: dict(sorted(getattr(self, name).items())) for name in ("recomputed", "no_grad", "no_backward")}
        )

    def __repr__(self) -> str:
        # The text is short, because pytest prints it in every failed assertion about a composition.
        return f"<Composition: {format_bytes(self.total)} in {counted(len(self.rows), 'row')}>"

    @property
    def rest(self) -> int:
        """The bytes outside all rows. This is 0 if the composition has all its rows."""
        return self.total - sum(row.nbytes for row in self.rows)

    def of(self, category: str, module: str = "*") -> int:
        """Return the bytes in a category, summed over all modules whose path matches a pattern.

        Args:
            category: One of [the categories](#categories), for example ``"activation"``.
            module: A pattern for module paths: ``"blocks.*.attn"``.

        Raises:
            ValueError: The category is unknown.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category; {nearest(category, list(CATEGORIES))}")
        return sum(row.nbytes for row in self.rows if row.category == category and _is_within(row, module))

    def dtypes(self, module: str = "*", category: str | None = None) -> frozenset[str]:
        """Return the dtypes of all tensors in modules whose path matches a pattern: ``{"bfloat16", "float32"}``.

        Args:
            module: A pattern for module paths: ``"*.attn"``.
            category: One of [the categories](#categories), or ``None`` for all categories.
        """
        return frozenset(
            row.dtype for row in self.rows if row.dtype and category in (None, row.category) and _is_within(row, module)
        )

    def kept(self) -> Composition:
        """Return this composition as a baseline stores it: with the largest rows, and a sum for the smaller rows.

        The result has the largest rows, at most 100, until they cover 95 % of all bytes and 95 % of the bytes outside
        workspaces. All smaller rows in a category become a single row with the operator ``smaller rows``. `outermost` removes
        the redundant entries from ``no_grad`` and ``no_backward``.

        Rows with exactly as many bytes as the smallest stored row are stored too, if there are at most 50. Example: the rows
        for ``to_q``, ``to_k`` and ``to_v`` have equal bytes. If the baseline lacked ``to_v``, a later comparison would report
        ``to_v`` as new memory.
        """
        workspaces = sum(row.nbytes for row in self.rows if row.category == "workspace")
        # Negative rows are always stored. Without them, the stored rows could add up to more than the total.
        kept_rows = [row for row in self.rows if row.nbytes < 0]
        old_sums = [row for row in self.rows if row.nbytes >= 0 and row.operator == REST]
        rows = [row for row in self.rows if row.nbytes >= 0 and row.operator != REST]
        missing = self.total - sum(row.nbytes for row in kept_rows)
        missing_beside = missing - workspaces
        number = 0
        while number < len(rows) and len(kept_rows) + number < MOST_KEPT:
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
        kept_rows, unlisted = [*kept_rows, *rows[:number]], [*old_sums, *rows[number:]]
        sums = merge_rows(Row(row.category, row.nbytes, operator=REST, count=row.count) for row in unlisted)
        return replace(
            self, rows=(*kept_rows, *sums), no_grad=outermost(self.no_grad), no_backward=outermost(self.no_backward)
        )


def merge_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Add up rows if only their counts and bytes differ."""
    sums: dict[Row, tuple[int, int, dict[Chain, None]]] = {}
    for row in rows:
        key = replace(row, nbytes=0, count=0)
        nbytes, count, chains = sums.get(key, (0, 0, {}))
        sums[key] = nbytes + row.nbytes, count + row.count, chains | dict.fromkeys(row.callers)
    return tuple(
        replace(key, nbytes=nbytes, count=count, callers=all_chains(chains))
        for key, (nbytes, count, chains) in sums.items()
    )


def either_row(rows: Iterable[Row], nbytes: int, count: int) -> Row:
    """Return a single row for ``count`` blocks, if each of them may belong to any of ``rows``.

    The row names all lines and operators. It has no module, dtype or shape if these differ.

    Example:
        The rows are at ``serve.py:9`` and ``serve.py:12``, so the result has the line ``serve.py:12 or serve.py:9``.
    """
    rows = merge_rows(rows)

    def common(texts: Iterable[str], otherwise: str = "") -> str:
        different = set(texts)
        return different.pop() if len(different) == 1 else otherwise

    return Row(
        common((row.category for row in rows), "other"),
        nbytes,
        module=common(row.path for row in rows),
        site=" or ".join(sorted({row.where for row in rows if row.where})),
        operator=" or ".join(sorted({row.operator for row in rows if row.operator})),
        tensor=common(row.tensor for row in rows),
        count=count,
    )


def each_layer(row: Row) -> dict[Numbers, Row]:
    """Split a row over several layers, and return a row for each layer, by layer numbers.

    The result is empty if the row lists no layers, or if its bytes or blocks cannot be divided equally among the layers.
    """
    layers = numbers_in(row.layers) or set()
    if not layers or row.nbytes % len(layers) or row.count % len(layers):
        return {}
    layer_row = replace(row, nbytes=row.nbytes // len(layers), count=row.count // len(layers))
    return {numbers: replace(layer_row, layers=tuple((number,) for number in numbers)) for numbers in layers}


def join_layers(rows: Iterable[Row], all_layers: Mapping[str, Collection[Numbers]]) -> tuple[Row, ...]:
    """Join rows for single layers to as few rows as possible. The result has the same bytes in each layer.

    Example:
        ``_softmax`` has four rows: 8 MB each in the layers 0, 1 and 2, and 4 MB in layer 3. The result has two rows: 24 MB for
        ``h.{0-2}.attn``, and 4 MB for ``h.3.attn``.

    Args:
        rows: The rows to join.
        all_layers: All layer numbers in the model, by module path with ``*`` (``h.*.attn``).
    """
    layers_of: dict[Row, dict[Numbers, tuple[int, ...]]] = {}
    callers: dict[Row, dict[Chain, None]] = {}
    joined_rows = []
    for row in rows:
        layers_of_row = each_layer(row)
        key = replace(row, nbytes=0, count=0, layers=())
        for numbers, layer_row in layers_of_row.items():
            layers_of.setdefault(key, {})[numbers] = layer_row.nbytes, layer_row.count
        callers.setdefault(key, {}).update(dict.fromkeys(row.callers))
        joined_rows += [] if layers_of_row else [row]
    for key, amounts in layers_of.items():
        for layers, number, (nbytes, count) in kinds_of(amounts, all_layers.get(key.module, ())):
            chains = all_chains(callers[key])
            joined_rows.append(
                replace(key, nbytes=nbytes * number, count=count * number, layers=layers, callers=chains)
            )
    return merge_rows(joined_rows)


def item_bits(dtype: str) -> int:
    """Return the size in bits of an element: 32 for ``float32``, 8 for ``bool`` and ``float8_e5m2``, 0 if unknown."""
    digits = _DIGITS.search(dtype)
    return 8 if dtype == "bool" else int(digits.group()) if digits else 0


def _by_size(row: Row) -> tuple[int, str]:
    return -row.nbytes, row.text()


def _is_within(row: Row, pattern: str) -> bool:
    """Return whether a pattern matches the path to a row's module, or to a module around it."""
    paths = [path.split(".") for path in {row.module, row.path}]
    return any(
        fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for parts in paths for count in range(1, len(parts) + 1)
    )


KEPT_IN = "kept in"
HOLDER_NOT_FOUND = "holder not found"
MOST_ALTERNATIVES = 3
"""If several holders are possible, a holder's text names at most this many paths."""
FIRST_USE = "filled by the first use"
"""Prefix of a report's text about a cache. The step's first run fills the cache, and further runs leave it unchanged."""


@dataclass(frozen=True, slots=True)
class Holder(FrozenValue):
    """An attribute, variable or autograd graph that keeps tensors alive after the step, with these tensors' composition.

    Example:
        ``Holder("Net.seen[...]", Composition(4096, (Row("activation", 4096, site="net.py:12"),)))``
    """

    path: str
    """The holder's name: ``"Net.seen[...]"`` or ``"the autograd graph of losses[...]"``. Empty if no holder was found.

    If several holders are possible, the text names them: ``"Net.seen[...] or Net.last"``. In ``"perhaps Net.seen[...]"``, the
    real holder may also be another object, which was not found."""
    kept: Composition
    """The composition of the tensors kept alive by this holder."""
    first_use: bool = False
    """True if the holder is a cache: the measured run filled the cache, and the next run added nothing to it."""
    alternatives: tuple[str, ...] = ()
    """All possible holders' names, if it is not known which holder keeps the tensors. Empty if the holder is known.

    An empty name in this list stands for a holder that was not found."""

    @property
    def text(self) -> str:
        """The holder's text in reports: ``"kept in: Net.seen[...]"``."""
        if not self.path:
            return HOLDER_NOT_FOUND
        return f"{FIRST_USE if self.first_use else KEPT_IN}: {self.path}"


def holder_at(paths: Iterable[str], composition: Composition) -> Holder:
    """Return a holder with a name. If several names are possible, the holder's ``path`` joins them with "or".

    Example:
        ``holder_at(["Net.seen[...]", "Net.last"], composition)`` has the path ``"Net.last or Net.seen[...]"``.
    """
    alternatives = tuple(sorted(set(paths)))
    if len(alternatives) < 2:
        return Holder("".join(alternatives), composition)
    named = [path for path in alternatives if path]
    more = len(named) - MOST_ALTERNATIVES
    text = " or ".join([*named[:MOST_ALTERNATIVES], *([counted(more, "other")] if more > 0 else [])])
    return Holder(
        text if len(named) == len(alternatives) else f"perhaps {text}", composition, alternatives=alternatives
    )


def sort_holders(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Sort holders by the bytes in the tensors that they keep alive. The holder with the most bytes comes first."""
    return tuple(sorted(holders, key=lambda holder: (-holder.kept.total, holder.path)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The compositions from a further run of the step. In this run, the plugin records every allocation with its line."""

    peak: Composition
    """The composition at the step's peak, available to tests as `Measurement.composition`. If memory ran out, the composition
    just before the failed allocation."""
    retained: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of all memory still allocated after the step and a garbage collection."""
    garbage: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of all memory freed only by Python's cyclic collector, because the tensors were in reference cycles."""
    cycles: tuple[str, ...] = ()
    """At most 5 reference cycles that kept tensors alive, each as its objects' types: ``"Trainer -> dict -> method ->
    Trainer"``."""
    asked: Count | None = None
    """The failed allocation's size in bytes. ``None`` if memory did not run out."""
    over_time: OverTime | None = None
    """The step's live bytes over time. ``None`` if the session writes no report (``--gpumem-report``), or if the step was
    recorded only for a later `gpumem accept`."""
    holders: tuple[Holder, ...] = ()
    """The holders that keep the memory in ``retained`` alive, sorted by bytes. Their rows together are the rows in
    ``retained``."""
    holders_of_inputs: tuple[Holder, ...] = ()
    """The holders whose tensor each step replaces by a new tensor, for example ``self.last_output``. If such a tensor grew,
    the failed test's message lists the holder under ``what grew``, with the line that makes the tensor. If several lines make
    tensors with this size, the message does not name a line."""
    gpu: str | None = field(default=None, metadata=ADDED)
    """The GPU whose memory was recorded: ``"cuda:1"``. ``None`` if the process sees only one GPU."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict, metadata=ADDED)
    """For every other phase with allocations, the composition at the phase's own peak."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict, metadata=ADDED)
    """For each module or function (``step()``, ``Net.target()``), the callers with grad mode on."""
    function_at: Mapping[str, str] = field(default_factory=dict, metadata=ADDED)
    """For each line outside a module's ``forward`` that ran with grad mode on, the function around the line: ``step()``."""

    def kept(self) -> Explanation:
        """Return this explanation with only the largest rows in each composition (`Composition.kept`).

        The result has a composition for another phase only if the phase's peak is at least half the step's peak, because the
        step's peak may move to this phase later. The peak's composition keeps all entries in ``no_grad`` and ``no_backward``.
        """
        near = {
            phase: composition.kept()
            for phase, composition in self.other_phases.items()
            if 2 * composition.total >= self.peak.total
        }
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
    """Return a composition whose rows have no callers."""
    return replace(composition, rows=tuple(replace(row, callers=()) for row in composition.rows))


def explanation_without_callers(explanation: Explanation) -> Explanation:
    """Return an explanation in which no row has callers."""

    def without(holders: Iterable[Holder]) -> tuple[Holder, ...]:
        return tuple(replace(holder, kept=without_callers(holder.kept)) for holder in holders)

    return replace(
        explanation,
        peak=without_callers(explanation.peak),
        retained=without_callers(explanation.retained),
        garbage=without_callers(explanation.garbage),
        holders=without(explanation.holders),
        holders_of_inputs=without(explanation.holders_of_inputs),
        other_phases={phase: without_callers(composition) for phase, composition in explanation.other_phases.items()},
    )
