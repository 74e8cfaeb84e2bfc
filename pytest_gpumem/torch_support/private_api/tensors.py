"""Tensors, and functions that read or make tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch.autograd.profiler
    import torch.profiler


def parts_of_coo(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse COO tensor.

    torch's public methods cannot be used, because they raise an exception for an uncoalesced tensor.
    """
    import torch

    # Call the methods of `torch.Tensor`, because a subclass may override them.
    base: Any = torch.Tensor
    return base._indices(tensor), base._values(tensor)


def data_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 for a tensor without memory.

    Unlike ``data_ptr()``, this neither warns about fake tensors nor copies the memory of a lazy clone.

    Raises:
        RuntimeError: The tensor has no storage, for example a sparse tensor.
    """
    import torch

    core: Any = torch._C
    return int(core._data_address(tensor))


def reduced_with_attribute(
    reduced: tuple[Any, ...], kind: type[torch.Tensor], name: str, value: object
) -> tuple[Any, ...]:
    """Add an attribute to the pickled form of a tensor. torch sets this attribute when it loads the tensor.

    Args:
        reduced: The pickled form, as ``__reduce_ex__`` returned it.
        kind: The tensor's class.
        name: The attribute's name.
        value: The attribute's value. Its type must be allowed by ``torch.load(..., weights_only=True)``.
    """
    from torch._tensor import _rebuild_from_type_v2

    rebuild, arguments = reduced
    return _rebuild_from_type_v2, (rebuild, kind, arguments, {name: value})


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the innermost tensor in a wrapper from `torch.func` or `torch.export`. Wrappers have no storage themselves."""
    import torch
    from torch._C import _functorch

    while True:
        if _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        elif torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        else:
            return tensor


def print_by_way_of_the_host(within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """From now on, let torch print a GPU tensor from a copy on the host.

    torch's own code for printing disables dispatch modes and then selects elements on the GPU. So the dispatch mode for
    emulated GPUs would miss the operators that select these elements.

    Args:
        within: A function that returns a context, in which tensors are printed.
    """
    import torch

    original = cast("Callable[[torch.Tensor, int], str]", torch._tensor_str._tensor_str)

    def printed(tensor: torch.Tensor, indent: int) -> str:
        with within():
            return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)

    torch._tensor_str._tensor_str = printed


def remember_functions_that_take_a_device() -> None:
    """Make torch build its set of functions with a ``device`` argument now, before this package replaces some of them.

    A default device (``with torch.device("cuda"):``) applies only to functions in this set. Without this call, torch would
    build the set at its first use, with this package's replacements instead of torch's functions.
    """
    from torch.utils import _device

    _device._device_constructors()
