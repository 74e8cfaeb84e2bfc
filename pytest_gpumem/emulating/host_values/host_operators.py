"""Run an emulated GPU's operators on the CPU, in the GPU tensors' own memory, if all tensors are small enough.

Example: for ``a + b`` with small known integers, `compute` makes CPU tensors on the memory of ``a``, ``b`` and the result, and
adds them.
"""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api.dispatch import takes_numbers_for_tensors
from pytest_gpumem.torch_support.private_api.tensors import unwrapped
from pytest_gpumem.torch_support.reachability import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_EXACT = 1 << 20
"""Upper bound for operators on integers and booleans: the number of elements in all operands and results together."""
MOST_FLOATS = 1 << 16
"""Upper bound for operators on floats: the number of elements in all operands and results together.

A larger matrix product would take too long on the CPU."""
_MOST_ROUTED = 1 << 26, 1 << 24
"""The same upper bounds for integers and for floats, if the values depend on an assumed routing.

A one-hot encoding of the chosen experts needs this many elements. Example: 65,536 tokens x 8 choices x 128 experts are ``1 <<
26`` elements."""
BIGGEST_COPY = 1 << 20
"""``native/memory.c`` copies at most this many bytes. After a larger copy, the target contains zeros."""

NO_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "record_stream"}
)
"""Operators that write no values to their results."""
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operators that read the positions of the true elements if an index is boolean. `NativeReads.positions` records these
reads."""
_READ_BEFORE = frozenset({"_ctc_loss", "_use_cudnn_ctc_loss"})
"""Operators that read values. They are not in `_READ_UNTAGGED`, because `watched_methods` records the read before the call."""
_OF_MASKS = frozenset({"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"})
"""Operators with which torch's TransformerEncoder removes padding from its input."""
_READ_UNTAGGED = _OF_MASKS | frozenset(
    {"is_nonzero", "where.default", "nonzero_numpy", "combinations", "tensor_split.tensor_indices_or_sections"}
    | {"linalg_matrix_exp"}  # chooses a formula by the matrix norm
    | {"_pack_padded_sequence", "_nested_from_padded", "isin.Scalar_Tensor", "_coalesce"}
    | {f"_to_sparse{kind}" for kind in ("", "_csr", "_csc", "_bsr", "_bsc")}
)
"""Operators that read values, although torch does not tag them with ``data_dependent_output`` or ``dynamic_output_shape``."""
_READ_SECOND = _OF_MASKS | frozenset({"tensor_split", "_pack_padded_sequence", "_nested_from_padded"})
"""Operators that read only the values of their second argument."""
_IN_PLACE = frozenset({"set_", *(f"_nested_tensor_{part}" for part in ("size", "strides", "storage_offsets"))})
"""Operators that return a view although their schemas do not say so."""
_CALLS_READERS = _OF_MASKS | frozenset({"isin", "segment_reduce", "_padded_dense_to_jagged_forward"})
"""Operators whose kernel calls other operators that read values. These values decide the kernel's result or memory."""
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
"""Operators that use only their first argument's shape, not its values."""

_frombuffer = torch.frombuffer
"""The original ``torch.frombuffer``. `watched_methods` replaces it by a function that notes the memory as shared with another
library. `on_the_same_memory` calls the original, because it shares memory only with the emulated GPU."""

