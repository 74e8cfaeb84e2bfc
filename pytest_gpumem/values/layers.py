"""Layers of a repeated module: paths with layer numbers folded, and the numbers beside them. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

Numbers = tuple[int, ...]
"""The numbers in one path: of ``layers.3.experts.5``, 3 and 5."""
Layers = tuple[tuple[int, ...], ...]
"""For each number in a path those of the modules that are meant, every combination of them; of one without any, all."""

FOLDED = "*"
_NAMED = re.compile(r"\d+|\{\d+(-\d+)?(,\d+(-\d+)?)*\}")


def folded(path: str) -> str:
    """Return a module's path without layer numbers: ``h.0.attn`` is ``h.*.attn``."""
    return apart(path)[0]


def apart(path: str) -> tuple[str, Layers]:
    """Return a path that names layers as the folded one and these: ``h.{0-2}.attn`` is ``h.*.attn`` and ``((0, 1, 2),)``."""
    if not any(character.isdigit() for character in path):
        return path, ()
    parts, layers = [], []
    for part in path.split("."):
        numbers = _numbers(part)
        parts.append(FOLDED if numbers or part.isdecimal() else part)
        if parts[-1] == FOLDED:
            layers.append(numbers)
    return ".".join(parts), tuple(layers) if any(layers) else ()


def named(path: str, layers: Layers) -> str:
    """Return a folded path with the layers that are meant: the inverse of `apart`."""
    left = iter(layers)
    return ".".join(_text(next(left, ())) if part == FOLDED else part for part in path.split(".")) if layers else path


def products(found: Collection[Numbers], there: Collection[Numbers] = ()) -> list[Layers]:
    """Return numbers of paths as combinations, as few as that takes; ``there`` are those of all modules, if they are known.

    All of them are ``()``, and numbers of which all occur are left out of a combination.
    """
    found, there = set(found), set(there)
    if found == there or not found:
        return [()]
    return [_shortened(one, there) for one in _combined(found)]


def layers_of(paths: Iterable[str]) -> dict[str, frozenset[Numbers]]:
    """Return the layers that there are of each module, by its folded path."""
    found: dict[str, set[Numbers]] = {}
    for path, layers in map(apart, paths):
        found.setdefault(path, set()).update(members(layers) or ())
    return {path: frozenset(numbers) for path, numbers in found.items()}


def members(layers: Layers) -> set[Numbers] | None:
    """Return the numbers of each path that is meant; ``None`` where some are left out."""
    return set(product(*layers)) if layers and all(layers) else None


def is_of(numbers: Numbers, layers: Layers) -> bool:
    """Return whether a path with these numbers is meant."""
    return not layers or all(not some or number in some for number, some in zip(numbers, layers, strict=True))


def _combined(found: set[Numbers]) -> list[Layers]:
    if not any(found):
        return [()]
    rests: dict[int, set[Numbers]] = defaultdict(set)
    for first, *rest in found:
        rests[first].add(tuple(rest))
    alike: dict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first, some in rests.items():
        alike[frozenset(some)].append(first)
    return [(tuple(sorted(firsts)), *rest) for some, firsts in alike.items() for rest in _combined(set(some))]


def _shortened(layers: Layers, there: set[Numbers]) -> Layers:
    """Return a combination without those numbers of which all that there are occur."""
    meant = set(product(*layers))
    for index in range(len(layers)):
        shorter = (*layers[:index], (), *layers[index + 1 :])
        if {one for one in there if len(one) == len(layers) and is_of(one, shorter)} == meant:
            layers = shorter
    return layers


def _numbers(part: str) -> tuple[int, ...]:
    if not _NAMED.fullmatch(part) or len(part) > 1000:
        return ()
    found: list[int] = []
    for one in part.strip("{}").split(","):
        first, _, last = one.partition("-")
        if max(len(first), len(last)) > 6:
            return ()
        found += range(int(first), int(last or first) + 1)
    numbers = tuple(found)
    return numbers if _text(numbers) == part else ()


def _text(numbers: tuple[int, ...]) -> str:
    """Return ``*``, ``3``, ``{2,3}`` or ``{0-2,7}``."""
    if len(numbers) < 2:
        return str(numbers[0]) if numbers else FOLDED
    return "{" + ",".join(runs(numbers, "-")) + "}"


def runs(numbers: Iterable[int], to: str) -> Iterator[str]:
    """Yield ascending numbers as texts, three or more in a row as one of the first and the last with ``to`` in between."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    for run in found:
        yield from [f"{run[0]}{to}{run[-1]}"] if len(run) > 2 else map(str, run)


def kinds_of(
    amounts: Mapping[Numbers, tuple[int, ...]], there: Collection[Numbers]
) -> list[tuple[Layers, int, tuple[int, ...]]]:
    """Return layers with the same amounts as combinations, as few as that takes: each with their number, and one's amounts.

    Args:
        amounts: The amounts of each layer.
        there: The layers that there are.
    """
    alike: dict[tuple[int, ...], set[Numbers]] = defaultdict(set)
    for numbers, amount in amounts.items():
        alike[amount].add(numbers)
    return [
        (layers, sum(is_of(numbers, layers) for numbers in some), amount)
        for amount, some in alike.items()
        for layers in products(some, there)
    ]
