"""Counts of how often each line read values that an emulated GPU does not compute, and the notes about these reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_gpumem.base.units import word_form

DECIDED = "an uncomputed value decided a branch"
"""Prefix of the note about ``if loss < best:`` with an uncomputed loss. With ``--gpumem-strict`` this note fails the test,
because the program may take the other branch on a real GPU and need other memory."""
_MOST_LINES = 5
"""A note names at most this many lines."""


@dataclass(frozen=True, slots=True)
class UnknownReads:
    """Counts of how often each line (``"/path/train.py:88"``) read floats that the emulated GPU does not compute."""

    decided: Mapping[str, int] = field(default_factory=dict)
    """The number of reads that decided a branch (``if loss < best:``), by line."""
    other: Mapping[str, int] = field(default_factory=dict)
    """The number of all other reads, by line. The program used the value in a way that does not affect memory, or in an
    unknown way."""
    routed: Mapping[str, str] = field(default_factory=dict)
    """For each assumed routing (``"balanced"``), the first line that read a value which depends on the assumption."""

    def __add__(self, more: UnknownReads) -> UnknownReads:
        return UnknownReads(
            Counter(self.decided) + Counter(more.decided),
            Counter(self.other) + Counter(more.other),
            {**more.routed, **self.routed},
        )

    def notes(self) -> tuple[str, ...]:
        """Return the measurement's notes about decided branches, other reads and assumed routings; empty without reads."""
        notes = [f"{DECIDED} at {_listed(self.decided)}"] if self.decided else []
        other_reads = {line: times for line, times in self.other.items() if line not in self.decided}
        if other_reads:
            count = sum(other_reads.values())
            values = word_form(count, "an uncomputed value was", f"{count} uncomputed values were")
            notes.append(f"{values} read at {_listed(other_reads)}")
        notes += [
            f"routing={word} is assumed for choices that are not computed, read at {line}"
            for word, line in self.routed.items()
        ]
        return tuple(notes)


NOTHING_READ = UnknownReads()


def decided_a_branch(notes: Iterable[str]) -> str | None:
    """Return the note that an uncomputed value decided a branch; ``None`` if ``notes`` do not contain such a note."""
    return next((note for note in notes if note.startswith(DECIDED)), None)


def _listed(lines: Mapping[str, int]) -> str:
    """Return lines as a text, with the number of reads if a line read several times: ``"train.py:9 (2 times) and 3 more"``."""
    shown = [line if times == 1 else f"{line} ({times} times)" for line, times in list(lines.items())[:_MOST_LINES]]
    more = len(lines) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
