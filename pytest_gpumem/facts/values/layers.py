"""Fold the module paths of repeated layers: replace the layer numbers by ``*``, and list the numbers. Pure functions.

Example: the paths ``h.0.attn``, ``h.1.attn`` and ``h.2.attn`` become the folded path ``h.*.attn`` with the numbers 0, 1 and 2.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

Numbers = tuple[int, ...]
"""The layer numbers in one module path: ``(3, 5)`` for ``layers.3.experts.5``."""
Layers = tuple[tuple[int, ...], ...]
"""Some layers for a folded path, as one tuple of numbers for each ``*``.

Example: for ``layers.*.experts.*``, the value ``((0, 1), (5,))`` means ``layers.0.experts.5`` and ``layers.1.experts.5``. The
value ``()`` means all layers."""

FOLDED = "*"
_NAMED = re.compile(r"\d+|\{\d+(-\d+)?(,\d+(-\d+)?)*\}")


def folded(path: str) -> str:
    """Replace layer numbers in a module path by ``*``: ``h.*.attn`` for ``h.0.attn``."""
    return split_layers(path)[0]


def split_layers(path: str) -> tuple[str, Layers]:
    """Split a module path into its folded path and its layers: ``h.{0-2}.attn`` into ``h.*.attn`` and ``((0, 1, 2),)``."""
    if not any(character.isdigit() for character in path):
        return path, ()
    parts, layers = [], []
    for part in path.split("."):
        numbers = _numbers(part)
        parts.append(FOLDED if numbers or part.isdecimal() else part)
        if parts[-1] == FOLDED:
            layers.append(numbers)
    return ".".join(parts), tuple(layers) if any(layers) else ()


def with_layers(path: str, layers: Layers) -> str:
    """Insert layer numbers into a folded path: ``h.{0-2}.attn`` for ``h.*.attn`` and ``((0, 1, 2),)``."""
    remaining = iter(layers)
    return (
        ".".join(_part(next(remaining, ())) if part == FOLDED else part for part in path.split(".")) if layers else path
    )


def fewest_combinations(numbers: Collection[Numbers], all_numbers: Collection[Numbers] = ()) -> list[Layers]:
    """Return layer numbers as the shortest possible list of `Layers`.

    For all layers, the result is ``[()]``. If all existing numbers occur at a ``*``, the tuple for this ``*`` is empty.

    Example:
        A model has the layers ``h.0``, ``h.1`` and ``h.2``. The paths ``h.0`` and ``h.2`` need a single entry:
        ``fewest_combinations({(0,), (2,)}, {(0,), (1,), (2,)})`` is ``[((0, 2),)]``.

    Args:
        numbers: The layer numbers, as one tuple for each path.
        all_numbers: The layer numbers for all paths in the model with this folded path (``blocks.*``). Empty if not known.
    """
    numbers, all_numbers = set(numbers), set(all_numbers)
    if numbers == all_numbers or not numbers:
        return [()]
    return [_without_complete_numbers(layers, all_numbers) for layers in _combinations(numbers)]


def layers_of(paths: Iterable[str]) -> dict[str, frozenset[Numbers]]:
    """Return all modules' layer numbers by folded path: ``{"h.*": {(0,), (1,)}}`` for ``h.0`` and ``h.1``."""
    layers_by_path: dict[str, set[Numbers]] = {}
    for path, layers in map(split_layers, paths):
        layers_by_path.setdefault(path, set()).update(numbers_in(layers) or ())
    return {path: frozenset(numbers) for path, numbers in layers_by_path.items()}


def numbers_in(layers: Layers) -> set[Numbers] | None:
    """Return a tuple of numbers for each path in ``layers``; ``None`` if ``layers`` stand for all layers (empty tuples)."""
    return set(product(*layers)) if layers and all(layers) else None


def is_selected(numbers: Numbers, layers: Layers) -> bool:
    """Return whether ``layers`` include the module path with the layer numbers ``numbers``."""
    return not layers or all(not meant or number in meant for number, meant in zip(numbers, layers, strict=True))


def _combinations(numbers: set[Numbers]) -> list[Layers]:
    if not any(numbers):
        return [()]
    rests: dict[int, set[Numbers]] = defaultdict(set)
    for first, *rest in numbers:
        rests[first].add(tuple(rest))
    firsts_by_rests: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first, rest_set in rests.items():
        firsts_by_rests[frozenset(rest_set)].append(first)
    return [
        (tuple(sorted(firsts)), *rest)
        for rest_set, firsts in firsts_by_rests.items()
        for rest in _combinations(set(rest_set))
    ]


def _without_complete_numbers(layers: Layers, all_numbers: set[Numbers]) -> Layers:
    """Return ``layers`` after replacing the tuple for each ``*`` at which all layer numbers occur by an empty tuple."""
    meant = set(product(*layers))
    for index in range(len(layers)):
        shorter = (*layers[:index], (), *layers[index + 1 :])
        if {
            numbers for numbers in all_numbers if len(numbers) == len(layers) and is_selected(numbers, shorter)
        } == meant:
            layers = shorter
    return layers


def _numbers(part: str) -> tuple[int, ...]:
    if not _NAMED.fullmatch(part) or len(part) > 1000:
        return ()
    layer_numbers: list[int] = []
    for span in part.strip("{}").split(","):
        first, _, last = span.partition("-")
        if max(len(first), len(last)) > 6:
            return ()
        layer_numbers += range(int(first), int(last or first) + 1)
    numbers = tuple(layer_numbers)
    return numbers if _part(numbers) == part else ()


def _part(numbers: tuple[int, ...]) -> str:
    """Return layer numbers as a module path contains them: ``*`` for all layers, ``3``, ``{2,3}`` or ``{0-2,7}``."""
    if len(numbers) < 2:
        return str(numbers[0]) if numbers else FOLDED
    return "{" + ",".join(runs(numbers, "-")) + "}"


def runs(numbers: Iterable[int], to: str) -> Iterator[str]:
    """Yield ascending numbers as texts. Three or more consecutive numbers become a range.

    Example:
        ``runs([0, 1, 2, 7], "-")`` yields ``"0-2"`` and ``"7"``.
    """
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        yield from [f"{group[0]}{to}{group[-1]}"] if len(group) > 2 else map(str, group)


def kinds_of(
    amounts: Mapping[Numbers, tuple[int, ...]], all_layers: Collection[Numbers]
) -> list[tuple[Layers, int, tuple[int, ...]]]:
    """Group layers by equal amounts, for example equal bytes.

    Args:
        amounts: The amounts in each layer, for example ``(bytes, blocks)``, by layer numbers.
        all_layers: The numbers of all layers with the same folded path.

    Returns:
        For each group, a tuple: the layers, their number, and the amounts in a single layer.
    """
    layers_with: dict[tuple[int, ...], set[Numbers]] = defaultdict(set)
    for numbers, amount in amounts.items():
        layers_with[amount].add(numbers)
    return [
        (layers, sum(is_selected(numbers, layers) for numbers in layer_numbers), amount)
        for amount, layer_numbers in layers_with.items()
        for layers in fewest_combinations(layer_numbers, all_layers)
    ]
