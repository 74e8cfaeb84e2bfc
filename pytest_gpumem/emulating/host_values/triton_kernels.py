"""Forget the values of tensors to which a Triton kernel may write, because the kernel does not run.

A kernel's written arguments follow from its Triton intermediate representation (TTIR), or from Inductor's argument names. Both
are found in the Python frames that launch the kernel. Nothing is known about kernels launched by other libraries.

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
"""A part in the names of all arguments to which Inductor's kernels write, for example ``out_ptr0`` and ``in_out_ptr1``."""


_TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_kept: list[object] = []
"""The callback for C++, which must live as long as the process."""


def forget_what_kernels_write(mode: HostValues) -> None:
    """From now on, forget the values of tensors to which a launched kernel may write."""
    written: dict[int, tuple[int, ...]] = {}

    def launched(function: int, arguments: Any) -> None:
        positions = written.get(function)
        if positions is None:
            positions = written[function] = written_by(function)
        for at in positions:
            mode.forget_at(ctypes.c_uint64.from_address(arguments[at]).value)

    emulation = current_emulation()
    if emulation is not None:
        callback = _TELL(launched)
        _kept.append(callback)
        set_callback = emulation.runtime.gpumem_tell_of_launches
        set_callback(callback)
        atexit.register(set_callback, None)


def written_by(function: int) -> tuple[int, ...]:
    """Return the arguments' positions to which a kernel writes. The kernel is being launched in this thread.

    Args:
        function: The driver's handle for the kernel.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        for value in list(frame.f_locals.values()):
            if not type(value).__module__.startswith(_COMPILED_BY) or getattr(value, "function", None) != function:
                continue
            text = getattr(value, "asm", {}).get("ttir")
            return written_arguments(text) if isinstance(text, str) else _written_of_inductor(value)
    return ()


def _written_of_inductor(kernel: Any) -> tuple[int, ...]:
    """Return the positions of the arguments to which a kernel launched by Inductor writes."""
    constants = set(getattr(kernel, "full_constexprs", ()))
    names = [name for at, name in enumerate(getattr(kernel, "arg_names", ())) if at not in constants]
    return tuple(at for at, name in enumerate(names) if _OF_INDUCTOR in name)


def written_arguments(ttir: str) -> tuple[int, ...]:
    """Return the positions of the pointer arguments to which a kernel writes, directly or at an offset.

    Args:
        ttir: The kernel's intermediate representation in Triton, as text.
    """
    lines = [line.strip() for line in ttir.splitlines()]
    starts = [at for at, line in enumerate(lines) if line.startswith("tt.func public")]
    if not starts:
        return ()
    arguments: list[tuple[str, str]] = _ARGUMENT.findall(lines[starts[0]])
    if any("tensordesc" in kind for _, kind in arguments):
        return ()  # the driver gets several arguments for a tensor descriptor, so positions differ
    reached = _stored_to(lines[starts[0] + 1 :])
    return tuple(at for at, (name, kind) in enumerate(arguments) if name in reached and kind.startswith("!tt.ptr"))


def _stored_to(lines: list[str]) -> set[str]:
    """Return the names of the stored-to pointers, and of all values from which they are computed, except loaded values."""
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
    """Record in ``made_of`` the possible values for a loop's results and variables: initial values and yielded values."""
    for at, value in enumerate(values):
        for name in (f"{result}#{at}", *([result] if len(values) == 1 else []), *inner[at : at + 1]):
            made_of.setdefault(name, set()).add(value)
