"""Track tensors with equal elements, all 0 or all 1, although some inputs were not computed.

Two assumptions make such tensors. Uncomputed floats are finite. Uncomputed token ids are not among the ids that `torch.isin`
searches for, so a text is generated up to its maximum length. Neither assumption is certain. The host may read the result as
a single truth value, and this read is recorded as an assumption. The number of true elements remains unknown.

Example: for uncomputed ``ids`` and a known end token 50256, ``torch.isin(ids, end)`` is `Constant(False, "branch")`. Reading
``torch.isin(ids, end).any().item()`` returns False, and the line is recorded as a branch decided by an uncomputed value. For
an uncomputed ``loss``, ``torch.isfinite(loss)`` is `Constant(True, "kept")`, so its read is only counted.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.host_operators import has_storage, is_exact, is_small, on_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.host_operators import Operator
    from pytest_gpumem.emulating.host_values.reads import Use

_OURS = str(Path(__file__).parents[2])
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_OF_FINITE = frozenset({"isfinite", "isnan", "isinf", "isposinf", "isneginf"})
"""Operators that check whether values are finite."""
_SAME = frozenset({"all", "any", "amax", "amin", "clone", "_to_copy"})
"""Operators whose result has the same constant as their input. This also holds for `_EXTREMES` with a single argument."""
_VALID = frozenset({"all", "_is_all_true"})
"""Operators used by `torch.distributions` to refuse invalid values."""
_ASKING = _OF_FINITE | _VALID | {"isin"}
_EXTREMES = frozenset({"max", "min"})
_BY_SIGN = {
    **dict.fromkeys(("__and__", "__iand__"), "bitwise_and"),
    **dict.fromkeys(("__or__", "__ior__"), "bitwise_or"),
}
"""Operators that inference mode does not decompose, each with the operator that torch dispatches outside this mode."""
_FILLED = {"ones": True, "ones_like": True, "new_ones": True, "zeros": False, "zeros_like": False, "new_zeros": False}
"""Operators that fill a tensor with a value. The value is known even if the tensor is too large to compute."""
_AND = frozenset({"mul", "logical_and", "bitwise_and"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(frozen=True, slots=True)
class Constant:
    """The value that all elements in a tensor have."""

    value: bool
    noted: Use | None = None
    """The use to record when the host reads the value; ``None`` if the value is certain."""


def _doubt(constant: Constant) -> int:
    return (None, "kept", "branch").index(constant.noted)


def comparison_of_floats(operator: Operator, args: tuple[Any, ...], result: object) -> Constant | None:
    """Return the result of comparing scalar tensors with floats from Python, as if Python had compared the floats.

    Args:
        operator: Any operator on the host.
        args: The operator's arguments.
        result: The operator's result.

    Returns:
        ``None`` if the operator does not compare, if the result is no scalar, or if an operand contains integers.
    """
    if operator.name not in _COMPARISONS or not isinstance(result, torch.Tensor) or result.dim() > 0:
        return None
    if any(isinstance(operand, torch.Tensor) and is_exact(operand) for operand in args):
        return None
    return Constant(bool(result), "branch")


def _validates() -> bool:
    """Return whether `torch.distributions` is validating its arguments."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))  # noqa: SLF001 -- documented
    caller_file = next((file for file in files if not file.startswith(_OURS)), "")
    return caller_file.startswith(_DISTRIBUTIONS)


class Constants:
    """Notes about constant tensors, by storage address."""

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._noted: dict[int, tuple[StorageWeakRef, Constant]] = {}

    def note(self, storage: torch.UntypedStorage, constant: Constant | None) -> None:
        """Record a whole storage's constant. ``None`` deletes the note."""
        if constant is None:
            self._noted.pop(storage.data_ptr(), None)
        else:
            self._noted[storage.data_ptr()] = StorageWeakRef(storage), constant

    def forget(self, address: int) -> None:
        """Delete the note about the storage at an address."""
        self._noted.pop(address, None)

    def noted_as(self, tensor: torch.Tensor) -> Use | None:
        """Return the use to record for reading a boolean tensor; ``None`` if the tensor is certain or not constant."""
        constant = self._of_noted(tensor) if tensor.dtype == torch.bool else None
        return None if constant is None else constant.noted

    def result(self, operator: Operator, args: tuple[Any, ...]) -> Constant | None:
        """Return the constant for an operator's result if some operands are unknown; ``None`` if it is not constant."""
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
        constant = self._of_noted(first)
        if constant is None or name in _SAME or (name in _EXTREMES and len(args) == 1):
            return constant
        negates = name == "logical_not" or (name == "bitwise_not" and first.dtype == torch.bool)
        return Constant(not constant.value, constant.noted) if negates else None

    def filled(self, operator: Operator, results: list[torch.Tensor]) -> Constant | None:
        """Return the constant for a large filled tensor with integers or booleans, such as a mask; ``None`` for other
        results.
        """
        value = _FILLED.get(operator.name)
        is_large = len(results) == 1 and is_exact(results[0]) and not is_small(results)
        return Constant(value) if value is not None and is_large else None

    def _asked(self, name: str, values: torch.Tensor, among: object) -> Constant | None:
        """Return the assumed answer to a check on unknown values; ``None`` if no answer is assumed.

        Floats are finite and valid, and no token id is in ``among``.
        """
        if name in _VALID:
            return Constant(True) if _validates() else None
        if name in _OF_FINITE:
            return Constant(name == "isfinite", "kept")
        is_answered = isinstance(among, torch.Tensor) and is_exact(values) and not self._is_unknown(among)
        return Constant(False, "branch") if is_answered else None

    def _compared(self, name: str, first: torch.Tensor, second: Any) -> Constant | None:
        constant = self._of_noted(first)
        if constant is not None and isinstance(second, (int, float)):
            return Constant(_COMPARISONS[name](int(constant.value), second), constant.noted)
        if name not in ("eq", "ne") or not self._is_unknown(first):
            return None
        same = first is second
        infinite = isinstance(second, float) and abs(second) == float("inf")
        return Constant((name == "eq") == same, "kept") if same or infinite else None

    def _combined(self, first: torch.Tensor, second: torch.Tensor, *, decides: bool) -> Constant | None:
        """Return the constant for a conjunction or disjunction between two tensors; ``None`` if the result has no constant.

        An operand with the value ``decides`` decides the result: False in a conjunction, True in a disjunction.
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

    def _of_noted(self, tensor: torch.Tensor) -> Constant | None:
        note = self._noted.get(tensor.untyped_storage().data_ptr()) if has_storage(tensor) else None
        return None if note is None or note[0].expired() else note[1]

    def _of(self, tensor: torch.Tensor) -> Constant | None:
        constant = self._of_noted(tensor)
        if constant is not None or self._is_unknown(tensor) or not is_small((tensor,)) or not tensor.numel():
            return constant
        values = on_host(tensor)
        least, most = int(values.min()), int(values.max())
        return Constant(bool(least)) if least == most and least in (0, 1) else None
