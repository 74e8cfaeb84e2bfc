"""Track tensors whose elements are all 0 or all 1 ("constant"), although they follow from uncomputed values.

This is possible because of two assumptions. Uncomputed floats are finite. Uncomputed token ids are not among the end tokens in
`torch.isin`, so a text is generated up to its maximum length. Both assumptions may be wrong. So if a program reads a tensor
that depends on an assumption, the read is recorded.

Example: for uncomputed ``ids`` and a known end token 50256, ``torch.isin(ids, end)`` has the note `Constant(False, "branch")`.
Then ``torch.isin(ids, end).any().item()`` returns False, and its line is recorded as a branch decided by an uncomputed value.
For an uncomputed ``loss``, ``torch.isfinite(loss)`` has the note `Constant(True, "kept")`, so reads are only counted.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulating.host_values.host_operators import is_exact, is_small, on_host
from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.host_operators import Operator
    from pytest_gpumem.emulating.host_values.reads import Use

_OURS = str(Path(__file__).parents[2])
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_OF_FINITE = frozenset({"isfinite", "isnan", "isinf", "isposinf", "isneginf"})
"""Operators that check whether floats are finite. For uncomputed floats, the assumed answer is "finite"."""
_SAME = frozenset({"all", "any", "amax", "amin", "clone", "_to_copy"})
"""Operators whose result has the same value as a constant input. This also holds for `_EXTREMES` with a single argument."""
_VALID = frozenset({"all", "_is_all_true"})
"""Operators with which `torch.distributions` checks its arguments."""
_ASKING = _OF_FINITE | _VALID | {"isin"}
_EXTREMES = frozenset({"max", "min"})
_BY_SIGN = {
    **dict.fromkeys(("__and__", "__iand__"), "bitwise_and"),
    **dict.fromkeys(("__or__", "__ior__"), "bitwise_or"),
}
"""Operators that torch passes to a dispatch mode only in inference mode. Outside inference mode, torch passes the operator on
the right instead."""
_FILLED = {"ones": True, "ones_like": True, "new_ones": True, "zeros": False, "zeros_like": False, "new_zeros": False}
"""Operators that fill a tensor with 1 (True) or 0 (False). This value is known even if the tensor is too large for the CPU."""
_AND = frozenset({"mul", "logical_and", "bitwise_and"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A note about a tensor: all its elements have the same value."""

    value: bool
    noted: Use | None = None
    """The use to record when the program reads the value; ``None`` if the value is certain, so reads are not recorded."""


def _doubt(constant: Constant) -> int:
    return (None, "kept", "branch").index(constant.noted)


def comparison_of_floats(operator: Operator, args: tuple[Any, ...], result: object) -> Constant | None:
    """Return the note for a comparison of scalar host tensors made from Python floats.

    Reading the result is recorded as a decided branch, as for a comparison of the floats in Python.

    Args:
        operator: An operator on host tensors.
        args: The operator's arguments.
        result: The operator's result.

    Returns:
        The note. ``None`` if the operator is no comparison, the result has more than one element, or an operand has integers.
    """
    if operator.name not in _COMPARISONS or not isinstance(result, torch.Tensor) or result.dim() > 0:
        return None
    if any(isinstance(operand, torch.Tensor) and is_exact(operand) for operand in args):
        return None
    return Constant(bool(result), "branch")


