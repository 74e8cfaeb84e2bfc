"""Sharding a model over ranks with torch's DDP, FSDP2, tensor parallelism and context parallelism."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import CannotRun, ConfigError
from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.measuring.step_config.blocks import repeated_blocks
from pytest_gpumem.measuring.steps.batches import map_tensors
from pytest_gpumem.measuring.steps.built import BuiltModel
from pytest_gpumem.measuring.steps.global_settings import initialise
from pytest_gpumem.measuring.steps.meta_model import build_in_precision, materialise
from pytest_gpumem.measuring.steps.pipeline import Pipeline
from pytest_gpumem.measuring.steps.precision import dtype_of, precision_named
from pytest_gpumem.measuring.steps.process_group import is_alone
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.step_config.shard_kinds import Layout
    from pytest_gpumem.measuring.steps.model_source import ModelSource
    from pytest_gpumem.measuring.steps.model_step import Loss


def build_sharded(
    context: MeasuringContext,
    source: ModelSource,
    batch: Any,
    loss: Loss | None,
    config: StepConfig,
    layout: Layout,
) -> BuiltModel:
    """Build the model, and keep this rank's shard.

    Args:
        context: The context in which the step is measured.
        source: The model's source.
        batch: This rank's batch.
        loss: A function with the arguments output and batch.
        config: The step config.
        layout: The job's ranks, and the measured rank.

    Raises:
        ConfigError: The model cannot be sharded in this way. The message has the reason.
        CannotRun: The device cannot run the sharded model.
    """
    import torch

    device, sharding, blocks = context.device.torch_device, layout.sharding, config.blocks
    mesh = mesh_of(layout, device)
    pipeline = None
    if sharding.staged:
        # Trace the model here, before `creation_sites` enters a mode, because torch.export cannot trace in this mode.
        buffers = build_in_precision(source, config, device).named_buffers()
        full_model = source.model_on(torch.device("meta"), config.precision)
        _refuse_ties(full_model, config)
        pipeline = Pipeline(full_model, buffers, batch, loss, config, mesh["pp"].get_group(), device)
        blocks = pipeline.blocks
    notes: tuple[str, ...] = ()
    with context.creation_sites() as creation_sites:
        if pipeline is not None:
            model = pipeline.module
        else:
            model = build_in_precision(source, config, device)
            initialise(model, batch, config, context.device, training=True)
        if sharding.degree("tp") > 1:
            _refuse_ties(model, config)
            _split_tensors(model, mesh["tp"])
        if sharding.fully:
            dims = ("copies", "data") if sharding.replicas > 1 else "data"
            notes = _shard_fully(model, replace(config, blocks=blocks), mesh[dims])
        materialise(model, device, parameters_on_host="params" in config.offloaded)
        if sharding.data is None or not sharding.data.wrapped:
            return BuiltModel(model, model, blocks, creation_sites, pipeline, notes=notes)
        if config.compile != "none" and current_emulation() is not None:
            raise CannotRun("torch.compile splits a model within DistributedDataParallel in a way that is not emulated")
        ddp, buckets = _ddp(model)
    return BuiltModel(model, ddp, blocks, creation_sites, unreduced=ddp.no_sync, buckets=buckets)


def _refuse_ties(model: torch.nn.Module, config: StepConfig) -> None:
    """Raise `ConfigError` if a parameter has two names, because sharding would create a separate tensor for each name."""
    name_by_id: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier_name = name_by_id.setdefault(id(parameter), name)
        if earlier_name != name:
            raise ConfigError(
                f"shard={config.shard} would untie {earlier_name} and {name}, which share a parameter; untie them in the "
                "model, or use shard=fsdp"
            )


def _ddp(model: torch.nn.Module) -> tuple[DistributedDataParallel, Mapping[int, torch.Tensor]]:
    """Return the model inside ``DistributedDataParallel`` (DDP), and DDP's gradient buckets by number.

    The mapping of buckets is filled while steps run, and only if this rank is alone.
    """
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model)
    buckets: dict[int, torch.Tensor] = {}
    if is_alone():
        # DDP's default hook would average gradients over the process group, but no other rank exists.
        ddp.register_comm_hook(None, _hook_alone(buckets))
    return ddp, buckets


@contextmanager
def sharing_sequences(layout: Layout, device: torch.device) -> Iterator[None]:
    """With ``cp:N``, run attention within the context over the parts of a sequence on all ranks. Otherwise do nothing.

    Raises:
        ConfigError: This torch release has no context parallelism.
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
    # context_parallel() requires a buffer to shard, but part_of_sequence() already splits the batch. So pass a dummy.
    dummy = torch.zeros(2 * mesh.size(), device=device)
    attention = torch.nn.functional.scaled_dot_product_attention
    try:
        with context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[0]):
            yield
    finally:
        # `context_parallel` of torch 2.6 does not restore the attention function that it replaced.
        torch.nn.functional.scaled_dot_product_attention = attention


