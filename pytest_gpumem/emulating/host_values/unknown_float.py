"""The class of the floats that a program gets in place of uncomputed values on an emulated GPU.

Example: ``loss.item()`` returns an `UnknownFloat`. ``loss.item() * 2`` is another `UnknownFloat`, ``f"{loss.item():.1e}"`` is
``"7.5e-37"``, and ``if loss.item() < 3.0`` records a branch.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_gpumem.emulating.host_values.use_of_float import TEXT, use_of_comparison, use_of_conversion

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.reads import Reads

UNKNOWN = 2.0**-120
"""The value of every uncomputed float on the host.

No program uses this number itself. So `HostValues` can recognise an uncomputed value in a tensor by this number. float32
represents this number exactly."""


class UnknownFloat(float):
    """An uncomputed float. A program can store, format and compute with it. Its methods record its uses in `reads`."""

    __slots__ = ()
    reads: ClassVar[Reads]
    """The record to which all `UnknownFloat` objects add their uses."""

    def __new__(cls, *_: object) -> UnknownFloat:  # noqa: PYI034 -- Self is new in Python 3.11
        # `statistics.mean` converts its result by ``type(argument)(result)``. So accept any argument, and ignore it.
        return float.__new__(cls, UNKNOWN)

    def __bool__(self) -> bool:
        self.reads.of_float("branch")
        return True

    def is_integer(self) -> bool:
        self.reads.of_float("branch")
        return False

    def as_integer_ratio(self) -> tuple[int, int]:
        is_mean = sys._getframe(1).f_code.co_filename == statistics.__file__  # noqa: SLF001 -- the interpreter's, documented
        self.reads.of_float("kept" if is_mean else "integer")
        return super().as_integer_ratio()

    def __int__(self) -> int:
        self.reads.of_float("integer")
        return 0

    __trunc__ = __floor__ = __ceil__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return int(self) if digits is None else self

    def __float__(self) -> float:
        # The result is an ordinary float, which records no uses. So analyse the caller's bytecode.
        self.reads.of_float(use_of_conversion(sys._getframe(1)))  # noqa: SLF001 -- the interpreter's, documented
        return UNKNOWN

    def __reduce_ex__(self, protocol: Any) -> tuple[type[float], tuple[float]]:
        return float, (UNKNOWN,)

    def __deepcopy__(self, memo: object) -> UnknownFloat:
        return self

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **named: Any) -> Any:
        """Compute a NumPy function with this float. A scalar result is an `UnknownFloat`, an array is an ordinary array."""
        numbers = (UNKNOWN if isinstance(number, UnknownFloat) else number for number in inputs)
        result = getattr(function, method)(*numbers, **named)
        if function.__name__ not in ("isnan", "isinf", "isfinite") and result.dtype == bool and result.ndim == 0:
            self.reads.of_float("branch")
        return UnknownFloat() if result.ndim == 0 and isinstance(result, float) else result

    __hash__ = float.__hash__


def _computing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compute(_: UnknownFloat, *operands: Any) -> Any:
        # Compute with 1 in place of 2**-120. A division by 0 still raises an exception, and no result overflows.
        result = original(1.0, *operands)
        if result is NotImplemented:
            return result
        return tuple(UnknownFloat() for _ in result) if isinstance(result, tuple) else UnknownFloat()

    return compute


def _writing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def write(self: UnknownFloat, *args: Any) -> Any:
        use = use_of_conversion(sys._getframe(1), TEXT)  # noqa: SLF001 -- the interpreter's, documented
        if use != "kept":
            self.reads.of_float(use)
        return original(self, *args)

    return write


def _comparing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compare(self: UnknownFloat, other: Any) -> Any:
        result = original(self, other)
        # An uncomputed float is assumed to be finite, so it equals itself and no infinity.
        is_known = other is self or (isinstance(other, float) and not math.isfinite(other))
        if result is not NotImplemented and not is_known:
            self.reads.of_float(use_of_comparison(sys._getframe(1)))  # noqa: SLF001 -- the interpreter's, documented
        return result

    return compare


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(UnknownFloat, _method, _computing(_method))
for _method in ("__neg__", "__pos__", "__abs__"):
    setattr(UnknownFloat, _method, _computing(_method))
for _method in ("__format__", "__str__", "__repr__"):
    setattr(UnknownFloat, _method, _writing(_method))
for _method in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(UnknownFloat, _method, _comparing(_method))


def is_unknown_number(value: object) -> bool:
    """Return whether a value is the number `UNKNOWN`, or a list of numbers with `UNKNOWN` among them."""
    if isinstance(value, (list, tuple)):
        # A list is searched only if it begins with a number, because searching long lists of tensors would take time.
        return bool(value) and isinstance(value[0], (int, float)) and any(map(is_unknown_number, value))
    return isinstance(value, float) and float.__eq__(value, UNKNOWN)
