"""Steps that use several GPUs of one process: each is measured, the largest is the peak, and growth on any of them is red."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from tests.workspaces import KEPT, WORKSPACE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MB = 10**6
TESTS = """
import os
import pytest
import torch
from torch import nn

MB = 10**6
HELD = []


def more(name):
    return int(os.environ.get(name, 0)) * MB


def block(megabytes, device):
    return torch.empty(megabytes * MB, dtype=torch.uint8, device=device)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 1024).to("cuda:0")
        self.second = nn.Linear(1024, 4096).to("cuda:1")

    def forward(self, x):
        x = self.first(x.to("cuda:0"))
        if more("ON0"):
            HELD[:] = [torch.empty(more("ON0"), dtype=torch.uint8, device="cuda:0")]
        if more("ON1"):
            HELD[:] = [torch.empty(more("ON1"), dtype=torch.uint8, device="cuda:1")]
        if more("LEAK1"):
            HELD.append(torch.empty(more("LEAK1"), dtype=torch.uint8, device="cuda:1"))
        return self.second(x.to("cuda:1"))


@pytest.fixture(scope="module")
def shared():
    HIDDEN = block(11, "cuda:1")
    yield block(7, "cuda:1")
    del HIDDEN


@pytest.mark.skipif("FOREIGN" not in os.environ, reason="leaves bytes to the tests after it")
def test_a_leaves_bytes_on_both():
    global LEFT
    LEFT = block(31, "cuda:0"), block(43, "cuda:1")


@pytest.mark.gpumem
def test_call():
    one = block(50, "cuda:0")
    other = torch.empty(70 * MB + more("ON1"), dtype=torch.uint8, device="cuda:1")
    del other
    torch.cuda.reset_peak_memory_stats(1)
    torch.cuda.reset_peak_memory_stats("cuda:1")
    two = block(60, "cuda:0")


def test_given(gpumem):
    measured = gpumem.train_step(Split(), torch.ones(64, 1024), loss=lambda out, _: out.sum())
    assert measured.peak_allocated == max(one["peak_allocated"] for one in measured.by_device.values())


def test_built(gpumem):
    gpumem.train_step(Split, torch.ones(64, 1024), loss=lambda out, _: out.sum())


def test_first(gpumem):
    gpumem.measure(lambda: block(30, "cuda:0"))


def test_second(gpumem):
    gpumem.measure(lambda: torch.empty(30 * MB + more("ON1"), dtype=torch.uint8, device="cuda:1"))


@pytest.mark.gpumem
def test_uses_a_fixture(shared):
    block(5, "cuda:0")


@pytest.mark.skipif("OOM" not in os.environ, reason="runs out of memory")
def test_runs_out(gpumem):
    gpumem.measure(lambda: [block(60_000, "cuda:0"), block(60_000, "cuda:1"), block(60_000, "cuda:1")])
