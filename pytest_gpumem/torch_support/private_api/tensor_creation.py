"""The C++ functions that create tensors, and torch's numbers for dtypes.

With these functions, the dtype and shape of an allocation are known in C++, even if no Python object ever refers to its tensor.
"""

from __future__ import annotations

import ctypes
import math
import platform
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

_EMPTY = (
    "_ZN2at6detail13empty_genericEN3c108ArrayRefIlEEPNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeE"
    "St8optionalINS1_12MemoryFormatEE"
)
_EMPTY_STRIDED = (
    "_ZN2at6detail21empty_strided_genericEN3c108ArrayRefIlEES3_PNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeE"
)
CREATION_FUNCTIONS = (_EMPTY, _EMPTY_STRIDED)
"""``at::detail::empty_generic`` and ``at::detail::empty_strided_generic``, with the types of their arguments."""
_DTYPE = "aoti_torch_dtype_"
"""The start of the names of torch's C functions that return a dtype's number. They are a stable interface of torch."""


class NewTensor(NamedTuple):
    """A tensor for which memory was allocated."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """The bytes of all elements. If an allocation has other bytes, it is not only for this tensor."""


@cache
def creation_functions() -> tuple[int, int] | None:
    """Return the addresses of `CREATION_FUNCTIONS`. ``None`` if the installed torch does not have them.

    How C++ passes their arguments is known only on x86-64.
    """
    import torch

    if platform.machine() != "x86_64":
        return None
    try:
        library = ctypes.CDLL(torch._C.__file__)
        empty, empty_strided = (getattr(library, name) for name in CREATION_FUNCTIONS)
    except (OSError, AttributeError):
        return None
    return _address(empty), _address(empty_strided)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@cache
def dtypes() -> Mapping[int, torch.dtype]:
    """Return the dtypes by torch's numbers for them. A dtype without a known number is left out."""
    import torch

    library = ctypes.CDLL(torch._C.__file__)
    by_number: dict[int, torch.dtype] = {}
    for dtype in list(vars(torch).values()):
        function = getattr(library, _DTYPE + _name(dtype), None) if isinstance(dtype, torch.dtype) else None
        if function is not None:
            by_number[function()] = dtype
    return by_number


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_without_memory() -> Iterator[NewTensor]:
    """Create a tensor with each of `CREATION_FUNCTIONS`, and then return its dtype and shape. They have no elements."""
    import torch

    torch.empty((0, 3), dtype=torch.int16, device="cpu")
    yield _new_tensor(torch.int16, (0, 3))
    torch.empty_strided((7, 0), (1, 7), dtype=torch.float64, device="cpu")
    yield _new_tensor(torch.float64, (7, 0))


def _new_tensor(dtype: torch.dtype, shape: Sequence[int]) -> NewTensor:
    return NewTensor(_name(dtype), tuple(shape), math.prod(shape) * dtype.itemsize)


def new_tensor(number: int, shape: Sequence[int]) -> NewTensor | None:
    """Return a new tensor from the number for its dtype. ``None`` if the number is unknown."""
    dtype = dtypes().get(number)
    return None if dtype is None else _new_tensor(dtype, shape)
