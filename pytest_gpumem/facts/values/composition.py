"""The composition of a peak: its live bytes in rows by category, module, line, dtype and shape. Frozen values."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.base.units import counted, format_bytes, nearest
from pytest_gpumem.facts.values.layers import Layers, Numbers, kinds_of, numbers_in, split_layers, with_layers
from pytest_gpumem.facts.values.module_calls import Caller, Calls, outermost
from pytest_gpumem.facts.values.plain import Form, FrozenValue
from pytest_gpumem.facts.values.source_lines import Chain, all_chains, chains_from_text, chains_to_text, line_of
from pytest_gpumem.facts.values.timeline import OverTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

CATEGORIES = {
    "parameter": "A module that ran, a fixture or the function passed to `measure` refers to the block as a "
    "parameter. Example: the weights of `blocks.*.mlp.0` in a GPT with four blocks, 4 x float32[512, 128], 1.05 MB.",
    "buffer": "One of these objects refers to the block as a buffer. Example: `running_mean` in `BatchNorm2d(64)`, "
    "float32[64], 256 B.",
    "gradient": "A parameter refers to the block as its gradient, or `DistributedDataParallel` sends gradients in it "
    "and the rank runs alone. Example: the gradients of `blocks.*.mlp.0`, 4 x float32[512, 128], 1.05 MB.",
    "optimizer state": "An optimizer that ran, or in a fixture's value, keeps the block for its parameters. "
    "Example: AdamW's two averages for `blocks.*.mlp.0`, 8 x float32[512, 128], 2.10 MB.",
    "input": "The block was allocated before the recording, and the batch, the function passed to `measure` or a "
    "fixture's value refers to the block. Example: a batch of token ids, int64[8, 256], 16.38 kB.",
    "activation": "Python code in forward or in a recomputed part allocated the block, and it was still alive when the "
    "innermost module returned (outside modules: when backward began its next node). Example: outputs of `addmm` that four "
    "blocks save for backward, 4 x float32[2048, 512], 16.78 MB.",
    "temporary": "The block was allocated like an activation and freed earlier, but after its operator returned. Or an "
    "autograd node allocated it in backward. Or an optimizer allocated and freed it in its step. Example: logits "
    "that `flatten` copies in the loss, float32[8, 255, 256], 2.09 MB.",
    "workspace": "The block was freed before the allocating operator, or the call of this operator, returned. Memory that"
    " the backend keeps from earlier steps is a workspace without module and line. Example: cuBLAS on an H100, 33.55 MB "
    "for each thread.",
    "other": "No rule above holds: the block was allocated before the recording, or outside modules without a backward,"
    " or an optimizer keeps it. Example: `torch.zeros(1024)` between two modules in a test without backward, 4.10 kB.",
    "unattributed": "The step's bytes without a recorded block are one row. Example: a step has 40 MB, and "
    "its recorded blocks have 38 MB, so 2 MB are unattributed.",
}
"""The categories for a block, each with its rule and an example.

The first matching rule decides. The examples with four blocks come from `example_project/tiny_models/gpt.py`."""

KEPT_SHARE = 0.95
"""The peak's share that a baseline's rows cover."""
MOST_KEPT = 100
"""The most rows in a baseline. In a transformer, 30 rows cover 95 %. In a U-Net, 100 to 190 rows cover 95 %, because its
blocks differ."""
MOST_TIED = 50
"""The most additional rows in a baseline. Such a row has the same size as the last row within the limit."""
REST = "smaller rows"
"""The operator in a row for the sum over all unlisted rows in a category."""

_SEPARATOR = " | "
_DIGITS = re.compile(r"\d+")


NOT_EXPLAINED = "it could not be run again to tell what its peak is made of"
"""Prefix of a note if the step raised an exception when it ran once more for the explanation."""


class MissingComposition(AttributeError):
    """Raised if a measurement's composition was not recorded. The message says how to record one."""


class CompositionError(ValueError):
    """The text is not a row. The message has the expected form."""


