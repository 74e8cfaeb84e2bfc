"""Counts what a step does, in one run of its own: work that repeats exactly, so that no clock is needed to judge it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.host_tensors import HostTensors, tensors_among
from pytest_gpumem.tracebacks import clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from pytest_gpumem.devices.contract import Device

_NOT_ATEN = ("profiler", "prim")
_MOVES_NOTHING = frozenset(
    (
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
"""Operators that are no views by their schema, and neither compute nor copy."""
_READS_UNTAGGED = frozenset(("_linalg_check_errors",))
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one step did; ``None`` is not counted.

    ``flops``: floating-point operations of matrix products, convolutions and attention as ``torch.utils.flop_counter``
    counts them: a multiply-add is two. Attention counts alike in every kernel: 2 products forward, 5 backward (whose
    scores are computed again), and causal attention in full.

    ``operators``: calls of operators, ATen's and custom ones, below autograd and with composite ones taken apart, that
    compute or copy. Views and mere allocations do neither, and releases of torch differ in how many of them they make. One
    of a tensor subclass (int8 weights) is one.

    ``syncs``: how often the host waits for the device: reads of values (``.item()``, ``nonzero``, boolean masks) and copies
    between host and device, unless ``non_blocking``.

    ``launches``: kernels that CUDA launched.
    """

    flops: int | None = None
    operators: int | None = None
    syncs: int | None = None
    launches: int | None = None

    def metrics(self) -> dict[str, int]:
        """Those that were counted, by the name of the metric."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a step; ``trouble`` is a clause when it could not be counted."""

    counts: Counts
    trouble: str | None = None


NOTHING_COUNTED = Counted(Counts())


def count_step(step: Callable[[], object], device: Device, *, compiled: bool = False) -> Counted:
    """Run ``step`` once to count its operators, where it is not ``compiled``, and where there are kernels once more for those.

    Where modes watch operators, torch.compile does not run what it has compiled. What the step raises is told, and not
    raised: it ran well before, and its figures stand.
    """
    try:
        counts = Counts() if compiled else _count_operators(step, device.torch_device)
        launches = device.launches(lambda: _run(step))
    except Exception as error:  # noqa: BLE001 - the step's own, whatever it is
        clear_frames(error)
        said = str(error).strip().partition("\n")[0]
        return Counted(Counts(), f"not counted: {type(error).__name__}{f': {said}' if said else ''}")
    return Counted(Counts(counts.flops, counts.operators, counts.syncs, launches))


def _run(step: Callable[[], object]) -> None:
    step()


def _count_operators(step: Callable[[], object], device: torch.device) -> Counts:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - an operator's name
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - same
    host = HostTensors(device)
    flops = FlopCounterMode(
        display=False, custom_mapping={attention: _attention_flops, backward: _attention_backward_flops}
    )
    tally = _Tally()
    with ExitStack() as stack:
        stack.enter_context(host.remembered())
        # The latest sees an operator first: flops takes composite ones apart, and the tally gets what is really run.
        stack.enter_context(_watching_operators(tally, host))
        stack.enter_context(flops)
        stack.enter_context(_watching_functions(tally, host))
        step()
    return Counts(flops.get_total_flops(), tally.operators, tally.syncs)


@dataclass(slots=True)
class _Tally:
    operators: int = 0
    syncs: int = 0


def _watching_operators(tally: _Tally, host: HostTensors) -> TorchDispatchMode:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            tally.operators += _works(func)
            tally.syncs += _waits(func, args, kwargs, host)
            result = func(*args, **kwargs)
            host.follow((args, kwargs), result)
            return result

    return Watch()  # type: ignore[no-untyped-call]


def _works(func: Any) -> bool:
    """Whether an operator computes or copies."""
    import torch

    if _is_of_higher_order(func):
        return True
    if func.namespace in _NOT_ATEN or func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    return _name(func) not in _MOVES_NOTHING


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """Whether the host waits for the device in this call of an operator."""
    import torch

    if _is_of_higher_order(func):
        return False
    name = _name(func)
    if name in ("copy_", "_to_copy"):
        return _copies_across(name, args, kwargs, host)
    if name == "index" or name in _PUTS:
        return _waits_for_indices(name, args, kwargs, host)
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    if not reads and name not in _READS_UNTAGGED:
        return False
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return any(tensor not in host for tensor in tensors_among((args, kwargs)))


