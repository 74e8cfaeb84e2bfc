"""Detects syncs in a step: calls in which the host waits for the device, because the host reads a value or copies a tensor."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.dispatch import function_mode
from pytest_gpumem.torch_support.reachability import is_host, means_host, storage_of, tensors_in
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch


_COUNTERS = ("step", "mu_product")
"""Counters in an optimizer's state. torch keeps them on the host, unless the optimizer is ``capturable`` or ``fused``."""


class HostTensors:
    """A set with all tensors in the host's memory.

    On a GPU, the tensor's device decides whether the tensor is in the set. If a step is measured on the CPU, the CPU stands in
    for a GPU. Then all tensors count as GPU tensors, except:

    - an optimizer's counters,
    - tensors created by the step without a device, or copied to the host (`mark`),
    - results computed only from these tensors (`follow`).

    Example:
        On the CPU, ``loss.item()`` counts as a sync, because ``loss`` was computed from the model's parameters.
        ``torch.zeros(3).sum().item()`` does not count, because the step created the zeros without a device.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_stand_in = is_host(device)
        """True if the CPU stands in for a GPU."""
        # Keep the storages alive, so no other storage gets one of these addresses.
        self._marked: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if not self.is_stand_in:
            return is_host(tensor.device)
        if not self._marked:
            return False
        storage = storage_of(tensor)
        return storage is not None and storage.data_ptr() in self._marked

    def mark(self, result: object, *, host: bool = True) -> None:
        """Add all tensors in ``result`` to the set, or remove them with ``host=False``. Does nothing on a GPU."""
        if not self.is_stand_in:
            return
        for tensor in tensors_in([result]):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if host:
                self._marked[storage.data_ptr()] = storage
            else:
                self._marked.pop(storage.data_ptr(), None)

    def follow(self, inputs: Iterable[object], result: object) -> None:
        """Add ``result`` to the set if all input tensors are in the set."""
        if not self._marked:
            return
        tensors = list(tensors_in(list(inputs)))
        if tensors and all(tensor in self for tensor in tensors):
            self.mark(result)

    @contextmanager
    def tracking_counters(self) -> Iterator[None]:
        """Within the context, add an optimizer's counters (`_COUNTERS`) to the set before each of its steps.

        The set is emptied at the end.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if not self.is_stand_in:
            yield
            return

        def mark_counters(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                if group.get("capturable") or group.get("fused"):
                    continue
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    self.mark([state[name] for name in _COUNTERS if name in state])

        with register_optimizer_step_pre_hook(mark_counters):
            try:
                yield
            finally:
                self._marked.clear()


_READS_UNTAGGED = frozenset(("_linalg_check_errors",))
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


@dataclass(frozen=True, slots=True)
class Syncs:
    """Detector for syncs in operators and functions.

    ``host`` contains the host's tensors. ``in_operator`` is called with the operator's name before an operator waits.
    ``in_function`` is called with the function's name when a sync in a function is detected.
    """

    host: HostTensors
    in_operator: Callable[[str], None]
    in_function: Callable[[str], None]

    def check_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report a sync if this operator, which is about to run, will make the host wait."""
        if _waits(operator, args, kwargs, self.host):
            self.in_operator(title_of(operator))

    def watching_functions(self) -> AbstractContextManager[object]:
        """Return a context that detects syncs in functions without operator calls."""
        return _watching_functions(self, self.host)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """Return whether the host waits for the device in this operator call."""
    import torch

    if is_of_higher_order(func):
        return False
    name = name_of(func)
    if name in ("copy_", "_to_copy"):
        return _copies_across(name, args, kwargs, host)
    if name == "index" or name in _PUTS:
        return _waits_for_indices(name, args, kwargs, host)
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    if not reads and name not in _READS_UNTAGGED:
        return False
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return not all(map(host.__contains__, tensors_in((args, kwargs))))


def _copies_across(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    if name == "copy_":
        destination, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return not non_blocking and (destination in host) != (source in host)
    device = kwargs.get("device")
    if device is None or host.is_stand_in or kwargs.get("non_blocking", False):
        return False
    return is_host(args[0].device) != is_host(device)


def _waits_for_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """Return whether indexing makes the host wait, to count the true elements in a mask, or to copy indices to the device."""
    import torch

    subject = args[0]
    indices = [index for index in args[1] if index is not None]
    if subject in host:
        return False
    if any(index in host for index in indices):
        return True
    if name in _PUTS and len(indices) == 1:
        value = args[2] if len(args) > 2 else kwargs["values"]
        # x[mask] = 0 fills in place, and does not count the true elements in the mask.
        if value.numel() == 1 and is_host(value.device):
            return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def is_of_higher_order(func: Any) -> bool:
    """Return whether an operator takes functions as arguments, such as ``cond``. Such operators have no tags or overloads."""
    return not hasattr(func, "overloadpacket")


def name_of(func: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(func.overloadpacket.__name__)


def title_of(func: Any) -> str:
    """Return an operator's name for messages: ``addmm`` for ATen, ``library::name`` for other libraries."""
    if is_of_higher_order(func):
        return str(getattr(func, "__name__", type(func).__name__))
    return name_of(func) if func.namespace == "aten" else f"{func.namespace}::{name_of(func)}"


def _watching_functions(syncs: Syncs, host: HostTensors) -> AbstractContextManager[object]:
    """Return a function mode that detects syncs without an operator call.

    Such a sync occurs if a tensor is printed, or if a tensor is created from Python values, because torch hides the copy to the
    device. If the CPU stands in for a GPU, this mode also detects copies between host and GPU.
    """
    import torch

    moving_functions = (torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to)
    from_values = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        reads = func is torch.Tensor.__repr__ or (host.is_stand_in and func is torch.Tensor.tolist)
        if reads and args[0] not in host:
            syncs.in_function(_called(func))
        result = func(*args, **kwargs)
        if not is_a(result, torch.Tensor):
            return result
        if func in moving_functions:
            return _moved(func, args, kwargs, result, syncs, host)
        if func in from_values:
            likeness, data = args[:2] if func is torch.Tensor.new_tensor else (None, args[0])
            for _ in range(_waits_for_values(likeness, data, kwargs, result, host)):
                syncs.in_function(_called(func))
        elif not any(True for _ in tensors_in((args, kwargs))):
            host.mark(result, host=means_host(kwargs.get("device")))
        return result

    return function_mode(call)


def _called(func: Any) -> str:
    return f"{func.__name__}()"


def _waits_for_values(likeness: Any, data: Any, kwargs: dict[str, Any], result: torch.Tensor, host: HostTensors) -> int:
    """Return how often the host waited while a tensor was created from Python values.

    Without a ``device`` argument, the tensor is on the device of ``likeness`` (``new_tensor``) or on the host.
    """
    import torch

    if is_a(data, torch.Tensor):
        return 0  # an operator makes this copy, so `check_operator` detects it
    device = kwargs.get("device")
    is_on_host = likeness in host if likeness is not None and device is None else means_host(device)
    host.mark(result, host=is_on_host)
    # The host reads each tensor among the values separately.
    reads = sum(tensor not in host for tensor in tensors_in([data]))
    return reads + (result not in host and (host.is_stand_in or not _is_array(data)))


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, syncs: Syncs, host: HostTensors
) -> torch.Tensor:
    """Report a sync if a tensor moves between host and device, and return the moved tensor.

    If the CPU stands in for a GPU, the moved tensor has its own storage, as on a GPU.
    """
    source, target = args[0], _target(func, args, kwargs, host)
    if not host.is_stand_in or target is None or (source in host) == (target == "host"):
        return result
    non_blocking = kwargs.get("non_blocking", False) or any(argument is True for argument in args[1:3])
    if not non_blocking:
        syncs.in_function(_called(func))
    # On a GPU, a moved tensor is a copy with its own memory. So copy the tensor here too, or a change would also change the
    # source.
    copy = result.clone() if result is source else result
    host.mark(copy, host=target == "host")
    return copy


def _is_array(data: object) -> bool:
    """Return whether ``data`` is a NumPy array, whose copy to a device is an operator."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(data, numpy.ndarray)


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> str | None:
    """Return the target of a call that moves a tensor: ``"host"``, ``"device"``, or ``None`` if the tensor stays.

    If the CPU stands in for a GPU, the test's device is also ``cpu``. So only ``.cpu()`` and the text ``"cpu"`` mean the host.
    """
    import torch

    if func is torch.Tensor.cpu:
        return "host"
    if func is torch.Tensor.cuda:
        return "device"
    target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    if is_a(target, torch.Tensor):
        return "host" if target in host else "device"
    if is_a(target, str):
        return "host" if means_host(target) else "device"
    return "device" if is_a(target, torch.device, int) and not is_a(target, bool) else None
