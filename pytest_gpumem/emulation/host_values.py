"""Values of small tensors of an emulated GPU, computed on the host where all operands are known.

Kernels of an emulated GPU do nothing, but its memory is the host's. So an operator whose tensors are all known and small is
run once more, on the host, on the same memory. Everything else is *unknown*: its bytes mean nothing, and its floats are taken
as finite. A read of an unknown value by the host that may change memory is noted in `HostValues.trouble`.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.emulation.host_operators import (
    BIGGEST_COPY,
    Operator,
    combined,
    compute,
    has_mask,
    is_exact,
    is_small,
    on_host,
    on_the_same_memory,
    operator_of,
    tensors_among,
)
from pytest_gpumem.torch_support.private_api import never_compiled

if TYPE_CHECKING:
    from collections.abc import Iterable


_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_MADE_OF_NOTHING = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "zero", "fill"}
)
_NO_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "record_stream"}
)
_READ = {
    "equal": "tensors are compared",
    "nonzero": "nonzero reads values",
    "masked_select": "masked_select reads values",
    "_unique": "unique reads values",
    "_unique2": "unique reads values",
    "unique_dim": "unique reads values",
    "unique_consecutive": "unique_consecutive reads values",
    "unique_dim_consecutive": "unique_consecutive reads values",
    "repeat_interleave": "repeat_interleave reads values",
    "bincount": "bincount reads values",
}
"""Operators whose result, or its size, depends on values: they are run on the host."""
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Operators that ask a boolean index how many are true."""

_OF_FINITE = frozenset({"isfinite", "isnan", "isinf", "isposinf", "isneginf"})
"""Operators that ask whether values are finite, which uncomputed ones are taken to be."""


