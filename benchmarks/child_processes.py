"""Cost of measuring child processes: a marked test that starts 20 children with `subprocess`, and the start of a child.

Sessions with the plugin and with ``-p no:gpumem`` take turns, both on an emulated H100, and the order changes with each round.
With ``--cpu`` both are on the CPU.
CPU time (user + system, children included) is claimed, because wall time depends on other programs. Both are shown.
In the first suite each child imports torch and allocates 4 MB on the GPU. In the second suite no child imports torch. In the
third suite the test has no child.

A child's start is compared with the `sitecustomize` and the variables by which a child reports its memory, and without them.
Where torch needs an emulated GPU both kinds of children have it, so the difference is only the cost of reporting. The CPU time
of torch's import varies by more than a child's report costs on a busy machine, so more rounds are needed than for sessions.

Needs Linux on x86-64 with a CUDA build of torch, and a C compiler. With ``--starts`` only starts are timed, without a GPU. With
``--cpu`` any build of torch will do.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from claims import Claim, claim_of, conclude, difference_of_medians, parser_of, print_table
from cost import Cost, cost_of

from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.jobs.run import reporting_to

if TYPE_CHECKING:
    from collections.abc import Mapping

CHILDREN = 20
GPU = "emulated:h100"
WITH_TORCH, WITHOUT_TORCH, NONE = f"{CHILDREN} children with torch", f"{CHILDREN} children without torch", "no child"
SUITES: dict[str, tuple[int, str]] = {
    WITH_TORCH: (CHILDREN, "import torch; torch.ones(1 << 20, device='{device}')"),
    WITHOUT_TORCH: (CHILDREN, "pass"),
    NONE: (0, "pass"),
}
"""The number of children in a suite's test, and their code."""
SOURCE = """
import subprocess
import sys

import pytest
import torch


@pytest.mark.gpumem
def test_children():
    torch.ones(1 << 20, device="{device}")
    for _ in range({children}):
        subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
SESSIONS = {
    "with the plugin": ("--gpumem-explain=never",),
    "-p no:gpumem": ("-p", "no:gpumem", "-W", "ignore"),
}
MOST_RATIO = 1.1
STARTS = {"with torch": "import torch", "with a tensor": "import torch; torch.ones(1)", "without torch": "pass"}
MOST_MS = {"with torch": 50.0, "with a tensor": 50.0, "without torch": 10.0}
"""The most milliseconds that measuring adds to a child."""


def run_session(folder: Path, options: tuple[str, ...], environment: dict[str, str]) -> Cost:
    """Run the session in ``folder``. Raises if its test does not pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
    cost, done = cost_of(
        lambda: subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    )
    if "1 passed" not in done.stdout:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return cost


