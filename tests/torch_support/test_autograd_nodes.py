"""Autograd's nodes in memory, compared with what Python says about them."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading

import pytest
import torch

from pytest_gpumem.torch_support.private_api import autograd_nodes
from pytest_gpumem.torch_support.private_api.autograd_nodes import node_functions, node_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the functions are looked up on Linux")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _Reference(ctypes.Structure):
    """With three pointers, it is returned as C++ returns a smart pointer."""

    _fields_ = (("node", ctypes.c_size_t), ("owner", ctypes.c_size_t), ("unused", ctypes.c_size_t))


def _at(address, kind=ctypes.c_uint64):
    return kind.from_address(address).value


@pytest.fixture(autouse=True)
def anew():
    node_functions.cache_clear()
    yield
    node_functions.cache_clear()


def test_a_running_node_has_the_number_thread_and_class_that_python_knows():
    functions = node_functions()
    current_node = ctypes.CFUNCTYPE(_Reference)(functions.current_node)
    own_thread = ctypes.CFUNCTYPE(ctypes.c_uint64)(functions.thread)
    seen = []

    def look(node):
        def hook(_):
            reference = current_node()  # never given back, so the node stays
            address = reference.node
            thread = _at(address + functions.thread_at)
            is_python = _at(address) == functions.python_class
            python_type = _at(_at(address + functions.object_at) + functions.type_at) if is_python else 0
            python_name = _at(python_type + functions.name_at, ctypes.c_char_p) if is_python else None
            seen.append(
                (_at(address + functions.number_at), thread, node_name(_at(address), python_name))
                == (node._sequence_nr(), own_thread(), node.name())
            )

        return hook

    x = torch.ones(3, requires_grad=True)
    y = Double.apply(x.exp())
    for node in (y.grad_fn, y.grad_fn.next_functions[0][0]):
        node.register_prehook(look(node))
    y.sum().backward()
    assert seen == [True, True]
    assert not current_node().node


def test_a_new_node_takes_the_next_number():
    number = ctypes.CFUNCTYPE(ctypes.c_uint64)(node_functions().next_number)()
    assert torch.ones(1, requires_grad=True).exp().grad_fn._sequence_nr() == number + 1


def test_the_look_changes_no_numbers_and_ignores_modes_of_the_thread():
    before = torch.autograd._get_sequence_nr()
    with torch.inference_mode(), torch.device("meta"):
        assert node_functions() is not None
    assert torch.autograd._get_sequence_nr() == before


@pytest.mark.parametrize("place", ["number", "thread"])
def test_without_a_known_layout_there_are_no_functions(monkeypatch, place):
    layouts = [layout._replace(**{place: 8}) for layout in autograd_nodes._LAYOUTS]
    monkeypatch.setattr(autograd_nodes, "_LAYOUTS", layouts)
    assert node_functions() is None


def test_a_layout_whose_references_are_elsewhere_is_not_known(monkeypatch):
    monkeypatch.setattr(autograd_nodes, "_REFERENCES", 200)
    assert node_functions() is None


@pytest.mark.parametrize("name", ["_CURRENT_NODE", "_THREAD", "NEXT_NUMBER"])
def test_without_an_exported_function_there_are_no_functions(monkeypatch, name):
    monkeypatch.setattr(autograd_nodes, name, "_ZN2at7unknownEv")
    assert node_functions() is None


def test_a_name_for_an_object_without_a_type_name_is_not_read(monkeypatch):
    monkeypatch.setattr(autograd_nodes, "_NAME", 32)
    assert node_functions() is None


def test_without_a_further_thread_there_are_no_functions(monkeypatch):
    def fails(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(autograd_nodes._thread, "start_new_thread", fails)
    assert node_functions() is None


def test_while_torch_is_imported_nobody_waits_for_the_import(monkeypatch):
    """A program may allocate memory while torch, or a package that torch loads, is not completely imported."""
    monkeypatch.setattr(autograd_nodes, "_MOST_SECONDS", 0.5)
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    lock = importlib._bootstrap._get_module_lock("torch")
    lock.acquire()
    try:
        assert node_functions() is not None
    finally:
        lock.release()


def test_an_unknown_class_has_no_name():
    assert node_name(None, None) == ""
    assert node_name(id(threading), None) == ""
