"""Find modules whose calls autograd records now, and did not record in the baseline: a lost ``no_grad`` or ``detach``. Pure.

Such a module now saves tensors for backward, so the rows with these tensors grow. If a module and the modules inside it have
changed, the cause is the call to the outermost module. A report describes this change in a sentence above the rows.

Example: a distillation loop loses ``with torch.no_grad():`` around ``teacher(x)``. Rows of ``teacher.blocks.*`` grow. The
sentence is ``Grad mode was off in `teacher` (called at models.py:41) in the baseline, and is on now: autograd keeps its
activations for backward.``
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.values.module_calls import Calls, is_function, no_longer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.facts.values.composition import Composition, Row
    from pytest_gpumem.facts.values.module_calls import Caller

Kind = Literal["no_grad", "no_backward"]
KINDS: tuple[Kind, ...] = ("no_grad", "no_backward")
_MOST_LINES = 3
_AND = " and "
_KEPT = "autograd keeps {} activations for backward"
_OF_THE_GRAPH = frozenset({"activation", "gradient", "optimizer state", "temporary"})
"""Categories whose tensors can exist because autograd records calls: in its graph, in backward or in the optimizer."""


@dataclass(frozen=True, slots=True)
class GraphChange:
    """A module or function whose calls autograd records now, and did not record in the baseline."""

    kind: Kind
    """``no_grad`` if grad mode was off, ``no_backward`` if grad mode was on and backward did not reach the module."""
    module: str
    """The outermost module's path, with ``*`` for layer numbers: ``teacher``. For code outside modules, a function: ``step()``.

    If two changed functions are called by the same function, both are named: ``left() and right()``.
    """
    lines: tuple[str, ...]
    """The lines that call the module: ``models.py:41``. If only some calls changed, some of these lines may be unchanged. If
    only a part of a function changed, these are the lines in this part."""
    before: Calls
    """The number of calls to the module that autograd did not record in the baseline, and the number of all calls to the
    module: ``[6, 12]``.

    A baseline omits a module if its share of such calls is the same as in the module around it. The numbers then count the
    calls to the module around it, or the calls to all modules together.
    """
    now: Calls
    """The number of calls to the module that autograd does not record in this step, and the number of all calls to the module:
    ``[0, 12]``."""
    within: tuple[str, ...] = ()
    """The modules with growing rows: ``teacher.blocks.*``. For a function, the lines with growing rows."""
    removed: str = ""
    """The removed code that is the cause: ``hidden.detach()`` or ``@torch.no_grad()``. Empty if the cause is not known."""

    @property
    def sentence(self) -> str:
        """The change in a sentence.

        Example: ``Grad mode was off in `teacher` (called at models.py:41) in the baseline, and is on now: autograd keeps its
        activations for backward.``
        """
        return (
            self._sentence
            if not self.removed
            else f"{self._sentence.removesuffix('.')}, because `{self.removed}` is gone."
        )

    @property
    def _sentence(self) -> str:
        whose = "their" if _AND in self.module else "its"
        if is_function(self.module):
            part = "a part of " if self.is_of_a_part else ""
            change = "and is on in more of it now" if self.now.these else "and is on now"
            module = f"{part}{self._named}{self._called_at(is_partial=False)}"
            return f"Grad mode was off in {module} in the baseline, {change}: {_KEPT.format(whose)}."
        is_partial = bool(self.before.others or self.now.these)
        share = f"{self.before.these} of {self.before.total}" if self.before.others else "all"
        calls = f"{share} calls of " if is_partial else ""
        module = f"{calls}{self._named}{self._called_at(is_partial=is_partial)}"
        now_clause = f"{self.now.these or 'none'} of {self.now.total} now"
        if self.kind == "no_grad":
            change = f"and in {now_clause}" if is_partial else "and is on now"
            return f"Grad mode was off in {module} in the baseline, {change}: {_KEPT.format(whose)}."
        change = f"and does not reach {now_clause}" if is_partial else "and does now"
        return f"Backward did not reach {module} in the baseline, {change}: {whose} activations are kept until then."

    @property
    def _named(self) -> str:
        return _AND.join(f"`{module}`" for module in self.module.split(_AND))

    def explains(self, row: Row) -> bool:
        """Return whether the growth of a row follows from this change."""
        return row.category in _OF_THE_GRAPH and not {row.module, _line(row)}.isdisjoint(self.within)

    @property
    def is_of_a_part(self) -> bool:
        """True if the baseline turned grad mode off in only a part of a function."""
        return is_function(self.module) and bool(self.before.others)

    def _called_at(self, *, is_partial: bool) -> str:
        if not self.lines:
            return ""
        shown = list(self.lines[:_MOST_LINES])
        more = len(self.lines) - len(shown)
        shown += [counted(more, "other line")] if more else []
        # A baseline stores no callers. So if only some calls changed, it is unknown which lines made the changed calls.
        last = " or " if is_partial else " and "
        return f" ({'' if self.is_of_a_part else 'called '}at {last.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))})"


@dataclass(frozen=True)
class GraphChanges:
    """Finds the modules and functions whose calls autograd records now, and did not record in the baseline."""

    before: Composition
    after: Composition
    callers: Mapping[str, Sequence[Caller]]
    function_at: Mapping[str, str]

    def of_rows(self, rows: Iterable[Row]) -> tuple[GraphChange, ...]:
        """Return the graph changes that made these rows grow. Only the outermost changed modules and functions are named."""
        places: dict[GraphChange, set[str]] = {}
        for row in rows:
            for change in self._around(row):
                places.setdefault(change, set()).add(_line(row) if is_function(change.module) else row.module)
        changes = self._joined(replace(change, within=tuple(sorted(within))) for change, within in places.items())
        return tuple(sorted(changes, key=lambda change: (change.module, change.kind)))

    def _joined(self, changes: Iterable[GraphChange]) -> Iterator[GraphChange]:
        """Join the graph changes within the same function: in modules that it calls, and in parts of the function itself.

        Example:
            ``step()`` loses a ``no_grad`` around ``teacher(x).softmax(-1)``. So there are two graph changes: the module
            ``teacher``, and a part of ``step()``. The joined change names the call to ``teacher``, because this call says more
            than "a part of ``step()``". If the function calls several changed modules, the joined change names ``step()``.
        """
        groups: dict[tuple[Kind, str], list[GraphChange]] = {}
        for change in changes:
            around = "" if change.is_of_a_part else self._function_around(change)
            groups.setdefault((change.kind, around or change.module), []).append(change)
        for (kind, function), group in groups.items():
            called = [change for change in group if change.module != function]
            named = called if len(called) == 1 else [*self._change(kind, function)] if called else group
            if not named:
                yield from _merged(called)
                continue
            within = {place for change in group for place in change.within}
            lines = {line for change in called for line in change.lines}
            lines |= {line for change in group if change.module == function for line in change.within}
            for change in named:
                at = tuple(sorted(lines)) if change.is_of_a_part else change.lines
                yield replace(change, within=tuple(sorted(within)), lines=at)

    def _function_around(self, change: GraphChange) -> str:
        """Return the function with all calls to a changed module, or an empty text if several functions call the module."""
        functions = {self.function_at.get(line, "") for line in change.lines}
        return functions.pop() if len(functions) == 1 else ""

    def explain(self, row: Row) -> bool:
        """Return whether the growth of a row may follow from a graph change."""
        return any(True for _ in self._around(row))

    def explain_for_certain(self, row: Row) -> bool:
        """Return whether a row certainly exists because of a graph change, even if its growth is unknown.

        If only a part of a function changed, the row may come from an unchanged part of this function. So such a change proves
        nothing about the row.
        """
        return any(not change.is_of_a_part for change in self._around(row))

    def is_new(self, row: Row) -> bool:
        """Return whether a row must be new, because autograd recorded no call of its module in the baseline.

        A row with temporary tensors may be old, because code allocates temporary tensors also with grad mode off.
        """
        return row.category != "temporary" and any(not change.before.others for change in self._around(row))

    def _around(self, row: Row) -> Iterator[GraphChange]:
        if row.category not in _OF_THE_GRAPH:
            return
        kind = next((kind for kind in KINDS if row.module and self._was(kind, row.module) is not None), None)
        if kind is not None:
            for module in sorted(self._outermost(kind, row.module, frozenset())):
                yield from self._change(kind, module)
            return
        function = self.function_at.get(_line(row), "")
        if self._was("no_grad", function) is not None:
            for outer in sorted(self._outermost("no_grad", function, frozenset())):
                yield from self._change("no_grad", outer)

    def _change(self, kind: Kind, module: str) -> Iterator[GraphChange]:
        baseline_calls = self._was(kind, module)
        if baseline_calls is not None:
            lines = dict.fromkeys(caller.line for caller in self.callers.get(module, ()) if caller.line)
            yield GraphChange(kind, module, tuple(lines), baseline_calls, self._calls(kind)[module])

    def _outermost(self, kind: Kind, module: str, seen: frozenset[str]) -> set[str]:
        """Return the outermost changed modules and functions around a changed module's calls, or else the module itself.

        A function is left out if only a part of it changed, because the calls may be in another part.
        """
        callers = self.callers.get(module, ())
        around = {caller.module for caller in callers} | {self.function_at.get(caller.line, "") for caller in callers}
        around -= seen | {module, ""}
        changed = [
            outer
            for outer in around
            if (was := self._was(kind, outer)) is not None and not (is_function(outer) and was.others)
        ]
        if not changed:
            return {module}
        return {outermost for outer in changed for outermost in self._outermost(kind, outer, seen | {module})}

    def _was(self, kind: Kind, module: str) -> Calls | None:
        return no_longer(getattr(self.before, kind), self._calls(kind), module)

    def _calls(self, kind: Kind) -> Mapping[str, Calls]:
        calls: Mapping[str, Calls] = getattr(self.after, kind)
        return calls


def _merged(changes: Sequence[GraphChange]) -> Iterator[GraphChange]:
    """Merge the changes in which all calls changed into one change (``left() and right()``). Yield the others unmerged."""
    complete = [change for change in changes if not change.before.others and not change.now.these]
    yield from (change for change in changes if change not in complete)
    if complete:
        yield replace(
            complete[0],
            module=_AND.join(sorted(change.module for change in complete)),
            lines=tuple(dict.fromkeys(line for change in complete for line in change.lines)),
            before=Calls(*map(sum, zip(*(change.before for change in complete), strict=True))),
            now=Calls(*map(sum, zip(*(change.now for change in complete), strict=True))),
            within=tuple(sorted({place for change in complete for place in change.within})),
        )


def _line(row: Row) -> str:
    return row.library or row.site
