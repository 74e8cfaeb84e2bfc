"""Peaks that ``gpumem advise`` gives for models by name, beside those that others have published, and beside peers' formulas.

Each row of ``published/by-name-peaks.csv`` is a figure that somebody measured on a GPU, with its source and what is assumed.
The same model, batch and step are tried as ``gpumem advise`` does, on an emulated A100, from the sizes in ``models/``, and go
to the formulas of ``peers.py``. What is printed as emulated was measured on no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from claims import Claim, conclude, print_table
from emulated_child import run_child, serve
from peers import NEEDS, PEERS, RANK, Step, lacking
from published_figures import Compared, Figure

HERE = Path(__file__).parent
PUBLISHED = HERE / "published" / "by-name-peaks.csv"
GPU = "a100-80gb"
DEVICE = f"emulated:{GPU}"
LONGEST = 3600
"""Seconds that a row may take."""
EAGER = (("attn_implementation", "eager"),)
CLASSIFIER = (("architectures", ["BertForSequenceClassification"]), *EAGER)
ONE_GELU = (("hidden_act", "gelu_pytorch_tanh"),)
"""Phi's activation is one operator in LitGPT; transformers' ``gelu_new`` is eight, of which some keep their inputs."""
PUBLISHED_TRAINING = "fp32,clip=1,zero_grad=zero"
"""Trainer's clipping, and gradients that stay, as before torch 2.0."""
TARGETS = {"phi": "q_proj+v_proj", "gpt_neox": "query_key_value", "llama": "q_proj+v_proj"}
"""LitGPT has adapters on queries and values; where these are one module they have as many parameters together."""


LEFT_OUT = (
    "Left out: transformers' table of BEiT base (inference, RTX 2060). It says float16, but of one image its 376 MB are more",
    "than twice the weights in float16, and 32 images add neither what float16 nor what float32 does; in float32 the emulated",
    "peaks are 3 % below and 14 % above.",
)