@dataclass(frozen=True, slots=True)
class Row:
    """Memory blocks with the same category, module, line, operator, dtype and shape.

    A row in backward has the module and line from the forward operator that made the autograd node. Code that backward calls (a
    checkpointed part, or the ``backward`` method in a ``torch.autograd.Function``) has its own module and line.

    Example:
        ``Row("parameter", 65536, "blocks.*.0", "model.py:9", tensor="float32[64, 64]", count=4)``
    """

    category: str
    """The blocks' use, such as ``activation``; see [the categories](#categories)."""
    nbytes: int
    """Requested bytes in all blocks together."""
    module: str = ""
    """The innermost module's path, with layer numbers folded: ``blocks.*.attn``. The model itself
    has the name of its class. If several models ran, the path in a further model begins with its class:
    ``Discriminator.fc``. Empty outside modules."""
    site: str = ""
    """File and line for the innermost frame in your own code, relative to pytest's root directory: ``model.py:88``. Empty
    without a frame in your own code."""
    library: str = ""
    """The library's line below ``site``, with its package and release:
    ``transformers 4.38.2: models/llama/modeling_llama.py:1074``. Empty if your code called torch itself."""
    operator: str = ""
    """The operator that allocated (``_softmax``), or in backward the autograd node (``MulBackward0``). Under
    autocast, an operator such as ``linear`` copies a weight at the weight's first use. This copy has the operator
    ``autocast's cached cast``."""
    tensor: str = ""
    """Dtype and shape: ``float32[8, 12, 1024, 1024]``. Empty if no tensor was seen in the blocks."""
    count: int = 1
    """The number of blocks."""
    layers: Layers = ()
    """The row's layer numbers, if layers differ: ``((0, 2),)``, with one inner tuple for each ``*`` in ``module``.
    ``()`` stands for all layers."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The callers of the row's line, innermost first, with a tuple for each chain of callers:
    ``(("gpytorch 1.13: models/exact_gp.py:426", "train.py:9"),)``. There are at most 4 chains. Rows that differ only in their
    callers are equal, and baselines do not keep callers."""
    named: str = field(default="", compare=False)
    """A caller shown before the line, for example a changed caller. Empty without such a caller."""

    def __post_init__(self) -> None:
        if not self.layers:
            module, layers = split_layers(self.module)
            object.__setattr__(self, "module", module)
            object.__setattr__(self, "layers", layers)

    @property
    def path(self) -> str:
        """``module`` with ``layers``: ``blocks.{0,2}.attn``, or ``blocks.*.attn`` for all layers."""
        return with_layers(self.module, self.layers)

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
    """Return a row's text, followed by the callers and the named caller if there are any."""
    if not row.callers and not row.named:
        return row.text()
    more = (chains_to_text(row.callers), row.named)
    return _SEPARATOR.join([row.text(), *(part.replace("|", "/") for part in more)])


