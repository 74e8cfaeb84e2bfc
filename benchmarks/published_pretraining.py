"""Peaks of one rank of torchtitan's pretraining jobs on an emulated GPU beside those that were published.

The peers of the rank are not there: its collectives return at once. Each suite needs its own packages, and says so where they
are missing. Nothing that is printed as emulated was measured on a GPU; ``published/pretraining-peaks.csv`` has the published
figures, each with its source.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from claims import Claim, conclude, print_table
from emulated_child import run_child, serve
from published_figures import HEADER, Compared, Figure, missing, write_results

HERE = Path(__file__).parent
PUBLISHED = HERE / "published" / "pretraining-peaks.csv"
CASE_SECONDS = 900
PERCENT_OFF = 2
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
STEPS = 3
"""The optimizer's state is made in the first step; peaks of the others are equal."""
NEEDS = {
    "h100": "torch===2.6.0 triton==3.2.0 torchao==0.8.0 torchtitan==0.1.0 torchdata (--no-deps)",
    "h200": "torch===2.8.0 triton==3.4.0 torchao==0.12.0 torchtitan==0.1.0 torchdata (--no-deps)",
}
"""Releases nearest to the published revisions: torch of 2024-12-23 and torchtitan of 2024-12-26; NVIDIA's 2.8.0a0 of May 2025
and torchtitan of 2025-06-13, five days before 0.1.0."""
ALSO = "datasets tiktoken blobfile tyro tensorboard setuptools"
GPUS = {"h100": "95GiB", "h200": "h200"}
"""The H100's of the table have "96GB"; torchtitan calls them "H100(95GB)" elsewhere."""


@dataclass(frozen=True)
class Job:
    """A published job of so many ranks, and how torchtitan is called for it."""

    suite: str
    ranks: int
    arguments: tuple[str, ...]
    compile_loss: bool = False
    """torchtitan compiles the loss with the model since 2025."""
    expandable: bool = False
    """Use of expandable segments, which torchtitan's script for one host sets, and its Slurm script does not."""


def _arguments(model: str, batch: int, length: int = 8192, **changes: object) -> tuple[str, ...]:
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    sizes = {"model.flavor": model, "training.local_batch_size": batch, "training.seq_len": length}
    return tuple(f"--{name}={value}" for name, value in {**sizes, **changed}.items())


_SELECTIVE = _arguments(
    "8B", 2, activation_checkpoint__mode="selective", activation_checkpoint__selective_ac_option="op"
)
_COMPILED = (*_SELECTIVE, "--training.compile")
_FLOAT8 = (
    *("--training.compile", "--model.converters", "float8", "--float8.filter_fqns", "output"),
    *("--float8.enable_fsdp_float8_all_gather", "--float8.precompute_float8_dynamic_scale_for_fsdp"),
)
_H200 = (*_SELECTIVE, *_FLOAT8, "--float8.force_recompute_fp8_weight_in_bwd")


def _long(ranks: int) -> tuple[str, ...]:
    """Return the arguments for sequences of which each of so many ranks has 32,768 tokens."""
    split = {"parallelism__context_parallel_degree": ranks, "activation_checkpoint__mode": "full"}
    return (*_arguments("8B", 1, 32768 * ranks, **split), *_FLOAT8)


JOBS = {
    "FSDP8 lbs2 SAC": Job("h100", 8, _SELECTIVE),
    "FSDP8 lbs2 SAC compile": Job("h100", 8, _COMPILED),
    "FSDP8 lbs2 SAC compile float8": Job("h100", 8, (*_SELECTIVE, *_FLOAT8)),
    "FSDP128 lbs2 SAC": Job("h100", 128, _SELECTIVE),
    "FSDP128 lbs2 SAC compile": Job("h100", 128, _COMPILED),
    "FSDP128 compile float8": Job("h100", 128, (*_SELECTIVE, *_FLOAT8)),
    "FSDP8 CP1 s32768 full AC compile float8 lbs1": Job("h100", 8, _long(1), expandable=True),
    "FSDP4 CP2 s65536": Job("h100", 8, _long(2), expandable=True),
    "FSDP2 CP4 s131072": Job("h100", 8, _long(4), expandable=True),
    "FSDP1 CP8 s262144": Job("h100", 8, _long(8), expandable=True),
    "70B FSDP32 TP8 lbs16 full AC compile float8": Job(
        "h100",
        256,
        (*_arguments("70B", 16, activation_checkpoint__mode="full", parallelism__tensor_parallel_degree=8), *_FLOAT8),
    ),
    "4 nodes x 8 H200, lbs 2": Job("h200", 32, _H200, compile_loss=True),
    "8 nodes x 8 H200, lbs 2": Job("h200", 64, _H200, compile_loss=True),
}
"""Jobs by their config in the table. Why the others are not run is in `results/emulated-95gib/pretraining.md`."""


def run_job(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Train with a rank of torchtitan in this process."""
    import torchtitan_jobs

    return torchtitan_jobs.run_job(asked)


def compare(suite: str, only: str, out: Path) -> tuple[list[Compared], list[Claim]]:
    """Run the jobs of a suite, and write their results unless only some were asked for."""
    # A pool of compiling processes would import torch without the stand-ins. What is compiled anew tries kernels on the GPU,
    # which leaves blocks in the allocator's cache: 0.13 GiB of FSDP8's compiled row.
    compiling = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        published = {row["config"]: row for row in csv.DictReader(file)}
    compared, claims, results = [], [], {}
    for name, job in JOBS.items():
        if job.suite != suite or only not in name:
            continue
        asked = {
            "do": "run_job",
            "gpu": GPUS[suite],
            "values": False,
            "steps": STEPS,
            "ranks": job.ranks,
            "arguments": job.arguments,
            "compile_loss": job.compile_loss,
        }
        environment = {**os.environ, **compiling, ALLOCATOR: f"expandable_segments:{job.expandable}"}
        _, peaks = run_child(Path(__file__), asked, environment, CASE_SECONDS)
        row = published[name]
        one = Compared(name, "peak_reserved", peaks[-1]["reserved"], Figure.read(row))
        print(*one.cells(), sep="  ", flush=True)
        compared.append(one)
        claims.append(Claim(f"{name}: percent off", one.off, PERCENT_OFF))
        results[name] = {
            "source": f"{row['source']} {row['path']}",
            "published": f"{row['value']} {row['unit']}",
            "expandable_segments": job.expandable,
            "emulated": peaks,
        }
    if not only:
        write_results(out, GPUS[suite], "torchtitan", ("torch", "triton", "torchtitan", "torchao"), results)
    return compared, claims


def main() -> int:
    """Run the jobs, print the emulated peaks beside the published ones, and tell whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=tuple(NEEDS), nargs="?", default="h100")
    parser.add_argument("--only", default="", metavar="WORD", help="rows with this in their name; nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of results")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        serve(options.do, {"run_job": run_job})
    if lack := missing("torchtitan", f"{NEEDS[options.suite]}, {ALSO}"):
        parser.error(lack)
    compared, claims = compare(options.suite, options.only, options.out)
    print(f"\nEmulated, torch {version('torch')}\n")
    print_table(HEADER, [one.cells() for one in compared])
    return conclude(claims, check=True)


if __name__ == "__main__":
    sys.exit(main())
