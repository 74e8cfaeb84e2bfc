"""Workspaces of cuBLAS among the blocks of a GPU, from a typed-out snapshot."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.emulated_process import workspaces
from pytest_gpumem.emulating.emulated_process.usage import Workspaces

BLOCKS = [
    {"address": address, "requested_size": nbytes, "state": "active_allocated"}
    for address, nbytes in ((1, 400), (2, 400), (3, 80))
]


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        pytest.param(375, {0: Workspaces(800, 400, frozenset({1, 2}))}, id="Python 3.12 freezes its own objects"),
        pytest.param(20_000, {}, id="the program's objects are frozen"),
    ],
)
def test_workspaces_are_found_unless_the_program_has_hidden_its_tensors(monkeypatch, frozen, found):
    monkeypatch.setattr(workspaces, "cublas_workspace_sizes", lambda: frozenset({400}))
    monkeypatch.setattr(workspaces, "cuda_snapshot", lambda: {"segments": [{"device": 0, "blocks": BLOCKS}]})
    monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: "native")
    monkeypatch.setattr("gc.get_freeze_count", lambda: frozen)
    assert workspaces.workspaces() == found
