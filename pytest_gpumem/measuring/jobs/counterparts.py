"""Find a process from one run among the processes in another run. All functions are pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def counterparts(
    names: Sequence[str], candidates: Mapping[str, str], is_same: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return each process's name in another run. A process without a counterpart is left out.

    Processes running the same program are numbered by their start, so ``serve.py`` and ``serve.py 2`` may change places if a
    pool deals tasks by chance. Their figures show who is who. A process without equal figures in the other run keeps its name,
    if this name is free. A process whose name is not in the other run has no counterpart.

    Example:
        ``{"serve.py": "serve.py 2", "serve.py 2": "serve.py"}`` if ``serve.py`` has a peak of 5 GB in this run and 9 GB in the
        other run, and ``serve.py 2`` the reverse.

    Args:
        names: The processes in this run.
        candidates: The processes in the other run, each with its program (`ProcessName.program`).
        is_same: Returns whether a process in this run has the same figures as a process in the other run.
    """
    matches = {name: name for name in names if name in candidates and is_same(name, name)}
    for name in names:
        if name not in matches:
            equal = next((other for other in _free(name, candidates, matches) if is_same(name, other)), None)
            if equal is not None:
                matches[name] = equal
    for name in names:
        if name not in matches and name in candidates and name not in matches.values():
            matches[name] = name
    return matches


class Places(NamedTuple):
    """The names of processes after a comparison with baselines."""

    names: Mapping[str, str]
    """The new name of each process."""
    doubtful: Mapping[str, str]
    """For a process that keeps its name although it has the figures of another name's baseline: this other name."""


def places(programs: Mapping[str, str], is_same: Callable[[str, str], bool]) -> Places:
    """Return names with which all processes of a program have the figures in their name's baseline.

    If there are no such names, the program's processes keep their names, which follow the order of their starts. Some of them
    may have grown, and nothing shows whether they also changed places.

    Example:
        ``serve.py`` has a baseline of 5 GB, and ``serve.py 2`` of 9 GB. If they have 9 GB and 5 GB now, they change their
        names. If they have 9 GB and 6 GB, they keep them, and the place of ``serve.py`` is doubtful.

    Args:
        programs: The processes, each with its program (`ProcessName.program`).
        is_same: Returns whether a process has the same figures as a name's baseline.
    """
    times = Counter(programs.values())
    siblings = {name: program for name, program in programs.items() if times[program] > 1}
    matches = counterparts(list(siblings), siblings, is_same)
    fitting = {name: other for name, other in matches.items() if is_same(name, other)}
    grown = {program for name, program in siblings.items() if name not in fitting}
    names = {name: name if program in grown else fitting.get(name, name) for name, program in programs.items()}
    doubtful = {name: other for name, other in fitting.items() if other != names[name]}
    return Places(names, doubtful)


def _free(name: str, candidates: Mapping[str, str], matches: Mapping[str, str]) -> Iterator[str]:
    """Return the candidates that run the same program and are nobody's counterpart."""
    program = candidates.get(name)
    return (other for other in candidates if candidates[other] == program and other not in matches.values())
