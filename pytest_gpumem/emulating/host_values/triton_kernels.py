"""Mark tensors as unknown if a Triton kernel may write to them, because an emulated GPU does not run the kernel.

The arguments to which a kernel writes follow from its Triton intermediate representation (TTIR), or from Inductor's names for
the arguments. Both are attributes of objects in the Python frames around the launch. Kernels launched by other libraries are
ignored.

Example: in ``tt.store %4, %7`` the pointer ``%4`` is computed from ``%out_ptr``, so the kernel writes to ``%out_ptr``.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import sys
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulating.emulation.load import current_emulation

if TYPE_CHECKING:
    from pytest_gpumem.emulating.host_values.mode import HostValues

_NAME = re.compile(r"%[\w$.#-]+")
_ARGUMENT = re.compile(r"(%[\w$.-]+): ([^\s,{)]+)")
_DEFINED = re.compile(r"^(%[\w$.-]+)(?::\d+)? = (.*)")
_INITIAL = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")
_WRITES = re.compile(r"^tt\.(\w*store|atomic_\w+|descriptor_(reduce|scatter)|call|elementwise_inline_asm)\b")
_COMPILED_BY = ("triton.", "torch._inductor.")
_OF_INDUCTOR = "out_ptr"
"""Inductor's kernels write to the arguments whose names contain this text, for example ``out_ptr0`` and ``in_out_ptr1``."""


_TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_kept: list[object] = []
"""The callback for C++ code. This reference keeps the callback alive until the process ends."""


def forget_what_kernels_write(mode: HostValues) -> None:
    """From now on, mark tensors as unknown when the program launches a Triton kernel that may write to them."""
    written: dict[int, tuple[int, ...]] = {}

    def launched(function: int, arguments: Any) -> None:
        positions = written.get(function)
        if positions is None:
            positions = written[function] = written_by(function)
        for at in positions:
            mode.notes.forget_at(ctypes.c_uint64.from_address(arguments[at]).value)

    emulation = current_emulation()
    if emulation is not None:
        callback = _TELL(launched)
        _kept.append(callback)
        set_callback = emulation.runtime.gpumem_tell_of_launches
        set_callback(callback)
        atexit.register(set_callback, None)


def written_by(function: int) -> tuple[int, ...]:
    """Return the positions of the arguments to which a kernel writes, while this thread launches the kernel.

    Args:
        function: The handle by which the CUDA driver knows the kernel.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        for value in list(frame.f_locals.values()):
            if not type(value).__module__.startswith(_COMPILED_BY) or getattr(value, "function", None) != function:
                continue
            text = getattr(value, "asm", {}).get("ttir")
            return written_arguments(text) if isinstance(text, str) else _written_of_inductor(value)
    return ()


def _written_of_inductor(kernel: Any) -> tuple[int, ...]:
    """Return the positions of the arguments to which a kernel from Inductor writes."""
    constants = set(getattr(kernel, "full_constexprs", ()))
    names = [name for at, name in enumerate(getattr(kernel, "arg_names", ())) if at not in constants]
    return tuple(at for at, name in enumerate(names) if _OF_INDUCTOR in name)


def written_arguments(ttir: str) -> tuple[int, ...]:
    """Return the positions of the pointer arguments to which a kernel writes, with or without an added offset.

    Args:
        ttir: The text of the kernel's Triton intermediate representation.
    """
    lines = [line.strip() for line in ttir.splitlines()]
    starts = [at for at, line in enumerate(lines) if line.startswith("tt.func public")]
    if not starts:
        return ()
    arguments: list[tuple[str, str]] = _ARGUMENT.findall(lines[starts[0]])
    if any("tensordesc" in kind for _, kind in arguments):
        return ()  # a tensor descriptor is passed to the driver as several arguments, so positions would be wrong
    reached = _stored_to(lines[starts[0] + 1 :])
    return tuple(at for at, (name, kind) in enumerate(arguments) if name in reached and kind.startswith("!tt.ptr"))


def _stored_to(lines: list[str]) -> set[str]:
    """Return the names of all pointers to which TTIR instructions store, and of all values from which these are computed.

    The search ends at values loaded from memory.
    """
    made_of: dict[str, set[str]] = {}
    stored: list[str] = []
    loops: list[tuple[str, list[str]]] = []
    for line in lines:
        definition = _DEFINED.match(line)
        name, rest = (definition[1], definition[2]) if definition else ("", line)
        operands = _NAME.findall(rest.split(" loc(")[0])
        if _WRITES.match(rest):
            stored += operands if rest.startswith(("tt.call", "tt.elementwise")) else operands[:1]
        elif rest.startswith("scf.yield") and loops:
            _connect(made_of, *loops[-1], operands)
        if rest.startswith("scf.") and rest.endswith("{"):
            pairs = _INITIAL.findall(rest.partition("iter_args")[2])
            loops.append((name, [inner for inner, _ in pairs]))
            _connect(made_of, *loops[-1], [first for _, first in pairs])
        elif name and not rest.startswith("tt.load"):
            made_of.setdefault(name, set()).update(operands)
        if loops and line.startswith("}") and not line.startswith("})") and not line.endswith("{"):
            loops.pop()
    reached: set[str] = set()
    while stored:
        pointer = stored.pop()
        if pointer not in reached:
            reached.add(pointer)
            stored += made_of.get(pointer, ())
    return reached


def _connect(made_of: dict[str, set[str]], result: str, inner: list[str], values: list[str]) -> None:
    """Record in ``made_of`` that a loop's results and variables can have the given (initial or yielded) values."""
    for at, value in enumerate(values):
        for name in (f"{result}#{at}", *([result] if len(values) == 1 else []), *inner[at : at + 1]):
            made_of.setdefault(name, set()).add(value)
