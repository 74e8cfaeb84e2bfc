"""Replay regressions of released packages by ``gpumem ab``, and write which of them it catches.

Each TOML file in ``replays/`` is a regression that somebody reported, with the releases before and after; the test of its name
runs, in small, what it was reported of. Both releases are compared, and then the better one with itself: the control, whose
figures have to be equal to the byte. Releases are installed from the package index into the cache of ``gpumem cache``. Results
of replays that are not run now stay in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost import cost_of

from pytest_gpumem.base.processes import Stop
from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.reports.values import shown
from pytest_gpumem.tools.ab.command import environments

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = Path(__file__).parent / "replays"
RESULTS = Path(__file__).parent / "results"
RECORD, TABLE = "replays.jsonl", "replays.md"
MOST_SECONDS = 540
EXPLAINED_BY = {"flops": "more FLOPs", "growth": "kept by each step"}
"""The title of the table that explains a metric, where it is not `WHAT_GREW`."""
WHAT_GREW = "what grew"
KEPT_IN = "kept in: "
PLACES = ("first", "second", "third", "fourth", "fifth")
HEADER = (
    "package",
    "releases",
    "device",
    "metric",
    "before",
    "after",
    "caught",
    "changed line",
    "control",
    "CPU seconds",
)


ABOUT = (
    "# Replayed regressions",
    "",
    "Written by `make replays`. Each row is a comparison by `gpumem ab` of two releases, of which the second needs more; the",
    "link leads to the thread. *Changed line* is the place, among the rows of the report, of the first one that names it; of",
    "tensors that are kept, among the lines that say by what. *Control* is what the first release differs from itself, bytes",
    "and counts.",
    "On an emulated GPU convolutions ran without cuDNN: their workspaces are taken as 0.",
    "",
)


@dataclass(frozen=True)
class Replay:
    """A regression of a released package.

    ``good`` and ``bad`` are requirements, ``devices`` those that it can be seen on. ``lines`` are what the report has to name
    one of: a changed line that takes more, or what keeps tensors that are kept; none where the change is in C++.
    """

    name: str
    package: str
    good: tuple[str, ...]
    bad: tuple[str, ...]
    thread: str
    cause: str
    metric: str
    lines: tuple[str, ...]
    devices: tuple[str, ...]

    @classmethod
    def read(cls, file: Path) -> Replay:
        """Read a TOML file. Raises `TypeError` where it lacks a key or has another one."""
        keys: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        lists: dict[str, Any] = {key: tuple(value) for key, value in keys.items() if isinstance(value, list)}
        return cls(**{"name": file.stem, **keys, **lists})

    @property
    def test(self) -> Path:
        """The file of its test."""
        return HERE / f"test_{self.name}.py"

    @property
    def releases(self) -> tuple[str, str]:
        """The better and the worse release of the package."""
        pinned = (dict(one.split("==") for one in requirements) for requirements in (self.good, self.bad))
        good, bad = (one[self.package] for one in pinned)
        return good, bad


def replays() -> list[Replay]:
    """Return all replays, by name."""
    return [Replay.read(file) for file in sorted(HERE.glob("*.toml")) if file.name != "pyproject.toml"]


@dataclass(frozen=True)
class Result:
    """Result of a replay on a device. ``before`` and ``after`` are in the metric's unit.

    ``place`` is that of the first row which names the changed line among those that explain the regression, from 0.
    ``control`` is the sum of what bytes and counts of the better release differ from themselves; ``None`` if not compared.
    ``why_not`` says why nothing could be compared, here or in the control.
    """

    name: str
    device: str
    before: float | None
    after: float | None
    caught: bool
    place: int | None
    control: float | None
    cpu_seconds: float
    date: str
    machine: str
    why_not: str = ""


@dataclass(frozen=True)
class Comparison:
    """Result of a run of ``gpumem ab``."""

    status: int
    report: dict[str, Any]
    text: str
    error: str
    cpu_seconds: float

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The metrics of the test, by name."""
        return {one["metric"]: one for test in self.report.get("tests", ()) for one in test["metrics"]}

    def explained_by(self, metric: str) -> list[str]:
        """Return the rows of the table that explains a metric, or, of tensors that are kept, the lines that say by what."""
        _, _, table = self.text.partition(f"\n  {EXPLAINED_BY.get(metric, WHAT_GREW)} ")
        rows = [row.strip() for row in table.partition("\n\n")[0].splitlines()[1:]]
        return [row for row in rows if row.startswith(KEPT_IN)] or rows


def compare(replay: Replay, base: Sequence[str], head: Sequence[str], device: str) -> Comparison:
    """Run a replay's test with two sets of requirements, which are installed before CPU time is taken."""
    for wanted in {tuple(base), tuple(head)}:
        environments().make(requirement_set(wanted), Stop(), emulated=device.startswith("emulated"))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest_gpumem.tools.main", "ab", "--report", str(report)]
        command += [word for one in base for word in ("--base-with", one)]
        command += [word for one in head for word in ("--head-with", one)]
        command += ["--", f"--gpumem-device={device}", "--no-gpumem-time", replay.test.name]
        cost, done = cost_of(
            lambda: subprocess.run(
                command,
                cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=MOST_SECONDS,
            )
        )
        given = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return Comparison(done.returncode, given, done.stdout, done.stderr, cost.cpu)


