"""Advice for a function of a project's own on emulated cards: it is called where it is measured, and sees that card."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.support.processes import is_alive, wait_until_ended

MODELS = """
import logging
import os
import pathlib
import time

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(512, 2048)
        self.down = torch.nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def mean_square(output, batch):
    return output.square().mean()


def make():
    print("on", torch.cuda.get_device_name(), DEVICE.type, os.environ["GPUMEM_EMULATED"])
    return torch.nn.Sequential(*(Block() for _ in range(4))), torch.randn(4096, 512, device=DEVICE), mean_square


class Config:
    def __init__(self):
        self._attn_implementation_internal = "eager"


class Attention(torch.nn.Identity):
    def __init__(self):
        super().__init__()
        self.config = Config()


def make_with_attention_and_a_warning():
    logging.getLogger("a_library").warning("the fast path is not available")
    model, *others = make()
    return torch.nn.Sequential(model, Attention()), *others


def make_none():
    raise ValueError("planted")


def make_nonsense():
    return 1


def wait():
    pathlib.Path("pid.part").write_text(str(os.getpid()))
    os.rename("pid.part", "pid")
    time.sleep(600)
"""
PROGRAM = """
import own

model, batch, loss = own.make()
optimizer = torch.optim.AdamW(model.to("cuda").parameters())
for step in range(4):
    loss(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""

ADVISES = """
import sys
from pytest_gpumem.tools.main import main

sys.argv = ["gpumem", "advise", "own:wait", "--device=emulated:h100"]
main()
"""


@pytest.fixture(autouse=True)
def _models(tmp_path):
    (tmp_path / "own.py").write_text(MODELS, encoding="utf-8")


def test_a_function_is_measured_on_each_card_as_a_program_is_there(processes, on_gpu):
    cards = ["--device=emulated:h100", "--device=emulated:l4", "--device=emulated:v100"]
    done = processes.gpumem("advise", "own:make", "--config", "fp32", *cards, "--format", "json")
    plain = json.loads(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    by_card = {one["device"]: one["configs"][0] for one in plain["devices"]}
    assert list(by_card) == ["H100 80GB", "L4", "V100 16GB"]
    assert "none for 7.0" in by_card["V100 16GB"]["why_not"]
    # What it prints is no result.
    for name, word in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "l4")):
        assert f"on {name} (emulated) cuda emulated:{word}" in done.stderr
    for card, word in (("H100 80GB", "h100"), ("L4", "l4")):
        allocated, reserved = map(int, on_gpu(PROGRAM, word).splitlines()[-1].split())
        assert (by_card[card]["peak_allocated"], by_card[card]["peak"]) == (allocated, reserved)
        # The card's own memory is the limit.
        assert by_card[card]["fits"] is True


def test_warnings_and_the_attention_come_back_from_forks(processes):
    words = ("own:make_with_attention_and_a_warning", "--config", "fp32", "--device=emulated:l4", "--format", "json")
    plain = json.loads(processes.gpumem("advise", *words, gpu="l4").stdout)
    assert plain["warnings"] == ["a_library: the fast path is not available"]
    assert plain["attention"] == "eager"


@pytest.mark.parametrize(
    ("function", "status", "told"),
    [
        ("make_none", 1, "own:make_none fails: ValueError: planted"),
        ("make_nonsense", 2, "expected (model, batch) or (model, batch, loss) from make_nonsense(), got int"),
        ("mak", 2, "own has no function 'mak'; it has "),
    ],
)
def test_a_function_that_gives_no_model_is_told_in_one_sentence(processes, function, status, told):
    done = processes.gpumem("advise", f"own:{function}", "--device=emulated:l4", gpu="l4")
    assert done.returncode == status
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"Error: {told}")
    # The author's line is shown where it is the author's error.
    assert ('raise ValueError("planted")' in done.stderr) == (function == "make_none")


def test_no_process_stays_when_the_command_is_ended(processes, tmp_path):
    command = processes.start(ADVISES)
    try:
        until = time.monotonic() + 100
        while not (tmp_path / "pid").exists():
            assert command.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        fork = int((tmp_path / "pid").read_text())
        assert is_alive(fork)
        os.kill(command.pid, signal.SIGTERM)
        command.communicate(timeout=60)
        wait_until_ended([fork])
    finally:
        command.kill()
