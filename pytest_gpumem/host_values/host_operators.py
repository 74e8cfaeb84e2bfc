"""Operators of an emulated GPU run on the host, on the same memory: their properties, and those small enough."""

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
"""Elements of all tensors of an operator on integers and booleans that is computed."""
MOST_FLOATS = 1 << 16
"""Elements of all tensors of an operator on floats, which bounds what a product of matrices costs on the host."""
_MOST_ROUTED = 1 << 26, 1 << 24
"""The same of integers and booleans, and of floats, where some follow from an assumed routing: a choice of experts for each
token, one-hot, has so many."""
BIGGEST_COPY = 1 << 20
"""The limit in ``native/memory.c``: a larger copy leaves zeros."""

_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operators that ask for the positions at which a boolean index is true: those are seen (`NativeReads.positions`)."""
_READ_BEFORE = frozenset({"_ctc_loss", "_use_cudnn_ctc_loss"})
"""Operators whose reads are noted where they are called from (`watched_methods`)."""
_OF_MASKS = frozenset({"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"})
"""Operators by which an encoder leaves padding out."""
_READ_UNTAGGED = _OF_MASKS | frozenset(
    {"is_nonzero", "where.default", "nonzero_numpy", "combinations", "tensor_split.tensor_indices_or_sections"}
    | {"linalg_matrix_exp"}  # the norm, by which it chooses a formula
    | {"_pack_padded_sequence", "_nested_from_padded", "isin.Scalar_Tensor", "_coalesce"}
    | {f"_to_sparse{kind}" for kind in ("", "_csr", "_csc", "_bsr", "_bsc")}
)
"""Operators that read values, and are not tagged as such."""
_READ_SECOND = _OF_MASKS | frozenset({"tensor_split", "_pack_padded_sequence", "_nested_from_padded"})
"""Operators that read only the second of their arguments."""
_IN_PLACE = frozenset({"set_", *(f"_nested_tensor_{what}" for what in ("size", "strides", "storage_offsets"))})
"""Operators that return memory that was there, and whose schemas do not say so."""
_CALLS_READERS = _OF_MASKS | frozenset({"isin"})
"""Operators whose kernels call others that read, on which their results or the memory that they take depends."""
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
"""Operators of which the first argument gives no values, but a shape."""

_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalisations write to, and that most schemas do not declare as written."""
_WRITES_NO_STATISTICS = ("backward", "functional", "no_training", "no_update")
_TRAINS = frozenset({"training", "train", "use_input_stats"})
"""Arguments without which they do not."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator that decide whether and how the host computes it."""

    name: str
    view: bool
    """True if its result is memory that was there."""
    random: bool
    written: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    written_names: tuple[str, ...]
    """The same, of those that may only be named."""
    writes_if: int | None = None
    """Position of the argument without which it does not."""
    collective: bool = False
    """An operator of torch.distributed, whose schemas lack the arguments that they write to."""
    overwrites: bool = False
    """The values of its first argument do not matter."""
    reads: bool = False
    """Its result, or the size of its result, depends on values that the host reads."""
    calls_readers: bool = False
    """Its kernel calls operators of which that is true."""
    only_tensors: tuple[int, ...] = ()
    """Positions of the arguments that have to be tensors: a number does not stand for one."""

    def read_of(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors whose values the host reads in a call."""
        if not self.reads or (self.name == "repeat_interleave" and named.get("output_size") is not None):
            return []
        return tensors_among(args[1:2] if self.name in _READ_SECOND else (*args, *named.values()))


def operator_of(func: Any) -> Operator:
    """Return the properties of an operator by its schema (``torch.ops.aten.add.Tensor``)."""
    schema = func._schema  # noqa: SLF001 -- public in torch's documentation of operators, but for its name
    returned = [one.alias_info for one in schema.returns if one.alias_info is not None]
    written = [
        (at, one) for at, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    ]
    namespace, _, name = schema.name.partition("::")
    names = [one.name for one in schema.arguments]
    statistics = (
        [] if name.endswith(_WRITES_NO_STATISTICS) else [at for at, one in enumerate(names) if one in _STATISTICS]
    )
    overload = schema.overload_name or "default"
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return Operator(
        name,
        view=name in _IN_PLACE or (bool(returned) and not any(one.is_write for one in returned)),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        written=tuple(sorted({*(at for at, one in written if not one.kwarg_only), *statistics})),
        written_names=tuple(one.name for _, one in written if one.kwarg_only),
        writes_if=next((at for at, one in enumerate(names) if one in _TRAINS), None) if statistics else None,
        collective=namespace.strip("_").startswith("c10d"),
        overwrites=name in _MADE_OF_NOTHING,
        reads=name not in _INDEXED | _READ_BEFORE
        and (bool(reads) or not _READ_UNTAGGED.isdisjoint((name, f"{name}.{overload}"))),
        calls_readers=name in _CALLS_READERS and not overload.startswith("Scalar"),
        only_tensors=()
        if takes_numbers_for_tensors(name)
        else tuple(at for at, one in enumerate(schema.arguments) if str(one.type) == "Tensor"),
    )


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``values``, and in lists and tuples of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


def is_exact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def is_ordinary(kind: type) -> bool:
    """Return whether tensors of a class have memory as any other: torch has no operators of their own for them."""
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in one storage.

    Sparse and nested tensors have several. The zeros that forward-mode derivatives start from (`torch.func.jvp`) and the
    wrappers of `torch.func` and `torch.export` have none.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not tensor._is_zerotensor() and unwrapped(tensor) is tensor  # noqa: SLF001 -- no public name


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor, or the tensors that a sparse one is made of."""
    return [tensor] if has_storage(tensor) else [*sparse_parts(tensor)]


def covers_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether what is written to a tensor leaves nothing of its storage as it was."""
    return tensor.nbytes >= tensor.untyped_storage().nbytes()


def is_small(tensors: Iterable[torch.Tensor], *, routed: bool = False) -> bool:
    """Return whether an operator on these tensors is cheap enough to be computed on the host.

    ``routed`` says that they follow from an assumed routing.
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
    """Return a tensor of the host on the same memory."""
    nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if nbytes <= 0 or tensor.numel() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * int(nbytes)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())