_STATISTICS = ("running_mean", "running_var")
"""Arguments to which normalisations write. Most operators' schemas do not say so."""
_WRITES_NO_STATISTICS = ("backward", "functional", "no_training", "no_update")
_TRAINS = frozenset({"training", "train", "use_input_stats"})
"""Flags of normalisations. The operator writes to its statistics only if the flag is true."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's properties. They decide whether and how the CPU computes the operator.

    Example: `aten.add_.Tensor` has the name ``"add_"`` and writes to its first argument, so ``written`` is ``(0,)``.
    """

    name: str
    view: bool
    """True if the operator returns a view of existing memory."""
    random: bool
    written: tuple[int, ...]
    """The positions of the arguments to which the operator writes."""
    written_names: tuple[str, ...]
    """The names of the keyword-only arguments to which the operator writes."""
    writes_if: int | None = None
    """The position of a flag. The operator writes to its arguments only if the flag is true. ``None`` if there is no flag."""
    collective: bool = False
    """True for operators in `torch.distributed`. Their schemas do not say to which arguments they write."""
    overwrites: bool = False
    """True if the operator does not use the values of its first argument, for example because it overwrites them."""
    reads: bool = False
    """True if torch's code on the host reads the operands' values, to choose the result or its size."""
    calls_readers: bool = False
    """True if the operator's kernel calls other operators that read values."""
    only_tensors: tuple[int, ...] = ()
    """The positions of the arguments for which torch accepts only tensors, and no Python numbers."""

    def read_of(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Return the arguments whose values the host reads in a call."""
        if not self.reads or (self.name == "repeat_interleave" and named.get("output_size") is not None):
            return []
        if self.name == "_coalesce":
            return parts_of(args[0])[:1]  # the operator reads only the indices
        return tensors_among(args[1:2] if self.name in _READ_SECOND else (*args, *named.values()))


def operator_of(func: Any) -> Operator:
    """Return the properties of an operator such as ``torch.ops.aten.add.Tensor``, from the operator's schema and name."""
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
    """Return all tensors in ``values``, including tensors in nested lists and tuples."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_among(value)
    return tensors


def is_exact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's dtype is an integer or boolean type."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def is_ordinary(kind: type) -> bool:
    """Return whether a tensor class leaves operators to torch, because it does not define ``__torch_dispatch__`` itself."""
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor are in one storage.

    Sparse and nested tensors have several storages. A zero derivative in forward mode (`torch.func.jvp`) has no storage, and
    neither has a wrapper in `torch.func` or `torch.export`.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not tensor._is_zerotensor() and unwrapped(tensor) is tensor  # noqa: SLF001 -- no public name


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor, or a list with the tensor itself."""
    return [tensor] if has_storage(tensor) else [*sparse_parts(tensor)]


def sparse_key(tensors: list[torch.Tensor]) -> str | None:
    """Return the dispatch key for a kernel on sparse operands, such as ``"SparseCUDA"``; ``None`` if no operand is sparse."""
    layouts = {tensor.layout for tensor in tensors if not tensor.is_nested} - {torch.strided}
    if not layouts:
        return None
    kind = "Sparse" if layouts == {torch.sparse_coo} else "SparseCsr"
    return kind + ("CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU")


def coalesced_on_host(indices: torch.Tensor, values: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return a coalesced sparse tensor on the host. If ``values`` is ``None``, its values are 0."""
    if values is None:
        values, shape = torch.zeros(indices.shape[1]), shape[: len(indices)]
    return torch.sparse_coo_tensor(on_host(indices), on_host(values), shape).coalesce()


def covers_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether writing to all elements of a tensor overwrites its whole storage."""
    return tensor.nbytes >= tensor.untyped_storage().nbytes()


def is_small(tensors: Iterable[torch.Tensor], *, routed: bool = False) -> bool:
    """Return whether an operator on these tensors is small enough for the CPU.

    Args:
        tensors: All operands and results of the operator.
        routed: Whether the values depend on an assumed routing. The bounds are higher then.
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
    """Return a CPU tensor in the memory of an emulated GPU's tensor."""
    nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if nbytes <= 0 or tensor.numel() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * int(nbytes)).from_address(tensor.data_ptr())
    return _frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())


def on_host(value: Any) -> Any:
    """Convert an operator's arguments for the CPU.

    Each GPU tensor becomes a CPU tensor on the same memory, and ``torch.device("cuda")`` becomes ``torch.device("cpu")``.
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
    """Yield the keyword arguments with which the CPU draws random numbers in place of the GPU.

    The seed is a hash of the GPU generator's state, so the same state always draws the same numbers.
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
    """Run an operator on CPU tensors.

    For ``histc``, convert integers to doubles, because the CPU's kernel raises an exception for integers.
    """
    if func is torch.ops.aten.histc.default and is_exact(args[0]):
        return func(args[0].double(), *args[1:], **named).to(args[0].dtype)
    return func(*args, **named)


def compute(func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> bool:
    """Run an operator on the CPU, and write the values to its result on the emulated GPU.

    Args:
        func: The operator.
        args: The operator's positional arguments.
        named: The operator's keyword arguments.
        result: The operator's result on the emulated GPU, whose memory is overwritten.

    Returns:
        True if the values were written. False if the CPU has no kernel for the operator, or the CPU's result has another shape
        or dtype.
    """
    try:
        truth = _truth(func, on_host(args), on_host(named))
    except Exception:  # noqa: BLE001 -- many operators have no kernel on the CPU, so their results remain unknown
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
