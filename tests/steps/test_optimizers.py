"""Optimizers by their words, and the bytes of their state: the formula is what they really hold."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.config import OPTIMIZERS, StepConfig
from pytest_gpumem.measuring.steps.model_step import eight_bit_module, optimizer_named
from pytest_gpumem.measuring.steps.sharded_optimizer import adapted_factory
from pytest_gpumem.plugin.relations.state import state_bytes
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors
from tests.needs import NEEDS_COMPILER

CPU = torch.device("cpu")


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Parameters of one, two and four dimensions, some above and some below the least size of 8-bit state."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(64, 128), torch.nn.Linear(65, 70), torch.nn.LayerNorm(7)
    ).to(dtype)


def stepped(make, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the model's parameters when it has stepped once."""
    optimizer = make(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that the optimizer really holds."""
    return sum(blocks_of(reachable_tensors([list(optimizer.state.values())]), CPU).values())


@pytest.mark.parametrize(
    ("word", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("adamw-foreach", torch.optim.AdamW, {"foreach": True}),
        ("adamw-fused", torch.optim.AdamW, {"fused": True}),
        ("adafactor", torch.optim.Adafactor, {}),
    ],
)
def test_a_word_names_an_optimizer_with_torchs_defaults(word, kind, options):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    made = optimizer_named(word)(parameters)
    assert type(made) is kind
    assert made.defaults == kind(parameters, **options).defaults


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        *((word, torch.float32) for word in OPTIMIZERS if word != "none" and not word.endswith("-8bit")),
        ("adam-foreach", torch.bfloat16),
        ("adamw-fused", torch.bfloat16),
        ("adafactor", torch.bfloat16),
    ],
)
def test_the_formula_gives_the_bytes_that_the_state_really_has(word, dtype):
    model = model_of(dtype)
    optimizer = stepped(optimizer_named(word), model)
    assert state_bytes(optimizer, list(model.parameters())) == held(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, nesterov=True, fused=True),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, fused=True),
        lambda parameters: torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "amsgrad": True}]),
    ],
    ids=["momentum", "nesterov", "amsgrad", "fused amsgrad", "groups"],
)
def test_the_formula_knows_the_options_of_an_optimizer(make):
    model = model_of()
    optimizer = stepped(make, model)
    assert state_bytes(optimizer, list(model.parameters())) == held(optimizer) > 0


def test_the_formula_is_known_before_the_state_is():
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert held(optimizer) == 0
    assert state_bytes(optimizer, list(model.parameters())) == 2 * 400 + 4


def test_what_an_optimizer_does_not_step_has_no_state():
    model = model_of()
    optimizer = torch.optim.Adam(model[1].parameters())
    assert state_bytes(optimizer, list(model.parameters())) == state_bytes(optimizer, list(model[1].parameters()))


def test_a_count_on_the_host_is_not_on_another_device():
    weights = [torch.nn.Parameter(torch.ones(10, device="meta"))]
    assert state_bytes(torch.optim.Adam(weights), weights) == 80
    assert state_bytes(torch.optim.Adam(weights, capturable=True), weights) == 84


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_without_a_formula_has_none(kind):
    model = model_of()
    assert state_bytes(kind(model.parameters()), list(model.parameters())) is None


def test_an_optimizer_that_only_has_a_known_name_has_no_formula():
    class AdamW(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    model = model_of()
    assert state_bytes(AdamW(model.parameters()), list(model.parameters())) is None


# 8 bits


@pytest.mark.thorough
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")  # torchao compiles its step, and compiling warns
def test_the_formula_gives_the_bytes_of_an_8_bit_state():
    pytest.importorskip("torchao")
    model = model_of()
    optimizer = stepped(optimizer_named("adamw-8bit"), model)
    assert type(optimizer).__name__ == "AdamW8bit"
    total = state_bytes(optimizer, list(model.parameters()))
    assert total == held(optimizer)
    assert total < state_bytes(torch.optim.AdamW(model.parameters()), list(model.parameters()))


@pytest.mark.parametrize("word", ["adam-8bit", "adamw-8bit"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch, word):
    for module in ("torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    message = (
        f"optimizer={word} needs torchao (pip install 'pytest-gpumem[torchao]') or bitsandbytes, "
        "and neither is installed"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        optimizer_named(word)


def test_an_offloaded_optimizer_without_torchao_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    message = "offload=optimizer needs torchao (pip install 'pytest-gpumem[torchao]'), which is not installed"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        adapted_factory(torch.optim.AdamW, StepConfig.parse("fp32,offload=optimizer"))


def test_bitsandbytes_stands_in_where_torchao_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", torch)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", torch.optim)
    assert eight_bit_module("adam-8bit") == ("bitsandbytes.optim", "Adam8bit")
