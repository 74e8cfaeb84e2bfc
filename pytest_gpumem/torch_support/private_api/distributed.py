"""Process groups, collectives and device meshes."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pytest_gpumem.torch_support.private_api.attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def around_collectives(
    waited: Callable[[], None], broadcasting: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Within the context, call functions when Python waits for a collective, or broadcasts several tensors at once.

    `DistributedDataParallel` makes such broadcasts. In backward, `DistributedDataParallel` waits for other ranks in C++, and
    these waits are not reported.

    Args:
        waited: A function to call after Python has waited for a collective.
        broadcasting: A function that returns a context, in which torch broadcasts the tensors.
    """
    import torch.distributed as dist

    if not dist.is_available():
        yield
        return
    from torch.distributed import _functional_collectives as functional

    def observed(wait: Callable[P, R]) -> Callable[P, R]:
        @wraps(wait)
        def wait_and_report(*args: P.args, **kwargs: P.kwargs) -> R:
            result = wait(*args, **kwargs)
            waited()
            return result

        return wait_and_report

    def within(broadcast: Callable[P, R]) -> Callable[P, R]:
        @wraps(broadcast)
        def broadcast_within(*args: P.args, **kwargs: P.kwargs) -> R:
            with broadcasting():
                return broadcast(*args, **kwargs)

        return broadcast_within

    private_names: Any = dist
    with (
        replaced(dist.Work, "wait", observed(dist.Work.wait)),
        replaced(functional, "wait_tensor", observed(functional.wait_tensor)),
        replaced(dist, "_broadcast_coalesced", within(private_names._broadcast_coalesced)),
    ):
        yield


FAKE = "fake"
"""The name of torch's process group backend without real other ranks."""


def store_of_nobody() -> Any:
    """Return a store with which a process can initialise a process group of the backend `FAKE`, without other ranks.

    Collectives in such a group return at once. Depending on the torch release, a collective fills the other ranks' parts of its
    output with copies of this rank's part, or does not change its output.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def default_store() -> Any:
    """Return the key/value store by which this process's default process group was initialised."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def forget_meshes() -> None:
    """Clear torch's caches for device meshes whose process groups have ended, so a later, equal mesh does not use them."""
    from torch.distributed import device_mesh

    forget_operators_of_meshes()
    resources = getattr(device_mesh, "_mesh_resources", None)
    for name in ("child_to_root_mapping", "root_to_flatten_mapping"):
        mapping = getattr(resources, name, None)
        if isinstance(mapping, dict):
            mapping.clear()


def forget_operators_of_meshes() -> None:
    """Clear torch's cache of decisions about sharded operators.

    The keys in this cache contain device meshes, whose process groups have ended.
    """
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()
