"""Replace methods and functions in torch that read or copy tensors without an operator visible to `HostValues`.

Example: ``loss.tolist()`` reads memory without an operator. Its replacement records the read and returns an `UnknownFloat`.
"""

from __future__ import annotations

import os
import sys
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulating.host_values.host_operators import is_exact, is_ordinary, on_host, tensors_among
from pytest_gpumem.emulating.host_values.object_collectives import exchange_objects
from pytest_gpumem.emulating.host_values.scripts import follow_scripts
from pytest_gpumem.emulating.host_values.serialized import follow_serialized
from pytest_gpumem.emulating.host_values.unknown_float import UNKNOWN, UnknownFloat, is_unknown_number
from pytest_gpumem.emulating.host_values.use_of_float import TEXT, use_of_conversion
from pytest_gpumem.torch_support.private_api.compiler import is_tracing, never_compiled, script_as, untraced
from pytest_gpumem.torch_support.private_api.dispatch import current_dispatch_mode, outside_torch_function
from pytest_gpumem.torch_support.private_api.tensors import remember_functions_that_take_a_device, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from pytest_gpumem.emulating.host_values.mode import HostValues


_OURS_AND_TORCHS = (f"{Path(__file__).parents[2]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")


def watch_methods(mode: HostValues) -> None:
    """Replace torch's methods and functions for reading tensors, for the rest of the process.

    The replacements record reads even in threads or passes without the mode, for example in backward.
    """
    remember_functions_that_take_a_device()
    for name, on_unknown in _READING.items():
        _replace(torch.Tensor, name, partial(_read, on_unknown=on_unknown), mode)
    for name, watching in _METHODS.items():
        _replace(torch.Tensor, name, watching, mode)
    for name, watching in _FUNCTIONS.items():
        script_as(_replace(torch, name, watching, mode), name)
    for name in ("from_numpy", "frombuffer", "as_tensor", "asarray"):
        _replace(torch, name, _borrow, mode)
    for module in (torch, torch.utils.dlpack):
        _replace(module, "to_dlpack", _give, mode)
    follow_serialized(mode, partial(_is_unknown, mode))
    follow_scripts(mode, partial(_is_unknown, mode))
    exchange_objects()
    comm: Any = torch.nn.parallel.comm
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau
    for owner, name, watching in (
        (comm, "broadcast_coalesced", _broadcast),
        (comm, "reduce_add", _add),
        (plateau, "step", _step),
        (torch.cuda.Event, "elapsed_time", _elapse),  # a method of the base class `torch.Event` cannot be replaced
    ):
        setattr(owner, name, _watched(mode, getattr(owner, name), watching))


