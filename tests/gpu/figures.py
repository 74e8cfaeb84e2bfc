"""What tests on a GPU measured, kept as JSON: the project's record of figures of real devices."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_gpumem.facts.measurement import Environment

FORMAT = 1
FILE = "tests.json"


@dataclass
class Figures:
    """Metrics by test and by name of the measurement, in the units of ``pytest_gpumem.facts.metrics.METRICS``."""

    tests: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def add(self, test: str, name: str, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a measurement of ``test``."""
        self.tests.setdefault(test, {})[name] = dict(metrics)

    def forget(self, test: str) -> None:
        """The test has failed: its figures are no record of anything."""
        self.tests.pop(test, None)

    def write(self, results: Path, environment: Environment) -> Path:
        """Write ``<results>/<device>/tests.json``, and keep what the same environment gave before for other tests."""
        path = results / environment.slug / FILE
        here = {"device": environment.device, **environment.details}
        tests = {**_earlier(path, here), **self.tests}
        document = {"format": FORMAT, "environment": here, "tests": tests}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def _earlier(path: Path, here: Mapping[str, str | int]) -> dict[str, Any]:
    """The tests in an earlier file, unless another environment or format wrote it."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or document.get("environment") != here:
        return {}
    tests: dict[str, Any] = document["tests"]
    return tests
