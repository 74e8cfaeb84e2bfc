"""cuBLAS's workspaces on an emulated GPU: peaks are those of the program alone, which keeps them, whatever ran before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.emulated.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAMS = """
from concurrent.futures import ThreadPoolExecutor
import torch

class Net(torch.nn.Module):
    '''Products, and in front of them a temporary tensor: the peak, if all workspaces are there already.'''
    def __init__(self, rows=1024):
        super().__init__()
        self.rows = rows
        self.layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    def forward(self, x):
        with torch.no_grad():
            torch.ones(self.rows, 4096, device=x.device).relu()
        return self.layers(x).square().mean()

def net(rows=1024):
    return Net(rows).cuda()

def batch():
    return torch.ones(64, 512, device="cuda")

def trained(rows):
    model, x = net(rows), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def averaged(rows):
    '''A forward of an average in front of the step.'''
    model, average, x = net(1), net(1), batch()
    more = torch.ones(rows, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        with torch.no_grad():
            average(more)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def inferred(rows):
    model, x = net(rows), batch()
    def step():
        with torch.inference_mode():
            model(x)
    return step

def on_two_streams(rows):
    model, x, stream = net(rows), batch(), torch.cuda.Stream()
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # 2.6 warns of none
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    def step():
        with torch.cuda.stream(stream):
            model(x).backward()
        model(x).backward()
        model.zero_grad()
    return step

def in_two_threads(rows):
    model, x, pool = net(rows), batch(), ThreadPoolExecutor(1)
    def step():
        pool.submit(lambda: model(x).backward()).result()
        model(x).backward()
        model.zero_grad()
    return step

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient @ x.t() @ x

def with_products_in_backward_only(rows):
    x = batch().requires_grad_()
    def step():
        torch.ones(rows, 4096, device="cuda").relu()
        Backward.apply(x).sum().backward()
        x.grad = None
    return step

def leaking(rows):
    step, kept = trained(rows), []
    def leak():
        step()
        kept.append(torch.ones(1, device="cuda"))
    return leak

KINDS = (trained, averaged, inferred, on_two_streams, in_two_threads, with_products_in_backward_only, leaking)
PROGRAMS = {kind.__name__: (kind, 1024) for kind in KINDS}
"""
ALONE = """
import gc, json, sys, torch
from programs import *

def own_peak(prepare, steps):
    '''The peak of a step that follows ``steps`` of them, over all that was there before.'''
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step = prepare()
    for _ in range(steps):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

torch.ones(1, device="cuda")
for name, (kind, rows) in PROGRAMS.items():
    for way, steps in (("measure", 7), ("loop", 7), ("region", 1), ("call", 0)):
        # A region that threads of its own ran before begins without their workspaces; a leak needs more with each step.
        if (way, kind) not in (("region", in_two_threads), ("measure", leaking), ("loop", leaking)):
            print(json.dumps([f"{way} {name}", own_peak(lambda: kind(rows), steps)]))
print(json.dumps(["train_step", own_peak(lambda: trained(1024), 7)]))
print(json.dumps(["infer_step", own_peak(lambda: inferred(1024), 7)]))
"""
MEASURED = """
import pytest, torch
from programs import *

each = pytest.mark.parametrize("program", PROGRAMS)

def step_of(program):
    kind, rows = PROGRAMS[program]
    return kind(rows)

@each
def test_measure(gpumem, program):
    gpumem.measure(step_of(program), name=f"measure {program}")

@each
def test_steps(gpumem, program):
    with gpumem.loop(8, name=f"loop {program}") as loop:
        step = step_of(program)
        while not loop.step_ended():
            step()

@each
def test_region(gpumem, program):
    step = step_of(program)
    with gpumem.track(f"first region {program}"):
        step()
    with gpumem.track(f"region {program}"):
        step()

@each
@pytest.mark.gpumem
def test_call(program):
    step_of(program)()

def test_train_step(gpumem):
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    gpumem.train_step(Net, batch(), loss=lambda out, _: out, optimizer=optimizer, name="train_step")

def test_infer_step(gpumem):
    gpumem.infer_step(Net, batch(), name="infer_step")
"""
FIGURES = """
import json, os, pathlib

def pytest_gpumem_measurement(item, measurement):
    name = f"call {item.callspec.params['program']}" if measurement.name == "call" else measurement.name
    figures = [name, measurement.peak_allocated, measurement.workspaces, measurement.retained, measurement.metrics.get("growth", 0)]
    with pathlib.Path(os.environ["FIGURES"]).open("a") as file:
        file.write(json.dumps(figures) + "\\n")

def pytest_collection_modifyitems(items):
    if "BACKWARDS" in os.environ:
        items.reverse()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    folder = tmp_path_factory.mktemp("workspaces")
    for name, source in (
        ("programs", PROGRAMS), ("alone", ALONE), ("test_programs", MEASURED), ("conftest", FIGURES),
    ):  # fmt: skip
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return Processes(folder)


def figures_of(project: Processes, name: str, *arguments: str, **variables: str) -> dict[str, list[int]]:
    """The peak, workspaces, retained bytes and growth of each measurement of a session."""
    file = project.folder / name
    done = project.pytest("test_programs.py", *arguments, FIGURES=str(file), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: figures for name, *figures in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


@pytest.fixture(scope="module")
def measured(project) -> Mapping[str, list[int]]:
    return figures_of(project, "in order")


def test_each_way_of_measuring_has_the_peak_of_the_program_alone(project, measured):
    done = project.run("import sys; sys.path.insert(0, '.'); exec(open('alone.py').read())")
    assert done.returncode == 0, done.stdout + done.stderr
    alone = dict(map(json.loads, done.stdout.splitlines()))
    assert len(alone) == 27
    assert {name: measured[name][0] for name in alone} == alone


def test_workspaces_are_neither_kept_by_a_step_nor_growth(measured):
    kept = {name: figures[2:] for name, figures in measured.items() if any(figures[2:])}
    each_step = {"measure leaking": [4, 4], "loop leaking": [4, 4]}
    assert kept == each_step | {"first region leaking": [4, 0], "region leaking": [4, 0]}


def test_figures_are_the_same_in_the_other_order_and_on_workers(project, measured):
    assert figures_of(project, "backwards", BACKWARDS="1") == measured
    on_workers = figures_of(project, "on workers", "-n", "2", "-k", "trained or threads", BACKWARDS="1")
    assert len(on_workers) == 10
    assert on_workers.items() <= measured.items()


def test_what_is_beside_workspaces_does_not_depend_on_their_size(project, measured):
    small = figures_of(project, "small", "-k", "not region and not call", CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert len(small) == 16
    beside = {name: peak - workspaces for name, (peak, workspaces, *_) in small.items()}
    assert beside == {name: measured[name][0] - measured[name][1] for name in small}
    assert sum(small[name][1] for name in small) < sum(measured[name][1] for name in small)


def test_what_autograds_thread_has_still_to_let_go_is_neither_live_nor_a_workspace(on_gpu):
    # The thread drops a pass's last objects after it has woken whoever waits for the pass, who goes on first on a single core.
    source = """
import os, threading, time
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
from pytest_gpumem.measuring.devices.registry import make_cuda
class Callback:
    def __init__(self):
        self.kept = torch.empty(10**7, device="cuda")
    def __call__(self):
        pass
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            late.append(True)
            time.sleep(0.1)
device, late, seen = make_cuda(), [], set()
device.open()
weight = torch.ones(4, device="cuda", requires_grad=True)
weight.grad = torch.zeros_like(weight)
weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(Callback()))
until = time.monotonic() + 60
while not late and time.monotonic() < until:
    weight.sum().backward()
    device.settle()
    seen.add((device.live(), device.workspaces()))
print(len(late), seen)
"""
    assert on_gpu(source) == "1 {(32, (0,))}\n"
