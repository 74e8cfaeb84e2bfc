"""Which line made the tensors that are there before a recording begins: parameters, buffers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.reach import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.explain.sites import Site, Sites


@contextmanager
def births(sites: Sites, found: dict[int, Site]) -> Iterator[None]:
    """Within, a tensor that a torch function makes is entered in ``found``: its address, and the line of the call."""
    import torch
    from torch.overrides import TorchFunctionMode

    def addresses(value: Any) -> set[int]:
        if isinstance(value, (list, tuple)):
            return set().union(*map(addresses, value))
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            return set()
        storage = storage_of(value)
        return set() if storage is None else {storage.data_ptr()}

    class Births(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if getattr(func, "__name__", "") != "__get__":
                # What works in place makes nothing.
                made = addresses(result)
                if made:
                    for address in made - addresses(list(args)) - addresses(list(kwargs.values())):
                        found[address] = sites.here(2)
            return result

    with Births():
        yield
