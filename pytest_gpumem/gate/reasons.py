"""Reasons for the growth of a row of a composition, from its dtype, its shape, or the rows beside it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.values.composition import item_bits
from pytest_gpumem.values.module_calls import no_longer

if TYPE_CHECKING:
    from pytest_gpumem.values.composition import Composition, Row
    from pytest_gpumem.values.module_calls import Calls

_COPYING = frozenset({"clone", "contiguous"})
_OF_THE_GRAPH = frozenset({"activation", "gradient", "optimizer state", "temporary"})
"""Categories that autograd's graph and backward add to."""


def reason(old: Row | None, new: Row | None, before: Composition, after: Composition) -> str:
    """Return a clause that says why ``old`` became ``new``; empty where that is not known, or nothing grew."""
    if new is None or new.nbytes <= (old.nbytes if old is not None else 0):
        return ""
    lost = _no_longer_recomputed(old, new, before, after)
    if lost:
        return lost
    if old is None or old.tensor == new.tensor:
        joined = _joined_the_graph(new, before, after)
        if joined:
            return joined
    if old is not None:
        return _became(old, new)
    return _appeared(new, before, after)


def _no_longer_recomputed(old: Row | None, new: Row, before: Composition, after: Composition) -> str:
    # Larger or smaller tensors, as of other micro-batches, are called less often as well.
    if new.category != "activation" or (old is not None and old.tensor != new.tensor):
        return ""
    for path, calls in before.recomputed.items():
        now = after.recomputed.get(path, 0)
        related = f"{new.module}.".startswith(f"{path}.") or path.startswith(f"{new.module}.")
        if now < calls and related:
            return f"checkpointing off: {path} was recomputed in {calls} calls, now in {now or 'none'}"
    return ""


def _joined_the_graph(new: Row, before: Composition, after: Composition) -> str:
    if new.category not in _OF_THE_GRAPH or not new.module:
        return ""
    off = no_longer(before.no_grad, after.no_grad, new.module)
    if off is not None:
        return f"grad mode was off here{_how_often(off)}"
    untouched = no_longer(before.no_backward, after.no_backward, new.module)
    return "" if untouched is None else f"backward did not come here{_how_often(untouched)}"


def _how_often(calls: Calls) -> str:
    return f" in {calls.these} of {calls.total} calls" if calls.others else ""


def _became(old: Row, new: Row) -> str:
    if old.category != new.category and new.category == "activation":
        return "no longer freed before backward"
    if old.tensor and new.tensor and old.shape == new.shape and old.dtype != new.dtype:
        wider = item_bits(new.dtype) > item_bits(old.dtype)
        return f"was {old.dtype}, now {new.dtype}" if wider else f"now {new.dtype}"
    if old.tensor != new.tensor and old.tensor and new.tensor:
        return f"was {old.tensor}, now {new.tensor}"
    if old.count != new.count:
        return f"{old.count} -> {new.count} tensors"
    return ""


def _appeared(new: Row, before: Composition, after: Composition) -> str:
    """Return why a row without a predecessor is there: a copy, another dtype, or a second tensor that is saved."""
    if new.category != "activation" or not new.tensor:
        return ""
    if new.operator in _COPYING:
        return "a copy"
    alike = [row for row in before.rows if row.module == new.module and row.category == new.category]
    saved = {row.operator for row in alike if row.tensor == new.tensor}
    for row in after.rows:
        # At the same line: elsewhere in the module, what is as large may well be something else.
        beside = (row.module, row.category, row.tensor) == (new.module, new.category, new.tensor)
        same_line = (row.site, row.library) == (new.site, new.library)
        if beside and same_line and row.operator != new.operator and row.operator in saved:
            return f"saved twice: {row.operator} saves {row.what} as well, as before"
    for row in alike:
        if row.shape == new.shape and 0 < item_bits(row.dtype) < item_bits(new.dtype):
            return f"was {row.dtype} only, now also {new.dtype}"
    return ""
