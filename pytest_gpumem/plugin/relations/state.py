"""Measure how many bytes a training step has in parameters, gradients and optimizer state, and compute them by formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.steps.global_settings import is_uninitialised
from pytest_gpumem.measuring.steps.precision import precision_named
from pytest_gpumem.measuring.steps.sharded_optimizer import local_optimizer
from pytest_gpumem.torch_support.reachability import blocks_of, is_host, is_on, reachable_tensors
from pytest_gpumem.torch_support.static_access import gradient_of, is_a, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from pytest_gpumem.measuring.measure.settling import StepFigures
    from pytest_gpumem.measuring.steps.train_step import PreparedTrainStep


COUNT = 4
"""The bytes in the step count (a float32) that an optimizer keeps for each parameter."""
LEAST_IN_8_BITS = 4096
"""For a parameter with fewer elements, 8-bit optimizers (torchao, bitsandbytes) keep their state in full precision."""
BLOCK_IN_8_BITS = 256
"""The number of consecutive 8-bit values that share a scale (torchao's ``block_size``)."""


@dataclass(frozen=True, slots=True)
class Share:
    """The bytes in one kind of state, for example in the gradients."""

    formula: int | None
    """The bytes by formula; ``None`` if there is no formula for the optimizer."""
    measured: int
    """The measured bytes."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """A training step's parameters, gradients and other state in bytes."""

    parameters: Share
    """The parameters."""
    gradients: Share
    """The gradients, which exist from backward until ``zero_grad``."""
    optimizer_state: Share
    """The optimizer's state without master weights."""
    master_weights: Share
    """An optimizer's full-precision copies of half-precision parameters. torch's optimizers do not make such copies."""
    buffers: int
    """The model's buffers."""
    batch: int
    """The batch."""
    other: int
    """Memory without a known owner between two steps."""
    activations: int
    """Saved and temporary tensors at forward's peak."""
    peak: int
    """The whole step's peak."""
    gradient_buckets: Share = Share(0, 0)
    """Gradient copies in ``DistributedDataParallel``, which sends them to other ranks."""


def state_of(prepared: PreparedTrainStep, figures: StepFigures) -> StateBytes:
    """Run another step, and return its parameters, gradients and other state in bytes.

    The bytes are read just before the optimizer's step, when all gradients exist.

    Args:
        prepared: The measured step.
        figures: The measured step's figures.
    """
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

    def read_bytes() -> None:
        weights = blocks_of((part for parameter in parameters for part in parts_of(parameter)), device)
        gradients = _gradient_blocks(parameters, device)
        # A device mesh, which describes how parameters are sharded, has tensors of its own on the host. Count them separately.
        meshes = blocks_of(
            reachable_tensors(getattr(parameter, "device_mesh", None) for parameter in parameters), device
        )
        blocks_so_far = {**weights, **gradients, **meshes}
        master_weights: dict[int, int] = {}
        state: dict[int, int] = {}
        if optimizer is not None:
            state = held(
                [optimizer.state, [_without_parameters(group) for group in optimizer.param_groups]], blocks_so_far
            )
            master_weights = held(_masters(optimizer, trained), blocks_so_far)
            state = {address: size for address, size in state.items() if address not in master_weights}
        blocks_so_far |= state | master_weights
        buffers = held(model.buffers(), blocks_so_far)
        blocks_so_far |= buffers
        batch = held([training.batch], blocks_so_far)
        buckets = held((training.buckets or {}).values(), blocks_so_far | batch)
        kinds = {
            "parameters": weights,
            "gradients": gradients,
            "optimizer_state": state,
            "master_weights": master_weights,
            "buffers": buffers,
            "batch": batch,
            "buckets": buckets,
            "meshes": meshes,
        }
        bytes_of.update({name: sum(blocks.values()) for name, blocks in kinds.items()})

    training.before_optimizer = read_bytes
    run_phases(training.phases())
    training.before_optimizer = None
    # Gradients exist after the step as well, if zero_grad fills them with zeros or if the optimizer lacks their parameters.
    remaining = sum(_gradient_blocks(parameters, device).values())
    at_rest = sum(bytes_of.values()) - bytes_of["gradients"] + remaining
    metrics = figures.memory.memory_metrics()
    # From the second micro-batch on, gradients from earlier micro-batches exist during forward.
    during_forward = bytes_of["gradients"] - remaining if training.config.accumulate > 1 else 0
    word = training.config.precision
    other = figures.memory.own - figures.memory.workspaces_before - at_rest
    buckets = 0
    if training.buckets is not None:
        buckets = _bytes_in(trained, word, device)
        if not bytes_of["buckets"]:
            # With several ranks, DDP does not expose its buckets. So count their bytes from the formula, and subtract them from
            # the memory without a known owner.
            bytes_of["buckets"] = max(0, min(buckets, other))
            other -= bytes_of["buckets"]
    has_state = "params" not in training.config.offloaded
    state_formula = state_bytes(optimizer, trained) if optimizer is not None and has_state else 0
    # In a pipeline stage, forward and backward alternate, so only their common peak is known.
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
        activations=max(0, forward - figures.memory.own - during_forward),
        peak=metrics["peak_allocated"],
    )


