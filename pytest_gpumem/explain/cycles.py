"""Reference cycles that hold tensors, which only the cyclic collector can free."""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING

from pytest_gpumem.torch_support.static_access import class_name, is_a, package_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_CYCLES = 5
_LONGEST = 8


def collect_cycles() -> tuple[str, ...]:
    """Collect garbage, and return the types in its reference cycles that hold tensors: ``"Trainer -> dict -> Trainer"``.

    The most frequent cycles come first, at most `MOST_CYCLES` of them. The flags of ``gc.set_debug`` are restored.
    """
    flags = gc.get_debug()
    before = len(gc.garbage)
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    unreachable = gc.garbage[before:]
    del gc.garbage[before:]
    cycles = cycles_among(unreachable)
    unreachable.clear()
    gc.collect()
    return cycles


def cycles_among(objects: Sequence[object]) -> tuple[str, ...]:
    """Return the types in each reference cycle among ``objects`` that holds one of their tensors, directly or not.

    Each begins with the most specific type.
    """
    import torch

    index = {id(one): number for number, one in enumerate(objects)}
    edges = [sorted({index[id(other)] for other in gc.get_referents(one) if id(other) in index}) for one in objects]
    counts: dict[str, int] = {}
    holding: set[int] = set()
    # A component comes after those that it leads to.
    for component in _strongly_connected(edges):
        if not any(
            is_a(objects[n], torch.Tensor, torch.UntypedStorage) or not holding.isdisjoint(edges[n]) for n in component
        ):
            continue
        holding.update(component)
        if len(component) > 1 or component[0] in edges[component[0]]:
            text = _cycle_text(component, edges, objects)
            counts[text] = counts.get(text, 0) + 1
    ranked = sorted(counts, key=lambda text: (-counts[text], text))
    return tuple(f"{text} ({counts[text]} times)" if counts[text] > 1 else text for text in ranked[:MOST_CYCLES])


def _cycle_text(component: Sequence[int], edges: Sequence[Sequence[int]], objects: Sequence[object]) -> str:
    """Return a shortest cycle through the object of a component with the most specific type."""
    first = min(component, key=lambda number: (_genericness(objects[number]), number))
    inside = set(component)
    came_from: dict[int, int] = {}
    queue = [first]
    last = first
    for number in queue:
        if first in edges[number]:
            last = number
            break
        for other in edges[number]:
            if other in inside and other not in came_from and other != first:
                came_from[other] = number
                queue.append(other)
    path = [last]
    while path[-1] != first:
        path.append(came_from[path[-1]])
    names = [_type_name(objects[number]) for number in reversed(path)]
    if len(names) > _LONGEST:
        names = [*names[: _LONGEST - 1], "...", names[-1]]
    return " -> ".join([*names, names[0]])


def _genericness(one: object) -> int:
    """Return a sort key that is larger for less specific types."""
    if is_a(one, dict, list, tuple, set, types.CellType, types.FrameType, types.MethodType):
        return 2
    return 1 if package_of(type(one)) in ("builtins", "functools", "weakref") else 0


def _type_name(one: object) -> str:
    if is_a(one, types.FunctionType):
        return f"function {one.__qualname__}"
    if is_a(one, types.FrameType):
        return f"frame of {one.f_code.co_qualname if hasattr(one.f_code, 'co_qualname') else one.f_code.co_name}"
    # Which class it is does not depend on the function that it stands in.
    return class_name(type(one))


def _strongly_connected(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components, by Gabow's algorithm (Inf. Process. Lett. 74, 2000), without recursion."""
    components: list[list[int]] = []
    path: list[int] = []
    starts: list[int] = []
    # Each object's position in the path, and behind all of them once its component is complete.
    position: dict[int, int] = {}
    for root in range(len(edges)):
        work = [(-1, iter((root,)))] if root not in position else []
        while work:
            node, others = work[-1]
            for other in others:
                if other not in position:
                    position[other] = len(path)
                    starts.append(len(path))
                    path.append(other)
                    work.append((other, iter(edges[other])))
                    break
                while starts[-1] > position[other]:
                    starts.pop()
            else:
                work.pop()
                if node >= 0 and starts[-1] == position[node]:
                    components.append(path[starts.pop() :])
                    del path[position[node] :]
                    position.update(dict.fromkeys(components[-1], len(edges)))
    return components
