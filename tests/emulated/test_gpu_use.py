"""Other processes on an emulated GPU, listed by a made-up NVML. The stand-in for NVML lists none, so nothing is shown."""

from __future__ import annotations

import time

import pytest

from pytest_gpumem.base.variables import EMULATED_CARD
from tests.conftest import verdicts_of

NVML = """
import os
import sys
import types
from types import SimpleNamespace

import torch


class NVMLError(Exception):
    pass


RESERVED = 7 << 20
OTHER = os.getppid()


def processes(_):
    own = torch.cuda.memory_reserved() + RESERVED
    return [SimpleNamespace(pid=OWN, usedGpuMemory=own), SimpleNamespace(pid=OTHER, usedGpuMemory=24 * 10**9)]


OWN = os.getpid() if NAMED else 2**22 + 1
nvml = types.ModuleType("pynvml")
nvml.NVMLError = NVMLError
nvml.nvmlInit = lambda: None
nvml.nvmlSystemGetDriverVersion = lambda: "580.95.05"
nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
nvml.nvmlDeviceGetComputeRunningProcesses = processes
sys.modules["pynvml"] = nvml
"""
OWN_ENTRY = "SimpleNamespace(pid=OWN, usedGpuMemory=own), "
TESTS = """
import pytest
import torch

HELD = []


@pytest.mark.gpumem(max_memory="1 MB")
def test_over():
    HELD.append(torch.ones(4 << 20, device="cuda"))


@pytest.mark.gpumem
def test_full():
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
"""


HOLDS = """
import pathlib, time
import torch
held = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda")]
for size in (1 << 28, 1 << 20):
    try:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
pathlib.Path("holds").touch()
time.sleep(100)
"""


