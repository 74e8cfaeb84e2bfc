"""The bytes that a training step keeps or makes for each parameter: by formula, and as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.steps.precision import precision_named
from pytest_gpumem.steps.sharded_optimizer import local_optimizer
from pytest_gpumem.steps.surroundings import is_uninitialised
from pytest_gpumem.torch_support.reachability import blocks_of, is_host, is_on, reachable_tensors
from pytest_gpumem.torch_support.static_access import gradient_of, is_a, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from pytest_gpumem.measure.settling import StepFigures
    from pytest_gpumem.steps.train_step import PreparedTrainStep


COUNT = 4
"""Bytes of the float32 that counts an optimizer's steps, one for each parameter."""
LEAST_IN_8_BITS = 4096
"""Smaller tensors keep full-precision state, in torchao as in bitsandbytes."""
BLOCK_IN_8_BITS = 256
"""Values that share a scale (torchao's ``block_size``)."""


@dataclass(frozen=True, slots=True)
class Share:
    """The bytes of one state."""

    formula: int | None
    """Bytes by formula; ``None`` if there is no formula."""
    measured: int
    """Bytes as measured."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The states of a training step, in bytes."""

    parameters: Share
    """Parameters."""
    gradients: Share
    """Gradients, which live from backward to ``zero_grad``."""
    optimizer_state: Share
    """State of the optimizer."""
    master_weights: Share
    """Full-precision copies of half-precision parameters in an optimizer. torch's optimizers keep none."""
    buffers: int
    """Buffers of the model."""
    batch: int
    """The batch."""
    other: int
    """Memory that something else holds at rest."""
    activations: int
    """Memory that forward adds at its peak: saved tensors and temporaries."""
    peak: int
    """The peak of the step."""
    gradient_buckets: Share = Share(0, 0)
    """Copies of gradients that ``DistributedDataParallel`` keeps to send them."""


def state_of(prepared: PreparedTrainStep, figures: StepFigures) -> StateBytes:
    """Run one more step and return what model, optimizer and batch hold when all gradients are there."""
    training = prepared.training
    model = training.model
    optimizer = None if training.optimizer is None else local_optimizer(training.optimizer)
    device = prepared.context.device.torch_device
    parameters = [parameter for parameter in model.parameters() if not is_uninitialised(parameter)]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    bytes_of: dict[str, int] = {}

    def held(roots: Iterable[object], but: dict[int, int]) -> dict[int, int]:
        blocks = blocks_of(reachable_tensors(roots), device)
        return {address: size for address, size in blocks.items() if address not in but}

    def look() -> None:
        weights = blocks_of((part for parameter in parameters for part in parts_of(parameter)), device)
        gradients = _gradient_blocks(parameters, device)
        # What says how a parameter is sharded is on the host.
        meshes = blocks_of(
            reachable_tensors(getattr(parameter, "device_mesh", None) for parameter in parameters), device
        )
        known = {**weights, **gradients, **meshes}
        masters: dict[int, int] = {}
        state: dict[int, int] = {}
        if optimizer is not None:
            state = held([optimizer.state, [_without_parameters(group) for group in optimizer.param_groups]], known)
            masters = held(_masters(optimizer, trained), known)
            state = {address: size for address, size in state.items() if address not in masters}
        known |= state | masters
        buffers = held(model.buffers(), known)
        known |= buffers
        batch = held([training.batch], known)
        buckets = held((training.buckets or {}).values(), known | batch)
        kinds = {
            "parameters": weights,
            "gradients": gradients,
            "optimizer_state": state,
            "master_weights": masters,
            "buffers": buffers,
            "batch": batch,
            "buckets": buckets,
            "meshes": meshes,
        }
        bytes_of.update({name: sum(blocks.values()) for name, blocks in kinds.items()})

    training.before_optimizer = look
    run_phases(training.phases())
    training.before_optimizer = None
    # Those that zero_grad only fills with zeros, and those of parameters that the optimizer does not hold.
    kept = sum(_gradient_blocks(parameters, device).values())
    at_rest = sum(bytes_of.values()) - bytes_of["gradients"] + kept
    metrics = figures.memory.memory_metrics()
    # From the second micro-batch on, forward runs beside the gradients of those before.
    beside = bytes_of["gradients"] - kept if training.config.accumulate > 1 else 0
    word = training.config.precision
    other = figures.memory.own - figures.memory.workspaces_before - at_rest
    buckets = 0
    if training.buckets is not None:
        buckets = _bytes_in(trained, word, device)
        if not bytes_of["buckets"]:
            # DDP shows them to nobody where other ranks are there: bytes at rest without another owner.
            bytes_of["buckets"] = max(0, min(buckets, other))
            other -= bytes_of["buckets"]
    has_state = "params" not in training.config.offloaded
    state_formula = state_bytes(optimizer, trained) if optimizer is not None and has_state else 0
    # Where forward and backward alternate, their peak is one.
    forward = metrics.get("peak_forward", metrics["peak_backward"])
    return StateBytes(
        parameters=Share(_bytes_in(parameters, word, device), bytes_of["parameters"]),
        gradients=Share(_bytes_in(trained, word, device), bytes_of["gradients"]),
        optimizer_state=Share(state_formula, bytes_of["optimizer_state"]),
        master_weights=Share(0, bytes_of["master_weights"]),
        buffers=bytes_of["buffers"],
        batch=bytes_of["batch"],
        gradient_buckets=Share(buckets, bytes_of["buckets"]),
        other=other,
        activations=max(0, forward - figures.memory.own - beside),
        peak=metrics["peak_allocated"],
    )


