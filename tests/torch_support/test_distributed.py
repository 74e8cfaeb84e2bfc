"""Private names of torch for collectives and device meshes, in a process group without other ranks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem.torch_support.private_api.distributed import (
    FAKE,
    around_collectives,
    default_store,
    forget_meshes,
    forget_operators_of_meshes,
    store_of_nobody,
)


@pytest.fixture
def group():
    dist.init_process_group(FAKE, store=store_of_nobody(), rank=0, world_size=2)
    yield dist.group.WORLD
    forget_meshes()
    dist.destroy_process_group()


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def seen():
    """The collectives that Python waited for, and broadcasts, within `around_collectives`."""
    events = []

    @contextmanager
    def broadcasting():
        events.append("broadcast begins")
        yield
        events.append("broadcast ends")

    with around_collectives(lambda: events.append("waited"), broadcasting):
        yield events


def test_the_store_of_the_default_group_is_shared_with_other_ranks():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", b"value")
        assert default_store().get("key") == b"value"
        assert store.num_keys() > 0
    finally:
        dist.destroy_process_group()


def test_waiting_for_a_collective_is_reported(gloo, seen):
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert seen == []
    work.wait()
    assert seen == ["waited"]


def test_waiting_for_a_functional_collective_is_reported(group, seen):
    total = functional.all_reduce(torch.ones(2), "sum", group)
    assert seen == []
    total + 1
    assert seen == ["waited"]


def test_the_broadcast_of_a_wrapped_models_parameters_runs_in_the_context(group, seen):
    DistributedDataParallel(torch.nn.Linear(2, 2))
    assert seen == ["broadcast begins", "broadcast ends"]


def test_collectives_are_torchs_own_after_the_context():
    before = dist.Work.wait, functional.wait_tensor, dist._broadcast_coalesced
    with around_collectives(lambda: None, lambda: pytest.fail("nothing is broadcast")):
        assert before != (dist.Work.wait, functional.wait_tensor, dist._broadcast_coalesced)
    assert before == (dist.Work.wait, functional.wait_tensor, dist._broadcast_coalesced)


def test_a_sharded_operator_is_decided_again_after_its_decision_was_forgotten(group, monkeypatch):
    propagator = DTensor._op_dispatcher.sharding_propagator
    decide, decided = propagator.propagate_op_sharding_non_cached, []

    def noted(schema):
        decided.append(str(schema.op))
        return decide(schema)

    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", noted)
    forget_operators_of_meshes()
    tensor = distribute_tensor(torch.ones(4), dist.init_device_mesh("cpu", (2,)), [Replicate()])
    tensor.cos()
    tensor.cos()
    assert decided.count("aten.cos.default") == 1
    forget_operators_of_meshes()
    tensor.cos()
    assert decided.count("aten.cos.default") == 2