"""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    return partial(processes.pytest, gpu="h100x2")


def store_of(folder) -> str:
    (path,) = (folder / "gpumem-baselines").glob("emulated-*/*.toml")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers", marks=pytest.mark.thorough)]
)
def test_growth_on_any_gpu_is_red_and_names_it_and_a_clean_run_is_green(session, tmp_path, workers):
    recorded = session("--gpumem-update=new", *workers)
    assert recorded.returncode == 0, recorded.stdout
    clean = session("--gpumem-baseline", "-v", "--gpumem-report=clean.json", "--gpumem-report=clean.md", *workers)
    assert clean.returncode == 0, clean.stdout
    shown = "test_it.py::test_call: peak 110.00 MB on cuda:0 (cuda:1 70.00 MB)"
    assert shown in clean.stdout
    assert "peak 110.00 MB on cuda:0" in (tmp_path / "clean.md").read_text(encoding="utf-8")
    results = json.loads((tmp_path / "clean.json").read_text(encoding="utf-8"))["results"]
    found = {one["verdict"]["test"]: one["verdict"]["verdicts"] for one in results if one["verdict"]["verdicts"]}
    call = found["test_call"][0]["measurement"]
    assert call["metrics"]["peak_allocated"] == 110 * MB
    assert {gpu: one["peak_allocated"] for gpu, one in call["by_device"].items()} == {
        "cuda:0": 110 * MB,
        "cuda:1": 70 * MB,
    }

    # The larger one. Forward holds it twice, the last step's and its own: more than backward, which has a workspace besides.
    red = session("--gpumem-baseline", "--gpumem-report=red.html", *workers, ON1=60)
    assert red.returncode == 1
    assert "Emulated GPU memory regressed: peak on cuda:1 " in red.stdout, red.stdout
    assert "what grew in forward on cuda:1" in red.stdout  # which the peak was not in before
    assert "uint8[60000000]" in red.stdout
    assert "on cuda:1" in (tmp_path / "red.html").read_text(encoding="utf-8")

    # The smaller one, whose growth leaves the largest peak as it is.
    smaller = session("--gpumem-baseline", "-k", "test_given", *workers, ON0=8)
    assert smaller.returncode == 1
    assert "Emulated GPU memory regressed: peak on cuda:0 " in smaller.stdout, smaller.stdout
    assert "what is there at the peak on cuda:0" in smaller.stdout
    assert "uint8[8000000]" in smaller.stdout


def test_a_leak_on_another_gpu_is_growth_there(session):
    assert session("--gpumem-update=new", "-k", "given").returncode == 0
    leak = session("--gpumem-baseline", "-k", "given", LEAK1=1)
    assert leak.returncode == 1
    assert "regressed: growth per step on cuda:1 1.00 MB" in leak.stdout, leak.stdout
    assert "kept by each step on cuda:1" in leak.stdout


def test_a_budget_is_that_of_the_largest_gpu(session, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.gpumem]\n[[tool.gpumem.budget]]\ntests = "test_it.py::test_call"\nmax_memory = "115 MB"\n'
    )
    assert session("-k", "call").returncode == 0
    red = session("-k", "call", ON1=50)
    assert red.returncode == 1
    assert "Emulated GPU memory over budget: peak on cuda:1 120.00 MB, budget 115.00 MB" in red.stdout, red.stdout


def test_bytes_of_others_and_the_order_of_tests_are_in_no_figure_of_any_gpu(session, tmp_path):
    assert session("--gpumem-update=new").returncode == 0
    before = store_of(tmp_path)
    assert '[tests.test_call."call on cuda:1"]' in before
    assert session("--gpumem-update=all", FOREIGN=1).returncode == 0
    assert store_of(tmp_path) == before
    assert 'step = "on cuda:1"\npeak_allocated = 18000000\n' in before  # of the fixture's value, and what it hides


def test_a_step_of_one_gpu_is_stored_as_where_there_is_only_one(session, tmp_path):
    assert session("--gpumem-update=new", "-k", "first", gpu="h100").returncode == 0
    alone = store_of(tmp_path)
    (tmp_path / "gpumem-baselines").rename(tmp_path / "alone")
    assert session("--gpumem-update=new", "-k", "first").returncode == 0
    assert store_of(tmp_path) == alone


def test_a_step_on_another_gpu_than_the_current_one_is_measured(session, tmp_path):
    assert session("--gpumem-update=new", "-k", "second").returncode == 0
    assert "peak_allocated = 30000000\n" in store_of(tmp_path)
    assert "cuda:1" not in store_of(tmp_path)
    red = session("--gpumem-baseline", "-k", "second", ON1=10)
    assert "Emulated GPU memory regressed: peak 40.00 MB, baseline 30.00 MB" in red.stdout, red.stdout


def test_a_baseline_of_one_gpu_has_no_bytes_of_the_others(session, tmp_path):
    assert session("--gpumem-update=new", "-k", "call").returncode == 0
    (path,) = (tmp_path / "gpumem-baselines").glob("emulated-*/*.toml")
    tables = path.read_text(encoding="utf-8").split("\n\n")
    path.write_text("\n\n".join(table for table in tables if "on cuda:" not in table), encoding="utf-8")
    red = session("--gpumem-baseline", "-k", "call")
    assert red.returncode == 1
    assert "regressed: peak on cuda:1 70.00 MB, baseline 0 B" in red.stdout, red.stdout
    assert "the baseline has no bytes on cuda:1" in red.stdout
    assert session("--gpumem-update=all", "-k", "call").returncode == 0
    assert session("--gpumem-baseline", "-k", "call").returncode == 0


def test_an_error_of_memory_that_ran_out_tells_where_it_went_on_that_gpu(session):
    failed = session("-k", "runs_out", OOM=1)
    assert failed.returncode == 1
    assert "memory ran out on cuda:1" in failed.stdout, failed.stdout
    assert "the step held 60.00 GB" in failed.stdout


UNUSED = """
import torch
from pytest_gpumem.measuring.devices.registry import Devices, BUILT_IN

device = Devices(BUILT_IN).get("cuda")
device.open()
with device.window() as window:
    made = torch.empty(1000, device="cuda:0")
device.quiesce()
device.laps([lambda: torch.ones(10, device="cuda:0")])
print([peak.allocated for peak in window.everywhere], [one.is_used for one in device.everywhere])
print(torch.cuda.memory_stats(1)["allocated_bytes.all.allocated"])
other = torch.ones(500, device="cuda:1")
print([one.live() for one in device.everywhere], [one.is_used for one in device.everywhere])
torch.cuda.reset_accumulated_memory_stats(1)
print([one.live() for one in device.everywhere], [one.is_used for one in device.everywhere])
print(len(device.laps([lambda: torch.ones(10, device="cuda:1")] * 2)))
device.close()
"""


def test_nothing_is_allocated_on_a_gpu_that_the_process_does_not_use(on_gpu):
    assert on_gpu(UNUSED, gpu="h100x2") == ("[4000, 0] [True, False]\n0\n" + "[4000, 2000] [True, True]\n" * 2 + "2\n")


PARALLEL = """
from torch.cuda.comm import broadcast_coalesced, reduce_add

