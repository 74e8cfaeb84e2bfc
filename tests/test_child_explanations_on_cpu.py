"""Explanations of the processes that a test starts, on the CPU: what grew, in which module, and at which line."""

from __future__ import annotations

import re

import pytest

from tests.emulated.test_child_explanations import SERVER, SERVER_TEST, TRAINING, TRAINING_TEST, _row
from tests.support.cpu_sessions import CpuSessions


def on_cpu(program):
    program = re.sub(r"\.cuda\(\w*\)", "", program)
    return re.sub(r'device=f?"cuda[^"]*"', 'device="cpu"', program)


@pytest.fixture
def session(tmp_path):
    def run(program, test, *arguments, **variables):
        name = "server.py" if program is SERVER else "train.py"
        (tmp_path / name).write_text(on_cpu(program), encoding="utf-8")
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        return CpuSessions(tmp_path).pytest(*arguments, **variables)

    return run


def test_a_cache_that_a_server_keeps_is_red_with_its_module_and_line(session):
    recorded = session(SERVER, SERVER_TEST, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    leaking = session(SERVER, SERVER_TEST, "--gpumem-baseline", LEAK="1")
    assert leaking.returncode == 1, leaking.stdout
    retained = leaking.stdout.partition("what was retained")[2].partition("what grew")[0]
    # Each of three requests keeps a tensor of 1 MiB in each of two blocks.
    row = _row(
        SERVER,
        "server.py",
        "self.key(x)",
        r"Sequential\.\*\.key",
        text=r" *6 x float32\[1024, 256\]",
        shows_modules=True,
    )
    assert re.search(f"other +6.29 MB +{row}", retained), leaking.stdout
    assert "kept in: server.KEPT" in leaking.stdout, leaking.stdout


def test_a_growing_training_script_is_red_with_its_module_and_line(session):
    recorded = session(TRAINING, TRAINING_TEST, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    assert "some rows are missing" not in recorded.stdout
    grown = session(TRAINING, TRAINING_TEST, "--gpumem-baseline", GROWN="1")
    assert grown.returncode == 1
    grew = grown.stdout.partition("what grew")[2]
    assert re.search(_row(TRAINING, "train.py", "x.exp()", r"Sequential\.\S+", shows_modules=True), grew), grown.stdout
