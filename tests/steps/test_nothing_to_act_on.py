"""A config that has nothing to act on is an error: a step that silently runs plainly would be a gate that sees nothing."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from tests.measuring import measure_infer_step, measure_train_step

WIDTH = 8
CAST_NOTHING = (
    "autocast was on but cast nothing to %s; the model switches autocast off, or has no operation that autocast casts"
)


class Model(torch.nn.Module):
    """Blocks that work, one that never runs, and a switch that ``config=`` can turn."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.never = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Frozen(Model):
    """Only its input's gradient would flow through the blocks, and the input wants none."""

    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x) * self.scale


class WithoutAutocast(Model):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class NotCompiled(Model):
    forward = torch.compiler.disable(Model.forward)


@pytest.fixture
def bench(device):
    return MeasuringContext(device, time_budget=None)


def train(bench, model, config):
    return measure_train_step(bench, model, torch.ones(4, WIDTH), config=StepConfig.parse(config))


def infer(bench, model, config):
    return measure_infer_step(bench, model, torch.ones(4, WIDTH), config=StepConfig.parse(config))


@pytest.mark.parametrize(
    ("run", "model", "config", "message"),
    [
        (train, Model, "checkpoint=modules:never", "checkpoint=modules:never: never did not run in this step"),
        (train, Model, "checkpoint=modules:*.mlp", "no module of Model matches '*.mlp'; it has blocks, blocks.0"),
        (
            train,
            Model,
            "checkpoint=every:3",
            "checkpoint=every:3: the longest list of blocks in Model has only 2 blocks",
        ),
        (train, Model, "checkpoint=sequential:3", "2 blocks cannot be split into 3 segments"),
        (
            train,
            Frozen,
            "checkpoint=blocks",
            "blocks.0, blocks.1 ran in forward, but backward did not recompute any of these",
        ),
        (
            train,
            Frozen,
            "checkpoint=sqrt",
            "blocks.0 to blocks.1 ran in forward, but backward did not recompute any of these",
        ),
        (train, lambda: torch.nn.Linear(WIDTH, 1), "checkpoint=blocks", "Linear has no repeated blocks (a ModuleList"),
        (train, WithoutAutocast, "amp-bf16", f"amp-bf16: {CAST_NOTHING % 'bfloat16'}"),
        (infer, WithoutAutocast, "amp-fp16", f"amp-fp16: {CAST_NOTHING % 'float16'}"),
        (train, NotCompiled, "compile=eager", "compile=eager: torch.compile found nothing to compile"),
        (infer, NotCompiled, "compile=eager", "compile=eager: torch.compile found nothing to compile"),
        (infer, Model, "cache=off", "cache=off needs a model with config.use_cache"),
        (
            infer,
            Model,
            "cache=on",
            "needs a model whose forward takes use_cache, and cache or past_key_values; Model.forward does not take these",
        ),
        (train, Model, "cache=on", "cache does nothing in gpumem.train_step"),
        (infer, Model, "optimizer=sgd,accumulate=2", "accumulate, optimizer does nothing in gpumem.infer_step"),
    ],
)
def test_a_config_with_nothing_to_act_on_says_what_it_missed(bench, run, model, config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(bench, model, config)


@pytest.mark.parametrize(
    ("run", "config"),
    [
        (train, "amp-bf16,checkpoint=blocks"),
        (train, "checkpoint=sqrt,compile=eager"),
        (train, "checkpoint=modules:blocks.1"),
        (infer, "amp-fp16,compile=eager"),
    ],
)
def test_one_that_has_something_to_act_on_is_measured(bench, run, config):
    assert run(bench, Model, config).figures.is_settled


# Blocks that are never called


class Attention(torch.nn.Linear):
    """A block, with a residual beside it."""


class FeedForward(torch.nn.Linear):
    """Another one."""


class Residual(torch.nn.Module):
    def forward(self, x, before):
        return x + before


class Nested(torch.nn.Module):
    """Layers that are lists themselves, as in x-transformers: what is called are their members."""

    def __init__(self, depth=3):
        super().__init__()
        kinds = (Attention, FeedForward) * depth
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(
                [torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH), None]), kind(WIDTH, WIDTH), Residual()]
            )
            for kind in kinds
        )

    def forward(self, x):
        for norms, block, residual in self.layers:
            x = residual(block(norms[0](x)).relu(), x)
        return x.square().mean()


class TwoNested(torch.nn.Module):
    """Two such models, one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Nested(2), Nested(3)

    def forward(self, x):
        return self.encoder(x) + self.decoder(x)


class ByName(Model):
    """Calls what is within its blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = block[0](x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("model", "config", "found", "example"),
    [
        (
            Nested,
            "checkpoint=blocks",
            (
                "the blocks of Nested were detected as the modules in layers (6 x ModuleList), but forward calls none of these "
                "modules; name modules that forward calls, such as 3 x Attention, 3 x FeedForward"
            ),
            "checkpoint=blocks,blocks=layers.*.1",
        ),
        (
            Nested,
            "checkpoint=sqrt",
            "the blocks of Nested were detected as the modules in layers (6 x ModuleList), ",
            "checkpoint=blocks,blocks=layers.*.1",
        ),
        (
            Nested,
            "checkpoint=ops,blocks=layers",
            "blocks=layers selects the modules in layers (6 x ModuleList), ",
            "checkpoint=ops,blocks=layers.*.1",
        ),
        (
            TwoNested,
            "checkpoint=every:2",
            "modules in the lists encoder.layers (4 x ModuleList), decoder.layers (6 x ModuleList), but forward calls none ",
            "checkpoint=blocks,blocks=*.layers.*.1",
        ),
        (
            ByName,
            "checkpoint=blocks",
            (
                "modules in blocks (2 x Sequential), but forward calls none of these modules; name modules that forward calls, such "
                "as 2 x Linear"
            ),
            "checkpoint=blocks,blocks=blocks.*.0",
        ),
    ],
)
def test_blocks_that_are_never_called_are_named_with_a_config_that_works(bench, model, config, found, example):
    with pytest.raises(ConfigError, match=re.escape(found)) as caught:
        train(bench, model, config)
    assert str(caught.value).endswith(f"with '{example}'")
    step = train(bench, model, example)
    assert step.recomputed >= 2
    assert step.figures.is_settled
