"""Selection of the tests that a session measures. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

Test = tuple[str, str]
"""A test as (file, test)."""


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
    skipped: frozenset[tuple[str, str]] = frozenset()
    """The tests with baselines in files that skipped themselves, as by ``pytest.importorskip``; among ``measured``."""
    uncollected: frozenset[tuple[str, str]] = frozenset()
    """The tests with baselines in collected files, whose names are not those of pytest's settings. They are not gone."""
    omitted: tuple[str, ...] = ()
    """Sentences on tests with baselines, left out by settings alone: ``"tests/test_a.py was not collected ..."``."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on settings without an effect, and on tests left out by settings."""
        return (*self.idle_budgets, *self.omitted)
