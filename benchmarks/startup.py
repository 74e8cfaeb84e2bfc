"""Cost of the plugin in a run that measures nothing: start-up and 2,000 trivial tests, with and without it.

Runs of both kinds take turns, each in a process of its own. CPU time (user + system) decides, since wall-clock time is
everybody's on a busy machine; both are shown.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from claims import claim_of, conclude, parser_of, print_table, ratio_of_medians
from cost import Cost, cost_of

FILES, TESTS_A_FILE = 20, 100
LIMIT = 1.02
QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:rerunfailures")
KINDS = {"with the plugin": (), "-p no:gpumem": ("-p", "no:gpumem")}


def write_tests(folder: Path) -> None:
    """``FILES`` files of ``TESTS_A_FILE`` tests that do nothing, and a conftest and settings of no plugin."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for number in range(FILES):
        tests = "".join(f"def test_{test}():\n    pass\n\n\n" for test in range(TESTS_A_FILE))
        (folder / f"test_{number}.py").write_text(tests, encoding="utf-8")


def run_pytest(folder: Path, options: tuple[str, ...]) -> Cost:
    """Run the tests in ``folder``. Raises when they do not all pass."""
    command = [sys.executable, "-m", "pytest", *QUIET, *options]
    cost, _ = cost_of(lambda: subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL))
    return cost


def main() -> int:
    """Run both kinds in turns, print what they took, and tell whether the claim holds."""
    options = parser_of(__doc__, rounds=15).parse_args()
    runs: dict[str, list[Cost]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tests(folder)
        for kind_options in KINDS.values():
            run_pytest(folder, kind_options)  # writes the bytecode
        for number in range(options.rounds):
            kinds = list(KINDS) if number % 2 else list(reversed(KINDS))
            for kind in kinds:
                runs[kind].append(run_pytest(folder, KINDS[kind]))
    cpu = {kind: [run.cpu for run in taken] for kind, taken in runs.items()}
    wall = {kind: [run.wall for run in taken] for kind, taken in runs.items()}
    ours, theirs = KINDS
    rows: list[tuple[str, ...]] = [
        (
            kind,
            f"{statistics.median(cpu[kind]):.3f} s",
            f"{min(cpu[kind]):.3f} s",
            f"{statistics.median(wall[kind]):.3f} s",
            f"{min(wall[kind]):.3f} s",
        )
        for kind in KINDS
    ]
    rows.append(
        (
            "ratio",
            *(
                f"{reduce(taken[ours]) / reduce(taken[theirs]):.3f}"
                for taken in (cpu, wall)
                for reduce in (statistics.median, min)
            ),
        )
    )
    print(f"{FILES * TESTS_A_FILE} trivial tests, {options.rounds} rounds of each kind in turns\n")
    print_table(("pytest", "CPU, median", "CPU, least", "wall, median", "wall, least"), rows)
    text = "CPU time with the plugin over without, medians"
    claim = claim_of(text, ratio_of_medians, (cpu[ours], cpu[theirs]), LIMIT)
    return conclude([claim], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
