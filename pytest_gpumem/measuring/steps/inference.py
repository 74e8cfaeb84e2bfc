"""An inference step: a forward pass, a prompt and the next token with a key/value cache, or generation.

This module also converts weights to int8.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.measure.prepared import PreparedStep
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.batches import call_model, describe, on_device, work_in
from pytest_gpumem.measuring.steps.compiling import compile_now, compiled_model
from pytest_gpumem.measuring.steps.dry_run import dry_run_inference
from pytest_gpumem.measuring.steps.generation import (
    generation_phases,
    generation_work,
    number_of_tokens,
    only_for_generation,
    with_new_tokens,
)
from pytest_gpumem.measuring.steps.global_settings import can_run, global_settings, initialise
from pytest_gpumem.measuring.steps.model_source import check_existing_model, creates_tensors
from pytest_gpumem.measuring.steps.model_step import import_quietly, precision_of, workload_of
from pytest_gpumem.measuring.steps.precision import autocasting, batch_in_precision
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.steps.model_source import ModelSource


CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names for the cache argument of a transformers model: ``cache`` since transformers 5.24, ``past_key_values`` before."""


def infer_phases(
    model: torch.nn.Module, run: Callable[..., Any], batch: Any, config: StepConfig, device: torch.device
) -> list[Phase]:
    """Return the phases of an inference step under ``torch.inference_mode``.

    Without a cache, a single phase runs forward. The output is freed when the phase ends. With ``cache=on``, the phase
    ``prefill`` runs all tokens except the last and keeps their keys and values. The phase ``decode`` runs the last token with
    these keys and values.

    Args:
        model: The model.
        run: The model or its compiled form.
        batch: The batch.
        config: The step config.
        device: The model's device.

    Raises:
        ConfigError: The model or batch cannot use a cache.

    Example:
        With ``cache=on`` and a batch ``int64[4, 256]``, ``prefill`` runs 255 tokens and ``decode`` runs 1 token.
    """
    import torch

    if config.cache != "on":

        def forward() -> None:
            with torch.inference_mode(), autocasting(config.precision, device):
                call_model(run, batch)

        return [Phase("forward", forward)]

    name = _cache_argument(model)
    prompt, last = _prompt_and_last(model, batch)
    caches: list[Any] = []

    def prefill() -> None:
        with torch.inference_mode(), autocasting(config.precision, device):
            caches.append(_cache_of(call_model(run, prompt), name))

    def decode() -> None:
        with torch.inference_mode(), autocasting(config.precision, device):
            run(**last, **{name: caches.pop()})

    return [Phase("prefill", prefill), Phase("decode", decode)]


