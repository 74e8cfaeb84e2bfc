"""Checkpointing without touching a model's code: the same gradients, less saved, and everything back as it was."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.blocks import Block as Repeated
from pytest_gpumem.measuring.step_config.checkpoint_kinds import EXPENSIVE_OPS, KINDS, each_alone, in_segments
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.checkpointing import BlockRuns, activation_checkpointing

if TYPE_CHECKING:
    from pytest_gpumem.measuring.devices.cpu import CpuDevice

BLOCKS = 4
EVERY_WORD = ["blocks", "every:2", "sequential:2", "sqrt", "modules:h.*.mlp", "ops"]
"""One of each kind that replaces the ``forward`` of modules."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.5))

    def forward(self, hidden):
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """Some blocks with dropout, in a loop."""

    def __init__(self, count=BLOCKS):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 1)

    def forward(self, hidden):
        for block in self.h:
            hidden = block(hidden)
        return self.head(hidden).sum()


def batch(samples: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, samples * 8).view(samples, 8)


def config_of(checkpoint: str, **more) -> StepConfig:
    return StepConfig(checkpoint=checkpoint, **more)


def around_forward(config: StepConfig):
    kind, argument = config.checkpointing
    return kind.around_forward(argument)


def step(model: nn.Module, config: StepConfig, runs: BlockRuns | None = None) -> dict[str, torch.Tensor]:
    """The gradients of a step, always with the same random numbers."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with activation_checkpointing(model, config, runs):
        with around_forward(config):
            loss = model(batch())
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def saved_bytes(device: CpuDevice, checkpoint: str) -> int:
    """Bytes that are live after forward, and were not before."""
    # Beside these samples the state of the random numbers, 5 kB for each part, is little.
    model, inputs = Model(), batch(1024)
    before = device.live()
    with activation_checkpointing(model, config_of(checkpoint)):
        loss = model(inputs)
        saved = device.live() - before
        loss.backward()
    return saved


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(config: StepConfig) -> Counter[str]:
    model = Model()
    with Operators() as operators:
        step(model, config)
    return operators.counts


def test_every_kind_that_replaces_forward_is_tried():
    assert {word.partition(":")[0] for word in EVERY_WORD} == {kind.name for kind in KINDS.values() if kind.recomputed}


# What a step gives


@pytest.mark.parametrize("checkpoint", [*EVERY_WORD, "none"])
def test_gradients_are_those_of_the_plain_step_bit_for_bit_with_dropout(checkpoint):
    plain = step(Model(), config_of("none"))
    model = Model()
    for _ in range(2):
        found = step(model, config_of(checkpoint))
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == []


def test_gradients_are_those_of_the_plain_step_when_saved_tensors_were_moved():
    plain, found = step(Model(), config_of("none")), step(Model(), config_of("offload"))
    # A transposed weight comes back in another layout, for which another kernel sums.
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_dropout_moves_these_gradients():
    plain = step(Model(), config_of("none"))
    model = Model()
    model.h.eval()
    assert not torch.equal(step(model, config_of("none"))["h.0.mlp.0.weight"], plain["h.0.mlp.0.weight"])


@pytest.mark.parametrize("checkpoint", ["blocks", "sqrt", "modules:h.*.mlp"])
def test_the_model_is_as_it_was_afterwards(checkpoint):
    model = Model()
    names = list(model.state_dict())
    with activation_checkpointing(model, config_of(checkpoint)):
        assert any("forward" in vars(module) for module in model.modules())
        assert list(model.state_dict()) == names
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_else_had_put_there_comes_back():
    model = Model()
    model.h[0].forward = theirs = lambda hidden: hidden * 2
    with activation_checkpointing(model, config_of("blocks")):
        assert model.h[0].forward is not theirs
    assert model.h[0].forward is theirs


def test_a_replaced_forward_still_tells_its_signature():
    import inspect

    model = Model()
    with activation_checkpointing(model, config_of("blocks")):
        assert list(inspect.signature(model.h[0].forward).parameters) == ["hidden"]
    with activation_checkpointing(model, config_of("sequential:1")):
        assert list(inspect.signature(model.h[3].forward).parameters) == ["hidden"]


# What is saved, and what is computed again


@pytest.mark.parametrize("checkpoint", ["blocks", "every:2", "sqrt", "modules:h.*.mlp"])
def test_every_kind_saves_less_than_the_plain_step(device, checkpoint):
    assert saved_bytes(device, checkpoint) < saved_bytes(device, "none")


def test_longer_segments_save_less_and_expensive_ops_more(device):
    kinds = ["sequential:1", "sequential:2", "sequential:4", "ops"]
    saved = [saved_bytes(device, checkpoint) for checkpoint in kinds]
    assert saved == sorted(saved)
    assert len(set(saved)) == len(kinds)


@pytest.mark.parametrize(
    ("checkpoint", "calls"),
    [
        ("blocks", ["h.0", "h.1", "h.2", "h.3"]),
        ("every:3", ["h.2"]),
        ("sequential:3", ["h.0 to h.1", "h.2", "h.3"]),
        ("sqrt", ["h.0 to h.1", "h.2 to h.3"]),
        ("modules:h.?.mlp", [f"h.{number}.mlp" for number in range(4)]),
    ],
)
def test_what_is_called_for_runs_once_more(checkpoint, calls):
    runs, model = BlockRuns(), Model()
    step(model, config_of(checkpoint), runs)
    runs.check(model, config_of(checkpoint))
    assert runs.calls == dict.fromkeys(calls, 1)
    assert runs.runs == dict.fromkeys(calls, 2)
    assert runs.again() == len(calls)


@pytest.mark.parametrize(("blocks", "segments"), [(1, 1), (2, 1), (3, 2), (7, 3)])
def test_the_root_of_the_number_of_blocks_is_rounded_to_segments(blocks, segments):
    runs = BlockRuns()
    # A list of one has to be named.
    step(Model(blocks), config_of("sqrt", blocks="h"), runs)
    assert len(runs.calls) == segments


def test_the_expensive_ops_are_saved_and_run_no_more_often_than_in_the_plain_step():
    plain, blocks, ops = (counted(config_of(checkpoint)) for checkpoint in ("none", "blocks", "ops"))
    # Each of a block's linear layers has one product in forward.
    assert blocks["addmm"] - plain["addmm"] == 2 * BLOCKS
    assert ops["addmm"] == plain["addmm"]
    assert ops["mm"] == blocks["mm"] == plain["mm"] > 0
    assert ops["gelu"] == blocks["gelu"] == 2 * plain["gelu"] > 0


def test_every_operator_that_is_saved_is_one_of_torch():
    assert [name for name in EXPENSIVE_OPS if not hasattr(torch.ops.aten, name)] == []


def test_without_gradients_nothing_is_saved_or_counted_as_computed_again():
    runs = BlockRuns()
    model = Model()
    with activation_checkpointing(model, config_of("blocks"), runs), torch.no_grad():
        model(batch())
    assert set(runs.runs.values()) == set(runs.calls.values()) == {1}


def test_named_blocks_are_those_that_are_recomputed():
    model = Model()
    model.more = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    runs = BlockRuns()
    step(model, config_of("blocks", blocks="h.1"), runs)
    assert list(runs.calls) == ["h.1"]


def test_offloading_moves_saved_tensors_to_host_memory_and_back():
    moved = []
    original = torch.autograd.graph.save_on_cpu

    class Noted(original):
        def __init__(self, **kwargs):
            moved.append(kwargs)
            super().__init__(**kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.autograd.graph.save_on_cpu", Noted)
        assert isinstance(around_forward(config_of("offload")), original)
        with around_forward(config_of("blocks")) as nothing:
            assert nothing is None
    assert moved == [{"pin_memory": True}]


# Groups that are recomputed as one


@given(st.integers(1, 200), st.data())
def test_segments_are_as_equal_as_can_be_the_larger_ones_first(blocks, data):
    segments = data.draw(st.integers(1, blocks))
    made = list(in_segments([range(blocks)], segments))
    sizes = [len(segment) for segment in made]
    assert [block for segment in made for block in segment] == list(range(blocks))
    assert len(sizes) == segments
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_segments_are_made_list_by_list():
    assert list(in_segments(["abc", "de"], 2)) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_block_that_stands_in_two_lists_is_recomputed_once():
    first, second = Repeated("h.0", nn.Linear(1, 1)), Repeated("h.1", nn.Linear(1, 1))
    again = Repeated("same.0", first.module)
    assert [[block.module for block in group] for group in each_alone([[first, second], [again]])] == [
        [first.module],
        [second.module],
    ]


# Nothing to act on


def test_modules_of_which_none_ran_are_told():
    class Partly(Model):
        def forward(self, hidden):
            return self.head(hidden).sum()

    runs, model = BlockRuns(), Partly(6)
    config = config_of("blocks")
    step(model, config, runs)
    message = (
        "checkpoint=blocks: the blocks of Partly were detected as the modules in "
        "h (6 x Block), but forward calls none of these modules; name modules that forward calls with blocks=PATTERN"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        runs.check(model, config)


def test_a_segment_whose_blocks_did_not_all_run_is_told():
    class Partly(Model):
        def forward(self, hidden):
            return self.head(self.h[0](hidden)).sum()

    runs, model = BlockRuns(), Partly()
    config = config_of("sequential:1")
    step(model, config, runs)
    with pytest.raises(ConfigError, match=r"^h\.1 cannot be .*: it did not run after h\.0;"):
        runs.check(model, config)


def test_frozen_blocks_beside_trained_ones_are_no_error():
    model = Model()
    model.h[:2].requires_grad_(False)
    runs = BlockRuns()
    step(model, config_of("blocks"), runs)
    runs.check(model, config_of("blocks"))
    assert runs.again() == 2


def test_a_budget_of_activations_is_set_within_and_not_afterwards():
    from torch._functorch import config as functorch

    before = functorch.activation_memory_budget
    with activation_checkpointing(Model(), config_of("budget:0.25", compile="default")):
        assert functorch.activation_memory_budget == 0.25
    assert functorch.activation_memory_budget == before != 0.25
