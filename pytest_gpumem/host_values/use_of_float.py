"""Find the use of a float by the instructions that follow: a branch, an order, an integer. Pure.

A number is followed through its expression, through variables of its function, and to the function that it is returned to.
Nothing is run: what may be made of it counts, whether this call comes to it or not.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from pytest_gpumem.host_values.operand_stack import LEAVES, StackCell, Step, steps

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from pytest_gpumem.host_values.reads import Use

_OF_CALLS: dict[str, Use] = {
    **dict.fromkeys(("int", "round", "floor", "ceil", "trunc", "range"), "integer"),
    # Of a size: `torch.arange(number + 3)`, `interpolate(x, scale_factor=number)`.
    **dict.fromkeys(("arange", "interpolate"), "integer"),
    **dict.fromkeys(("sorted", "sort"), "order"),
    **dict.fromkeys(("min", "max"), "branch"),
}
"""Uses that functions make of a float that they are given."""
_OF_FINITE = frozenset({"isnan", "isinf", "isfinite", "len", "isinstance", "type", "id"})
"""Functions that ask whether a float is finite, which uncomputed ones are taken to be, or that do not look at it."""
_OF_NUMBERS = frozenset(
    {"abs", "float", "min", "max", "sum", "pow", "exp", "log", "log2", "log10", "sqrt", "mean", "round", "elapsed_time"}
)
"""Functions that make a number of numbers."""
_TEXTS = frozenset({"str", "repr", "format"})
_ORDER: tuple[Use, ...] = ("kept", "branch", "order", "integer")
"""Uses in rising order of importance."""
_MOST_CALLERS = 4
"""Functions to which a number is followed that it is returned to."""
NUMBER, LIST, TEXT, PART = "number", "list", "text", "part"
"""Kinds of cells: the number or what is computed of it, a list of such, its text, or something else that is made of it.

The last is followed to the end of its expression only.
"""


def use_of_comparison(frame: FrameType | None) -> Use:
    """Return what a comparison is for that ``frame`` is at: a branch, or an order, where a function of C compares."""
    return "branch" if frame is None else _of_comparison(frame.f_code, frame.f_lasti)


def use_of_conversion(frame: FrameType | None, kind: str = NUMBER) -> Use:
    """Return what becomes of a tensor that ``frame`` makes a number or text of, as far as its code and its callers' show."""
    use: Use = "kept"
    for number in range(_MOST_CALLERS):
        if frame is None:
            break
        found, returned = _of_conversion(frame.f_code, frame.f_lasti, kind, is_returned=number > 0)
        use = _stronger(use, found)
        if returned is None:
            break
        # Of a lambda it is perhaps a key to sort by.
        use = _stronger(use, "branch") if frame.f_code.co_name == "<lambda>" else use
        frame, kind = frame.f_back, returned
    return use


def _stronger(one: Use, other: Use) -> Use:
    return max(one, other, key=_ORDER.index)


@lru_cache(maxsize=1024)
def _of_comparison(code: CodeType, at: int) -> Use:
    instructions = list(dis.get_instructions(code))
    at = _of_call(instructions, at)
    before = [one for one in instructions if one.offset < at]
    here = next((step for step in steps(instructions) if step.instruction.offset == at), None)
    if here is None or not here.instruction.opname.startswith("CALL"):
        return "branch"
    callee = here.callee()
    names = {*code.co_names} if callee is None else {callee}
    if names & {"min", "max"} and not names & {"sorted", "sort"} and not _has_key(code, before):
        return "branch"
    return "order"


@lru_cache(maxsize=1024)
def _of_conversion(code: CodeType, at: int, kind: str, *, is_returned: bool) -> tuple[Use, str | None]:
    """Return what becomes of what the instruction at an offset makes, and as what it is returned, if it is.

    Args:
        code: A function's.
        at: The offset.
        kind: What the instruction makes, or is given.
        is_returned: It calls a function that returns that; else one that makes a number or text, and may return another thing.
    """
    instructions = list(dis.get_instructions(code))
    at = _of_call(instructions, at)
    walk = _Walk(at, kind, is_returned)
    for step in steps(instructions):
        walk.take(step)
    # Once more through the loop that it is in, for what its variables are at the begin of the next pass.
    backward = [
        one.argval for one in instructions if one.offset > at and "JUMP" in one.opname and one.argval is not None
    ]
    begin = min((target for target in backward if isinstance(target, int) and target <= at), default=at)
    for step in steps(one for one in instructions if begin <= one.offset < at):
        walk.take(step)
    return walk.use, walk.returned


