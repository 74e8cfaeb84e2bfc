"""An inference step: a forward pass, or a prompt and the token after it; key/value caches and int8 weights."""

from __future__ import annotations

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.global_settings import caching
from pytest_gpumem.measuring.steps.inference import infer_phases, quantized

CPU = torch.device("cpu")


def phases_of(model, batch, config="plain"):
    return infer_phases(model, model, batch, StepConfig.parse(config), CPU)


@pytest.fixture(scope="module")
def gpt2() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def prompt(**more) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(24).view(2, 12), **more}


# A forward pass


def test_an_inference_step_is_one_forward_pass_without_gradients():
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, x):
            seen.append((torch.is_inference_mode_enabled(), x.shape))

    (forward,) = phases_of(Watching(), {"x": torch.ones(3, 4)})
    assert forward.name == "forward"
    assert forward.run() is None
    assert seen == [(True, (3, 4))]
    assert not torch.is_inference_mode_enabled()


def test_a_forward_pass_is_in_the_precision_of_the_config():
    seen = []
    linear = torch.nn.Linear(2, 2)
    linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    for config in ("fp32", "amp-bf16", "amp-fp16"):
        phases_of(linear, torch.ones(1, 2), config)[0].run()
    assert seen == [torch.float32, torch.bfloat16, torch.float16]


# A prompt and the token after it


@pytest.mark.parametrize(
    "batch",
    [
        prompt(),
        prompt(attention_mask=torch.tensor([[0] * 3 + [1] * 9, [1] * 12])),
        prompt(position_ids=torch.arange(3, 15).expand(2, 12)),
        torch.arange(24).view(2, 12),
    ],
    ids=["ids", "padding", "positions", "tensor"],
)
def test_a_token_after_its_cached_prompt_has_the_logits_that_it_has_within_the_whole(gpt2, batch):
    with torch.inference_mode():
        whole = (gpt2(**batch) if isinstance(batch, dict) else gpt2(batch)).logits
    outputs = []
    handle = gpt2.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.logits))
    try:
        prefill, decode = phases_of(gpt2, batch, "cache=on")
        for phase in (prefill, decode):
            assert phase.run() is None
    finally:
        handle.remove()
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert [logits.shape[1] for logits in outputs] == [11, 1]
    torch.testing.assert_close(outputs[1], whole[:, -1:])


def test_a_step_with_a_cache_can_be_repeated_and_keeps_no_cache(gpt2):
    phases = phases_of(gpt2, prompt(), "cache=on")
    outputs = []
    handle = gpt2.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.logits))
    try:
        for _ in range(2):
            for phase in phases:
                phase.run()
    finally:
        handle.remove()
    assert torch.equal(outputs[1], outputs[3])


def test_without_a_cache_a_step_is_one_forward_pass(gpt2):
    assert [phase.name for phase in phases_of(gpt2, prompt(), "cache=off")] == ["forward"]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.ones(2, 1, dtype=torch.int64)}, "int64[2, 1]"),
        ({"input_ids": torch.ones(4, dtype=torch.int64)}, "int64[4]"),
        ({"labels": torch.ones(2, 4)}, "float32[2, 4]"),
    ],
)
def test_a_batch_without_a_token_after_a_prompt_is_told(gpt2, batch, said):
    message = f"cache=on needs sequences with two or more tokens, but the batch is {said}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        phases_of(gpt2, batch, "cache=on")


def test_a_model_that_gives_no_cache_is_told():
    class Forgetful(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            return SimpleNamespace(logits=input_ids)

    prefill, _ = phases_of(Forgetful(), prompt(), "cache=on")
    with pytest.raises(
        ConfigError, match=r"^cache=on: the model's output has no past_key_values, which should contain"
    ):
        prefill.run()


# The model's own switch


class WithConfig(torch.nn.Module):
    """A model whose parts share a config, or have one of their own."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.part = torch.nn.Module()
        self.part.config = SimpleNamespace(use_cache=False)
        self.same = torch.nn.Module()
        self.same.config = self.config
        self.other = torch.nn.Module()
        self.other.config = SimpleNamespace(use_cache=None)

    def switches(self) -> list[object]:
        return [self.config.use_cache, self.part.config.use_cache, self.other.config.use_cache]


@pytest.mark.parametrize(("cache", "within"), [(True, [True, True]), (False, [False, False]), (None, [True, False])])
def test_the_switch_of_every_part_is_set_and_comes_back(cache, within):
    model = WithConfig()
    with caching(model, cache, required=False):
        assert model.switches() == [*within, None]
    assert model.switches() == [True, False, None]


def test_the_switch_comes_back_after_an_error():
    model = WithConfig()
    with pytest.raises(ZeroDivisionError), caching(model, cache=False, required=True):
        raise ZeroDivisionError
    assert model.switches() == [True, False, None]


def test_a_config_that_is_frozen_or_computed_is_no_error():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        use_cache: bool = True

    class Part(torch.nn.Module):
        @property
        def config(self):
            raise RuntimeError("not configured yet")

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Part())
    model[0].config = Frozen()
    with caching(model, cache=False, required=True):
        assert model[0].config.use_cache is False
    assert model[0].config.use_cache is True


# Weights of 8 bits

INT8 = StepConfig(weights="int8")


@pytest.mark.filterwarnings("ignore")  # importing torchao warns
def test_linear_layers_get_weights_of_a_byte_and_nearly_the_same_output():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 64), torch.nn.Linear(64, 128, bias=False))
    batch = torch.arange(10)
    with torch.inference_mode():
        before = model(batch)
    assert quantized(model, INT8) is model
    # A byte for each weight, and for each row its scale and zero point.
    weights, *of_rows = tensors_of(model[1].weight)
    assert weights.nbytes == 64 * 128
    assert [tensor.numel() for tensor in of_rows] in ([128], [128, 128])
    assert model[0].weight.dtype == torch.float32
    with torch.inference_mode():
        after = model(batch)
    assert 0 < float((after - before).norm() / before.norm()) < 0.02


def tensors_of(tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor of a class of its own is made of, in torchao 0.12 by way of another one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in tensors_of(getattr(tensor, name))]


def test_without_a_word_for_the_weights_a_model_stays_as_it_is():
    model = torch.nn.Linear(1, 1)
    assert quantized(model, StepConfig()) is model
    assert type(model.weight) is torch.nn.Parameter


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_linear_layer_is_told():
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match=r"^weights=int8: Conv2d has no torch\.nn\.Linear to quantise$"):
        quantized(torch.nn.Conv2d(1, 1, 1), INT8)


def test_without_torchao_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    message = "weights=int8 needs torchao: pip install 'pytest-gpumem[torchao]'"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        quantized(torch.nn.Linear(1, 1), INT8)
