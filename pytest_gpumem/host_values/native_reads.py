"""Values of an emulated GPU that C++ reads where no mode sees it: in derivatives, and in operators made of others.

The positions of what is not zero (``x[mask]`` asks for them, and so does its derivative) are computed here, while torch
allocates what they take. Any other number that C++ copies to the host in backward is told, and is 0.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import warnings
from pathlib import Path
from threading import local
from traceback import walk_stack
from typing import TYPE_CHECKING

import torch

from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.host_values import mode as values_mode
from pytest_gpumem.host_values import watched_methods
from pytest_gpumem.host_values.host_operators import on_host, on_the_same_memory
from pytest_gpumem.torch_support.private_api import running_node_name

if TYPE_CHECKING:
    from pytest_gpumem.host_values.mode import HostValues

_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_OURS = str(Path(__file__).parents[1])
_SEEING = (values_mode.__file__, watched_methods.__file__)
_PASSING = frozenset({"normal"})
"""Operators that read one truth: whether what they are given is valid."""
_kept: list[object] = []
"""The callback of C++, kept for as long as the process."""


class NativeReads:
    """Answers to what C++ reads."""

    def __init__(self, mode: HostValues) -> None:
        self.mode = mode
        self.counting = local()
        """While a thread looks for what is not zero: how many there are."""

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the positions of all elements of ``tensor`` that are not zero, as ``torch.nonzero``."""
        unknown = self.mode.is_unknown(tensor)
        if unknown:
            self.mode.reads.invalid(f"{_reader()} reads values")
        if not tensor.is_cuda or not unknown:
            host = on_host(tensor)
            found = torch.nonzero_static(host, size=int(host.count_nonzero()))
        else:
            found = torch.empty((0, tensor.dim()), dtype=torch.int64)
        if not tensor.is_cuda:
            return found.t().contiguous().t()  # laid out as torch's: C++ reads its columns as they are in memory
        result = torch.empty(0, dtype=torch.int64, device=tensor.device)
        self.counting.number = len(found)
        try:
            torch.ops.aten.nonzero.out(tensor, out=result)
        finally:
            del self.counting.number
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

    def asked(self, to: int, at: int, nbytes: int) -> int:
        """Write what C++ reads of the GPU's memory in place of a copy, and return whether that was done."""
        number = getattr(self.counting, "number", None)
        if number is None and self.mode.running in _PASSING:
            number = 1
        elif number is None and torch.is_anomaly_enabled():
            number = 0  # autograd looks for numbers that are none
        if number is None and (self.mode.knows(at) or _is_seen()):
            return 0
        if number is None:
            self.mode.reads.invalid(f"{_reader()} reads values")
        ctypes.memmove(to, (number or 0).to_bytes(nbytes, sys.byteorder), nbytes)
        return 1


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


def _is_seen() -> bool:
    """Return whether this thread runs an operator of the mode or a method that is watched, where C++ is understood."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))  # noqa: SLF001 -- documented
    return next((file in _SEEING for file in files if file.startswith(_OURS) and file != __file__), False)


def _reader() -> str:
    node = running_node_name()
    return "a boolean index" if _is_seen() or node is None else f"backward ({node})"
