"""The first run of a step finds out whether what its config asks for really happens."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pytest_gpumem.base.errors import ConfigError, MeasuringError
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.dry_run import MOST_OVERFLOWS, DryRun, dry_run, dry_run_inference
from pytest_gpumem.measuring.steps.inference import infer_phases
from pytest_gpumem.measuring.steps.training import Training

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, hidden):
        return self.mlp(hidden)


class Model(nn.Module):
    """Three blocks, each of three modules within it, and a head."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, hidden):
        for block in self.h:
            hidden = block(hidden)
        return self.head(hidden).mean()


def training_of(model, config, loss=None, optimizer=torch.optim.SGD) -> Training:
    config = StepConfig.parse(config)
    return Training(model, model, torch.ones(4, 4), optimizer(model.parameters()), loss, config, CPU)


def rehearsed(model, config, loss=None) -> DryRun:
    return dry_run(training_of(model, config, loss), CpuDevice())


# Routing


class WithoutValues(CpuDevice):
    """Makes as many choices by an assumption as there are calls of the model."""

    model: Model

    def lacks(self, feature):
        return "values are not computed" if feature == "values" else super().lacks(feature)

    def choices_assumed(self):
        return getattr(self.model, "chosen", 0)


class AssumedRouting(Model):
    chosen = 0

    def forward(self, hidden):
        self.chosen += 1
        return super().forward(hidden)


@pytest.mark.parametrize("infers", [False, True])
def test_a_routing_is_refused_where_a_device_without_values_chooses_nothing_by_it(infers):
    def notes(model, device):
        training = training_of(model, "routing=balanced")
        if infers:
            phases = infer_phases(model, model, torch.ones(4, 4), training.config, CPU)
            return dry_run_inference(phases, training.config, device)
        return dry_run(training, device).notes

    device = WithoutValues()
    device.model = AssumedRouting()
    assert notes(device.model, device) == ()
    with pytest.raises(ConfigError, match=r"^routing=balanced has no effect, because no operator in the step "):
        notes(Model(), device)
    # A test runs where there is a GPU, and where there is none.
    assert notes(Model(), CpuDevice()) == ("routing=balanced is not needed on cpu, which computes all values",)


# Recomputation


@pytest.mark.parametrize(
    ("checkpoint", "recomputed"),
    [
        ("none", 0),
        # The block, which is run again without being called, and what it calls: the mlp with two modules.
        ("blocks", 3 * 4),
        # The mlp, which is run again without being called, and its two modules.
        ("modules:h.*.mlp", 3 * 3),
        # A module without modules in it.
        ("modules:head", 1),
    ],
)
def test_the_calls_that_are_repeated_in_backward_are_counted(checkpoint, recomputed):
    assert rehearsed(Model(), f"checkpoint={checkpoint}") == DryRun(recomputed=recomputed)


def test_a_segment_repeats_what_its_blocks_call():
    # One segment; the three blocks' forward methods are called by it, and each calls an mlp of two modules.
    assert rehearsed(Model(), "checkpoint=sequential:1").recomputed == 1 + 3 * 3


def test_each_micro_batch_repeats_them():
    assert rehearsed(Model(), "checkpoint=blocks,accumulate=2").recomputed == 2 * 3 * 4


def test_a_scale_that_has_to_come_down_does_not_count_calls_twice():
    config = "amp-fp16,checkpoint=blocks"
    assert rehearsed(Model(), config, lambda output, _batch: output * 1e3).recomputed == 3 * 4


def test_the_models_own_checkpointing_is_seen_without_a_config_for_it():
    class Own(Model):
        def forward(self, hidden):
            hidden = torch.utils.checkpoint.checkpoint(self.h[0], hidden, use_reentrant=False)
            return self.head(hidden).mean()

    assert rehearsed(Own(), "plain").recomputed == 4


def test_the_model_is_as_it_was_after_the_rehearsal():
    model = Model()
    training = training_of(model, "amp-fp16,checkpoint=blocks")
    dry_run(training, CpuDevice())
    assert training.before_optimizer is None
    assert not any("forward" in vars(module) for module in model.modules())
    assert nn.modules.module._global_forward_pre_hooks == {}


# Autocast


def test_an_inference_step_that_does_not_autocast_is_not_rehearsed():
    ran = []
    model, config = Model(), StepConfig.parse("bf16")
    model.register_forward_pre_hook(lambda *_: ran.append(True))
    dry_run_inference(infer_phases(model, model, torch.ones(4, 4), config, CPU), config, CpuDevice())
    assert ran == []


# Gradients


def test_a_gradient_that_is_not_a_number_is_told_by_the_parameters_name():
    def loss(output, _batch):
        return output * float("nan")

    message = (
        "the gradient of h.0.mlp.0.weight is not a number (NaN) under amp-fp16 at every gradient scale, so "
        "every step would skip the optimizer (8 gradients are NaN)"
    )
    with pytest.raises(MeasuringError, match=f"^{re.escape(message)}$"):
        rehearsed(Model(), "amp-fp16", loss)


def test_of_several_gradients_the_one_that_is_not_a_number_is_told():
    class Partly(Model):
        def forward(self, hidden):
            return super().forward(hidden) + (self.head.bias * float("nan")).sum()

    with pytest.raises(
        MeasuringError, match=r"^the gradient of head\.bias is not a number \(NaN\) .* skip the optimizer$"
    ):
        rehearsed(Partly(), "amp-fp16")


def test_a_sparse_gradient_is_looked_at_too():
    class Sparse(Model):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 4, sparse=True)

        def forward(self, hidden):
            found = self.table(torch.tensor([1, 1]))
            return super().forward(hidden) + (found * torch.tensor([[1.0], [float("nan")]])).sum()

    with pytest.raises(MeasuringError, match=r"^the gradient of table\.weight is not a number"):
        rehearsed(Sparse(), "amp-fp16")


def test_gradients_that_overflow_at_first_lower_the_scale_without_a_note():
    training = training_of(Model(), "amp-fp16", lambda output, _batch: output * 1e3)
    assert dry_run(training, CpuDevice()) == DryRun(recomputed=0)
    assert training.scale() < 65536
    settled = training.scale()
    for phase in training.phases():
        phase.run()
    assert training.scale() == settled


def test_gradients_that_overflow_at_every_scale_are_measured_with_a_note():
    class Overflowing(Model):
        def forward(self, hidden):
            return super().forward(hidden) + (self.head.bias * float("inf")).sum()

    training = training_of(Overflowing(), "amp-fp16")
    scale = 65536 / 2 ** (MOST_OVERFLOWS + 1)
    note = f"the gradients overflow at every scale down to {scale:g}, so every step skips the optimizer"
    assert dry_run(training, CpuDevice()) == DryRun((note,), recomputed=0, overflows=True)


def test_what_is_not_a_number_without_a_scaler_is_measured():
    assert rehearsed(Model(), "fp32", lambda output, _batch: output * float("nan")) == DryRun(recomputed=0)