def _copies_across(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    if name == "copy_":
        destination, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return not non_blocking and (destination in host) != (source in host)
    device = kwargs.get("device")
    if device is None or host.stands_in or kwargs.get("non_blocking", False):
        return False
    return bool((args[0].device.type == "cpu") != (device.type == "cpu"))


def _waits_for_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> bool:
    """A mask is turned into as many indices as it has ones, which the host has to know; those of the host are copied."""
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
        if value.numel() == 1 and value.device.type == "cpu":
            return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_of_higher_order(func: Any) -> bool:
    """Whether an operator takes functions, such as ``cond``: it has neither tags nor overloads."""
    return not hasattr(func, "overloadpacket")


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _watching_functions(tally: _Tally, host: HostTensors) -> TorchFunctionMode:
    """Sees what no operator shows.

    Text made of a tensor; tensors made of Python's values, whose copy to the device torch hides; and where the CPU stands
    in, what would leave a GPU or reach one.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    moves = (torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to)
    from_values = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            reads = func is torch.Tensor.__repr__ or (host.stands_in and func is torch.Tensor.tolist)
            if reads and args[0] not in host:
                tally.syncs += 1
            result = func(*args, **kwargs)
            if not isinstance(result, torch.Tensor):
                return result
            if func in moves:
                return _moved(func, args, kwargs, result, tally, host)
            if func in from_values:
                likeness, data = args[:2] if func is torch.Tensor.new_tensor else (None, args[0])
                _made_of_values(likeness, data, kwargs, result, tally, host)
            elif not tensors_among((args, kwargs)):
                host.mark(result, host=kwargs.get("device") in (None, "cpu"))
            return result

    return Watch()


def _made_of_values(
    likeness: Any, data: Any, kwargs: dict[str, Any], result: torch.Tensor, tally: _Tally, host: HostTensors
) -> None:
    """A tensor was made of Python's values: on a device, ``likeness``'s if there is one, or on the host."""
    import torch

    if isinstance(data, torch.Tensor):
        return  # a copy that operators show
    device = kwargs.get("device")
    at_home = likeness in host if likeness is not None and device is None else device in (None, "cpu")
    host.mark(result, host=at_home)
    # Tensors among the values are read one by one.
    tally.syncs += sum(tensor not in host for tensor in tensors_among([data]))
    tally.syncs += result not in host and (host.stands_in or not _is_array(data))


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor, tally: _Tally, host: HostTensors
) -> torch.Tensor:
    """A tensor was sent somewhere; where the CPU stands in, it is its own copy there."""
    source, target = args[0], _target(func, args, kwargs, host)
    if not host.stands_in or target is None or (source in host) == (target == "host"):
        return result
    non_blocking = kwargs.get("non_blocking", False) or any(argument is True for argument in args[1:3])
    tally.syncs += not non_blocking
    # What is done to the one would not be done to the other.
    copy = result.clone() if result is source else result
    host.mark(copy, host=target == "host")
    return copy


def _is_array(data: object) -> bool:
    """Whether it is an array of NumPy, whose copy to a device is an operator that shows."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(data, numpy.ndarray)


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], host: HostTensors) -> str | None:
    """Where a tensor is to go: ``"host"``, ``"device"``, or ``None`` where it is to stay.

    On the CPU the device that a test is given is ``cpu``, too: the host is meant by ``.cpu()`` and by the word.
    """
    import torch

    if func is torch.Tensor.cpu:
        return "host"
    if func is torch.Tensor.cuda:
        return "device"
    wanted = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    if isinstance(wanted, torch.Tensor):
        return "host" if wanted in host else "device"
    if isinstance(wanted, str):
        return "host" if wanted == "cpu" else "device"
    return "device" if isinstance(wanted, (torch.device, int)) and not isinstance(wanted, bool) else None


# torch.utils.flop_counter knows the attention kernels of GPUs only.


def _attention_flops(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Query [B, H, S, D], key [B, H, L, D], value [B, H, L, E]: scores, and their product with the values."""
    products = _attention_products(query, key, value)
    return products["scores"] + products["values"]


def _attention_backward_flops(_gradient: Any, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """The scores again; gradients of query and key like them; of the scores and of the values like the product."""
    products = _attention_products(query, key, value)
    return 3 * products["scores"] + 2 * products["values"]


def _attention_products(query: Any, key: Any, value: Any) -> dict[str, int]:
    batch, heads, length, width = query
    pairs = batch * heads * length * key[-2]
    return {"scores": 2 * pairs * width, "values": 2 * pairs * value[-1]}
