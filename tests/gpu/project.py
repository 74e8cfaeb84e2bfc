"""A project of its own for a test on a GPU, whose tests run in processes of their own."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from pytest_gpumem.emulating.emulation.load import current_emulation
from tests import preloaded
from tests.emulated.processes import emulate

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

REPOSITORY = Path(__file__).parents[2]
SECONDS = 240
"""Longer than any run needs; a run that hangs must not hang the suite."""
UNREPEATABLE = ("peak_reserved", "step_time", "throughput")
"""Where the allocator finds room, and how long a step takes, is not the same each time."""


class GpuProject:
    """Tests in a temporary folder, and pytest with the plugin to run them, installed or not."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        self.path = pytester.path
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        # A path relative to the repository would lead nowhere from the project's folder.
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).resolve()) for path in paths if path))

    def write(self, source: str) -> None:
        """Write ``test_it.py``; ``pytest`` and ``torch`` are imported."""
        text = f"import pytest\nimport torch\n\n\n{source}"
        (self.path / "test_it.py").write_text(text, encoding="utf-8")

    def verdicts(self, *arguments: str) -> dict[str, Any]:
        """The verdicts on the metrics of ``test_it``, which measures one step, by metric; of a run with ``arguments``."""
        report = self.path / "report.xml"
        result = self.run(*arguments, f"--junitxml={report}")
        found = [
            json.loads(str(entry.get("value")))
            for entry in ElementTree.parse(report).iter("property")
            if entry.get("name") == "gpumem"
        ]
        assert len(found) == 1, result.stdout.str()
        assert found[0]["verdicts"], result.stdout.str()
        return {one["metric"]: one for one in found[0]["verdicts"][0]["metrics"]}

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run pytest with the plugin in a process of its own, which begins with torch loaded if a GPU is emulated."""
        installed = any(one.name == "gpumem" for one in entry_points(group="pytest11"))
        plugin = () if installed else ("-p", "pytest_gpumem.plugin")
        arguments = (*plugin, "-p", "no:randomly", "-p", "no:cacheprovider", *arguments)
        if current_emulation() is not None and preloaded.is_loaded_for(os.environ):
            return preloaded.run_pytest(self.path, *arguments, before=emulate)
        return self._pytester.runpytest_subprocess(*arguments, timeout=SECONDS)

    def figures(self, *tests: str, arguments: tuple[str, ...] = ()) -> dict[str, dict[str, int]]:
        """Bytes that repeat, by test and metric, of a run in which every test passes."""
        ids = [f"test_it.py::{test}" for test in tests] or ["test_it.py"]
        result = self.run(*ids, *arguments, "--no-gpumem-time", "--junitxml=report.xml")
        assert result.ret == 0, result.stdout.str()
        return repeatable_bytes(self.path / "report.xml")


def repeatable_bytes(report: Path) -> dict[str, dict[str, int]]:
    """The byte metrics in a JUnit report by test and ``<measurement>.<metric>``, without those that need not repeat."""
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for entry in case.iter("property"):
            prefix, _, name = str(entry.get("name")).partition(".")
            if prefix == "gpumem" and name and not name.endswith(UNREPEATABLE):
                found.setdefault(str(case.get("name")), {})[name] = int(str(entry.get("value")))
    return found


def without_chance(metrics: Mapping[str, float]) -> dict[str, int]:
    """The metrics that are bytes and repeat."""
    return {name: int(value) for name, value in metrics.items() if name not in UNREPEATABLE}
