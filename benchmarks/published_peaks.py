"""Peaks of an emulated GPU beside peaks that others have published from real ones.

``published/`` has the publishers' figures, each with its source. Nothing that is printed as emulated was measured on a GPU.

- `cs336_model.py`: a language model of a course. A case is a process of its own, and the step that counts is the sixteenth, as
  it was there: what is allocated moves by a few tenths of a percent from step to step.
- `liger_kernels.py`: sixteen kernels in plain PyTorch.
- The small model's peaks in steps 2 to 40 of one process, to show how far they move.
"""

from __future__ import annotations

import argparse
import csv
import json
import operator
import os
import platform
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import Claim, conclude, print_table
from emulated_child import run_child, serve
from published_figures import HEADER, Compared, Figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HERE = Path(__file__).parent
PUBLISHED = HERE / "published"
PEAKS = ("peak_allocated", "peak_reserved")
EMULATED_BY = {
    "NVIDIA B200": "b200",
    "NVIDIA A800-SXM4-80GB": "a100",  # the same chip and memory, with slower links to its neighbours
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100",  # with fewer multiprocessors
    "NVIDIA GeForce RTX 3090": "rtx3090",
}
STEPS_BEFORE = 15
"""Five to warm up and ten timed, as the publisher did."""
WORKSPACE = ":4096:2:16:8"
"""Workspace of cuBLAS in the published runs, 8,519,680 bytes a thread. torch 2.13 gives a B200 more of itself."""
WANDERING = range(2, 41)
CASE_SECONDS = 600


@dataclass(frozen=True)
class Case:
    """A case of the course's model. The fields before ``published`` are those of `cs336_model.Run`."""

    size: str
    precision: str
    mode: str
    context: int
    group: int
    ranks: int
    sharded: bool
    gpu: str
    source: str
    published: dict[str, Figure] = field(compare=False)

    @property
    def name(self) -> str:
        grouped = f", {self.group} under a checkpoint" if self.group else ""
        shared = f", {'sharded over ' if self.sharded else ''}{self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.size} {self.precision} {self.mode} s{self.context}{grouped}{shared}"


