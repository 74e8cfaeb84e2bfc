"""Exchange Python objects between ranks on emulated GPUs, and let a barrier wait.

torch sends a pickled object as a tensor, and NCCL's stand-in only knows this rank's tensors. So a rank would receive its own
object from every rank, and nothing from a broadcast. Example: rank 0 gathers the other ranks' plans for a sharded checkpoint.

Ranks that torchrun started exchange the objects by torch's key/value store instead. Otherwise the other ranks may not exist, so
nothing waits for them. A tensor stands for the tensors with pickled objects that torch would have on the GPU.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections import defaultdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api.distributed import default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""The numbers of a group's next calls. They are the same on each rank, because all ranks make the same calls."""


def exchange_objects() -> None:
    """Replace torch's functions that send objects, and its barrier, for the rest of the process."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    for name, function in _FUNCTIONS.items():
        replacement = _replacement(getattr(dist, name), function)
        setattr(dist, name, replacement)
        setattr(distributed_c10d, name, replacement)


def _replacement(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def replacement(*args: Any, **named: Any) -> Any:
        arguments = signature.bind(*args, **named)
        arguments.apply_defaults()
        ranks = _Ranks.of(arguments.arguments["group"])
        # A barrier's own tensor has a single element, and torch may return the barrier's work.
        result = original(*args, **named) if ranks is None or function is _barrier else None
        if ranks is not None:
            function(ranks, arguments.arguments)
        return result

    return replacement


class _Ranks:
    """A process group's ranks, which exchange objects in a single call."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store = default_store()
        # Groups that share no rank may have the same name.
        members = f"gpumem/{group.group_name}/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        self._key = f"{members}/{next(_calls[members])}"

    @classmethod
    def of(cls, group: Any) -> _Ranks | None:
        """Return a group's ranks; ``None`` if torch itself exchanges the objects, or if other ranks may not exist."""
        import torch.distributed as dist

        if not dist.is_initialized() or not dist.is_torchelastic_launched():
            return None
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            return None  # this process is in no such group
        backends = str(dist.get_backend_config(group))
        return cls(group) if "nccl" in backends and "gloo" not in backends and dist.get_world_size(group) > 1 else None

    def number(self, arguments: Mapping[str, Any], side: str) -> int:
        """Return the rank in the group which the arguments name as ``src`` or ``dst``, or as ``group_src`` or ``group_dst``."""
        import torch.distributed as dist

        if arguments.get(f"group_{side}") is not None:
            return int(arguments[f"group_{side}"])
        rank = arguments[side]
        return 0 if rank is None else dist.get_group_rank(self._group, rank)

    def send(self, value: bytes, to: int | None = None) -> None:
        """Send bytes to a rank in the group, or to every rank."""
        self._store.set(self._slot(self.rank, to), value)

    def receive(self, sender: int, *, to: int | None = None, readers: int = 1) -> bytes:
        """Wait for bytes from a rank. The last of ``readers`` ranks removes them from the store."""
        slot = self._slot(sender, to)
        value = bytes(self._store.get(slot))
        if self._store.add(f"{slot}/read", 1) == readers:
            self._store.delete_key(slot)
            self._store.delete_key(f"{slot}/read")
        return value

    def receive_from_all(self, *, readers: int = 1) -> list[bytes]:
        """Wait for bytes from every rank."""
        return [self.receive(sender, readers=readers) for sender in range(self.size)]

    def _slot(self, sender: int, to: int | None) -> str:
        return f"{self._key}/{sender}/{'all' if to is None else to}"


def _all_gather(ranks: _Ranks, arguments: Mapping[str, Any]) -> None:
    ranks.send(pickle.dumps(arguments["obj"]))
    received = ranks.receive_from_all(readers=ranks.size)
    _allocate(received, ranks.size + 1)
    arguments["object_list"][:] = _objects(received)


def _gather(ranks: _Ranks, arguments: Mapping[str, Any]) -> None:
    sent = pickle.dumps(arguments["obj"])
    ranks.send(sent)
    if ranks.rank == ranks.number(arguments, "dst"):
        received = ranks.receive_from_all()
        _allocate(received, ranks.size + 1)
        arguments["object_gather_list"][:] = _objects(received)
    else:
        _allocate([sent], 1)


def _broadcast(ranks: _Ranks, arguments: Mapping[str, Any]) -> None:
    source = ranks.number(arguments, "src")
    if ranks.rank == source:
        value = pickle.dumps(arguments["object_list"])
        ranks.send(value)
    else:
        value = ranks.receive(source, readers=ranks.size - 1)
        (arguments["object_list"][:],) = _objects([value])
    _allocate([value], 1)


def _scatter(ranks: _Ranks, arguments: Mapping[str, Any]) -> None:
    source = ranks.number(arguments, "src")
    if ranks.rank == source:
        values = [pickle.dumps(value) for value in arguments["scatter_object_input_list"]]
        for rank, value in enumerate(values):
            ranks.send(value, to=rank)
        _allocate(values, ranks.size)
    own = ranks.receive(source, to=ranks.rank)
    _allocate([own], 1)
    arguments["scatter_object_output_list"][:1] = _objects([own])


def _barrier(ranks: _Ranks, arguments: Mapping[str, Any]) -> None:
    if not arguments["async_op"]:
        ranks.send(b"")
        ranks.receive_from_all(readers=ranks.size)


def _objects(values: Iterable[bytes]) -> list[Any]:
    return [pickle.loads(value) for value in values]  # noqa: S301 -- from this job's ranks, as in torch


def _allocate(values: Sequence[bytes], count: int) -> None:
    """Allocate ``count`` times the longest value on the GPU, and free it. torch pads pickled objects to the longest one."""
    torch.empty(count * max(map(len, values)), dtype=torch.uint8, device="cuda")


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "all_gather_object": _all_gather,
    "gather_object": _gather,
    "broadcast_object_list": _broadcast,
    "scatter_object_list": _scatter,
    "barrier": _barrier,
}
