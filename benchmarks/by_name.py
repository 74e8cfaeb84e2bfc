"""Measure what ``gpumem advise`` takes for public architectures at full size, and whether its bytes are those of arithmetic.

Each model is built from the sizes of its published configuration (``models/*.json``) with random weights, and its training step
runs on an emulated H100 with more memory than any GPU has, in a process of its own. Nothing is downloaded. Parameters and the
state of AdamW are requested bytes, and have to equal formulas that are written here by hand. What is printed as reserved is of
an emulated GPU, and was measured on none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import Claim, conclude, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
MODELS = HERE / "models"
LONGEST = 580
"""Seconds that a model may take."""
Config = dict[str, Any]


def _attention(config: Config) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    return 2 * hidden * heads * size + 2 * hidden * config["num_key_value_heads"] * size


def _vocabulary(config: Config) -> int:
    return config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)


def llama(config: Config) -> int:
    hidden = config["hidden_size"]
    layer = _attention(config) + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return _vocabulary(config) + config["num_hidden_layers"] * layer + hidden


def gemma_2(config: Config) -> int:
    # Two more norms in each layer.
    return llama(config) + config["num_hidden_layers"] * 2 * config["hidden_size"]


def mixtral(config: Config) -> int:
    hidden, experts = config["hidden_size"], config["num_local_experts"]
    layer = _attention(config) + experts * (3 * hidden * config["intermediate_size"] + hidden) + 2 * hidden
    return _vocabulary(config) + config["num_hidden_layers"] * layer + hidden


def qwen_3_moe(config: Config) -> int:
    hidden, experts = config["hidden_size"], config["num_experts"]
    experts_and_router = experts * (3 * hidden * config["moe_intermediate_size"] + hidden)
    # Queries and keys of a head have norms.
    layer = _attention(config) + 2 * config["head_dim"] + experts_and_router + 2 * hidden
    return _vocabulary(config) + config["num_hidden_layers"] * layer + hidden


def _encoder_layer(hidden: int, inner: int) -> int:
    """Attention and a multilayer perceptron, both with biases, and two layer norms."""
    return 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden


def bert(config: Config) -> int:
    hidden, words = config["hidden_size"], config["vocab_size"]
    embeddings = (words + config["max_position_embeddings"] + config["type_vocab_size"] + 2) * hidden
    layers = config["num_hidden_layers"] * _encoder_layer(hidden, config["intermediate_size"])
    return embeddings + layers + hidden * hidden + 3 * hidden + words


def vit(config: Config) -> int:
    hidden, labels = config["hidden_size"], config["num_labels"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    pixels = config["num_channels"] * config["patch_size"] ** 2
    embeddings = pixels * hidden + hidden + hidden + (patches + 1) * hidden
    layers = config["num_hidden_layers"] * _encoder_layer(hidden, config["intermediate_size"])
    return embeddings + layers + 2 * hidden + hidden * labels + labels


def whisper(config: Config) -> int:
    width, inner = config["d_model"], config["encoder_ffn_dim"]
    convolutions = 3 * (config["num_mel_bins"] + width) * width + 2 * width
    # Its keys have no bias.
    encoder_layer = _encoder_layer(width, inner) - width
    decoder_layer = encoder_layer + 4 * width * width + 3 * width + 2 * width
    encoder = (
        convolutions + config["max_source_positions"] * width + config["encoder_layers"] * encoder_layer + 2 * width
    )
    embeddings = (config["vocab_size"] + config["max_target_positions"]) * width
    return encoder + embeddings + config["decoder_layers"] * decoder_layer + 2 * width


def whisper_fixed(config: Config) -> int:
    """Parameters that are not trained: the encoder's positions."""
    return config["max_source_positions"] * config["d_model"]


def mamba(config: Config) -> int:
    hidden, states, rank = config["hidden_size"], config["state_size"], config["time_step_rank"]
    inner = config["expand"] * hidden
    convolution = inner * config["conv_kernel"] + inner
    steps = inner * (rank + 2 * states) + rank * inner + inner
    layer = hidden + hidden * 2 * inner + convolution + steps + inner * states + inner + inner * hidden
    return config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden


