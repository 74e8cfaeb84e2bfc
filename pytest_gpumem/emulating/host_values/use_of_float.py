"""Analyse a function's bytecode to find how it uses a float: for a branch, for an order, or as an integer.

The analysis follows the float through expressions, local variables and returns to callers. No bytecode is run, so a use counts
even if the program does not reach it.

Example: in ``best = min(best, float(loss))`` the float is an argument of ``min``, so its use is ``"branch"``. In
``range(int(float(loss)))`` the use is ``"integer"``, and in ``print(f"{float(loss):.3f}")`` the use is ``"kept"``.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from pytest_gpumem.emulating.host_values.operand_stack import LEAVES, StackCell, Step, steps

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from pytest_gpumem.emulating.host_values.reads import Use

_OF_CALLS: dict[str, Use] = {
    **dict.fromkeys(("int", "round", "floor", "ceil", "trunc", "range"), "integer"),
    # The float determines a tensor's size: `torch.arange(number + 3)`, `interpolate(x, scale_factor=number)`.
    **dict.fromkeys(("arange", "interpolate"), "integer"),
    **dict.fromkeys(("sorted", "sort"), "order"),
    **dict.fromkeys(("min", "max"), "branch"),
}
"""The use of a float as a function's argument, by the function's name."""
_OF_FINITE = frozenset({"isnan", "isinf", "isfinite", "len", "isinstance", "type", "id"})
"""Functions whose result does not depend on a float's value, because uncomputed floats are assumed to be finite."""
_OF_NUMBERS = frozenset(
    {"abs", "float", "min", "max", "sum", "pow", "exp", "log", "log2", "log10", "sqrt", "mean", "round", "elapsed_time"}
)
"""Functions whose result is a number computed from their arguments."""
_TEXTS = frozenset({"str", "repr", "format"})
_ORDER: tuple[Use, ...] = ("kept", "branch", "order", "integer")
"""All uses of a float. If a float has several uses, the last of them in this order is reported."""
_MOST_CALLERS = 4
"""A returned float is followed through at most this many functions: the converting function and its callers."""
NUMBER, LIST, TEXT, PART = "number", "list", "text", "part"
"""The kinds of stack values made from the followed float.

``NUMBER`` is the float itself, or a number computed from it. ``LIST`` is a list with such numbers, and ``TEXT`` is the float
as a string. ``PART`` is any other object, for example a tuple, and is followed only to the end of the expression."""


def use_of_comparison(frame: FrameType | None) -> Use:
    """Return how a frame uses its current comparison with an uncomputed float.

    Returns:
    ``"order"`` if the frame calls a function such as ``sorted``. ``"branch"`` in all other cases, also for ``min`` and ``max``
    without a key.
    """
    return "branch" if frame is None else _of_comparison(frame.f_code, frame.f_lasti)


def use_of_conversion(frame: FrameType | None, kind: str = NUMBER) -> Use:
    """Return how a frame and its callers use a float or string made from a tensor.

    Args:
        frame: The frame that converts the tensor, for example by ``float(loss)``.
        kind: `NUMBER` if the conversion returns a float, `TEXT` if it returns a string.

    Returns:
        The most important use (the last in `_ORDER`) in the code of this frame and its callers.
    """
    use: Use = "kept"
    for number in range(_MOST_CALLERS):
        if frame is None:
            break
        frame_use, returned = _of_conversion(frame.f_code, frame.f_lasti, kind, is_returned=number > 0)
        use = _stronger(use, frame_use)
        if returned is None:
            break
        # The result of a lambda may be the key for a sort.
        use = _stronger(use, "branch") if frame.f_code.co_name == "<lambda>" else use
        frame, kind = frame.f_back, returned
    return use


def _stronger(first: Use, second: Use) -> Use:
    return max(first, second, key=_ORDER.index)


@lru_cache(maxsize=1024)
def _of_comparison(code: CodeType, at: int) -> Use:
    instructions = list(dis.get_instructions(code))
    at = _of_call(instructions, at)
    preceding = [instruction for instruction in instructions if instruction.offset < at]
    current_step = next((step for step in steps(instructions) if step.instruction.offset == at), None)
    if current_step is None or not current_step.instruction.opname.startswith("CALL"):
        return "branch"
    callee = current_step.callee()
    names = {*code.co_names} if callee is None else {callee}
    if names & {"min", "max"} and not names & {"sorted", "sort"} and not _has_key(code, preceding):
        return "branch"
    return "order"


