"""Detection of tests that read a composition, so that one has to be recorded for them."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from pytest_gpumem.torch_support.static_access import instance_dict, is_a

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASKING = {"composition", "explanation"}


def asks_for_composition(function: object) -> bool:
    """Return whether a function, or one of its own module that it calls, reads an attribute of that name.

    Functions of other modules are not followed: they need ``explain=True``.
    """
    seen: set[int] = set()
    pending = [function.__func__ if is_a(function, types.MethodType) else function]
    while pending:
        one = pending.pop()
        if not is_a(one, types.FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        names = {name for code in _codes(one.__code__) for name in code.co_names}
        if names & _ASKING:
            return True
        pending += [
            value
            for name in names
            for value in _unwrapped(one.__globals__.get(name))
            if value.__globals__ is one.__globals__
        ]
        pending += _unwrapped(one)
    return False


def _unwrapped(value: object) -> list[types.FunctionType]:
    """Return a function and what it wraps, from the outside in: decorators are often another module's."""
    functions: list[types.FunctionType] = []
    passed: set[int] = set()
    while value is not None and id(value) not in passed:
        passed.add(id(value))
        if is_a(value, types.FunctionType):
            functions.append(value)
        # Not the attribute itself: objects that compute theirs have any.
        value = dict.get(instance_dict(value) or {}, "__wrapped__")
    return functions


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return the code of a function, and of functions, lambdas and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
