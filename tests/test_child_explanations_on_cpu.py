"""Explanations of the processes that a test starts, on the CPU: what grew, in which module, and at which line."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.emulated.test_child_explanations import (
    EACH_REQUEST_TEST,
    SERVER,
    SERVER_TEST,
    TRAINING,
    TRAINING_TEST,
    TWO_LINES_SERVER,
    _row,
    retained_by_a_leak,
    tensors_of_two_lines,
)
from tests.support import compared_program
from tests.support.cpu_sessions import CpuSessions

thorough = pytest.mark.thorough


def on_cpu(program):
    program = re.sub(r"\.cuda\(\w*\)", "", program)
    return re.sub(r'device=f?"cuda[^"]*"', 'device="cpu"', program)


@pytest.fixture
def session(tmp_path):
    def run(program, test, *arguments, **variables):
        name = "train.py" if program is TRAINING else "server.py"
        (tmp_path / name).write_text(on_cpu(program), encoding="utf-8")
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        return CpuSessions(tmp_path).pytest(*arguments, **variables)

    return run


def test_a_cache_that_a_server_keeps_is_red_with_its_module_line_and_operator(session):
    retained = retained_by_a_leak(session, SERVER, SERVER_TEST)
    # Each of three requests keeps a tensor of 1 MiB in each of two blocks.
    row = _row(
        SERVER,
        "server.py",
        "self.key(x)",
        r"Sequential\.\*\.key",
        text=r" *mm +6 x float32\[1024, 256\]",
        shows_modules=True,
    )
    assert re.search(f"other +6.29 MB +{row}", retained), retained
    assert "kept in: server.KEPT" in retained, retained


def test_tensors_that_two_lines_of_a_server_keep_have_both_lines_at_the_peak(session):
    recorded = session(TWO_LINES_SERVER, EACH_REQUEST_TEST, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    leaking = session(TWO_LINES_SERVER, EACH_REQUEST_TEST, "--gpumem-baseline", LEAK="1")
    assert leaking.returncode == 1, leaking.stdout
    of_step, at_peak = tensors_of_two_lines(leaking.stdout)
    assert of_step == [2, 2], "a tensor in each of two blocks"
    assert at_peak[0] == at_peak[1] > 2


@thorough
def test_a_growing_training_script_is_red_with_its_module_and_line(session):
    recorded = session(TRAINING, TRAINING_TEST, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    assert "some rows are missing" not in recorded.stdout
    grown = session(TRAINING, TRAINING_TEST, "--gpumem-baseline", GROWN="1")
    assert grown.returncode == 1
    grew = grown.stdout.partition("what grew")[2]
    row = _row(TRAINING, "train.py", "x.exp()", r"Sequential\.\S+", text=" *exp", shows_modules=True)
    assert re.search(row, grew), grown.stdout


LOADING_TEST = """
import subprocess
import sys
import urllib.request

import torch


def serve():
    server = subprocess.Popen([sys.executable, "server.py"], stdout=subprocess.PIPE, text=True)
    with open("pids", "a") as file:
        print(server.pid, file=file)
    url = f"http://127.0.0.1:{int(server.stdout.readline())}/"
    for _ in range(3):
        urllib.request.urlopen(url).close()
    return server


def test_load(gpumem):
    gpumem.load(serve).value.terminate()


def test_both(gpumem):
    _, server = gpumem.load(lambda: (torch.ones(1000), serve()), explain=True).value
    server.terminate()


def test_region(gpumem):
    with gpumem.track("region"):
        server = serve()
    server.terminate()
"""


def state_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return "X"


def test_the_process_of_a_load_is_explained_and_the_process_of_a_region_says_why_not(session, tmp_path):
    recorded = session(SERVER, LOADING_TEST, "--gpumem-update=new", "--gpumem-explain=never")
    assert recorded.returncode == 0, recorded.stdout
    (tmp_path / "pids").unlink()
    leaking = session(SERVER, LOADING_TEST, "--gpumem-baseline", LEAK="1")
    assert "3 failed" in leaking.stdout, leaking.stdout
    load, region = leaking.stdout.split("_ test_region _")
    row = _row(SERVER, "server.py", "self.key(x)", r"Sequential\.\*\.key", shows_modules=True)
    assert re.search(f"what was retained.*\n *other +6.29 MB +{row}", load), leaking.stdout
    assert "kept in: server.KEPT" in load
    assert "its allocations were not recorded, because a region runs only once. To explain it, pass" in region
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 + 3 + 1, "a load runs again for each kind of explanation, and a region runs once"
    while any(state_of(pid) not in ("Z", "X") for pid in pids):
        time.sleep(0.01)


def test_gradients_that_a_training_server_keeps_are_red_with_their_line_and_node(session):
    source, kept = SERVER.replace("with torch.no_grad():", "if True:"), 'model(torch.ones(1024, 256, device="cuda"))'
    source = source.replace(kept, 'model(torch.ones(1024, 256, device="cuda").requires_grad_()).sum().backward()')
    source = source.replace("KEPT.append(key)  # the leak", "key.register_hook(KEPT.append)")
    retained = retained_by_a_leak(session, source, SERVER_TEST)
    # The second block's product made the gradient of the first block's result.
    text = r" *MmBackward0 +3 x float32\[1024, 256\]"
    row = _row(SERVER, "server.py", "self.key(x)", r"Sequential\.1\.key", text=text, shows_modules=True)
    assert re.search(f"temporaries +3.15 MB +{row}", retained), retained


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        pytest.param("compared.py", {"AT_PEAK": "double backward"}, id="a script"),
        pytest.param("compared.py", {"AT_PEAK": "forward"}, id="a script in forward", marks=thorough),
        pytest.param("compared.py", {"AT_PEAK": "recomputed"}, id="a script that recomputes", marks=thorough),
        pytest.param("compared.py", {"THREAD": "1"}, id="a thread", marks=thorough),
        pytest.param("spawn.py", {}, id="torch.multiprocessing", marks=thorough),
        pytest.param("-m torch.distributed.run --nproc-per-node=2 compared.py", {}, id="ranks", marks=thorough),
    ],
)
def test_a_process_has_the_rows_that_its_code_has_in_the_tests_process(tmp_path, command, variables):
    places = compared_program.common_places(tmp_path, CpuSessions(tmp_path).pytest, COMMAND=command, **variables)
    assert len(places) > 20
