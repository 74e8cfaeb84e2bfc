"""Precision: which weights, batch, autocast, scaler and matrix products a word of ``precision=`` means."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError, MeasuringError
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.cuda import CudaDevice
from pytest_gpumem.measuring.step_config.config import PRECISIONS
from pytest_gpumem.measuring.steps.precision import (
    autocasting,
    batch_in_precision,
    check_precision,
    float32_precision,
    in_precision,
    precision_named,
    scaler_of,
)
from tests.silent_cuda import SilentCuda

CPU = torch.device("cpu")
GPU = CudaDevice(SilentCuda())
FLOAT32 = ["tf32", "amp-fp16"]
HALF = [("bf16", torch.bfloat16), ("fp16", torch.float16)]


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Linear(2, 2, dtype=dtype)


def test_every_word_is_a_precision_and_no_word_is_the_models_own():
    assert [word for word in PRECISIONS if precision_named(word) is None] == []
    assert precision_named(None) is None


# Weights


@pytest.mark.parametrize(("word", "dtype"), [*((word, torch.float32) for word in FLOAT32), *HALF])
def test_a_model_that_was_built_here_gets_the_weights_of_the_precision(word, dtype):
    for built in (torch.float32, torch.float64, torch.bfloat16):
        model = in_precision(linear(built), word)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_buffers_of_integers_stay_integers():
    model = in_precision(torch.nn.BatchNorm1d(2), "bf16")
    assert model.running_mean.dtype == torch.bfloat16
    assert model.num_batches_tracked.dtype == torch.int64


def test_without_a_precision_a_model_stays_unchanged():
    model = linear(torch.float64)
    check_precision(model, None)
    assert in_precision(model, None) is model
    assert model.weight.dtype == torch.float64


def test_an_existing_model_in_the_right_dtype_is_accepted():
    check_precision(linear(torch.bfloat16), "bf16")


def test_an_existing_model_in_another_dtype_is_refused_and_not_converted():
    model = torch.nn.Sequential(linear(), linear(torch.float16), linear(torch.bfloat16))
    message = (
        "bf16 needs bfloat16 parameters, but the model has float16, float32; "
        "pass a function that builds the model, or convert the model with model.to(torch.bfloat16)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_precision(model, "bf16")
    assert model[0].weight.dtype == torch.float32


# Batches


@pytest.mark.parametrize(("word", "dtype"), HALF)
def test_half_precision_weights_get_floats_of_their_dtype_and_integers_as_they_are(word, dtype):
    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "text": "abc"}
    converted = batch_in_precision(batch, word)
    assert (converted["x"].dtype, converted["ids"].dtype, converted["text"]) == (dtype, torch.int64, "abc")
    assert batch["x"].dtype == torch.float32


@pytest.mark.parametrize("word", [None, *FLOAT32])
def test_other_precisions_take_the_batch_as_it_comes(word):
    batch = {"x": torch.ones(2, dtype=torch.float64)}
    assert batch_in_precision(batch, word) is batch


def test_a_batch_of_integers_is_the_same_object():
    batch = [torch.ones(2, dtype=torch.int64)]
    assert batch_in_precision(batch, "bf16") is batch


# Autocast


@pytest.mark.parametrize(("word", "dtype"), [("amp-fp16", torch.float16), ("amp-bf16", torch.bfloat16)])
def test_within_autocast_a_matrix_product_is_in_its_dtype(word, dtype):
    model, batch = linear(), torch.ones(2, 2)
    with autocasting(word, CPU):
        assert model(batch).dtype == dtype
    assert model(batch).dtype == torch.float32


@pytest.mark.parametrize("word", [None, "tf32", "bf16"])
def test_other_precisions_do_not_autocast(word):
    with autocasting(word, CPU):
        assert not torch.is_autocast_enabled("cpu")


def test_an_autocast_that_does_not_come_on_is_told(monkeypatch):
    monkeypatch.setattr("torch.is_autocast_enabled", lambda _device_type: False)
    message = "torch did not enable autocast to bfloat16 on cpu; use another precision"
    with pytest.raises(MeasuringError, match=f"^{re.escape(message)}$"), autocasting("amp-bf16", CPU):
        pass


def test_an_autocast_to_another_dtype_is_told(monkeypatch):
    monkeypatch.setattr("torch.get_autocast_dtype", lambda _device_type: torch.bfloat16)
    with (
        pytest.raises(MeasuringError, match=r"^torch did not enable autocast to float16"),
        autocasting("amp-fp16", CPU),
    ):
        pass


# Matrix products and scalers


def settings():
    """How float32 products and convolutions of a GPU run."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return matmul.allow_tf32, cudnn.allow_tf32


@pytest.fixture
def outside(request):
    """How float32 matrix products run before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(getattr(request, "param", "high"))
    yield settings()
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("word", "within"), [("tf32", {"tf32", True}), ("bf16", {"ieee", False})])
@pytest.mark.parametrize("outside", ["highest", "high", "medium"], indirect=True)
def test_matmul_and_convolution_precision_is_set_and_restored_afterwards(word, within, outside):
    with float32_precision(word, GPU):
        assert set(settings()) <= within
    assert settings() == outside
    # The common setting can be asked for: torch refuses when those of the backends contradict one another.
    assert torch.get_float32_matmul_precision() in ("highest", "high", "medium")


@pytest.mark.parametrize("word", ["fp32", "tf32", "bf16"])
def test_a_model_can_ask_for_the_common_settings_meanwhile(outside, word):
    with float32_precision(word, GPU):
        # As around a CTC loss, which has no kernel of cuDNN's for every length.
        with torch.backends.cudnn.flags(enabled=False):
            pass
        assert torch.backends.cudnn.allow_tf32 == (word == "tf32")
        assert torch.backends.cuda.matmul.allow_tf32 == (word == "tf32")
    assert settings() == outside


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="one setting for all before 2.9")
def test_settings_that_differ_are_as_they_were_afterwards(outside):
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    cudnn.rnn.fp32_precision = "ieee"
    try:
        mixed = settings()
        with float32_precision("fp32", GPU):
            assert set(settings()) == {"ieee"}
        assert settings() == mixed
    finally:
        cudnn.allow_tf32 = before


def test_matrix_products_are_as_before_after_an_error(outside):
    with pytest.raises(ZeroDivisionError), float32_precision("tf32", GPU):
        raise ZeroDivisionError
    assert settings() == outside


@pytest.mark.parametrize(("word", "device"), [("fp32", CpuDevice()), (None, GPU)])
def test_without_a_precision_and_on_another_device_matrix_products_are_left_alone(outside, word, device):
    with float32_precision(word, device):
        assert settings() == outside


def test_complex_numbers_are_not_made_real():
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"^bf16: converting the model would drop the imaginary part of weight"):
        in_precision(model, "bf16")
    assert in_precision(model, "fp32") is model


def test_only_float32_weights_that_compute_in_float16_scale_gradients():
    scaled = [word for word in [None, *PRECISIONS] if scaler_of(word, CPU) is not None]
    assert scaled == ["amp-fp16", "mp-fp16"]
    assert scaler_of("amp-fp16", CPU).get_scale() == 65536
