"""Starts the workers of FakeGPU's repository, as they are, on an emulated GPU: Qwen3.5's text models in fine-tuning.

The weights are zeros of the published sizes, since peaks do not depend on values. `published_finetuning.py` calls it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
SIZES = {"Qwen3.5-0.8B": "qwen3_5_0_8b", "Qwen3.5-2B": "qwen3_5_2b"}
"""Files in ``models/``. Of both, the parameters of the model, of its adapters and of its quantized weights are as many as
published."""
GPUS = {"RTX PRO 5000 72GB Blackwell": "rtxpro6000", "RTX 3090 Ti": "rtx3090"}
"""The known GPUs of the same architecture."""
LONGEST = 3600
"""Seconds that a worker may take."""
WORKERS = {"FSDP": "qwen_fsdp_sft_memory_worker", "FSDP2": "qwen_fsdp2_lora_sft_memory_worker"}
"""Workers of several ranks, by the first word of a row's config."""
METHODS = {"full": "full", "LoRA": "lora", "QLoRA": "qlora"}


@dataclass(frozen=True)
class Worker:
    """A worker with its arguments for a published row. All ``ranks`` are on one GPU, as they were there."""

    name: str
    arguments: tuple[str, ...]
    ranks: int = 1

    @classmethod
    def parse(cls, config: str) -> Worker:
        """Return the worker for a config. Examples: ``"LoRA s128 checkpointing"``, ``"FSDP2 LoRA x4 s64"``.

        Raises:
            ValueError: A word is not known.
        """
        arguments, name, ranks = [], "qwen_sft_memory_worker", 1
        for word in config.split():
            if length := re.fullmatch(r"s(\d+)", word):
                arguments.append(f"--sequence-length={length[1]}")
            elif world := re.fullmatch(r"x(\d+)", word):
                ranks = int(world[1])
            elif times := re.fullmatch(r"accumulation=(\d+)", word):
                arguments.append(f"--gradient-accumulation-steps={times[1]}")
            elif word in WORKERS:
                name = WORKERS[word]
            elif word in METHODS:
                arguments += [] if name in WORKERS.values() else [f"--training-method={METHODS[word]}"]
            elif word == "checkpointing":
                arguments.append("--gradient-checkpointing")
            elif word == "nested":
                arguments.append("--quantization-double-quantization")
            else:
                raise ValueError(f"{config!r}: {word!r} is no word of a row")
        return cls(name, tuple(arguments), ranks)

    def peaks(self, sources: Path, gpu: str, model: Path, scratch: Path) -> dict[str, int]:
        """Run it in a checkout of FakeGPU, and return its peaks; of several ranks the largest.

        ``graph_peak_allocated``, of workers of several ranks only, is that of forward and backward.

        Raises:
            RuntimeError: It failed; with what it wrote.
        """
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        script = [str(sources / "verification" / f"{self.name}.py"), f"--model-dir={model}", *self.arguments]
        if self.ranks == 1:
            run = [sys.executable, *script, "--mode=real", f"--output={scratch / 'rank_0.json'}"]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            run = [sys.executable, *launch, *script, f"--report-dir={scratch}"]
        emulate(gpu, run, sources)
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(scratch.glob("rank_*.json"))]
        phases = [one["memory_phases"] for one in reports]
        return {
            metric: max(one[key] for one in phases)
            for metric, key in (("peak_allocated", "overall_peak_bytes"), ("graph_peak_allocated", "graph_peak_bytes"))
            if key in phases[0]
        }


def emulate(gpu: str, command: list[str], folder: Path) -> None:
    """Run a command with ``gpumem emulate``. Raises ``RuntimeError`` with what it wrote when it fails."""
    whole = [sys.executable, "-m", "pytest_gpumem.tools.main", "emulate", "--quiet", gpu, "--", *command]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        whole, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} on emulated:{gpu} failed:\n{done.stderr[-4000:]}")


def write_model(asked: dict[str, Any]) -> None:
    """Write a model of zeros, as a folder that transformers loads; in a process that can load torch."""
    import torch
    from transformers import AutoConfig, Qwen3_5ForCausalLM

    folder = Path(asked["folder"])
    folder.mkdir()
    shutil.copy(MODELS / f"{SIZES[asked['model']]}.json", folder / "config.json")
    config = AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)
