"""Simulate the operand stack while walking over a function's bytecode, for Python 3.10 to 3.15.

No bytecode is run. The walk visits each instruction once, in loops and in both branches of an ``if``. It does not use column
positions, because Python 3.10 does not store them and ``-X no_debug_ranges`` removes them.

Example: for ``a + b``, `steps` yields three steps. ``LOAD_FAST a`` puts a cell on the stack, ``LOAD_FAST b`` puts a second
cell, and ``BINARY_OP`` takes both cells and puts a new cell for the sum.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TAKES_ALL = ("STORE_", "POP_", "DELETE_", "RETURN_VALUE", "RAISE", "LIST_", "SET_", "MAP_", "DICT_", "END_", "JUMP_IF")
"""Name prefixes of instructions that pop values from the stack and push no result."""
LEAVES = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
"""Name prefixes of instructions after which the following instruction does not run."""
_BELOW_ARGUMENTS = {"CALL_FUNCTION": 1, "CALL_FUNCTION_KW": 2, "CALL_METHOD": 2, "CALL": 2, "CALL_KW": 3}
"""The number of values popped by a call in addition to its arguments: the callee, a method's object or NULL, and argument
names."""

_FIXED = {
    **dict.fromkeys(
        ("PRECALL", "KW_NAMES", "RESUME", "NOP", "EXTENDED_ARG", "CACHE", "NOT_TAKEN", "COPY_FREE_VARS"), (0, 0)
    ),
    "STORE_FAST_LOAD_FAST": (1, 1),
    "RETURN_VALUE": (1, 0),
}
"""The number of popped values and the number of pushed values, for instructions that `dis.stack_effect` does not describe well
enough. Example: ``STORE_FAST_LOAD_FAST`` pops one value and pushes one, but its stack effect is 0."""


@dataclass(eq=False, slots=True)
class StackCell:
    """A value on the simulated operand stack."""

    name: str | None = None
    """The last name in the expression for the value: ``"item"`` for ``loss.item``. ``None`` for a computed value."""
    constant: object = None
    kind: str | None = None
    """A mark that the caller of `steps` may set, for example to follow a float."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction with the stack cells that it pops (``taken``, the lowest first) and the cells that it pushes (``put``)."""

    instruction: dis.Instruction
    taken: list[StackCell]
    put: list[StackCell]
    below: list[StackCell] = field(default_factory=list)
    """All other cells, which remain on the stack while the instruction runs."""

    def callee(self) -> str | None:
        """Return the last part of the called function's name; ``None`` if the instruction calls no function with a name."""
        name = self.instruction.opname
        if not name.startswith("CALL"):
            return None
        # Since Python 3.11, the callee and a method's object (or NULL) are the first two cells, and their order depends on the
        # release.
        candidates = (
            self.taken[:1] if name.startswith("CALL_FUNCTION") and name != "CALL_FUNCTION_EX" else self.taken[:2]
        )
        return next((cell.name for cell in candidates if cell.name is not None), None)


def steps(instructions: Iterable[dis.Instruction]) -> Iterator[Step]:
    """Yield a step for each instruction, in order.

    The caller can set the ``kind`` of a cell in a step's ``put``. The later step that takes this cell has the same object in
    ``taken``, so its ``kind`` is still set.
    """
    stack: list[StackCell] | None = []
    waiting: dict[int, list[StackCell]] = {}
    for instruction in instructions:
        stack = _joined(stack, waiting.pop(instruction.offset, None))
        name = instruction.opname
        if name in ("SWAP", "COPY") or name.startswith(("ROT_", "DUP_")):
            _rearrange(stack, instruction)
            continue
        taken_count, put_count = _effect(instruction)
        taken = [stack.pop() if stack else StackCell() for _ in range(taken_count)][::-1]
        put = _put(instruction, put_count)
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and put_count > 1:
            put[1] = taken[0]  # the object whose method is called
        yield Step(instruction, taken, put, stack)
        stack += put
        if "JUMP" in name or name in ("FOR_ITER", "SEND"):
            target = instruction.argval
            if isinstance(target, int) and target > instruction.offset:
                # If an instruction such as JUMP_IF_TRUE_OR_POP jumps, the tested value remains on the stack.
                at_target = [*stack, *taken] if name.endswith("_OR_POP") else [*stack]
                if name == "FOR_ITER" and sys.version_info < (3, 12):
                    at_target = at_target[:-2]  # since Python 3.12, END_FOR pops the iterator
                waiting[target] = _joined(waiting.get(target), at_target)
        if name.startswith(LEAVES):
            stack = None


def _joined(stack: list[StackCell] | None, other_stack: list[StackCell] | None) -> list[StackCell]:
    """Return the stack at an instruction to which two paths lead.

    In each position, a cell whose ``kind`` is set is preferred.
    """
    if stack is None or other_stack is None:
        return stack or other_stack or []
    shared = min(len(stack), len(other_stack))
    pairs = zip(stack[len(stack) - shared :], other_stack[len(other_stack) - shared :], strict=True)
    return [first if first.kind or not second.kind else second for first, second in pairs]


def _rearrange(stack: list[StackCell], instruction: dis.Instruction) -> None:
    name, depth = instruction.opname, instruction.arg or 0
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


def _effect(instruction: dis.Instruction) -> tuple[int, int]:
    """Return how many values an instruction pops and pushes."""
    name = instruction.opname
    if name in _BELOW_ARGUMENTS:
        return (instruction.arg or 0) + _BELOW_ARGUMENTS[name], 1
    if name in _FIXED:
        return _FIXED[name]
    change = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    # Since Python 3.15, GET_ITER pushes two values: the iterator, and an index or NULL.
    if name in ("LOAD_ATTR", "LOAD_METHOD", "UNPACK_SEQUENCE", "UNPACK_EX", "GET_ITER"):
        return 1, change + 1
    if name.startswith(_TAKES_ALL) or ("JUMP" in name and "_IF_" in name):
        return max(-change, 0), max(change, 0)
    return (0, change) if change > 0 else (1 - change, 1) if _works(name) else (-change, 0)


def _works(name: str) -> bool:
    """Return whether an instruction that does not change the stack's depth pops the top value and pushes a new value."""
    return not name.startswith(("JUMP", "SETUP", "MAKE_CELL", "GEN_START", "SETUP_ANNOTATIONS", "PUSH_EXC", "CHECK_"))


def _put(instruction: dis.Instruction, count: int) -> list[StackCell]:
    """Return new cells for an instruction's results. If the instruction loads a variable or attribute, they get its name."""
    put = [StackCell() for _ in range(count)]
    if instruction.opname == "BUILD_SLICE":
        put[0].constant = slice(None)  # any slice: callers check only the type
    if not put or not instruction.opname.startswith(("LOAD_", "STORE_FAST_LOAD_FAST")):
        return put
    if instruction.opname == "LOAD_CONST":
        put[0].constant = instruction.argval
    elif isinstance(instruction.argval, tuple):
        for cell, name in zip(put, instruction.argval[-count:], strict=True):
            cell.name = name
    elif isinstance(instruction.argval, str):
        # LOAD_GLOBAL may push NULL before the value.
        named = put[-1] if instruction.opname == "LOAD_GLOBAL" and instruction.argrepr.startswith("NULL") else put[0]
        named.name = instruction.argval
    return put
