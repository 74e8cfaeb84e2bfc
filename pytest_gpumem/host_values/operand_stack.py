"""Stack effects of a function's instructions, in Python 3.10 to 3.15. Pure.

One pass without running anything: of loops the body once, of branches both sides. Code needs no positions, which Python 3.10
does not keep and ``-X no_debug_ranges`` leaves out.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TAKES_ALL = ("STORE_", "POP_", "DELETE_", "RETURN_VALUE", "RAISE", "LIST_", "SET_", "MAP_", "DICT_", "END_", "JUMP_IF")
"""Prefixes of instructions that put nothing in the place of what they take."""
LEAVES = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
"""Prefixes of instructions after which the next one is not run."""
_BELOW_ARGUMENTS = {"CALL_FUNCTION": 1, "CALL_FUNCTION_KW": 2, "CALL_METHOD": 2, "CALL": 2, "CALL_KW": 3}
"""Operands of a call beside its arguments: what is called, a method's object or nothing, names of arguments."""

_FIXED = {
    **dict.fromkeys(
        ("PRECALL", "KW_NAMES", "RESUME", "NOP", "EXTENDED_ARG", "CACHE", "NOT_TAKEN", "COPY_FREE_VARS"), (0, 0)
    ),
    "STORE_FAST_LOAD_FAST": (1, 1),
    "RETURN_VALUE": (1, 0),
}
"""Cells that an instruction takes and puts, where `dis` has it otherwise: from 3.14 on a return puts what it takes."""


@dataclass(eq=False, slots=True)
class StackCell:
    """A value on the stack: all that is known of it."""

    name: str | None = None
    """The last part of the name that it was loaded by."""
    constant: object = None
    kind: str | None = None
    """The value's meaning to the caller that walks over the instructions."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction with what it takes, the lowest first, and what it puts there."""

    instruction: dis.Instruction
    taken: list[StackCell]
    put: list[StackCell]
    below: list[StackCell] = field(default_factory=list)
    """The values that stay on the stack beneath."""

    def callee(self) -> str | None:
        """Return the last part of the name of what it calls, if it is a call and that has a name."""
        name = self.instruction.opname
        if not name.startswith("CALL"):
            return None
        # Before 3.11 what is called is alone, else beside a method's object or nothing, which come first in some releases.
        candidates = (
            self.taken[:1] if name.startswith("CALL_FUNCTION") and name != "CALL_FUNCTION_EX" else self.taken[:2]
        )
        return next((cell.name for cell in candidates if cell.name is not None), None)


def steps(instructions: Iterable[dis.Instruction]) -> Iterator[Step]:
    """Walk over instructions in their order. What is set on a cell that one put is seen by those that take it."""
    stack: list[StackCell] | None = []
    waiting: dict[int, list[StackCell]] = {}
    for one in instructions:
        stack = _joined(stack, waiting.pop(one.offset, None))
        name = one.opname
        if name in ("SWAP", "COPY") or name.startswith(("ROT_", "DUP_")):
            _rearrange(stack, one)
            continue
        taken_count, put_count = _effect(one)
        taken = [stack.pop() if stack else StackCell() for _ in range(taken_count)][::-1]
        put = _put(one, put_count)
        if one.opname in ("LOAD_METHOD", "LOAD_ATTR") and put_count > 1:
            put[1] = taken[0]  # a method's object
        yield Step(one, taken, put, stack)
        stack += put
        if "JUMP" in name or name in ("FOR_ITER", "SEND"):
            target = one.argval
            if isinstance(target, int) and target > one.offset:
                # The value that such a jump tests stays where it jumps.
                kept = [*stack, *taken] if name.endswith("_OR_POP") else [*stack]
                if name == "FOR_ITER" and sys.version_info < (3, 12):
                    kept = kept[:-2]  # later END_FOR takes the iterator
                waiting[target] = _joined(waiting.get(target), kept)
        if name.startswith(LEAVES):
            stack = None


def _joined(one: list[StackCell] | None, other: list[StackCell] | None) -> list[StackCell]:
    """Return the stack where two ways meet: of each depth, the cell that is something to who walks."""
    if one is None or other is None:
        return one or other or []
    shared = min(len(one), len(other))
    pairs = zip(one[len(one) - shared :], other[len(other) - shared :], strict=True)
    return [first if first.kind or not second.kind else second for first, second in pairs]


def _rearrange(stack: list[StackCell], one: dis.Instruction) -> None:
    name, depth = one.opname, one.arg or 0
    while len(stack) < max(depth, 4):
        stack.insert(0, StackCell())
    if name == "SWAP":
        stack[-1], stack[-depth] = stack[-depth], stack[-1]
    elif name == "COPY":
        stack.append(stack[-depth])
    elif name == "DUP_TOP":
        stack.append(stack[-1])
    elif name == "DUP_TOP_TWO":
        stack += stack[-2:]
    else:
        depth = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(name, depth)
        stack.insert(len(stack) - depth, stack.pop())


def _effect(one: dis.Instruction) -> tuple[int, int]:
    """Return how many cells an instruction takes, and how many it puts."""
    name = one.opname
    if name in _BELOW_ARGUMENTS:
        return (one.arg or 0) + _BELOW_ARGUMENTS[name], 1
    if name in _FIXED:
        return _FIXED[name]
    change = dis.stack_effect(one.opcode, one.arg, jump=False)
    # From 3.15 on an iterator has a place in what it goes through beside it, or nothing.
    if name in ("LOAD_ATTR", "LOAD_METHOD", "UNPACK_SEQUENCE", "UNPACK_EX", "GET_ITER"):
        return 1, change + 1
    if name.startswith(_TAKES_ALL) or ("JUMP" in name and "_IF_" in name):
        return max(-change, 0), max(change, 0)
    return (0, change) if change > 0 else (1 - change, 1) if _works(name) else (-change, 0)


def _works(name: str) -> bool:
    """Return whether an instruction without an effect on the stack's depth changes its top."""
    return not name.startswith(("JUMP", "SETUP", "MAKE_CELL", "GEN_START", "SETUP_ANNOTATIONS", "PUSH_EXC", "CHECK_"))


def _put(one: dis.Instruction, count: int) -> list[StackCell]:
    """Return new cells for what an instruction puts, with names where it loads."""
    put = [StackCell() for _ in range(count)]
    if one.opname == "BUILD_SLICE":
        put[0].constant = slice(None)  # as those are that have a constant of their own: a slice
    if not put or not one.opname.startswith(("LOAD_", "STORE_FAST_LOAD_FAST")):
        return put
    if one.opname == "LOAD_CONST":
        put[0].constant = one.argval
    elif isinstance(one.argval, tuple):
        for cell, name in zip(put, one.argval[-count:], strict=True):
            cell.name = name
    elif isinstance(one.argval, str):
        # Beside it may be nothing, where a method's object would be.
        named = put[-1] if one.opname == "LOAD_GLOBAL" and one.argrepr.startswith("NULL") else put[0]
        named.name = one.argval
    return put
