"""Kernels that Triton compiled, on an emulated GPU: tensors that one may have written to are no longer known.

Which of its arguments a kernel writes to is told by what Triton compiled it from (TTIR), or by Inductor's names of them. It
is found in the frames that launch it. Of kernels that others launch nothing is told.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import sys
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulation.load import current_emulation

if TYPE_CHECKING:
    from pytest_gpumem.host_values.mode import HostValues

_NAME = re.compile(r"%[\w$.#-]+")
_ARGUMENT = re.compile(r"(%[\w$.-]+): ([^\s,{)]+)")
_DEFINED = re.compile(r"^(%[\w$.-]+)(?::\d+)? = (.*)")
_INITIAL = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")
_WRITES = re.compile(r"^tt\.(\w*store|atomic_\w+|descriptor_(reduce|scatter)|call|elementwise_inline_asm)\b")
_COMPILED_BY = ("triton.", "torch._inductor.")
_OF_INDUCTOR = "out_ptr"
"""Part of the names of arguments that Inductor's kernels write to: ``out_ptr0``, ``in_out_ptr1``."""


_TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_kept: list[object] = []
"""The callback of C++, kept for as long as the process."""


def forget_what_kernels_write(mode: HostValues) -> None:
    """Have the mode forget, for good, the values of tensors that kernels which are launched may write to."""
    written: dict[int, tuple[int, ...]] = {}

    def launched(function: int, arguments: Any) -> None:
        positions = written.get(function)
        if positions is None:
            positions = written[function] = written_by(function)
        for at in positions:
            mode.forget_at(ctypes.c_uint64.from_address(arguments[at]).value)

    emulation = current_emulation()
    if emulation is not None:
        told = _TELL(launched)
        _kept.append(told)
        tell = emulation.runtime.gpumem_tell_of_launches
        tell(told)
        atexit.register(tell, None)


def written_by(function: int) -> tuple[int, ...]:
    """Return the positions of a kernel's arguments that it writes to, while it is being launched.

    Args:
        function: The driver's handle of it.
    """
    for frame, _ in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        for value in list(frame.f_locals.values()):
            if not type(value).__module__.startswith(_COMPILED_BY) or getattr(value, "function", None) != function:
                continue
            text = getattr(value, "asm", {}).get("ttir")
            return written_arguments(text) if isinstance(text, str) else _written_of_inductor(value)
    return ()


def _written_of_inductor(kernel: Any) -> tuple[int, ...]:
    """Return the same of a kernel that Inductor launches by itself."""
    constants = set(getattr(kernel, "full_constexprs", ()))
    names = [name for at, name in enumerate(getattr(kernel, "arg_names", ())) if at not in constants]
    return tuple(at for at, name in enumerate(names) if _OF_INDUCTOR in name)


def written_arguments(ttir: str) -> tuple[int, ...]:
    """Return the positions of the arguments of a kernel that it writes to, or to what is at an offset from it.

    Args:
        ttir: Triton's intermediate representation of the kernel, as text.
    """
    lines = [line.strip() for line in ttir.splitlines()]
    begins = [at for at, line in enumerate(lines) if line.startswith("tt.func public")]
    if not begins:
        return ()
    arguments: list[tuple[str, str]] = _ARGUMENT.findall(lines[begins[0]])
    if any("tensordesc" in kind for _, kind in arguments):
        return ()  # it is several arguments to the driver
    reached = _stored_to(lines[begins[0] + 1 :])
    return tuple(at for at, (name, kind) in enumerate(arguments) if name in reached and kind.startswith("!tt.ptr"))


def _stored_to(lines: list[str]) -> set[str]:
    """Return the values by which something is stored, and all that these are made of: not what is loaded."""
    made_of: dict[str, set[str]] = {}
    stored: list[str] = []
    loops: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _DEFINED.match(line)
        name, rest = (found[1], found[2]) if found else ("", line)
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
        one = stored.pop()
        if one not in reached:
            reached.add(one)
            stored += made_of.get(one, ())
    return reached


def _connect(made_of: dict[str, set[str]], result: str, inner: list[str], values: list[str]) -> None:
    """Note that each of a loop's results, and of its variables, may be the value that it begins with or goes on with."""
    for at, value in enumerate(values):
        for name in (f"{result}#{at}", *([result] if len(values) == 1 else []), *inner[at : at + 1]):
            made_of.setdefault(name, set()).add(value)
