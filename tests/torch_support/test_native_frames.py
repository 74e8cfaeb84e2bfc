"""C++ frames of the installed torch: operators and autograd nodes have their names there."""

from __future__ import annotations

import os
import platform
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.measuring.jobs.run import reporting_to
from pytest_gpumem.torch_support.private_api import native_frames
from pytest_gpumem.torch_support.private_api.native_frames import (
    casts_for_autocast,
    gets_workspace,
    is_library,
    names_native_frames,
    naming_native_frames,
    node_in,
    operator_in,
    runs_node,
    runs_python,
)

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="torch has no C++ frames here"
)


class Frames(TorchDispatchMode):
    """The C++ frames of each operator's first call within the context, innermost first."""

    def __init__(self):
        super().__init__()
        self.by_operator = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        gathered = torch._C._profiler.gather_traceback(python=False, script=False, cpp=True)
        (frames,) = torch._C._profiler.symbolize_tracebacks([gathered])
        self.by_operator.setdefault(str(function), [frame["name"] for frame in frames])
        return function(*args, **(kwargs or {}))


VARIABLE = "TORCH_SYMBOLIZE_MODE"


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    """The environment of a measured process."""
    monkeypatch.setenv(VARIABLE, naming_native_frames({})[VARIABLE])


@pytest.fixture(scope="module")
def frames():
    """The C++ frames of each operator in a product, its sum, and their backward."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, naming_native_frames({})[VARIABLE])
        assert names_native_frames()
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with Frames() as forward:
        result = (x @ w).relu_().sum(dim=0).add(1).sum()
    with Frames() as backward:
        result.backward()
    return {**backward.by_operator, **forward.by_operator}


def _operators(names):
    return [operator for operator in map(operator_in, names) if operator is not None]


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("aten.mm.default", ["aten::mm", "aten::matmul"]),
        ("aten.relu_.default", ["aten::relu_"]),
        ("aten.sum.dim_IntList", ["aten::sum"]),
        ("aten.add.Tensor", ["aten::add"]),
    ],
)
def test_the_operators_around_an_allocation_are_named_innermost_first(frames, operator, names):
    assert _operators(frames[operator])[: len(names)] == names


def test_python_code_around_an_operator_shows(frames):
    names = frames["aten.relu_.default"]
    operator = next(index for index, name in enumerate(names) if operator_in(name))
    assert any(map(runs_python, names[operator:]))


@pytest.mark.parametrize(
    ("operator", "node"), [("aten.t.default", "MmBackward0"), ("aten.expand.default", "SumBackward0")]
)
def test_an_operator_in_backward_is_in_a_named_node(frames, operator, node):
    first = next(name for name in frames[operator] if runs_node(name))
    assert node_in(first) == node


def test_a_node_of_python_and_the_engine_have_no_name():
    assert node_in("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)") == ""
    engine = "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"
    assert (runs_node(engine), node_in(engine)) == (True, "")
    assert not runs_node("at::_ops::mm::call(at::Tensor const&, at::Tensor const&)")


def test_no_operator_is_named_by_another_function_or_an_unknown_one():
    assert operator_in("at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const&, at::Tensor const&)") is None
    assert operator_in("at::_ops::never_seen::call(at::Tensor const&)") is None
    assert operator_in("at::native::mm(at::Tensor const&)") is None


def test_casts_and_workspaces_show():
    assert casts_for_autocast("at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)")
    for name in ("getCUDABlasLtWorkspace()", "getCurrentCUDABlasHandle(bool)"):
        assert gets_workspace(f"at::cuda::{name}")
    assert not gets_workspace("at::cuda::getCurrentCUDAStream(signed char)")


def test_frames_of_libraries_and_programs_are_no_source_files():
    (frames,) = torch._C._profiler.symbolize_tracebacks([torch._C._profiler.gather_traceback(True, False, True)])
    python = [frame["name"] for frame in frames if not is_library(frame["filename"])]
    assert python[0] == "test_frames_of_libraries_and_programs_are_no_source_files"
    assert not any("::" in name or name.startswith("_Py") for name in python)
    assert len(python) < len(frames)


def test_a_process_that_began_without_the_variable_sets_none(monkeypatch):
    changed = []
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(os, "putenv", lambda *change: changed.append(change))
    monkeypatch.setattr(os, "unsetenv", changed.append)
    assert not names_native_frames()
    assert changed == []


def test_a_program_that_has_chosen_another_way_keeps_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "addr2line")
    gathered = []
    monkeypatch.setattr("torch._C._profiler.gather_traceback", lambda **_: gathered.append("stack"))
    assert not names_native_frames()
    assert gathered == []
    assert naming_native_frames(os.environ) == {}


def test_measured_processes_start_with_the_variable_unless_it_is_set(tmp_path):
    assert reporting_to(tmp_path, {})[VARIABLE] == "dladdr"
    assert VARIABLE not in reporting_to(tmp_path, {VARIABLE: "fast"})


@pytest.mark.parametrize("file", ["??", "unwind.cpp"])
def test_names_from_another_program_are_not_used(monkeypatch, file):
    frame = {"name": "torch::CapturedTraceback::gather(bool, bool, bool)", "filename": file, "line": 0}
    monkeypatch.setattr("torch._C._profiler.symbolize_tracebacks", lambda _: [[frame]])
    assert not names_native_frames()


def test_a_release_or_machine_without_frames_has_none(monkeypatch):
    monkeypatch.delattr("torch._C._profiler.gather_traceback")
    assert not names_native_frames()
    monkeypatch.undo()
    monkeypatch.setattr(native_frames.platform, "machine", lambda: "aarch64")
    assert not names_native_frames()
