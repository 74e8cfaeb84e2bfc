"""What `make size` prints."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / ".ci/size.py"
JUNIT = """<testsuites><testsuite tests="12" time="61.7"><testcase name="test_a"><properties>
<property name="files of a training step" value="51"/></properties></testcase></testsuite></testsuites>"""


def checkout(root: Path, **lines: int) -> Path:
    """A checkout with a house `judging`, whose rooms have so many lines."""
    for room, count in lines.items():
        folder = root / "pytest_gpumem" / "judging" / room
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("")
        (folder / "__init__.py").write_text("")
        (folder / "it.py").write_text("pass\n" * count)
    return root


def test_lines_are_counted_by_room_beside_those_of_another_checkout(tmp_path):
    now = checkout(tmp_path / "now", gate=30, steps=5)
    (now / "tests").mkdir()
    (now / "tests/test_it.py").write_text("pass\n" * 3)
    before = checkout(tmp_path / "before", gate=10, old=7)
    script = runpy.run_path(str(SCRIPT))
    lines = script["table"](script["sizes"](now), script["sizes"](before)).splitlines()
    assert "| pytest_gpumem/judging/gate | 30 | +20 |" in lines
    assert "| pytest_gpumem/judging/steps | 5 |  |" in lines
    assert "| pytest_gpumem/judging/old | - |  |" in lines
    assert "| the package | 35 | +18 |" in lines
    assert "| tests | 3 | +3 |" in lines


def test_tests_and_seconds_are_those_of_the_latest_run(tmp_path):
    root = checkout(tmp_path, gate=1)
    script = runpy.run_path(str(SCRIPT))
    assert "run: tests" not in script["sizes"](root)
    (root / ".venv").mkdir()
    (root / ".venv/test.xml").write_text(JUNIT)
    sizes = script["sizes"](root)
    assert (sizes["run: tests"], sizes["run: seconds"], sizes["files of a training step"]) == (12, 62, 51)


def test_the_script_tells_the_size_of_its_own_checkout():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--than", SCRIPT.parents[1]], capture_output=True, text=True, check=True
    )
    assert "| pytest_gpumem/judging/gate | " in done.stdout
    assert "+" not in done.stdout
