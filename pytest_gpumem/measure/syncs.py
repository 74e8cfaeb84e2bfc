"""Count how often the host waits for the device in a step: reads of values, and copies between the two."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.tracker import function_mode
from pytest_gpumem.torch_support.reachability import is_host, means_host, storage_of, tensors_in
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch


_COUNTERS = ("step", "mu_product")
"""State that torch's optimizers keep on the host, unless ``capturable`` or ``fused``: read for every parameter."""


class HostTensors:
    """Set of the tensors that are in the host's memory.

    On a GPU a tensor's device says it. On the CPU every tensor counts as one of a GPU's, but the counters of an optimizer,
    and what the step itself makes without a device, or copies to the host (`mark`); and what is computed from such alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.stands_in = is_host(device)
        """True if the CPU stands in for a GPU."""
        # The storages are held: an address is not given to another one meanwhile.
        self._marked: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if not self.stands_in:
            return is_host(tensor.device)
        if not self._marked:
            return False
        storage = storage_of(tensor)
        return storage is not None and storage.data_ptr() in self._marked

    def mark(self, result: object, *, host: bool = True) -> None:
        """Enter the tensors of ``result``, or with ``host=False`` remove them, where the CPU stands in."""
        if not self.stands_in:
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
        """Enter a ``result`` that was computed from the host's tensors alone."""
        if not self._marked:
            return
        tensors = list(tensors_in(list(inputs)))
        if tensors and all(tensor in self for tensor in tensors):
            self.mark(result)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Enter the counters of every optimizer that steps within the context; at its end the set is emptied."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if not self.stands_in:
            yield
            return

        def know(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                if group.get("capturable") or group.get("fused"):
                    continue
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    self.mark([state[name] for name in _COUNTERS if name in state])

        with register_optimizer_step_pre_hook(know):
            try:
                yield
            finally:
                self._marked.clear()


_READS_UNTAGGED = frozenset(("_linalg_check_errors",))
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


@dataclass(frozen=True, slots=True)
class Syncs:
    """Detector of syncs, by the operators that are run and the functions that are called. ``host`` has the host's tensors.

    ``in_operator`` and ``in_function`` are called with the name of what the host waits in: the one before it runs, the other
    whenever it is known.
    """

    host: HostTensors
    in_operator: Callable[[str], None]
    in_function: Callable[[str], None]

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at an operator before it runs."""
        if _waits(operator, args, kwargs, self.host):
            self.in_operator(title_of(operator))

    def of_functions(self) -> AbstractContextManager[object]:
        """Return a context in which functions are watched for syncs that no operator shows."""
        return _watching_functions(self, self.host)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """Return whether the host waits for the device in this call of an operator."""
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
    if device is None or host.stands_in or kwargs.get("non_blocking", False):
        return False
    return is_host(args[0].device) != is_host(device)


def _waits_for_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """Return whether the host waits to index: for the number of ones in a mask, or to copy indices of its own."""
    import torch

    subject = args[0]
    indices = [index for index in args[1] if index is not None]
    if subject in host:
        return False
    if any(index in host for index in indices):
        return True
    if name in _PUTS and len(indices) == 1:
        value = args[2] if len(args) > 2 else kwargs["values"]
        # x[mask] = 0 fills without knowing where.
        if value.numel() == 1 and is_host(value.device):
            return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def is_of_higher_order(func: Any) -> bool:
    """Return whether an operator takes functions, such as ``cond``: it has neither tags nor overloads."""
    return not hasattr(func, "overloadpacket")


def name_of(func: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    return str(func.overloadpacket.__name__)


def title_of(func: Any) -> str:
    """Return the name of an operator for people: ``addmm``, ``library::name``."""
    if is_of_higher_order(func):
        return str(getattr(func, "__name__", type(func).__name__))
    return name_of(func) if func.namespace == "aten" else f"{func.namespace}::{name_of(func)}"


def _watching_functions(syncs: Syncs, host: HostTensors) -> AbstractContextManager[object]:
    """Return a mode that detects syncs that no operator shows.

    Text made of a tensor; tensors made of Python's values, whose copy to the device torch hides; and where the CPU stands
    in, what would leave a GPU or reach one.
    """
    import torch

    moves = (torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to)
    from_values = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        reads = func is torch.Tensor.__repr__ or (host.stands_in and func is torch.Tensor.tolist)
        if reads and args[0] not in host:
            syncs.in_function(_called(func))
        result = func(*args, **kwargs)
        if not is_a(result, torch.Tensor):
            return result
        if func in moves:
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
    """Return how often the host waited for a tensor made of Python's values: on a device, that of ``likeness``, or here."""
    import torch

    if is_a(data, torch.Tensor):
        return 0  # a copy that operators show
    device = kwargs.get("device")
    at_home = likeness in host if likeness is not None and device is None else means_host(device)
    host.mark(result, host=at_home)
    # Tensors among the values are read one by one.
    reads = sum(tensor not in host for tensor in tensors_in([data]))
    return reads + (result not in host and (host.stands_in or not _is_array(data)))


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, syncs: Syncs, host: HostTensors
) -> torch.Tensor:
    """Count the copy of a tensor to another device, and return the copy; where the CPU stands in, it is one of its own."""
    source, target = args[0], _target(func, args, kwargs, host)
    if not host.stands_in or target is None or (source in host) == (target == "host"):
        return result
    non_blocking = kwargs.get("non_blocking", False) or any(argument is True for argument in args[1:3])
    if not non_blocking:
        syncs.in_function(_called(func))
    # What is done to the one would not be done to the other.
    copy = result.clone() if result is source else result
    host.mark(copy, host=target == "host")
    return copy


def _is_array(data: object) -> bool:
    """Return whether it is an array of NumPy, whose copy to a device is an operator."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(data, numpy.ndarray)


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> str | None:
    """Return where a tensor is to go: ``"host"``, ``"device"``, or ``None`` where it is to stay.

    On the CPU the device that a test is given is ``cpu``, too: the host is meant by ``.cpu()`` and by the word.
    """
    import torch

    if func is torch.Tensor.cpu:
        return "host"
    if func is torch.Tensor.cuda:
        return "device"
    wanted = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    if is_a(wanted, torch.Tensor):
        return "host" if wanted in host else "device"
    if is_a(wanted, str):
        return "host" if means_host(wanted) else "device"
    return "device" if is_a(wanted, torch.device, int) and not is_a(wanted, bool) else None
