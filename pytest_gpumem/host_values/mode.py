"""Values of small tensors of an emulated GPU, computed on the host where all operands are known.

Kernels of an emulated GPU do nothing, but its memory is the host's. So an operator whose tensors are all known and small is
run once more, on the host, on the same memory. Everything else is *unknown*: its bytes mean nothing, and its floats are taken
as finite. So is what the host copies or computes from it. Reads of it by the host are noted in `HostValues.reads`.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.emulation.libraries import BY_STEM
from pytest_gpumem.host_values.collectives import SENDS_ONLY, complete
from pytest_gpumem.host_values.constants import Constant, Constants, comparison_of_floats
from pytest_gpumem.host_values.exclusions import Choices, Exclusions
from pytest_gpumem.host_values.host_operators import (
    BIGGEST_COPY,
    Operator,
    coalesced_on_host,
    compute,
    covers_its_storage,
    drawing_as,
    has_storage,
    is_exact,
    is_ordinary,
    is_small,
    on_host,
    on_the_same_memory,
    operator_of,
    parts_of,
    sparse_key,
    tensors_among,
)
from pytest_gpumem.host_values.lent_memory import LentMemory
from pytest_gpumem.host_values.reads import Reads
from pytest_gpumem.host_values.routing import CHOOSING, MAKE_ZEROS, Choosing
from pytest_gpumem.host_values.unknown_float import UNKNOWN, is_unknown_number
from pytest_gpumem.torch_support.private_api import (
    beneath_modes,
    is_higher_order,
    is_tracing,
    never_compiled,
    run_kernel,
    untraced,
    unwrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.values.option_words import Routing

_NO_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "record_stream"}
)
_DRAWN = frozenset({"randint", "randint_like", "random_", "randperm"})
"""Random operators that the host draws, as integers are indices."""
_SIZED = frozenset({"arange", "range"})
"""Operators that make as many elements as a number says; so do those of `_RESIZED`."""
_RESIZED = ("upsample_", "_upsample_")
_READ = {
    "equal": "tensors are compared",
    "allclose": "tensors are compared",
    "_local_scalar_dense": "a value is read",
    "item": "a value is read",
    "is_nonzero": "a value is read",
    "_unique": "unique reads values",
    "_unique2": "unique reads values",
    "unique_dim": "unique reads values",
    "unique_dim_consecutive": "unique_consecutive reads values",
}
"""Clauses for operators that read values; the others are told by their names."""
_COUNTED = frozenset({"nonzero", "_coalesce"})
"""Operators whose kernel runs on the GPU's memory and is told how many elements the result has."""
_NUMBERS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
"""Operators that read a single number."""
_SCALED = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_non_finite_check_and_unscale_"})
"""Operators whose second argument says whether a gradient is infinite or not a number; it stays as it is."""

NO_EIGENVALUES = f"the emulated GPU lacks torch.linalg.eig of libcusolver: {BY_STEM['libcusolver'].why}"
"""The error of an operator's call, raised in place of asking the library's stand-in."""
_MOST_NOTED = 4096
"""Storages that are noted before those that are gone are forgotten."""


class _Known(NamedTuple):
    """A storage of the GPU whose values are known."""

    storage: StorageWeakRef
    nbytes: int
    routing: Routing | None = None
    """The assumption that the values follow from, if there is one."""


class _Unknown(NamedTuple):
    """A storage of the host of which not all values are known."""

    storage: StorageWeakRef
    of_floats: bool
    """True if the unknown values are made of floats that Python had, each by itself."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator that makes or changes values, or reads them."""

    func: Any
    operator: Operator
    args: tuple[Any, ...]
    named: dict[str, Any]
    tensors: list[torch.Tensor]
    """The tensors that it is given."""

    def run(self) -> Any:
        return self.func(*self.args, **self.named)

    @property
    def on_gpu(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors if tensor.is_cuda]

    def given(self) -> dict[str, Any]:
        """Return all that it is given, by the names of its arguments."""
        arguments = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        by_place = dict(zip((one.name for one in arguments), self.args, strict=False))
        return {one.name: one.default_value for one in arguments} | by_place | self.named

    def has_numbers_for_tensors(self) -> bool:
        """Return whether numbers take the place of tensors, for example 2 in ``x * 2``. A kernel refuses them."""
        arguments = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        return any(
            isinstance(value, (int, float, complex)) and str(argument.type) == "Tensor"
            for argument, value in zip(arguments, self.args, strict=False)
        )

    def changed(self) -> list[torch.Tensor]:
        """Return the tensors that it writes to."""
        operator, args, named = self.operator, self.args, self.named
        if operator.writes_if is not None and not args[operator.writes_if]:
            return []
        written = [args[at] for at in operator.written if at < len(args)]
        changed = tensors_among((*written, *(named[name] for name in operator.written_names if name in named)))
        return [tensor for tensor in changed if tensor is not args[1]] if operator.name in _SCALED else changed


