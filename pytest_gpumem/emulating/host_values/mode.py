"""Compute the values of small tensors on an emulated GPU, and record when the program reads any other value.

An emulated GPU's kernels do nothing, but its memory is host memory. If all operands of an operator have known values and are
small, the dispatch mode `HostValues` runs the operator again on the CPU, in the same memory, so the result is known too. All
other values are *unknown*. Unknown floats are assumed to be finite, and their bytes in memory are meaningless. Small unknown
integers are stored as 0, and the CPU computes operators on these zeros. A copy of an unknown value is unknown, and so is a
result computed from an unknown value. `HostValues.reads` records each line in which the program reads an unknown value.

Example: a program on an emulated H100. ::

    x = torch.tensor([1.0, 2.0], device="cuda")
    (x * 2).tolist()            # [2.0, 4.0]: both operands are known and small, so the host computes the product
    loss = torch.randn(4, device="cuda").mean()   # random floats are never drawn, so they and the mean are unknown
    value = loss.item()         # an `UnknownFloat`, 2**-120 = 7.5e-37; the read is counted with its line
    if value < 3.0: ...         # recorded as a branch decided by an uncomputed value, with the line
    int(value)  # 0; "the program makes an integer from a value that an emulated GPU does not compute, at train.py:6"

The last line makes the measurement invalid (a *trouble*), because the integer may become the size of a tensor. The test is
then ``unmeasured``, with the quoted sentence as its reason.

`HostValues.notes` contains *notes* about tensors, which say what the host knows about their values (`TensorNotes`). An operator
on the GPU is run, and then `outcome_of` decides what becomes known about its outputs.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.emulating.emulation.libraries import BY_STEM
from pytest_gpumem.emulating.host_values.collectives import SENDS_ONLY, complete
from pytest_gpumem.emulating.host_values.constants import comparison_of_floats
from pytest_gpumem.emulating.host_values.host_operators import (
    BIGGEST_COPY,
    NO_VALUES,
    Operator,
    coalesced_on_host,
    covers_its_storage,
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
from pytest_gpumem.emulating.host_values.operator_call import Call
from pytest_gpumem.emulating.host_values.outcomes import note_output, outcome_of
from pytest_gpumem.emulating.host_values.reads import Reads
from pytest_gpumem.emulating.host_values.tensor_notes import TensorNotes, contains_unknown
from pytest_gpumem.emulating.host_values.unknown_float import UNKNOWN, is_unknown_number
from pytest_gpumem.torch_support.private_api.compiler import is_tracing, never_compiled, untraced
from pytest_gpumem.torch_support.private_api.dispatch import is_higher_order, run_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.facts.values.option_words import Routing

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
"""Operators whose CUDA kernel runs, and then reads the size of its result from the GPU. An emulated GPU does not compute this
size, so the kernel reads the number in `HostValues.answer`."""
_NUMBERS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
"""Operators that convert a tensor's only element to a Python number."""
NO_EIGENVALUES = f"the emulated GPU lacks torch.linalg.eig of libcusolver: {BY_STEM['libcusolver'].why}"
"""The error message for a call to ``torch.linalg.eig`` on an emulated GPU."""


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
    """Dispatch mode for an emulated GPU, which computes small tensors and records when the program reads uncomputed values.

    `pytest_gpumem.emulating.host_values.scope` enters this mode once in a process. The module's docstring has an example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()
        self.notes = TensorNotes(self.reads)
        self._operators: dict[Any, Operator] = {}
        self.is_watched = False
        """True while a method from `watched_methods` runs, for example ``tolist``. Such a method records its read itself."""
        self.answer = _Answer()
        self._kernel: Operator | None = None
        """The operator whose kernel is running, if this mode also intercepts the kernel's own calls to operators."""

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
                # A fake tensor has no memory, so there are no values to compute. Any other subclass gets the operator from
                # torch and calls operators on its inner tensors, and these calls reach this mode.
                return func(*args, **named) if kind.__name__ == "FakeTensor" else NotImplemented
        if is_higher_order(func):
            return self._run_functions(func, args, named)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operator_of(func)
        if any(isinstance(args[at], (int, float, complex)) for at in operator.only_tensors if at < len(args)):
            # For a constant tensor in TorchScript, torch passes the number from which the tensor was made. Make the tensor
            # again.
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
        call = Call(func, operator, args, named, tensors_among((*args, *named.values())))
        device = named.get("device")
        is_hosts = not call.on_gpu and (device is None or torch.device(device).type != "cuda")
        # As long as no unknown value was copied to the host, all host tensors are known.
        if is_hosts and not self.notes.has_left:
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
                routing = self.notes.routing_among(read)
                repeatable = self._repeatable((args, named))
                result = func(*on_host(repeatable[0]), **on_host(repeatable[1]))
                return self._to_gpu(result, call.on_gpu[0].device, routing)
            has_known_inputs = self.notes.are_known(read)  # only the values in `read` affect the result
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
            if is_ordinary(type(tensor)) and self.notes.is_unknown(tensor):
                self.notes.note_unknown(tensor)
        return result

    def _read_number(self, call: Call, has_known_inputs: bool) -> Any:
        noted = self.notes.constants.noted_as(call.args[0])
        if noted is not None:
            self.reads.of_float(noted)
        value = call.run()
        if has_known_inputs or not isinstance(value, float):
            return value
        self.notes.values_read += 1
        if not self.is_watched:  # C++ code or TorchScript reads the value
            self.reads.of_float()
        return UNKNOWN

    def _read_by(self, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors whose values an operator call reads on the host, and record the read if a value is unknown."""
        read = operator.read_of(args, named)
        for tensor in read:
            if operator.name in _NUMBERS and self.notes.constants.noted_as(tensor) is not None:
                continue  # `_read_number` records this read
            # If the program reads a single unknown float, it gets an `UnknownFloat`, which later records the program's use.
            if self.notes.is_unknown(tensor) and not (operator.name in _NUMBERS and not is_exact(tensor)):
                reader = operator if self._kernel is None else self._kernel
                self.reads.invalid(_READ.get(reader.name) or f"{reader.name.strip('_')} reads values")
                break
            self.notes.note_routing(self.notes.routing_of(tensor))
        return read

    def _repeatable(self, argument: Any) -> Any:
        """Replace unknown tensors among arguments by zeros, so the operator's result is the same in each process.

        The memory of unknown tensors contains arbitrary bytes from earlier tensors.
        """
        if isinstance(argument, torch.Tensor):
            has_values = not argument.is_cuda or (is_exact(argument) and is_small((argument,)))
            if has_values or not self.notes.is_unknown(argument):
                return argument
            return torch.zeros((), dtype=argument.dtype).expand(argument.shape)
        if isinstance(argument, dict):
            return {name: self._repeatable(value) for name, value in argument.items()}
        return type(argument)(map(self._repeatable, argument)) if type(argument) in (list, tuple) else argument

    def _determines(self, call: Call) -> bool:
        """Return whether all inputs of an operator are known, so the CPU can compute the result."""
        operator, tensors = call.operator, call.tensors
        inputs = tensors[1:] if operator.overwrites and tensors and tensors[0] is call.args[0] else tensors
        is_determined = self.notes.are_known(inputs)
        if not inputs and self._kernel is not None and not self._kernel.calls_readers:
            is_determined = False  # a sparse kernel creates zeros, and then overwrites them without an operator
        if operator.name == "isin":
            # `generate` searches end tokens with `isin`. A token that an assumed routing chose counts as unknown here, so the
            # assumed answer is "no end token".
            is_certain = is_determined and self.notes.routing_among(inputs) is None
            is_determined = is_certain or self.notes.exclusions.decide(*call.args[:2])
        if is_determined and self.notes.has_left and operator.name in ("_to_copy", "copy_"):
            # A host tensor may contain the number `UNKNOWN` although no note says so, for example if it was read from a file.
            is_determined = not any(tensor.device.type == "cpu" and contains_unknown(tensor) for tensor in inputs)
        if self.notes.has_left and any(map(is_unknown_number, (*call.args, *call.named.values()))):
            is_determined = False
            if operator.name in _SIZED or operator.name.startswith(_RESIZED):
                self.reads.invalid("the program makes a size from a value")
        return is_determined

    def _run(self, call: Call, has_known_inputs: bool) -> Any:
        """Run an operator on the emulated GPU, and note what becomes known about its outputs (`outcome_of`)."""
        operator, args = call.operator, call.args
        if operator.name == "linalg_eig":  # the kernel would read its input and report infinite values
            raise RuntimeError(NO_EIGENVALUES)
        nbytes = args[0].untyped_storage().nbytes() if operator.name == "resize_" else None
        result = self._run_kernel(call, "CUDA")
        results = tensors_among((result,))
        # A `resize_` that allocates no memory changes no values.
        is_reshaped = nbytes is not None and args[0].untyped_storage().nbytes() == nbytes
        # While `torch.export` runs, results may be tensors without memory.
        if is_reshaped or not all(is_ordinary(type(tensor)) for tensor in results):
            return result
        if not results and not operator.written and not operator.written_names:
            # torch's TransformerEncoder calls such an operator to check a padding mask. If the mask is unknown, return False.
            # The encoder then does not use nested tensors, and needs more memory.
            return result and has_known_inputs if operator.calls_readers else result
        changed = call.changed()
        outputs = [tensor for tensor in (*results, *changed) if is_ordinary(type(tensor)) and has_storage(tensor)]
        self._clear_unwritten(results if len(outputs) < len(results) + len(changed) else ())
        outcome = outcome_of(self.notes, call, results, outputs, has_known_inputs=has_known_inputs)
        ids = {id(tensor) for tensor in changed}
        for output in outputs:
            is_overwritten = id(output) not in ids or covers_its_storage(output)
            note_output(self.notes, call, outcome, output, is_overwritten=is_overwritten)
        return result

    def _run_kernel(self, call: Call, device_type: str) -> Any:
        """Run an operator. If the operator's kernel may call operators that read values, intercept these inner operators."""
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
                for part in filter(self.notes.is_unknown, parts_of(tensor)):
                    self.notes.note(part, False)

    def _coalesce(self, call: Call) -> Any:
        """Run ``coalesce``, and let its kernel read how many distinct indices there are.

        Example: the known indices 0, 2, 2 have two distinct values, so the kernel reads 2 and returns the indices 0 and 2. If
        the indices are unknown, the kernel reads the number of all indices, 3.
        """
        sparse = call.args[0]
        indices, values = parts_of(sparse)
        if self.notes.is_unknown(indices):
            with self.answer.of(len(values)):
                result = call.run()
            self._clear_unwritten([result])
            return result
        has_known_values = not self.notes.is_unknown(values) and is_small((indices, values))
        distinct = coalesced_on_host(indices, values if has_known_values else None, sparse.shape)
        with self.answer.of(parts_of(distinct)[0].shape[1]):
            result = call.run()
        for part, true, is_known in zip(parts_of(result), parts_of(distinct), (True, has_known_values), strict=True):
            if is_known:
                on_the_same_memory(part).copy_(true)
            self.notes.note(part, is_known and part.nbytes <= BIGGEST_COPY)
        return result

    def _run_on_host(self, call: Call, is_determined: bool) -> Any:
        """Run an operator on host tensors, and note the result as unknown if an input is unknown."""
        operator, args = call.operator, call.args
        result = self._run_kernel(call, "CPU")
        results = tensors_among((result,))
        changed = call.changed()
        constant, of_floats = None, False
        if not is_determined:
            constant = self.notes.constants.result(operator, args)
            of_floats = all(map(self.notes.is_of_floats, call.tensors))
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
                is_known = is_determined or (is_new and operator.name in NO_VALUES)
                is_overwritten = is_new or covers_its_storage(tensor)
                self.notes.note_on_host(tensor, is_known, is_overwritten=is_overwritten, of_floats=of_floats)
                if has_storage(tensor):
                    self.notes.constants.note(tensor.untyped_storage(), constant if is_overwritten else None)
        return result

    def _view(self, func: Any, operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run an operator whose result is a view of existing memory. The notes about this memory remain valid."""
        if operator.name == "lift_fresh" and has_storage(args[0]):
            self.notes.note_made(args[0])  # `torch.tensor` calls `lift_fresh` on its result
        if args[0].layout is torch.sparse_coo and args[0].is_cuda:  # `transpose` copies the indices of a sparse tensor
            return self._run_kernel(Call(func, operator, args, named, [args[0]]), "CUDA")
        return func(*args, **named)

    def _communicate(self, call: Call) -> Any:
        """Run a collective operator. NCCL's stand-in computes the result as if every rank sent this rank's values."""
        name, on_gpu = call.operator.name, call.on_gpu
        result = call.run()
        returned = tensors_among((result,))
        written = tensors_among(call.args[:1]) if call.func.namespace == "c10d" and name not in SENDS_ONLY else []
        ids = {id(tensor): tensor for tensor in (*returned, *written)}
        written_on_gpu = [tensor for tensor in ids.values() if tensor.is_cuda and is_ordinary(type(tensor))]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in written_on_gpu}
        sent = [tensor for tensor in on_gpu if tensor.untyped_storage().data_ptr() not in addresses]
        is_complete = self.notes.are_known(sent or on_gpu) and complete(name, written_on_gpu, sent)
        for tensor in written_on_gpu:
            # NCCL's stand-in does not compute sums in float16.
            self.notes.note(tensor, is_complete and tensor.nbytes <= BIGGEST_COPY and tensor.dtype != torch.float16)
        return result

    def _to_gpu(self, value: Any, device: torch.device, routing: Routing | None) -> Any:
        """Copy results from the CPU to the GPU, and note them as known."""
        if isinstance(value, torch.Tensor):
            copy = value.to(device)
            for part in parts_of(copy):
                self.notes.note(part, part.nbytes <= BIGGEST_COPY, routing=routing)
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_gpu(element, device, routing) for element in value)
        return value
