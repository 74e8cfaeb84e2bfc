"""C++ frames in the CUDA caching allocator's history: operators and autograd nodes.

torch can record each allocation's C++ stack. Functions that a library exports have names there, for example
``at::_ops::mm::call(at::Tensor const&, at::Tensor const&)`` and
``torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor, ...>&&)``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODE, _DLADDR = "TORCH_SYMBOLIZE_MODE", "dladdr"
_GATHER = "torch::CapturedTraceback::gather("
_OPERATOR = re.compile(r"at::_ops::(\w+)::call\(")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply\(")
_ENGINE = "torch::autograd::Engine::evaluate_function("
_PYTHON = "_PyEval_EvalFrameDefault"
_OF_PYTHON = "PyNode"
"""A `torch.autograd.Function`'s node. Its class has no name in a C++ frame."""
CALLS_OPERATOR = ("torch", "_ops.py", "__call__")
"""The folder, file and Python function through which ``torch.ops.aten.mm(...)`` calls an operator. C++ frames do not name this
operator."""
_UNKNOWN = "??"
_CAST = "at::autocast::cached_cast("
_WORKSPACE = re.compile(r"at::cuda::get\w*Blas\w*\(")


def naming_native_frames(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which torch names C++ functions without another program.

    By default, torch starts ``addr2line`` for the names, which needs seconds. A process must start with the variables, because
    setting a variable later may crash other threads that read variables in C.

    Args:
        environment: The process's other environment variables. If they have chosen a way, the result is empty.
    """
    return {} if _MODE in environment else {_MODE: _DLADDR}


def names_native_frames() -> bool:
    """Return whether torch can record C++ stacks, and name their functions without another program.

    This needs the variables from `naming_native_frames`. torch reads them once.
    """
    import torch

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False  # torch would warn
    if os.environ.get(_MODE) != _DLADDR:
        return False
    try:
        gathered = torch._C._profiler.gather_traceback(python=False, script=False, cpp=True)
        (frames,) = torch._C._profiler.symbolize_tracebacks([gathered])
    except Exception:  # noqa: BLE001 -- another release may raise anything
        return False
    files = [frame["filename"] for frame in frames if frame["name"].startswith(_GATHER)]
    return any(file != _UNKNOWN and is_library(file) for file in files)


def is_library(file: str) -> bool:
    """Return whether a frame's file is a library or a program. For a Python frame, this is the source file."""
    return file == _UNKNOWN or re.search(r"\.so(\.\d+)*$", file) is not None or file in _programs()


@cache
def _programs() -> frozenset[str]:
    names = (sys.executable, *sys.orig_argv[:1], "/proc/self/exe")
    return frozenset(path for name in names for path in (name, os.path.realpath(name)))


@cache
def operator_in(name: str) -> str | None:
    """Return the operator that a C++ function calls: ``aten::mm``. ``None`` if this function calls none.

    Args:
        name: The function with its arguments: ``at::_ops::mm::call(at::Tensor const&, at::Tensor const&)``.
    """
    match = _OPERATOR.match(name)
    return None if match is None else _operators().get(match[1])


@cache
def runs_node(name: str) -> bool:
    """Return whether a C++ function runs an autograd node in backward."""
    return name.startswith(_ENGINE) or _NODE.match(name) is not None


def node_in(name: str) -> str:
    """Return the autograd node that a C++ function runs: ``MmBackward0``. Empty if the function does not tell the node."""
    match = _NODE.match(name)
    return "" if match is None or match[1] == _OF_PYTHON else match[1]


def runs_python(name: str) -> bool:
    """Return whether a C function runs Python code."""
    return name == _PYTHON


def casts_for_autocast(name: str) -> bool:
    """Return whether a C++ function casts an operator's argument to another dtype for autocast."""
    return name.startswith(_CAST)


@cache
def gets_workspace(name: str) -> bool:
    """Return whether a C++ function allocates a cuBLAS workspace: ``at::cuda::getCurrentCUDABlasHandle(bool)``."""
    return _WORKSPACE.match(name) is not None


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def native_frame(address: int) -> dict[str, Any]:
    """Return the function at a return address as a frame, in the form of those in torch's history."""
    # A function may end with its last call, so the return address may be in the next function.
    file, name = symbol_at(address - 1)
    # The C library names the program by its first word, which a process may change: `VLLM::EngineCore`.
    return {"filename": file if is_library(file) else _UNKNOWN, "line": 0, "name": name}


@cache
def symbol_at(address: int) -> tuple[str, str]:
    """Return the library at an address, and the function or class there. Each is ``??`` if the library does not export it."""
    import torch

    symbol = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)):
        return _UNKNOWN, _UNKNOWN
    file, name = (os.fsdecode(text) if text else _UNKNOWN for text in (symbol.file, symbol.name))
    return file, getattr(torch._C, "_demangle", str)(name)


@cache
def _operators() -> dict[str, str]:
    """Return all operators by their names in C++: ``aten::add`` for ``add_Tensor``."""
    import torch

    full_names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name.removeprefix("aten::").replace(".", "_"): name.partition(".")[0] for name in full_names}