def sdxl_unet(config: Config) -> int:
    widths, depths = config["block_out_channels"], [0, *config["transformer_layers_per_block"][1:]]
    first, embedding, texts = widths[0], 4 * widths[0], config["cross_attention_dim"]
    added, each, last = config["projection_class_embeddings_input_dim"], config["layers_per_block"], len(widths) - 1

    def convolution(before: int, after: int) -> int:
        return 9 * before * after + after

    def residual(before: int, after: int) -> int:
        shortcut = before * after + after if before != after else 0
        norms = 2 * before + 2 * after
        return norms + convolution(before, after) + embedding * after + after + convolution(after, after) + shortcut

    def transformer(width: int, depth: int) -> int:
        own = 4 * width * width + width
        of_texts = 2 * width * width + 2 * texts * width + width
        gated = width * 8 * width + 8 * width + 4 * width * width + width
        return 2 * width + 2 * (width * width + width) + depth * (6 * width + own + of_texts + gated) if depth else 0

    total = convolution(config["in_channels"], first) + 2 * first + convolution(first, config["out_channels"])
    total += first * embedding + added * embedding + 2 * embedding + 2 * (embedding * embedding + embedding)
    skips, width = [first], first
    for number, after in enumerate(widths):
        for _ in range(each):
            total += residual(width, after) + transformer(after, depths[number])
            width = after
            skips.append(width)
        if number < last:
            total += convolution(width, width)
            skips.append(width)
    total += 2 * residual(width, width) + transformer(width, depths[-1])
    for number, after in reversed(list(enumerate(widths))):
        for _ in range(each + 1):
            total += residual(width + skips.pop(), after) + transformer(after, depths[number])
            width = after
        if number > 0:
            total += convolution(width, width)
    return total


@dataclass(frozen=True)
class Case:
    """A model, its batch, the step config, and the number of its parameters as a function of its configuration."""

    file: str
    batch: str | None
    config: str
    parameters: Callable[[Config], int]
    source: str = "hf"
    fixed: Callable[[Config], int] = lambda _: 0


BF16 = "bf16,checkpoint=blocks"
CASES = {
    "Llama 3 8B": Case("llama_3_8b", "1x4096", BF16, llama),
    "Llama 3 70B": Case("llama_3_70b", "1x4096", BF16, llama),
    "Qwen3 30B-A3B": Case("qwen3_30b_a3b", "1x4096", BF16, qwen_3_moe),
    "Mixtral 8x7B": Case("mixtral_8x7b", "1x4096", BF16, mixtral),
    "Gemma 2 9B": Case("gemma_2_9b", "1x4096", BF16, gemma_2),
    "Whisper large v3": Case("whisper_large_v3", "8", "amp-bf16", whisper, fixed=whisper_fixed),
    "ViT-L/16": Case("vit_l_16", "64", "amp-bf16", vit),
    "SDXL's UNet": Case("sdxl_unet", "1", BF16, sdxl_unet, "diffusers"),
    "Mamba 2.8B": Case("mamba_2_8b", "1x64", "bf16", mamba),
    "BERT large": Case("bert_large", "32x512", "amp-bf16", bert),
}


def configuration_of(case: Case) -> Config:
    config: Config = json.loads((MODELS / f"{case.file}.json").read_text(encoding="utf-8"))
    return config


def measured(word: str) -> dict[str, Any]:
    """Return the figures of a model, which is built twice: to look at its state, and for advice."""
    from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
    from pytest_gpumem.measuring.models.name import ModelName, batch_size
    from pytest_gpumem.measuring.models.sources import named_model
    from pytest_gpumem.measuring.models.task import TRAINING
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.cards import begin, try_on
    from pytest_gpumem.tools.advise.trial import subject_by_name
    from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

    case, began = CASES[word], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(configuration_of(case)), encoding="utf-8")
        begin(emulated_gpu("emulated:h100"))
        with gpu_unseen():
            size = None if case.batch is None else batch_size(case.batch)
            model = named_model(ModelName(case.source, str(path)), size, TRAINING)
            subject = subject_by_name(model)
        tried, lacking = try_on(emulated_gpu("emulated:h100"), subject, StepConfig.parse(case.config))
        seconds = time.perf_counter() - began
        parameters, state = _in_fork(lambda: _state(subject.build, case.config))
    resident = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "class": model.class_name,
        "seconds": round(seconds, 1),
        "resident_bytes": resident * 1024,
        "parameter_bytes": parameters,
        "state_bytes": state,
        "allocated": tried.allocated,
        "reserved": tried.peak,
        "why_not": tried.why_not,
        "lacking": lacking,
    }


def _in_fork(work: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(work()))
    process.start()
    found: tuple[int, int] = receiving.recv()
    process.join()
    return found


