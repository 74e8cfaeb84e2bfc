"""A training step as people write it: phases, micro-batches, clipping, zeroed and scaled gradients."""

from __future__ import annotations

import weakref

import pytest
import torch

from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.training import Training

CPU = torch.device("cpu")
SCALE = 1024.0
"""At which gradients of about 1 do not overflow in float16."""


class Tiny(torch.nn.Module):
    """A scalar of its input: a mean, as losses are."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return self.linear(x).mean()


def training_of(model, config="plain", batch=None, optimizer=torch.optim.SGD, loss=None, scale=SCALE) -> Training:
    """Gradients are scaled by ``scale``, if at all; ``None`` leaves what a new scaler begins with."""
    made = None if optimizer is None else optimizer(model.parameters(), lr=1.0)
    batch = torch.arange(16.0).view(4, 4) if batch is None else batch
    training = Training(model, model, batch, made, loss, StepConfig.parse(config), CPU)
    if training.scaler is not None and scale is not None:
        training.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return training


def run(training: Training, times: int = 1) -> None:
    for _ in range(times):
        for phase in training.phases():
            phase.run()


def gradients(config: str, optimizer=torch.optim.SGD) -> list[torch.Tensor]:
    """The gradients that the optimizer would get to see."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    training = training_of(model, config, optimizer=optimizer, loss=lambda output, _batch: output.square().mean())
    seen = []
    training.before_optimizer = lambda: seen.extend(parameter.grad.clone() for parameter in model.parameters())
    run(training)
    return seen


# Phases


def test_a_training_step_is_forward_backward_and_optimizer():
    model = Tiny()
    forward, backward, step = training_of(model, batch=torch.ones(4, 4)).phases()
    assert [phase.name for phase in (forward, backward, step)] == ["forward", "backward", "optimizer"]
    forward.run()
    assert model.linear.weight.grad is None
    backward.run()
    assert torch.equal(model.linear.weight.grad, torch.full((2, 4), 0.5))
    step.run()
    assert model.linear.weight.grad is None
    assert torch.equal(model.linear.weight, torch.full((2, 4), -0.5))


def test_a_training_step_can_be_repeated_and_trains_each_time():
    model = Tiny()
    run(training_of(model, batch=torch.ones(4, 4)), times=2)
    assert torch.equal(model.linear.weight, torch.full((2, 4), -1.0))


def losses_alive(config: str) -> list[int]:
    """How many losses are alive after each phase."""
    made = []

    def loss(output, _batch):
        made.append(weakref.ref(value := output * 1))
        return value

    alive = []
    for phase in training_of(Tiny(), config, loss=loss).phases():
        phase.run()
        alive.append(sum(one() is not None for one in made))
    return alive


def test_the_loss_lives_until_the_optimizer_has_stepped():
    assert losses_alive("plain") == [1, 1, 0]


@pytest.mark.parametrize("config", ["plain", "accumulate=2"])
def test_without_an_optimizer_gradients_are_made_and_given_up(config):
    model = Tiny()
    before = model.linear.weight.clone()
    training = training_of(model, config, optimizer=None)
    seen = []
    training.before_optimizer = lambda: seen.append(model.linear.weight.grad is not None)
    names = [phase.name for phase in training.phases()]
    assert names == ["forward", "backward"] * (len(names) // 2) + ["backward"]
    run(training)
    assert seen == [True]
    assert model.linear.weight.grad is None
    assert torch.equal(model.linear.weight, before)


# Micro-batches


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ("accumulate=2", torch.optim.SGD),
        ("accumulate=4", None),
        ("amp-fp16,accumulate=4", torch.optim.SGD),
        ("amp-fp16,accumulate=4", None),
    ],
)
def test_micro_batches_add_up_to_the_gradients_of_the_whole_batch(config, optimizer):
    whole, parts = gradients("fp32", optimizer), gradients(config, optimizer)
    scale = SCALE if "fp16" in config and optimizer else 1
    tolerance = 1e-2 if "fp16" in config else 1e-5
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other / scale, one, rtol=tolerance, atol=tolerance * float(one.abs().max()))


