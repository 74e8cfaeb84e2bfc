"""``--gpumem-pack``: workers whose tests share one emulated card by known peaks, and what happens to them without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.variables import EMULATED_CARD

if TYPE_CHECKING:
    import subprocess

GB = 10**9
SIZES = [(6 + 4 * number) * GB for number in range(9)]
SUITE = f"""
import os
import time
from pathlib import Path

import pytest
import torch

SIZES = {SIZES}
LOG = Path(__file__).with_name("log")


def note(event, size):
    with LOG.open("a") as log:
        log.write(f"{{event}} {{size}} {{os.environ.get('PYTEST_XDIST_WORKER')}}\\n")


@pytest.mark.parametrize("size", SIZES)
def test_step(gpumem, size):
    def step():
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        held[:1].add_(1)
        time.sleep(0.2)

    note("begins", size)
    gpumem.measure(step)
    note("ends", size)
"""
CARD_BYTES = 85_017_100_288


@pytest.fixture
def session(processes, tmp_path):
    def write(source):
        (tmp_path / "test_it.py").write_text(source, encoding="utf-8")

    def run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "log").write_text("")
        return processes.pytest("--gpumem-report=report.json", *arguments, COLUMNS="200", **how)

    def figures():
        results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
        return {
            result["verdict"]["test"]: verdict["measurement"]["metrics"]
            for result in results
            for verdict in result["verdict"]["verdicts"]
        }

    def lines():
        return [line.split() for line in (tmp_path / "log").read_text().splitlines()]

    def log():
        return [(event, int(size)) for event, size, _ in lines()]

    def begun_by_worker():
        begun: dict[str, list[int]] = {}
        for event, size, worker in lines():
            if event == "begins":
                begun.setdefault(worker, []).append(int(size))
        return begun

    run.write, run.figures, run.log, run.begun_by_worker = write, figures, log, begun_by_worker
    run.card = str(tmp_path / "card")
    write(SUITE)
    return run


def most_at_once(log):
    """How many tests ran at once, and how many bytes they took together, the most of each."""
    running, tests, taken = [], 0, 0
    for event, size in log:
        if event == "begins":
            running.append(size)
        else:
            running.remove(size)
        tests, taken = max(tests, len(running)), max(taken, sum(running))
    return tests, taken


def test_tests_with_baselines_share_a_card_with_the_bytes_of_alone(session):
    recorded = session("--gpumem-update=new", "--gpumem-explain=never")
    assert recorded.returncode == 0, recorded.stdout
    alone = session.figures()
    at_once = session("--gpumem-baseline", "-n3", **{EMULATED_CARD: session.card})
    assert at_once.returncode == 1
    assert " - torch.OutOfMemoryError: CUDA out of memory" in at_once.stdout
    assert most_at_once(session.log())[1] > CARD_BYTES
    places = Path(session.card).with_name("places")
    places.mkdir()
    packed = session("--gpumem-baseline", "--gpumem-pack", "-n3", TMPDIR=str(places))
    assert packed.returncode == 0, packed.stdout
    assert session.figures() == alone
    assert list(places.rglob("*.memory")) == []
    tests, taken = most_at_once(session.log())
    assert tests >= 2
    assert taken < CARD_BYTES
    assert "packing: 9 measured tests shared the GPU\n" in packed.stdout
    # The largest first: pytest-xdist gives each worker two tests at first, the others to whom is ready, all in that order.
    begun = session.begun_by_worker().values()
    largest = sorted(SIZES, reverse=True)
    assert sorted((sizes[:2] for sizes in begun), reverse=True) == [largest[at : at + 2] for at in range(0, 6, 2)]
    assert [sorted(sizes, reverse=True) for sizes in begun] == list(begun)


def test_a_budget_is_a_known_peak_and_tests_without_one_have_the_card_alone(session):
    session.write(
        SUITE.replace(f"SIZES = {SIZES}", "SIZES = [1, 2, 3, 4]")
        .replace("size, dtype", "size * 10**9, dtype")
        .replace("def test_step", "@pytest.mark.gpumem(max_memory='4.5 GB')\ndef test_step")
        + """

@pytest.mark.gpumem
@pytest.mark.parametrize("size", [5, 6])
def test_unknown(size):
    note("begins", size)
    torch.empty(10**9, dtype=torch.uint8, device="cuda")
    time.sleep(0.5)
    note("ends", size)
"""
    )
    done = session("--gpumem-pack", "-n2")
    assert done.returncode == 0, done.stdout
    log = session.log()
    assert most_at_once([entry for entry in log if entry[1] <= 4])[0] >= 2
    # They come last, one after the other.
    assert [event for event, _ in log[-4:]] == ["begins", "ends"] * 2
    assert {size for _, size in log[-4:]} == {5, 6}
    told = (
        "packing: 4 measured tests shared the GPU; 2 had the whole GPU (2 with unknown peak; the first is test_it.py::"
    )
    assert told in done.stdout


GROWS = """
import os

import pytest
import torch


@pytest.mark.parametrize("number", range(4))
def test_step(gpumem, number):
    grown = 2 if number == 1 and os.environ.get("PLANTED") else 1

    def step():
        torch.empty(grown * 15 * 10**9, dtype=torch.uint8, device="cuda").view(-1)[:1].add_(1)

    gpumem.measure(step)


@pytest.mark.gpumem(max_memory="1 GB")
def test_catches():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10**15, dtype=torch.uint8, device="cuda")
    torch.empty(10**8, dtype=torch.uint8, device="cuda")
"""


def test_a_test_that_needs_more_than_known_runs_again_alone_with_its_figures(session):
    session.write(GROWS)
    recorded = session("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    done = session("--gpumem-baseline", "--gpumem-pack", "-n2", PLANTED="yes")
    assert done.returncode == 1
    assert "1 regressed" in done.stdout
    assert "out of memory" not in done.stdout
    grown = session.figures()["test_step[1]"]
    assert grown["peak_allocated"] == 30 * GB
    assert "4 passed" in done.stdout
    assert (
        "2 ran again with the whole GPU, because they exceeded their known peak: test_it.py::test_catches, test_it.py::test_step[1]"
        in done.stdout
    )


def test_alone_an_emulated_card_is_a_process_s_own_which_is_told(session):
    session.write(GROWS)
    done = session("--gpumem-pack")
    assert done.returncode == 0, done.stdout
    assert "packing: without pytest-xdist, each process has its own emulated GPU: add -n 8, for example" in done.stdout


def test_a_step_that_nearly_fills_the_card_is_counted_in_the_first_test_of_a_process(session):
    session.write(GROWS)
    done = session("-k", "step and 0", gpu="16GB", new=True)
    assert done.returncode == 0, done.stdout
    assert session.figures()["test_step[0]"]["launches"] == 1
