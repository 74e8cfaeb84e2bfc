"""Run an emulated GPU's operators on the host and on the same memory, if their tensors are small enough."""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api import takes_numbers_for_tensors, unwrapped
from pytest_gpumem.torch_support.reachability import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_EXACT = 1 << 20
"""Limit for operators on integers and booleans: elements in all tensors together."""
MOST_FLOATS = 1 << 16
"""Limit for operators on floats: elements in all tensors together.

This limit bounds the time for a matrix product on the host.
"""
_MOST_ROUTED = 1 << 26, 1 << 24
"""Limits for integers and for floats if values depend on an assumed routing.

A one-hot choice of experts for each token needs this many elements. Example: 65,536 tokens x 8 choices x 128 experts are 1 <<
26.
"""
BIGGEST_COPY = 1 << 20
"""The largest copy in bytes that ``native/memory.c`` makes. After a larger copy, the target contains zeros."""

INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operators that ask for the true positions in a boolean index. `NativeReads.positions` records these reads."""
_READ_BEFORE = frozenset({"_ctc_loss", "_use_cudnn_ctc_loss"})
"""Operators whose reads `watched_methods` records when they are called."""
_OF_MASKS = frozenset({"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"})
"""Operators by which torch's TransformerEncoder removes padding from its input."""
_READ_UNTAGGED = _OF_MASKS | frozenset(
    {"is_nonzero", "where.default", "nonzero_numpy", "combinations", "tensor_split.tensor_indices_or_sections"}
    | {"linalg_matrix_exp"}  # this operator chooses a formula by the norm
    | {"_pack_padded_sequence", "_nested_from_padded", "isin.Scalar_Tensor", "_coalesce"}
    | {f"_to_sparse{kind}" for kind in ("", "_csr", "_csc", "_bsr", "_bsc")}
)
"""Operators that read values although torch does not tag them."""
_READ_SECOND = _OF_MASKS | frozenset({"tensor_split", "_pack_padded_sequence", "_nested_from_padded"})
"""Operators that read only their second argument."""
_IN_PLACE = frozenset({"set_", *(f"_nested_tensor_{part}" for part in ("size", "strides", "storage_offsets"))})
"""Operators that return existing memory although their schemas do not declare it."""
_CALLS_READERS = _OF_MASKS | frozenset({"isin", "segment_reduce", "_padded_dense_to_jagged_forward"})
"""Operators with a kernel that calls reading operators. The reads decide the kernel's result or memory."""
_MADE_OF_NOTHING = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "zero_",
        "fill_",
        "zero",
        "fill",
        "copy_",
    }
)
"""Operators that use only the shape of their first argument, and not its values."""

