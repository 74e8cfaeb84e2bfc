"""Selection of the tests that a session measures. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected tests, as a process that collects them passes them to the one that reports.

    ``measured`` are the (file, test) that were selected to run, ``files`` the test files of which all tests were.
    ``idle_budgets`` are patterns of ``[tool.gpumem]`` that hold or mark nothing, and a table that is not read, each as a
    sentence. ``error`` is a usage error that stopped the collection.
    """

    measured: frozenset[tuple[str, str]] = frozenset()
    files: frozenset[str] = frozenset()
    idle_budgets: tuple[str, ...] = ()
    error: str | None = None
    collected: frozenset[tuple[str, str]] = frozenset()
    """The measured tests, also those that were deselected: another shard of the session may run them."""
    collected_files: frozenset[str] = frozenset()
    """The test files that were collected whole, whatever was deselected of them."""
