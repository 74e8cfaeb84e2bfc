"""Reads of values that an emulated GPU did not compute, by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_gpumem.base.units import word_form

DECIDED = "an uncomputed value decided a branch"
"""Prefix of a note on a decided branch. In strict mode the note fails a test, because the right value may need other memory."""
_MOST_LINES = 5
"""The most lines in a note."""


@dataclass(frozen=True, slots=True)
class UnknownReads:
    """The number of reads of uncomputed floats at each line (``"/path/train.py:88"``)."""

    decided: Mapping[str, int] = field(default_factory=dict)
    """Reads that decided a branch."""
    other: Mapping[str, int] = field(default_factory=dict)
    """All other reads: the use of the value is unknown, or does not affect memory."""
    routed: Mapping[str, str] = field(default_factory=dict)
    """The first line with a read from an assumed routing, by the routing's name."""

    def __add__(self, more: UnknownReads) -> UnknownReads:
        return UnknownReads(
            Counter(self.decided) + Counter(more.decided),
            Counter(self.other) + Counter(more.other),
            {**more.routed, **self.routed},
        )

    def notes(self) -> tuple[str, ...]:
        """Return notes on branches, other reads and an assumed routing, with their lines; empty without reads."""
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
    """Return the note that an uncomputed value decided a branch; ``None`` without this note."""
    return next((note for note in notes if note.startswith(DECIDED)), None)


def _listed(lines: Mapping[str, int]) -> str:
    """Return lines with their number of reads. Only the first lines are listed."""
    shown = [line if times == 1 else f"{line} ({times} times)" for line, times in list(lines.items())[:_MOST_LINES]]
    more = len(lines) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
