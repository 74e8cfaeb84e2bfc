"""Module calls with a property: grad mode was off, or backward did not reach the call. Pure.

Example: ``Calls(6, 12)`` for ``blocks.*`` means that 6 of 12 calls ran with grad mode off.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

EVERYWHERE = "(all)"
"""The path for all modules together."""

_TEXT = re.compile(r"(\d{1,18}) of (\d{1,18}) x (.*)", re.DOTALL)


class Calls(NamedTuple):
    """A module's calls with a property, and all its calls, as a named tuple."""

    these: int
    """The calls with the property."""
    total: int
    """All calls."""

    @property
    def others(self) -> int:
        """The calls without the property."""
        return self.total - self.these

    def text(self, path: str) -> str:
        """Return the text in the store: ``"6 of 12 x blocks.*"``. `calls_from_text` is the inverse."""
        return f"{self.these} of {self.total} x {path}"


class Caller(NamedTuple):
    """A caller of a module, as a named tuple."""

    module: str
    """The folded path to the module around the call; empty outside modules."""
    line: str
    """The calling line: ``models.py:41``; empty if unknown."""


ModuleCalls = dict[str, Calls]
"""Calls by the folded path of their module (``blocks.*.attn``)."""


def calls_from_text(text: str) -> tuple[str, Calls]:
    """Return the path and the calls from a text by `Calls.text`.

    Raises:
        ValueError: The text has another form.
    """
    match = _TEXT.fullmatch(text)
    if match is None or int(match.group(1)) > int(match.group(2)):
        raise ValueError(f"{text!r} is no share of a module's calls, like '6 of 12 x blocks.*'")
    return match.group(3), Calls(int(match.group(1)), int(match.group(2)))


def count_calls(calls: Iterable[tuple[str, bool]]) -> ModuleCalls:
    """Count calls by path. Each call is a module's path, with ``True`` if the call has the property."""
    counts: ModuleCalls = {}
    for path, has_property in calls:
        these, total = counts.get(path, (0, 0))
        counts[path] = Calls(these + has_property, total + 1)
    return counts


class KindsOfSteps:
    """Module calls in several steps, with each kind of step counted once.

    Two steps have the same kind if, in each module, the same share of the calls has the property.

    Example:
        Ten training steps and two validations are two kinds. The result has the calls from one training step and one
        validation, regardless of how many steps ran.
    """

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[ModuleCalls, ModuleCalls]] = {}
        self._callers: dict[str, dict[Caller, None]] = {}

    def add(
        self, no_grad: ModuleCalls, no_backward: ModuleCalls, callers: Mapping[str, tuple[Caller, ...]] | None = None
    ) -> None:
        """Add a step's calls.

        Args:
            no_grad: The calls with grad mode off.
            no_backward: The calls that backward did not reach.
            callers: The callers by module.
        """
        self._kinds.setdefault((_shares(no_grad), _shares(no_backward)), (no_grad, no_backward))
        for path, module_callers in (callers or {}).items():
            self._callers.setdefault(path, {}).update(dict.fromkeys(module_callers))

    @property
    def no_grad(self) -> ModuleCalls:
        """The calls with grad mode off, and all calls."""
        return _added(no_grad for no_grad, _ in self._kinds.values())

    @property
    def no_backward(self) -> ModuleCalls:
        """The calls that backward did not reach, and all calls with a part in the graph."""
        return _added(no_backward for _, no_backward in self._kinds.values())

    @property
    def callers(self) -> dict[str, tuple[Caller, ...]]:
        """The callers with grad mode on, by the called module's path."""
        return {path: tuple(callers) for path, callers in self._callers.items()}


def _shares(calls: ModuleCalls) -> frozenset[tuple[str, Fraction]]:
    return frozenset((path, Fraction(these, total)) for path, (these, total) in calls.items())


def _added(steps: Iterable[ModuleCalls]) -> ModuleCalls:
    sums: ModuleCalls = {}
    for step in steps:
        for path, calls in step.items():
            previous = sums.get(path, Calls(0, 0))
            sums[path] = Calls(previous.these + calls.these, previous.total + calls.total)
    return sums


def outermost(calls: Mapping[str, Calls]) -> ModuleCalls:
    """Return the fewest entries that imply all other entries. A module without an entry is like the module around it.

    The result has an entry for all modules together. If all modules are alike, it is the only entry. A result from `outermost`
    is returned unchanged. A function (``step()``) is kept only if grad mode was off in some calls.

    Example:
        Grad mode was off in both calls to ``teacher`` and ``teacher.blocks.*``, and on in the call to ``student``. The
        result has entries for ``(all)`` and ``teacher``. ``teacher.blocks.*`` follows from ``teacher``.
    """
    if EVERYWHERE in calls:
        return dict(calls)
    functions = {path: module_calls for path, module_calls in calls.items() if is_function(path)}
    modules = {path: module_calls for path, module_calls in calls.items() if path not in functions}
    return {
        **_outermost_modules(modules),
        **{path: module_calls for path, module_calls in functions.items() if module_calls.these},
    }


def is_function(path: str) -> bool:
    """Return whether the path belongs to a function (``Net.target()``) instead of a module."""
    return path.endswith("()")


def _outermost_modules(calls: Mapping[str, Calls]) -> ModuleCalls:
    all_calls = Calls(
        sum(module_calls.these for module_calls in calls.values()),
        sum(module_calls.total for module_calls in calls.values()),
    )
    if not all_calls.these:
        return {}
    if not all_calls.others:
        return {EVERYWHERE: all_calls}
    listed: ModuleCalls = {}
    for path in sorted(calls, key=lambda path: (path.count("."), path)):
        outer_calls = next((listed[outer] for outer in _outer_paths(path) if outer in listed), Calls(0, 1))
        if calls[path].these * outer_calls.total != outer_calls.these * calls[path].total:
            listed[path] = calls[path]
    return {EVERYWHERE: all_calls, **listed}


def no_longer(baseline: Mapping[str, Calls], current: Mapping[str, Calls], module: str) -> Calls | None:
    """Return the module's calls with the property in ``baseline``, if fewer calls have the property in ``current``.

    If only some calls had the property in ``baseline``, both sides must have the same number of calls. Otherwise the calls with
    the property may have disappeared, and other calls may be new.

    Args:
        baseline: The calls in the baseline, possibly reduced by `outermost`.
        current: The calls in this step, with every called module.
        module: A module's or function's path.

    Returns:
        The module's calls in ``baseline``. If the module has no entry, the calls to the module around it. ``None`` if no fewer
        calls have the property.
    """
    module_calls = current.get(module)
    path = next((path for path in (module, *_outer_paths(module)) if path in baseline), None)
    if path is None and not is_function(module) and EVERYWHERE in baseline and not baseline[EVERYWHERE].others:
        path = EVERYWHERE
    if module_calls is None or not module_calls.others or path is None or not baseline[path].these:
        return None
    baseline_calls = baseline[path]
    if not baseline_calls.others:
        return baseline_calls
    outer_calls = current.get(path)
    changed = (
        outer_calls is not None
        and outer_calls.these < baseline_calls.these
        and outer_calls.total == baseline_calls.total
    )
    return baseline_calls if changed else None


def _outer_paths(path: str) -> Iterator[str]:
    """Yield the paths to the modules around a module, from the innermost to the outermost."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
