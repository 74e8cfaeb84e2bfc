"""One emulated card for several processes: what one holds the others lack, until it ends, however it ends."""

from __future__ import annotations

import time

import pytest

from pytest_gpumem.base.variables import EMULATED_CARD
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES

TOTAL = 16 * 10**9
HOLDS = """
import pathlib, time
x = torch.empty(10 * 10**9, dtype=torch.uint8, device="cuda")
pathlib.Path("holds").touch()
while not pathlib.Path("ends").exists():
    time.sleep(0.01)
"""
ASKS = """
print(torch.cuda.mem_get_info())
try:
    torch.empty(10 * 10**9, dtype=torch.uint8, device="cuda")
    print("fits")
except torch.OutOfMemoryError as error:
    print(str(error).partition(". GPU")[0])
"""
FITS = f"({TOTAL - CONTEXT_BYTES}, {TOTAL})\nfits\n"


@pytest.fixture
def holder(processes):
    """Start a process that holds 10 GB of the card until there is a file ``ends``."""
    started = []

    def start(card):
        started.append(processes.start("import torch\n" + HOLDS, "16GB", **{EMULATED_CARD: card}))
        while not (processes.folder / "holds").exists():
            assert started[-1].poll() is None
            time.sleep(0.01)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_what_one_process_holds_others_lack_until_it_ends(on_gpu, holder, tmp_path, ends):
    card = str(tmp_path / "card")
    process = holder(card)
    taken = TOTAL - 2 * CONTEXT_BYTES - 10 * 10**9
    free, said = on_gpu(ASKS, "16GB", **{EMULATED_CARD: card}).splitlines()
    assert taken - 2 * 2**20 < int(free.strip("(").split(",")[0]) <= taken
    assert said == "CUDA out of memory. Tried to allocate 9.31 GiB"
    if ends == "killed":
        process.kill()
    else:
        (tmp_path / "ends").touch()
    process.communicate(timeout=100)
    assert on_gpu(ASKS, "16GB", **{EMULATED_CARD: card}) == FITS


def test_processes_with_cards_of_their_own_take_nothing_from_each_other(on_gpu, holder, tmp_path):
    holder(str(tmp_path / "card"))
    assert on_gpu(ASKS, "16GB") == FITS
    assert on_gpu(ASKS, "16GB", **{EMULATED_CARD: str(tmp_path / "another")}) == FITS


def test_a_card_that_cannot_be_shared_is_told(on_gpu, tmp_path):
    said = on_gpu(ASKS + "raise SystemExit(1)", "16GB", fails=True, **{EMULATED_CARD: str(tmp_path)})
    assert f"GPUMEM_EMULATED_CARD={tmp_path} cannot be shared (Is a directory)" in said
