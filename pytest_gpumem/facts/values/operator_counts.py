"""Counts of operator calls by calling line and module, and the texts with which baselines store these counts.

A `Tally` has a count, and its `OperatorSite` ("place") has the calling line and module. Example: if line 58 called ``addmm`` 8
times in the modules ``blocks.*.mlp.0``, the text is ``blocks.*.mlp.0 | gpt.py:58 | | 8 addmm``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.base.units import format_count
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.annotations import Form
from pytest_gpumem.facts.values.layers import folded, kinds_of, numbers_in, split_layers, with_layers
from pytest_gpumem.facts.values.source_lines import Chain, all_chains, chains_from_text, chains_to_text, line_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_gpumem.facts.values.layers import Numbers

MADE_OF_OPERATORS = tuple(name for name, metric in METRICS.items() if metric.is_counted_by_operator)
"""The metrics whose value is a sum over operators, for example ``flops``."""
MOST_PLACES = 150
"""A baseline stores at most this many lines with modules for each metric. For calls from all other lines, a baseline stores
only the operators and their counts. A Llama trained with DoRA calls operators with FLOPs from 38 lines, and all operators from
116."""

_SEPARATOR = " | "


@dataclass(frozen=True, slots=True)
class OperatorSite:
    """The line and module from which an operator was called.

    For an autograd node's operator in backward, these are the line and module from which forward created the node. All fields
    are empty if the line is unknown.
    """

    module: str = ""
    """The innermost running module's path, with a layer number (``blocks.3.attn``), or with ``*`` for all layers."""
    site: str = ""
    """File and line for the innermost call in your own code: ``gpt.py:58``."""
    library: str = ""
    """The innermost line in an installed package called by ``site``, with the package's name and release. Empty if your code
    called torch directly."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The call stacks from which the line was called, in the same form as `Row.callers`."""
    named: str = field(default="", compare=False)
    """A caller for reports to show before the line, for example because the caller's line was changed. Empty to show no
    caller."""
    reason: str = field(default="", compare=False)
    """The reason for which a report lists this line first: ``"changed line"``. Empty without a reason."""

    @property
    def where(self) -> str:
        """The calling line as a report shows it: a text made from ``site``, ``library`` and ``named``."""
        return line_of(self.site, self.library, self.named)


NOWHERE = OperatorSite()


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of calls to an operator from a line in a module.

    Example:
        ``Tally("addmm", 8, OperatorSite("blocks.*.mlp.0", "gpt.py:58"))`` means 8 calls to ``addmm`` from line 58.
    """

    operator: str
    """The operator's name: ``addmm`` for an ATen operator, ``library::name`` for other operators. For the metrics ``syncs``
    and ``launches``, this may also be a function's or kernel's name."""
    amount: int
    """The number of calls, FLOPs, syncs or launches, depending on the metric."""
    place: OperatorSite = NOWHERE
    """The calling line and module. All fields in it are empty if lines were not recorded."""


def sum_tallies(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Add up all tallies with the same operator, line and module, remove sums equal to 0, and sort by line."""
    amounts: dict[tuple[OperatorSite, str], int] = {}
    callers: dict[OperatorSite, dict[Chain, None]] = {}
    for tally in tallies:
        key = tally.place, tally.operator
        amounts[key] = amounts.get(key, 0) + tally.amount
        callers.setdefault(tally.place, {}).update(dict.fromkeys(tally.place.callers))
    nonzero = [
        Tally(operator, amount, replace(place, callers=all_chains(callers[place])) if callers[place] else place)
        for (place, operator), amount in amounts.items()
        if amount
    ]
    return tuple(sorted(nonzero, key=lambda tally: (*_order(tally.place), tally.operator)))


MOST_KINDS = 3
"""If an operator's counts at a line have more than this many different values among layers, `of_layers` adds up the layers."""


def of_layers(tallies: Iterable[Tally], all_layers: Mapping[str, Collection[Numbers]]) -> tuple[Tally, ...]:
    """Join tallies for single layers to as few tallies as possible.

    Example: 4 calls each in the layers 0, 1 and 2 become a single tally with 12 calls for ``h.{0-2}``.

    Args:
        tallies: The tallies to join.
        all_layers: All layer numbers in the model, by module path with ``*`` (``blocks.*``).
    """
    layers_by_kind: dict[Tally, dict[Numbers, tuple[int, ...]]] = {}
    joined = []
    for tally in tallies:
        numbers = layer_of(tally.place)
        if numbers is None:
            joined.append(tally)
        else:
            layers_by_kind.setdefault(replace(tally, amount=0, place=of_any_layer(tally.place)), {})[numbers] = (
                tally.amount,
            )
    unknown = {(tally.operator, tally.place) for tally in joined}
    for key, amounts in layers_by_kind.items():
        kinds = kinds_of(amounts, all_layers.get(key.place.module, ()))
        if len(kinds) > MOST_KINDS or (key.operator, key.place) in unknown:
            kinds = [((), 1, (sum(amount for (amount,) in amounts.values()),))]
        joined += [
            Tally(key.operator, amount * number, replace(key.place, module=with_layers(key.place.module, layers)))
            for layers, number, (amount,) in kinds
        ]
    return sum_tallies(joined)


def each_layer(tally: Tally) -> list[Tally]:
    """Split a tally over several layers, and return a tally for each layer.

    A tally is returned unchanged if it lists no layers, or if its amount cannot be divided equally among its layers.
    """
    return in_layers(tally, numbers_in(split_layers(tally.place.module)[1]) or ())