class _Answer(local):
    """The answer to each read by C++ in this thread while a kernel asks how many elements its result has."""

    number: int | None = None

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Answer with this number."""
        outer, self.number = self.number, number
        try:
            yield
        finally:
            self.number = outer


class HostValues(TorchDispatchMode):
    """Dispatch mode that computes known small tensors on the host, and notices reads of uncomputed values.

    `pytest_gpumem.host_values.scope` enters it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()
        self._operators: dict[Any, Operator] = {}
        self._known: dict[int, _Known] = {}
        """The GPU's storages whose values are known, by address."""
        self.captured: dict[int, StorageWeakRef] | None = None
        """While a CUDA graph is captured: the GPU's storages that it writes to, by address."""
        self._unknown: StorageWeakRef | None = None
        """The storage of the tensor that was last noted as not known."""
        self._unknown_on_host: dict[int, _Unknown] = {}
        """The host's storages whose values are not known, by address."""
        self.lent = LentMemory()
        self.choosing = Choosing(self.is_unknown)
        self.constants = Constants(self._is_uncertain)
        self.exclusions = Exclusions(self._is_uncertain)
        self._has_left = False
        """True if an uncomputed value has ever been on the host."""
        self.values_read = 0
        """The number of uncomputed values that were read."""
        self.is_watched = False
        """True if a method that reads runs, which notes what it reads."""
        self.answer = _Answer()
        self._kernel: Operator | None = None
        """The operator whose kernel runs, if the operators that it calls are seen."""
        self._made_of_unknown = False
        """True if `torch.tensor` is making a tensor of others, which are not all known."""

    supports_higher_order_operators = True
    """Asks torch to pass operators that take functions to this mode, as `torch.cond`. Without it torch raises."""

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
        if is_tracing():
            with untraced():  # this call is in the trace already
                return self.__torch_dispatch__(func, types, args, kwargs)
        named = kwargs or {}
        for kind in types:
            if not is_ordinary(kind):
                # One without memory has nothing to compute; what others are made of comes here again.
                return func(*args, **named) if kind.__name__ == "FakeTensor" else NotImplemented
        if is_higher_order(func):
            return self._run_functions(func, args, named)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operator_of(func)
        if any(isinstance(args[at], (int, float, complex)) for at in operator.only_tensors if at < len(args)):
            # A script's constant: torch gives a mode the number that the tensor was made of.
            args = tuple(torch.as_tensor(one) if at in operator.only_tensors else one for at, one in enumerate(args))
        is_whole = torch.is_inference_mode_enabled() and (operator.view or operator.reads)
        if is_whole or self._kernel is not None or operator.name == "to":
            # These leave operators whole that are made of others, and what those read would not be seen.
            self._read_by(operator, args, named)
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        return (self._view if operator.view else self._operate)(func, operator, args, named)

    def _operate(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator that makes or changes values, or reads them."""
        call = _Call(func, operator, args, named, tensors_among((*args, *named.values())))
        device = named.get("device")
        is_hosts = not call.on_gpu and (device is None or torch.device(device).type != "cuda")
        if is_hosts and not self._has_left:
            return call.run()
        known = self._determines(call)
        read = self._read_by(operator, args, named) if operator.reads else []
        if read:
            if operator.name == "_local_scalar_dense":
                return self._read_number(call, known)
            if operator.name in _COUNTED and call.on_gpu:  # `nonzero` runs by way of `NativeReads.positions`
                return self._coalesce(call) if operator.name == "_coalesce" else call.run()
            is_whole = all(map(has_storage, call.tensors)) and not operator.calls_readers
            if is_whole and any(tensor.is_cuda for tensor in read):
                routing = self._routing_among(read)
                given = self._repeatable((args, named))
                return self._moved(func(*on_host(given[0]), **on_host(given[1])), call.on_gpu[0].device, routing)
            known = self._knows(read)  # what it makes on the host is of these
        if is_hosts:
            return self._run_on_host(call, known)
        return self._communicate(call) if operator.collective else self._run(call, known)

    def _run_functions(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator that takes functions (`torch.cond`) beneath this mode, and its functions within."""

        def within(argument: Any) -> Any:
            if isinstance(argument, tuple):  # of a mask: its sizes, its blocks and its function
                return tuple(map(within, argument))
            if not callable(argument):
                return argument

            # A function may be a module: the compiler makes one of it.
            def run(*given: Any, **more: Any) -> Any:
                with self:
                    return argument(*given, **more)

            return run

        result = func(*map(within, args), **{name: within(argument) for name, argument in named.items()})
        for tensor in tensors_among((result,)):
            if is_ordinary(type(tensor)) and self.is_unknown(tensor):
                self.note_unknown(tensor)
        return result

    def _read_number(self, call: _Call, known: bool) -> Any:
        noted = self.constants.noted_as(call.args[0])
        if noted is not None:
            self.reads.of_float(noted)
        value = call.run()
        if known or not isinstance(value, float):
            return value
        self.values_read += 1
        if not self.is_watched:  # C++, or a script that torch has compiled
            self.reads.of_float()
        return UNKNOWN

    def _read_by(self, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Note what the host reads in a call of an operator, and return the tensors that it reads."""
        read = operator.read_of(args, named)
        for tensor in read:
            if operator.name in _NUMBERS and self.constants.noted_as(tensor) is not None:
                continue  # it is noted where it is read
            # Floats that are read one by one are followed further.
            if self.is_unknown(tensor) and not (operator.name in _NUMBERS and not is_exact(tensor)):
                reader = operator if self._kernel is None else self._kernel
                self.reads.invalid(_READ.get(reader.name) or f"{reader.name.strip('_')} reads values")
                break
            self._note_routing(self._routing_of(tensor))
        return read

    def _repeatable(self, given: Any) -> Any:
        """Return arguments with zeros in place of unknown values, because their memory holds what an earlier tensor left."""
        if isinstance(given, torch.Tensor):
            if not given.is_cuda or not self.is_unknown(given) or (is_exact(given) and is_small((given,))):
                return given
            return torch.zeros((), dtype=given.dtype).expand(given.shape)
        if isinstance(given, dict):
            return {name: self._repeatable(value) for name, value in given.items()}
        return type(given)(map(self._repeatable, given)) if type(given) in (list, tuple) else given

    def _determines(self, call: _Call) -> bool:
        """Return whether all that an operator is given is known."""
        operator, tensors = call.operator, call.tensors
        given = tensors[1:] if operator.overwrites and tensors and tensors[0] is call.args[0] else tensors
        known = self._knows(given)
        if not given and self._kernel is not None and not self._kernel.calls_readers:
            known = False  # a sparse tensor's kernel writes to zeros that it makes, and no operator shows that
        if operator.name == "isin":
            # A token is none of those that end a text, also where it is chosen by an assumption.
            known = (known and self._routing_among(given) is None) or self.exclusions.decide(*call.args[:2])
        if known and self._has_left and operator.name in ("_to_copy", "copy_"):
            # They may come from where they were not followed, such as a file.
            known = not any(tensor.device.type == "cpu" and _contains_unknown(tensor) for tensor in given)
        if self._has_left and any(map(is_unknown_number, (*call.args, *call.named.values()))):
            known = False
            if operator.name in _SIZED or operator.name.startswith(_RESIZED):
                self.reads.invalid("a size is made of a value")
        return known

    def _run(self, call: _Call, known: bool) -> Any:
        """Run an operator on the GPU; and on the host, where all that it is given is known and small."""
        operator, args = call.operator, call.args
        if operator.name == "linalg_eig":  # asks by itself whether its input is finite, and says that it is not
            raise RuntimeError(NO_EIGENVALUES)
        room = args[0].untyped_storage().nbytes() if operator.name == "resize_" else None
        result = self._run_kernel(call, "CUDA")
        made = tensors_among((result,))
        is_reshaped = room is not None and args[0].untyped_storage().nbytes() == room  # on the same bytes
        # `torch.export` makes tensors without memory beneath this mode.
        if is_reshaped or not all(is_ordinary(type(tensor)) for tensor in made):
            return result
        if not made and not operator.written and not operator.written_names:
            # What takes less memory is not assumed of a mask that is not known.
            return result and known if operator.calls_readers else result
        changed = call.changed()
        outcome = [tensor for tensor in (*made, *changed) if is_ordinary(type(tensor)) and has_storage(tensor)]
        self._clear_unwritten(made if len(outcome) < len(made) + len(changed) else ())
        # That a token is none of those that end a text follows from what cannot be chosen, and not from what was.
        routing = None if operator.name == "isin" else self._routing_among(call.tensors)
        is_filled = known and self._is_filled(operator, outcome)
        constant = None if is_filled else self._constant_of(call, made, known)
        excluded = None if known and routing is None else self.exclusions.result(operator, args)
        chosen = None if known else self._choose(call, made)
        mask = None if known or self.choosing.routing is None else self.choosing.mask(operator.name, args)
        if constant is None:
            computed = self._compute(call, known, result, outcome, routing)
            becomes_known = known and (computed or is_filled)
        else:
            computed = False
            becomes_known = constant.noted is None and is_small(tensor for tensor in outcome if tensor.is_cuda)
        ids = {id(tensor) for tensor in changed}
        for tensor in outcome:
            if not tensor.is_cuda:
                has_values = all(is_exact(one) and is_small((one,)) for one in call.on_gpu)
                self._note_routing(routing)
                self._note_copy(tensor, known and tensor.nbytes <= BIGGEST_COPY, has_values=has_values)
                continue
            whole = id(tensor) not in ids or covers_its_storage(tensor)
            # The rest of what is written in part is as it was.
            is_chosen = tensor is chosen
            is_known = is_chosen or (becomes_known and (whole or self._knows((tensor,))))
            by = self.choosing.routing if is_chosen else routing or (None if whole else self._routing_of(tensor))
            self._note(tensor, is_known, constant if whole else None, has_values=computed, routing=by)
            if excluded is not None and whole and self.captured is None:
                found = replace(excluded, are_new=False) if is_chosen and isinstance(excluded, Choices) else excluded
                self.exclusions.note(tensor, found, has_values=computed or is_chosen)
            if mask is not None and whole and tensor.shape == mask.shape:
                self.choosing.note_mask(tensor, mask)
            if constant is not None and is_small((tensor,)):
                on_the_same_memory(tensor).fill_(constant.value)
        return result

    def _constant_of(self, call: _Call, made: list[torch.Tensor], known: bool) -> Constant | None:
        return self.constants.filled(call.operator, made) if known else self.constants.result(call.operator, call.args)

    def _choose(self, call: _Call, made: list[torch.Tensor]) -> torch.Tensor | None:
        """Write the indices of a choice among uncomputed scores by the assumed routing, and return them, if there is one."""
        if self.choosing.routing is None or call.operator.name not in CHOOSING or self.captured is not None:
            return None
        given, indices = call.given(), made[-1] if made else None
        if indices is None or indices.dtype != torch.int64 or not {"dim", "num_samples"} & given.keys():
            return None
        scores = self.exclusions.scores_of(given["self"])
        written = self.choosing.choose(given, on_the_same_memory(indices), None if scores is None else scores.excluded)
        return indices if written else None

    def _is_filled(self, operator: Operator, outcome: list[torch.Tensor]) -> bool:
        """Return whether an operator has made zeros that an assumed routing may be written to."""
        return self.choosing.routing is not None and operator.name in MAKE_ZEROS and is_small(outcome, routed=True)

    def _run_kernel(self, call: _Call, device_type: str) -> Any:
        """Run an operator, and see those that its kernel calls if values may depend on what these read."""
        key = device_type if call.operator.calls_readers else None
        for tensor in call.tensors if device_type == "CUDA" else ():
            if tensor.layout is not torch.strided:
                key = sparse_key(call.tensors)
        if key is None or self._kernel is call.operator or call.has_numbers_for_tensors():
            return call.run()
        outer, self._kernel = self._kernel, call.operator
        try:
            with self:
                return run_kernel(call.func, key, call.args, call.named)
        finally:
            self._kernel = outer

    def _clear_unwritten(self, made: Iterable[torch.Tensor]) -> None:
        """Clear the indices of new sparse tensors that nothing has written: on the host they would point anywhere."""
        for tensor in made:
            if tensor.is_cuda and is_ordinary(type(tensor)) and not has_storage(tensor):
                for part in filter(self.is_unknown, parts_of(tensor)):
                    self._note(part, False)

    def _coalesce(self, call: _Call) -> Any:
        """Run ``coalesce`` with the true number of distinct indices, or with the number of all if they are unknown.

        Example: the indices 0, 2, 2 are known. The kernel reads that two are distinct, and the result holds 0 and 2.
        """
        given = call.args[0]
        indices, values = parts_of(given)
        if self.is_unknown(indices):
            with self.answer.of(len(values)):
                result = call.run()
            self._clear_unwritten([result])
            return result
        known = not self.is_unknown(values) and is_small((indices, values))
        distinct = coalesced_on_host(indices, values if known else None, given.shape)
        with self.answer.of(parts_of(distinct)[0].shape[1]):
            result = call.run()
        for part, true, is_known in zip(parts_of(result), parts_of(distinct), (True, known), strict=True):
            if is_known:
                on_the_same_memory(part).copy_(true)
            self._note(part, is_known and part.nbytes <= BIGGEST_COPY)
        return result

    @staticmethod
    def _compute(call: _Call, known: bool, result: Any, outcome: list[torch.Tensor], routing: Routing | None) -> bool:
        """Run an operator of the GPU on the host, too, and return whether that gave it values."""
        operator, made = call.operator, tensors_among((result,))
        if operator.reads or operator.name in _NO_VALUES or (operator.random and operator.name not in _DRAWN):
            return False
        # Of unknown integers, too: a counter that one is added to goes on, and loops that wait for it end.
        if not known and not all(map(is_exact, (*call.tensors, *outcome))):
            return False
        there = (*call.on_gpu, *(one for one in outcome if one.is_cuda))
        if not is_small(there, routed=routing is not None and known) or not all(map(has_storage, made)):
            return False
        if not operator.random:
            return compute(call.func, call.args, call.named, result)
        with drawing_as(call.named, made[0].device) as drawing:
            return compute(call.func, call.args, drawing, result)

    def _run_on_host(self, call: _Call, known: bool) -> Any:
        """Run an operator of the host, whose result is known as far as what it is given."""
        operator, args = call.operator, call.args
        result = self._run_kernel(call, "CPU")
        made = tensors_among((result,))
        changed = call.changed()
        constant, of_floats = None, False
        if not known:
            constant = self.constants.result(operator, args)
            of_floats = all(map(self._is_of_floats, call.tensors))
            if of_floats and constant is None:
                constant = comparison_of_floats(operator, args, result)
        if constant is not None and constant.noted is None:
            known = True
            for tensor in made:
                tensor.fill_(constant.value)
        ids = {id(tensor) for tensor in changed}
        for tensor in (*made, *changed):
            if is_ordinary(type(tensor)):
                is_new = id(tensor) not in ids
                is_known = known or (is_new and operator.name in _NO_VALUES)
                whole = is_new or covers_its_storage(tensor)
                self._note_on_host(tensor, is_known, whole=whole, of_floats=of_floats)
                if has_storage(tensor):
                    self.constants.note(tensor.untyped_storage(), constant if whole else None)
        return result

    def _view(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator whose result is existing memory, and is known as far as that was."""
        if operator.name == "lift_fresh" and has_storage(args[0]):
            # `torch.tensor` has made it: of a tensor, which came by here, or of the host's values, which did not.
            storage = args[0].untyped_storage()
            known = not self._made_of_unknown and not (self._has_left and _contains_unknown(args[0]))
            if not args[0].is_cuda:
                if not known:
                    self._note_on_host(args[0], known, of_floats=not self._made_of_unknown)
            elif self._unknown is None or self._unknown.cdata != StorageWeakRef(storage).cdata:
                self._note(args[0], known and storage.nbytes() <= BIGGEST_COPY)
        if args[0].layout is torch.sparse_coo and args[0].is_cuda:  # `transpose` copies the indices
            return self._run_kernel(_Call(func, operator, args, named, [args[0]]), "CUDA")
        return func(*args, **named)

    def _communicate(self, call: _Call) -> Any:
        """Run a collective, which NCCL's stand-in computes as if every rank did what this one does."""
        name, on_gpu = call.operator.name, call.on_gpu
        result = call.run()
        returned = tensors_among((result,))
        written = tensors_among(call.args[:1]) if call.func.namespace == "c10d" and name not in SENDS_ONLY else []
        ids = {id(tensor): tensor for tensor in (*returned, *written)}
        made = [tensor for tensor in ids.values() if tensor.is_cuda and is_ordinary(type(tensor))]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in made}
        sent = [tensor for tensor in on_gpu if tensor.untyped_storage().data_ptr() not in addresses]
        known = self._knows(sent or on_gpu) and complete(name, made, sent)
        for tensor in made:
            # Sums of half precision are not computed.
            self._note(tensor, known and tensor.nbytes <= BIGGEST_COPY and tensor.dtype != torch.float16)
        return result

    def _note(
        self,
        tensor: torch.Tensor,
        known: bool,
        constant: Constant | None = None,
        *,
        has_values: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """Note whether a tensor's memory is known; unknown integers that have no values are 0, in every process alike."""
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if self.captured is not None:
            self.captured[where] = StorageWeakRef(storage)
            known, constant = False, None
        self.constants.note(storage, constant)
        self.exclusions.forget(where)
        self.choosing.forget(where)
        if known:
            if len(self._known) > _MOST_NOTED:
                self._known = {at: one for at, one in self._known.items() if not one.storage.expired()}
            self._known[where] = _Known(StorageWeakRef(storage), storage.nbytes(), routing)
        else:
            self._known.pop(where, None)
            self._unknown = StorageWeakRef(storage)
            if is_exact(tensor) and not has_values and (storage.nbytes() <= BIGGEST_COPY or is_small((tensor,))):
                if tensor.is_contiguous():
                    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
                elif not tensor.is_conj():
                    on_the_same_memory(tensor).zero_()

    def _note_copy(self, tensor: torch.Tensor, known: bool, *, has_values: bool) -> None:
        """Note whether what was copied to the host is known; what is not is `UNKNOWN`, or 0, in every process alike."""
        self._has_left = self._has_left or not known
        self.values_read += not known
        if not known and not has_values and tensor.nbytes <= BIGGEST_COPY:
            tensor.fill_(0 if is_exact(tensor) or tensor.is_quantized else UNKNOWN)
        self._note_on_host(tensor, known, whole=covers_its_storage(tensor))

    def _note_on_host(self, tensor: torch.Tensor, known: bool, *, whole: bool = True, of_floats: bool = False) -> None:
        """Note whether a tensor of the host is known; its storage is again only if the ``whole`` of it was written."""
        if tensor.device.type != "cpu" or not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if not known and where:
            self._has_left = True
            if self.lent.holds(storage):
                if is_exact(tensor):
                    self.reads.invalid("NumPy or another library is given values")
                self.reads.of_float()
            if len(self._unknown_on_host) > _MOST_NOTED:
                kept = {at: one for at, one in self._unknown_on_host.items() if not one.storage.expired()}
                self._unknown_on_host = kept
            self._unknown_on_host[where] = _Unknown(StorageWeakRef(storage), of_floats)
        elif whole:
            self._unknown_on_host.pop(where, None)

    def _moved(self, value: Any, device: torch.device, routing: Routing | None) -> Any:
        """Return results of the host as tensors of the GPU."""
        if isinstance(value, torch.Tensor):
            there = value.to(device)
            for part in parts_of(there):
                self._note(part, part.nbytes <= BIGGEST_COPY, routing=routing)
            return there
        if isinstance(value, (list, tuple)):
            return type(value)(self._moved(one, device, routing) for one in value)
        return value

    def _knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        return not any(map(self.is_unknown, tensors))

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values were not computed."""
        if tensor.numel() == 0 or tensor.device.type not in ("cpu", "cuda"):
            return False
        if type(tensor).__name__ == "FakeTensor":
            return False  # it has no values
        if not has_storage(tensor):
            within = unwrapped(tensor)
            if within is not tensor:
                return is_ordinary(type(within)) and self.is_unknown(within)
            parts = parts_of(tensor)
            return any(map(self.is_unknown, parts)) if parts else tensor.is_cuda
        where = tensor.untyped_storage().data_ptr()
        if tensor.is_cuda:
            known = self._known.get(where)
            return known is None or known.storage.expired()
        there = self._unknown_on_host.get(where)
        return there is not None and not there.storage.expired()

    def _is_uncertain(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values were not computed, or follow from an assumed routing."""
        return self.is_unknown(tensor) or self._routing_of(tensor) is not None

    def _routing_of(self, tensor: torch.Tensor) -> Routing | None:
        """Return the assumption that a tensor's values follow from, if there is one."""
        if not self.choosing.made or not tensor.is_cuda or not has_storage(tensor):
            return None
        there = self._known.get(tensor.untyped_storage().data_ptr())
        return None if there is None or there.storage.expired() else there.routing

    def _routing_among(self, tensors: Iterable[torch.Tensor]) -> Routing | None:
        return next(filter(None, map(self._routing_of, tensors)), None) if self.choosing.made else None

    def _note_routing(self, routing: Routing | None) -> None:
        """Note that the host reads what follows from an assumption, if there is one."""
        if routing is not None:
            self.reads.of_routing(routing)

    def _is_of_floats(self, tensor: torch.Tensor) -> bool:
        """Return whether what is unknown of a tensor are floats that Python had, and nothing else."""
        if not self.is_unknown(tensor):
            return True
        return not tensor.is_cuda and self._unknown_on_host[tensor.untyped_storage().data_ptr()].of_floats

    def knows(self, address: int) -> bool:
        """Return whether what is at an address of the GPU is known, and note that it is read if a routing is assumed of it."""
        at = self._known_at(address)
        if at is not None:
            self._note_routing(self._known[at].routing)
        return at is not None

    def _known_at(self, address: int) -> int | None:
        """Return where the known storage begins that holds an address of the GPU."""
        there = (at for at, one in self._known.items() if at <= address < at + one.nbytes and not one.storage.expired())
        return next(there, None)

    def forget_at(self, address: int) -> None:
        """Take the storage that holds an address of the GPU as not known, if there is one."""
        at = self._known_at(address)
        if at is not None:
            del self._known[at]
            self.constants.forget(at)

    def has_left(self) -> None:
        """Note that an uncomputed value is on the host from now on, where it may become part of anything."""
        self._has_left = True

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take tensors as not known, as what is written to them is not seen."""
        for tensor in tensors:
            if not is_ordinary(type(tensor)):
                parts, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
                self.forget(getattr(tensor, part) for part in parts)
            else:
                self.note_unknown(tensor)

    def note_copy(self, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Note a copy that this mode did not see: it is known as far as the original is."""
        for part, of in zip(parts_of(copy), parts_of(original), strict=False):
            routing = self._routing_of(of)
            known = not self.is_unknown(of) and part.untyped_storage().nbytes() <= BIGGEST_COPY
            if part.is_cuda:
                self._note(part, known, routing=routing)
            elif not known:
                self._note_on_host(part, known)

    def note_known(self, tensor: torch.Tensor) -> None:
        """Note that a tensor of the GPU has true values, which no operator has written."""
        self._note(tensor, tensor.untyped_storage().nbytes() <= BIGGEST_COPY)

    def note_unknown(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's values were not computed."""
        if tensor.is_cuda:
            self._note(tensor, False)
        else:
            self._note_on_host(tensor, False)

    def has_moved(self, where: int, storage: torch.UntypedStorage) -> None:
        """Note that a storage of the host is no longer at the address ``where`` that it had."""
        there = self._unknown_on_host.get(where)
        if there is not None and not there.storage.expired():
            self._unknown_on_host[storage.data_ptr()] = _Unknown(StorageWeakRef(storage), there.of_floats)

    @contextmanager
    def making(self, of_unknown: bool) -> Iterator[None]:
        """Note that what `torch.tensor` makes within is not known, if it is made ``of_unknown`` tensors."""
        before, self._made_of_unknown = self._made_of_unknown, of_unknown
        try:
            yield
        finally:
            self._made_of_unknown = before


def _contains_unknown(tensor: torch.Tensor) -> bool:
    """Return whether a new tensor was made of numbers among which are uncomputed ones."""
    if not tensor.is_floating_point() or not is_small((tensor,)):
        return False
    with beneath_modes():  # a program's mode may trace what is done here
        return bool((on_host(tensor) == UNKNOWN).any())
