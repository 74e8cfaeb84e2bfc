"""One rank of many alone on a GPU: what only a GPU can keep elsewhere, and a model that no GPU holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.plugin.relations.state import StateBytes, state_of
from tests.steps.test_sharding import BLOCKS, F32, SHAPES, WIDTH, Net, shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.measuring.devices.contract import Device

HEADS, LENGTH = 4, 256
LARGE, LARGE_INNER = 8192, 32768
OFFLOADED_FROM = 4096
"""Elements from which torchao keeps a parameter's state on the host."""


class Attention(torch.nn.Module):
    """Causal attention as torch computes it, over its own part of a sequence or all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        query, key, value = self.project(x).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class LargeBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(LARGE, LARGE_INNER, bias=False)
        self.down = torch.nn.Linear(LARGE_INNER, LARGE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def state(device: Device, config: str, model: Callable[[], torch.nn.Module] = Net, batch: Any = None) -> StateBytes:
    with prepared_train_step(
        MeasuringContext(device, time_budget=None),
        model_source(model),
        torch.ones(16, WIDTH) if batch is None else batch,
        config=StepConfig.parse(config),
        loss=lambda output, _batch: output.square().mean(),
    ) as step:
        return state_of(step, step.measure().figures)


def attention() -> torch.nn.Module:
    return torch.nn.Sequential(*(Attention() for _ in range(BLOCKS)))


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")  # of torch 2.6 itself
def test_offloaded_parameters_leave_the_gpu_nothing_but_what_is_gathered(device: Device) -> None:
    here = state(device, "fp32,shard=fsdp,world=4")
    there = state(device, "fp32,shard=fsdp,world=4,offload=params")
    for kind in ("parameters", "gradients", "optimizer_state"):
        assert getattr(there, kind).measured == getattr(there, kind).formula == 0
    # AdamW's counts of steps are on the host in both.
    assert here.parameters.measured == here.gradients.measured == shards(4)
    assert here.optimizer_state.measured == 2 * shards(4)
    assert here.peak - there.peak >= 2 * shards(4)


def test_offloaded_activations_leave_the_gpu(device: Device) -> None:
    batch = torch.ones(4096, WIDTH)
    here = state(device, "fp32,shard=fsdp,world=4", batch=batch)
    there = state(device, "fp32,shard=fsdp,world=4,offload=activations", batch=batch)
    kept = BLOCKS * F32 * 4096 * WIDTH
    assert here.activations - there.activations > kept


def test_an_offloaded_optimizer_leaves_the_gpu_the_state_of_small_parameters(device: Device) -> None:
    pytest.importorskip("torchao", reason="needs torchao: this is a test of its CPUOffloadOptimizer")
    # So many samples that the peak is in backward, and not in the step, whose temporaries leave the GPU, too.
    batch = torch.ones(4096, WIDTH)
    here = state(device, "fp32", batch=batch)
    there = state(device, "fp32,offload=optimizer", batch=batch)
    elements = [math.prod(shape) for shape in SHAPES]
    assert here.optimizer_state.measured == 2 * F32 * sum(elements)
    small = 2 * F32 * sum(count for count in elements if count < OFFLOADED_FROM)
    assert there.optimizer_state.measured == there.optimizer_state.formula == small
    assert here.peak - there.peak == here.optimizer_state.measured - small
    assert (there.parameters, there.gradients) == (here.parameters, here.gradients)


def test_a_rank_has_its_part_of_the_sequence(device: Device) -> None:
    ranks = 4
    batch = torch.ones(4, LENGTH, WIDTH)
    whole = state(device, "bf16", attention, batch)
    part = state(device, f"bf16,shard=cp:{ranks}", attention, batch)
    assert part.parameters.measured == whole.parameters.measured
    assert part.batch * ranks == whole.batch
    assert whole.activations / ranks <= part.activations < whole.activations


def test_a_model_that_the_gpu_does_not_hold_is_sharded_over_64_ranks(device: Device) -> None:
    block = F32 * 2 * LARGE * LARGE_INNER
    blocks = int(torch.cuda.get_device_properties().total_memory * 1.2) // block

    def large() -> torch.nn.Module:
        return torch.nn.Sequential(*(LargeBlock() for _ in range(blocks)))

    rank = state(device, "fp32,checkpoint=blocks,shard=fsdp,world=64", large, torch.ones(1, LARGE))
    assert rank.parameters.measured == rank.parameters.formula == blocks * block // 64
    assert rank.optimizer_state.measured == 2 * blocks * block // 64
    # A block is gathered while the one before is in use.
    assert rank.peak > 4 * blocks * block // 64 + block


def test_the_shapes_are_those_of_the_model() -> None:
    assert [tuple(parameter.shape) for parameter in Net().parameters()] == SHAPES
