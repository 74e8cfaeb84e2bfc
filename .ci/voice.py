"""Count how the package's prose and names read, and fail if a room reads worse than `.ci/voice.json` allows.

Words are counted per 1,000 words of docstrings, comments and messages. Names that stand for a noun are counted per 1,000 names
that the code binds. Well-read projects stay below each of `AIMS`. For example, "Return the peak of each phase" has one `of`
in 6 words.

A figure shows where to read, not whether a sentence is good. So a figure below its aim may move, and a figure above its aim
may only fall: `.ci/voice.json` lists the figures above their aims by room, and `--lower` rewrites the list if none has risen.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pytest_gpumem"
LIMITS = ROOT / ".ci" / "voice.json"
STAND_INS = "names"
"""Title of the figure that counts names, beside those of words."""

AIMS = {"of": 22.0, "that": 11.0, "what": 1.5, "where": 1.5, "it": 9.0, "one": 3.5, STAND_INS: 4.0}
"""Figures up to which a room is free: a little above coverage.py, structlog, syrupy, PEFT and torchtitan."""

STAND_IN_NAMES = frozenset(
    [
        "both",
        "found",
        "given",
        "gone",
        "here",
        "kept",
        "known",
        "made",
        "mine",
        "now",
        "one",
        "ones",
        "others",
        "said",
        "sought",
        "such",
        "theirs",
        "then",
        "there",
        "told",
        "tried",
        "wanted",
        "what",
        "whole",
    ]
)
"""Names that say nothing about their value: a reader has to look for the noun."""

FEWEST_WORDS = 200
"""A room with fewer words has no figures: with 38 words, a single "it" is 26 of 1,000."""

LONGEST_TEST_NAME = 80
WORDS_OF_A_MESSAGE = 5
"""A shorter string is a key, a name or a format, not a sentence."""


@dataclass
class Room:
    """The words and names of a room. For example, 31.5 of 1,000 words are "of" in a room with 10,356 words."""

    words: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)

    def add(self, source: str) -> None:
        """Count the prose and the bound names of a file."""
        tree = ast.parse(source)
        for text in _prose(tree, source):
            self.words.update(word.lower() for word in re.findall(r"[A-Za-z']+", text))
        self.names.update(_bound_names(tree))

    def figures(self) -> dict[str, float]:
        """Return each figure of `AIMS`, per 1,000 words or names, rounded to a tenth."""
        words, names = max(self.words.total(), 1), max(self.names.total(), 1)
        figures = {word: 1000 * self.words[word] / words for word in AIMS if word != STAND_INS}
        figures[STAND_INS] = 1000 * sum(self.names[name] for name in STAND_IN_NAMES) / names
        return {title: round(figure, 1) for title, figure in figures.items()}


def _prose(tree: ast.AST, source: str) -> Iterator[str]:
    """Yield docstrings, comments, and strings that are long enough for a sentence."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))) if len(docstring.split()) < WORDS_OF_A_MESSAGE:
                yield docstring
            case ast.Constant(value=str(text)) if len(text.split()) >= WORDS_OF_A_MESSAGE:
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "#!")):
            yield token.string


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name that an assignment, a loop or a parameter binds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def rooms(package: Path) -> dict[str, Room]:
    """Return the rooms of a package by name, for example `judging/gate`.

    The modules beside the rooms of a house have the house's name, for example `plugin`, and those beside the houses have `.`.
    """
    counted: dict[str, Room] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        counted.setdefault("/".join(parts[:-1][:2]) or ".", Room()).add(path.read_text(encoding="utf-8"))
    return counted


def rises(figures: dict[str, dict[str, float]], limits: dict[str, dict[str, float]]) -> list[str]:
    """Return a sentence for each figure that is above both its aim and its limit."""
    sentences = []
    for name, room in figures.items():
        for title, figure in room.items():
            limit = max(AIMS[title], limits.get(name, {}).get(title, 0))
            if figure > limit:
                counted = "names stand for a noun" if title == STAND_INS else f"words are {title!r}"
                sentences.append(f"{PACKAGE.name}/{name}: {figure} of 1,000 {counted}, limit {limit}")
    return sentences


def long_test_names(tests: Path) -> list[str]:
    """Return a sentence for each test whose name is longer than `LONGEST_TEST_NAME`."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {len(node.name)} characters, limit {LONGEST_TEST_NAME}"
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME
    ]


def table(figures: dict[str, dict[str, float]]) -> str:
    """Return the figures as a Markdown table with a line for each room."""
    lines = [f"| per 1,000 words | {' | '.join(AIMS)} |", f"|---|{'--:|' * len(AIMS)}"]
    lines += [f"| {name} | {' | '.join(str(room[title]) for title in AIMS)} |" for name, room in figures.items()]
    return "\n".join([*lines, f"| aim | {' | '.join(str(aim) for aim in AIMS.values())} |"])


def above_aims(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, int]]:
    """Return the figures above their aims, rounded up, so a shorter text beside the same words is no rise."""
    above = {
        name: {title: math.ceil(figure) for title, figure in room.items() if figure > AIMS[title]}
        for name, room in figures.items()
    }
    return {name: room for name, room in above.items() if room}


def main() -> int:
    """Print the figures, or compare them with the limits.

    Returns:
        The exit status: 1 if a figure has risen or a test's name is too long, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print only what has risen")
    parser.add_argument("--lower", action="store_true", help="write the figures as the new limits, if none has risen")
    options = parser.parse_args()
    counted = rooms(PACKAGE)
    figures = {name: room.figures() for name, room in counted.items() if room.words.total() >= FEWEST_WORDS}
    complaints = rises(figures, json.loads(LIMITS.read_text(encoding="utf-8"))) + long_test_names(ROOT / "tests")
    if not options.check:
        print(table(figures))
    if complaints:
        print(
            *complaints, "Rewrite a sentence or a name there; the aims are in .ci/voice.py.", sep="\n", file=sys.stderr
        )
    elif options.lower:
        LIMITS.write_text(json.dumps(above_aims(figures), indent=1) + "\n", encoding="utf-8")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
