"""Find a process of one run among the processes of another run. All functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_NUMBER = re.compile(r"(?<! rank)(?<! restart) \d+$")


def counterparts(names: Sequence[str], others: Collection[str], is_same: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the name of each process in another run, by its name in this run. A process without a counterpart is left out.

    Processes of a program are numbered by their start, so ``serve.py`` and ``serve.py 2`` may change places if a pool deals
    tasks by chance. Their figures show who is who. A process without equal figures in the other run keeps its name, if this
    name is free.

    Example:
        ``{"serve.py": "serve.py 2", "serve.py 2": "serve.py"}`` if ``serve.py`` has a peak of 5 GB in this run and 9 GB in the
        other run, and ``serve.py 2`` the reverse.

    Args:
        names: The processes of this run.
        others: The processes of the other run.
        is_same: Returns whether a process of this run has the same figures as a process of the other run.
    """
    found = {name: name for name in names if name in others and is_same(name, name)}
    for name in names:
        if name not in found:
            free = (other for other in others if _program(other) == _program(name) and other not in found.values())
            equal = next((other for other in free if is_same(name, other)), None)
            if equal is not None:
                found[name] = equal
    for name in names:
        if name not in found and name in others and name not in found.values():
            found[name] = name
    return found


def new_names(names: Sequence[str], is_same: Callable[[str, str], bool]) -> dict[str, str]:
    """Return a name for each process, so that as many as possible have the figures of their name's baseline.

    Example:
        ``serve.py`` has a baseline of 5 GB, and ``serve.py 2`` of 9 GB. If they have 9 GB and 6 GB now, they change their
        names. So a single process has grown, by 1 GB.

    Args:
        names: The processes.
        is_same: Returns whether a process has the same figures as a name's baseline.
    """
    programs = Counter(map(_program, names))
    siblings = [name for name in names if programs[_program(name)] > 1]
    found = counterparts(siblings, siblings, is_same)
    for name in siblings:
        if name not in found:
            found[name] = next(
                other for other in siblings if _program(other) == _program(name) and other not in found.values()
            )
    return {name: found.get(name, name) for name in names}


def _program(name: str) -> str:
    """Return a process's name without its number: ``serve.py`` for ``serve.py 2``."""
    return _NUMBER.sub("", name)
