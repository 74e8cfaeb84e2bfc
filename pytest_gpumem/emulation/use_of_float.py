"""What a program makes of a float, by the instruction that it is at: a branch, an order, an integer. Pure."""

from __future__ import annotations

import dis
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FrameType

    from pytest_gpumem.emulation.reads import Use

_OF_CALLS: dict[str, Use] = {
    **dict.fromkeys(("int", "round", "floor", "ceil", "trunc"), "integer"),
    **dict.fromkeys(("sorted", "sort"), "order"),
    **dict.fromkeys(("min", "max"), "branch"),
}
"""What functions make of a float that they are given."""
_OF_FINITE = frozenset({"isnan", "isinf", "isfinite"})
"""Functions that ask whether a float is finite, which uncomputed ones are taken to be."""
_PASSED_OVER = frozenset({"CACHE", "TO_BOOL", "UNARY_NOT", "EXTENDED_ARG", "NOT_TAKEN"})
_HOLDING = ("CALL", "FORMAT", "BUILD_LIST", "BUILD_STRING", "BUILD_MAP")
"""How instructions begin that make something else of a float than a key to sort by."""
_ENDS = ("STORE_", "POP_TOP", "YIELD", "RETURN")
"""How instructions begin that end an expression."""


def use_of_comparison(frame: FrameType | None) -> Use:
    """Return what a comparison is for that ``frame`` is at: a branch, or an order, where a function of C compares."""
    return "branch" if frame is None else _of_comparison(frame.f_code, frame.f_lasti)


def use_of_conversion(frame: FrameType | None) -> Use:
    """Return what becomes of a tensor that ``frame`` makes a float of, as far as the expression shows."""
    return "kept" if frame is None else _of_conversion(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _of_comparison(code: CodeType, at: int) -> Use:
    before, here, _ = _around(code, at)
    if here is None or not here.opname.startswith("CALL"):
        return "branch"
    callee = _called(before, here)
    names = {*code.co_names} if callee is None else {callee}
    if names & {"min", "max"} and not names & {"sorted", "sort"} and not _has_key(code, before):
        return "branch"
    return "order"


@lru_cache(maxsize=1024)
def _of_conversion(code: CodeType, at: int) -> Use:
    before, here, after = _around(code, at)
    if here is None:
        return "kept"
    callee = _called(before, here)
    if callee in _OF_CALLS or callee in _OF_FINITE:
        return _OF_CALLS.get(callee, "kept")
    following = [one for one in after if one.opname not in _PASSED_OVER]
    if following and _is_branch(following[0]):
        return "branch"
    part_of_more = False
    for one in following:
        if one.opname.startswith(_ENDS):
            # Of a lambda it is perhaps a key to sort by.
            is_key = one.opname.startswith("RETURN") and code.co_name == "<lambda>" and not part_of_more
            return "branch" if is_key else "kept"
        if _encloses(one, here):
            use = _of_instruction([*before, here, *after], one)
            if use is not None:
                return use
            part_of_more = part_of_more or one.opname.startswith(_HOLDING)
    return "kept"


def _of_instruction(instructions: list[dis.Instruction], one: dis.Instruction) -> Use | None:
    """Return what an instruction makes of the float within its expression; ``None`` where it is still to be seen."""
    if one.opname in ("COMPARE_OP", "CONTAINS_OP") or _is_branch(one):
        return "branch"
    name = _called(instructions, one) if one.opname.startswith("CALL") else None
    return "kept" if name in _OF_FINITE else _OF_CALLS.get(name or "")


def _around(code: CodeType, at: int) -> tuple[list[dis.Instruction], dis.Instruction | None, list[dis.Instruction]]:
    """Return the instructions before an offset, the one there, and those after it."""
    instructions = list(dis.get_instructions(code))
    place = next((number for number, one in enumerate(instructions) if one.offset == at), None)
    if place is None:
        return instructions, None, []
    return instructions[:place], instructions[place], instructions[place + 1 :]


def _called(instructions: Iterable[dis.Instruction], call: dis.Instruction) -> str | None:
    """Return the last name of what an instruction calls; ``None`` where the code has no positions (Python 3.10)."""
    place = _span(call)
    if place is None:
        return None
    names = (
        one.argval
        for one in instructions
        if one.offset < call.offset and one.opname.startswith("LOAD_") and isinstance(one.argval, str)
        if (span := _span(one)) is not None and span[0] == place[0]
    )
    return next(reversed(list(names)), None)


def _has_key(code: CodeType, before: list[dis.Instruction]) -> bool:
    """Return whether the call that comes next has an argument called ``key``."""
    named = [
        code.co_consts[one.arg]
        for one in before[-3:]
        if one.opname in ("KW_NAMES", "LOAD_CONST") and one.arg is not None
    ]
    return any(isinstance(one, tuple) and "key" in one for one in named)


def _is_branch(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and "_IF_" in instruction.opname


def _encloses(outer: dis.Instruction, inner: dis.Instruction) -> bool:
    whole, part = _span(outer), _span(inner)
    return whole is not None and part is not None and whole[0] <= part[0] and part[1] <= whole[1]


def _span(instruction: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]] | None:
    positions = getattr(instruction, "positions", None)
    if positions is None or None in positions:
        return None
    return (positions.lineno, positions.col_offset), (positions.end_lineno, positions.end_col_offset)
