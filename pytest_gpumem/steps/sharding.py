"""Sharding of a model over ranks: DDP, FSDP2, tensor and context parallelism, as torch has them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.step_config.blocks import repeated_blocks
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.batches import mapped
from pytest_gpumem.steps.built import Built
from pytest_gpumem.steps.meta_model import built, materialise
from pytest_gpumem.steps.model_step import build_model
from pytest_gpumem.steps.pipeline import Pipeline
from pytest_gpumem.steps.precision import dtype_of, in_precision, precision_named
from pytest_gpumem.steps.process_group import is_alone
from pytest_gpumem.steps.surroundings import initialise
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    from pytest_gpumem.measure.context import MeasuringContext
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.step_config.shard_kinds import Layout
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory


def build_sharded(
    context: MeasuringContext,
    factory: ModelOrFactory,
    batch: Any,
    loss: Loss | None,
    config: StepConfig,
    layout: Layout,
) -> Built:
    """Build the model, and keep this rank's shard of it.

    Raises:
        ConfigError: The model is not one that can be sharded so; the message says why.
        CannotRun: The device cannot run it.
    """
    import torch

    device, sharding, blocks = context.device.torch_device, layout.sharding, config.blocks
    mesh = mesh_of(layout, device)
    pipeline = None
    if sharding.staged:
        # Traced before lines are looked for, in a mode that cannot be traced.
        buffers = built(factory, config, device).named_buffers()
        whole = in_precision(build_model(factory, torch.device("meta")), config.precision, given=False)
        _refuse_ties(whole, config)
        pipeline = Pipeline(whole, buffers, batch, loss, config, mesh["pp"].get_group(), device)
        blocks = pipeline.blocks
    notes: tuple[str, ...] = ()
    with context.creation_sites() as creation_sites:
        if pipeline is not None:
            model = pipeline.module
        else:
            model = built(factory, config, device)
            initialise(model, batch, config, context.device, training=True)
        if sharding.degree("tp") > 1:
            _refuse_ties(model, config)
            _split_tensors(model, mesh["tp"])
        if sharding.fully:
            dims = ("copies", "data") if sharding.replicas > 1 else "data"
            notes = _shard_fully(model, replace(config, blocks=blocks), mesh[dims])
        materialise(model, device, parameters_on_host="params" in config.offloaded)
        if sharding.data is None or not sharding.data.wrapped:
            return Built(model, model, blocks, creation_sites, pipeline, notes=notes)
        if config.compile != "none" and current_emulation() is not None:
            raise CannotRun("torch.compile splits a model within DistributedDataParallel in a way that is not emulated")
        ddp, buckets = _ddp(model)
    return Built(model, ddp, blocks, creation_sites, unreduced=ddp.no_sync, buckets=buckets)


def _refuse_ties(model: torch.nn.Module, config: StepConfig) -> None:
    """Raise `ConfigError` for parameters that have two names: each name would get a tensor of its own."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise ConfigError(f"shard={config.shard} would untie {other} and {name}; untie them, or use shard=fsdp")


def _ddp(model: torch.nn.Module) -> tuple[DistributedDataParallel, Mapping[int, torch.Tensor]]:
    """Return the model within DDP, and the buckets that it sends: filled while steps run, where this rank is alone."""
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model)
    buckets: dict[int, torch.Tensor] = {}
    if is_alone():
        # The hook of DDP's own asks the process group, which has nobody to add up with.
        ddp.register_comm_hook(None, _hook_alone(buckets))
    return ddp, buckets


@contextmanager
def sequence_shared(layout: Layout, device: torch.device) -> Iterator[None]:
    """Have attention run over the parts of the sequence that the ranks of ``cp:N`` hold; else do nothing.

    Raises:
        ConfigError: This release of torch has no context parallelism.
    """
    if layout.sharding.degree("cp") == 1:
        yield
        return
    import torch

    try:
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError:
        raise ConfigError(
            f"shard={layout.sharding.text}: torch {torch.__version__} has no context parallelism"
        ) from None
    mesh = mesh_of(layout, device, sequence=True)["cp"]
    # It shards what it is given, and wants something. The batch has been split before.
    nothing = torch.zeros(2 * mesh.size(), device=device)
    attention = torch.nn.functional.scaled_dot_product_attention
    try:
        with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0]):
            yield
    finally:
        # torch 2.6 leaves its own in place.
        torch.nn.functional.scaled_dot_product_attention = attention