def in_layers(tally: Tally, layers: Collection[Numbers]) -> list[Tally]:
    """Divide a tally equally among ``layers``. If the amount cannot be divided equally, return the tally unchanged."""
    if not layers or tally.amount % len(layers):
        return [tally]
    path = folded(tally.place.module)
    modules = (with_layers(path, tuple((number,) for number in numbers)) for numbers in sorted(layers))
    return [
        Tally(tally.operator, tally.amount // len(layers), replace(tally.place, module=module)) for module in modules
    ]


def layer_of(place: OperatorSite) -> Numbers | None:
    """Return the layer numbers in the module's path: ``(3,)`` for ``blocks.3.attn``.

    The result is ``None`` if the path names no layer (``blocks.*``) or several layers (``blocks.{0-2}``).
    """
    layers = numbers_in(split_layers(place.module)[1]) or set()
    return next(iter(layers)) if len(layers) == 1 else None


def of_any_layer(place: OperatorSite) -> OperatorSite:
    """Replace layer numbers in the module's path by ``*``."""
    return replace(place, module=folded(place.module))


def reduced_tallies(tallies: Sequence[Tally], most: int = MOST_PLACES) -> tuple[Tally, ...]:
    """Return tallies as a baseline stores them: with line and module only for the ``most`` lines with the largest amounts.

    All other tallies are added up by operator.
    """
    if len({tally.place for tally in tallies} - {NOWHERE}) > most:
        # Fold layer numbers first. This joins places and saves lines, which a reader needs more than layers.
        tallies = sum_tallies(replace(tally, place=of_any_layer(tally.place)) for tally in tallies)
    amounts: dict[OperatorSite, int] = {}
    for tally in tallies:
        amounts[tally.place] = amounts.get(tally.place, 0) + abs(tally.amount)
    places = sorted(amounts.keys() - {NOWHERE}, key=lambda place: (-amounts[place], _order(place)))
    kept_places = {*places[:most], NOWHERE}
    return sum_tallies(tally if tally.place in kept_places else replace(tally, place=NOWHERE) for tally in tallies)


def without_places(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Add up tallies by operator, without lines and modules."""
    return sum_tallies(replace(tally, place=NOWHERE) for tally in tallies)


def tallies_without_callers(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Return tallies in which no line has callers."""
    return tuple(
        replace(tally, place=replace(tally.place, callers=())) if tally.place.callers else tally for tally in tallies
    )


def total(tallies: Iterable[Tally]) -> int:
    """Return the sum over all amounts, which is the metric's value."""
    return sum(tally.amount for tally in tallies)


def varied_clause(metric: str, lowest: int, highest: int) -> str:
    """Return a text about a varying count: ``"Operators between 250 and 254 from step to step"``."""
    return f"{METRICS[metric].title} between {format_count(lowest)} and {format_count(highest)} from step to step"


def to_texts(tallies: Iterable[Tally], *, with_callers: bool = False) -> list[str]:
    """Return tallies as texts: ``module | line | library's line | 4 addmm, 8 mm``. `from_texts` converts them back.

    All operators called from the same line are in a single text. A tally without a line has its own text.

    Args:
        tallies: The tallies to write.
        with_callers: Whether to append a line's callers, named caller and reason, if the line has them.
    """
    texts = []
    for place, group in groupby(sum_tallies(tallies), key=lambda tally: tally.place):
        parts = [f"{tally.amount} {_plain(tally.operator).replace(',', ';')}" for tally in group]
        more: tuple[str, ...] = ()
        if with_callers and (place.callers or place.named or place.reason):
            more = chains_to_text(place.callers), place.named, place.reason
        for amounts in parts if place == NOWHERE else [", ".join(parts)]:
            texts.append(
                _SEPARATOR.join([*map(_plain, (place.module, place.site, place.library)), amounts, *map(_plain, more)])
            )
    return texts


def from_texts(texts: Iterable[str]) -> tuple[Tally, ...]:
    """Convert texts from `to_texts` back to tallies.

    Raises:
        ValueError: A text does not have the form ``module | line | library's line | 4 addmm, 8 mm``.
    """
    return sum_tallies(tally for text in texts for tally in _from_text(text))


Tallies = Annotated[tuple[Tally, ...], Form(tuple[str, ...], partial(to_texts, with_callers=True), from_texts)]
"""Tallies in JSON reports: the texts from `to_texts`."""
KeptTallies = Annotated[
    tuple[Tally, ...],
    Form(tuple[str, ...], lambda tallies: to_texts(reduced_tallies(tallies), with_callers=True), from_texts),
]
"""Tallies in JSON reports, after `reduced_tallies` has removed the lines with small amounts."""


def _from_text(text: str) -> Iterable[Tally]:
    parts = text.split(_SEPARATOR)
    if len(parts) not in (4, 7):
        raise ValueError(
            f"{text!r} has {len(parts)} parts, expected 4: module | line | library's line | 4 operator, 8 operator"
        )
    callers, named, reason = parts[4:] or ("", "", "")
    place = OperatorSite(parts[0], parts[1], parts[2], chains_from_text(callers), named, reason)
    for part in parts[3].split(", "):
        amount, space, operator = part.partition(" ")
        digits = amount.removeprefix("-")
        if not space or not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
            raise ValueError(f"{text!r}: {part!r} is no count of an operator, like '4 addmm'")
        yield Tally(operator, int(amount), place)


def _plain(text: str) -> str:
    return text.replace("|", "/")


def _order(place: OperatorSite) -> tuple[bool, str, int, str, str]:
    """Return the sort key for a tally's line: file, line number, library and module. A tally without a line comes last."""
    file, _, line = place.site.rpartition(":")
    number = int(line) if line.isascii() and line.isdecimal() and len(line) <= 18 else 0
    return place == NOWHERE, file, number, place.library, place.module