@dataclass(eq=False)
class _Walk:
    """Walk over a function's instructions that follows one number."""

    at: int
    kind: str
    is_returned: bool
    use: Use = "kept"
    returned: str | None = None
    _variables: dict[str, str] = field(default_factory=dict)
    _waiting: dict[int, dict[str, str]] = field(default_factory=dict)
    """Variables where a jump leads."""
    _has_left: bool = False
    _begun: bool = False

    def take(self, step: Step) -> None:
        one = step.instruction
        if one.offset == self.at and not self._begun:
            self._begun = True
            self._begin(step)
        elif self._begun:
            waiting = self._waiting.pop(one.offset, None)
            if waiting is not None:
                self._variables = waiting if self._has_left else waiting | self._variables
            self._follow(step)
            if "JUMP" in one.opname and isinstance(one.argval, int) and one.argval > one.offset:
                self._waiting[one.argval] = self._waiting.get(one.argval, {}) | self._variables
            self._has_left = one.opname.startswith(LEAVES)

    def _begin(self, step: Step) -> None:
        callee = step.callee()
        if callee in _OF_CALLS and not _keeps_digits(step, callee):
            self._found(_OF_CALLS[callee])
        elif callee not in _OF_FINITE:
            makes_it = self.is_returned or callee is None or callee in (_TEXTS if self.kind == TEXT else _OF_NUMBERS)
            _mark(step.put[-1:], self.kind if makes_it else PART if self.kind == NUMBER else None)

    def _found(self, use: Use) -> None:
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
        """Note what an instruction makes of what is followed, and follow its result."""
        if name.startswith("CALL"):
            self._call(step, kinds)
        elif name in ("COMPARE_OP", "CONTAINS_OP"):
            if LIST not in kinds and not _asks_whether_finite(step):
                self._found("branch")
        elif "JUMP" in name and "_IF_" in name:
            if "NONE" not in name and not {NUMBER, PART}.isdisjoint(kinds):
                self._found("branch")
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
            self._found(use)
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
        """Note which variables hold what is followed."""
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
    """Return whether a comparison is one of a number with itself, or with infinity."""
    names = [cell.name for cell in step.taken]
    return (len(set(names)) == 1 and names[0] is not None) or not {"inf", "nan", "infty"}.isdisjoint(names)


def _kind_of_result(step: Step, name: str, kinds: list[str]) -> str | None:
    """Return what an instruction makes of what is followed, but calls and comparisons."""
    first = kinds[0]
    if name in ("TO_BOOL", "GET_ITER", "CONVERT_VALUE", "UNARY_NOT"):
        return first
    if name.startswith("FORMAT"):
        return TEXT if first == NUMBER else PART
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and step.instruction.argrepr == "[]"):  # the latter from 3.14 on
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
    """Return whether a call is ``round(number, digits)``, which is no integer."""
    return callee == "round" and (step.instruction.arg or 0) > 1


def _of_call(instructions: list[dis.Instruction], at: int) -> int:
    """Return the offset of the call that a frame is at, which may be at its caches, or at what comes before it in 3.11."""
    index = max((number for number, one in enumerate(instructions) if one.offset <= at), default=None)
    if index is None:
        return at
    return instructions[index + 1 if instructions[index].opname == "PRECALL" else index].offset


def _has_key(code: CodeType, before: list[dis.Instruction]) -> bool:
    """Return whether the call that comes next has an argument called ``key``."""
    named = [
        code.co_consts[one.arg]
        for one in before[-3:]
        if one.opname in ("KW_NAMES", "LOAD_CONST") and one.arg is not None
    ]
    return any(isinstance(one, tuple) and "key" in one for one in named)
