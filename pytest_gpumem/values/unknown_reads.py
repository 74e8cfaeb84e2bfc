"""Reads of values that an emulated GPU did not compute, by the lines that read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_gpumem.units import agreeing

DECIDED = "an uncomputed value decided a branch"
"""Prefix of a note that fails a test in strict mode: another value might have taken more memory, or less."""
_MOST_LINES = 5
"""Lines that a note names."""


@dataclass(frozen=True, slots=True)
class UnknownReads:
    """The number of times that each line (``"/path/train.py:88"``) read an uncomputed float."""

    decided: Mapping[str, int] = field(default_factory=dict)
    """Reads that decided which way the program went."""
    other: Mapping[str, int] = field(default_factory=dict)
    """All others: what became of the float could not be seen, or matters to no memory."""
    routed: Mapping[str, str] = field(default_factory=dict)
    """The first line that read what follows from an assumed routing, by the word of that."""

    def __add__(self, more: UnknownReads) -> UnknownReads:
        return UnknownReads(
            Counter(self.decided) + Counter(more.decided),
            Counter(self.other) + Counter(more.other),
            {**more.routed, **self.routed},
        )

    def notes(self) -> tuple[str, ...]:
        """Return notes on the branches, on the other reads and on an assumed routing, with their lines, if there were any."""
        found = [f"{DECIDED} at {_listed(self.decided)}"] if self.decided else []
        others = {line: times for line, times in self.other.items() if line not in self.decided}
        if others:
            count = sum(others.values())
            values = agreeing(count, "an uncomputed value was", f"{count} uncomputed values were")
            found.append(f"{values} read at {_listed(others)}")
        found += [
            f"routing={word} is assumed of choices that are not computed, read at {line}"
            for word, line in self.routed.items()
        ]
        return tuple(found)


NOTHING_READ = UnknownReads()


def decided_a_branch(notes: Iterable[str]) -> str | None:
    """Return the note of a measurement that an uncomputed value decided a branch, if one did."""
    return next((note for note in notes if note.startswith(DECIDED)), None)


def _listed(lines: Mapping[str, int]) -> str:
    """Return lines with how often each was come by, the first ones of many."""
    shown = [line if times == 1 else f"{line} ({times} times)" for line, times in list(lines.items())[:_MOST_LINES]]
    more = len(lines) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