def _bytes_in(parameters: list[torch.nn.Parameter], word: str | None, device: torch.device) -> int:
    """Return elements on the device times the bytes of an element in the precision, by default in the parameter's dtype."""
    import torch

    precision = precision_named(word)
    wanted = None if precision is None else getattr(torch, precision.weights).itemsize
    return sum(
        shard_elements(parameter, padded=True)
        * (wanted if wanted and parameter.is_floating_point() else parameter.element_size())
        for parameter in parameters
        if is_on(parameter.device, device)
    )


def shard_elements(parameter: torch.Tensor, *, padded: bool = False) -> int:
    """Return the number of a parameter's elements that this rank holds, all where it is not sharded.

    Along a sharded dimension of n each of N ranks has ceil(n / N), the last ones less or nothing (``torch.chunk``).

    Args:
        parameter: A tensor, or a DTensor.
        padded: Whether every rank counts as many as the first: ``fully_shard`` keeps parameters and gradients so, as its
            collectives want equal parts, and optimizer state as it is.
    """
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is None or placements is None:
        return parameter.numel()
    sizes = list(parameter.shape)
    # The parts of tensors are split first, and fully_shard splits what is left: the mesh has them last.
    for number in reversed(range(len(placements))):
        dim = getattr(placements[number], "dim", None)
        if dim is not None:
            part = math.ceil(sizes[dim] / mesh.size(number))
            here = sizes[dim] - part * mesh.get_local_rank(number)
            sizes[dim] = part if padded else max(0, min(part, here))
    return math.prod(sizes)


def _gradient_blocks(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> dict[int, int]:
    gradients = (gradient_of(parameter) for parameter in parameters)
    return blocks_of((part for gradient in gradients if gradient is not None for part in parts_of(gradient)), device)


def _without_parameters(group: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}


def _masters(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the float32 tensors in the optimizer's state that it calls masters of half-precision parameters."""
    import torch

    return [
        value
        for parameter in trained
        if parameter.element_size() < 4
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_a(name, str) and "master" in name and is_a(value, torch.Tensor)
    ]


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """Return the bytes of an optimizer's state for ``parameters``, by formula; ``None`` for an optimizer without one.

    Adam and AdamW (Kingma and Ba 2014): two averages in the parameter's dtype, three with ``amsgrad``, and a count. SGD: one
    with momentum. Adafactor (Shazeer and Stern 2018): a row and a column for each matrix. torchao's 8-bit Adam (Dettmers
    2021): two averages of a byte a value, a float32 scale for each block of 256, and a table of 256 float32. A count on
    the host, where torch leaves it unless fused or capturable, is not counted for a model on another device.
    """
    total = 0
    known = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        group = known.get(id(parameter))
        if group is None:
            continue
        one = _state_of(type(optimizer).__name__, type(optimizer).__module__, parameter, group)
        if one is None:
            return None
        total += one
    return total


def _state_of(name: str, module: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> int | None:
    elements = shard_elements(parameter)
    nbytes = elements * parameter.element_size()
    counted = group.get("fused") or group.get("capturable") or is_host(parameter.device)
    count = COUNT if counted else 0
    by_torch = module.startswith("torch.optim")
    if by_torch and name == "SGD":
        return nbytes if group["momentum"] else 0
    if by_torch and name in ("Adam", "AdamW"):
        return (3 if group["amsgrad"] else 2) * nbytes + count
    if by_torch and name == "Adafactor":
        shape = parameter.shape
        values = elements * (1 / shape[-1] + 1 / shape[-2]) if len(shape) > 1 else elements
        return round(values) * parameter.element_size() + count
    if module.startswith("torchao") and name in ("Adam8bit", "AdamW8bit"):
        if elements < LEAST_IN_8_BITS or elements % BLOCK_IN_8_BITS:
            return 2 * nbytes + count
        scales = math.ceil(elements / BLOCK_IN_8_BITS) * 4
        return 2 * (elements + scales + 256 * 4) + count
    return None