def replayed(replay: Replay, device: str) -> Result:
    """Run a replay on a device, with its control."""
    compared = compare(replay, replay.good, replay.bad, device)
    control = compare(replay, replay.good, replay.good, device)
    metric = compared.metrics.get(replay.metric, {})
    rows = compared.explained_by(replay.metric)
    return Result(
        replay.name,
        device,
        metric.get("base"),
        metric.get("head"),
        compared.status == 1 and metric.get("outcome") == "regressed",
        next((number for number, row in enumerate(rows) if any(line in row for line in replay.lines)), None),
        _sum_of_differences(control),
        round(compared.cpu_seconds, 1),
        f"{datetime.now(timezone.utc):%Y-%m-%d}",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}",
        next((_last_line(one.error) for one in (compared, control) if not one.metrics), ""),
    )


def _sum_of_differences(control: Comparison) -> float | None:
    pairs = [(one["base"], one["head"]) for one in control.metrics.values()]
    if not pairs or control.status != 0:
        return None
    return float(sum(abs((then or 0) - (now or 0)) for then, now in pairs))


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def table(results: Iterable[Result], known: dict[str, Replay]) -> list[str]:
    """Return the results as a table in Markdown."""
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [_cells(result, known[result.name]) for result in results]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _cells(result: Result, replay: Replay) -> tuple[str, ...]:
    metric, (good, bad) = METRICS[replay.metric], replay.releases
    place = "no" if result.place is None else PLACES[min(result.place, len(PLACES) - 1)]
    return (
        replay.package,
        f"[{good} → {bad}]({replay.thread})",
        result.device,
        metric.title,
        shown(replay.metric, result.before, "si") or "-",
        shown(replay.metric, result.after, "si") or "-",
        "yes" if result.caught else f"no{': ' if result.why_not else ''}{result.why_not}",
        place if replay.lines else "in C++",
        "-" if result.control is None else f"{result.control:.0f}",
        f"{result.cpu_seconds:.0f}",
    )


def short_table(results: Iterable[Result], known: dict[str, Replay]) -> list[str]:
    """Return a row for each replay, of a GPU where there is one, for a page about more than replays."""
    chosen = {one.name: one for one in sorted(results, key=lambda one: one.device != "cpu")}
    rows = [("package", "releases", "device", "before → after", "changed line"), ("---",) * 5]
    for name in sorted(chosen):
        cells = dict(zip(HEADER, _cells(chosen[name], known[name]), strict=True))
        line = " or ".join(one.rpartition(": ")[2].rstrip(":") for one in known[name].lines)
        named = {"first": line, "no": f"not named: {line}"}.get(cells["changed line"], cells["changed line"])
        grown = f"{cells['before']} → {cells['after']}" if chosen[name].caught else "missed"
        rows.append((cells["package"], cells["releases"], cells["device"], grown, named))
    return [f"| {' | '.join(cells)} |" for cells in rows]


def recorded(folder: Path, known: dict[str, Replay]) -> list[Result]:
    """Return the results of replays that there are, as they were last written."""
    record = folder / RECORD
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return [one for one in (Result(**json.loads(line)) for line in lines) if one.name in known]


def page(results: Sequence[Result], known: dict[str, Replay]) -> str:
    """Return the page of all results."""
    of_python = [one for one in results if known[one.name].lines]
    causes = [f"- `{one.name}`: {one.cause}." for one in known.values() if any(r.name == one.name for r in results)]
    machines = sorted({f"- {one.date}: {one.machine}" for one in results})
    counted = (
        f"{sum(one.caught for one in results)} of {len(results)} are caught; the changed line is named first in "
        f"{sum(one.place == 0 for one in of_python)} of {len(of_python)}; "
        f"{sum(one.control == 0 for one in results)} of {len(results)} controls are equal."
    )
    return "\n".join([*ABOUT, counted, "", *table(results, known), "", *causes, "", *machines, ""])


def write(new: Iterable[Result], folder: Path, known: dict[str, Replay]) -> None:
    """Write results beside earlier ones of other replays and devices, into the record and the page."""
    kept = {(one.name, one.device): one for one in (*recorded(folder, known), *new)}
    results = [kept[key] for key in sorted(kept)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text("".join(json.dumps(asdict(one)) + "\n" for one in results), encoding="utf-8")
    (folder / TABLE).write_text(page(results, known), encoding="utf-8")


def main() -> None:
    known = {one.name: one for one in replays()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(known)}; without one, all")
    parser.add_argument(
        "--device", default="", help="run on devices whose name begins so: cpu, emulated, emulated:b200"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"there is no replay {', '.join(unknown)}: they are {', '.join(known)}")
    for name in arguments.names or known:
        for device in known[name].devices:
            if device.startswith(arguments.device):
                result = replayed(known[name], device)
                write([result], arguments.out, known)
                print(table([result], known)[-1], flush=True)


if __name__ == "__main__":
    main()
