"""Print the size of this checkout: lines by room, files in a training step, tests and seconds.

With ``--than`` the table shows the difference from another checkout. For example, `.ci/size.py --than ../main`.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytest_gpumem"
RESULTS = ".venv*/test.xml"
"""Result files from `make test`, in JUnit's format."""


def sizes(root: Path) -> dict[str, int]:
    """Return the sizes of a checkout by title. Figures from a test run are included if there was a run."""
    package = root / PACKAGE
    figures = {f"{PACKAGE}/*.py": _lines(package.glob("*.py"))}
    for house in sorted(path.parent for path in package.glob("*/__init__.py")):
        figures[f"{PACKAGE}/{house.name}/*.py"] = _lines(house.glob("*.py"))
        for room in sorted(path.parent for path in house.glob("*/__init__.py")):
            figures[f"{PACKAGE}/{house.name}/{room.name}"] = _lines(room.rglob("*.py"))
    figures["the package"] = sum(figures.values())
    figures["its C"] = _lines([*package.rglob("*.c"), *package.rglob("*.h")])
    for folder in ("tests", "benchmarks"):
        figures[folder] = _lines((root / folder).rglob("*.py"))
    figures["docs"] = _lines([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    return figures | _test_figures(root)


def _test_figures(root: Path) -> dict[str, int]:
    """Return the number of tests in the latest run, its seconds, and the number of files in a training step."""
    results = max(root.glob(RESULTS), key=lambda path: path.stat().st_mtime, default=None)
    if results is None:
        return {}
    suite = ET.parse(results).getroot().find("testsuite")  # noqa: S314 - of our own run
    if suite is None:
        return {}
    figures = {"run: tests": int(suite.get("tests", 0)), "run: seconds": round(float(suite.get("time", 0)))}
    for element in suite.iter("property"):
        if element.get("name") == "files of a training step":
            figures["files of a training step"] = int(element.get("value", 0))
    return figures


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def table(current_sizes: dict[str, int], previous_sizes: dict[str, int] | None) -> str:
    """Return a Markdown table with a line for each size, and the change from ``previous_sizes`` if given."""
    lines = ["| lines of | now | change |", "|---|--:|--:|"]
    for name in dict.fromkeys([*current_sizes, *(previous_sizes or {})]):
        current, previous = current_sizes.get(name), None if previous_sizes is None else previous_sizes.get(name)
        change = (
            ""
            if previous_sizes is None or current is None or previous is None or current == previous
            else f"{current - previous:+,}"
        )
        lines.append(f"| {name} | {'-' if current is None else f'{current:,}'} | {change} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--than", type=Path, metavar="FOLDER", help="another checkout to compare with")
    than = parser.parse_args().than
    print(table(sizes(ROOT), None if than is None else sizes(than)))
