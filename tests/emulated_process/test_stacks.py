"""Operators and autograd nodes of allocations, from typed-out stacks."""

from __future__ import annotations

from pathlib import PurePath

import pytest
import torch

import pytest_gpumem
from pytest_gpumem.emulating.emulated_process.stacks import Origin, Stack, is_workspace, origin_of, stack_of

TORCH = str(PurePath(torch.__file__).parent)
OWN = str(PurePath(pytest_gpumem.__file__).parent)
USER = ("/serve.py", 9, "ask")
OVERLOAD = (f"{TORCH}/_ops.py", 875, "__call__")
DISPATCH = (f"{OWN}/emulating/host_values/mode.py", 169, "__torch_dispatch__")
MODULE = (f"{TORCH}/nn/modules/module.py", 1780, "_call_impl")
RUNS_BACKWARD = (f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward")
CHECKPOINT = (f"{TORCH}/utils/checkpoint.py", 1100, "unpack_hook")
PYTHON = "_PyEval_EvalFrameDefault"
ALLOCATOR = "at::detail::empty_generic(c10::ArrayRef<long>)"
ENGINE = ("torch::autograd::Engine::evaluate_function(int)", "torch::autograd::Engine::thread_main(int)")


def calls(*operators):
    """The C++ functions that call operators, the innermost first."""
    return tuple(f"at::_ops::{operator}::call(at::Tensor const&)" for operator in operators)


def node(name):
    return f"torch::autograd::generated::{name}::apply(std::vector<at::Tensor>&&)"


def named(native, python=(USER,), *, in_module=False):
    return origin_of(Stack(tuple(python), (ALLOCATOR, *native)), in_module=in_module).operator


@pytest.mark.parametrize(
    ("operators", "name"),
    [
        (("mm", "matmul"), "mm"),
        (("addmm", "linear"), "addmm"),
        (("empty_memory_format", "empty_like", "exp"), "exp"),
        (("empty_strided", "empty_like", "ones_like"), "ones_like"),
        (("clamp_min", "relu"), "clamp_min"),
        (("add_Tensor",), "add"),
        (("_softmax", "softmax_int"), "_softmax"),
        ((), ""),
    ],
)
def test_the_innermost_operator_is_named_unless_it_only_makes_its_callers_result(operators, name):
    assert named(calls(*operators)) == name


def test_operators_around_python_code_are_not_named():
    """A tensor's subclass may run Python code within an operator."""
    assert named((*calls("mul_Tensor"), PYTHON, *calls("exp"))) == "mul"
    assert named((PYTHON, *calls("exp"))) == ""


def test_an_operator_without_a_name_in_frames_is_not_named_after_what_it_calls():
    assert named((PYTHON, *calls("exp")), [OVERLOAD, USER]) == ""
    assert named((*calls("empty_like"), PYTHON), [OVERLOAD, USER]) == ""
    assert named((*calls("clamp_min"), PYTHON), [OVERLOAD, USER]) == "clamp_min"


def test_our_own_code_between_an_operator_and_its_kernel_does_not_hide_the_operator():
    own = [OVERLOAD, DISPATCH]
    assert named((PYTHON, "??", PYTHON, *calls("mm", "matmul"), PYTHON), [*own, USER]) == "mm"
    assert named((*calls("clamp_min"), PYTHON, *calls("relu"), PYTHON), [*own, USER]) == "clamp_min"
    assert named((PYTHON, *calls("empty_like"), PYTHON, *calls("exp"), PYTHON), [*own, *own, USER]) == "exp"
    assert named((PYTHON, *calls("mul_Tensor"), PYTHON, *calls("exp")), [*own, USER]) == "mul"
    assert named((PYTHON, PYTHON, *calls("exp")), [*own, OVERLOAD, USER]) == ""


def test_in_backward_the_node_is_named_and_not_its_operator():
    assert named((*calls("mm"), node("MmBackward0"), *ENGINE), ()) == "MmBackward0"
    assert named(("torch::autograd::AccumulateGrad::apply(int)", *ENGINE), ()) == "AccumulateGrad"


def test_recomputed_code_is_not_in_backward():
    frames = (*calls("mm"), *ENGINE)
    assert origin_of(Stack((), frames), in_module=False) == Origin("", in_backward=True)
    assert origin_of(Stack((MODULE,), frames), in_module=True) == Origin("mm")


def test_a_module_that_calls_backward_is_not_recomputed():
    frames = (*calls("mm"), node("MmBackward0"), *ENGINE)
    assert origin_of(Stack((RUNS_BACKWARD, MODULE), frames), in_module=True) == Origin("MmBackward0", in_backward=True)


def test_in_backward_nothing_is_named_if_the_node_is_unknown():
    assert named((*calls("sum_dim_IntList"), *ENGINE), ()) == ""
    assert named((*calls("mul_Tensor"), PYTHON, *ENGINE)) == ""


def test_recomputed_operators_are_named_and_not_the_node_that_recomputes():
    frames = (*calls("addmm", "linear"), PYTHON, node("MulBackward0"), *ENGINE)
    assert named(frames) == "MulBackward0"
    assert named(frames, [USER, MODULE], in_module=True) == "addmm"
    assert named(frames, [USER, CHECKPOINT]) == "addmm"
    # A reentrant checkpoint runs its part of backward by itself.
    assert named(frames, [RUNS_BACKWARD, CHECKPOINT]) == "MulBackward0"


def test_a_cast_of_autocast_has_no_name():
    cast = "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)"
    assert named((*calls("_to_copy", "to_dtype"), cast, *calls("linear"))) == ""
    assert named((*calls("addmm"), *calls("linear"))) == "addmm"


def test_without_native_frames_nothing_is_named():
    assert origin_of(Stack((USER,), ()), in_module=True) == Origin("")


def test_a_workspace_is_known_by_the_function_that_gets_it():
    assert is_workspace(Stack((), (ALLOCATOR, "at::cuda::getCurrentCUDABlasHandle(bool)", *calls("mm"))))
    assert not is_workspace(Stack((), (ALLOCATOR, *calls("mm"))))


def test_python_and_native_frames_keep_their_order():
    frames = [
        {"filename": "/lib/libtorch_cpu.so", "line": 5, "name": "at::a()"},
        {"filename": "/serve.py", "line": 9, "name": "ask"},
        {"filename": "??", "line": 0, "name": "??"},
        {"filename": "<string>", "line": 1, "name": "<module>"},
        {"filename": "/lib/libpython3.11.so.1.0", "line": 7, "name": PYTHON},
    ]
    assert stack_of(frames) == Stack((USER, ("<string>", 1, "<module>")), ("at::a()", "??", PYTHON))
