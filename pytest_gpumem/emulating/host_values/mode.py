"""Compute the values of small tensors on an emulated GPU, and record when the program reads any other value.

An emulated GPU's kernels do nothing, but its memory is host memory. If all operands of an operator have known values and are
small, the dispatch mode `HostValues` runs the operator again on the CPU, in the same memory, so its result is known too. All
other values are *unknown*. Unknown floats are assumed to be finite, and the bytes in memory are meaningless. Small unknown
integers are 0, and the CPU computes operators on them. A copy of an unknown value is unknown, and so is a result computed from
an unknown value. `HostValues.reads` records each line where the program reads an unknown value.

Example: a program on an emulated H100. ::

    x = torch.tensor([1.0, 2.0], device="cuda")
    (x * 2).tolist()            # [2.0, 4.0]: both operands are known and small, so the host computes the product
    loss = torch.randn(4, device="cuda").mean()   # random floats are never drawn, so they and the mean are unknown
    value = loss.item()         # an `UnknownFloat`, 2**-120 = 7.5e-37; the read is counted with its line
    if value < 3.0: ...         # recorded as a branch decided by an uncomputed value, with the line
    int(value)  # 0; "the program makes an integer from a value that an emulated GPU does not compute, at train.py:6"

The last line makes the measurement invalid (a *trouble*), because the integer may become the size of a tensor. The test is
then ``unmeasured``, with the quoted sentence as its reason.

`HostValues` has *notes* about tensors: entries in dicts whose keys are storage addresses. For example, ``torch.ones(4,
dtype=torch.int64)`` gets the storage at ``0x5ffffe001600``, and the note ``{0x5ffffe001600: _KnownStorage(storage,
nbytes=32)}`` marks its 32 bytes as known. A view such as ``ones[2:]`` begins 16 bytes later in the same storage, so the note
is about the view too. A note contains a weak reference to its storage and expires when the storage is freed, because the
allocator may reuse the address.
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

from pytest_gpumem.emulating.emulation.libraries import BY_STEM
from pytest_gpumem.emulating.host_values.collectives import SENDS_ONLY, complete
from pytest_gpumem.emulating.host_values.constants import Constant, Constants, comparison_of_floats
from pytest_gpumem.emulating.host_values.exclusions import Choices, Exclusions
from pytest_gpumem.emulating.host_values.host_operators import (
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
from pytest_gpumem.emulating.host_values.lent_memory import LentMemory
from pytest_gpumem.emulating.host_values.reads import Reads
from pytest_gpumem.emulating.host_values.routing import CHOOSING, MAKE_ZEROS, AssumedRouting
from pytest_gpumem.emulating.host_values.unknown_float import UNKNOWN, is_unknown_number
from pytest_gpumem.torch_support.private_api.compiler import is_tracing, never_compiled, untraced
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes, is_higher_order, run_kernel
from pytest_gpumem.torch_support.private_api.tensors import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.facts.values.option_words import Routing

_NO_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "record_stream"}
)
_DRAWN = frozenset({"randint", "randint_like", "random_", "randperm"})
"""Random operators that the CPU computes too, because programs use the drawn integers as indices."""
_SIZED = frozenset({"arange", "range"})
"""Operators for which a number argument decides the size of the result, like all operators with a prefix in `_RESIZED`."""
_RESIZED = ("upsample_", "_upsample_")
_READ = {
    "equal": "the program compares tensors",
    "allclose": "the program compares tensors",
    "_local_scalar_dense": "a value is read",
    "item": "a value is read",
    "is_nonzero": "a value is read",
    "_unique": "unique reads values",
    "_unique2": "unique reads values",
    "unique_dim": "unique reads values",
    "unique_dim_consecutive": "unique_consecutive reads values",
}
"""The beginning of the message about a read, by the operator that reads. For all other operators, the message begins with the
operator's name."""
_COUNTED = frozenset({"nonzero", "_coalesce"})
"""Operators whose CUDA kernel runs and reads the size of its result. `HostValues.answer` has the number for the kernel to
read."""
_NUMBERS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
"""Operators that convert a tensor's only element to a Python number."""
_SCALED = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_non_finite_check_and_unscale_"})
"""Operators that write a flag for infinite or NaN gradients to their second argument. `HostValues` ignores this write, because
unknown gradients are assumed to be finite."""