@lru_cache(maxsize=1024)
def _of_conversion(code: CodeType, at: int, kind: str, *, is_returned: bool) -> tuple[Use, str | None]:
    """Return how a function uses a value, and if it returns the value, the kind of the returned object.

    Args:
        code: The function's code.
        at: The offset of the instruction whose result is the value.
        kind: The value's kind, for example `NUMBER`.
        is_returned: True if the instruction calls a Python function that returns the value. False if it calls a conversion
            such as ``float``.
    """
    instructions = list(dis.get_instructions(code))
    at = _of_call(instructions, at)
    walk = _Walk(at, kind, is_returned)
    for step in steps(instructions):
        walk.take(step)
    # Analyse the enclosing loop again up to this instruction, because a variable may contain the value in the next iteration.
    backward = [
        jump.argval for jump in instructions if jump.offset > at and "JUMP" in jump.opname and jump.argval is not None
    ]
    begin = min((target for target in backward if isinstance(target, int) and target <= at), default=at)
    for step in steps(instruction for instruction in instructions if begin <= instruction.offset < at):
        walk.take(step)
    return walk.use, walk.returned


@dataclass(eq=False)
class _Walk:
    """The state of the analysis while it follows a single float through a function's instructions."""

    at: int
    kind: str
    is_returned: bool
    use: Use = "kept"
    returned: str | None = None
    _variables: dict[str, str] = field(default_factory=dict)
    _waiting: dict[int, dict[str, str]] = field(default_factory=dict)
    """The kinds of variables at the target of each forward jump, by the target's offset."""
    _has_left: bool = False
    _begun: bool = False

    def take(self, step: Step) -> None:
        instruction = step.instruction
        if instruction.offset == self.at and not self._begun:
            self._begun = True
            self._begin(step)
        elif self._begun:
            waiting = self._waiting.pop(instruction.offset, None)
            if waiting is not None:
                self._variables = waiting if self._has_left else waiting | self._variables
            self._follow(step)
            if (
                "JUMP" in instruction.opname
                and isinstance(instruction.argval, int)
                and instruction.argval > instruction.offset
            ):
                self._waiting[instruction.argval] = self._waiting.get(instruction.argval, {}) | self._variables
            self._has_left = instruction.opname.startswith(LEAVES)

    def _begin(self, step: Step) -> None:
        callee = step.callee()
        if callee in _OF_CALLS and not _keeps_digits(step, callee):
            self._record(_OF_CALLS[callee])
        elif callee not in _OF_FINITE:
            makes_it = self.is_returned or callee is None or callee in (_TEXTS if self.kind == TEXT else _OF_NUMBERS)
            _mark(step.put[-1:], self.kind if makes_it else PART if self.kind == NUMBER else None)

    def _record(self, use: Use) -> None:
        self.use = _stronger(self.use, use)

    def _follow(self, step: Step) -> None:
        name = step.instruction.opname
        kinds = [cell.kind for cell in step.taken if cell.kind]
        if name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "STORE_FAST")):
            self._store(step)
            for cell in step.put:
                cell.kind = self._variables.get(cell.name or "")
        elif name.startswith("STORE_"):
            self._store(step)
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and not kinds:
            _mark(step.put[:1], self._variables.get(f".{step.instruction.argval}"))
        elif name == "FOR_ITER":
            if step.below and step.below[-1].kind == LIST:
                _mark(step.put, NUMBER)
        elif kinds:
            self._use(step, name, kinds)

    def _use(self, step: Step, name: str, kinds: list[str]) -> None:
        """Record how an instruction uses the followed float, and follow the instruction's result."""
        if name.startswith("CALL"):
            self._call(step, kinds)
        elif name in ("COMPARE_OP", "CONTAINS_OP"):
            if LIST not in kinds and not _asks_whether_finite(step):
                self._record("branch")
        elif "JUMP" in name and "_IF_" in name:
            if "NONE" not in name and not {NUMBER, PART}.isdisjoint(kinds):
                self._record("branch")
        elif name in ("LIST_APPEND", "SET_ADD"):
            _mark(step.below[-(step.instruction.arg or 1) :][:1], LIST if NUMBER in kinds else PART)
        elif name.startswith(("RETURN_VALUE", "YIELD_VALUE")):
            self.returned = kinds[0] if kinds[0] in (NUMBER, LIST) else self.returned
        else:
            _mark(step.put, _kind_of_result(step, name, kinds))

    def _call(self, step: Step, kinds: list[str]) -> None:
        callee = step.callee()
        use = _OF_CALLS.get(callee or "")
        if use is not None and not _keeps_digits(step, callee):
            self._record(use)
        if callee in _OF_FINITE:
            return
        if callee == "append" and NUMBER in kinds:
            self._variables.update((cell.name, LIST) for cell in step.taken[1:2] if cell.name)
        if callee in _TEXTS:
            _mark(step.put, TEXT)
        elif callee in _OF_NUMBERS:
            _mark(step.put, NUMBER)
        elif TEXT not in kinds:
            _mark(step.put, PART)

    def _store(self, step: Step) -> None:
        """Update the kinds of the variables to which an instruction assigns."""
        name = step.instruction.argval
        names = name if isinstance(name, tuple) else (name,)
        taken = step.taken[::-1]
        if step.instruction.opname == "STORE_SUBSCR":
            return
        if step.instruction.opname == "STORE_ATTR":
            names, taken = (f".{name}",), step.taken[:1]
        for cell, variable in zip(taken, names, strict=False):
            if cell.kind in (NUMBER, LIST):
                self._variables[variable] = cell.kind
            else:
                self._variables.pop(variable, None)


