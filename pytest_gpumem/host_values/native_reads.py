"""Reads of an emulated GPU's memory by C++: in derivatives, and in the kernels of operators.

The positions of what is not zero (``x[mask]`` asks for them, and so does its derivative) are computed here, while torch
allocates what they take. Every other copy to the host asks `NativeReads.asked`. If nobody has computed the bytes, the read is
told with its line, and C++ reads 0 whatever lay in memory. Example: ``torch.sparse.softmax`` reads how many rows have elements.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import warnings
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.host_values import mode as values_mode
from pytest_gpumem.host_values import watched_methods
from pytest_gpumem.host_values.host_operators import INDEXED, has_storage, on_host, on_the_same_memory, tensors_among
from pytest_gpumem.torch_support import private_api
from pytest_gpumem.torch_support.private_api import running_node_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pytest_gpumem.host_values.host_operators import Operator
    from pytest_gpumem.host_values.mode import HostValues

_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_OURS = str(Path(__file__).parents[1])
_PASSING_ON = (__file__, private_api.__file__)
_NOTED = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "_to_copy", "_to_cpu", "copy_", "_copy_from", "_foreach_copy_"}
)
"""Operators that copy to the host. The mode notes what they read, or the host's tensors that they write."""
_ANSWERS = {"normal": 1, "_linalg_check_errors": 0, "histc": 0, "_grouped_mm": 0}
"""The number that C++ reads in operators whose memory does not depend on it.

It says whether deviations and decompositions are valid, the limits of a histogram, and where the groups of a product end, in a
result of a known size. Any other operator's read of unknown values is told.
"""
_kept: list[object] = []
"""The callback of C++, kept for as long as the process."""


class NativeReads:
    """Answers to what C++ reads."""

    def __init__(self, mode: HostValues) -> None:
        self.mode = mode

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the positions of all elements of ``tensor`` that are not zero, as ``torch.nonzero``."""
        unknown = self.mode.is_unknown(tensor)
        if unknown:
            self.mode.reads.invalid(f"{_reader(_dispatched()[0])} reads values")
        if not tensor.is_cuda or not unknown:
            host = on_host(tensor)
            found = torch.nonzero_static(host, size=int(host.count_nonzero()))
        else:
            found = torch.empty((0, tensor.dim()), dtype=torch.int64)
        if not tensor.is_cuda:
            return found.t().contiguous().t()  # laid out as torch's: C++ reads its columns as they are in memory
        result = torch.empty(0, dtype=torch.int64, device=tensor.device)
        with self.mode.answer.of(len(found)):
            torch.ops.aten.nonzero.out(tensor, out=result)
        if len(found):
            on_the_same_memory(result).copy_(found)
        self.mode.note_copy(result, tensor)
        return result

    def positions_into(self, tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Write the positions to a tensor of the host."""
        found = self.positions(tensor)
        if out.shape != found.shape:
            out.resize_(found.shape).as_strided_(found.shape, found.stride())
        return out.copy_(found)

    def asked(self, to: int, at: int, nbytes: int, is_number: int) -> int:
        """Write the answer to a read of the GPU's memory by C++ in place of a copy.

        Args:
            to: The address in the host's memory that C++ copies to.
            at: The address in the GPU's memory.
            nbytes: The size of the copy.
            is_number: False if C++ copies to a tensor of the host, for example by ``infos.cpu()``.

        Returns:
            1 if the answer was written, 0 if the copy is to be made.
        """
        operator, operands = _dispatched()
        number = self._answer(operator, nbytes)
        if number is None:
            if self.mode.knows(at) or _is_part_of_values(operator, operands, at) or _is_noted(operator, is_number):
                return 0
            self.mode.reads.invalid(f"{_reader(operator)} reads values")
            number = 0
        ctypes.memset(to, 0, nbytes)
        ctypes.memmove(to, number.to_bytes(8, sys.byteorder), min(nbytes, 8))
        return 1

    def _answer(self, operator: Operator | None, nbytes: int) -> int | None:
        """Return the number that C++ reads whatever the operands are, if there is such a number."""
        if self.mode.answer.number is not None:
            return self.mode.answer.number
        if operator is not None:
            return _ANSWERS.get(operator.name)
        # In backward autograd asks by one truth whether a gradient has a number that is none.
        return 0 if nbytes == 1 and torch.is_anomaly_enabled() else None


def answer_native_reads(mode: HostValues) -> None:
    """Answer C++ for good."""
    reads = NativeReads(mode)
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel that is there already
        for device in ("CPU", "CUDA"):
            operators.impl("nonzero", reads.positions, device)
        operators.impl("nonzero.out", reads.positions_into, "CPU")
    asked = _ASK(reads.asked)
    _kept.extend((operators, asked))
    emulation = current_emulation()
    if emulation is not None:
        ask = emulation.runtime.gpumem_ask_of_reads
        ask(asked)
        emulation.runtime.gpumem_hide_a_mode()
        atexit.register(ask, None)


def _is_part_of_values(operator: Operator | None, operands: tuple[Any, ...], at: int) -> bool:
    """Return whether C++ reads a float that the operator computes with, for example the second operand of `masked_fill`."""
    if operator is None or operator.reads:
        return False
    return any(
        has_storage(tensor) and tensor.dim() == 0 and tensor.is_floating_point() and tensor.data_ptr() == at
        for tensor in tensors_among(operands)
    )


def _is_noted(operator: Operator | None, is_number: int) -> bool:
    """Return whether the mode notes what is copied: its operator or a method that is watched says so."""
    if operator is not None and (operator.name in _NOTED or operator.collective):
        return True
    if operator is None and not is_number:
        return True  # autograd moves a gradient to a leaf of the host
    return next((frame.f_code.co_filename for frame in _our_frames()), "") == watched_methods.__file__


def _dispatched() -> tuple[Operator | None, tuple[Any, ...]]:
    """Return the operator that the mode has dispatched last in this thread, if it runs, and its operands."""
    for frame in _our_frames():
        if frame.f_code.co_filename != values_mode.__file__:
            break
        seen = frame.f_locals
        # An operator that takes functions, such as `torch.cond`, is run before it is looked up.
        if frame.f_code.co_name == values_mode.HostValues.__torch_dispatch__.__name__ and "operator" in seen:
            return seen["operator"], seen["args"]
    return None, ()


def _our_frames() -> Iterator[FrameType]:
    """Yield the frames of this package that run in this thread, the innermost first, without those that pass calls on."""
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and file not in _PASSING_ON:
            yield frame


def _reader(operator: Operator | None) -> str:
    if operator is None:
        return f"backward ({running_node_name() or 'C++'})"
    return "a boolean index" if operator.name in INDEXED else operator.name.strip("_")
