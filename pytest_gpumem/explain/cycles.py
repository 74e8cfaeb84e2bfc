"""Reference cycles that hold tensors, which only the cyclic collector can free."""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING

from pytest_gpumem.torch_support.static_access import class_name, is_a, package_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_TOLD = 5
_LONGEST = 8


def collect_and_tell() -> tuple[str, ...]:
    """Collect garbage, and return the types in its reference cycles that hold tensors: ``"Trainer -> dict -> Trainer"``.

    The most frequent cycles first, at most `MOST_TOLD` of them. Somebody's own ``gc.set_debug`` is given back.
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
    told = cycles_among(unreachable)
    unreachable.clear()
    gc.collect()
    return told


def cycles_among(objects: Sequence[object]) -> tuple[str, ...]:
    """Return the types in each reference cycle among ``objects`` that holds one of their tensors, directly or not.

    Each is told from the type that says most of where it comes from.
    """
    index = {id(one): number for number, one in enumerate(objects)}
    edges = [sorted({index[id(other)] for other in gc.get_referents(one) if id(other) in index}) for one in objects]
    counts: dict[str, int] = {}
    holding: set[int] = set()
    # A component comes after those that it leads to.
    for component in _strongly_connected(edges):
        if not any(_is_tensor(objects[n]) or not holding.isdisjoint(edges[n]) for n in component):
            continue
        holding.update(component)
        if len(component) > 1 or component[0] in edges[component[0]]:
            text = _cycle_text(component, edges, objects)
            counts[text] = counts.get(text, 0) + 1
    ranked = sorted(counts, key=lambda text: (-counts[text], text))
    return tuple(f"{text} ({counts[text]} times)" if counts[text] > 1 else text for text in ranked[:MOST_TOLD])


def _is_tensor(one: object) -> bool:
    import torch

    return is_a(one, torch.Tensor, torch.UntypedStorage)


def _cycle_text(component: Sequence[int], edges: Sequence[Sequence[int]], objects: Sequence[object]) -> str:
    """Return a shortest cycle through the object of a component whose type says most."""
    first = min(component, key=lambda number: (_dull(objects[number]), number))
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


def _dull(one: object) -> int:
    """Return a sort key that is larger the less the type of an object says."""
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
    """Return the strongly connected components, by Tarjan's algorithm (SIAM J. Comput. 1(2), 1972), without recursion."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[list[int]] = []
    for root in range(len(edges)):
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(edges[other])))
                    break
                if other in on_stack:
                    low[node] = min(low[node], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    components.append(component)
    return components