def _watched(mode: HostValues, original: Callable[..., Any], watching: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a function or method. The replacement calls ``watching``.

    Args:
        mode: The mode whose `HostValues.reads` records reads.
        original: The function or method to replace.
        watching: The function that runs instead. It is called with ``mode``, ``original`` and then the program's arguments.
    """

    @never_compiled
    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        if not is_tracing():
            return watching(mode, original, *args, **named)
        # While `torch.jit.trace` records, sizes are tensors. So any use of a size here would call this function again without
        # end.
        with untraced() as traced:
            return watching(mode, traced(original), *args, **named)

    return watched


def _replace(owner: Any, name: str, watching: Callable[..., Any], mode: HostValues) -> Callable[..., Any]:
    """Replace a function in a module, or a method in `torch.Tensor`. The replacement has the same name, so pickle finds it."""
    function = _watched(mode, getattr(owner, name), watching)
    is_method = owner is torch.Tensor
    function.__module__, function.__qualname__ = ("torch", f"Tensor.{name}") if is_method else (owner.__name__, name)
    setattr(owner, name, function)
    return function


def _number(value: Any) -> Any:
    """Replace each float in the result of ``item`` or ``tolist`` by an `UnknownFloat`."""
    if isinstance(value, list):
        return [_number(element) for element in value]
    return UnknownFloat() if isinstance(value, float) else value


def _as_item(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    if mode.notes.constants.noted_as(tensor) is not None:
        return value  # `HostValues` has already recorded this read
    return _as_number(mode, tensor, value)


def _as_number(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    if is_exact(tensor):
        mode.reads.invalid("a value is read")
        return value
    mode.notes.has_left = True
    mode.reads.of_float()
    return _number(value)


def _as_integer(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    mode.reads.invalid("a value is read")
    return value


def _as_float(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    if is_exact(tensor):
        mode.reads.invalid("a value is read")
        return value
    mode.notes.has_left = True
    mode.reads.of_float(use_of_conversion(_caller()))
    return UNKNOWN


def _as_bool(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    if mode.notes.constants.noted_as(tensor) is not None:
        return value  # `HostValues` has already recorded this read
    if is_exact(tensor):
        mode.reads.invalid("a value is read")
        return value
    mode.reads.of_float("branch")
    return value


def _as_array(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    if is_exact(tensor):
        mode.reads.invalid("NumPy or another library gets values")
    mode.reads.of_float()
    return value


def _as_memory(mode: HostValues, tensor: torch.Tensor, value: Any) -> Any:
    return value if tensor.is_cuda else _as_array(mode, tensor, value)


_READING: dict[str, Callable[[HostValues, torch.Tensor, Any], Any]] = {
    "item": _as_item,
    "tolist": _as_number,
    "__float__": _as_float,
    "__complex__": _as_number,
    "__int__": _as_integer,
    "__index__": _as_integer,
    "__bool__": _as_bool,
    "is_nonzero": _as_bool,
    "numpy": _as_array,  # `numpy(force=True)` also reads GPU tensors
    "__dlpack__": _as_memory,
}
"""Methods for reading a tensor, by name. If the tensor is unknown, the function here records the read and returns the value
for the program."""


def _read(
    mode: HostValues,
    original: Callable[..., Any],
    tensor: torch.Tensor,
    /,
    *args: Any,
    on_unknown: Callable[[HostValues, torch.Tensor, Any], Any],
    **named: Any,
) -> Any:
    earlier_reads, outer = mode.notes.values_read, mode.is_watched
    mode.is_watched = True
    try:
        value = original(tensor, *args, **named)
    finally:
        mode.is_watched = outer
    # If the tensor is a wrapper, the original method has read the wrapped tensors, and `values_read` has increased.
    is_unknown = _is_unknown(mode, tensor) or (mode.notes.values_read > earlier_reads and not outer)
    with outside_torch_function():
        return on_unknown(mode, unwrapped(tensor), value) if is_unknown else value


def _is_unknown(mode: HostValues, tensor: Any) -> bool:
    if not is_ordinary(type(tensor)):
        return False
    try:
        with outside_torch_function():  # a subclass may override the methods called here
            return mode.notes.is_unknown(tensor)
    except RuntimeError:  # a tensor inside a `torch.func` transformation has no storage
        return False


def _lend(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **named: Any) -> Any:
    """Call ``numpy`` or ``__dlpack__``, and note the tensor's memory as shared with another library."""
    value = original(tensor, *args, **named)
    if is_ordinary(type(tensor)):
        with outside_torch_function():
            mode.notes.lent.note(tensor, value if original.__name__ == "numpy" else None)
    return value


def _borrow(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``from_numpy`` or a similar function, and note the new tensor's memory as shared with an array or buffer."""
    tensor = original(*args, **named)
    if not isinstance(next(iter((*args, *named.values())), None), (torch.Tensor, list, tuple, int, float, complex)):
        mode.notes.lent.note(tensor)
    return tensor


def _call(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **named: Any) -> Any:
    """Call ``apply_`` or a similar method, which passes each element to a Python function, and record the reads."""
    unknown = [operand for operand in tensors_among((tensor, *args, *named.values())) if _is_unknown(mode, operand)]
    result = original(tensor, *args, **named)
    if unknown:
        with outside_torch_function():
            if any(map(is_exact, unknown)):
                mode.reads.invalid("a value is read")
            mode.reads.of_float()
            mode.notes.note_unknown(tensor)
    return result


def _address(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /) -> Any:
    """Call ``data_ptr``, and record a read if the program gets the address of an unknown host tensor."""
    value = original(tensor)
    if not tensor.is_cuda and _is_unknown(mode, tensor):
        caller = _caller()
        if caller is not None and not caller.f_code.co_filename.startswith(_OURS_AND_TORCHS):
            mode.reads.of_float()
    return value


def _format(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **named: Any) -> Any:
    """Format a tensor as a string, and record a read of an unknown scalar.

    For a float, a read is recorded only if the program uses the string for more than printing.
    """
    with mode.reads.ignored():
        text = original(tensor, *args, **named)
    if tensor.dim() == 0 and _is_unknown(mode, tensor):
        use = use_of_conversion(_caller(), TEXT)
        if use != "kept" or is_exact(tensor):
            mode.reads.of_float(use)
    return text


def _copy(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **named: Any) -> Any:
    result = original(tensor, *args, **named)
    unseen = original.__name__ == "__deepcopy__" or current_dispatch_mode() is None
    if unseen and result is not tensor and is_ordinary(type(tensor)) and is_ordinary(type(result)):
        with outside_torch_function():
            mode.notes.note_copy(result, tensor)
    return result


def _make(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``torch.tensor`` or a similar function, and mark a result made from a list with unknown tensors as unknown."""
    listed = [arg for arg in args if isinstance(arg, (list, tuple))]
    with mode.notes.making(any(_is_unknown(mode, tensor) for tensor in tensors_among(listed))):
        return original(*args, **named)


def _split(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``tensor_split``, and record a read if the indices are an unknown tensor."""
    if any(_is_unknown(mode, indices) for indices in (*args[1:], *named.values())):
        mode.reads.invalid("tensor_split reads values")
    return original(*args, **named)


def _size(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call a function that makes a sparse tensor, and record a read if the tensor's size follows from unknown indices."""
    count = 2 if original.__name__ == "sparse_coo_tensor" else 3  # the number of arguments before `size`
    is_sized = len(args) > count or named.get("size") is not None
    parts = [*args[: count - 1], *(value for name, value in named.items() if name.endswith("indices"))]
    indices = [] if is_sized else tensors_among(parts)
    if any(_is_unknown(mode, tensor) for tensor in indices):
        mode.reads.invalid("the program makes a sparse tensor's size from indices")
    elif count > 2 and any(tensor.is_cuda for tensor in indices):
        # Compute the size from tensors on the CPU. Otherwise C++ code would read the indices on the GPU without an operator.
        named["size"] = original(*on_host(args), **on_host(named)).shape
    return original(*args, **named)


def _lose(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``ctc_loss``, and record a read if the lengths are unknown.

    `HostValues` is left during the call, because torch reads the lengths in a different way if a dispatch mode is active.
    """
    arguments = dict(zip(("log_probs", "targets", "input_lengths", "target_lengths"), args, strict=False)) | named
    probabilities, targets = arguments.get("log_probs"), arguments.get("targets")
    if not isinstance(probabilities, torch.Tensor) or not probabilities.is_cuda:
        return original(*args, **named)
    joined = isinstance(targets, torch.Tensor) and targets.dim() == 1
    read = ("input_lengths", "target_lengths", *(("targets",) if joined else ()))
    if any(_is_unknown(mode, arguments.get(name)) for name in read):
        mode.reads.invalid("ctc_loss reads values")
    if current_dispatch_mode() is not mode:
        return original(*args, **named)
    mode.__exit__(None, None, None)
    try:
        result = original(*args, **named)
    finally:
        mode.__enter__()
    mode.notes.note_unknown(result)
    return result


def _decide(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``torch.is_nonzero``, and record a decided branch if the tensor is unknown."""
    value = original(*args, **named)
    tensor = next(iter((*args, *named.values())))
    with outside_torch_function():
        return _as_bool(mode, tensor, value) if _is_unknown(mode, tensor) else value


def _give(mode: HostValues, original: Callable[..., Any], tensor: torch.Tensor, /) -> Any:
    """Call ``to_dlpack``, and record a read if another library gets unknown values on the host."""
    return _as_memory(mode, tensor, original(tensor)) if _is_unknown(mode, tensor) else original(tensor)


_METHODS: dict[str, Callable[..., Any]] = {
    "numpy": _lend,
    "__dlpack__": _lend,
    "__format__": _format,
    "__repr__": _format,  # `str(tensor)` calls this method too
    "cpu": _copy,
    "to": _copy,
    "__deepcopy__": _copy,
    **dict.fromkeys(("apply_", "map_", "map2_"), _call),
    "data_ptr": _address,
    "new_tensor": _make,
    "tensor_split": _split,
}
"""Tensor methods for reading, copying or sharing memory, by name, with their replacements."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tensor": _make,
    "as_tensor": _make,
    "tensor_split": _split,
    "is_nonzero": _decide,
    "ctc_loss": _lose,
    "sparse_coo_tensor": _size,
    **{f"sparse_{kind}_tensor": _size for kind in ("csr", "csc", "bsr", "bsc", "compressed")},
}
"""Functions in torch for reading tensors, by name, with their replacements."""


def _broadcast(
    mode: HostValues, original: Callable[..., Any], tensors: Sequence[torch.Tensor], *args: Any, **named: Any
) -> Any:
    """Call ``broadcast_coalesced``, with which `DataParallel` copies a model to other GPUs, and note which copies are known.

    The copies are made without an operator visible to the mode.
    """
    copied = original(tensors, *args, **named)
    for copies in copied:
        pairs = list(zip(copies, tensors, strict=True))
        # Several copies share a storage, which is known only if all its copies are known.
        unknown = {copy.untyped_storage().data_ptr() for copy, tensor in pairs if mode.notes.is_unknown(tensor)}
        for copy, tensor in pairs:
            if copy is not tensor and copy.untyped_storage().data_ptr() not in unknown:
                mode.notes.note_copy(copy, tensor)
    return copied


def _add(
    mode: HostValues, original: Callable[..., Any], inputs: Sequence[torch.Tensor], *args: Any, **named: Any
) -> Any:
    """Call ``reduce_add``, and note the sum over several GPUs as known if all inputs are known."""
    total = original(inputs, *args, **named)
    if total.dtype != torch.float16:  # NCCL's stand-in does not compute sums in float16
        mode.notes.note_copy(total, next(filter(mode.notes.is_unknown, inputs), inputs[0]))
    return total


def _step(
    mode: HostValues, original: Callable[..., Any], scheduler: Any, metrics: Any, *args: Any, **named: Any
) -> Any:
    """Call ``ReduceLROnPlateau.step``, which compares the metric. If the metric is unknown, record a decided branch."""
    if is_unknown_number(metrics) or _is_unknown(mode, metrics):
        mode.reads.of_float("branch")
    return original(scheduler, metrics, *args, **named)


def _elapse(mode: HostValues, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call ``elapsed_time``, and record a decided branch if the program uses the time for more than printing.

    An emulated GPU does not measure times.
    """
    value, caller = original(*args, **named), _caller()
    is_in_program = caller is not None and not caller.f_code.co_filename.startswith(_OURS_AND_TORCHS)
    if is_in_program and use_of_conversion(caller) != "kept":
        mode.reads.of_float("branch")
    return value


def _caller() -> FrameType | None:
    """Return the frame that called the replaced method; ``None`` if C++ code called it without a Python frame."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 -- the interpreter's, documented
    while frame is not None and frame.f_code.co_filename in (__file__, never_compiled.__code__.co_filename):
        frame = frame.f_back
    return frame