def part_of_sequence(batch: Any, layout: Layout) -> Any:
    """Return the batch with only this rank's share of each sequence.

    With ``cp:N``, each rank takes the first ``1/N`` of each tensor's second dimension. This part stands for the rank's real
    share, which has the same size. Tensors with one dimension stay unchanged.

    Raises:
        ConfigError: A sequence cannot be split into ``2 * N`` equal parts. torch needs two parts for each rank, to balance the
            ranks' work.
    """
    degree = layout.sharding.degree("cp")
    if degree == 1:
        return batch

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        if tensor.shape[1] % (2 * degree):
            raise ConfigError(
                f"cp:{degree} splits sequences into {2 * degree} equal parts, but a tensor in the batch has the length "
                f"{tensor.shape[1]} in its second dimension"
            )
        return tensor.narrow(1, 0, tensor.shape[1] // degree).clone()

    return map_tensors(batch, narrowed)


def mesh_of(layout: Layout, device: torch.device, *, sequence: bool = False) -> DeviceMesh:
    """Return the ranks as a device mesh.

    The mesh has the dimensions ``pp`` (stages), ``copies`` (of the model), ``data``, and with ``tp:N`` also ``tp``. Parameters
    are sharded over ``data``. With ``cp:N``, this dimension includes the ranks that share a sequence.

    Args:
        layout: The job's ranks, and the measured rank.
        device: The measured rank's device.
        sequence: True to add a dimension ``cp`` for the ranks that share a sequence.
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
    """Shard each repeated block, then the rest of the model, as documented for ``fully_shard``. Return notes."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    kind = None if config.sharding is None else config.sharding.data
    assert kind is not None, "only called for a kind with fully_shard"
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
        return [], (f"shard={config.shard}: no repeated blocks were found, so all parameters are gathered at once",)
    return list({id(block.module): block.module for blocks in lists for block in blocks}.values()), ()


def _split_tensors(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Split the model's layers as described by ``model.tp_plan``, a mapping from module patterns to styles."""
    from torch.distributed.tensor.parallel import parallelize_module

    plan: Mapping[str, Any] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no tp_plan, which describes how layers are split; set model.tp_plan to a mapping "
            'from module patterns to "colwise", "rowwise" or a ParallelStyle from torch.distributed.tensor.parallel'
        )
    for pattern in plan:
        # torch only warns if a pattern matches nothing, and the model would be measured without sharding.
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
        raise ConfigError(f"tp_plan[{pattern!r}] is {style!r}; use {', '.join(map(str, styles))} or a ParallelStyle")
    return styles[style]()


def _hook_alone(buckets: dict[int, torch.Tensor]) -> Callable[[object, Any], torch.futures.Future[torch.Tensor]]:
    """Return a communication hook for DDP, which returns this rank's gradients as the average, and fills ``buckets``."""
    import torch
    from torch import distributed

    def reduce(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # DDP creates new buckets in its second step, perhaps fewer
        buckets[bucket.index()] = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # DDP compares the annotations with these classes, so they must not be strings.
    reduce.__annotations__ = {
        "bucket": attribute(distributed, "GradBucket"),
        "return": torch.futures.Future[torch.Tensor],
    }
    return reduce
