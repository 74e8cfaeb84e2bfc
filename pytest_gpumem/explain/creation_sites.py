"""Creation sites of tensors from before a recording: the lines that made parameters and buffers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.reachability import storage_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.explain.sites import Site, Sites


@contextmanager
def creation_sites(sites: Sites, found: dict[int, Site]) -> Iterator[None]:
    """Enter the tensors that torch functions make within the context in ``found``: the line of the call, by address."""
    import torch
    from torch.overrides import TorchFunctionMode

    def addresses(value: object) -> set[int]:
        tensors = (one for one in tensors_in(value) if type(one) in (torch.Tensor, torch.nn.Parameter))
        return {storage.data_ptr() for one in tensors if (storage := storage_of(one)) is not None}

    class Births(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if getattr(func, "__name__", "") != "__get__":
                # What works in place makes nothing.
                made = addresses(result)
                if made:
                    for address in made - addresses((args, kwargs)):
                        found[address] = sites.here(2)
            return result

    with Births():
        yield
