"""Training by accelerate and FSDP2: torchrun starts two ranks, and each is measured on its emulated GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gpumem.base.units import format_bytes, rounded
from tests.conftest import figures_of, verdicts_of

PROGRAM = Path(__file__).with_name("sharded_training.py")
TEST = """
import sys

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_training(gpumem):
    job = gpumem.launch([*TORCHRUN, {program!r}, *{options}], ranks=2, timeout=300)
    assert job.stdout.count("of 3: loss") == 3
"""
CHECKPOINT = ("--checkpoint",)
PLANTED = 8 << 20
RANKS = ("launch: sharded_training.py rank 0", "launch: sharded_training.py rank 1")


@pytest.fixture
def session(processes, tmp_path):
    def run(*arguments, options=(), **variables):
        source = TEST.format(program=str(PROGRAM), options=options)
        (tmp_path / "test_it.py").write_text(source, encoding="utf-8")
        return processes.pytest("--junitxml=report.xml", *arguments, gpu="h100x2", timeout=600, **variables)

    return run


def peaks(folder):
    figures = figures_of(folder / "report.xml")["test_training"]
    return [figures[f"{rank}.peak_allocated"] for rank in RANKS]


def test_ranks_have_equal_peaks_and_the_grown_rank_is_named(session, tmp_path):
    recorded = session("--gpumem-update=new", options=CHECKPOINT)
    assert recorded.returncode == 0, recorded.stdout
    assert {file.name for file in tmp_path.glob("checkpoint/*/*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    first, second = peaks(tmp_path)
    assert first == second
    gated = session("--gpumem-baseline", options=CHECKPOINT, PLANTED="tensor")
    assert gated.returncode == 1, gated.stdout
    grown = f"peak {format_bytes(first + PLANTED)}, baseline {format_bytes(first)}"
    assert f"In {RANKS[1]}: Emulated GPU memory regressed: {grown}" in gated.stdout
    assert f"In {RANKS[0]}: " not in gated.stdout.partition("Captured stdout")[0]
    planted = PROGRAM.read_text(encoding="utf-8").split("torch.ones(")[0].count("\n") + 1
    row = next(line for line in gated.stdout.splitlines() if f"sharded_training.py:{planted} " in line)
    assert f"+{format_bytes(PLANTED)}" in row
    assert peaks(tmp_path) == [first, first + PLANTED]
    of_job = verdicts_of(tmp_path / "report.xml")["test_training"]["verdicts"]
    imbalance = {part["measurement"]["name"]: part["measurement"]["metrics"].get("imbalance") for part in of_job}
    assert imbalance["launch"] == rounded((first + PLANTED) / first)
    assert re.search(r"^  imbalance over ranks +1\.00 .* regressed$", gated.stdout, re.MULTILINE)
    assert "note: sharded_training.py rank 1 has the largest peak of all ranks" in gated.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), CHECKPOINT], ids=["", "checkpoint"])
def test_figures_repeat_and_each_planted_imbalance_is_red(session, tmp_path, options):
    recorded = session("--gpumem-update=new", options=options)
    assert recorded.returncode == 0, recorded.stdout
    figures = figures_of(tmp_path / "report.xml")
    for _ in range(3):
        gated = session("--gpumem-baseline", options=options)
        assert gated.returncode == 0, gated.stdout
        assert figures_of(tmp_path / "report.xml") == figures
    for planted in ("tensor", "sequence"):
        grown = session("--gpumem-baseline", options=options, PLANTED=planted)
        assert grown.returncode == 1, grown.stdout
        assert f"In {RANKS[1]}: Emulated GPU memory regressed" in grown.stdout
        assert f"In {RANKS[0]}: " not in grown.stdout