JOB = """
import time
import torch
held = torch.ones(1 << 20, device="cuda")
time.sleep(1)
print(torch.cuda.memory_reserved())
"""
LISTS_JOB = """
from pathlib import Path

NAMED = True
NVML


def with_children(_):
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=USED) for pid in children]


nvml.nvmlDeviceGetComputeRunningProcesses = with_children
"""
LAUNCHES = """
import sys

import pytest


@pytest.mark.gpumem(max_memory="1 MB")
def test_job(gpumem):
    gpumem.launch([sys.executable, "job.py"])


@pytest.mark.gpumem(max_memory="1 GB")
def test_small(gpumem):
    assert gpumem.launch([sys.executable, "job.py"]).processes["job.py"].peak_reserved == 20 << 20
"""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")

    def run(conftest=""):
        (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
        done = processes.pytest()
        assert done.returncode == 1
        assert "2 failed" in done.stdout
        return done.stdout.splitlines()

    return run


def test_failures_name_the_other_process_and_the_bytes_beside_torch(session):
    lines = session(f"NAMED = True\n{NVML}")
    (others,) = {line.removeprefix("  note: ") for line in lines if "other processes on cuda:0" in line}
    assert others.startswith("other processes on cuda:0 when the test began: ")
    assert others.endswith(") 24.00 GB")
    beside = "beside torch: 7.34 MB on cuda:0 (CUDA context, libraries)"
    assert [line.removeprefix("  note: ") for line in lines].count(beside) == 2
    assert any("Captured gpumem GPU memory call" in line for line in lines)


def test_a_container_with_the_hosts_pids_names_no_program_and_sees_no_own_bytes(session):
    lines = session(f"NAMED = False\n{NVML}")
    listed = [line.removeprefix("  note: ") for line in lines if "on cuda:0 when the test began" in line]
    assert len(listed) == 2
    for line in listed:
        assert line.startswith("processes, perhaps this test's own among them, on cuda:0 when the test began: pid ")
        assert "24.00 GB, pid 4194305 " in line
    unseen = "beside torch: not seen on cuda:0, because NVML does not report this process's bytes"
    assert [line.removeprefix("  note: ") for line in lines].count(unseen) == 2


def test_a_gpu_without_room_for_a_context_names_the_other_process(session, processes, tmp_path):
    holder = processes.start(HOLDS, "1GB", **{EMULATED_CARD: tmp_path / "card"})
    try:
        while not (tmp_path / "holds").exists():
            assert holder.poll() is None
            time.sleep(0.01)
        (tmp_path / "conftest.py").write_text(f"NAMED = False\n{NVML.replace(OWN_ENTRY, '')}", encoding="utf-8")
        done = processes.pytest("-k", "over", gpu="1GB", **{EMULATED_CARD: tmp_path / "card"})
    finally:
        holder.kill()
        holder.communicate()
    assert "Captured gpumem GPU memory setup" in done.stdout
    assert " on cuda:0 when the test began: pid " in done.stdout


def test_the_stand_in_for_nvml_lists_no_process_so_nothing_is_shown(session):
    lines = session()
    assert not [line for line in lines if "beside torch" in line or "when the test began" in line]


@pytest.mark.parametrize(
    ("used", "shown"),
    [("(20 << 20) + 3_000_000", "at least 3.00 MB"), ("(20 << 20) - 1", "not seen"), ("0", "not seen")],
)
def test_a_launched_process_has_a_lower_bound_of_its_bytes_beside_torch(processes, tmp_path, used, shown):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(LAUNCHES, encoding="utf-8")
    conftest = LISTS_JOB.replace("NVML\n", f"{NVML}\n").replace("USED", used)
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    done = processes.pytest("--junitxml=report.xml")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert f"\n  note: beside torch in launch: job.py: {shown}\n" in done.stdout
    assert done.stdout.count("beside torch in launch") == 1
    bound = 3_000_000 if "at least" in shown else None
    assert verdicts_of(tmp_path / "report.xml")["test_small"]["jobs_beside_torch"] == {"launch: job.py": bound}


STARTS = """
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def server():
    with subprocess.Popen([sys.executable, "serve.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()
        yield server
        server.kill()


def ask(server):
    server.stdin.write("\\n")
    server.stdin.flush()
    server.stdout.readline()


@pytest.mark.gpumem(max_memory="1 MB")
def test_call(server):
    ask(server)
    subprocess.run([sys.executable, "job.py"], check=True)


@pytest.mark.gpumem(max_memory="1 MB")
def test_step(gpumem, server):
    gpumem.measure(lambda: ask(server), items=1)
"""
SERVES = """
import sys
import time

import torch

held = torch.ones(1 << 20, device="cuda")
while True:
    print(1, flush=True)
    sys.stdin.readline()
    torch.ones(1 << 20, device="cuda")
    time.sleep(0.3)
"""


def test_processes_of_a_call_and_of_a_step_have_lower_bounds_as_well(processes, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "serve.py").write_text(SERVES, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(STARTS, encoding="utf-8")
    conftest = LISTS_JOB.replace("NVML\n", f"{NVML}\n").replace("USED", "(20 << 20) + 3_000_000")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    done = processes.pytest("--junitxml=report.xml")
    assert "2 failed" in done.stdout, done.stdout
    verdicts = verdicts_of(tmp_path / "report.xml")
    for test, name in (
        ("test_call", "call: serve.py"),
        ("test_call", "call: job.py"),
        ("test_step", "measure: serve.py"),
    ):
        assert f"\n  note: beside torch in {name}: at least 3.00 MB\n" in verdicts[test]["failure"]
    assert {test: verdict["jobs_beside_torch"] for test, verdict in verdicts.items()} == {
        "test_call": {"call: serve.py": 3_000_000, "call: job.py": 3_000_000},
        "test_step": {"measure: serve.py": 3_000_000},
    }


def test_a_launched_process_on_an_emulated_gpu_has_no_bytes_beside_torch(processes, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(LAUNCHES, encoding="utf-8")
    done = processes.pytest("--junitxml=report.xml")
    assert "beside torch" not in done.stdout
    assert verdicts_of(tmp_path / "report.xml")["test_small"]["jobs_beside_torch"] == {}