@dataclass(frozen=True)
class Run:
    """A row's configuration in ``models/``, what is changed of it, and its step."""

    file: str
    step: Step
    config: str = "bf16"
    changes: tuple[tuple[str, Any], ...] = ()

    def configuration(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((HERE / "models" / f"{self.file}.json").read_text(encoding="utf-8"))
        return read | dict(self.changes)

    def task(self, model_type: str) -> Any:
        """Return the task of the model, as options of ``gpumem advise`` say it."""
        from pytest_gpumem.measuring.models.lora import lora
        from pytest_gpumem.measuring.models.task import INFERENCE, TRAINING, Task

        step = self.step
        if step.kind == "generate":
            return Task(trains=False, new_tokens=step.generated)
        if step.kind == "LoRA":
            return Task(lora=lora(f"r={RANK},targets={TARGETS[model_type]}"))
        return TRAINING if step.kind == "train" else INFERENCE


def _forward(samples: int, length: int) -> Step:
    return Step("forward", samples, length, half=True)


def _generate(samples: int, length: int, generated: int) -> Step:
    return Step("generate", samples, length, half=True, generated=generated)


def _lora(samples: int, length: int, adapters: int) -> Step:
    return Step("LoRA", samples, length, half=True, adapters=adapters)


RUNS = {
    ("Llama 2 7B", "forward, 1 x 256"): Run("llama_2_7b", _forward(1, 256), changes=EAGER),
    ("Llama 2 7B", "forward, 16 x 256"): Run("llama_2_7b", _forward(16, 256), changes=EAGER),
    ("Llama 2 7B", "generate 512, 1 x 256"): Run("llama_2_7b", _generate(1, 256, 512), changes=EAGER),
    ("Llama 2 7B", "generate 512, 16 x 256"): Run("llama_2_7b", _generate(16, 256, 512), changes=EAGER),
    ("Llama 2 13B", "forward, 1 x 256"): Run("llama_2_13b", _forward(1, 256), changes=EAGER),
    ("Llama 2 13B", "generate 512, 8 x 256"): Run("llama_2_13b", _generate(8, 256, 512), changes=EAGER),
    ("OctoCoder 15.5B", "generate 60, 1 x 20"): Run("octocoder", _generate(1, 20, 60)),
    ("phi-1.5", "LoRA, 1 x 1044"): Run("phi_1_5", _lora(1, 1044, 1_572_864), changes=ONE_GELU),
    ("phi-1.5", "LoRA, 4 x 1044"): Run("phi_1_5", _lora(4, 1044, 1_572_864), changes=ONE_GELU),
    ("phi-1.5", "generate 50, 1 x 6"): Run("phi_1_5", _generate(1, 6, 50)),
    ("StableLM Alpha 3B", "LoRA, 1 x 1034"): Run("stablelm_alpha_3b", _lora(1, 1034, 2_097_152)),
    ("StableLM Alpha 3B", "generate 50, 1 x 6"): Run("stablelm_alpha_3b", _generate(1, 6, 50)),
    ("Llama 2 7B", "LoRA, 1 x 1304"): Run("llama_2_7b", _lora(1, 1304, 4_194_304)),
    ("Llama 2 13B", "LoRA, 1 x 1304"): Run("llama_2_13b", _lora(1, 1304, 6_553_600)),
    ("BERT large", "train, 4 x 512"): Run(
        "bert_large", Step("train", 4, 512, half=False), PUBLISHED_TRAINING, CLASSIFIER
    ),
    ("BERT large", "train, 4 times 1 x 512"): Run(
        "bert_large",
        Step("train", 1, 512, half=False, accumulated=4),
        f"{PUBLISHED_TRAINING},accumulate=4",
        CLASSIFIER,
    ),
}


@dataclass(frozen=True)
class Row:
    """A published figure, the emulated one, and the peers' by formula, in bytes."""

    model: str
    config: str
    metric: str
    published: float
    emulated: int
    peers: dict[str, int | None]

    def percent(self, value: float) -> float:
        return 100 * (value - self.published) / self.published

    def cells(self) -> list[str]:
        estimated = (self.peers[name] for name in PEERS)
        said = ["" if one is None else f"{self.percent(one):+.1f} %" for one in estimated]
        figures = (f"{self.published / 1e9:.3f} GB", f"{self.emulated / 1e9:.3f} GB")
        return [self.model, self.config, self.metric, *figures, f"{self.percent(self.emulated):+.1f} %", *said]


ERRORS = ("estimate", "rows", "median off", "worst", "gpumem advise, emulated: median off", "worst")
HEADER = ("model", "step", "peak", "published", "emulated", "off", *PEERS)


def advised(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what ``gpumem advise`` finds of a row's step, in a process on an emulated GPU."""
    from pytest_gpumem.measuring.devices.registry import make_cuda
    from pytest_gpumem.measuring.models.name import BatchSize
    from pytest_gpumem.measuring.models.sources import model_name, named_model
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.trial import subject_by_name, try_config

    run = RUNS[asked["model"], asked["config"]]
    configuration = run.configuration()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configuration), encoding="utf-8")
        name = model_name(f"hf:{folder}")
        assert name is not None
        size = BatchSize(run.step.samples * run.step.accumulated, run.step.length)
        subject = subject_by_name(named_model(name, size, run.task(configuration["model_type"])))
        tried = try_config(make_cuda(), subject, StepConfig.parse(run.config))
    return {"allocated": tried.allocated, "used": tried.peak, "why_not": tried.why_not}


def estimated(asked: dict[str, Any]) -> dict[str, int | None]:
    """Return what the peers' formulas give for a row, by their names, in a process that can load torch."""
    import torch
    import transformers

    run = RUNS[asked["model"], asked["config"]]
    configuration = run.configuration()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(configuration), encoding="utf-8")
        parsed = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, configuration["architectures"][0])(parsed)
    parameters = sum(one.numel() for one in model.parameters())
    return {name: estimate(configuration, parameters, run.step) for name, (_, estimate) in PEERS.items()}


def there(do: str, model: str, config: str) -> Any:
    """Return what a function finds of a row in a process of its own, on an emulated GPU. Raises ``RuntimeError``."""
    asked = {"do": do, "gpu": GPU, "values": do == "advised", "model": model, "config": config}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return run_child(Path(__file__), asked, environment, LONGEST)[1]