ids = torch.arange(5, device="cuda:0")
print([(str(copy.device), copy.tolist()) for (copy,) in broadcast_coalesced([ids], [0, 1])])
print(reduce_add([torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")], 0).tolist())
model = torch.nn.DataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
torch.cuda.reset_peak_memory_stats(1)
held = torch.cuda.memory_allocated(1)
model(torch.ones(64, 1024, device="cuda"))
print(torch.cuda.max_memory_allocated(1) - held)
"""


def test_data_parallel_has_a_copy_of_the_model_on_each_gpu(on_gpu):
    ids = [0, 1, 2, 3, 4]
    copies, total, bytes_there = on_gpu(PARALLEL, gpu="h100x2").splitlines()
    assert copies == str([("cuda:0", ids), ("cuda:1", ids)])
    assert total == "[2.0, 2.0, 2.0]"
    # The weights, half of the batch and of the output, and the product's workspace, if it was not kept before.
    assert int(bytes_there) == 1024 * 1024 * 4 + 2 * 32 * 1024 * 4 + WORKSPACE - KEPT


ON_THE_FIRST = """
import os
import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def elsewhere():
    yield torch.empty(9_000_000, dtype=torch.uint8, device="cuda:1")


@pytest.mark.skipif("BEFORE" not in os.environ, reason="uses the other GPU before")
def test_a_uses_the_other_gpu(gpumem, elsewhere):
    ones = torch.ones(512, 512, device="cuda:1", requires_grad=True)
    gpumem.measure(lambda: (ones @ ones).sum().backward())
    cycle = [torch.ones(1000, device="cuda:1")]
    cycle.append(cycle)


@pytest.mark.gpumem
def test_call():
    ones = torch.ones(512, 512, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()


def test_region(gpumem):
    with gpumem.track():
        ones = torch.ones(300, 300, device="cuda")


def test_step(gpumem):
    gpumem.train_step(lambda: nn.Linear(256, 256), torch.ones(64, 256), loss=lambda out, _: out.sum())


def test_loop(gpumem):
    model = nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    with gpumem.loop():
        while True:
            model(torch.ones(64, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_step_of_one_gpu_has_the_same_figures_after_a_test_that_used_another(session, tmp_path):
    (tmp_path / "test_it.py").write_text(ON_THE_FIRST, encoding="utf-8")
    assert session("--gpumem-update=new").returncode == 0
    alone = tomllib.loads(store_of(tmp_path))
    assert list(alone["tests"]) == ["test_call", "test_loop", "test_region", "test_step"]

    after = session("--gpumem-update=all", "--gpumem-report=report.json", BEFORE=1)
    assert after.returncode == 0, after.stdout
    verdicts = {
        one["verdict"]["test"]: one["verdict"]["verdicts"][0]
        for one in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    }
    assert {gpu for name in alone["tests"] for gpu in verdicts[name]["measurement"]["by_device"]} == {"cuda:0"}
    assert {metric["outcome"] for name in alone["tests"] for metric in verdicts[name]["metrics"]} <= {"ok", "recorded"}
    stored = tomllib.loads(store_of(tmp_path))
    del stored["tests"]["test_a_uses_the_other_gpu"]
    assert stored == alone


UNEVEN = """
import itertools
import os
import pytest
import torch

MB = 10**6
SIZES = itertools.cycle(map(int, os.environ.get("SIZES", "20 27").split()))


def on_both(megabytes):
    torch.empty(100 * MB, dtype=torch.uint8, device="cuda:0")
    torch.empty(megabytes * MB, dtype=torch.uint8, device="cuda:1")


def test_never_settles(gpumem):
    gpumem.measure(lambda: on_both(next(SIZES)))


def test_loop(gpumem):
    with gpumem.loop() as steps:
        for step in range(1000):
            on_both(50 if step == 12 else 20)
            if steps.step_ended():
                break
"""


def test_the_smaller_gpu_of_a_step_that_does_not_settle_is_held_to_its_highest_peak(session, tmp_path):
    (tmp_path / "test_it.py").write_text(UNEVEN, encoding="utf-8")
    assert session("--gpumem-update=new", "-k", "settles").returncode == 0
    other_order = session("--gpumem-baseline", "-k", "settles", SIZES="27 20")
    assert (other_order.returncode, "gpumem: 1 gated\n" in other_order.stdout) == (0, True), other_order.stdout
    red = session("--gpumem-baseline", "-k", "settles", SIZES="45 38")
    assert red.returncode == 1
    assert "regressed: peak on cuda:1 45.00 MB, baseline 27.00 MB" in red.stdout, red.stdout
    assert "peaks on cuda:1 differ from step to step: between 38.00 MB and 45.00 MB in" in red.stdout


def test_the_largest_step_of_a_loop_counts_on_each_gpu(session, tmp_path):
    (tmp_path / "test_it.py").write_text(UNEVEN, encoding="utf-8")
    assert session("--gpumem-report=report.json", "-k", "loop").returncode == 0
    (result,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    by_device = result["verdict"]["verdicts"][0]["measurement"]["by_device"]
    peaks = {gpu: one["peak_allocated"] for gpu, one in by_device.items()}
    assert peaks == {"cuda:0": 100 * MB, "cuda:1": 50 * MB}