def on_host(value: Any) -> Any:
    """Return arguments with tensors of the GPU replaced by the host's on the same memory, and the device by the host."""
    if isinstance(value, torch.Tensor):
        return on_the_same_memory(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(one) for one in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: on_host(one) for name, one in value.items()}
    return value


@contextmanager
def drawing_as(named: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which the host draws random numbers, seeded by the GPU's state: they repeat as it does."""
    theirs = named.get("generator") or torch.cuda.default_generators[device.index or 0]
    seed = int.from_bytes(hashlib.sha256(theirs.get_state().numpy().tobytes()).digest()[:7], "little")
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
    """Run an operator on tensors of the host, which counts no integers in a histogram: as floats they are exact, too."""
    if func is torch.ops.aten.histc.default and is_exact(args[0]):
        return func(args[0].double(), *args[1:], **named).to(args[0].dtype)
    return func(*args, **named)


def compute(func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> bool:
    """Run the operator on the host, and return whether it could be run."""
    try:
        truth = _truth(func, on_host(args), on_host(named))
    except Exception:  # noqa: BLE001 -- many operators have no kernel on the host; then nothing is known of the result
        return False
    made, true = tensors_among((result,)), tensors_among((truth,))
    if len(made) != len(true):
        return False
    for emulated, computed in zip(made, true, strict=True):
        if emulated.shape != computed.shape or emulated.dtype != computed.dtype:
            return False
        if emulated.data_ptr() != computed.data_ptr():
            (on_the_same_memory(emulated) if emulated.is_cuda else emulated).copy_(computed)
    return True