def _prompt_and_last(model: torch.nn.Module, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's arguments for two calls: the batch without its last token, and the last token alone.

    The second call gets the attention mask for all tokens.
    """
    import torch

    parameters = inspect.signature(model.forward).parameters
    if attribute(attribute(model, "config"), "is_encoder_decoder") is True:
        raise ConfigError(
            f"cache=on needs a model without an encoder, but {type(model).__name__} has an encoder and a decoder; measure its "
            "generate() with gpumem.infer_step(model, batch, new_tokens=N)"
        )
    inputs = dict(batch) if issubclass(type(batch), Mapping) else {next(iter(parameters)): batch}
    names = ("input_ids", "inputs_embeds", next(iter(parameters)))
    tokens = next((inputs[name] for name in names if name in inputs), None)
    if not is_a(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] < 2:
        raise ConfigError(f"cache=on needs sequences with two or more tokens, but the batch is {describe(batch)}")
    samples_and_length = tokens.shape[:2]

    def cut(value: Any, part: slice) -> Any:
        is_sequence = is_a(value, torch.Tensor) and value.shape[:2] == samples_and_length
        return value[:, part] if is_sequence else value

    prompt = {name: cut(value, slice(None, -1)) for name, value in inputs.items()}
    last = {name: value if name == "attention_mask" else cut(value, slice(-1, None)) for name, value in inputs.items()}
    return {**prompt, "use_cache": True}, {**last, "use_cache": True}


def _cache_argument(model: torch.nn.Module) -> str:
    """Return the name under which the model takes and returns its cache. Raises `ConfigError` if the model takes no cache."""
    parameters = inspect.signature(model.forward).parameters
    name = next((argument for argument in CACHE_ARGUMENTS if argument in parameters), None)
    if name is None or "use_cache" not in parameters:
        raise ConfigError(
            f"cache=on needs a model whose forward takes use_cache, and {' or '.join(CACHE_ARGUMENTS)}; "
            f"{type(model).__name__}.forward does not take these arguments"
        )
    return name


def _cache_of(output: Any, name: str) -> Any:
    cache = getattr(output, name, None)
    if cache is None:
        raise ConfigError(f"cache=on: the model's output has no {name}, which should contain the keys and values")
    return cache


def quantized(model: torch.nn.Module, config: StepConfig) -> torch.nn.Module:
    """Convert the weights of linear layers to int8 with torchao if the config has ``weights=int8``.

    Activations are not converted.

    Args:
        model: The model. It is changed.
        config: The step config.

    Raises:
        ConfigError: torchao is not installed, or the model has no linear layer.
    """
    import torch

    if config.weights is None:
        return model
    try:
        torchao = import_quietly("torchao.quantization")
    except ImportError:
        raise ConfigError("weights=int8 needs torchao: pip install 'pytest-gpumem[torchao]'") from None
    if not any(is_a(module, torch.nn.Linear) for module in model.modules()):
        raise ConfigError(f"weights=int8: {type(model).__name__} has no torch.nn.Linear to quantise")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


@contextmanager
def prepared_infer_step(
    context: MeasuringContext,
    source: ModelSource,
    batch: Any,
    *,
    config: StepConfig | None = None,
    items: float | str | None = None,
    new_tokens: int | None = None,
) -> Iterator[PreparedStep]:
    """Prepare an inference step: a forward pass, a prompt and the next token with ``cache=on``, or generation.

    Args:
        context: The context in which the step is measured.
        source: The model's source, from `model_source`.
        batch: The batch, or a function that returns it.
        config: The step config.
        items: As in `work_in`.
        new_tokens: The number of tokens to generate; ``None`` for a step without generation.

    Raises:
        Exception: The same exceptions as in `prepared_train_step`.
    """
    config = config or StepConfig()
    config.only_for("infer_step")
    if new_tokens is not None:
        new_tokens = number_of_tokens(new_tokens)
        only_for_generation(config)
    if source.existing is not None:
        check_existing_model(config)
    device = context.device.torch_device
    emulated = can_run(context.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    with ExitStack() as stack:
        stack.enter_context(restored_random_numbers(context.device))
        other_bytes = context.bytes_of_other_code((source.existing, batch))
        with context.creation_sites(creates=creates_tensors(source)) as creation_sites:
            model = source.model_on(device, config.precision)
            initialise(model, batch, config, context.device, training=False)
            precision = precision_of(model)
            model = quantized(model, config)
        stack.enter_context(global_settings(model, config, context.device, training=False))

        def phases_of(run: Callable[..., Any], tokens: int | None) -> list[Phase]:
            if tokens is not None:
                return generation_phases(model, batch, tokens, config, device)
            return infer_phases(model, run, batch, config, device)

        # All tokens after the second run the same operators, so a dry run with 2 tokens is enough.
        few_tokens = None if new_tokens is None else min(new_tokens, 2)
        notes = dry_run_inference(phases_of(model, few_tokens), config, context.device)
        compiles = config.compile != "none"
        run = stack.enter_context(compiled_model(model, config.compile)) if compiles else model
        phases = phases_of(run, new_tokens)
        workload = workload_of("infer_step", model, batch, config, precision)
        if compiles:
            compile_now(phases, config.compile)
        yield PreparedStep(
            context=context,
            workload=workload if new_tokens is None else with_new_tokens(workload, new_tokens),
            work=work_in(batch, items) if new_tokens is None else generation_work(batch, items, new_tokens),
            phases=phases,
            other_bytes=other_bytes,
            held=(model, batch),
            model=model,
            batch=batch,
            is_compiled=compiles,
            state=compiled_graphs if compiles else None,
            notes=(*emulated, *notes),
            creation_sites=creation_sites,
        )
