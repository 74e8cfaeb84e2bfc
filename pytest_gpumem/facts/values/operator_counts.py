"""A step's counts by operator, line and module. Frozen values and their text form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.base.units import format_count
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.layers import folded, kinds_of, numbers_in, split_layers, with_layers
from pytest_gpumem.facts.values.plain import Form
from pytest_gpumem.facts.values.source_lines import Chain, all_chains, chains_from_text, chains_to_text, line_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_gpumem.facts.values.layers import Numbers

MADE_OF_OPERATORS = tuple(name for name, metric in METRICS.items() if metric.is_counted_by_operator)
"""The metrics that count operators."""
MOST_PLACES = 150
"""The most places that a baseline keeps for a metric. Calls at all other places are stored by operator, without a place.

A Llama trained with DoRA has 38 places with FLOPs, and 116 with operators."""

_SEPARATOR = " | "


@dataclass(frozen=True, slots=True)
class OperatorSite:
    """The place of an operator's call. In backward, this is the place of the forward call behind the autograd node.

    All fields are empty if the place is unknown.
    """

    module: str = ""
    """The innermost module's path, with a layer (``blocks.3.attn``) or ``*`` for all layers."""
    site: str = ""
    """File and line for the innermost frame in your own code."""
    library: str = ""
    """Package, file and line of the library's frame below ``site``. Empty without a library."""
    callers: tuple[Chain, ...] = field(default=(), compare=False)
    """The callers of the line, in the same form as in `Row`."""
    named: str = field(default="", compare=False)
    """A caller shown before the line, for example a changed caller. Empty without such a caller."""
    reason: str = field(default="", compare=False)
    """A clause about the line: ``"changed line"``."""

    @property
    def where(self) -> str:
        """The place in one text."""
        return line_of(self.site, self.library, self.named)


NOWHERE = OperatorSite()


@dataclass(frozen=True, slots=True)
class Tally:
    """The calls to an operator at one place.

    Example:
        ``Tally("addmm", 8, OperatorSite("blocks.*.mlp.0", "gpt.py:58"))`` are 8 calls.
    """

    operator: str
    """``addmm`` for an ATen operator, ``library::name`` for other operators. For syncs and launches, the name may belong to a
    function or a kernel."""
    amount: int
    """Calls, FLOPs, syncs or launches."""
    place: OperatorSite = NOWHERE
    """The call's place. It is empty if lines were not recorded."""


def sum_tallies(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Return tallies in a fixed order, added up by operator and place, without empty tallies."""
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
"""The most kinds of layers at a line. If a line has more kinds, all layers become one row."""


def of_layers(tallies: Iterable[Tally], all_layers: Mapping[str, Collection[Numbers]]) -> tuple[Tally, ...]:
    """Join tallies with single layers to as few tallies as possible.

    Args:
        tallies: The tallies.
        all_layers: All layers by the module's folded path.
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
    """Return a tally for each named layer, or the tally itself without named layers or equal parts."""
    return in_layers(tally, numbers_in(split_layers(tally.place.module)[1]) or ())


def in_layers(tally: Tally, layers: Collection[Numbers]) -> list[Tally]:
    """Return equal parts of a tally at some layers, or the tally itself if equal parts are impossible."""
    if not layers or tally.amount % len(layers):
        return [tally]
    path = folded(tally.place.module)
    modules = (with_layers(path, tuple((number,) for number in numbers)) for numbers in sorted(layers))
    return [
        Tally(tally.operator, tally.amount // len(layers), replace(tally.place, module=module)) for module in modules
    ]


def layer_of(place: OperatorSite) -> Numbers | None:
    """Return the numbers of a place's only layer; ``None`` without a layer or with several."""
    layers = numbers_in(split_layers(place.module)[1]) or set()
    return next(iter(layers)) if len(layers) == 1 else None


def of_any_layer(place: OperatorSite) -> OperatorSite:
    """Return a place with layer numbers folded."""
    return replace(place, module=folded(place.module))


def reduced_tallies(tallies: Sequence[Tally], most: int = MOST_PLACES) -> tuple[Tally, ...]:
    """Return the tallies that a baseline keeps.

    The places with the largest amounts are kept. Tallies at other places keep only their operator.
    """
    if len({tally.place for tally in tallies} - {NOWHERE}) > most:
        # The place is more useful than the layer.
        tallies = sum_tallies(replace(tally, place=of_any_layer(tally.place)) for tally in tallies)
    amounts: dict[OperatorSite, int] = {}
    for tally in tallies:
        amounts[tally.place] = amounts.get(tally.place, 0) + abs(tally.amount)
    places = sorted(amounts.keys() - {NOWHERE}, key=lambda place: (-amounts[place], _order(place)))
    kept_places = {*places[:most], NOWHERE}
    return sum_tallies(tally if tally.place in kept_places else replace(tally, place=NOWHERE) for tally in tallies)


def without_places(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Return the tallies with their operators only."""
    return sum_tallies(replace(tally, place=NOWHERE) for tally in tallies)


def tallies_without_callers(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Return the tallies without callers."""
    return tuple(
        replace(tally, place=replace(tally.place, callers=())) if tally.place.callers else tally for tally in tallies
    )


def total(tallies: Iterable[Tally]) -> int:
    """Return the sum over the amounts, which is the metric's value."""
    return sum(tally.amount for tally in tallies)


def varied_clause(metric: str, lowest: int, highest: int) -> str:
    """Return a clause on a varying count."""
    return f"{METRICS[metric].title} between {format_count(lowest)} and {format_count(highest)} from step to step"


def to_texts(tallies: Iterable[Tally], *, with_callers: bool = False) -> list[str]:
    """Return a line for each place: ``module | line | library's line | 4 addmm, 8 mm``. `from_texts` is the inverse.

    Tallies without a place have a line for each operator.

    Args:
        tallies: The tallies.
        with_callers: Whether to append a place's callers, named caller and reason, if there are any.
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
    """Return the tallies that `to_texts` wrote.

    Raises:
        ValueError: A text has another form.
    """
    return sum_tallies(tally for text in texts for tally in _from_text(text))


Tallies = Annotated[tuple[Tally, ...], Form(tuple[str, ...], partial(to_texts, with_callers=True), from_texts)]
"""Tallies in the text form of their places."""
KeptTallies = Annotated[
    tuple[Tally, ...],
    Form(tuple[str, ...], lambda tallies: to_texts(reduced_tallies(tallies), with_callers=True), from_texts),
]
"""Tallies in the same text form. Only the places with the largest amounts are written."""


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
    """Return the sort key: the file and the line. Tallies without a place come last."""
    file, _, line = place.site.rpartition(":")
    number = int(line) if line.isascii() and line.isdecimal() and len(line) <= 18 else 0
    return place == NOWHERE, file, number, place.library, place.module
