"""Peaks of torchtune's recipes, PEFT's methods and FakeGPU's workers on an emulated GPU beside published ones.

Each suite needs its own packages, and says so where they are missing. Nothing that is printed as emulated was measured on a
GPU; ``published/finetuning-peaks.csv`` has the published figures, each with its source.
"""

from __future__ import annotations

import argparse
import csv
import operator
import os
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import fakegpu_workers
from claims import Claim, conclude, print_table
from emulated_child import run_child, serve
from published_figures import HEADER, Compared, Figure, missing, write_results

HERE = Path(__file__).parent
PUBLISHED = HERE / "published" / "finetuning-peaks.csv"
CASE_SECONDS = 900
STEPS = 3
"""Steps of a recipe: the optimizer's state is made in the first, and the peaks of the others are equal."""
BASELINE_LENGTH = 256
"""Tokens of a text that is not packed. Up to 640 the peak is that of the backward's end, which has no activations."""
NEEDS = {
    "torchtune": "torch===2.7.1 triton==3.3.1 torchtune==0.4.0 torchao==0.7.0 (--no-deps), datasets omegaconf psutil pillow "
    "tiktoken sentencepiece blobfile; "
    "not torch 2.6, whose flex attention has no backward for heads of 128 (pytorch issue 146260)",
    "peft": "torch===2.13.0 peft (--no-deps; published with d787f51b), transformers==5.13.1 accelerate",
    "fakegpu": "torch===2.8.0 or torch===2.12.1 (rows of a GPU each) peft (--no-deps), transformers==5.12.1 accelerate, and "
    "--sources: a checkout of github.com/FanBB2333/FakeGPU at 7d5cf83c",
}
PACKAGES = {"torchtune": "torchtune", "peft": "peft", "fakegpu": "peft"}
"""A package that each suite needs besides torch."""
FUSED = {"_component_": "torch.optim.AdamW", "lr": 2e-5, "fused": True}
WHOLE_LOSS = {"_component_": "torch.nn.CrossEntropyLoss"}
CHUNKED = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}


@dataclass(frozen=True)
class Row:
    """A published figure, and how torchtune is run for it."""

    name: str
    gpu: str
    metric: str
    figure: Figure
    source: str
    run: dict[str, Any] = field(compare=False)


def _full(**changes: Any) -> dict[str, Any]:
    start = {
        "compile": False,
        "loss": WHOLE_LOSS,
        "enable_activation_checkpointing": False,
        "optimizer_in_bwd": False,
        "optimizer": FUSED,
    }
    return {
        "recipe": "full_finetune_single_device",
        "config": "llama3_2/3B_full_single_device",
        "weights": "torchtune.models.llama3_2.llama3_2_3b",
        "length": 4096,
        "packed": True,
        "changes": start | changes,
    }


def _lora(kind: str, model: str, **more: Any) -> dict[str, Any]:
    family, size = ("llama3_2", "3B") if model.endswith("3b") else ("llama3_1", "8B")
    return {
        "recipe": "lora_finetune_single_device",
        "config": f"{family}/{size}_{kind}_single_device",
        "weights": f"torchtune.models.{family}.{model}",
        "packed": True,
        "changes": {
            "compile": True,
            "loss": CHUNKED,
            "enable_activation_checkpointing": True,
            **more.pop("changes", {}),
        },
        **more,
    }


_COMPILED = {"compile": True, "loss": CHUNKED}
_CHECKPOINTED = {**_COMPILED, "enable_activation_checkpointing": True}
_IN_BACKWARD = {**_CHECKPOINTED, "optimizer_in_bwd": True}
_OFFLOADED: dict[str, Any] = {"length": 4096, "changes": {"enable_activation_offloading": True}}

