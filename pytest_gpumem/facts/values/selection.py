"""The tests that a pytest session collected, and those that it selected to run, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_gpumem.facts.values.annotations import ADDED, KEY

Test = tuple[str, str]
"""A test as its file and its name: ``("tests/test_a.py", "test_forward[fp32]")``."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The measured tests that a session collected and selected. JSON stores each test as ``[file, test]``."""

    measured: frozenset[tuple[str, str]] = frozenset()
    """The measured tests that the session selected to run."""
    files: frozenset[str] = frozenset()
    """The test files in which no test was deselected."""
    budgets_without_effect: tuple[str, ...] = field(default=(), metadata={KEY: "idle_budgets"})
    """A sentence for each setting that has no effect. Examples are a pattern in ``budget`` or ``mark`` that matches no test,
    and a table ``[tool.gpumem]`` in a directory above pytest's root directory, which pytest does not read."""
    error: str | None = None
    """The message of the usage error that stopped the collection; ``None`` if the collection succeeded."""
    collected: frozenset[tuple[str, str]] = frozenset()
    """The measured tests that the session collected, including tests that it deselected and that another shard may run."""
    collected_files: frozenset[str] = frozenset()
    """The test files whose tests were all collected, even if some of them were deselected later."""
    skipped: frozenset[tuple[str, str]] = field(default=frozenset(), metadata=ADDED)
    """The tests that have baselines and whose file skipped itself during collection (``pytest.importorskip``). These tests are
    in ``measured`` as well. With ``--gpumem-strict``, the report's ``errors`` have an entry for each such file."""
    uncollected: frozenset[tuple[str, str]] = field(default=frozenset(), metadata=ADDED)
    """The tests that have baselines and that pytest no longer collects because of ``python_functions`` or ``python_classes``.
    The session does not report their baselines as unused."""
    omitted: tuple[str, ...] = field(default=(), metadata=ADDED)
    """A sentence for each file or test with baselines that settings, and not command-line options, excluded from the session:
    ``"tests/test_a.py was not collected ..."``. With ``--gpumem-strict``, the report's ``errors`` contain these sentences."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences from ``budgets_without_effect`` and ``omitted`` together."""
        return (*self.budgets_without_effect, *self.omitted)
