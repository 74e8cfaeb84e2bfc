"""Read the stack of an allocation: its Python frames, and the operator or the autograd node from its C++ frames.

Example: the function ``at::_ops::mm::call(...)`` means the operator ``mm``. If ``MmBackward0::apply(...)`` calls this function,
the stack is from backward, and its name is ``MmBackward0``.

The names equal those in the test's own process, which come from a profiler. A name is empty if C++ frames do not show it.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.torch_support.operators import within
from pytest_gpumem.torch_support.private_api.autograd import ENGINE_RUN
from pytest_gpumem.torch_support.private_api.native_frames import (
    CALLS_OPERATOR,
    casts_for_autocast,
    gets_workspace,
    is_library,
    node_in,
    operator_in,
    runs_node,
    runs_python,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.usage import Frame

_OWN_FOLDER = str(PurePath(__file__).parents[2])
_DISPATCH = "__torch_dispatch__"
"""Our function between an operator and its kernel on an emulated GPU (`emulating/host_values/mode.py`)."""
_UNNAMED = "unnamed"
"""An operator without a name in C++ frames."""
_CHECKPOINT = ("utils", "checkpoint.py")
"""The end of the path to torch's file that recomputes checkpointed code in backward."""
_MODULES = ("modules", "module.py")
"""The end of the path to torch's file that calls a module's ``forward``."""
CREATED_NODE = "created node"
"""The action of an entry for a new node in autograd's graph. torch's own histories have no such entries."""


class Stack(NamedTuple):
    """The stack of an allocation, innermost frames first."""

    python: tuple[Frame, ...]
    native: tuple[str, ...]
    """The C++ functions, with arguments."""


class Origin(NamedTuple):
    """The code that allocates."""

    operator: str
    """The operator, or in backward the autograd node; empty if unknown."""
    in_backward: bool = False
    """True if an autograd node allocates. False if a node recomputes code from forward."""


def stack_of(frames: Iterable[Mapping[str, Any]]) -> Stack:
    """Return the stack from an entry in the allocator's history."""
    python: list[Frame] = []
    native: list[str] = []
    for frame in frames:
        if _is_library(frame["filename"]):
            native.append(frame["name"])
        else:
            python.append((str(frame["filename"]), int(frame["line"]), str(frame["name"])))
    return Stack(tuple(python), tuple(native))


_is_library = cache(is_library)


def is_workspace(stack: Stack) -> bool:
    """Return whether cuBLAS's workspace is allocated."""
    return any(map(gets_workspace, stack.native))


def origin_of(stack: Stack, *, in_module: bool, in_node: bool = False) -> Origin:
    """Return the origin of an allocation.

    Args:
        stack: The allocation's stack.
        in_module: True if a module runs. In backward, a checkpointed module runs again, and its operators are named.
        in_node: True if an autograd node is known to run. Without C++ frames, nothing else shows it.
    """
    node = next((index for index, name in enumerate(stack.native) if runs_node(name)), None)
    # A node may run a backward of its own.
    within_backward = {frame[0] for frame in takewhile(lambda frame: frame[2] != ENGINE_RUN, stack.python)}
    ends = {PurePath(file).parts[-2:] for file in within_backward}
    is_recomputed = _CHECKPOINT in ends or (in_module and _MODULES in ends)
    if node is not None and not is_recomputed:
        return Origin(node_in(stack.native[node]), in_backward=True)
    if in_node and not stack.native and not is_recomputed:
        return Origin("", in_backward=True)
    return Origin(_operator(stack.python, stack.native[:node]))


def _operator(python: Sequence[Frame], native: Sequence[str]) -> str:
    own, outer = _split_own(python)
    is_unnamed = bool(outer) and _calls_operator(outer[0])
    # Operators that Python code calls are apart from an operator around this code.
    innermost, *further = _between_python(native)
    with_operator = (stretch for stretch in further if any(map(operator_in, stretch)))
    for _ in range(sum(map(_is_dispatch, own)) - is_unnamed):
        innermost += next(with_operator, [])
    if any(map(casts_for_autocast, innermost)):
        return ""  # a copy of a weight, which autocast keeps, or of an argument
    operator = _UNNAMED if is_unnamed else ""
    for called in filter(None, map(operator_in, reversed(innermost))):
        operator = within(operator, called)
    return "" if operator == _UNNAMED else operator.removeprefix("aten::")


def _between_python(native: Sequence[str]) -> list[list[str]]:
    """Return the C++ functions between two functions that run Python code, innermost first."""
    stretches: list[list[str]] = [[]]
    for name in native:
        if runs_python(name):
            stretches.append([])
        else:
            stretches[-1].append(name)
    return stretches


def _split_own(python: Sequence[Frame]) -> tuple[Sequence[Frame], Sequence[Frame]]:
    """Split Python frames into the innermost frames from this package, with the operators that it calls, and the others."""
    count = len(list(takewhile(lambda frame: _is_own(frame) or _calls_operator(frame), python)))
    while count and not _is_own(python[count - 1]):
        count -= 1
    return python[:count], python[count:]


def _is_own(frame: Frame) -> bool:
    return frame[0].startswith(_OWN_FOLDER)


def _is_dispatch(frame: Frame) -> bool:
    return _is_own(frame) and frame[2] == _DISPATCH


def _calls_operator(frame: Frame) -> bool:
    return (*PurePath(frame[0]).parts[-2:], frame[2]) == CALLS_OPERATOR