RUNS = {
    "baseline": {**_full(), "packed": False, "length": BASELINE_LENGTH},
    "+packed": _full(),
    "+compile": _full(compile=True),
    "+chunked CE": _full(**_COMPILED),
    "+activation checkpointing": _full(**_CHECKPOINTED),
    "+optimizer in backward": _full(**_IN_BACKWARD),
    "+activation offloading": _full(**_IN_BACKWARD, enable_activation_offloading=True),
    "LoRA": _lora("lora", "llama3_2_3b", **_OFFLOADED),
    "QLoRA": _lora("qlora", "llama3_2_3b", **_OFFLOADED),
    "8B LoRA": _lora("lora", "llama3_1_8b", length=2048),
    "8B QLoRA": _lora("qlora", "llama3_1_8b", length=2048),
}
"""Settings of each row that is run, by its config there; of the others see `results/emulated-a100/fine-tuning.md`."""
GPUS = {"A100": "a100", "RTX 4090": "24GB"}
"""torch 2.7's kernel for flex attention's backward needs 102,144 bytes of shared memory, and an RTX 4090 has 101,376."""
NO_CLAIM = ("LoRA", "QLoRA", "8B LoRA", "8B QLoRA")
"""Rows that are off for a reason that is not known: that file says by how much, and what was tried."""
METHODS = ("adalora", "lora", "glora", "ln_tuning", "tinylora")
"""PEFT's methods, by falling published peak."""
LENGTHS = range(640, 705, 4)
"""Tokens of the longest batch that are tried: at most 768 are allowed, and the data set's are not known here."""


def torchtune_rows() -> list[Row]:
    """Published rows of torchtune that are run."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "torchtune" in row["source"]]
    return [
        Row(
            row["config"],
            GPUS[row["gpu"]],
            row["metric"],
            Figure.read(row),
            f"{row['source']} {row['path']}",
            RUNS[row["config"]],
        )
        for row in rows
        if row["config"] in RUNS and row["gpu"] in GPUS
    ]


def run_recipe(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Run a recipe of torchtune in this process."""
    import torchtune_recipes

    return torchtune_recipes.run_recipe(asked)


