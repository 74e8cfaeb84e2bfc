"""What comes of a config that fails, and of a factory that gives its model and batch in other ways."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from pytest_gpumem.base.errors import NotAStep
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise import trial
from pytest_gpumem.tools.advise.search_order import OUT_OF_MEMORY, START

LATER = StepConfig(precision="amp-bf16")
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.inner(x))


class Model(torch.nn.Module):
    """Its layers are not in a list of one type, so that nobody finds them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), torch.nn.Identity()])
        self.named = torch.nn.ModuleDict({"a": Layer(), "b": Layer()})

    def forward(self, x):
        for layer in [*self.layers, *self.named.values()]:
            x = layer(x)
        return x.sum()


def make():
    return Model(), torch.ones(4, 8)


def failing(error: Exception, seen: list | None = None):
    """A factory whose model raises ``error`` in forward, beside what it has computed."""

    class Failing(Model):
        def forward(self, x):
            x = x * 2
            if seen is not None:
                seen.append(weakref.ref(x))
            raise error

    return lambda: (Failing(), torch.ones(4, 8))


def tried(factory, config=START):
    device = CpuDevice()
    return trial.try_config(device, trial.subject_of(factory, device.torch_device), config)


def test_an_error_of_a_later_config_is_the_answer_to_it_in_one_line():
    why_not = tried(failing(RuntimeError("expected Float\nbut found BFloat16")), LATER).why_not
    assert why_not == "RuntimeError: expected Float"
    assert tried(failing(KeyError()), LATER).why_not == "KeyError"


def test_what_a_failed_config_held_is_let_go():
    seen: list[weakref.ref] = []
    error = RuntimeError("planted")
    tried(failing(error, seen), LATER)
    gc.collect()
    assert error.__traceback__ is not None
    assert [held() for held in seen] == [None] * len(seen) != []


@pytest.mark.parametrize(
    ("config", "how"), [("fp32", "by itself"), ("fp32,shard=ddp,world=2", "under fp32,shard=ddp,world=2")]
)
def test_an_error_of_the_first_config_is_the_models_own(config, how, capsys):
    with pytest.raises(trial.TrialFailed, match=f"^the model fails {how}: RuntimeError: planted$"):
        tried(failing(RuntimeError("planted\nand more")), StepConfig.parse(config))
    # A function is the author's, who wants to know the line.
    assert "in forward\n    raise error\nRuntimeError: planted\nand more\n" in capsys.readouterr().err


def test_an_error_of_a_model_by_name_is_one_sentence(capsys):
    device = CpuDevice()
    subject = trial.subject_of(failing(RuntimeError("planted\nand more")), device.torch_device)
    named = replace(subject, title="hf:x: Model, random weights; batch 1x8")
    with pytest.raises(trial.TrialFailed, match=r"^hf:x: Model fails by itself: RuntimeError: planted$"):
        trial.try_config(device, named, START)
    assert capsys.readouterr().err == ""


def test_what_makes_no_step_is_no_answer_in_any_config():
    with pytest.raises(NotAStep):
        tried(lambda: (torch.nn.Linear(8, 8), torch.ones(4, 8)), LATER)


@pytest.mark.parametrize(
    ("error", "config"),
    [(RuntimeError(NO_MEMORY), START), (torch.OutOfMemoryError("planted"), LATER)],
    ids=["cpu, at the start", "cuda, later"],
)
def test_a_cpu_runs_out_of_memory_as_a_gpu_does(error, config):
    assert tried(failing(error), config).why_not == OUT_OF_MEMORY


def test_a_device_that_fails_is_closed_all_the_same(monkeypatch):
    device = CpuDevice()
    subject = trial.subject_of(make, device.torch_device)
    with monkeypatch.context() as patched:
        patched.setattr(device, "quiesce", lambda: (_ for _ in ()).throw(RuntimeError("device-side assert")))
        assert trial.try_config(device, subject, LATER).why_not == "RuntimeError: device-side assert"
    assert trial.try_config(device, subject, LATER).peak


def test_what_the_allocator_reserves_has_to_fit(monkeypatch):
    figures = {"peak_allocated": 100, "peak_reserved": 150}
    monkeypatch.setattr(trial, "_metrics", lambda *_: figures)
    assert tried(make).peak == 150
    del figures["peak_reserved"]
    assert tried(make).peak == 100


def test_a_batch_that_is_a_function_is_made_once():
    calls = []

    def make_batch():
        calls.append(1)
        return torch.ones(4, 8)

    device = CpuDevice()
    subject = trial.subject_of(lambda: (Model(), make_batch), device.torch_device)
    assert subject.samples == 4
    accumulated = StepConfig(precision="fp32", accumulate=2)
    assert all(trial.try_config(device, subject, config).peak for config in (START, accumulated))
    assert calls == [1]


@pytest.mark.parametrize(
    ("pattern", "containers"),
    [
        ("layers", ("layers",)),
        ("layers.?", ("layers",)),
        ("layers.*.inner", (("layers.0.inner", "layers.1.inner"),)),
        ("named", (("named.a", "named.b"),)),
        (None, ()),
    ],
)
def test_named_blocks_are_reached_as_they_are_held(pattern, containers):
    assert trial.subject_of(make, torch.device("cpu"), pattern).containers == containers


def test_a_name_that_no_module_has_is_told_before_anything_is_measured():
    with pytest.raises(trial.SubjectError, match="no module of Model matches 'layer'; it has layers, "):
        trial.subject_of(make, torch.device("cpu"), "layer")


def test_where_no_blocks_are_found_the_option_that_names_them_is_told():
    assert "name them with --blocks PATTERN" in tried(make, StepConfig(precision="fp32", checkpoint="blocks")).why_not


def test_arguments_that_are_wanted_are_told():
    with pytest.raises(trial.SubjectError, match=r"must work without arguments: missing a required argument: 'size'$"):
        trial.subject_of(lambda size: size, torch.device("cpu"))
    with pytest.raises(trial.SubjectError, match=r"^the batch that .* returns must work without arguments: "):
        trial.subject_of(lambda: (Model(), lambda size: size), torch.device("cpu"))


def test_a_type_error_within_the_factory_is_its_own():
    def wrong():
        return make(1)

    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        trial.subject_of(wrong, torch.device("cpu"))
