"""Measure what an emulated GPU takes of a machine without one: seconds a training step, memory, and whole sessions of pytest.

- A training step of GPT-2 small (8 x 1024 tokens, AMP bf16, checkpointed) on an emulated H100.
- A training step of Llama 3 8B's shapes (1 x 4096 tokens, bf16, AdamW) on an emulated B200.
- Sessions of the project in ``tests/emulated/planted_project``: baselines recorded, gated, and gated with all its regressions.
- Sessions of the example project: baselines recorded, and gated.

Each is a process of its own; sessions are timed from the command to its end. Times are those of the host, and no GPU's.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import Claim, conclude, parser_of, print_table
from cost import cost_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
PLANTED_PROJECT = REPOSITORY / "tests" / "emulated" / "planted_project"
EXAMPLE_PROJECT = REPOSITORY / "example_project"
STEPS = 5
LONGEST = 580
"""Seconds that a process may take."""


@dataclass(frozen=True)
class Taken:
    """Cost of one process, in seconds of the clock and of the CPU; ``load`` is the machine's average when it began."""

    wall: float
    cpu: float
    load: float


# What a process of its own does: `_run_there` starts one of these.


def gpt2_small() -> dict[str, Any]:
    """Train GPT-2 small with autocast and activation checkpointing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False))
    model = model.cuda().train()
    model.gradient_checkpointing_enable()
    return _trained(model, samples=8, length=1024, autocast=True)


def llama_3_8b() -> dict[str, Any]:
    """Train a model of Llama 3 8B's shapes in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
    return _trained(model, samples=1, length=4096, autocast=False)


def _trained(model: Any, *, samples: int, length: int, autocast: bool) -> dict[str, Any]:
    """Seconds of each of `STEPS` steps, and the most memory that the process had, on the host and emulated."""
    import torch

    ids = torch.randint(0, 50_000, (samples, length)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    walls, cpus = [], []
    for _ in range(STEPS):
        began, cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        walls.append(round(time.perf_counter() - began, 4))
        cpus.append(round(time.process_time() - cpu, 4))
        del loss
    return {
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps_wall_seconds": walls,
        "steps_cpu_seconds": cpus,
        "resident_bytes": _most_resident(),
        "emulated_peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _most_resident() -> int:
    """The most memory that this process ever had in RAM, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


CHILDREN: dict[str, Callable[[], dict[str, Any]]] = {"gpt2_small": gpt2_small, "llama_3_8b": llama_3_8b}


def _run_there(name: str, gpu: str) -> dict[str, Any]:
    """Have a new process train a model on an emulated GPU. Raises ``RuntimeError`` with what it wrote when it fails."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "pytest_gpumem.tools.main", "emulate", gpu, "--", sys.executable, __file__, name]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(f"{name} on emulated:{gpu} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"gpu": f"emulated:{gpu}", "load_before": load, **found}


def _session(folder: Path, *options: str, status: int = 0, **environment: str) -> Taken:
    """Run a session of pytest. Raises ``RuntimeError`` with what it wrote when it ends with another status."""
    load = os.getloadavg()[0]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--gpumem-device=emulated:h100",
        *options,
    ]
    cost, done = cost_of(
        lambda: subprocess.run(
            command,
            cwd=folder,
            env=_environment() | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST,
        )
    )
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(command)} in {folder} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return Taken(round(cost.wall, 2), round(cost.cpu, 2), load)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def planted_sessions(folder: Path) -> dict[str, Taken]:
    """Record the models with planted regressions as they should be, gate them, and gate what is planted."""
    project = folder / "planted"
    shutil.copytree(PLANTED_PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    return {
        "15 models: recorded": _session(project, "--gpumem-update=new"),
        "15 models: gated": _session(project, "--gpumem-baseline"),
        "15 models: gated, all red": _session(project, "--gpumem-baseline", status=1, PLANTED="all"),
    }


def example_sessions(folder: Path) -> dict[str, Taken]:
    """Record the example project into a store of its own, and gate it."""
    project = folder / "example"
    shutil.copytree(EXAMPLE_PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", "gpumem-baselines"))
    return {
        "example project: recorded": _session(project, "--gpumem-update=new"),
        "example project: gated": _session(project, "--gpumem-baseline"),
    }


def claims_of_steps(gpt2: dict[str, Any], llama: dict[str, Any]) -> Sequence[Claim]:
    return (
        Claim("GPT-2 small: seconds a step, median", statistics.median(gpt2["steps_wall_seconds"]), 1.0),
        Claim("GPT-2 small: GB resident", gpt2["resident_bytes"] / 1e9, 1.5),
        Claim("Llama 3 8B: seconds a step, the slowest", max(llama["steps_wall_seconds"]), 10.0),
    )


def main() -> int:
    """Run all, write the results, print what was taken, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of results")
    options = parser.parse_args()
    # The stand-ins are compiled once for a release of torch, and that is not what is timed.
    _run_there("gpt2_small", "h100")
    gpt2, llama = _run_there("gpt2_small", "h100"), _run_there("llama_3_8b", "b200")
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            rounds.append({**planted_sessions(Path(name)), **example_sessions(Path(name))})
    best = {name: min((one[name] for one in rounds), key=lambda taken: taken.cpu) for name in rounds[0]}
    result = {
        "emulated": True,
        "torch": gpt2.pop("torch"),
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "gpt2_small": gpt2,
        "llama_3_8b": {name: value for name, value in llama.items() if name != "torch"},
        "sessions": {name: [asdict(one[name]) for one in rounds] for name in best},
    }
    path = options.out / "emulated-h100" / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"Emulated; times are the host's, beside a load of {rounds[0]['15 models: recorded'].load:.1f}\n")
    steps = [
        (
            name,
            f"{statistics.median(one['steps_wall_seconds']):.3f} s",
            f"{statistics.median(one['steps_cpu_seconds']):.3f} s",
            f"{one['steps_wall_seconds'][0]:.3f} s",
            f"{one['resident_bytes'] / 1e9:.2f} GB",
            f"{one['emulated_peak_bytes'] / 1e9:.2f} GB",
        )
        for name, one in (("GPT-2 small", gpt2), ("Llama 3 8B", llama))
    ]
    print_table(("training step", "wall", "CPU", "the first, wall", "resident", "emulated peak"), steps)
    print_table(
        ("session", "wall", "CPU", "load before"),
        [(name, f"{one.wall:.1f} s", f"{one.cpu:.1f} s", f"{one.load:.1f}") for name, one in best.items()],
    )
    print(f"written: {path}")
    # The example project has its baselines committed.
    claims = [
        Claim(f"{name}: CPU seconds", one.cpu, 30.0)
        for name, one in best.items()
        if name != "example project: recorded"
    ]
    return conclude([*claims_of_steps(gpt2, llama), *claims], check=options.check)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CHILDREN:
        print(json.dumps(CHILDREN[sys.argv[1]]()), flush=True)
        # Nothing waits for threads of autograd.
        os._exit(0)
    sys.exit(main())