def run_method(asked: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Train with a method of PEFT in this process."""
    import peft_methods

    return peft_methods.run_method(asked)


def write_model(asked: dict[str, Any]) -> None:
    """Write a model for FakeGPU's workers in this process."""
    import fakegpu_workers

    fakegpu_workers.write_model(asked)


CHILDREN = {function.__name__: function for function in (run_recipe, run_method, write_model)}


def compare_torchtune(options: argparse.Namespace) -> tuple[list[Compared], list[Claim]]:
    """Run torchtune's rows, and write the results of all."""
    # A pool of compiling processes would import torch without the stand-ins.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    compared, claims = [], []
    results: dict[str, dict[str, Any]] = {}
    for row in torchtune_rows():
        if options.only not in row.name:
            continue
        asked = {"do": "run_recipe", "gpu": row.gpu, "values": False, "steps": STEPS, **row.run}
        asked["compile_norms"] = options.compile_norms and row.run["changes"]["compile"]
        _, peaks = run_child(Path(__file__), asked, environment, CASE_SECONDS)
        one = Compared(f"{row.name} ({row.gpu})", row.metric, peaks[-1]["peak_memory_active"], row.figure)
        print(*one.cells(), sep="  ", flush=True)
        compared.append(one)
        if row.name not in NO_CLAIM:
            claims.append(Claim(f"{one.name}: percent off", one.off, 0.5))
        published = f"{row.figure.value} {row.figure.unit}"
        results.setdefault(row.gpu, {})[row.name] = {"source": row.source, "published": published, "emulated": peaks}
    if not options.only and not options.compile_norms:
        for gpu, rows in results.items():
            write_results(options.out, gpu, "torchtune", ("torch", "triton", "torchtune", "torchao"), rows)
    return compared, claims


def compare_peft(options: argparse.Namespace) -> tuple[list[Compared], list[Claim]]:
    """Run PEFT's methods with longest batches of several lengths: one of them has to fit all five figures."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        rows = {row["config"].partition("/")[0]: row for row in csv.DictReader(file) if "peft" in row["source"]}
    by_length: dict[str, list[Compared]] = {}
    results = {}
    for method in METHODS:
        asked = {"do": "run_method", "gpu": "l40s", "values": True, "method": method, "lengths": list(LENGTHS)}
        _, peaks = run_child(Path(__file__), asked, os.environ, CASE_SECONDS)
        figure = Figure.read(rows[method])
        for length, found in peaks.items():
            one = Compared(f"{method}, longest batch {length}", "peak_reserved", found["reserved"], figure)
            by_length.setdefault(length, []).append(one)
        source, published = f"{rows[method]['source']} {rows[method]['path']}", f"{figure.value:.0f} B"
        results[method] = {"source": source, "published": published, "emulated": peaks}
    compared = min(by_length.values(), key=lambda those: max(one.off for one in those))
    write_results(options.out, "l40s", "peft", ("torch", "peft", "transformers"), results)
    swapped = sum(one.emulated < other.emulated for one, other in pairwise(compared))
    claims = [Claim(f"{one.name}: percent off", one.off, 2.0) for one in compared]
    return compared, [*claims, Claim("neighbours in another order than published", swapped, 0)]


def compare_fakegpu(options: argparse.Namespace) -> tuple[list[Compared], list[Claim]]:
    """Run FakeGPU's workers for the rows that were published with the release of torch that is installed."""
    release = version("torch").partition("+")[0]
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "FakeGPU" in row["source"] and row["torch"].startswith(release)]
    compared = []
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[str, Path] = {}
        for (model, config, card), same in groupby(rows, key=operator.itemgetter("model", "config", "gpu")):
            name, gpu = f"{model} {config}", fakegpu_workers.GPUS[card]
            if options.only not in name:
                continue
            if model not in models:
                models[model] = Path(scratch, model)
                asked = {"do": "write_model", "gpu": gpu, "values": True, "model": model, "folder": str(models[model])}
                run_child(Path(__file__), asked, os.environ, CASE_SECONDS)
            worker = fakegpu_workers.Worker.parse(config)
            peaks = worker.peaks(options.sources.resolve(), gpu, models[model], Path(scratch, "reports"))
            figures = {row["metric"]: Figure.read(row) for row in same}
            for metric, figure in figures.items():
                compared.append(Compared(f"{name} ({gpu})", metric, peaks[metric], figure))
                print(*compared[-1].cells(), sep="  ", flush=True)
            published = {
                metric: f"{figure.value:.{figure.digits}f} {figure.unit}" for metric, figure in figures.items()
            }
            results.setdefault(gpu, {})[name] = {"published": published, "emulated": peaks}
    if not options.only:
        for gpu, found in results.items():
            write_results(options.out, gpu, "fakegpu", ("torch", "peft", "transformers"), found)
    return compared, [Claim(f"{one.name}, {one.metric}: percent off", one.off, 0.5) for one in compared]


COMPARISONS = {"torchtune": compare_torchtune, "peft": compare_peft, "fakegpu": compare_fakegpu}


def main() -> int:
    """Run the rows, print the emulated peaks beside the published ones, and tell whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=tuple(NEEDS), nargs="?", default="torchtune")
    parser.add_argument("--only", default="", metavar="WORD", help="rows with this in their name; nothing is written")
    parser.add_argument(
        "--compile-norms",
        action="store_true",
        help="compile the last norm, too, where layers are compiled; nothing is written",
    )
    parser.add_argument("--sources", type=Path, help="the checkout of FakeGPU")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of results")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        serve(options.do, CHILDREN)
    if lack := missing(PACKAGES[options.suite], NEEDS[options.suite]):
        parser.error(lack)
    if options.suite == "fakegpu" and options.sources is None:
        parser.error(f"fakegpu needs: {NEEDS['fakegpu']}")
    compared, claims = COMPARISONS[options.suite](options)
    print(f"\nEmulated, torch {version('torch')}\n")
    print_table(HEADER, [one.cells() for one in compared])
    return conclude(claims, check=True)


if __name__ == "__main__":
    sys.exit(main())
