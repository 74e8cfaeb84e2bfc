"""The size of this checkout: lines by room, files of a training step, tests and seconds; beside those of another checkout."""

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
"""Files of results that `make test` leaves, in JUnit's format."""


def sizes(root: Path) -> dict[str, int]:
    """Return the sizes of a checkout by what they are of; those of a run of its tests only if there was one."""
    package = root / PACKAGE
    found = {f"{PACKAGE}/*.py": _lines(package.glob("*.py"))}
    for room in sorted(path.parent for path in package.glob("*/__init__.py")):
        found[f"{PACKAGE}/{room.name}"] = _lines(room.rglob("*.py"))
    found["the package"] = sum(found.values())
    found["its C"] = _lines([*package.rglob("*.c"), *package.rglob("*.h")])
    for folder in ("tests", "benchmarks"):
        found[folder] = _lines((root / folder).rglob("*.py"))
    found["docs"] = _lines([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    return found | _of_tests(root)


def _of_tests(root: Path) -> dict[str, int]:
    """Return how many tests the latest run had, its seconds, and how many files a training step took."""
    results = max(root.glob(RESULTS), key=lambda path: path.stat().st_mtime, default=None)
    if results is None:
        return {}
    suite = ET.parse(results).getroot().find("testsuite")  # noqa: S314 - of our own run
    if suite is None:
        return {}
    found = {"run: tests": int(suite.get("tests", 0)), "run: seconds": round(float(suite.get("time", 0)))}
    for one in suite.iter("property"):
        if one.get("name") == "files of a training step":
            found["files of a training step"] = int(one.get("value", 0))
    return found


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def table(now: dict[str, int], before: dict[str, int] | None) -> str:
    """Return a line for each size, in Markdown; with ``before`` also the difference, where there is one."""
    lines = ["| lines of | now | change |", "|---|--:|--:|"]
    for name in dict.fromkeys([*now, *(before or {})]):
        there, was = now.get(name), None if before is None else before.get(name)
        change = "" if before is None or there is None or was is None or there == was else f"{there - was:+,}"
        lines.append(f"| {name} | {'-' if there is None else f'{there:,}'} | {change} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--than", type=Path, metavar="FOLDER", help="another checkout, to tell the difference to")
    than = parser.parse_args().than
    print(table(sizes(ROOT), None if than is None else sizes(than)))
