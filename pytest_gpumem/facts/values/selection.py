"""A session's collected and selected tests. Frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_gpumem.facts.values.plain import KEY

Test = tuple[str, str]
"""A test as (file, test)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The collected and the selected tests, each as ``[file, test]``."""

    measured: frozenset[tuple[str, str]] = frozenset()
    """The selected measured tests."""
    files: frozenset[str] = frozenset()
    """The test files whose tests were all selected."""
    budgets_without_effect: tuple[str, ...] = field(default=(), metadata={KEY: "idle_budgets"})
    """Sentences on settings without an effect: patterns (``budget``, ``mark``) without a matching test, and a table
    ``[tool.gpumem]`` above pytest's root directory, which pytest does not read."""
    error: str | None = None
    """The usage error, if one stopped the collection."""
    collected: frozenset[tuple[str, str]] = frozenset()
    """The collected measured tests, including deselected tests, which another shard may run."""
    collected_files: frozenset[str] = frozenset()
    """The completely collected test files, even if tests were deselected."""
    skipped: frozenset[tuple[str, str]] = frozenset()
    """The tests with baselines in files that skipped themselves (``pytest.importorskip``). They are in ``measured`` as well.
    In strict mode each file is an entry in the report's ``errors``."""
    uncollected: frozenset[tuple[str, str]] = frozenset()
    """The tests with baselines in collected files that ``python_functions`` or ``python_classes`` leave out. Their baselines
    are not unused."""
    omitted: tuple[str, ...] = ()
    """Sentences on tests with baselines if settings, and not typed options, leave them out:
    ``"tests/test_a.py was not collected ..."``. In strict mode they are ``errors``."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on settings without an effect, and on tests left out by settings."""
        return (*self.budgets_without_effect, *self.omitted)