def row_from_text(text: str) -> Row:
    """Return the row that `Row.text` or `text_with_callers` wrote.

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
    # Unattributed bytes are negative if the recorded blocks have more bytes than the step. No other row can be negative.
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
"""A row in its text form, with callers."""


@dataclass(frozen=True, slots=True, repr=False)
class Composition(FrozenValue):
    """The live bytes at a moment, a frozen value. ``rows`` and ``rest`` add up to ``total`` exactly.

    A pattern matches a module's folded path, or the path to a module around it: ``blocks.*.attn`` includes
    ``blocks.*.attn.qkv``. ``*`` also matches dots. If a row names its layers, the pattern may also match its ``path``.

    Memory that earlier steps left behind (a list of losses) counts as kept by this step. On CUDA, memory from before the
    recording is known only if the step or the test refers to the memory.

    Example::

        def test_parameters(gpumem):
            composition = gpumem.train_step(GPT, batch, config="fp32", explain=True).composition
            assert composition.of("parameter") == 16_640 * 4
            assert composition.of("optimizer state", "blocks.*") > 2 * 16_640 * 4
            assert "float32" in composition.dtypes()
    """

    total: int
    """Bytes in all blocks."""
    rows: tuple[RowText, ...]
    """The rows, the largest first."""
    recomputed: Mapping[str, int] = field(default_factory=dict)
    """The number of calls that backward repeated, by the module's folded path."""
    notes: tuple[str, ...] = ()
    """Clauses, for example if the recorded run had another peak than the measured run."""
    no_grad: Mapping[str, Calls] = field(default_factory=dict)
    """The calls with grad mode off (``no_grad``, ``inference_mode``), by module: ``(1, 1)`` is 1 of 1 call. For a function
    (``step()``), the numbers count its own calls to torch functions."""
    no_backward: Mapping[str, Calls] = field(default_factory=dict)
    """The calls in forward with grad mode on that backward did not reach (``detach``, parameters without gradients), by
    module. Calls without a part in the graph and without allocations are left out.
    """
    phase: str = ""
    """The phase of the moment: forward, backward or optimizer, also in code without phases. Empty if unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=_by_size)))
        self._freeze(
            **{name: dict(sorted(getattr(self, name).items())) for name in ("recomputed", "no_grad", "no_backward")}
        )

    def __repr__(self) -> str:
        # Short, because every failed assertion about a composition shows it.
        return f"<Composition: {format_bytes(self.total)} in {counted(len(self.rows), 'row')}>"

    @property
    def rest(self) -> int:
        """The bytes in no row. The result is 0 unless only the largest rows were kept."""
        return self.total - sum(row.nbytes for row in self.rows)

    def of(self, category: str, module: str = "*") -> int:
        """Return a category's bytes in modules with a matching path.

        Args:
            category: One of [the categories](#categories).
            module: A pattern: ``"blocks.*.attn"``.

        Raises:
            ValueError: The category is unknown.
        """
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no category; {nearest(category, list(CATEGORIES))}")
        return sum(row.nbytes for row in self.rows if row.category == category and _is_within(row, module))

    def dtypes(self, module: str = "*", category: str | None = None) -> frozenset[str]:
        """Return the tensors' dtypes in modules with a matching path: ``{"bfloat16", "float32"}``.

        Args:
            module: A pattern: ``"*.attn"``.
            category: One of [the categories](#categories); ``None`` for all.
        """
        return frozenset(
            row.dtype for row in self.rows if row.dtype and category in (None, row.category) and _is_within(row, module)
        )

    def kept(self) -> Composition:
        """Return the composition in the form that a baseline keeps, with at most 100 rows.

        The largest rows are kept until they cover 95 % of all bytes, and 95 % of the bytes without workspaces. The other
        rows are joined to one row for each category, with the operator ``smaller rows``. ``no_grad`` and ``no_backward`` keep
        the sum over all modules as ``(all)``, and only modules that differ from the module around them.

        If at most 50 further rows have the same size as the last row, they are kept as well. Example: ``to_q``, ``to_k`` and
        ``to_v`` have equal sizes. If the baseline lacked ``to_v``, nobody could tell ``to_v`` from a new row with this size.
        Of more than 50 equal rows, only some are kept.
        """
        workspaces = sum(row.nbytes for row in self.rows if row.category == "workspace")
        # Negative rows must stay, because otherwise the kept rows could add up to more than the total.
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
    """Add up rows that differ only in count and bytes."""
    sums: dict[Row, tuple[int, int, dict[Chain, None]]] = {}
    for row in rows:
        key = replace(row, nbytes=0, count=0)
        nbytes, count, chains = sums.get(key, (0, 0, {}))
        sums[key] = nbytes + row.nbytes, count + row.count, chains | dict.fromkeys(row.callers)
    return tuple(
        replace(key, nbytes=nbytes, count=count, callers=all_chains(chains))
        for key, (nbytes, count, chains) in sums.items()
    )


def each_layer(row: Row) -> dict[Numbers, Row]:
    """Return a row for each layer in ``row.layers``, by its numbers; empty without layers, or if the row has no equal parts."""
    layers = numbers_in(row.layers) or set()
    if not layers or row.nbytes % len(layers) or row.count % len(layers):
        return {}
    layer_row = replace(row, nbytes=row.nbytes // len(layers), count=row.count // len(layers))
    return {numbers: replace(layer_row, layers=tuple((number,) for number in numbers)) for numbers in layers}


def join_layers(rows: Iterable[Row], all_layers: Mapping[str, Collection[Numbers]]) -> tuple[Row, ...]:
    """Join rows with single layers to as few rows as possible.

    Example:
        ``_softmax`` has three rows with 8 MB each in the layers 0, 1 and 2, and a row with 4 MB in layer 3. The result is a row
        with 24 MB for ``h.{0-2}.attn`` and a row with 4 MB for ``h.3.attn``.

    Args:
        rows: The rows.
        all_layers: All layers of each module, by folded path.
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
    """Return the bits in an element: 32 for ``float32``, 8 for ``bool`` and ``float8_e5m2``, and 0 for an unknown dtype."""
    digits = _DIGITS.search(dtype)
    return 8 if dtype == "bool" else int(digits.group()) if digits else 0


def _by_size(row: Row) -> tuple[int, str]:
    return -row.nbytes, row.text()


def _is_within(row: Row, pattern: str) -> bool:
    """Return whether the pattern matches a row's module, or a module around it."""
    paths = [path.split(".") for path in {row.module, row.path}]
    return any(
        fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for parts in paths for count in range(1, len(parts) + 1)
    )


KEPT_IN = "kept in"
HOLDER_NOT_FOUND = "holder not found"
MOST_ALTERNATIVES = 3
"""The most alternatives that a holder's path names."""
FIRST_USE = "filled by the first use"
"""The text before a holder that is a cache: the measured run filled the cache, and the next run added nothing."""


@dataclass(frozen=True, slots=True)
class Holder(FrozenValue):
    """An attribute, variable or autograd graph that keeps tensors alive, with these tensors.

    Example:
        ``Holder("Net.seen[...]", Composition(4096, (Row("activation", 4096, site="net.py:12"),)))``
    """

    path: str
    """``"Net.seen[...]"``, ``"the autograd graph of losses[...]"``; empty if no holder was found.

    ``"Net.seen[...] or Net.last"`` and ``"perhaps Net.seen[...]"`` name `alternatives`.
    """
    kept: Composition
    """The tensors' composition."""
    first_use: bool = False
    """True for a cache: the measured run filled the cache, and the next run added nothing."""
    alternatives: tuple[str, ...] = ()
    """The paths to several possible holders, if nothing proves which holder keeps the tensors; otherwise empty.

    An empty path stands for a holder that was not found.
    """

    @property
    def text(self) -> str:
        """The text in every report: ``"kept in: Net.seen[...]"``."""
        if not self.path:
            return HOLDER_NOT_FOUND
        return f"{FIRST_USE if self.first_use else KEPT_IN}: {self.path}"


def holder_at(paths: Iterable[str], composition: Composition) -> Holder:
    """Return the holder at a path, or a holder with alternatives if there are several paths.

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
    """Return holders sorted by their kept bytes, the largest first."""
    return tuple(sorted(holders, key=lambda holder: (-holder.kept.total, holder.path)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result from a step's recorded run, a frozen value."""

    peak: Composition
    """The peak's composition, as `Measurement.composition`. If memory ran out, the composition just before that moment."""
    retained: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of the memory left behind by the step, after garbage collection."""
    garbage: Composition = field(default_factory=lambda: Composition(0, ()))
    """The composition of the memory freed only by Python's cyclic collector."""
    cycles: tuple[str, ...] = ()
    """The types in the reference cycles that held the garbage, at most 5: ``"Trainer -> dict -> method -> Trainer"``."""
    asked: int | None = None
    """The bytes that were requested when memory ran out; ``None`` if memory did not run out."""
    over_time: OverTime | None = None
    """The step's bytes over time, if a report is written (``--gpumem-report``); otherwise ``None``.

    If a step is explained only because it may be accepted later, the value is also ``None``.
    """
    holders: tuple[Holder, ...] = ()
    """The holders for the tensors in ``retained``, the most bytes first. All their rows add up to ``retained``."""
    holders_of_inputs: tuple[Holder, ...] = ()
    """The holders of replaced inputs, such as ``self.last_output``: each step frees such an input and makes a new one. A
    failure lists the holders and the line that makes the inputs under ``what grew``. If several lines make tensors with this
    size, the line is left out."""
    gpu: str | None = None
    """The run's GPU, ``"cuda:1"``, if the process sees several GPUs."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict)
    """The compositions at the peaks of all other phases with allocations."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict)
    """The callers with grad mode on, by the folded path of the called module or function (``step()``, ``Net.target()``)."""
    function_at: Mapping[str, str] = field(default_factory=dict)
    """The function around each line with grad mode on, except lines in a module's ``forward``: ``step()``."""

    def kept(self) -> Explanation:
        """Return the explanation with only the largest rows in each composition, as `Composition.kept`.

        Another phase is kept if its peak is at least half the step's peak, because the peak may move there. The peak's
        composition keeps all module calls.
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
    """Return a composition without callers in its rows."""
    return replace(composition, rows=tuple(replace(row, callers=()) for row in composition.rows))


def explanation_without_callers(explanation: Explanation) -> Explanation:
    """Return an explanation without callers in its rows."""

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