def _asks_whether_finite(step: Step) -> bool:
    """Return whether an instruction compares a number with itself or with infinity, to check whether the number is finite."""
    names = [cell.name for cell in step.taken]
    return (len(set(names)) == 1 and names[0] is not None) or not {"inf", "nan", "infty"}.isdisjoint(names)


def _kind_of_result(step: Step, name: str, kinds: list[str]) -> str | None:
    """Return the kind of an instruction's result; ``None`` if the result is not followed.

    Other functions handle calls and comparisons.
    """
    first = kinds[0]
    if name in ("TO_BOOL", "GET_ITER", "CONVERT_VALUE", "UNARY_NOT"):
        return first
    if name.startswith("FORMAT"):
        return TEXT if first == NUMBER else PART
    if name == "BINARY_SUBSCR" or (
        name == "BINARY_OP" and step.instruction.argrepr == "[]"
    ):  # Python 3.14 has "BINARY_OP []" in place of BINARY_SUBSCR
        return _kind_of_element(step)
    if name.startswith(("BINARY_", "INPLACE_", "UNARY_")):
        if any(isinstance(cell.constant, str) for cell in step.taken):
            return TEXT  # "%.3f" % number
        return NUMBER if NUMBER in kinds else first
    return None if first == TEXT or name == "BUILD_STRING" else PART


def _kind_of_element(step: Step) -> str | None:
    first = step.taken[0].kind or TEXT
    if first == LIST:
        return LIST if isinstance(step.taken[1].constant, slice) else NUMBER
    return None if first == TEXT else PART


def _mark(cells: list[StackCell], kind: str | None) -> None:
    for cell in cells:
        cell.kind = kind


def _keeps_digits(step: Step, callee: str | None) -> bool:
    """Return whether a call is ``round(number, digits)``, because ``round`` with digits returns a float."""
    return callee == "round" and (step.instruction.arg or 0) > 1


def _of_call(instructions: list[dis.Instruction], at: int) -> int:
    """Return the offset of a frame's current call instruction.

    The frame's own offset may be inside the instruction's caches or, in Python 3.11, at the preceding ``PRECALL``.
    """
    index = max((number for number, instruction in enumerate(instructions) if instruction.offset <= at), default=None)
    if index is None:
        return at
    return instructions[index + 1 if instructions[index].opname == "PRECALL" else index].offset


def _has_key(code: CodeType, preceding: list[dis.Instruction]) -> bool:
    """Return whether the call after the ``preceding`` instructions has a keyword argument ``key``."""
    constants = [
        code.co_consts[instruction.arg]
        for instruction in preceding[-3:]
        if instruction.opname in ("KW_NAMES", "LOAD_CONST") and instruction.arg is not None
    ]
    return any(isinstance(constant, tuple) and "key" in constant for constant in constants)
