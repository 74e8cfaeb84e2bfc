"""``gpumem run`` on an emulated GPU: a plain script gated, and faults that are planted in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.conftest import figures_of
from tests.pages import blocks_of
from tests.test_run import HELPERS, SCRIPT, line_of

if TYPE_CHECKING:
    import subprocess


def script_on_cuda() -> str:
    moved = SCRIPT.replace("in sys.argv else 64)\n", 'in sys.argv else 64).to("cuda")\n')
    return moved.replace("model[0].in_features)", 'model[0].in_features, device="cuda")')


@pytest.fixture
def run(processes, tmp_path):
    (tmp_path / "train.py").write_text(script_on_cuda(), encoding="utf-8")
    (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.gpumem]\n", encoding="utf-8")

    def command(
        *arguments: str, gpu: str = "h100", new: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        device = f"--gpumem-device=emulated:{gpu}"
        return processes.gpumem("run", "train.py", device, *arguments, gpu=gpu, new=new, **variables)

    return command


def test_planted_faults_are_red_with_module_and_line_and_their_twin_is_green(run):
    assert run("--gpumem-update=new", new=True).returncode == 0
    green = run("--gpumem-baseline")
    assert (green.returncode, "gpumem: 1 gated" in green.stdout) == (0, True), green.stdout

    leak = run("--gpumem-baseline", "--", "leak")
    assert leak.returncode == 1
    assert f"growth per step {4 * 256 * (64 + 256 + 64) / 1000:.2f} kB, baseline 0 B" in leak.stdout
    kept = leak.stdout.partition("kept by each step")[2].partition("what grew")[0]
    assert f"train.py:{line_of('history.append')}" in kept

    red = run("--gpumem-baseline", "--", "wide")
    assert red.returncode == 1, red.stdout
    tensors = "was float32[256, 64], now float32[384, 96]"
    grew = [line for line in red.stdout.partition("what grew")[2].splitlines() if tensors in line]
    assert any(line.split("  ")[1] == "optimizer state" and "  Sequential.0  " in line for line in grew), red.stdout


ONLY_COUNTED = """
import sys
import torch

