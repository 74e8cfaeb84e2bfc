"""Cost of the plugin in a run that measures nothing: 2,000 trivial tests, and one empty test, with and without the plugin.

Runs of both kinds take turns, each in a process of its own, and the order changes with each round. CPU time (user + system)
decides, because wall-clock time depends on other programs. Both are shown. One empty test is run with cached bytecode, as in
every run but the first, and without cached bytecode of the plugin.

Claims are about the median of the rounds' ratios: the CPU time with the plugin over the CPU time of the run next to it without.
A busy neighbour slows both runs of a round alike, and medians ignore the rounds in which it did not. For one empty test on two
cores with a load of 3, the interval for this median over 60 rounds was 1.017 to 1.048. The ratio of the mean times in the
fastest quarter had 0.961 to 1.109.

"Without" is ``-p no:gpumem``: pytest imports nothing of the plugin then. It still reads which files the distribution has, as
for every plugin that is installed, which a run without the plugin installed does not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from claims import claim_of, conclude, parser_of, print_table
from cost import Cost, cost_of

import pytest_gpumem

FILES, TESTS_A_FILE = 20, 100
PLUGINS = ("cacheprovider", "randomly", "xdist", "rerunfailures", "benchmark", "memray", "anyio", "hypothesispytest")
QUIET = ("-q", "--no-header", *(f"-pno:{plugin}" for plugin in PLUGINS))
KINDS = {"with the plugin": (), "-p no:gpumem": ("-p", "no:gpumem")}


@dataclass(frozen=True)
class Suite:
    """Tests that are run with the plugin and without."""

    title: str
    folder: Path
    environment: dict[str, str]
    limit: float | None
    """The most CPU time with the plugin, as a ratio of the time without; ``None`` if nothing is claimed."""


def suites_in(folder: Path) -> tuple[Suite, ...]:
    """Write the tests, and a copy of the package without bytecode, into ``folder``."""
    many, one, package = (folder / name for name in ("many", "one", "package"))
    write_tests(many, FILES, TESTS_A_FILE)
    write_tests(one, 1, 1)
    source = Path(pytest_gpumem.__file__).parent
    shutil.copytree(source, package / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    # Unset, or else nothing of the plugin would be cached.
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    uncached = {**cached, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(package)}
    return (
        Suite(f"{FILES * TESTS_A_FILE} trivial tests", many, cached, 1.02),
        Suite("one empty test", one, cached, 1.03),
        Suite("one empty test, no bytecode of the plugin", one, uncached, None),
    )


def write_tests(folder: Path, files: int, tests_a_file: int) -> None:
    """Write ``files`` files of ``tests_a_file`` tests that do nothing, without a conftest and without settings of a plugin."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for number in range(files):
        tests = "".join(f"def test_{test}():\n    pass\n\n\n" for test in range(tests_a_file))
        (folder / f"test_{number}.py").write_text(tests, encoding="utf-8")


def run_pytest(suite: Suite, options: tuple[str, ...]) -> Cost:
    """Run the tests of ``suite``. Raises when they do not all pass."""
    command = [sys.executable, "-m", "pytest", *QUIET, *options]
    cost, _ = cost_of(
        lambda: subprocess.run(command, cwd=suite.folder, env=suite.environment, check=True, stdout=subprocess.DEVNULL)
    )
    return cost


def main() -> int:
    """Run both kinds in turns, print what they took, and tell whether the claims hold."""
    options = parser_of(__doc__, rounds=60).parse_args()
    with tempfile.TemporaryDirectory() as name:
        suites = suites_in(Path(name))
        runs: dict[tuple[str, str], list[Cost]] = {(suite.title, kind): [] for suite in suites for kind in KINDS}
        for suite in suites:
            for kind_options in KINDS.values():
                run_pytest(suite, kind_options)  # writes the bytecode
        for number in range(options.rounds):
            for suite in suites:
                for kind in list(KINDS) if number % 2 else list(reversed(KINDS)):
                    runs[suite.title, kind].append(run_pytest(suite, KINDS[kind]))
    claims = []
    for suite in suites:
        both = [runs[suite.title, kind] for kind in KINDS]
        print(f"{suite.title}, {options.rounds} rounds of each kind in turns\n")
        print_table(("pytest", "CPU, median", "CPU, least", "wall, median", "wall, least"), rows_of(*both))
        ratios = [ours.cpu / theirs.cpu for ours, theirs in zip(*both, strict=True)]
        print(f"median of the rounds' ratios of CPU time: {statistics.median(ratios):.3f}\n")
        if suite.limit is not None:
            text = f"{suite.title}: CPU time with the plugin over without, median of the rounds' ratios"
            claims.append(claim_of(text, statistics.median, (ratios,), suite.limit))
    return conclude(claims, check=options.check)


def rows_of(ours: list[Cost], theirs: list[Cost]) -> list[tuple[str, ...]]:
    """Return a row of seconds for each kind of runs, and one of their ratios."""
    figures = [
        [reduce(seconds) for seconds in ([run.cpu for run in runs], [run.wall for run in runs]) for reduce in REDUCED]
        for runs in (ours, theirs)
    ]
    rows = [(kind, *(f"{seconds:.3f} s" for seconds in reduced)) for kind, reduced in zip(KINDS, figures, strict=True)]
    ratios = (f"{with_it / without:.3f}" for with_it, without in zip(*figures, strict=True))
    return [*rows, ("ratio", *ratios)]


REDUCED = (statistics.median, min)
"""From seconds of several runs to the figures that are shown."""


if __name__ == "__main__":
    sys.exit(main())