def _state(build: Callable[[Any], Any], config: str) -> tuple[int, int]:
    """Return the bytes of a model's parameters on the emulated GPU, and those of AdamW's state."""
    from dataclasses import replace

    import torch

    from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
    from pytest_gpumem.emulating.emulation.load import become

    become(replace(emulated_gpu("emulated:h100"), total_bytes=2**43))

    def held() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    torch.cuda.init()
    before = held()
    with torch.device("cuda"):
        model = build(torch.bfloat16 if config.startswith("bf16") else torch.float32)
    parameters = held() - before - sum(one.untyped_storage().nbytes() for one in set(model.buffers()))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for one in trained:
        one.grad = torch.empty_like(one)
    before = held()
    optimizer.step()
    return parameters, held() - before


def _run_there(word: str) -> dict[str, Any]:
    """Have a new process measure a model. Raises ``RuntimeError`` with what it wrote when it fails."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--only", word, "--there"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(f"{word} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Row:
    """A model's figures beside its formula's: bytes, but for seconds."""

    name: str
    batch: str | None
    config: str
    parameters: int
    formula: int
    state: int
    state_formula: int
    reserved: int | None
    seconds: float
    resident: int
    why_not: str


def row_of(name: str, found: dict[str, Any]) -> Row:
    case = CASES[name]
    config = configuration_of(case)
    size = 2 if case.config.startswith("bf16") else 4
    number = case.parameters(config)
    return Row(
        name=name,
        batch=case.batch,
        config=case.config,
        parameters=found["parameter_bytes"],
        formula=size * number,
        state=found["state_bytes"],
        state_formula=2 * size * (number - case.fixed(config)),
        reserved=found["reserved"],
        seconds=found["seconds"],
        resident=found["resident_bytes"],
        why_not=found["why_not"],
    )


def claims_of(rows: list[Row]) -> list[Claim]:
    by_formula = sum(one.parameters != one.formula or one.state != one.state_formula for one in rows)
    return [
        Claim("models with other bytes than their formulas", by_formula, 0),
        Claim("models that were not measured", sum(one.reserved is None for one in rows), 0),
        Claim("GB of host memory, the most", max(one.resident for one in rows) / 1e9, 2.0),
    ]


NOTES = (
    "- Parameters and AdamW's state are bytes. Reserved is of an emulated GPU with more memory than any has, measured on none;",
    "  workspaces of convolutions are not in it where no cuDNN is installed.",
    "- Mamba has 64 tokens, as its loop over tokens runs in Python without the kernels of mamba-ssm.",
    "- Seconds are from the start of Python to the figure, beside other work on the machine.",
)
HEADER = (
    "model",
    "batch",
    "step config",
    "parameters",
    "by formula",
    "AdamW's state",
    "by formula",
    "reserved",
)


def cells_of(row: Row) -> list[str]:
    reserved = row.why_not if row.reserved is None else f"{row.reserved / 1e9:.2f} GB"
    numbers = (row.parameters, row.formula, row.state, row.state_formula)
    machine = (f"{row.seconds:.0f} s", f"{row.resident / 1e9:.2f} GB")
    return [row.name, row.batch or "", row.config, *(f"{one:,}" for one in numbers), reserved, *machine]


def main() -> int:
    """Run all, write the results, print the table, and tell whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a claim is missed")
    parser.add_argument("--only", choices=CASES, action="append", help="one of the models; may be repeated")
    parser.add_argument("--there", action="store_true", help="measure it in this process, and print JSON")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "emulated-h100", help="the folder of results")
    options = parser.parse_args()
    if options.there:
        print(json.dumps(measured(options.only[0])))
        return 0
    rows = []
    for name in options.only or CASES:
        rows.append(row_of(name, _run_there(name)))
        print(" | ".join(cells_of(rows[-1])), flush=True)
    header = (*HEADER, "seconds", "host memory")
    print_table(header, [cells_of(one) for one in rows])
    if not options.only:
        _write(options.out, header, rows)
    return conclude(claims_of(rows), check=options.check)


def _write(folder: Path, header: tuple[str, ...], rows: list[Row]) -> None:
    releases = {name: version(name) for name in ("torch", "transformers", "diffusers")}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(), **releases}
    values = {"environment": machine, "rows": [asdict(one) for one in rows]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "by-name.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = ["# Public architectures by name, on an emulated H100", "", f"By `benchmarks/by_name.py`; {said}.", ""]
    lines += [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    lines += [f"| {' | '.join(cells_of(one))} |" for one in rows]
    lines += ["", *NOTES]
    (folder / "by-name.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