def _bytes_in(parameters: list[torch.nn.Parameter], word: str | None, device: torch.device) -> int:
    """Return parameters' bytes by formula: elements on the device x bytes per element.

    An element has the precision's dtype. If ``word`` is ``None``, it has the parameter's own dtype.
    """
    import torch

    precision = precision_named(word)
    itemsize = None if precision is None else getattr(torch, precision.weights).itemsize
    return sum(
        shard_elements(parameter, padded=True)
        * (itemsize if itemsize and parameter.is_floating_point() else parameter.element_size())
        for parameter in parameters
        if is_on(parameter.device, device)
    )


def shard_elements(parameter: torch.Tensor, *, padded: bool = False) -> int:
    """Count a parameter's elements on this rank, or all elements if the parameter is not sharded.

    A dimension with n rows is split over N ranks as by ``torch.chunk``: each rank gets ceil(n / N) rows, but the last ranks get
    fewer or none. For example, 10 rows on 4 ranks are split into 3, 3, 3 and 1.

    Args:
        parameter: A tensor, or a DTensor.
        padded: True to assume that every rank has as many rows as the first rank. ``fully_shard`` pads parameters and gradients
            to this number, because its collectives need equal parts. It does not pad the optimizer's state.
    """
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is None or placements is None:
        return parameter.numel()
    sizes = list(parameter.shape)
    # Go through the mesh in reverse, because its last dimension (tensor parallelism) is split first. fully_shard then splits
    # the parts.
    for number in reversed(range(len(placements))):
        dim = getattr(placements[number], "dim", None)
        if dim is not None:
            part = math.ceil(sizes[dim] / mesh.size(number))
            rows = sizes[dim] - part * mesh.get_local_rank(number)
            sizes[dim] = part if padded else max(0, min(part, rows))
    return math.prod(sizes)


def _gradient_blocks(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> dict[int, int]:
    gradients = (gradient_of(parameter) for parameter in parameters)
    return blocks_of((part for gradient in gradients if gradient is not None for part in parts_of(gradient)), device)


def _without_parameters(group: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}


def _masters(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the tensors in the optimizer's state for half-precision parameters whose name contains "master"."""
    import torch

    return [
        value
        for parameter in trained
        if parameter.element_size() < 4
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_a(name, str) and "master" in name and is_a(value, torch.Tensor)
    ]


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """Return an optimizer state's bytes by formula; ``None`` if there is no formula for the optimizer.

    - Adam and AdamW (Kingma and Ba 2014) keep two averages in the parameter's dtype (three with ``amsgrad``) and a step count.
    - SGD keeps a momentum buffer, if momentum is used.
    - Adafactor (Shazeer and Stern 2018) keeps a row and a column for each matrix.
    - torchao's 8-bit Adam (Dettmers 2021) keeps two averages. Each has a byte for each value, a float32 scale for 256 values,
      and a table with 256 float32 numbers.

    If the optimizer is neither fused nor capturable, torch keeps the step count on the host. The step count then counts only
    for a model on the host.

    Example: fused AdamW keeps 2 x 4 x 1,000,000 + 4 = 8,000,004 bytes for a parameter with a million float32.
    """
    total = 0
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        group = groups.get(id(parameter))
        if group is None:
            continue
        nbytes = _state_of(type(optimizer).__name__, type(optimizer).__module__, parameter, group)
        if nbytes is None:
            return None
        total += nbytes
    return total


def _state_of(name: str, module: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> int | None:
    """Return the state's bytes for a single parameter; ``None`` if there is no formula for the optimizer."""
    elements = shard_elements(parameter)
    nbytes = elements * parameter.element_size()
    is_counted = group.get("fused") or group.get("capturable") or is_host(parameter.device)
    count = COUNT if is_counted else 0
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
