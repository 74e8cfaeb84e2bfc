"""Find reference cycles that keep tensors alive. Only Python's cyclic collector can free these tensors."""

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
    """Collect garbage, and return the types in each collected reference cycle with tensors.

    Example:
        ``("Trainer -> dict -> Trainer",)``

    At most `MOST_CYCLES` cycles are returned, the most frequent first. The flags from ``gc.set_debug`` are restored.
    """
    flags = gc.get_debug()
    already_found = len(gc.garbage)
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    unreachable = gc.garbage[already_found:]
    del gc.garbage[already_found:]
    cycles = cycles_among(unreachable)
    unreachable.clear()
    gc.collect()
    return cycles


def cycles_among(objects: Sequence[object]) -> tuple[str, ...]:
    """Return the types in each reference cycle among ``objects``. A cycle from which no tensor can be reached is left out.

    Each cycle begins with its most specific type, for example ``Trainer`` and not ``dict``.
    """
    import torch

    index = {id(node): number for number, node in enumerate(objects)}
    edges = [
        sorted({index[id(referent)] for referent in gc.get_referents(node) if id(referent) in index})
        for node in objects
    ]
    counts: dict[str, int] = {}
    holding: set[int] = set()
    # `_strongly_connected` returns a component after all components to which it refers. So ``holding`` already contains these.
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
    """Return the types in a shortest cycle in ``component``. The cycle begins with a user's class, if there is one."""
    first = min(component, key=lambda number: (_genericness(objects[number]), number))
    inside = set(component)
    came_from: dict[int, int] = {}
    queue = [first]
    last = first
    for number in queue:
        if first in edges[number]:
            last = number
            break
        for referent in edges[number]:
            if referent in inside and referent not in came_from and referent != first:
                came_from[referent] = number
                queue.append(referent)
    path = [last]
    while path[-1] != first:
        path.append(came_from[path[-1]])
    names = [_type_name(objects[number]) for number in reversed(path)]
    if len(names) > _LONGEST:
        names = [*names[: _LONGEST - 1], "...", names[-1]]
    return " -> ".join([*names, names[0]])


def _genericness(node: object) -> int:
    """Return a sort key: 0 for an object with a user's class, 2 for a container, frame or method, and 1 for other objects."""
    if is_a(node, dict, list, tuple, set, types.CellType, types.FrameType, types.MethodType):
        return 2
    return 1 if package_of(type(node)) in ("builtins", "functools", "weakref") else 0


def _type_name(node: object) -> str:
    if is_a(node, types.FunctionType):
        return f"function {node.__qualname__}"
    if is_a(node, types.FrameType):
        return f"frame of {node.f_code.co_qualname if hasattr(node.f_code, 'co_qualname') else node.f_code.co_name}"
    # `class_name` is shorter than ``__qualname__``, because it leaves out the function in which a class is defined.
    return class_name(type(node))


def _strongly_connected(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components, by Gabow's algorithm (Inf. Process. Lett. 74, 2000), without recursion."""
    components: list[list[int]] = []
    path: list[int] = []
    starts: list[int] = []
    # Each node's position in the path. After its component is complete, a node gets a position behind all others.
    position: dict[int, int] = {}
    for root in range(len(edges)):
        work = [(-1, iter((root,)))] if root not in position else []
        while work:
            node, referents = work[-1]
            for referent in referents:
                if referent not in position:
                    position[referent] = len(path)
                    starts.append(len(path))
                    path.append(referent)
                    work.append((referent, iter(edges[referent])))
                    break
                while starts[-1] > position[referent]:
                    starts.pop()
            else:
                work.pop()
                if node >= 0 and starts[-1] == position[node]:
                    components.append(path[starts.pop() :])
                    del path[position[node] :]
                    position.update(dict.fromkeys(components[-1], len(edges)))
    return components