weight = torch.nn.Parameter(torch.ones(25_000_000, device="cuda"))
optimizer = torch.optim.SGD([weight])
for step in range(1000):
    # Three gradients of one tensor are summed in place, but not where operators are counted: 500 MB, not 400.
    twice = weight * 2
    (twice.sum() + (twice * 3).sum() + (twice * 4).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "more" in sys.argv and step == 12:
        torch.empty(200_000_000, dtype=torch.uint8, device="cuda").add(1).add(1)
"""


def test_a_script_that_fits_but_for_its_counted_step_is_measured_without_counts(run, tmp_path):
    (tmp_path / "train.py").write_text(ONLY_COUNTED, encoding="utf-8")
    # Of which 545 MB are the context's.
    fits = run(gpu="1GB")
    assert fits.returncode == 0, fits.stdout
    assert "train.py::run  400.00 MB" in fits.stdout
    assert "note: train.py::run: not counted: OutOfMemoryError: CUDA out of memory" in fits.stdout
    larger = run(gpu="2GB")
    assert (larger.returncode, "not counted" in larger.stdout) == (0, False), larger.stdout

    fails = run("--", "more", gpu="1GB")
    assert (fails.returncode, "torch.OutOfMemoryError" in fails.stdout) == (1, True), fails.stdout


SERVE = """
import sys
import torch

kept = []
for line in sys.stdin:
    kept.append(torch.ones(int(line) << 18, device="cuda"))
    print(f"PEAK {torch.cuda.max_memory_allocated()}", flush=True)
"""
"""A process that takes as many MiB as each line of its input says, and keeps them."""
STARTS = """
import os
import subprocess
import sys

import torch.multiprocessing

GROWN = int(os.environ.get("GROWN", "1"))


def work(rank):
    torch.ones((rank + GROWN) << 20, device="cuda")
    print(f"PEAK {torch.cuda.max_memory_allocated()}\\n", end="", flush=True)


if __name__ == "__main__":
    if "torchrun" in sys.argv:
        from torch.distributed.run import main

        main(["--standalone", "--nproc-per-node=2", "rank.py"])
    else:
        torch.multiprocessing.spawn(work, nprocs=2)
    if "alone" not in sys.argv:
        subprocess.run([sys.executable, "serve.py"], input="4\\n", text=True, check=True)
"""
RANK = """
import os
from train import work

work(int(os.environ["RANK"]))
"""


@pytest.fixture
def starting(run, tmp_path):
    """Run a script that starts processes. Return the command's result, the peaks that they print, and the figures by name."""
    for name, source in {"serve.py": SERVE, "rank.py": RANK, "train.py": STARTS}.items():
        (tmp_path / name).write_text(source, encoding="utf-8")

    def command(*arguments: str, **variables: str):
        done = run("--gpumem-report=report.json", *arguments, **variables)
        (result,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
        measured = [verdict["measurement"] for verdict in result["verdict"]["verdicts"]]
        peaks = {measurement["name"]: measurement["metrics"]["peak_allocated"] for measurement in measured}
        return done, sorted(map(int, re.findall(r"PEAK (\d+)", done.stdout))), peaks

    return command


def test_a_script_that_leaves_all_work_to_other_processes_is_measured_by_them(starting):
    recorded, printed, peaks = starting("--gpumem-update=new")
    assert (recorded.returncode, printed) == (0, [4 << 20, 4 << 20, 8 << 20]), recorded.stdout
    assert peaks == {
        "script: all processes": 12 << 20,
        "script: multiprocessing": 4 << 20,
        "script: multiprocessing 2": 8 << 20,
        "script: serve.py": 4 << 20,
    }
    (shown,) = (block for block in blocks_of("docs/guide/scripts-and-loops.md") if "script: serve.py" in block.text)
    assert shown.text in recorded.stdout

    gated, _, again = starting("--gpumem-baseline")
    assert (gated.returncode, again) == (0, peaks), gated.stdout
    red, _, _ = starting("--gpumem-baseline", "--", "alone", GROWN="3")
    assert red.returncode == 1
    assert "In script: multiprocessing: Emulated GPU memory regressed: peak 12.58 MB, baseline 4.19 MB" in red.stdout
    assert "for measurements that it no longer takes: script: serve.py" in red.stdout


def test_ranks_that_a_script_starts_by_torchrun_have_their_names(starting):
    done, printed, peaks = starting("--", "torchrun", "alone")
    assert (done.returncode, printed) == (0, [4 << 20, 8 << 20]), done.stdout
    names = {"all processes": 12 << 20, "rank.py rank 0": 4 << 20, "rank.py rank 1": 8 << 20}
    assert peaks == {f"script: {name}": peak for name, peak in names.items()}


def test_torchrun_itself_is_such_a_script(processes, starting, tmp_path):
    (tmp_path / "torchrun").write_text("from torch.distributed.run import main\n\nmain()\n", encoding="utf-8")
    options = ("--gpumem-device=emulated:h100", "--", "--standalone", "--nproc-per-node=2", "rank.py")
    done = processes.gpumem("run", "torchrun", *options)
    assert done.returncode == 0, done.stdout
    assert re.search(r"torchrun::run \(script: rank.py rank 1\) +8.39 MB", done.stdout), done.stdout


STEPS = """
import subprocess
import sys
import torch

server = subprocess.Popen([sys.executable, "serve.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
device = "cpu" if "cpu" in sys.argv else "cuda"
weight = torch.nn.Parameter(torch.ones(1 << 18, device=device))
optimizer = torch.optim.SGD([weight])
for step in range(10 if "few" in sys.argv else 1000):
    server.stdin.write("2\\n")
    server.stdin.flush()
    server.stdout.readline()
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "fails" in sys.argv:
    raise KeyError
"""


@pytest.mark.parametrize("steps", [8, 12])
def test_a_process_of_a_loop_counts_to_the_last_step_for_memory_figures(starting, tmp_path, steps):
    """A loop of ten steps is longer than eight, and ends before its twelfth."""
    (tmp_path / "train.py").write_text(STEPS, encoding="utf-8")
    done, _, peaks = starting(f"--steps={steps}", "--", "few")
    assert done.returncode == 0, done.stdout
    assert peaks["loop: serve.py"] == min(steps, 10) * (2 << 20)
    assert peaks["loop: all processes"] == peaks["loop"] + peaks["loop: serve.py"]


def test_steps_on_the_cpu_beside_a_process_on_the_gpu_have_no_measurement(starting, tmp_path):
    (tmp_path / "train.py").write_text(STEPS, encoding="utf-8")
    done, _, peaks = starting("--steps=4", "--", "cpu", "few")
    assert (done.returncode, peaks) == (0, dict.fromkeys(("loop: all processes", "loop: serve.py"), 8 << 20)), (
        done.stdout
    )


def test_a_failing_script_shows_its_processes_so_far(starting, tmp_path):
    (tmp_path / "train.py").write_text(STEPS, encoding="utf-8")
    done, _, _ = starting("--", "few", "fails")
    assert (done.returncode, "KeyError" in done.stdout) == (1, True), done.stdout
    assert re.search(r"peak allocated +loop: serve.py +20.97 MB", done.stdout), done.stdout


UNKNOWN = '''
import os
import pathlib
import signal
import subprocess
import sys
import time

TAKES = "import os, time, torch; kept = torch.ones(1 << 20, device='cuda'); print(1, flush=True); time.sleep({seconds}); "
LOADS_TORCH = """
import importlib.util, mmap, pathlib, time
library = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
file = library.open("rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(1, flush=True)
time.sleep(60)
"""


def start(*words):
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\\n"
    return process


way = sys.argv[1]
if "killed" in way:
    start("-c", TAKES.format(seconds=1) + "os.kill(os.getpid(), 9)").wait()
if way == "killed at once":
    start("-c", "import os, torch; torch.cuda.init(); print(1, flush=True); os.kill(os.getpid(), 9)").wait()
if way in ("stopped", "not seen"):
    left = start("-c", TAKES.format(seconds=60)) if way == "stopped" else start("-I", "-c", LOADS_TORCH)
    pathlib.Path("left").write_text(str(left.pid))
    if way == "stopped":
        left.send_signal(signal.SIGSTOP)
if way == "killed, fails":
    raise KeyError
'''
REASONS = {
    "killed": r"was killed before it could report its memory\. Its peak was at least 4\.19 MB, and may have been larger\. If it was killed on purpose, end",
    "killed at once": "was killed before it could report its memory",
    "stopped": "did not report its memory within 10 seconds, so its memory is not known",
    "not seen": "no step was seen: .*and no process that reports used a GPU; not seen: `.*` loads torch or CUDA, and does not "
    "report its memory, because it runs with python -I ",
}


@pytest.mark.parametrize("way", REASONS)
def test_a_process_whose_memory_is_not_known_fails_the_script_with_the_reason(starting, tmp_path, way):
    (tmp_path / "train.py").write_text(UNKNOWN, encoding="utf-8")
    done, _, peaks = starting("--", way)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((tmp_path / "left").read_text(encoding="utf-8")), signal.SIGKILL)
    assert (done.returncode, peaks) == (1, {}), done.stdout
    (result,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    for told in (done.stdout, result["verdict"]["unmeasured"]):
        assert re.search(REASONS[way], told, re.DOTALL), told


def test_a_failing_script_tells_which_process_was_killed(starting, tmp_path):
    (tmp_path / "train.py").write_text(UNKNOWN, encoding="utf-8")
    done, _, _ = starting("--", "killed, fails")
    assert (done.returncode, "KeyError" in done.stdout) == (1, True), done.stdout
    assert re.search(REASONS["killed"], done.stdout), done.stdout


def test_a_script_that_takes_nothing_on_the_gpu_has_not_passed(starting, tmp_path):
    source = (
        STEPS.replace("server.stdin.write", "pass  #").replace("server.stdin.flush()", "").replace("server.stdout", "#")
    )
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    done, _, peaks = starting("--steps=4", "--", "cpu")
    assert (done.returncode, peaks, "1 unmeasured (loop held no tensor" in done.stdout) == (1, {}, True), done.stdout


IN_A_TEST = """
import subprocess
import sys

import pytest
import torch


@pytest.fixture
def server():
    words = [sys.executable, "serve.py"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


def ask(server, number):
    server.stdin.write(f"{number}\\n")
    server.stdin.flush()
    server.stdout.readline()


def test_it(gpumem, server):
    ask(server, 16)
    weight = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    with gpumem.loop(4) as training:
        for _ in range(1000):
            ask(server, 2)
            (weight * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ask(server, 32)
"""


def test_a_loop_in_a_test_has_the_process_of_a_fixture(processes, starting, tmp_path):
    (tmp_path / "test_it.py").write_text(IN_A_TEST, encoding="utf-8")
    done = processes.pytest("--junitxml=report.xml")
    assert done.returncode == 0, done.stdout
    figures = figures_of(tmp_path / "report.xml")["test_it"]
    assert figures["loop: serve.py.peak_allocated"] == (16 + 4 * 2) << 20
    assert figures["loop: serve.py.retained"] == figures["loop: serve.py.growth"] == 2 << 20