class HostValues(TorchDispatchMode):
    """Dispatch mode that computes known small tensors on the host, and notices reads of uncomputed values.

    `pytest_gpumem.emulation.values` enters it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operators: dict[Any, Operator] = {}
        self._known: dict[int, StorageWeakRef] = {}
        self._unknown: StorageWeakRef | None = None
        """Of the tensor that was last noted as not known."""
        self._constants: dict[int, tuple[StorageWeakRef, bool]] = {}
        self.trouble: str | None = None
        """The first read of an unknown value since the last `take_trouble`, as a clause with its line."""
        self.first_trouble: str | None = None
        """The same, of the whole process."""
        self.as_integer = False
        """A float is read to become an integer, which may be a size."""

    def take_trouble(self) -> str | None:
        """Return the first read of an unknown value since the last call as a clause with its line, if there was one."""
        trouble, self.trouble = self.trouble, None
        return trouble

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run compiled code beneath this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would keep torch.compile out by a wrapper that loads the compiler into every process."""
        return False

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        for kind in types:
            if kind not in _ORDINARY:
                # One without memory has nothing to compute; what others are made of comes here again.
                return func(*args, **named) if kind.__name__ == "FakeTensor" else NotImplemented
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operator_of(func)
        if operator.view:
            return self._view(func, operator, args, named)
        on_gpu = [tensor for tensor in tensors_among((*args, *named.values())) if tensor.is_cuda]
        device = named.get("device")
        if not on_gpu and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **named)
        if operator.name in _READ:
            self._read(on_gpu, _READ[operator.name])
            return self._moved(func(*on_host(args), **on_host(named)), on_gpu[0].device)
        if operator.name == "_local_scalar_dense" and (self.as_integer or is_exact(on_gpu[0])):
            self._read(on_gpu, "a value is read")
        elif operator.name in _INDEXED and has_mask(args):
            args = (args[0], self._without_masks(args[1], on_gpu[0].device), *args[2:])
        run = self._communicate if operator.collective else self._run
        return run(func, operator, args, named, on_gpu)

    def _run(
        self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any], on_gpu: list[torch.Tensor]
    ) -> Any:
        """Run an operator on the GPU; and on the host, where all that it is given is known and small."""
        computed = not operator.random and operator.name not in _NO_VALUES
        if computed and operator.name not in _MADE_OF_NOTHING:
            only_written = operator.name == "copy_"
            computed = self._knows(on_gpu[1:] if only_written and on_gpu and on_gpu[0] is args[0] else on_gpu)
        room = args[0].untyped_storage().nbytes() if operator.name == "resize_" else None
        result = func(*args, **named)
        if room is not None and args[0].untyped_storage().nbytes() == room:
            return result  # another shape on the same bytes
        made = tensors_among((result,))
        if not made and not operator.written and not operator.written_names:
            return result
        written = [args[at] for at in operator.written if at < len(args)]
        written += [named[name] for name in operator.written_names if name in named]
        changed = tensors_among(written)
        outcome = [tensor for tensor in (*made, *changed) if tensor.is_cuda and type(tensor) in _ORDINARY]
        constant = self._constant(operator, args)
        if constant is None and computed and is_small((*on_gpu, *outcome)):
            computed = compute(func, args, named, result, bool(changed))
        elif constant is not None and outcome and is_small(outcome):
            for tensor in outcome:
                on_the_same_memory(tensor).fill_(constant)
            computed = True
        else:
            computed = False
        for tensor in outcome:
            # Backward, which this mode does not see, adds to gradients that are set to zero.
            known = computed and not (operator.name in ("zero_", "_foreach_zero_") and not is_exact(tensor))
            self._note(tensor, known, constant)
        return result

    def _view(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator whose result is existing memory, and is known as far as that was."""
        if operator.name == "lift_fresh" and args[0].is_cuda:
            # `torch.tensor` has made it: of a tensor, which came by here, or of the host's values, which did not.
            storage = args[0].untyped_storage()
            if self._unknown is None or self._unknown.cdata != StorageWeakRef(storage).cdata:
                self._note(args[0], storage.nbytes() <= BIGGEST_COPY)
        return func(*args, **named)

    def _communicate(
        self, func: Any, _: Operator, args: tuple[Any, ...], named: dict[str, Any], on_gpu: list[torch.Tensor]
    ) -> Any:
        """Run a collective, which NCCL's stand-in computes as if every rank did what this one does."""
        result = func(*args, **named)
        made = [tensor for tensor in tensors_among((result,)) if tensor.is_cuda and type(tensor) in _ORDINARY]
        places = {tensor.untyped_storage().data_ptr() for tensor in made}
        sent = [tensor for tensor in on_gpu if tensor.untyped_storage().data_ptr() not in places]
        known = self._knows(sent or on_gpu)
        for tensor in made:
            # Sums of half precision are not computed.
            self._note(tensor, known and tensor.nbytes <= BIGGEST_COPY and tensor.dtype != torch.float16)
        return result

    def _note(self, tensor: torch.Tensor, known: bool, constant: bool | None = None) -> None:
        """Note whether a tensor's memory is known; what is read unknown is 0, in every process alike."""
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        self._constants.pop(where, None)
        if known:
            self._known[where] = StorageWeakRef(storage)
        else:
            self._known.pop(where, None)
            self._unknown = StorageWeakRef(storage)
            if is_exact(tensor) and storage.nbytes() <= BIGGEST_COPY and tensor.is_contiguous():
                ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        if constant is not None:
            self._constants[where] = (StorageWeakRef(storage), constant)

    def _without_masks(self, indices: Iterable[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
        """Return indices with each mask replaced by the positions where it is true, as torch does on a GPU."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            if index.is_cuda:
                self._read((index,), "a boolean index reads values")
            for column in on_host(index).nonzero().unbind(1):
                found.append(self._moved(column.contiguous(), device))
        return found

    def _moved(self, value: Any, device: torch.device) -> Any:
        """Return results of the host as tensors of the GPU."""
        if isinstance(value, torch.Tensor):
            there = value.to(device)
            self._note(there, value.nbytes <= BIGGEST_COPY)
            return there
        return type(value)(self._moved(one, device) for one in value) if isinstance(value, (list, tuple)) else value

    def _knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        for tensor in tensors:
            there = self._known.get(tensor.untyped_storage().data_ptr())
            if there is None or there.expired():
                return False
        return True

    def _read(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Note that the host reads values of these tensors."""
        if not self._knows(tensors):
            self._note_trouble(what)

    def _note_trouble(self, what: str) -> None:
        if self.trouble is None and not _initialises():
            self.trouble = f"{what} that an emulated GPU does not compute, at {_users_line()}"
            self.first_trouble = self.first_trouble or self.trouble

    def _constant(self, operator: Operator, args: tuple[Any, ...]) -> bool | None:
        """Return the value of all elements of the result where that follows from floats being finite."""
        name = operator.name
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return None
        if name in _OF_FINITE and not self._knows((first,)):
            return name == "isfinite"
        if name in ("eq", "ne") and len(args) == 2 and not self._knows((first,)):
            same = first is args[1]
            infinite = isinstance(args[1], float) and abs(args[1]) == float("inf")
            return (name == "eq") == same if same or infinite else None
        found = [self._constant_of(one) for one in args[:2]]
        return combined(name, found) if found[0] is not None else None

    def _constant_of(self, tensor: object) -> bool | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        there = self._constants.get(tensor.untyped_storage().data_ptr())
        return None if there is None or there[0].expired() else there[1]


def _users_line() -> str:
    for frame, line in walk_stack(sys._getframe(1)):  # noqa: SLF001 -- the interpreter's, documented
        if not frame.f_code.co_filename.startswith((_OURS, _TORCHS, "<")):
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"


def _initialises() -> bool:
    """Return whether weights are being initialised: some are drawn again as long as values are out of a range."""
    frames = walk_stack(sys._getframe(1))  # noqa: SLF001 -- the interpreter's, documented
    return any(frame.f_code.co_filename == torch.nn.init.__file__ for frame, _ in frames)
