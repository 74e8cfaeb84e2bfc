"""A step is measured as it is asked for, whatever is around it, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.plugin.relations.gradients import assert_same_gradients
from pytest_gpumem.plugin.relations.state import state_of
from pytest_gpumem.torch_support.private_api.numerics import outside_autocast
from tests.measuring import measure_infer_step, measure_train_step

WIDTH = 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.up(x))
        return x + self.down(torch.nn.functional.dropout(hidden, training=self.training))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Shared(Model):
    """Runs its blocks twice, as ALBERT does."""

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.float().square().mean()


class Dropping(Model):
    """Leaves a block out, as LayerDrop does by chance."""

    def forward(self, x):
        for block in self.blocks[:-1]:
            x = block(x)
        return x.float().square().mean()


class WithExtras(Model):
    """Has a random buffer that is not part of its state, and a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(WIDTH), persistent=False)

    def get_extra_state(self):
        return {"steps": 1}

    def set_extra_state(self, state):
        assert state == {"steps": 1}

    def forward(self, x):
        return super().forward(x + self.noise)


class WithoutAutocast(Model):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Silent(Model):
    def forward(self, x):
        return super().forward(x) * 0


def train(device, model, config):
    step = measure_train_step(
        MeasuringContext(device, time_budget=None),
        model,
        torch.ones(16, WIDTH),
        config=None if config is None else StepConfig.parse(config),
    )
    return step.figures.memory.memory_metrics()


def same(device, model, one, other):
    return assert_same_gradients(
        device, model_source(model), torch.randn(16, WIDTH), (StepConfig.parse(one), StepConfig.parse(other))
    )


@pytest.mark.parametrize(
    ("config", "enabled"), [(None, True), ("amp-bf16,checkpoint=blocks", True), ("amp-bf16,checkpoint=ops", False)]
)
def test_an_autocast_around_the_step_changes_no_byte_and_comes_back(device, config, enabled):
    alone = train(device, Model, config)
    linear = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert train(device, Model, config) == alone
        assert torch.is_autocast_enabled("cpu") is enabled
        assert (linear(torch.ones(1, 2)).dtype == torch.bfloat16) is enabled
    assert not torch.is_autocast_enabled("cpu")


def test_outside_of_autocast_its_end_frees_copies_of_weights_and_depths_are_restored():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        before = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        with outside_autocast("cpu"):
            assert torch.autocast_increment_nesting() == 1
            assert torch.autocast_decrement_nesting() == 0
        assert torch.autocast_increment_nesting() == before
        torch.autocast_decrement_nesting()


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_blocks_that_run_twice_are_recomputed_selectively(device, precision):
    selective = train(device, Shared, f"{precision},checkpoint=ops")
    assert selective["peak_forward"] < train(device, Shared, precision)["peak_forward"]


def infer(device, model, config):
    measure_infer_step(MeasuringContext(device, time_budget=None), model, torch.ones(16, WIDTH), config=config)


@pytest.mark.parametrize(("run", "config"), [(train, None), (train, "amp-fp16,checkpoint=blocks"), (infer, None)])
def test_what_is_drawn_after_a_step_does_not_depend_on_it(device, run, config):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    run(device, Model, config)
    assert torch.equal(torch.rand(1), expected)


def test_a_block_that_is_left_out_of_a_step_is_no_mistake(device):
    assert (
        train(device, Dropping, "checkpoint=blocks")["peak_forward"] < train(device, Dropping, "plain")["peak_forward"]
    )
    assert same(device, Dropping, "checkpoint=blocks", "fp32") is None


def test_models_with_random_buffers_and_other_state_are_compared(device):
    assert same(device, WithExtras, "checkpoint=blocks", "fp32") is None


def test_a_model_in_half_precision_is_compared_as_such(device):
    def build():
        return Model().bfloat16()

    batch = torch.randn(16, WIDTH).bfloat16()
    configs = StepConfig.parse("plain"), StepConfig.parse("checkpoint=blocks")
    assert assert_same_gradients(device, model_source(build), batch, configs) is None


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (WithoutAutocast, "amp-bf16", "autocast was on but cast nothing to bfloat16"),
        (torch.compiler.disable(Model.forward), "compile=eager", "torch.compile found nothing to compile"),
    ],
    ids=["autocast", "compile"],
)
def test_gradients_are_not_called_equal_where_a_config_did_nothing(device, model, config, message):
    if not isinstance(model, type):
        model = type("NotCompiled", (Model,), {"forward": model})
    with pytest.raises(ConfigError, match=message):
        same(device, model, config, "fp32")


def test_gradients_that_are_all_0_prove_nothing(device):
    with pytest.raises(AssertionError, match="nothing to compare: every gradient is 0"):
        same(device, Silent, "checkpoint=blocks", "fp32")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported in Python 3.14)")
def test_a_scripted_model_is_seen_to_autocast(device):
    def build():
        return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))

    batch = torch.ones(4, WIDTH)
    bench = MeasuringContext(device, time_budget=None)
    config = StepConfig.parse("amp-bf16")
    step = measure_train_step(bench, build, batch, config=config, loss=lambda output, _: output.float().mean())
    assert step.figures.memory.peak.allocated > 0


def test_gradients_that_the_optimizer_leaves_are_no_copy_of_its_state(device):
    model = Model()
    optimizer = torch.optim.AdamW(model.blocks[0].parameters())
    context = MeasuringContext(device, time_budget=None)
    with prepared_train_step(context, model_source(model), torch.ones(16, WIDTH), optimizer=optimizer) as prepared:
        state = state_of(prepared, prepared.measure().figures)
    assert state.other == 0
