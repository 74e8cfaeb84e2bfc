"""Code of two variants, and the rows of their difference whose lines have changed: what has not is a consequence at most."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import with_changed_lines
from pytest_gpumem.values.source_lines import file_and_line, package_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.ab.runs import Run
    from pytest_gpumem.ab.variants import ProvisionedVariant
    from pytest_gpumem.reports.comparison import Compared, ComparedRow
    from pytest_gpumem.values.composition import Row


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a variant: pytest's root directory, and the folders of installed packages in their order."""

    root: Path
    packages: Sequence[Path] = ()

    @classmethod
    def of(cls, variant: ProvisionedVariant, run: Run) -> Code:
        """Return the code of a variant that has run."""
        return cls(variant.top / run.root, variant.site_folders)

    def lines(self, line: str) -> list[str] | None:
        """Return the lines of the file that a row's ``line`` is in; ``None`` where it is not found, or cannot be read."""
        file, _ = file_and_line(line)
        package = package_of(line)
        within = file.partition(": ")[2] if package else file
        folders = self.packages if package else [self.root]
        for path in (folder / top / within for folder in folders for top in ((package, "") if package else ("",))):
            if path.is_file():
                try:
                    return path.read_text(encoding="utf-8").splitlines()
                except (OSError, UnicodeDecodeError):
                    return None
        return None


@dataclass(frozen=True)
class _File:
    """A file in both variants, as lines."""

    old: Sequence[str]
    new: Sequence[str]

    @cached_property
    def kept(self) -> frozenset[int]:
        """The lines of the new file that are in the old one, from 1."""
        matcher = SequenceMatcher(None, self.old, self.new, autojunk=False)
        return frozenset(b + 1 + at for _, b, size in matcher.get_matching_blocks() for at in range(size))

    @cached_property
    def statements(self) -> list[tuple[int, int]]:
        """The first and the last line of each statement, of one that has others within up to the first of these."""
        try:
            tree = ast.parse("\n".join(self.new))
        except (SyntaxError, ValueError):
            return []
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                body: list[ast.stmt] = getattr(node, "body", [])
                found.append((node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno))
        return found

    def has_changed(self, number: int) -> bool:
        """Return whether the statement at a line of the new file is not in the old one as it is."""
        around = [(first, last) for first, last in self.statements if first <= number <= last]
        first, last = max(around, default=(number, number))
        return any(one not in self.kept for one in range(first, last + 1))


@dataclass(frozen=True)
class ChangedCode:
    """Lines of ``new`` that are not in ``old``."""

    old: Code
    new: Code
    _files: dict[str, _File | None] = field(default_factory=dict)

    def has(self, row: Row) -> bool:
        """Return whether the code at a row's line, the user's or the library's, is not the same in both variants."""
        return any(self._has_changed(line) for line in (row.library, row.site) if line)

    def _has_changed(self, line: str) -> bool:
        file, number = file_and_line(line)
        if file not in self._files:
            old, new = self.old.lines(line), self.new.lines(line)
            self._files[file] = None if new is None else _File(old or [], new)
        found = self._files[file]
        return number > 0 and found is not None and found.has_changed(number)


def with_changed_code(report: Compared, changed: ChangedCode) -> Compared:
    """Return a comparison whose explanations say which lines have changed, and name these first."""
    return replace(report, rows=tuple(_rows(report, changed)))


def _rows(report: Compared, changed: ChangedCode) -> Iterator[ComparedRow]:
    for row in report.rows:
        verdict = row.verdict
        if verdict is None or verdict.difference is None:
            yield row
        else:
            difference = with_changed_lines(verdict.difference, changed.has)
            yield replace(row, verdict=replace(verdict, difference=difference))