@dataclass(frozen=True)
class Errors:
    """By how many percent estimates are off, and the emulated peaks of the same rows."""

    estimate: str
    off: list[float]
    emulated: list[float]

    def cells(self) -> list[str]:
        return [self.estimate, str(len(self.off)), *_median_and_worst(self.off), *_median_and_worst(self.emulated)]


def _median_and_worst(percents: list[float]) -> list[str]:
    return [f"{statistics.median(percents):.1f} %", f"{max(percents):.1f} %"]


def errors(rows: list[Row]) -> list[Errors]:
    """Return those of each peer, of the rows that it has a figure for."""
    found = []
    for name in PEERS:
        of_peer = [(row, value) for row in rows if (value := row.peers[name]) is not None]
        if of_peer:
            off = [abs(row.percent(value)) for row, value in of_peer]
            found.append(Errors(name, off, [abs(row.percent(row.emulated)) for row, _ in of_peer]))
    return found


def summary(rows: list[Row]) -> list[list[str]]:
    """Return the number of rows, the median error and the worst, of each peer and of ours on its rows, then of ours on all."""
    ours = [abs(row.percent(row.emulated)) for row in rows]
    all_of_ours = ["(all rows)", str(len(rows)), "", "", *_median_and_worst(ours)]
    return [*(one.cells() for one in errors(rows)), all_of_ours]


def claims_of(rows: list[Row]) -> list[Claim]:
    """Return what is claimed of the rows."""
    ours = statistics.median(abs(row.percent(row.emulated)) for row in rows)
    against = [
        Claim(
            f"median percent off, as a share of that of {one.estimate} on the same rows",
            statistics.median(one.emulated) / statistics.median(one.off),
            1.0,
        )
        for one in errors(rows)
    ]
    return [Claim("median percent off", ours, 5.0), *against]


def main() -> int:
    """Run all rows, write the results, print the tables, and tell whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a claim is missed")
    parser.add_argument("--only", default="", metavar="WORD", help="rows with this in their name; nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "emulated-a100", help="the folder of results")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        serve(options.do, {"estimated": estimated, "advised": advised})
    if missing := lacking():
        parser.error(f"{', '.join(missing)} not installed; needs {NEEDS}")
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        published = [row for row in csv.DictReader(file) if options.only in f"{row['model']} {row['config']}"]
    rows = []
    for one in published:
        figure, of_row = Figure.read(one), (one["model"], one["config"])
        found = there("advised", *of_row)
        # What nvidia-smi shows beside the context is what the allocator has taken.
        emulated = found["used" if one["metric"] == "used" else "allocated"]
        if emulated is None:
            raise RuntimeError(f"{', '.join(of_row)}: {found['why_not']}")
        peers = there("estimated", *of_row)
        rows.append(Row(one["model"], one["config"], one["metric"], figure.bytes, emulated, peers))
        print(
            *Compared(f"{one['model']}, {one['config']}", one["metric"], emulated, figure).cells(), sep="  ", flush=True
        )
    print_table(HEADER, [row.cells() for row in rows])
    print_table(ERRORS, summary(rows))
    if not options.only:
        _write(options.out, rows, published)
    return conclude(claims_of(rows), check=options.check)


def _write(folder: Path, rows: list[Row], published: list[dict[str, str]]) -> None:
    releases = {name: _release(name) for name in ("torch", "transformers", "peft", *PEERS)}
    values = {"device": DEVICE, "python": platform.python_version(), **releases, "rows": [asdict(row) for row in rows]}
    (folder / "by-name.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    said = ", ".join(f"{name} {release}" for name, release in releases.items())
    lines = [
        "# Models by name beside published peaks",
        "",
        f"By `python benchmarks/published_by_name.py`, on `{DEVICE}`; {said}. Sources and what is assumed stand in",
        "[by-name-peaks.csv](../../published/by-name-peaks.csv). A peer's cell is empty where it does not know such a step.",
        "",
        *_markdown(HEADER, [row.cells() for row in rows]),
        "",
        *_markdown(ERRORS, summary(rows)),
        "",
        "What is assumed:",
        "",
        *[
            f"- {one['model']}, {one['config']} ({one['gpu']}, torch {one['torch']}): {one['note']}."
            for one in published
        ],
        "",
        *LEFT_OUT,
    ]
    (folder / "by-name.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {folder / 'by-name.md'}")


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _markdown(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    sys.exit(main())
