"""What became of a test, in words and as a mark, so that colour is not what tells it."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.gate.verdict import FAILING, Outcome

BY_ITSELF, NOT_RUN = "failed by itself", "not run"
_MARKS = {
    Outcome.RECORDED.words: "·",
    Outcome.OK.words: "✓",
    Outcome.IMPROVED.words: "↓",
    Outcome.NEW.words: "+",
    Outcome.FOREIGN.words: "⇄",
    Outcome.STALE.words: "≠",
    Outcome.UNMEASURED.words: "○",
    Outcome.UNCERTAIN.words: "?",
    Outcome.MISSING.words: "∅",
    Outcome.REGRESSED.words: "↑",
    Outcome.OVER_BUDGET.words: "✕",
    BY_ITSELF: "!",
    NOT_RUN: "…",
}
_SEVERITY = list(_MARKS)
_ALWAYS_FAIL = frozenset({*(outcome.words for outcome in FAILING), BY_ITSELF, NOT_RUN})


@dataclass(frozen=True, slots=True)
class Status:
    """What became of a test: ``words``, a ``mark`` for the eye, and whether it ``fails`` the gate."""

    words: str
    fails: bool

    @property
    def mark(self) -> str:
        return _MARKS[self.words]

    @property
    def note(self) -> str:
        """What to say beside the words, where they alone would be taken for the opposite of what became of the test."""
        if self.fails == (self.words in _ALWAYS_FAIL):
            return ""
        return "failed" if self.fails else "not failed"

    @property
    def severity(self) -> int:
        """In ascending order of how much a reader must know of it."""
        return _SEVERITY.index(self.words)

    @property
    def slug(self) -> str:
        return self.words.replace(" ", "-")
