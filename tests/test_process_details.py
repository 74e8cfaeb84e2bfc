"""A measurement of another process names the process's command, position, parent, rank and end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other processes are counted on Linux")

TEST = """
import multiprocessing
import os
import subprocess
import sys

PORT = os.environ.get("PORT", "1")
KEPT, SERVERS = [], []


def work():
    KEPT.append(torch.ones(1 << 20))


@pytest.mark.gpumem(max_gb=float(os.environ["MAX_GB"]))
def test_it():
    server = subprocess.Popen(
        [sys.executable, "serve.py", "--api-key", "abc", "--port", PORT], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline()
        process = multiprocessing.get_context("spawn").Process(target=work)
        process.start()
        process.join()
        subprocess.run(["sh", "-c", f"RANK=3 LOCAL_RANK=1 {sys.executable} serve.py --end=1; true"], check=True)
        kept = torch.ones(5)
    finally:
        SERVERS.append(server)


@pytest.fixture(scope="module", autouse=True)
def ends():
    yield
    for server in SERVERS:
        server.terminate()
        server.communicate()
"""
SERVE = """
import sys
import time

import torch

kept = torch.ones(1 << 20)
print(1, flush=True)
if "--end=1" in sys.argv:
    sys.exit(5)
time.sleep(600)
"""


@pytest.fixture
def session(project, monkeypatch):
    project.write(TEST)
    (project.path / "serve.py").write_text(SERVE, encoding="utf-8")

    def run(*arguments, port="1", max_gb="1"):
        monkeypatch.setenv("PORT", port)
        monkeypatch.setenv("MAX_GB", max_gb)
        return project.run("--gpumem-report=report.json", "--gpumem-report=report.html", *arguments, separate=True)

    return run


def test_each_process_has_its_command_position_parent_rank_and_end(project, session):
    result = session("--gpumem-explain=never", max_gb="1e-9")
    assert result.ret == 1
    (entry,) = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["results"]
    measurements = [verdict["measurement"] for verdict in entry["verdict"]["verdicts"]]
    processes = {each["name"]: each["process"] for each in measurements}
    assert processes["call"] is None
    assert processes["call: all processes"] is None
    python = Path(sys.executable).name
    parent = processes["call: serve.py"].pop("parent")
    assert parent == "pytest"
    assert processes["call: serve.py"] == {
        "number": 1,
        "among": 3,
        "command": [python, "serve.py", "--api-key", "***", "--port", "1"],
        "rank": None,
        "local_rank": None,
        "still_runs": True,
        "status": None,
    }
    spawned = processes["call: multiprocessing"]
    assert spawned["number"] == 2
    assert re.fullmatch(r"multiprocessing SpawnProcess-[\d:]+", " ".join(spawned["command"]))
    assert (spawned["parent"], spawned["still_runs"], spawned["status"]) == (parent, False, 0)
    ranked = processes["call: serve.py rank 3"]
    assert (ranked["number"], ranked["parent"], ranked["still_runs"], ranked["status"]) == (3, "sh", False, 5)
    assert (ranked["rank"], ranked["local_rank"]) == (3, 1)
    assert "abc" not in (project.path / "report.json").read_text(encoding="utf-8")
    line = f"process 1 of 3: {python} serve.py --api-key *** --port 1, child of {parent}, still running"
    assert f"  note: {line}" in result.outlines
    assert line in (project.path / "report.html").read_text(encoding="utf-8")
    end = "rank 3, rank 1 on its machine, child of sh, ended with status 5"
    assert f"  note: process 3 of 3: {python} serve.py --end=1, {end}" in result.outlines


@pytest.mark.thorough
def test_no_baseline_has_the_command(project, session):
    session("--gpumem-update=new")
    first = {path: path.read_bytes() for path in project.store.rglob("*") if path.is_file()}
    assert first
    session("--gpumem-update=all", port="2")
    assert {path: path.read_bytes() for path in project.store.rglob("*") if path.is_file()} == first
    assert not any(b"--port" in content for content in first.values())