NO_EIGENVALUES = f"the emulated GPU lacks torch.linalg.eig of libcusolver: {BY_STEM['libcusolver'].why}"
"""The error message for a call to ``torch.linalg.eig`` on an emulated GPU."""
_MOST_NOTED = 4096
"""If there are more notes than this, the notes about freed storages are deleted."""


class _KnownStorage(NamedTuple):
    """A note about a storage on the GPU: all its values are known."""

    storage: StorageWeakRef
    nbytes: int
    routing: Routing | None = None
    """The assumed routing on which the values depend; ``None`` if they depend on no assumption."""


class _UnknownStorage(NamedTuple):
    """A note about a storage on the host: at least one of its values is unknown."""

    storage: StorageWeakRef
    of_floats: bool
    """True if the program made this storage's unknown values from Python floats (``torch.tensor(loss.item())``).
    `UnknownFloat` has already recorded how these floats were used."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to an operator that creates, changes or reads values. Operators that only return a view are not such calls."""

    func: Any
    operator: Operator
    args: tuple[Any, ...]
    named: dict[str, Any]
    tensors: list[torch.Tensor]
    """All tensors in ``args`` and ``named``, including tensors in lists."""

    def run(self) -> Any:
        return self.func(*self.args, **self.named)

    @property
    def on_gpu(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors if tensor.is_cuda]

    def arguments(self) -> dict[str, Any]:
        """Return the values of all arguments by parameter name, including default values."""
        parameters = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        by_place = dict(zip((parameter.name for parameter in parameters), self.args, strict=False))
        return {parameter.name: parameter.default_value for parameter in parameters} | by_place | self.named

    def has_numbers_for_tensors(self) -> bool:
        """Return whether a number is passed for a tensor argument, for example 2 in ``x * 2``.

        In a direct call, the kernel raises an exception for such a number.
        """
        arguments = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        return any(
            isinstance(value, (int, float, complex)) and str(argument.type) == "Tensor"
            for argument, value in zip(arguments, self.args, strict=False)
        )

    def changed(self) -> list[torch.Tensor]:
        """Return the arguments to which the operator writes."""
        operator, args, named = self.operator, self.args, self.named
        if operator.writes_if is not None and not args[operator.writes_if]:
            return []
        written = [args[at] for at in operator.written if at < len(args)]
        changed = tensors_among((*written, *(named[name] for name in operator.written_names if name in named)))
        return [tensor for tensor in changed if tensor is not args[1]] if operator.name in _SCALED else changed


