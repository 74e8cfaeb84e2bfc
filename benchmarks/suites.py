"""Other people's tests under the plugin: 30 of PyTorch Geometric and 30 of accelerate, measured on the CPU.

Their outcomes have to be those without the plugin, and their figures the same in two orders. The packages are installed as
they are released; wheels come without tests, so those are taken from the sources of the same release:

    pip install torch_geometric accelerate   # and, for their tests: parameterized transformers
    git clone --depth 1 --branch 2.8.0.post1 https://github.com/pyg-team/pytorch_geometric sources/torch_geometric
    git clone --depth 1 --branch v1.14.0 https://github.com/huggingface/accelerate sources/accelerate
    python benchmarks/suites.py --sources sources --out benchmarks/results

Nothing is changed in the sources: a plugin adds the markers, as a conftest would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from claims import print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

TESTS = 30
MARKS = """
import os

import pytest

LISTED = os.environ.get("MARKED_TESTS")
TESTS = LISTED.splitlines() if LISTED else None


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    if TESTS is not None and item.nodeid in TESTS and item.config.pluginmanager.hasplugin("gpumem"):
        item.add_marker(pytest.mark.gpumem(device="cpu"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if TESTS is not None:
        items[:] = [item for item in items if item.nodeid in TESTS]
    if os.environ.get("REVERSED"):
        items.reverse()
"""


@dataclass(frozen=True)
class Suite:
    """A project's tests, and where they lie in its sources."""

    name: str
    files: tuple[str, ...]
    """Each file gives tests in turns, so that all kinds are among those that are taken."""


SUITES = (
    Suite(
        "torch_geometric",
        (
            "test/nn/conv/test_gcn_conv.py",
            "test/nn/conv/test_gat_conv.py",
            "test/nn/conv/test_sage_conv.py",
            "test/nn/models/test_graph_unet.py",
            "test/nn/models/test_autoencoder.py",
            "test/nn/pool/test_topk_pool.py",
            "test/nn/norm/test_batch_norm.py",
            "test/nn/aggr/test_lstm.py",
            "test/nn/dense/test_dense_gcn_conv.py",
        ),
    ),
    Suite(
        "accelerate",
        (
            "tests/test_modeling_utils.py",
            "tests/test_hooks.py",
            "tests/test_accelerator.py",
            "tests/test_big_modeling.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
            "tests/test_utils.py",
        ),
    ),
)


@dataclass(frozen=True)
class Run:
    """Result of one run of a suite, by test."""

    outcomes: dict[str, str]
    figures: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Result:
    """A suite without the plugin, with it, and with it in the reversed order."""

    suite: str
    version: str
    tests: int
    passed: int
    measured: int
    figures: int
    other_outcomes: dict[str, str]
    other_figures: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether all outcomes and figures are the same, and there are as many as there should be."""
        return self.measured >= TESTS and not self.other_outcomes and not self.other_figures


def run(suite: Suite, folder: Path, tests: list[str] | None, *options: str, reverse: bool = False) -> Run:
    """Run ``tests`` of a suite; all of its files where there is no choice yet. Raises when pytest did not run them."""
    with tempfile.TemporaryDirectory() as name:
        plugins, report = Path(name), Path(name) / "report.xml"
        (plugins / "marks_of_suites.py").write_text(MARKS, encoding="utf-8")
        path = [str(plugins), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "MARKED_TESTS": "\n".join(tests or ()),
            "REVERSED": "yes" if reverse else "",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "marks_of_suites",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *options, *suite.files]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not report.exists() or done.returncode not in (0, 1):
            raise RuntimeError(
                f"pytest did not run the tests of {suite.name}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return read(report)


def read(report: Path) -> Run:
    """A JUnit report as a value."""
    outcomes: dict[str, str] = {}
    figures: dict[str, dict[str, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 -- pytest has just written it
        file = str(case.get("file"))
        module = file.removesuffix(".py").replace("/", ".")
        inside = str(case.get("classname")).removeprefix(module).strip(".")
        test = "::".join(filter(None, (file, *inside.split("."), str(case.get("name")))))
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[test] = ended[0] if ended else "passed"
        for one in case.iter("property"):
            if str(one.get("name")).startswith("gpumem."):
                figures.setdefault(test, {})[str(one.get("name"))] = float(str(one.get("value")))
    return Run(outcomes, figures)


def in_turns(tests: Iterable[str]) -> list[str]:
    """The tests of each file in turns, so that all kinds are among the first."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    turns = itertools.zip_longest(*by_file.values())
    return [test for turn in turns for test in turn if test is not None]


def judged(suite: Suite, folder: Path) -> Result:
    """Run a suite without the plugin, with it, and with it in the reversed order."""
    all_of_it = run(suite, folder, None, "-p", "no:gpumem").outcomes
    # Twice as many as are needed are tried: what never holds a tensor on the CPU cannot be measured.
    candidates = in_turns(test for test, outcome in all_of_it.items() if outcome == "passed")[: 2 * TESTS]
    tried = run(suite, folder, candidates)
    tests = [test for test in candidates if test in tried.figures][:TESTS]
    without = run(suite, folder, tests, "-p", "no:gpumem")
    forward = run(suite, folder, tests)
    backward = run(suite, folder, tests, reverse=True)
    other_outcomes = {
        test: f"{outcome} without the plugin, {there.get(test)} {how}"
        for how, there in (
            ("with it", forward.outcomes),
            ("with it, reversed", backward.outcomes),
        )
        for test, outcome in without.outcomes.items()
        if there.get(test) != outcome
    }
    other_outcomes |= {
        test: f"passed without the plugin, {outcome} where it was tried"
        for test, outcome in tried.outcomes.items()
        if outcome != "passed"
    }
    other_figures = {
        f"{test} {name}": f"{value:.0f}, reversed {backward.figures.get(test, {}).get(name)}"
        for test, figures in forward.figures.items()
        for name, value in figures.items()
        if backward.figures.get(test, {}).get(name) != value
    }
    return Result(
        suite.name,
        version(suite.name),
        len(tests),
        sum(outcome == "passed" for outcome in forward.outcomes.values()),
        len(forward.figures),
        sum(map(len, forward.figures.values())),
        other_outcomes,
        other_figures,
    )


def main() -> int:
    """Run the suites, print the table, and tell whether outcomes and figures hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="the folder that the suites' sources lie in")
    parser.add_argument("--out", type=Path, help="the folder of results; without it nothing is written")
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one of the suites")
    options = parser.parse_args()
    suites = [suite for suite in SUITES if options.only in (None, suite.name)]
    results = [judged(suite, (options.sources / suite.name).resolve()) for suite in suites]
    header = ("suite", "version", "tests", "passed", "measured", "other outcomes", "figures", "other in reversed order")
    print_table(
        header,
        [
            (
                one.suite,
                one.version,
                str(one.tests),
                str(one.passed),
                str(one.measured),
                str(len(one.other_outcomes)),
                str(one.figures),
                str(len(one.other_figures)),
            )
            for one in results
        ],
    )
    for one in results:
        for what, said in {**one.other_outcomes, **one.other_figures}.items():
            print(f"{one.suite}: {what}: {said}")
    if options.out is not None:
        write(results, options.out)
    return 0 if all(one.holds for one in results) else 1


def write(results: list[Result], folder: Path) -> None:
    """Write the results with the versions that they are of, beside those of other suites with the same versions."""
    place = folder / f"cpu-{platform.machine().lower()}" / "suites.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "pytest", "numpy", "transformers")}
    plain: dict[str, object] = {"python": platform.python_version(), **versions}
    before = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    earlier = before.pop("suites", [])
    suites = {one["suite"]: one for one in earlier if before == plain}
    suites |= {one.suite: asdict(one) for one in results}
    plain["suites"] = [suites[suite.name] for suite in SUITES if suite.name in suites]
    place.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
