"""Selection of the tests that a session measures. Frozen, to and from plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected tests, as a process that collects them passes them to the one that reports.

    ``measured`` are the (file, test) that were selected to run, ``files`` the test files of which all tests were.
    ``idle_budgets`` are patterns of ``[tool.gpumem]`` that hold or mark nothing, each as a sentence. ``error`` is a usage error
    that stopped the collection.
    """

    measured: frozenset[tuple[str, str]] = frozenset()
    files: frozenset[str] = frozenset()
    idle_budgets: tuple[str, ...] = ()
    error: str | None = None
    collected: frozenset[tuple[str, str]] = frozenset()
    """The measured tests, also those that were deselected: another shard of the session may run them."""
    collected_files: frozenset[str] = frozenset()
    """The test files that were collected whole, whatever was deselected of them."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "measured": sorted(list(test) for test in self.measured),
            "files": sorted(self.files),
            "idle_budgets": list(self.idle_budgets),
            "error": self.error,
            "collected": sorted(list(test) for test in self.collected),
            "collected_files": sorted(self.collected_files),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Selection:
        return cls(
            frozenset((file, test) for file, test in plain["measured"]),
            frozenset(plain["files"]),
            tuple(plain["idle_budgets"]),
            plain["error"],
            frozenset((file, test) for file, test in plain["collected"]),
            frozenset(plain["collected_files"]),
        )
