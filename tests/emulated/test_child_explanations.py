"""Explanations of the processes that a test starts, on an emulated GPU: what grew, in which module, and at which line."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from tests.support import compared_program

SERVER = """
import http.server
import os

import torch


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.key = torch.nn.Linear(256, 256, bias=False)

    def forward(self, x):
        key = self.key(x)
        if os.environ.get("LEAK"):
            KEPT.append(key)  # the leak
        return key + 1


KEPT = []
model = torch.nn.Sequential(Attention(), Attention()).cuda()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with torch.no_grad():
            model(torch.ones(1024, 256, device="cuda"))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def work():
    number = 0
    while True:
        cycle = {"tensor": torch.ones(100 + number % 50, device="cuda")}
        cycle["itself"] = cycle
        globals()[f"name_{number}"] = cycle
        globals().pop(f"name_{number - 20}", None)
        number += 1


if __name__ == "__main__":
    if os.environ.get("BUSY"):
        import threading
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
    Server = http.server.ThreadingHTTPServer
    if os.environ.get("FROZEN"):
        import gc
        gc.freeze()
        Server = http.server.HTTPServer
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
"""
SERVER_TEST = """
import subprocess
import sys
import urllib.request

import pytest


@pytest.fixture(scope="session")
def url():
    with subprocess.Popen([sys.executable, "server.py"], stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/"
        server.terminate()


@pytest.mark.gpumem
def test_ask(url):
    for _ in range(3):
        urllib.request.urlopen(url).close()
"""
TWO_LINES_SERVER = SERVER.replace(
    "KEPT.append(key)  # the leak", "KEPT.append(key + 1)\n            KEPT.append(key + 2)"
)
EACH_REQUEST_TEST = (
    SERVER_TEST.partition("@pytest.mark.gpumem")[0]
    + """
def test_each_request(gpumem, url):
    gpumem.measure(lambda: urllib.request.urlopen(url).close())
"""
)
WORKER_TEST = """
import multiprocessing

import pytest


def work(connection):
    import torch
    from server import model

    while connection.recv():
        with torch.no_grad():
            model(torch.ones(1024, 256, device="cuda"))
        connection.send("done")


@pytest.fixture(scope="session")
def connection():
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    worker = context.Process(target=work, args=(other,), name="worker: 1")
    worker.start()
    yield own
    own.send(None)
    worker.join()


@pytest.mark.gpumem
def test_ask(connection):
    for _ in range(3):
        connection.send("next")
        connection.recv()
"""
BUDGET_TEST = SERVER_TEST.replace("mark.gpumem", "mark.gpumem(max_retained='1 MB')")
TRAINING = """
import os
import sys

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, x):
        x = self.linear(x)
        if os.environ.get("GROWN"):
            x = x.exp()  # one more activation
        return x.relu()


