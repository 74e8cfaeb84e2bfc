"""A case of the corpus, what its recorded steps showed, and whether the first row of the difference is right."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from corpus_project import Edit, Project

from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.gate.difference import Difference, difference
from pytest_gpumem.steps.prepared import MeasuringContext
from pytest_gpumem.values.composition import Composition, Row
from pytest_gpumem.values.plain import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from corpus_models import Recipe

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.values.composition import Explanation

LEAST_GROWTH = 0.02
"""A planted regression that raises its metric by less is none that anybody would look for."""


class BrokenCase(Exception):
    """A case that does not show what it is for: its figure did not grow."""


@dataclass(frozen=True, slots=True)
class Case:
    """A regression: ``edits`` bring it in; ``given`` are edits that both sides have.

    ``modules`` are patterns of the modules that may be named, ``reason`` a part of the reason that has to be told where the
    row alone would not say it. The lines that may be named are those that the edits mark as culprits, and ``lines``: parts
    of library files, by function. ``why`` says why these are right where that is not plain.
    """

    name: str
    model: str
    recipe: Recipe
    edits: tuple[Edit, ...]
    modules: tuple[str, ...]
    given: tuple[Edit, ...] = ()
    reason: str = ""
    why: str = ""
    library: bool = False
    figure: Literal["peak", "retained"] = "peak"


@dataclass(frozen=True, slots=True)
class Refactoring:
    """Edits that change no memory."""

    name: str
    model: str
    recipe: Recipe
    edits: tuple[Edit, ...]
    given: tuple[Edit, ...] = ()
    moved: bool = False
    """Whether the model's file also moves, from an installed library into the user's own folder."""


@dataclass(frozen=True)
class Shown:
    """What a case showed: the difference, and for a regression whether its first row is right."""

    name: str
    model: str
    difference: Difference
    wrong: str = ""
    """What of the first row is wrong; empty when it is right."""
    notes: tuple[str, ...] = ()
    culprits: frozenset[str] = field(default=frozenset())

    @property
    def right(self) -> bool:
        return not self.wrong

    @property
    def growth(self) -> float:
        """Relative to what there was before; 1 where there was nothing."""
        before = self.difference.before
        return self.difference.growth / before if before else 1.0


def regression_shown(case: Case, device: Device) -> Shown:
    """Record the case before and after. Raises `BrokenCase`, and `EditError` when the model's source is another."""
    with tempfile.TemporaryDirectory() as name:
        before, _ = recorded(case.recipe, Project(Path(name) / "before", case.library), case.given, device)
        project = Project(Path(name) / "after", case.library)
        after, _ = recorded(case.recipe, project, (*case.given, *case.edits), device)
        old, new = _side(before, case.figure), _side(after, case.figure)
        changed = difference(as_kept(old), new)
        shown = Shown(case.name, case.model, changed, notes=new.notes, culprits=project.culprits())
    if shown.growth < LEAST_GROWTH:
        raise BrokenCase(f"its {case.figure} changed by {shown.growth:+.1%}: {old.total} to {new.total} bytes")
    return replace(shown, wrong=what_is_wrong(case, shown))


def refactoring_shown(refactoring: Refactoring, device: Device) -> Shown:
    """Record the refactoring before and after; it is right when nothing changed."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        before = Project(root / "before", library=refactoring.moved)
        old, _ = recorded(refactoring.recipe, before, refactoring.given, device)
        edits = (*refactoring.given, *refactoring.edits)
        new, _ = recorded(refactoring.recipe, Project(root / "after"), edits, device)
    changed = difference(as_kept(old.peak), new.peak)
    wrong = "not empty" if changed.changes else ""
    if changed.growth:
        wrong = f"the peak changed by {changed.growth} bytes"
    return Shown(refactoring.name, refactoring.model, changed, wrong, new.peak.notes)


def what_is_wrong(case: Case, shown: Shown) -> str:
    """What of the first row is wrong, in a few words; empty when module, line and reason are right."""
    if not shown.difference.changes:
        return "no row"
    first = shown.difference.changes[0]
    wrong = []
    if not any(fnmatchcase(first.row.module, pattern) for pattern in case.modules):
        wrong.append("module")
    if not names_a_line(first.row, shown.culprits):
        wrong.append("line")
    if case.reason not in first.reason:
        wrong.append("reason")
    return ", ".join(wrong)


def names_a_line(row: Row, culprits: frozenset[str]) -> bool:
    """Whether a row says one of the lines, as the user's or as the library's."""
    return row.site in culprits or row.library in culprits


def recorded(
    recipe: Recipe, project: Project, edits: Sequence[Edit], device: Device
) -> tuple[Explanation, tuple[str, ...]]:
    """Write the project, and record its step."""
    project.write(edits)
    device.quiesce()
    explanation = recipe(MeasuringContext(device, time_budget=None, sites=Sites(project.root)), project)
    return explanation, explanation.peak.notes


def as_kept(composition: Composition) -> Composition:
    """What a baseline keeps of it, and gives back."""
    return from_plain(Composition, to_plain(composition.kept()))


def _side(explanation: Explanation, figure: str) -> Composition:
    return explanation.retained if figure == "retained" else explanation.peak
