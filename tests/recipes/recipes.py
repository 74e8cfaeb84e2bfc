"""Recipes of CONTRIBUTING.md: their code blocks, applied as written to a copy of the package.

A recipe is a section of a Markdown file. Each of its blocks of code is introduced by a line that says where it goes::

    In `pytest_gpumem/metrics.py`, after `Metric("retained",`:      below the line that has this text
    In `pytest_gpumem/metrics.py`, before `Metric("retained",`:     above it
    In `pytest_gpumem/metrics.py`, instead of `old = 1`:            in place of it
    In `pytest_gpumem/metrics.py`, at the end:
    In `pytest_gpumem/devices/mine.py`, a new file:

The line may be within a numbered step ("2. The device counts it. In `...`, after `...`:") and ends its paragraph. The text must
be in one line of the file and no other. The block is indented as that line is, whatever its indentation in the recipe
(`ruff format` takes it away). Blocks marked ``text`` or ``console`` are for the reader only; any other must be introduced.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import TYPE_CHECKING

from tests import preloaded
from tests.heap import hide_what_is_loaded

if TYPE_CHECKING:
    import subprocess

ROOT = Path(__file__).parents[2]
_FOR_THE_READER = ("text", "console")
_RUN = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "pytest_gpumem"]:
    del sys.modules[name]
kind, what, *sys.argv[1:] = sys.argv[1:]
if kind == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(what, {"__name__": "__main__"})
"""
"""As `python` runs ``-m module`` or ``-c code``, in a process that has loaded torch, and the package from elsewhere."""
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_INTRODUCTION = re.compile(
    r"In\s+`(?P<path>[^`]+)`,\s+(?:(?P<where>after|before|instead\s+of)\s+`(?P<anchor>[^`]+)`|(?P<whole>at\s+the\s+end|a\s+new\s+file)):\s*\Z"
)


@dataclass(frozen=True)
class Edit:
    """A block of code, and where it goes: ``after``, ``before`` or ``instead of`` a line, ``at the end``, ``a new file``."""

    path: str
    where: str
    anchor: str | None
    code: str

    def apply(self, root: Path) -> None:
        """Make the edit in the files below ``root``. Raises ``ValueError`` where its place is not there, or not the only one."""
        file = root / self.path
        if self.where == "a new file":
            if file.exists():
                raise ValueError(f"{self.path} is there already")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.code)
            return
        lines = file.read_text().splitlines(keepends=True)
        if self.anchor is None:
            file.write_text("".join([*lines, self.code]))
            return
        places = [number for number, line in enumerate(lines) if self.anchor in line]
        if len(places) != 1:
            raise ValueError(f"{self.path} has {len(places)} lines with {self.anchor!r}, expected one")
        line = lines[places[0]]
        start = places[0] + (self.where == "after")
        lines[start : places[0] + (self.where != "before")] = [indent(self.code, line[: -len(line.lstrip())])]
        file.write_text("".join(lines))


def recipe(heading: str, file: Path = ROOT / "CONTRIBUTING.md") -> list[Edit]:
    """The edits of the section with this heading. Raises ``ValueError`` for a block of code that nothing introduces."""
    edits = []
    section = _section(file.read_text(), heading)
    for block in _BLOCK.finditer(section):
        if block["language"] in _FOR_THE_READER:
            continue
        found = _INTRODUCTION.search(section[: block.start()])
        if found is None:
            raise ValueError(f"{file.name}, {heading}: nothing says where this goes:\n{block['code']}")
        where = " ".join((found["where"] or found["whole"]).split())
        edits.append(Edit(found["path"], where, found["anchor"], dedent(block["code"])))
    return edits


def _section(text: str, heading: str) -> str:
    """What is below a heading, up to the next of its level or above."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    if start is None:
        raise ValueError(f"no section {heading!r}")
    end = re.compile(rf"^#{{1,{len(start[1])}}} ", re.MULTILINE).search(_without_code(text), start.end())
    return text[start.end() : end.start() if end else len(text)]


def _without_code(text: str) -> str:
    """The text with its blocks blanked, in which a comment is no heading."""
    return _BLOCK.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)


def copy_of_the_package(folder: Path, edits: list[Edit]) -> Package:
    """A copy of the package in ``folder`` with these edits made.

    It has the compiled files, too: those of a file that was edited, or that is newer, are not used.
    """
    shutil.copytree(ROOT / "pytest_gpumem", folder / "pytest_gpumem")
    for edit in edits:
        edit.apply(folder)
    return Package(folder)


@dataclass(frozen=True)
class Package:
    """A copy of the package, in ``folder``, and processes that have it."""

    folder: Path

    def pytest(self, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest in ``project``, on the CPU."""
        return self.run(project, "-m", "pytest", "-p", "no:cacheprovider", "--gpumem-device=cpu", *arguments)

    def run(self, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``-m module`` or ``-c code`` in ``project``."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        return preloaded.run("-c", _RUN, *arguments, cwd=project, env=environment, before=hide_what_is_loaded)


def write_tests(project: Path, code: str) -> None:
    """Write a file of tests, ``test_steps.py``, and an empty configuration into ``project``."""
    project.mkdir(parents=True, exist_ok=True)
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "test_steps.py").write_text(dedent(code))
