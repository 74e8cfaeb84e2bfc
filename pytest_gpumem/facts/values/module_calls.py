"""Count how many calls to each module ran with grad mode off, or were not reached by backward. Pure functions.

The same functions count both kinds of calls. So the word *property* means one of two facts about a call: "grad mode was off",
or "backward did not reach the call".

Example: if 6 of the 12 calls to the modules ``blocks.*`` ran with grad mode off, the result is ``{"blocks.*": Calls(6, 12)}``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.facts.values.annotations import Count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

EVERYWHERE = "(all)"
"""The key for the sum over all modules. Other keys are module paths."""

_TEXT = re.compile(r"(\d{1,18}) of (\d{1,18}) x (.*)", re.DOTALL)


class Calls(NamedTuple):
    """Counts of calls to a module: all calls, and calls with a property (grad mode off, or not reached by backward)."""

    these: Count
    """The number of calls with the property."""
    total: Count
    """The number of all calls to the module."""

    @property
    def others(self) -> int:
        """The number of calls without the property."""
        return self.total - self.these

    def text(self, path: str) -> str:
        """Return these counts as baselines store them: ``"6 of 12 x blocks.*"``. `calls_from_text` converts them back."""
        return f"{self.these} of {self.total} x {path}"


class Caller(NamedTuple):
    """The code from which a module was called."""

    module: str
    """The path to the calling module (``blocks.*``); empty if code outside all modules made the call."""
    line: str
    """The calling file and line: ``models.py:41``. Empty if unknown."""


ModuleCalls = dict[str, Calls]
"""The counts for each module, by module path with ``*`` for layer numbers (``blocks.*.attn``)."""


def calls_from_text(text: str) -> tuple[str, Calls]:
    """Convert a text from `Calls.text` back to the module path and the counts.

    Raises:
        ValueError: The text does not have the form ``6 of 12 x blocks.*``.
    """
    match = _TEXT.fullmatch(text)
    if match is None or int(match.group(1)) > int(match.group(2)):
        raise ValueError(f"{text!r} is no share of a module's calls, like '6 of 12 x blocks.*'")
    return match.group(3), Calls(int(match.group(1)), int(match.group(2)))


def count_calls(calls: Iterable[tuple[str, bool]]) -> ModuleCalls:
    """Count calls by module. Each call is a tuple: the module's path, and True if the call has the property."""
    counts: ModuleCalls = {}
    for path, has_property in calls:
        these, total = counts.get(path, (0, 0))
        counts[path] = Calls(these + has_property, total + 1)
    return counts


class KindsOfSteps:
    """The module calls, added up over all kinds of steps. Several steps of the same kind count as a single step.

    Two steps are the same kind if each module has the same share of calls with grad mode off, and the same share of calls not
    reached by backward.

    Example:
        A loop runs ten training steps and two validations. These are two kinds, so the result has the calls from one training
        step and from one validation.
    """

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[ModuleCalls, ModuleCalls]] = {}
        self._callers: dict[str, dict[Caller, None]] = {}

    def add(
        self, no_grad: ModuleCalls, no_backward: ModuleCalls, callers: Mapping[str, tuple[Caller, ...]] | None = None
    ) -> None:
        """Add the module calls from a further step.

        Args:
            no_grad: Counts of calls with grad mode off, by module path.
            no_backward: Counts of calls not reached by backward, by module path.
            callers: Each module's callers, by module path.
        """
        self._kinds.setdefault((_shares(no_grad), _shares(no_backward)), (no_grad, no_backward))
        for path, module_callers in (callers or {}).items():
            self._callers.setdefault(path, {}).update(dict.fromkeys(module_callers))

    @property
    def no_grad(self) -> ModuleCalls:
        """For each module path, how many calls ran with grad mode off."""
        return _added(no_grad for no_grad, _ in self._kinds.values())

    @property
    def no_backward(self) -> ModuleCalls:
        """For each module path, how many calls backward did not reach. Only calls with a part in the autograd graph count."""
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
    """Remove a module's entry if its share of calls with the property is the same as in the module around it.

    The result also has an entry ``(all)`` with the sum over all modules. If all calls have the property, ``(all)`` is the only
    entry, and if no call has the property, the result has no entries for modules. A function (``step()``) has an entry if at
    least one of its calls has the property. If a module has no entry, its share is the same as in the module around it that has
    an entry. If no module around it has an entry either, none of its calls has the property. A result from `outermost` is
    returned unchanged.

    Example:
        All calls to ``teacher`` and ``teacher.blocks.*`` ran with grad mode off, and the call to ``student`` with grad mode
        on. The result has entries for ``(all)`` and ``teacher``. The entry for ``teacher.blocks.*`` is removed, because
        ``teacher`` has the same share.
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
    """Return whether a path names a function (``Net.target()``) and not a module."""
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
    """Return a module's counts in the baseline, if fewer calls to the module have the property now.

    If only some calls in the baseline have the property, the counts can be compared only if the module has equally many calls
    now. If the number of calls differs, the calls with the property may have been removed and other calls added.

    Args:
        baseline: The counts in the baseline, possibly shortened by `outermost`.
        current: The counts in the current step, with an entry for every called module.
        module: The path to a module or function.

    Returns:
        The module's counts in ``baseline``. If the module has no entry, the counts for the module around it. The result is
        ``None`` if as many calls as in the baseline have the property, or if the counts cannot be compared.
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
    """Yield the paths to all modules around a module, the innermost first: ``a.b`` and ``a`` for ``a.b.c``."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