_STATISTICS = ("running_mean", "running_var")
"""Arguments written by normalisations. Most schemas do not declare that the operator writes to them."""
_WRITES_NO_STATISTICS = ("backward", "functional", "no_training", "no_update")
_TRAINS = frozenset({"training", "train", "use_input_stats"})
"""Arguments that must be true for a normalisation to write its statistics."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator that decide whether and how the host computes it.

    Example: `aten.add_.Tensor` has the name ``"add_"`` and writes to position 0, so ``written`` is ``(0,)``.
    """

    name: str
    view: bool
    """True if the operator returns existing memory."""
    random: bool
    written: tuple[int, ...]
    """Positions of the written arguments."""
    written_names: tuple[str, ...]
    """Names of the written keyword-only arguments."""
    writes_if: int | None = None
    """Position of the argument that must be true for the operator to write."""
    collective: bool = False
    """True for operators in torch.distributed. Their schemas do not declare the written arguments."""
    overwrites: bool = False
    """True if the result does not depend on the values in the first argument, because the operator overwrites them."""
    reads: bool = False
    """True if the host reads values that decide the result or its size."""
    calls_readers: bool = False
    """True if the kernel calls reading operators."""
    only_tensors: tuple[int, ...] = ()
    """Positions of the arguments that must be tensors and cannot be numbers."""

    def read_of(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors read by the host in a call."""
        if not self.reads or (self.name == "repeat_interleave" and named.get("output_size") is not None):
            return []
        if self.name == "_coalesce":
            return parts_of(args[0])[:1]  # only the indices are read
        return tensors_among(args[1:2] if self.name in _READ_SECOND else (*args, *named.values()))


def operator_of(func: Any) -> Operator:
    """Return an operator's properties by its schema. Example of an operator: ``torch.ops.aten.add.Tensor``."""
    schema = func._schema  # noqa: SLF001 -- torch documents it among its operators although the name is private
    returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
    written = [
        (at, argument)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    namespace, _, name = schema.name.partition("::")
    names = [argument.name for argument in schema.arguments]
    statistics = (
        []
        if name.endswith(_WRITES_NO_STATISTICS)
        else [at for at, argument_name in enumerate(names) if argument_name in _STATISTICS]
    )
    overload = schema.overload_name or "default"
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return Operator(
        name,
        view=name in _IN_PLACE or (bool(returned) and not any(alias.is_write for alias in returned)),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        written=tuple(sorted({*(at for at, argument in written if not argument.kwarg_only), *statistics})),
        written_names=tuple(argument.name for _, argument in written if argument.kwarg_only),
        writes_if=next((at for at, argument_name in enumerate(names) if argument_name in _TRAINS), None)
        if statistics
        else None,
        collective=namespace.strip("_").startswith("c10d"),
        overwrites=name in _MADE_OF_NOTHING,
        reads=name not in INDEXED | _READ_BEFORE
        and (bool(reads) or not _READ_UNTAGGED.isdisjoint((name, f"{name}.{overload}"))),
        calls_readers=name in _CALLS_READERS and not overload.startswith("Scalar"),
        only_tensors=()
        if takes_numbers_for_tensors(name)
        else tuple(at for at, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"),
    )


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``, including those in nested lists and tuples."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_among(value)
    return tensors


def is_exact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def is_ordinary(kind: type) -> bool:
    """Return whether a tensor class has ordinary memory, because it does not define its own ``__torch_dispatch__``."""
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are all in the same storage.

    Sparse and nested tensors have several storages. The zeros at the start of forward-mode derivatives (`torch.func.jvp`) and
    the wrappers in `torch.func` and `torch.export` have no storage.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not tensor._is_zerotensor() and unwrapped(tensor) is tensor  # noqa: SLF001 -- no public name


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor itself, or a sparse tensor's parts."""
    return [tensor] if has_storage(tensor) else [*sparse_parts(tensor)]


def sparse_key(tensors: list[torch.Tensor]) -> str | None:
    """Return the dispatch key for a sparse kernel, such as ``"SparseCUDA"``; ``None`` if no operand is sparse."""
    layouts = {tensor.layout for tensor in tensors if not tensor.is_nested} - {torch.strided}
    if not layouts:
        return None
    kind = "Sparse" if layouts == {torch.sparse_coo} else "SparseCsr"
    return kind + ("CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU")


def coalesced_on_host(indices: torch.Tensor, values: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return a sparse host tensor with distinct indices. Its values are 0 if ``values`` is ``None``."""
    if values is None:
        values, shape = torch.zeros(indices.shape[1]), shape[: len(indices)]
    return torch.sparse_coo_tensor(on_host(indices), on_host(values), shape).coalesce()


def covers_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether writing to a tensor overwrites its whole storage."""
    return tensor.nbytes >= tensor.untyped_storage().nbytes()


def is_small(tensors: Iterable[torch.Tensor], *, routed: bool = False) -> bool:
    """Return whether an operator on these tensors is cheap enough for the host.

    Args:
        tensors: All operands and results.
        routed: Whether values depend on an assumed routing, for which larger tensors are allowed.
    """
    most_exact, most_floats = _MOST_ROUTED if routed else (MOST_EXACT, MOST_FLOATS)
    most_bytes = 8 * most_exact if routed else BIGGEST_COPY * 2
    elements = 0
    exact = True
    for tensor in tensors:
        elements += tensor.numel()
        exact = exact and is_exact(tensor)
        if not has_storage(tensor):
            return False
        if tensor.untyped_storage().nbytes() > most_bytes or tensor.is_conj() or tensor.is_quantized:
            return False
    return elements <= (most_exact if exact else most_floats)


def on_the_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor on the same memory."""
    nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if nbytes <= 0 or tensor.numel() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * int(nbytes)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())


def on_host(value: Any) -> Any:
    """Return the arguments for the host.

    Each GPU tensor becomes a host tensor on the same memory, and a device becomes the host.
    """
    if isinstance(value, torch.Tensor):
        return on_the_same_memory(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(element) for element in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: on_host(element) for name, element in value.items()}
    return value


@contextmanager
def drawing_as(named: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which the host draws random numbers.

    The seed is a hash from the GPU generator's state, so equal states draw equal numbers.
    """
    generator = named.get("generator") or torch.cuda.default_generators[device.index or 0]
    seed = int.from_bytes(hashlib.sha256(generator.get_state().numpy().tobytes()).digest()[:7], "little")
    if named.get("generator") is not None:
        yield {**named, "generator": torch.Generator().manual_seed(seed)}
        return
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield named
    finally:
        torch.set_rng_state(state)


def _truth(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run an operator on host tensors.

    For ``histc``, convert integers to doubles, because the host's kernel refuses integers.
    """
    if func is torch.ops.aten.histc.default and is_exact(args[0]):
        return func(args[0].double(), *args[1:], **named).to(args[0].dtype)
    return func(*args, **named)


def compute(func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> bool:
    """Run an operator on the host, and write the values to its result on the GPU.

    Args:
        func: The operator.
        args: Its arguments.
        named: Its keyword arguments.
        result: The operator's result on the emulated GPU.

    Returns:
        False if the host cannot run the operator, or returns tensors with other shapes or dtypes.
    """
    try:
        truth = _truth(func, on_host(args), on_host(named))
    except Exception:  # noqa: BLE001 -- many operators have no kernel on the host, and their results stay unknown
        return False
    gpu_tensors, host_tensors = tensors_among((result,)), tensors_among((truth,))
    if len(gpu_tensors) != len(host_tensors):
        return False
    for emulated, computed in zip(gpu_tensors, host_tensors, strict=True):
        if emulated.shape != computed.shape or emulated.dtype != computed.dtype:
            return False
        if emulated.data_ptr() != computed.data_ptr():
            (on_the_same_memory(emulated) if emulated.is_cuda else emulated).copy_(computed)
    return True