def cs336_cases() -> list[Case]:
    """Cases of the course's model with their published figures."""
    with (PUBLISHED / "published-peaks.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cases = []
    for _, same in groupby(rows, key=lambda row: (row["gpu"], row["config"])):
        group = list(same)
        row = group[0]
        cases.append(_case(row, {one["metric"]: Figure.read(one) for one in group}))
    return cases


def _case(row: Mapping[str, str], published: dict[str, Figure]) -> Case:
    text = f"{row['model']} {row['config']}"
    words = {word.strip(",") for word in text.split()}

    def one_of(*known: str) -> str:
        return next(word for word in known if word in words)

    context = int(re.findall(r"\bs(\d+)\b", text)[0])
    every = re.findall(r"every (\d+) block", text)
    segments = re.findall(r"checkpoint_segments=(\d+)", text)
    ranks = re.findall(r"\b(\d+) ranks", text)
    blocks = 32  # only xl is checkpointed
    group = int(every[0]) if every else -(-blocks // int(segments[0])) if segments else 0
    mode, precision = one_of("forward", "backward", "train"), one_of("fp32", "bf16")
    source = f"{row['source']} {row['path']}"
    size, shared = one_of("small", "medium", "xl"), int(ranks[0]) if ranks else 1
    return Case(size, precision, mode, context, group, shared, "sharded" in words, row["gpu"], source, published)


def liger_rows() -> list[dict[str, str]]:
    """Published rows of the kernels in plain PyTorch."""
    with (PUBLISHED / "liger-memory.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# What a process of its own does: `run_child` starts one of these with its arguments as JSON.


def run_case(asked: dict[str, Any]) -> dict[str, int]:
    """Make the steps before, and read the allocator's figures in the next one."""
    import torch
    from cs336_model import Run, make_step

    step = make_step(Run(**asked["run"]))
    figures = {"initial_allocated": torch.cuda.memory_allocated()}
    for _ in range(asked["before"]):
        step(None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(figures)
    torch.cuda.synchronize()
    figures["peak_allocated"] = torch.cuda.max_memory_allocated()
    figures["peak_reserved"] = torch.cuda.max_memory_reserved()
    figures["peak_requested"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return figures


def run_steps(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Read the peaks of each step."""
    import torch
    from cs336_model import Run, make_step

    step = make_step(Run(**asked["run"]))
    peaks = []
    for number in range(1, WANDERING.stop):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(None)
        stats = torch.cuda.memory_stats()
        if number in WANDERING:
            peaks.append({of: stats[f"{of}_bytes.all.peak"] for of in ("requested", "allocated", "reserved")})
    return peaks


def run_kernels(asked: dict[str, Any]) -> list[float]:
    """Run published rows of one kernel one after the other, as there."""
    from liger_kernels import peak_of, warm_up

    warm_up(asked["rows"][0])
    return [peak_of(row) for row in asked["rows"]]


CHILDREN = {function.__name__: function for function in (run_case, run_steps, run_kernels)}


class Runner:
    """Starts the processes, and notes what they ran on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.values: bool = options.values
        self.workspace: str = options.workspace
        self.before: int = options.before
        self.addresses: str = options.addresses
        self.torch = ""

    def run(self, do: str, gpu: str, *, own_workspace: bool, **asked: Any) -> Any:
        """Have a new process do something on an emulated GPU. Raises ``RuntimeError`` with what it wrote when it fails."""
        environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
        environment["GPUMEM_EMULATED_ADDRESSES"] = self.addresses
        if self.workspace and not own_workspace:
            environment["CUBLAS_WORKSPACE_CONFIG"] = self.workspace
        asked |= {"do": do, "gpu": gpu, "values": self.values, "before": self.before}
        self.torch, result = run_child(Path(__file__), asked, environment, CASE_SECONDS)
        return result

    def environment(self, gpu: str) -> dict[str, Any]:
        return {
            "emulated": True,
            "gpu": f"emulated:{gpu}",
            "torch": self.torch,
            "python": platform.python_version(),
            "CUBLAS_WORKSPACE_CONFIG": {"cs336": self.workspace or None, "liger": None},
            "GPUMEM_EMULATED_ADDRESSES": self.addresses,
            "host_values": self.values,
            "steps_before": self.before,
        }


def compare_cs336(runner: Runner, only: str, into: dict[str, dict[str, Any]]) -> list[Compared]:
    """Run the cases; results go ``into`` a dictionary by GPU. Returns all figures, also those within the step."""
    compared = []
    for case in cs336_cases():
        if only not in case.name:
            continue
        gpu = EMULATED_BY[case.gpu]
        run = {name: value for name, value in asdict(case).items() if name not in ("gpu", "source", "published")}
        gpus = f"{gpu}x{case.ranks}" if case.ranks > 1 else gpu
        figures = runner.run("run_case", gpus, own_workspace=False, run=run)
        name = case.name if gpu == "b200" else f"{case.name} (A800)"
        these = [Compared(name, metric, figures[metric], figure) for metric, figure in case.published.items()]
        compared += these
        for one in these:
            if one.metric in PEAKS:
                print(*one.cells(), sep="  ", flush=True)
        into.setdefault(gpu, {}).setdefault("cs336", {})[case.name] = {
            "published_on": case.gpu,
            "source": case.source,
            "emulated": figures,
            "published": {
                metric: f"{figure.value:.{figure.digits}f} {figure.unit}" for metric, figure in case.published.items()
            },
        }
    return compared


def compare_liger(runner: Runner, only: str, into: dict[str, dict[str, Any]]) -> list[Compared]:
    """Run the kernels, those of one GPU, kernel and axis in one process, as they were run there."""
    compared = []
    sweep = operator.itemgetter("gpu", "kernel", "x_name")
    rows = sorted(liger_rows(), key=sweep)
    dtypes = Counter((*sweep(row), row["mode"], row["x"]) for row in rows)
    for (gpu_name, kernel, _), same in groupby(rows, key=sweep):
        if only not in kernel:
            continue
        group, gpu = list(same), EMULATED_BY[gpu_name]
        peaks = runner.run("run_kernels", gpu, own_workspace=True, rows=group)
        for row, peak in zip(group, peaks, strict=True):
            several = dtypes[(*sweep(row), row["mode"], row["x"])] > 1
            of = f", {json.loads(row['config'])['dtype'].removeprefix('torch.')}" if several else ""
            name = f"{kernel} {row['mode']} {row['x_name']}={row['x']} ({gpu}{of})"
            compared.append(Compared(name, "peak_allocated", peak, Figure.read(row)))
            into.setdefault(gpu, {}).setdefault("liger", {})[name] = {
                "published_on": gpu_name,
                "source": row["source"],
                "emulated": peak,
                "published": f"{row['value']} {row['unit']}",
            }
    return compared


def claims_of_cs336(compared: Sequence[Compared]) -> Iterable[Claim]:
    """Of the peaks that are published in bytes at most one in ten differs, and of all none by much.

    The publisher's FSDP is code of its own, in place of which torch's shards each layer.
    """
    sharded = [one for one in compared if "sharded" in one.name and one.metric in PEAKS]
    compared = [one for one in compared if "sharded" not in one.name]
    for one in sharded:
        yield Claim(
            f"peak allocated under torch's FSDP in place of the publisher's ({one.name}): off in %", one.off, 2.0
        )
    for metric, most in zip(PEAKS, (0.05, 1.0), strict=True):
        those = [one for one in compared if one.metric == metric]
        exact = [one for one in those if one.published.unit == "B"]
        if exact:
            equal = sum(one.equal for one in exact)
            text = f"{metric.replace('_', ' ')}: {equal} of {len(exact)} that are published in bytes are equal"
            yield Claim(f"{text}; share that differs", (len(exact) - equal) / len(exact), 0.1)
        if those:
            worst = max(those, key=lambda one: one.off)
            text = f"{metric.replace('_', ' ')}: the largest difference in %"
            yield Claim(f"{text} ({worst.name})" if worst.off else text, worst.off, most)


def claims_of_liger(compared: Sequence[Compared]) -> Iterable[Claim]:
    """At most one row in ten is more than 1 % off."""
    off = sum(abs(one.percent) > 1 for one in compared)
    equal = sum(one.equal for one in compared)
    worst = max(compared, key=lambda one: abs(one.percent))
    text = f"kernels: {equal} of {len(compared)} equal, the worst {worst.percent:+.3f} % ({worst.name})"
    yield Claim(f"{text}; share that is more than 1 % off", off / len(compared), 0.1)


def print_wandering(peaks: Sequence[Mapping[str, int]]) -> None:
    """Print how each figure moves from step to step."""
    print(f"small fp32 train s512, peaks of steps {WANDERING.start} to {WANDERING.stop - 1} of one process, emulated\n")
    rows = []
    for of in ("requested", "allocated", "reserved"):
        figures = [one[of] for one in peaks]
        moved = 100 * (max(figures) - min(figures)) / min(figures)
        rows.append((of, f"{min(figures):,}", f"{max(figures):,}", str(len(set(figures))), f"{moved:.3f} %"))
    print_table(("figure", "least, B", "most, B", "different values", "most over least"), rows)


def write_results(runner: Runner, results: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write a file for each emulated GPU, with torch's release in its name."""
    release = runner.torch.partition("+")[0]
    for gpu, parts in results.items():
        path = folder / f"emulated-{gpu}" / f"published-peaks-torch-{release}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**runner.environment(gpu), **parts}, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path}")


def main() -> int:
    """Run all, print the emulated peaks beside the published ones, and tell whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their name; nothing is written")
    parser.add_argument(
        "--addresses",
        choices=("ascending", "descending"),
        default="ascending",
        help="the order in which the host gives address space: on ordinary Linux it descends (default: %(default)s)",
    )
    parser.add_argument(
        "--workspace", default=WORKSPACE, help="cuBLAS's for the model, '' for torch's own (default: %(default)s)"
    )
    parser.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute small tensors on the host, as gpumem emulate does (default: on)",
    )
    parser.add_argument(
        "--before", type=int, default=STEPS_BEFORE, help="steps before the one that counts (default: 15)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of results")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        serve(options.do, CHILDREN)
    runner = Runner(options)
    results: dict[str, Any] = {}
    compared = compare_cs336(runner, options.only, results)
    kernels = compare_liger(runner, options.only, results)
    claims: list[Claim] = []
    print(f"\nEmulated, torch {runner.torch}, {options.before} steps before\n")
    if compared:
        print_table(HEADER, [one.cells() for one in compared if one.metric in PEAKS])
        stages = [one for one in compared if one.metric not in PEAKS]
        equal = sum(one.equal for one in stages)
        print(f"Allocated before, between and after the phases of the step: {equal} of {len(stages)} equal\n")
        claims += claims_of_cs336(compared)
    if kernels:
        print_table(HEADER, [one.cells() for one in kernels])
        claims += claims_of_liger(kernels)
    if not options.only:
        run = {"size": "small", "precision": "fp32", "mode": "train", "context": 512}
        steps = runner.run("run_steps", "b200", own_workspace=False, run=run)
        print_wandering(steps)
        results["b200"]["steps_of_small_fp32_train"] = steps
        write_results(runner, results, options.out)
    return conclude(claims, check=True)


if __name__ == "__main__":
    sys.exit(main())
