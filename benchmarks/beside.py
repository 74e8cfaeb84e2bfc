"""Figures of an emulated GPU beside those of a real one, of the same code under the same releases.

``record`` runs the tests in ``beside/`` (operators and layers, forward and backward) on the GPU that is there, or on an
emulated one under `gpumem emulate`, and keeps what was measured in ``results/<device>/beside.json``; ``--report`` takes the
report of such a run instead. ``compare`` reads two folders of results, with these files and with tables of truth
(``truth.json``), and prints how many figures are equal to the byte, and what is not.

    python benchmarks/beside.py record
    gpumem emulate h100 -- python benchmarks/beside.py record
    python benchmarks/beside.py compare benchmarks/results/nvidia-h100-80gb-hbm3 benchmarks/results/emulated-h100-80gb
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HERE = Path(__file__).parent
TESTS = HERE / "beside"
RESULTS = HERE / "results"
FILE, TRUTH = "beside.json", "truth.json"
METRICS = ("peak_allocated", "peak_reserved", "retained", "growth", "flops", "operators", "syncs")
COUNTERS = ("requested", "allocated", "reserved")
"""Of a table of truth: what tensors asked for, the same in the allocator's blocks, and what it holds from the driver."""
NEAR = 0.1
"""Percent."""
HEADER = ("of", "metric", "figures", "equal", f"within {NEAR} %", "lowest", "highest", "farthest in")


@dataclass(frozen=True)
class Kept:
    """A file of figures: by case, then by metric; and the cases that an emulated GPU says it cannot know."""

    figures: Mapping[str, Mapping[str, float]]
    unknown: frozenset[str]


@dataclass(frozen=True)
class Pair:
    """One figure on both."""

    case: str
    metric: str
    real: float
    emulated: float

    @property
    def percent(self) -> float:
        """The emulated figure's difference to the measured one, in percent of that."""
        return 0.0 if self.emulated == self.real else 100 * (self.emulated - self.real) / (self.real or 1)

    @property
    def kind(self) -> str:
        """The case's kind: a model of the table of truth, or an operator or a layer."""
        return self.case.partition("/")[0].partition("[")[0]


def record(options: argparse.Namespace) -> int:
    """Run the tests, or take a report of them, and keep what was measured. Returns the exit status of pytest."""
    if options.report is not None:
        print(f"written: {keep(json.loads(options.report.read_text(encoding='utf-8')), options.out)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        status = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", str(TESTS)),
                *("--gpumem-device=cuda", "--gpumem-explain=never", "--no-gpumem-time", f"--gpumem-report={report}"),
            ],
            check=False,
        ).returncode
        if report.exists():
            print(f"written: {keep(json.loads(report.read_text(encoding='utf-8')), options.out)}")
    return status


def keep(report: Mapping[str, Any], out: Path) -> Path:
    """Write the figures of a report into the folder of its device. Returns the file."""
    cases: dict[str, dict[str, Any]] = {}
    environment: dict[str, Any] = {}
    for verdict in (result["verdict"] for result in report["results"]):
        name = verdict["test"].removeprefix("test_")
        if verdict["unmeasured"]:
            cases[name] = {"unmeasured": verdict["unmeasured"]}
        for one in verdict["verdicts"]:
            figures = {metric: one["measurement"]["metrics"].get(metric) for metric in METRICS}
            cases.setdefault(name, {}).update({metric: size for metric, size in figures.items() if size is not None})
            environment = environment or one["measurement"]["environment"]
    path: Path = out / environment["slug"] / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"device": environment["device"], **environment["details"]}, sort_keys=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cases[name], sort_keys=True)}" for name in sorted(cases))
    path.write_text(f'{{"environment": {head},\n "cases": {{\n{lines}\n }}}}\n', encoding="utf-8")
    return path


def read(path: Path) -> Kept:
    """Return what a file holds: of this script, or a table of truth."""
    figures: dict[str, Mapping[str, float]] = {}
    unknown = set()
    for name, case in json.loads(path.read_text(encoding="utf-8"))["cases"].items():
        if case.get("unmeasured") or case.get("failed") or case.get("cannot_run"):
            unknown.add(name)
        elif "peaks" in case:
            figures |= {
                f"{name} {phase}": {one: peaks[one] for one in COUNTERS} for phase, peaks in case["peaks"].items()
            }
        else:
            figures[name] = case
    return Kept(figures, frozenset(unknown))


def pairs(real: Kept, emulated: Kept) -> Iterator[Pair]:
    """Pair what both have."""
    for case, metrics in real.figures.items():
        for metric, figure in metrics.items():
            if metric in emulated.figures.get(case, {}):
                yield Pair(case, metric, figure, emulated.figures[case][metric])


def summary(found: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind of case and metric: figures, equal ones, near ones, both ends, and the farthest one's case."""
    for kind, metric in dict.fromkeys((one.kind, one.metric) for one in found):
        those = [one for one in found if (one.kind, one.metric) == (kind, metric)]
        worst = max(those, key=lambda one: abs(one.percent))
        counts = (len(those), sum(not one.percent for one in those), sum(abs(one.percent) <= NEAR for one in those))
        ends = min(one.percent for one in those), max(one.percent for one in those)
        yield (
            kind,
            metric,
            *map(str, counts),
            *(f"{end:+.2f} %" if end else "" for end in ends),
            worst.case if worst.percent else "",
        )


def compare(options: argparse.Namespace) -> int:
    """Print one beside the other. Returns the exit status: 2 where there is nothing to compare."""
    paths = {name: [folder / name for folder in (options.real, options.emulated)] for name in (FILE, TRUTH)}
    both = [files for files in paths.values() if all(path.exists() for path in files)]
    if not both:
        print(f"neither {FILE} nor {TRUTH} is in both folders: {options.real}, {options.emulated}", file=sys.stderr)
        return 2
    for files in both:
        real, emulated = map(read, files)
        found = list(pairs(real, emulated))
        print(f"\n{files[1]} beside {files[0]}")
        print_table(HEADER, summary(found))
        if options.all:
            apart = sorted((one for one in found if one.percent), key=lambda one: -abs(one.percent))
            rows = [
                (one.case, one.metric, f"{one.real:,}", f"{one.emulated:,}", f"{one.percent:+.3f} %") for one in apart
            ]
            print_table(("case", "metric", "real", "emulated", ""), rows)
        print(f"{len(emulated.unknown - real.unknown)} cases are unmeasured on the emulated GPU only, with a reason")
    return 0


def main() -> int:
    """Record, or compare. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="run the tests, and keep what was measured")
    recording.add_argument("--out", type=Path, default=RESULTS, help="the folder of results (default: %(default)s)")
    recording.add_argument("--report", type=Path, help="take this report of the tests instead of running them")
    recording.set_defaults(do=record)
    comparing = commands.add_parser("compare", help="print one beside the other")
    comparing.add_argument("real", type=Path, help="a folder of results")
    comparing.add_argument("emulated", type=Path, help="another")
    comparing.add_argument("--all", action="store_true", help="print each figure that differs, too")
    comparing.set_defaults(do=compare)
    options = parser.parse_args()
    status: int = options.do(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