class _Answer(local):
    """The number that a kernel in this thread reads as the size of its result, for example in ``nonzero``."""

    number: int | None = None

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Let kernels within the context read this number."""
        outer, self.number = self.number, number
        try:
            yield
        finally:
            self.number = outer


class HostValues(TorchDispatchMode):
    """Dispatch mode for an emulated GPU. It computes small tensors on the CPU, and records when the program reads uncomputed
    values.

    `pytest_gpumem.emulating.host_values.scope` enters this mode once in a process. The module's docstring has an example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()
        self._operators: dict[Any, Operator] = {}
        self._known: dict[int, _KnownStorage] = {}
        """The GPU storages whose values are known, by address. The values in all other GPU storages are unknown."""
        self.captured: dict[int, StorageWeakRef] | None = None
        """The GPU storages to which operators wrote during the current CUDA graph capture, by address. ``None`` if nothing is
        captured."""
        self._unknown: StorageWeakRef | None = None
        """The GPU storage most recently marked as unknown."""
        self._unknown_on_host: dict[int, _UnknownStorage] = {}
        """The host storages with unknown values, by address. The values in all other host storages are known."""
        self.lent = LentMemory()
        self.choosing = AssumedRouting(self.is_unknown)
        self.constants = Constants(self._is_uncertain)
        self.exclusions = Exclusions(self._is_uncertain)
        self._has_left = False
        """True after the first unknown value was copied to the host. Until then, all host tensors are known."""
        self.values_read = 0
        """Counts how often the host has read unknown values."""
        self.is_watched = False
        """True while a method from `watched_methods` runs, for example ``tolist``. Such a method records its read itself."""
        self.answer = _Answer()
        self._kernel: Operator | None = None
        """The operator whose kernel is running, if this mode also intercepts the kernel's own calls to operators."""
        self._made_of_unknown = False
        """True while `torch.tensor` makes a tensor from a list with unknown tensors."""

    supports_higher_order_operators = True
    """Ask torch to pass operators with function arguments, such as `torch.cond`, to this mode too. Otherwise torch raises an
    exception for these operators."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so torch.compile compiles although this mode is active."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. If this returned True, torch would add a wrapper that loads the compiler into every process."""
        return False

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_tracing():
            with untraced():  # the trace already contains this call
                return self.__torch_dispatch__(func, types, args, kwargs)
        named = kwargs or {}
        for kind in types:
            if not is_ordinary(kind):
                # A fake tensor has no memory. Any other subclass calls operators on its inner tensors, and these calls reach
                # this mode.
                return func(*args, **named) if kind.__name__ == "FakeTensor" else NotImplemented
        if is_higher_order(func):
            return self._run_functions(func, args, named)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operator_of(func)
        if any(isinstance(args[at], (int, float, complex)) for at in operator.only_tensors if at < len(args)):
            # For a constant tensor in TorchScript, torch passes the number from which the tensor was made.
            args = tuple(torch.as_tensor(arg) if at in operator.only_tensors else arg for at, arg in enumerate(args))
        is_undecomposed = torch.is_inference_mode_enabled() and (operator.view or operator.reads)
        if is_undecomposed or self._kernel is not None or operator.name == "to":
            # In these cases torch passes a composite operator to this mode as a whole. Decompose the operator, because
            # otherwise its inner operators could read values unseen.
            self._read_by(operator, args, named)
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        return (self._view if operator.view else self._operate)(func, operator, args, named)

    def _operate(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator that makes, changes or reads values."""
        call = _Call(func, operator, args, named, tensors_among((*args, *named.values())))
        device = named.get("device")
        is_hosts = not call.on_gpu and (device is None or torch.device(device).type != "cuda")
        # As long as no unknown value was copied to the host, all host tensors are known.
        if is_hosts and not self._has_left:
            return call.run()
        has_known_inputs = self._determines(call)
        read = self._read_by(operator, args, named) if operator.reads else []
        if read:
            if operator.name == "_local_scalar_dense":
                return self._read_number(call, has_known_inputs)
            if operator.name in _COUNTED and call.on_gpu:  # `NativeReads.positions` computes `nonzero`
                return self._coalesce(call) if operator.name == "_coalesce" else call.run()
            runs_on_host = all(map(has_storage, call.tensors)) and not operator.calls_readers
            if runs_on_host and any(tensor.is_cuda for tensor in read):
                routing = self._routing_among(read)
                repeatable = self._repeatable((args, named))
                result = func(*on_host(repeatable[0]), **on_host(repeatable[1]))
                return self._to_gpu(result, call.on_gpu[0].device, routing)
            has_known_inputs = self._knows(read)  # only the values in `read` affect the result
        if is_hosts:
            return self._run_on_host(call, has_known_inputs)
        return self._communicate(call) if operator.collective else self._run(call, has_known_inputs)

    def _run_functions(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator with function arguments (`torch.cond`) without this mode, but its functions with this mode."""

        def within(argument: Any) -> Any:
            if isinstance(argument, tuple):  # flex_attention gets its mask as a tuple with a function
                return tuple(map(within, argument))
            if not callable(argument):
                return argument

            # The function may be a module, because the compiler wraps functions in modules.
            def run(*function_args: Any, **function_named: Any) -> Any:
                with self:
                    return argument(*function_args, **function_named)

            return run

        result = func(*map(within, args), **{name: within(argument) for name, argument in named.items()})
        for tensor in tensors_among((result,)):
            if is_ordinary(type(tensor)) and self.is_unknown(tensor):
                self.note_unknown(tensor)
        return result

    def _read_number(self, call: _Call, has_known_inputs: bool) -> Any:
        noted = self.constants.noted_as(call.args[0])
        if noted is not None:
            self.reads.of_float(noted)
        value = call.run()
        if has_known_inputs or not isinstance(value, float):
            return value
        self.values_read += 1
        if not self.is_watched:  # C++ code or TorchScript reads the value
            self.reads.of_float()
        return UNKNOWN

    def _read_by(self, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors whose values an operator call reads on the host, and record the read if a value is unknown."""
        read = operator.read_of(args, named)
        for tensor in read:
            if operator.name in _NUMBERS and self.constants.noted_as(tensor) is not None:
                continue  # `_read_number` records this read
            # If the program reads a single unknown float, it gets an `UnknownFloat`, which records later how it is used.
            if self.is_unknown(tensor) and not (operator.name in _NUMBERS and not is_exact(tensor)):
                reader = operator if self._kernel is None else self._kernel
                self.reads.invalid(_READ.get(reader.name) or f"{reader.name.strip('_')} reads values")
                break
            self._note_routing(self._routing_of(tensor))
        return read

    def _repeatable(self, argument: Any) -> Any:
        """Replace unknown tensors among arguments by zeros, because their memory contains arbitrary bytes from earlier
        tensors.
        """
        if isinstance(argument, torch.Tensor):
            if not argument.is_cuda or not self.is_unknown(argument) or (is_exact(argument) and is_small((argument,))):
                return argument
            return torch.zeros((), dtype=argument.dtype).expand(argument.shape)
        if isinstance(argument, dict):
            return {name: self._repeatable(value) for name, value in argument.items()}
        return type(argument)(map(self._repeatable, argument)) if type(argument) in (list, tuple) else argument

    def _determines(self, call: _Call) -> bool:
        """Return whether all inputs of an operator are known, so the CPU can compute the result."""
        operator, tensors = call.operator, call.tensors
        inputs = tensors[1:] if operator.overwrites and tensors and tensors[0] is call.args[0] else tensors
        is_determined = self._knows(inputs)
        if not inputs and self._kernel is not None and not self._kernel.calls_readers:
            is_determined = False  # a sparse kernel creates zeros and then writes to their memory directly
        if operator.name == "isin":
            # `generate` searches end tokens with `isin`. Assume the answer "no end token", even for a token chosen by an
            # assumed routing.
            is_determined = (is_determined and self._routing_among(inputs) is None) or self.exclusions.decide(
                *call.args[:2]
            )
        if is_determined and self._has_left and operator.name in ("_to_copy", "copy_"):
            # A host tensor may contain the number `UNKNOWN` although no note says so, for example if it was read from a file.
            is_determined = not any(tensor.device.type == "cpu" and _contains_unknown(tensor) for tensor in inputs)
        if self._has_left and any(map(is_unknown_number, (*call.args, *call.named.values()))):
            is_determined = False
            if operator.name in _SIZED or operator.name.startswith(_RESIZED):
                self.reads.invalid("the program makes a size from a value")
        return is_determined

    def _run(self, call: _Call, has_known_inputs: bool) -> Any:
        """Run an operator on the emulated GPU, and again on the CPU if all inputs are known and small.

        If the result is unknown, partial knowledge about it is noted: all elements are equal (`constants`), some indices are
        excluded (`exclusions`), or an assumed routing chose the indices (`choosing`).
        """
        operator, args = call.operator, call.args
        if operator.name == "linalg_eig":  # the kernel would read its input and report infinite values
            raise RuntimeError(NO_EIGENVALUES)
        nbytes = args[0].untyped_storage().nbytes() if operator.name == "resize_" else None
        result = self._run_kernel(call, "CUDA")
        results = tensors_among((result,))
        is_reshaped = (
            nbytes is not None and args[0].untyped_storage().nbytes() == nbytes
        )  # `resize_` allocated no memory
        # While `torch.export` runs, results may be tensors without memory.
        if is_reshaped or not all(is_ordinary(type(tensor)) for tensor in results):
            return result
        if not results and not operator.written and not operator.written_names:
            # torch's TransformerEncoder calls such an operator to check a padding mask. If the mask is unknown, return False.
            # The encoder then does not use nested tensors, and needs more memory.
            return result and has_known_inputs if operator.calls_readers else result
        changed = call.changed()
        outcome = [tensor for tensor in (*results, *changed) if is_ordinary(type(tensor)) and has_storage(tensor)]
        self._clear_unwritten(results if len(outcome) < len(results) + len(changed) else ())
        # The result of `isin` follows from excluded tokens (`_determines`). An assumed routing does not affect the result.
        routing = None if operator.name == "isin" else self._routing_among(call.tensors)
        is_filled = has_known_inputs and self._is_filled(operator, outcome)
        constant = None if is_filled else self._constant_of(call, results, has_known_inputs)
        excluded = None if has_known_inputs and routing is None else self.exclusions.result(operator, args)
        chosen = None if has_known_inputs else self._choose(call, results)
        mask = None if has_known_inputs or self.choosing.routing is None else self.choosing.mask(operator.name, args)
        if constant is None:
            computed = self._compute(call, has_known_inputs, result, outcome, routing)
            becomes_known = has_known_inputs and (computed or is_filled)
        else:
            computed = False
            becomes_known = constant.noted is None and is_small(tensor for tensor in outcome if tensor.is_cuda)
        ids = {id(tensor) for tensor in changed}
        for tensor in outcome:
            if not tensor.is_cuda:
                has_values = all(is_exact(source) and is_small((source,)) for source in call.on_gpu)
                self._note_routing(routing)
                self._note_copy(tensor, has_known_inputs and tensor.nbytes <= BIGGEST_COPY, has_values=has_values)
                continue
            is_overwritten = id(tensor) not in ids or covers_its_storage(tensor)
            # If the operator writes to only a part of the storage, all values are known only if they were known before.
            is_chosen = tensor is chosen
            is_known = is_chosen or (becomes_known and (is_overwritten or self._knows((tensor,))))
            assumed = (
                self.choosing.routing
                if is_chosen
                else routing or (None if is_overwritten else self._routing_of(tensor))
            )
            self._note(tensor, is_known, constant if is_overwritten else None, has_values=computed, routing=assumed)
            if excluded is not None and is_overwritten and self.captured is None:
                note = replace(excluded, are_new=False) if is_chosen and isinstance(excluded, Choices) else excluded
                self.exclusions.note(tensor, note, has_values=computed or is_chosen)
            if mask is not None and is_overwritten and tensor.shape == mask.shape:
                self.choosing.note_mask(tensor, mask)
            if constant is not None and is_small((tensor,)):
                on_the_same_memory(tensor).fill_(constant.value)
        return result

    def _constant_of(self, call: _Call, results: list[torch.Tensor], has_known_inputs: bool) -> Constant | None:
        return (
            self.constants.filled(call.operator, results)
            if has_known_inputs
            else self.constants.result(call.operator, call.args)
        )

    def _choose(self, call: _Call, results: list[torch.Tensor]) -> torch.Tensor | None:
        """Let the assumed routing write the indices, if an operator such as ``topk`` chooses among uncomputed scores.

        Returns:
        The tensor with the indices. ``None`` if the operator does not choose among scores, or if no routing is assumed.
        """
        if self.choosing.routing is None or call.operator.name not in CHOOSING or self.captured is not None:
            return None
        arguments, indices = call.arguments(), results[-1] if results else None
        if indices is None or indices.dtype != torch.int64 or not {"dim", "num_samples"} & arguments.keys():
            return None
        scores = self.exclusions.scores_of(arguments["self"])
        excluded = None if scores is None else scores.excluded
        return indices if self.choosing.choose(arguments, on_the_same_memory(indices), excluded) else None

    def _is_filled(self, operator: Operator, outcome: list[torch.Tensor]) -> bool:
        """Return whether an operator created a tensor of zeros, in which a program can mark the chosen experts."""
        return self.choosing.routing is not None and operator.name in MAKE_ZEROS and is_small(outcome, routed=True)

    def _run_kernel(self, call: _Call, device_type: str) -> Any:
        """Run an operator. If the operator's kernel may call other operators that read values, this mode also intercepts the
        inner operators.
        """
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

    def _clear_unwritten(self, results: Iterable[torch.Tensor]) -> None:
        """Set unknown indices in new sparse tensors to 0, because random bytes as indices would be out of bounds."""
        for tensor in results:
            if tensor.is_cuda and is_ordinary(type(tensor)) and not has_storage(tensor):
                for part in filter(self.is_unknown, parts_of(tensor)):
                    self._note(part, False)

    def _coalesce(self, call: _Call) -> Any:
        """Run ``coalesce``, and let its kernel read how many distinct indices there are.

        Example: the known indices 0, 2, 2 have two distinct values, so the kernel reads 2 and returns the indices 0 and 2. If
        the indices are unknown, the kernel reads the number of all indices, 3.
        """
        sparse = call.args[0]
        indices, values = parts_of(sparse)
        if self.is_unknown(indices):
            with self.answer.of(len(values)):
                result = call.run()
            self._clear_unwritten([result])
            return result
        has_known_values = not self.is_unknown(values) and is_small((indices, values))
        distinct = coalesced_on_host(indices, values if has_known_values else None, sparse.shape)
        with self.answer.of(parts_of(distinct)[0].shape[1]):
            result = call.run()
        for part, true, is_known in zip(parts_of(result), parts_of(distinct), (True, has_known_values), strict=True):
            if is_known:
                on_the_same_memory(part).copy_(true)
            self._note(part, is_known and part.nbytes <= BIGGEST_COPY)
        return result

    @staticmethod
    def _compute(
        call: _Call, has_known_inputs: bool, result: Any, outcome: list[torch.Tensor], routing: Routing | None
    ) -> bool:
        """Run a GPU operator again on the CPU, and return whether this wrote the result's values."""
        operator, results = call.operator, tensors_among((result,))
        if operator.reads or operator.name in _NO_VALUES or (operator.random and operator.name not in _DRAWN):
            return False
        # Compute operators on unknown integers too. Otherwise a counter would stay at 0, and a loop could wait for it forever.
        if not has_known_inputs and not all(map(is_exact, (*call.tensors, *outcome))):
            return False
        on_gpu = (*call.on_gpu, *(tensor for tensor in outcome if tensor.is_cuda))
        if not is_small(on_gpu, routed=routing is not None and has_known_inputs) or not all(map(has_storage, results)):
            return False
        if not operator.random:
            return compute(call.func, call.args, call.named, result)
        with drawing_as(call.named, results[0].device) as drawing:
            return compute(call.func, call.args, drawing, result)

    def _run_on_host(self, call: _Call, is_determined: bool) -> Any:
        """Run an operator on host tensors, and note the result as unknown if an input is unknown."""
        operator, args = call.operator, call.args
        result = self._run_kernel(call, "CPU")
        results = tensors_among((result,))
        changed = call.changed()
        constant, of_floats = None, False
        if not is_determined:
            constant = self.constants.result(operator, args)
            of_floats = all(map(self._is_of_floats, call.tensors))
            if of_floats and constant is None:
                constant = comparison_of_floats(operator, args, result)
        if constant is not None and constant.noted is None:
            is_determined = True
            for tensor in results:
                tensor.fill_(constant.value)
        ids = {id(tensor) for tensor in changed}
        for tensor in (*results, *changed):
            if is_ordinary(type(tensor)):
                is_new = id(tensor) not in ids
                is_known = is_determined or (is_new and operator.name in _NO_VALUES)
                is_overwritten = is_new or covers_its_storage(tensor)
                self._note_on_host(tensor, is_known, is_overwritten=is_overwritten, of_floats=of_floats)
                if has_storage(tensor):
                    self.constants.note(tensor.untyped_storage(), constant if is_overwritten else None)
        return result

    def _view(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator whose result is a view of existing memory. The notes about this memory remain valid."""
        if operator.name == "lift_fresh" and has_storage(args[0]):
            # `torch.tensor` calls `lift_fresh` on its result, which it made from a tensor with a note or from Python numbers.
            storage = args[0].untyped_storage()
            is_known = not self._made_of_unknown and not (self._has_left and _contains_unknown(args[0]))
            if not args[0].is_cuda:
                if not is_known:
                    self._note_on_host(args[0], is_known, of_floats=not self._made_of_unknown)
            elif self._unknown is None or self._unknown.cdata != StorageWeakRef(storage).cdata:
                self._note(args[0], is_known and storage.nbytes() <= BIGGEST_COPY)
        if args[0].layout is torch.sparse_coo and args[0].is_cuda:  # `transpose` copies the indices of a sparse tensor
            return self._run_kernel(_Call(func, operator, args, named, [args[0]]), "CUDA")
        return func(*args, **named)

    def _communicate(self, call: _Call) -> Any:
        """Run a collective operator. NCCL's stand-in computes the result as if every rank sent the same values as this
        rank.
        """
        name, on_gpu = call.operator.name, call.on_gpu
        result = call.run()
        returned = tensors_among((result,))
        written = tensors_among(call.args[:1]) if call.func.namespace == "c10d" and name not in SENDS_ONLY else []
        ids = {id(tensor): tensor for tensor in (*returned, *written)}
        written_on_gpu = [tensor for tensor in ids.values() if tensor.is_cuda and is_ordinary(type(tensor))]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in written_on_gpu}
        sent = [tensor for tensor in on_gpu if tensor.untyped_storage().data_ptr() not in addresses]
        is_complete = self._knows(sent or on_gpu) and complete(name, written_on_gpu, sent)
        for tensor in written_on_gpu:
            # NCCL's stand-in does not compute sums in float16.
            self._note(tensor, is_complete and tensor.nbytes <= BIGGEST_COPY and tensor.dtype != torch.float16)
        return result

    def _note(
        self,
        tensor: torch.Tensor,
        is_known: bool,
        constant: Constant | None = None,
        *,
        has_values: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """Note whether the values in a GPU tensor's storage are known.

        Unknown integers are set to 0, so every process has the same numbers. If the CPU computed them from such zeros
        (``has_values``), they are not changed.

        Args:
            tensor: A tensor on the GPU.
            is_known: Whether all values in the storage are known.
            constant: The elements' common value; ``None`` if they differ or their value is not known.
            has_values: Whether the CPU computed the values, even from unknown inputs.
            routing: The assumed routing on which known values depend, if any.
        """
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if self.captured is not None:
            self.captured[address] = StorageWeakRef(storage)
            is_known, constant = False, None
        self.constants.note(storage, constant)
        self.exclusions.forget(address)
        self.choosing.forget(address)
        if is_known:
            if len(self._known) > _MOST_NOTED:
                self._known = {at: note for at, note in self._known.items() if not note.storage.expired()}
            self._known[address] = _KnownStorage(StorageWeakRef(storage), storage.nbytes(), routing)
        else:
            self._known.pop(address, None)
            self._unknown = StorageWeakRef(storage)
            if is_exact(tensor) and not has_values and (storage.nbytes() <= BIGGEST_COPY or is_small((tensor,))):
                if tensor.is_contiguous():
                    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
                elif not tensor.is_conj():
                    on_the_same_memory(tensor).zero_()

    def _note_copy(self, tensor: torch.Tensor, is_known: bool, *, has_values: bool) -> None:
        """Note whether a host tensor copied from the GPU is known.

        Unknown floats are set to `UNKNOWN` and unknown integers to 0, so every process has the same numbers.
        """
        self._has_left = self._has_left or not is_known
        self.values_read += not is_known
        if not is_known and not has_values and tensor.nbytes <= BIGGEST_COPY:
            tensor.fill_(0 if is_exact(tensor) or tensor.is_quantized else UNKNOWN)
        self._note_on_host(tensor, is_known, is_overwritten=covers_its_storage(tensor))

    def _note_on_host(
        self, tensor: torch.Tensor, is_known: bool, *, is_overwritten: bool = True, of_floats: bool = False
    ) -> None:
        """Note whether an operator's host tensor is known.

        Args:
            tensor: A tensor to which an operator wrote. GPU tensors are ignored.
            is_known: Whether all written values are known.
            is_overwritten: Whether the operator wrote to the whole storage. If false, the storage may still contain older
                unknown values.
            of_floats: Whether the program made all unknown values from Python floats (`_UnknownStorage.of_floats`).
        """
        if tensor.device.type != "cpu" or not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not is_known and address:
            self._has_left = True
            if self.lent.holds(storage):
                if is_exact(tensor):
                    self.reads.invalid("NumPy or another library gets values")
                self.reads.of_float()
            if len(self._unknown_on_host) > _MOST_NOTED:
                live_notes = {at: note for at, note in self._unknown_on_host.items() if not note.storage.expired()}
                self._unknown_on_host = live_notes
            self._unknown_on_host[address] = _UnknownStorage(StorageWeakRef(storage), of_floats)
        elif is_overwritten:
            self._unknown_on_host.pop(address, None)

    def _to_gpu(self, value: Any, device: torch.device, routing: Routing | None) -> Any:
        """Copy results from the CPU to the GPU, and note them as known."""
        if isinstance(value, torch.Tensor):
            copy = value.to(device)
            for part in parts_of(copy):
                self._note(part, part.nbytes <= BIGGEST_COPY, routing=routing)
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_gpu(element, device, routing) for element in value)
        return value

    def _knows(self, tensors: Iterable[torch.Tensor]) -> bool:
        return not any(map(self.is_unknown, tensors))

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor contains an unknown value."""
        if tensor.numel() == 0 or tensor.device.type not in ("cpu", "cuda"):
            return False
        if type(tensor).__name__ == "FakeTensor":
            return False  # a fake tensor has no values
        if not has_storage(tensor):
            within = unwrapped(tensor)
            if within is not tensor:
                return is_ordinary(type(within)) and self.is_unknown(within)
            parts = parts_of(tensor)
            return any(map(self.is_unknown, parts)) if parts else tensor.is_cuda
        address = tensor.untyped_storage().data_ptr()
        if tensor.is_cuda:
            known_storage = self._known.get(address)
            return known_storage is None or known_storage.storage.expired()
        unknown = self._unknown_on_host.get(address)
        return unknown is not None and not unknown.storage.expired()

    def _is_uncertain(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are unknown or depend on an assumed routing."""
        return self.is_unknown(tensor) or self._routing_of(tensor) is not None

    def _routing_of(self, tensor: torch.Tensor) -> Routing | None:
        """Return the assumed routing on which a tensor's values depend; ``None`` if there is none."""
        if not self.choosing.made or not tensor.is_cuda or not has_storage(tensor):
            return None
        note = self._known.get(tensor.untyped_storage().data_ptr())
        return None if note is None or note.storage.expired() else note.routing

    def _routing_among(self, tensors: Iterable[torch.Tensor]) -> Routing | None:
        return next(filter(None, map(self._routing_of, tensors)), None) if self.choosing.made else None

    def _note_routing(self, routing: Routing | None) -> None:
        """If ``routing`` is not ``None``, record a read of values from this assumed routing."""
        if routing is not None:
            self.reads.of_routing(routing)

    def _is_of_floats(self, tensor: torch.Tensor) -> bool:
        """Return whether the program made all unknown values in a tensor from Python floats (`_UnknownStorage.of_floats`)."""
        if not self.is_unknown(tensor):
            return True
        return not tensor.is_cuda and self._unknown_on_host[tensor.untyped_storage().data_ptr()].of_floats

    def knows(self, address: int) -> bool:
        """Return whether the value at a GPU address is known. If the value depends on an assumed routing, record the read."""
        start = self._known_at(address)
        if start is not None:
            self._note_routing(self._known[start].routing)
        return start is not None

    def _known_at(self, address: int) -> int | None:
        """Return the start of the known GPU storage around ``address``; ``None`` if ``address`` is not in a known storage."""
        starts = (
            start
            for start, note in self._known.items()
            if start <= address < start + note.nbytes and not note.storage.expired()
        )
        return next(starts, None)

    def forget_at(self, address: int) -> None:
        """Mark the GPU storage around ``address`` as unknown."""
        start = self._known_at(address)
        if start is not None:
            del self._known[start]
            self.constants.forget(start)

    def has_left(self) -> None:
        """Record that an unknown value is now on the host. From now on, any host tensor may contain the value."""
        self._has_left = True

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors as unknown after code has written to them without an operator visible to this mode."""
        for tensor in tensors:
            if not is_ordinary(type(tensor)):
                parts, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
                self.forget(getattr(tensor, part) for part in parts)
            else:
                self.note_unknown(tensor)

    def note_copy(self, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Note a copy as known if its original is known. Torch made this copy without an operator visible to this mode."""
        for part, source in zip(parts_of(copy), parts_of(original), strict=False):
            routing = self._routing_of(source)
            is_known = not self.is_unknown(source) and part.untyped_storage().nbytes() <= BIGGEST_COPY
            if part.is_cuda:
                self._note(part, is_known, routing=routing)
            elif not is_known:
                self._note_on_host(part, is_known)

    def note_known(self, tensor: torch.Tensor) -> None:
        """Mark a GPU tensor as known, because its values were loaded without an operator, for example by `pickle`."""
        self._note(tensor, tensor.untyped_storage().nbytes() <= BIGGEST_COPY)

    def note_unknown(self, tensor: torch.Tensor) -> None:
        """Note a tensor's storage as unknown."""
        if tensor.is_cuda:
            self._note(tensor, False)
        else:
            self._note_on_host(tensor, False)

    def has_moved(self, old_address: int, storage: torch.UntypedStorage) -> None:
        """Move the note about a host storage to its new address, for example after a move to shared memory."""
        note = self._unknown_on_host.get(old_address)
        if note is not None and not note.storage.expired():
            self._unknown_on_host[storage.data_ptr()] = _UnknownStorage(StorageWeakRef(storage), note.of_floats)

    @contextmanager
    def making(self, of_unknown: bool) -> Iterator[None]:
        """If ``of_unknown`` is true, mark all results from `torch.tensor` within this context as unknown."""
        outer, self._made_of_unknown = self._made_of_unknown, of_unknown
        try:
            yield
        finally:
            self._made_of_unknown = outer


def _contains_unknown(tensor: torch.Tensor) -> bool:
    """Return whether a float tensor contains the number `UNKNOWN`. The answer for a large tensor is False."""
    if tensor.is_meta or not tensor.is_floating_point() or not is_small((tensor,)):
        return False
    with beneath_modes():  # a dispatch mode in the program might record these operators
        return bool((on_host(tensor) == UNKNOWN).any())