def _validates() -> bool:
    """Return whether code in `torch.distributions` called the current operator."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))  # noqa: SLF001 -- documented
    caller_file = next((file for file in files if not file.startswith(_OURS)), "")
    return caller_file.startswith(_DISTRIBUTIONS)


class Constants:
    """All notes about constant tensors, by the storage's address."""

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._noted: StorageNotes[Constant] = StorageNotes()

    def note(self, storage: torch.UntypedStorage, constant: Constant | None) -> None:
        """Store the note about a storage. ``None`` deletes the note."""
        if constant is None:
            self._noted.delete(storage.data_ptr())
        else:
            self._noted.set(storage, constant)

    def forget(self, address: int) -> None:
        """Delete the note about the storage at an address."""
        self._noted.delete(address)

    def noted_as(self, tensor: torch.Tensor) -> Use | None:
        """Return the use to record when the program reads a boolean tensor; ``None`` if there is no constant to record."""
        constant = self._noted.of(tensor) if tensor.dtype == torch.bool else None
        return None if constant is None else constant.noted

    def result(self, operator: Operator, args: tuple[Any, ...]) -> Constant | None:
        """Return the note for the result of an operator with unknown operands; ``None`` if the result is not constant."""
        name = _BY_SIGN.get(operator.name) or operator.name.removesuffix("_")
        first, second = (*args, None, None)[:2]
        if not isinstance(first, torch.Tensor):
            return None
        if name in _ASKING and self._is_unknown(first):
            asked = self._asked(name, first, second)
            if asked is not None:
                return asked
        if name in _COMPARISONS and len(args) == 2:
            return self._compared(name, first, second)
        if name in _AND | _OR and isinstance(second, torch.Tensor):
            return self._combined(first, second, decides=name in _OR)
        constant = self._noted.of(first)
        if constant is None or name in _SAME or (name in _EXTREMES and len(args) == 1):
            return constant
        negates = name == "logical_not" or (name == "bitwise_not" and first.dtype == torch.bool)
        return Constant(not constant.value, constant.noted) if negates else None

    def filled(self, operator: Operator, results: list[torch.Tensor]) -> Constant | None:
        """Return the note for a large tensor that an operator fills with 0 or 1, such as a mask; otherwise ``None``."""
        value = _FILLED.get(operator.name)
        is_large = len(results) == 1 and is_exact(results[0]) and not is_small(results)
        return Constant(value) if value is not None and is_large else None

    def _asked(self, name: str, values: torch.Tensor, among: object) -> Constant | None:
        """Return the assumed result of a check on unknown values; ``None`` if no result is assumed.

        Floats are assumed to be finite and valid, and token ids not to be in ``among``.
        """
        if name in _VALID:
            return Constant(True) if _validates() else None
        if name in _OF_FINITE:
            return Constant(name == "isfinite", "kept")
        is_answered = isinstance(among, torch.Tensor) and is_exact(values) and not self._is_unknown(among)
        return Constant(False, "branch") if is_answered else None

    def _compared(self, name: str, first: torch.Tensor, second: Any) -> Constant | None:
        constant = self._noted.of(first)
        if constant is not None and isinstance(second, (int, float)):
            return Constant(_COMPARISONS[name](int(constant.value), second), constant.noted)
        if name not in ("eq", "ne") or not self._is_unknown(first):
            return None
        same = first is second
        infinite = isinstance(second, float) and abs(second) == float("inf")
        return Constant((name == "eq") == same, "kept") if same or infinite else None

    def _combined(self, first: torch.Tensor, second: torch.Tensor, *, decides: bool) -> Constant | None:
        """Return the note for ``first & second`` or ``first | second``; ``None`` if the result is not constant.

        If an operand has the value ``decides``, the result has this value too: False for ``&``, True for ``|``.
        """
        if not (is_exact(first) and is_exact(second)):
            return None
        if decides and not first.dtype == second.dtype == torch.bool:
            return None
        constants = [self._of(first), self._of(second)]
        deciding = [constant for constant in constants if constant is not None and constant.value == decides]
        if deciding:
            return min(deciding, key=_doubt)
        left, right = constants
        return None if left is None or right is None else Constant(not decides, max(left, right, key=_doubt).noted)

    def _of(self, tensor: torch.Tensor) -> Constant | None:
        constant = self._noted.of(tensor)
        if constant is not None or self._is_unknown(tensor) or not is_small((tensor,)) or not tensor.numel():
            return constant
        values = on_host(tensor)
        least, most = int(values.min()), int(values.max())
        return Constant(bool(least)) if least == most and least in (0, 1) else None