def train():
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    model = torch.nn.Sequential(Block(), Block()).cuda(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(16384, 256, device=f"cuda:{rank}")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if os.environ.get("OWN"):
    torch.cuda.memory._record_memory_history(max_entries=1000)
train()
if os.environ.get("OWN"):
    torch.cuda.memory._dump_snapshot("own.pickle")
"""
TRAINING_TEST = """
import subprocess
import sys

import pytest


@pytest.mark.gpumem
def test_train():
    subprocess.run([sys.executable, "train.py"], check=True)
"""
JOB_TEST = """
import sys


def test_job(gpumem):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    job = gpumem.launch(command, ranks=2, explain=True)
    for name, process in job.processes.items():
        for row in process.composition.rows:
            print(name, row.module, row.site, row.operator, row.count)
"""


SHOWS_MODULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
"""The history of older releases has no modules."""


def _row(
    source: str, file: str, line: str, module: str, *, text: str = ".*", shows_modules: bool = SHOWS_MODULES
) -> str:
    """Return a pattern for a row with a module and the line that has a text."""
    number = 1 + next(number for number, code in enumerate(source.splitlines()) if line in code)
    return rf"{module if shows_modules else '([(]no module[)])?'} +{re.escape(file)}:{number} {text}"


@pytest.fixture
def served(processes, tmp_path):
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(SERVER_TEST, encoding="utf-8")
    return processes.pytest


thorough = pytest.mark.thorough


@pytest.mark.skipif(
    not SHOWS_MODULES, reason="the test's own process shows modules, and the history has none before torch 2.9"
)
@pytest.mark.parametrize(
    ("command", "at_peak"),
    [
        pytest.param("compared.py", "backward", id="a script"),
        pytest.param("compared.py", "double backward", id="a script that differentiates twice", marks=thorough),
        pytest.param("compared.py", "forward", id="a script in forward", marks=thorough),
        pytest.param("compared.py", "recomputed", id="a script that recomputes", marks=thorough),
        pytest.param("spawn.py", "backward", id="torch.multiprocessing", marks=thorough),
        pytest.param("-m torch.distributed.run --nproc-per-node=2 compared.py", "backward", id="ranks", marks=thorough),
    ],
)
def test_a_process_has_the_rows_that_its_code_has_in_the_tests_process(processes, tmp_path, command, at_peak):
    gpu = "h100x2" if "distributed" in command else "h100"
    places = compared_program.common_places(
        tmp_path, processes.pytest, gpu=gpu, COMMAND=command, AT_PEAK=at_peak, DEVICE="cuda"
    )
    assert any(operator.endswith("Backward0") for *_, operator in places) or at_peak == "forward"


@pytest.fixture
def trained(processes, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TRAINING_TEST, encoding="utf-8")
    return processes.pytest


KEPT = r"6 x float32\[1024, 256\]"
"""Each of three requests keeps a tensor of 1 MiB in each of two blocks."""


def retained_by_a_leak(session, *arguments, **variables):
    """Return the explanation of retained bytes in a session with a leak."""
    recorded = session(*arguments, "--gpumem-update=new", "--gpumem-explain=never", **variables)
    assert recorded.returncode == 0, recorded.stdout
    leaking = session(*arguments, "--gpumem-baseline", LEAK="1", **variables)
    assert leaking.returncode == 1, leaking.stdout
    return leaking.stdout.partition("what was retained")[2].partition("what grew")[0]


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        pytest.param(SERVER_TEST, (), id="a server with threads"),
        pytest.param(SERVER_TEST, ("-n", "2"), id="a server for each worker", marks=pytest.mark.thorough),
        pytest.param(WORKER_TEST, (), id="a process of multiprocessing", marks=pytest.mark.thorough),
    ],
)
def test_a_cache_that_a_server_keeps_is_red_with_its_line_operator_and_holder(served, tmp_path, test, arguments):
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    retained = retained_by_a_leak(served, *arguments)
    row = _row(SERVER, "server.py", "self.key(x)", r"Sequential\.\*\.key", text=rf" *mm +{KEPT}")
    assert re.search(f"other +6.29 MB +{row}", retained), retained
    assert "kept in: server.KEPT[...]\n" in retained


def tensors_of_two_lines(failure):
    """Return the numbers of tensors from both lines of `TWO_LINES_SERVER`: those of the step, and those at the peak."""
    lines = [1 + number for number, code in enumerate(TWO_LINES_SERVER.splitlines()) if "KEPT.append(" in code]
    by_step, _, at_peak = failure.partition("kept by each step")[2].partition("what grew")
    rows = r"other .* server.py:(\d+) +add +(\d+) x float32\[1024, 256\]"
    counts = [dict(re.findall(rows, part.partition("note:")[0])) for part in (by_step, at_peak)]
    assert [set(map(int, part)) for part in counts] == [set(lines)] * 2, failure
    return [[int(count) for count in part.values()] for part in counts]


@pytest.mark.thorough
def test_tensors_that_two_lines_of_a_server_keep_have_both_lines_at_the_peak(served, tmp_path):
    (tmp_path / "server.py").write_text(TWO_LINES_SERVER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(EACH_REQUEST_TEST, encoding="utf-8")
    recorded = served("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    leaking = served("--gpumem-baseline", LEAK="1")
    assert leaking.returncode == 1, leaking.stdout
    of_step, at_peak = tensors_of_two_lines(leaking.stdout)
    assert of_step == [2, 2], "a tensor in each of two blocks"
    assert at_peak[0] == at_peak[1] > 2


@pytest.mark.thorough
def test_while_threads_of_a_server_work_a_leak_has_its_line_and_no_holder_is_guessed(served, tmp_path):
    (tmp_path / "test_it.py").write_text(BUDGET_TEST, encoding="utf-8")
    leaking = served(LEAK="1", BUSY="1")
    assert leaking.returncode == 1, leaking.stdout
    row = _row(SERVER, "server.py", "self.key(x)", r"Sequential\.\*\.key", text=rf" *mm +{KEPT}")
    assert re.search(f"other +6.29 MB +{row}", leaking.stdout), leaking.stdout
    assert set(re.findall(r"kept in: (.*?)(?: \(|\n)", leaking.stdout)) <= {"server.KEPT[...]"}


@pytest.mark.thorough
def test_after_gc_freeze_a_servers_rows_have_lines_and_no_holder(served):
    retained = retained_by_a_leak(served, FROZEN="1")
    assert re.search(_row(SERVER, "server.py", "self.key(x)", r"\.key", text=" *mm +6 x"), retained), retained
    assert "kept in" not in retained


def test_a_growing_training_script_is_red_with_its_module_and_line(trained):
    recorded = trained("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    assert "some rows are missing" not in recorded.stdout
    grown = trained("--gpumem-baseline", GROWN="1")
    assert grown.returncode == 1
    grew = grown.stdout.partition("what grew")[2]
    assert re.search(_row(TRAINING, "train.py", "x.exp()", r"Sequential\.[*0]", text=" *exp"), grew), grown.stdout


@pytest.mark.thorough
def test_the_rows_of_each_rank_of_a_job_have_modules_and_lines(trained, tmp_path):
    (tmp_path / "test_it.py").write_text(JOB_TEST, encoding="utf-8")
    done = trained("-s", gpu="h100x2", GROWN="1")
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        row = _row(TRAINING, "train.py", "x.exp()", r"Sequential\.\*", text=r"exp \d")
        assert re.search(f"train.py rank {rank} {row}", done.stdout), done.stdout


def test_a_program_with_its_own_history_keeps_it_and_a_note_says_so(trained, tmp_path):
    recorded = trained("--gpumem-update=new", OWN="1")
    assert recorded.returncode == 0, recorded.stdout
    note = "(call: train.py): its allocations were not recorded, because the program records them itself"
    assert note in recorded.stdout
    own = pickle.loads((tmp_path / "own.pickle").read_bytes())["device_traces"][0]
    assert any(entry["action"] == "alloc" for entry in own)
    assert len(own) <= 1000


@pytest.mark.thorough
def test_without_explanations_a_program_runs_once_and_records_nothing(trained, tmp_path):
    source = "import os, sys\nopen('runs', 'a').write('run ')\n" + TRAINING
    source += "\nopen('runs', 'a').write('recorder ' * any(name.endswith(('block_recorder', 'holders')) for name in sys.modules))"
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    done = trained("--gpumem-update=new", "--gpumem-explain=never")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "runs").read_text() == "run "
