"""Counts of a module's calls for which something holds: grad mode was off, backward did not come there. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

EVERYWHERE = "(all)"
"""The path that stands for all modules together."""

_TEXT = re.compile(r"(\d{1,18}) of (\d{1,18}) x (.*)", re.DOTALL)


class Calls(NamedTuple):
    """The calls of a module that have a property, and all its calls, as a named tuple."""

    these: int
    """The calls with the property."""
    total: int
    """All calls."""

    @property
    def others(self) -> int:
        """The calls without the property."""
        return self.total - self.these

    def text(self, path: str) -> str:
        """Return ``"6 of 12 x blocks.*"``, for the store; `calls_from_text` is the inverse."""
        return f"{self.these} of {self.total} x {path}"


class Caller(NamedTuple):
    """A caller of a module, as a named tuple."""

    module: str
    """The folded path of the module around the call; empty for none."""
    line: str
    """The line of the call: ``models.py:41``; empty for none."""


ModuleCalls = dict[str, Calls]
"""Calls by the folded path of their module (``blocks.*.attn``)."""


def calls_from_text(text: str) -> tuple[str, Calls]:
    """Return the path and the calls that `Calls.text` wrote. Raises ``ValueError``."""
    found = _TEXT.fullmatch(text)
    if found is None or int(found.group(1)) > int(found.group(2)):
        raise ValueError(f"{text!r} is no share of a module's calls, like '6 of 12 x blocks.*'")
    return found.group(3), Calls(int(found.group(1)), int(found.group(2)))


def counted(calls: Iterable[tuple[str, bool]]) -> ModuleCalls:
    """Count single calls by path, each given as its module's path and whether something holds for it."""
    found: ModuleCalls = {}
    for path, holds in calls:
        these, total = found.get(path, (0, 0))
        found[path] = Calls(these + holds, total + 1)
    return found


class KindsOfSteps:
    """Module calls of the kinds of steps in a row: steps in which as large shares of each module's calls are alike.

    Ten training steps and two validations of a model are two kinds. They have one training step and one validation, so their
    numbers of calls do not depend on how many steps of each kind came by.
    """

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[ModuleCalls, ModuleCalls]] = {}
        self._callers: dict[str, dict[Caller, None]] = {}

    def add(
        self, no_grad: ModuleCalls, no_backward: ModuleCalls, callers: Mapping[str, tuple[Caller, ...]] | None = None
    ) -> None:
        """Add the calls of a step: those with grad mode off, those that backward did not come to, and who called."""
        self._kinds.setdefault((_shares(no_grad), _shares(no_backward)), (no_grad, no_backward))
        for path, some in (callers or {}).items():
            self._callers.setdefault(path, {}).update(dict.fromkeys(some))

    @property
    def no_grad(self) -> ModuleCalls:
        """Calls with grad mode off, and all."""
        return _together(no_grad for no_grad, _ in self._kinds.values())

    @property
    def no_backward(self) -> ModuleCalls:
        """Calls that backward did not come to, and all that made a part of the graph."""
        return _together(no_backward for _, no_backward in self._kinds.values())

    @property
    def callers(self) -> dict[str, tuple[Caller, ...]]:
        """Callers with grad mode on, by the path of the module that they call."""
        return {path: tuple(callers) for path, callers in self._callers.items()}


def _shares(calls: ModuleCalls) -> frozenset[tuple[str, Fraction]]:
    return frozenset((path, Fraction(these, total)) for path, (these, total) in calls.items())


def _together(steps: Iterable[ModuleCalls]) -> ModuleCalls:
    found: ModuleCalls = {}
    for step in steps:
        for path, calls in step.items():
            before = found.get(path, Calls(0, 0))
            found[path] = Calls(before.these + calls.these, before.total + calls.total)
    return found


def outermost(calls: Mapping[str, Calls]) -> ModuleCalls:
    """Return the fewest entries that imply all: a module without an entry is like the one around it.

    One of all modules together is among them, and alone where all are alike. What was left before is left as it is. Of
    functions (``step()``) those stay in which grad mode was off.
    """
    if EVERYWHERE in calls:
        return dict(calls)
    functions = {path: some for path, some in calls.items() if is_function(path)}
    modules = {path: some for path, some in calls.items() if path not in functions}
    return {**_outermost_modules(modules), **{path: some for path, some in functions.items() if some.these}}


def is_function(path: str) -> bool:
    """Return whether a path is that of a function, ``Net.target()``, and not of a module."""
    return path.endswith("()")


def _outermost_modules(calls: Mapping[str, Calls]) -> ModuleCalls:
    together = Calls(sum(one.these for one in calls.values()), sum(one.total for one in calls.values()))
    if not together.these:
        return {}
    if not together.others:
        return {EVERYWHERE: together}
    found: ModuleCalls = {}
    for path in sorted(calls, key=lambda path: (path.count("."), path)):
        around = next((found[outer] for outer in _around(path) if outer in found), Calls(0, 1))
        if calls[path].these * around.total != around.these * calls[path].total:
            found[path] = calls[path]
    return {EVERYWHERE: together, **found}


def no_longer(before: Mapping[str, Calls], now: Mapping[str, Calls], module: str) -> Calls | None:
    """Return the calls for which it held around ``module`` in ``before``, if it holds for fewer of them now; else ``None``.

    ``before`` may be what `outermost` left; ``now`` has every module that was called. If it held for some calls only, as many
    must have been made: calls may be gone, and others new.
    """
    here = now.get(module)
    path = next((path for path in (module, *_around(module)) if path in before), None)
    if path is None and not is_function(module) and EVERYWHERE in before and not before[EVERYWHERE].others:
        path = EVERYWHERE
    if here is None or not here.others or path is None or not before[path].these:
        return None
    was = before[path]
    if not was.others:
        return was
    around = now.get(path)
    changed = around is not None and around.these < was.these and around.total == was.total
    return was if changed else None


def _around(path: str) -> Iterator[str]:
    """Return the paths of the modules that a module is in, from the innermost to the outermost."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