def compare_sessions(rounds: int, environment: dict[str, str], device: str) -> list[Claim]:
    """Run the sessions in turns, and print what they took.

    Args:
        rounds: The number of runs of each session.
        environment: The environment in which torch can be imported.
        device: The value of ``--gpumem-device``.
    """
    sessions = {name: (*options, f"--gpumem-device={device}") for name, options in SESSIONS.items()}
    sessions["-p no:gpumem"] = SESSIONS["-p no:gpumem"]
    torch_device = "cpu" if device == "cpu" else "cuda"
    runs: dict[tuple[str, str], list[Cost]] = {(suite, session): [] for suite in SUITES for session in SESSIONS}
    with tempfile.TemporaryDirectory() as name:
        for suite, (children, child) in SUITES.items():
            folder = Path(name) / suite
            folder.mkdir()
            (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            child_code = child.format(device=torch_device)
            source = SOURCE.format(child=child_code, children=children, device=torch_device)
            (folder / "test_it.py").write_text(source, encoding="utf-8")
        for number in range(rounds):
            for suite in SUITES:
                for session in list(SESSIONS) if number % 2 else list(reversed(SESSIONS)):
                    runs[suite, session].append(run_session(Path(name) / suite, sessions[session], environment))
    for suite in SUITES:
        print(f"a test with {suite}, {rounds} rounds of each session in turns\n")
        rows = [(session, *_seconds(runs[suite, session])) for session in SESSIONS]
        print_table(("session", "wall, median", "wall, least", "CPU, median", "CPU, least"), rows)
        ratios = _ratios(*([cost.wall for cost in runs[suite, session]] for session in SESSIONS))
        print(f"median of the rounds' ratios of wall time: {statistics.median(ratios):.3f}\n")
    cpus = {suite: [[cost.cpu for cost in runs[suite, session]] for session in SESSIONS] for suite in SUITES}
    # A session also measures the test's own process, which costs the same with any number of children.
    added = {suite: [ours - theirs for ours, theirs in zip(*cpus[suite], strict=True)] for suite in SUITES}
    each = [1000 * (more - own) / CHILDREN for more, own in zip(added[WITHOUT_TORCH], added[NONE], strict=True)]
    texts = (
        f"{WITH_TORCH}: CPU time with the plugin over without, median of the rounds' ratios",
        f"{WITHOUT_TORCH}: milliseconds of CPU time that the plugin adds for each child, median of the rounds",
    )
    return [
        claim_of(texts[0], statistics.median, (_ratios(*cpus[WITH_TORCH]),), MOST_RATIO),
        claim_of(texts[1], statistics.median, (each,), MOST_MS["without torch"]),
    ]


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def compare_starts(rounds: int, environment: dict[str, str], counter: Mapping[str, str]) -> list[Claim]:
    """Start children with and without reporting in turns, and print what the starts took.

    Args:
        rounds: The number of starts with torch. Starts without torch are 10 times as many, because they are short.
        environment: The environment in which torch can be imported.
        counter: The variables of `Device.variables_of_processes`.
    """
    claims = []
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")} | {"PYTHONPATH": ""}
    for kind, code in STARTS.items():
        if kind == "with a tensor" and not counter:
            continue
        without = plain if kind == "without torch" else environment
        runs: dict[str, list[Cost]] = {"reporting": [], "not reporting": []}
        with tempfile.TemporaryDirectory() as name:
            reporting = {**without, **counter, **reporting_to(Path(name), without)}
            environments = {"reporting": reporting, "not reporting": without}
            for number in range(10 * rounds if kind == "without torch" else rounds):
                for child in list(runs) if number % 2 else list(reversed(runs)):
                    runs[child].append(start(code, environments[child]))
        rows = [(child, *_milliseconds(costs)) for child, costs in runs.items()]
        print(f"the start of a child {kind}, {len(runs['reporting'])} rounds of each kind in turns\n")
        print_table(("child", "CPU, median", "CPU, least", "wall, median", "wall, least"), rows)
        milliseconds = [[1000 * cost.cpu for cost in costs] for costs in runs.values()]
        text = f"the start of a child {kind}: milliseconds of CPU time for reporting"
        claims.append(claim_of(text, difference_of_medians, milliseconds, MOST_MS[kind]))
    return claims


def start(code: str, environment: dict[str, str]) -> Cost:
    """Run a child. Its usage is written when CUDA begins, and its mark when torch is imported."""
    cost, _ = cost_of(lambda: subprocess.run([sys.executable, "-c", code], env=environment, check=True))
    return cost


def _seconds(costs: list[Cost]) -> tuple[str, ...]:
    walls, cpus = [cost.wall for cost in costs], [cost.cpu for cost in costs]
    return tuple(f"{reduce(times):.2f} s" for times in (walls, cpus) for reduce in (statistics.median, min))


def _milliseconds(costs: list[Cost]) -> tuple[str, ...]:
    cpus, walls = [cost.cpu for cost in costs], [cost.wall for cost in costs]
    return tuple(f"{1000 * reduce(times):.1f} ms" for times in (cpus, walls) for reduce in (statistics.median, min))


def main() -> int:
    """Run everything in turns, print what it took, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--starts", action="store_true", help="time only starts, with torch as it is installed")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU instead of an emulated GPU")
    options = parser.parse_args()
    counter = CpuDevice().variables_of_processes() if options.cpu else {}
    if options.starts:
        return conclude(compare_starts(options.rounds, dict(os.environ), counter), check=options.check)
    emulating = {} if options.cpu else environment_for(emulated_gpu(GPU), os.environ)
    environment = {**os.environ, **emulating}
    claims = compare_sessions(options.rounds, environment, "cpu" if options.cpu else GPU)
    return conclude([*claims, *compare_starts(options.rounds, environment, counter)], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