def part_of_sequence(batch: Any, layout: Layout) -> Any:
    """Return the rank's part of a batch of sequences: the n-th part of the second dimension of each tensor that has two.

    Raises:
        ConfigError: A sequence cannot be split in two parts for each rank, which share its work alike.
    """
    degree = layout.sharding.degree("cp")
    if degree == 1:
        return batch

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        if tensor.shape[1] % (2 * degree):
            raise ConfigError(
                f"cp:{degree} splits sequences in {2 * degree} parts, and one of the batch's tensors has {tensor.shape[1]} "
                "in its second dimension"
            )
        return tensor.narrow(1, 0, tensor.shape[1] // degree).clone()

    return mapped(batch, cut)


def mesh_of(layout: Layout, device: torch.device, *, sequence: bool = False) -> DeviceMesh:
    """Return the ranks as a mesh: stages, copies of the model, those that share a copy, and the parts of tensors.

    Parameters are sharded over the ranks that have parts of one sequence, too. With ``sequence`` these are a dimension.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sharding = layout.sharding
    parts = dict(sharding.parts)
    dims = {"pp": parts.pop("pp", 1), "copies": sharding.replicas, "data": layout.data_ranks // sharding.replicas}
    if not sequence:
        dims["data"] *= parts.pop("cp", 1)
    dims |= parts
    return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def _shard_fully(model: torch.nn.Module, config: StepConfig, mesh: DeviceMesh) -> tuple[str, ...]:
    """Shard every repeated block by itself, then what is left of the model, as its documentation asks for."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    kind = None if config.sharding is None else config.sharding.data
    assert kind is not None, "only called for a kind that shards"
    precision = precision_named(config.precision)
    computed = None if precision is None or precision.computed is None else getattr(torch, precision.computed)
    reduced = None if config.reduce is None else getattr(torch, dtype_of(config.reduce))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(computed, reduced)}
    if kind.reshard_after_forward is not None:
        options["reshard_after_forward"] = kind.reshard_after_forward
    if "params" in config.offloaded:
        options["offload_policy"] = CPUOffloadPolicy()
    blocks, notes = _blocks(model, config)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return notes


def _blocks(model: torch.nn.Module, config: StepConfig) -> tuple[list[torch.nn.Module], tuple[str, ...]]:
    try:
        lists = repeated_blocks(model, config.blocks)
    except ConfigError:
        if config.blocks is not None:
            raise
        return [], (f"shard={config.shard}: no repeated blocks were found, so that the model is gathered as a whole",)
    return list({id(block.module): block.module for blocks in lists for block in blocks}.values()), ()


def _split_tensors(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Split the model's layers by its own plan (``tp_plan``), a mapping of patterns of modules to styles."""
    from torch.distributed.tensor.parallel import parallelize_module

    plan: Mapping[str, Any] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no tp_plan, by which its layers are split; give it one: a mapping of patterns of "
            'modules to "colwise", "rowwise" or a ParallelStyle of torch.distributed.tensor.parallel'
        )
    for pattern in plan:
        # torch only warns, and the model would be measured whole.
        if not any(fnmatchcase(path, pattern) for path, _ in model.named_modules()):
            raise ConfigError(f"tp_plan[{pattern!r}] matches no module of {type(model).__name__}")
    parallelize_module(model, mesh, {pattern: _style(pattern, style) for pattern, style in plan.items()})


def _style(pattern: str, style: object) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel import style as styles_of_torch

    base: Any = styles_of_torch.ParallelStyle
    if is_a(style, base):
        return style
    styles: dict[object, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }
    if style not in styles:
        raise ConfigError(
            f"tp_plan[{pattern!r}] is {style!r}; known are {', '.join(map(str, styles))} and a ParallelStyle"
        )
    return styles[style]()


def _hook_alone(buckets: dict[int, torch.Tensor]) -> Callable[[object, Any], torch.futures.Future[torch.Tensor]]:
    """Return a hook for DDP that takes this rank's gradients for the average of all, and enters its ``buckets``."""
    import torch
    from torch import distributed

    def reduce(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # DDP makes them anew in its second step, and there may be fewer
        buckets[bucket.index()] = bucket.buffer()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP compares them with the classes themselves.
    reduce.__annotations__ = {
        "bucket": attribute(distributed, "GradBucket"),
        "return": torch.futures.Future[torch.Tensor],
    }
    return reduce
