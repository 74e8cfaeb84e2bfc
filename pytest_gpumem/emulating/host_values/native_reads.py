"""Provide the values that torch's C++ code reads from an emulated GPU's memory, in derivatives and in kernels.

`NativeReads.positions` replaces ``torch.nonzero``, which C++ code calls for example for ``x[mask]``. Before any other copy
from the GPU to the host, CUDA's stand-in calls `NativeReads.asked`. If the bytes were not computed, the read is recorded with
the program's line, and C++ reads 0. Example: ``torch.sparse.softmax`` reads how many rows have elements.
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

from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.emulating.host_values import mode as values_mode
from pytest_gpumem.emulating.host_values import operator_call, watched_methods
from pytest_gpumem.emulating.host_values.host_operators import (
    INDEXED,
    has_storage,
    on_host,
    on_the_same_memory,
    tensors_among,
)
from pytest_gpumem.torch_support import private_api
from pytest_gpumem.torch_support.private_api.autograd import running_node_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pytest_gpumem.emulating.host_values.host_operators import Operator
    from pytest_gpumem.emulating.host_values.mode import HostValues

_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_OURS = str(Path(__file__).parents[2])
_PASSING_ON = (__file__, operator_call.__file__, str(Path(private_api.__file__).parent))
_NOTED = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "_to_copy", "_to_cpu", "copy_", "_copy_from", "_foreach_copy_"}
)
"""Operators that copy to the host. `HostValues` itself records their reads, or notes the copy as unknown."""
_ANSWERS = {"normal": 1, "_linalg_check_errors": 0, "histc": 0, "_grouped_mm": 0}
"""The number that C++ gets when it reads GPU memory in one of these operators. No read is recorded, because the operators'
memory does not depend on the number.

``normal`` reads whether the standard deviations are valid, and ``_linalg_check_errors`` whether a decomposition failed.
``histc`` reads the limits of a histogram. ``_grouped_mm`` reads the ends of groups, but the size of its result does not depend
on them."""
_kept: list[object] = []
"""The callback for C++ code, and the replaced operators. These references keep both alive until the process ends."""


class NativeReads:
    """Callbacks that torch's C++ code calls when it reads an emulated GPU's memory."""

    def __init__(self, mode: HostValues) -> None:
        self.mode = mode

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the positions of all nonzero elements in ``tensor``, as ``torch.nonzero`` does: ``int64[count, dimensions]``.

        If the tensor is unknown, the read is recorded. The result for an unknown GPU tensor is empty.
        """
        unknown = self.mode.notes.is_unknown(tensor)
        if unknown:
            self.mode.reads.invalid(f"{_reader(_dispatched()[0])} reads values")
        if not tensor.is_cuda or not unknown:
            host = on_host(tensor)
            positions = torch.nonzero_static(host, size=int(host.count_nonzero()))
        else:
            positions = torch.empty((0, tensor.dim()), dtype=torch.int64)
        if not tensor.is_cuda:
            return (
                positions.t().contiguous().t()
            )  # use torch's memory layout, because C++ reads each column from memory
        result = torch.empty(0, dtype=torch.int64, device=tensor.device)
        with self.mode.answer.of(len(positions)):
            torch.ops.aten.nonzero.out(tensor, out=result)
        if len(positions):
            on_the_same_memory(result).copy_(positions)
        self.mode.notes.note_copy(result, tensor)
        return result

    def positions_into(self, tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Write the positions of all nonzero elements to the host tensor ``out``, and return ``out``."""
        positions = self.positions(tensor)
        if out.shape != positions.shape:
            out.resize_(positions.shape).as_strided_(positions.shape, positions.stride())
        return out.copy_(positions)

    def asked(self, to: int, at: int, nbytes: int, is_number: int) -> int:
        """Write the bytes that C++ code is about to copy from GPU memory to the host, if the copy itself would be wrong.

        Args:
            to: The address on the host to which C++ copies.
            at: The address on the GPU from which C++ copies.
            nbytes: The size of the copy in bytes.
            is_number: True if C++ copies to a variable. False if it copies to a host tensor, for example in ``infos.cpu()``.

        Returns:
            1 if the bytes at ``to`` are written already. 0 if C++ must make the copy itself.
        """
        operator, operands = _dispatched()
        number = self._answer(operator, nbytes)
        if number is None:
            if (
                self.mode.notes.knows(at)
                or _is_part_of_values(operator, operands, at)
                or _is_noted(operator, is_number)
            ):
                return 0
            self.mode.reads.invalid(f"{_reader(operator)} reads values")
            number = 0
        ctypes.memset(to, 0, nbytes)
        ctypes.memmove(to, number.to_bytes(8, sys.byteorder), min(nbytes, 8))
        return 1

    def _answer(self, operator: Operator | None, nbytes: int) -> int | None:
        """Return the number that C++ reads in an operator; ``None`` if the number depends on the operands."""
        if self.mode.answer.number is not None:
            return self.mode.answer.number
        if operator is not None:
            return _ANSWERS.get(operator.name)
        # With anomaly detection, backward reads whether a gradient contains NaN, as one byte. Answer 0 for "no NaN".
        return 0 if nbytes == 1 and torch.is_anomaly_enabled() else None


def answer_native_reads(mode: HostValues) -> None:
    """From now on, provide the values that torch's C++ code reads from GPU memory."""
    reads = NativeReads(mode)
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about overridden kernels
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
    """Return whether C++ reads a scalar float operand as a value for the result, not to choose a shape or a branch.

    For example, `masked_fill` reads the value that it writes to the masked elements.
    """
    if operator is None or operator.reads:
        return False
    return any(
        has_storage(tensor) and tensor.dim() == 0 and tensor.is_floating_point() and tensor.data_ptr() == at
        for tensor in tensors_among(operands)
    )


def _is_noted(operator: Operator | None, is_number: int) -> bool:
    """Return whether `HostValues` or a function in `watched_methods` already handles a copy to the host."""
    if operator is not None and (operator.name in _NOTED or operator.collective):
        return True
    if operator is None and not is_number:
        return True  # autograd copies a gradient to a leaf on the host
    return next((frame.f_code.co_filename for frame in _our_frames()), "") == watched_methods.__file__


def _dispatched() -> tuple[Operator | None, tuple[Any, ...]]:
    """Return the innermost operator running under `HostValues` in this thread, and the operands."""
    for frame in _our_frames():
        if frame.f_code.co_filename != values_mode.__file__:
            break
        variables = frame.f_locals
        # For an operator with function arguments, such as `torch.cond`, the frame has no variable `operator`.
        if frame.f_code.co_name == values_mode.HostValues.__torch_dispatch__.__name__ and "operator" in variables:
            return variables["operator"], variables["args"]
    return None, ()


def _our_frames() -> Iterator[FrameType]:
    """Yield this package's frames in this thread, the innermost first, except in modules that only wrap calls to torch."""
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_PASSING_ON):
            yield frame


def _reader(operator: Operator | None) -> str:
    if operator is None:
        return f"backward ({running_node_name() or 'C++'})"
    return "a boolean index" if operator.name in INDEXED else operator.name.strip("_")