def test_each_micro_batch_has_its_forward_and_backward_and_all_of_them_one_optimizer():
    phases = training_of(Tiny(), "accumulate=4").phases()
    assert [phase.name for phase in phases] == ["forward", "backward"] * 4 + ["optimizer"]


def test_of_several_losses_one_is_alive():
    # What is divided by the number of parts is another tensor than what the loss gave; its graph keeps none of them.
    assert max(losses_alive("accumulate=2")) <= 1


def test_a_loss_gets_the_part_of_the_batch_that_its_output_belongs_to():
    seen = []

    def loss(output, batch):
        seen.append(batch.clone())
        return output

    batch = torch.arange(16.0).view(4, 4)
    run(training_of(Tiny(), "accumulate=2", batch, loss=loss))
    assert torch.equal(torch.cat(seen), batch)


# Clipping and zeroing


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ("clip=0.25,zero_grad=zero", torch.optim.SGD),
        ("clip=0.25", None),
        ("amp-fp16,clip=0.25", torch.optim.SGD),
        ("amp-fp16,clip=0.25", None),
    ],
)
def test_gradients_are_clipped_to_the_norm_when_they_are_unscaled(config, optimizer, monkeypatch):
    norms = []
    original = torch.nn.utils.clip_grad_norm_

    def noted(parameters, norm):
        parameters = list(parameters)
        result = original(parameters, norm)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in parameters])))
        return result

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", noted)
    model = Tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run(training_of(model, config, optimizer=optimizer))
    assert norms == pytest.approx([0.25], rel=1e-3)
    steps = [
        float((parameter.detach() - old).norm()) for parameter, old in zip(model.parameters(), before, strict=True)
    ]
    assert sum(step**2 for step in steps) ** 0.5 == pytest.approx(0.25 if optimizer else 0.0, rel=1e-2)


def test_gradients_within_the_norm_are_left_alone():
    model = Tiny()
    run(training_of(model, "clip=1000", torch.ones(4, 4)))
    assert torch.equal(model.linear.weight, torch.full((2, 4), -0.5))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, None])
def test_zeroed_gradients_stay_and_are_the_same_tensors_in_the_next_step(optimizer):
    model = Tiny()
    training = training_of(model, "zero_grad=zero", optimizer=optimizer)
    run(training)
    kept = model.linear.weight.grad
    assert not kept.any()
    run(training)
    assert model.linear.weight.grad is kept
    assert not kept.any()


# Scaled gradients


def test_a_step_that_overflows_skips_the_optimizer_and_halves_the_scale():
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # 65536 times 1e35 is beyond what float32 can hold.
    training = training_of(model, "amp-fp16", loss=lambda output, _batch: output.float() * 1e35, scale=None)
    run(training)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert training.scale() == 32768


def test_a_step_that_does_not_overflow_trains_by_unscaled_gradients():
    model = Tiny()
    training = training_of(model, "amp-fp16", torch.ones(4, 4))
    run(training)
    assert torch.equal(model.linear.weight, torch.full((2, 4), -0.5))
    assert training.scale() == SCALE


def test_without_an_optimizer_gradients_are_scaled_on_demand():
    training = training_of(Tiny(), "amp-fp16", optimizer=None)
    assert training.scale() is None
    training.scale_gradients()
    assert training.scale() == 65536


def test_the_forward_pass_runs_within_autocast_and_the_backward_pass_does_not():
    seen = []

    class Watching(Tiny):
        def forward(self, x):
            seen.append(self.linear(x).dtype)
            return super().forward(x)

    model = Watching()
    model.linear.weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    run(training_of(model, "amp-bf16"))
    assert seen == [torch.bfloat16, False]
