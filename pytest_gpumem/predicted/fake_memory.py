"""Allocation events of fake tensors, which have a shape and no memory: what a step would allocate, without doing so.

A dispatch mode sees what every operator returns, forward and backward. A storage among it that is new was allocated, and
a weak reference tells when it is freed. Both are told by spans in a profile, where they are found within the operators, the
nodes of the autograd graph and the marks around them, as allocations that the profiler has seen by itself.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from pytest_gpumem.devices.event_tree import tokens_of
from pytest_gpumem.devices.events import AllocationEvent, Seen
from pytest_gpumem.devices.torch_internals import quiet_kineto, span
from pytest_gpumem.measurement import MeasuringError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.devices.events import Token
    from pytest_gpumem.explain.sites import Site, Sites

_ALLOCATED = "gpumem+"
_FREED = "gpumem-"

_CUT_SHORT = (
    "the recording of fake tensors was cut short: only one profiler can run at a time, "
    "and the step started or stopped another"
)


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    nbytes: int
    """The storage's own bytes, before rounding."""
    storage: weakref.ref[torch.UntypedStorage]


class FakeMemory:
    """The storages of the fake tensors that are made while it is `entered`.

    Each has a number that stands for its address, and is never used again. ``granularity`` are the bytes that an allocator
    rounds up to: 512 for CUDA's. ``assumed`` is what a tensor's value is taken for where code reads it (``loss.item()``,
    whether gradients of a `GradScaler` are finite: 0 for yes); ``None``: reading one raises, because there is none.
    """

    def __init__(self, granularity: int = 1, assumed: float | None = None) -> None:
        self.granularity = granularity
        self.assumed = assumed
        self.births: dict[int, Site] = {}
        """The lines that made blocks, by number, where they were asked for (`born`)."""
        self._mode = FakeTensorMode()
        self._blocks: dict[int, _Block] = {}
        self._numbers = 0
        self._sites: Sites | None = None
        self._recording = False
        self._told = 0

    @contextmanager
    def entered(self) -> Iterator[FakeTensorMode]:
        """Within, tensors are fake, and their storages known."""
        with self._mode, _Watching(self):
            yield self._mode

    def faked(self, value: Any) -> Any:
        """A value with fake tensors in the places of real ones, which are only looked at."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            made = self._mode.from_tensor(tensor)
            self.saw(made)
            return made

        return tree_map_only(torch.Tensor, fake, value)

    def live(self) -> dict[int, int]:
        """The blocks that are there: number -> bytes, rounded up."""
        return {block.number: self._rounded(block.nbytes) for block in self._blocks.values()}

    def blocks_of(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Number and bytes, before rounding, of the block that a tensor lies in; none if it is not one of ours."""
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return []
        block = self._blocks.get(id(tensor.untyped_storage()))
        return [] if block is None else [(block.number, block.nbytes)]

    @contextmanager
    def born(self, sites: Sites) -> Iterator[None]:
        """Within, the lines that make tensors are entered in `births`."""
        before, self._sites = self._sites, sites
        try:
            yield
        finally:
            self._sites = before

    @contextmanager
    def recorded(self, tokens: list[Token]) -> Iterator[None]:
        """A stretch whose allocations are told, as `Device.recorded` does. Raises `MeasuringError` when it was cut short."""
        profiler = profile(activities=[ProfilerActivity.CPU])
        with quiet_kineto():
            profiler.start()
        self._recording, self._told = True, 0
        try:
            yield
        finally:
            self._recording = False
            try:
                profiler.stop()
                recorded = tokens_of(profiler, torch.device("cpu"), _told_by)
            except RuntimeError:  # torch 2.6 refuses to stop what somebody else has stopped; later ones give no events
                recorded = []
            if sum(isinstance(token, AllocationEvent) for token in recorded) != self._told:
                raise MeasuringError(_CUT_SHORT)
            tokens.extend(recorded)

    def saw(self, value: object) -> None:
        """Find the storages that are new in what an operator returned. Raises `MeasuringError` for those not to be told."""
        for tensor in tree_iter(value):
            if isinstance(tensor, FakeTensor):
                if tensor.layout is not torch.strided:
                    raise MeasuringError(f"how many bytes a fake tensor of layout {tensor.layout} has cannot be told")
                self._saw(tensor, tensor.untyped_storage())

    def _saw(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        # The storage's object stays the same as long as there is a storage, and a reference to it tells of its death.
        key, nbytes = id(storage), storage.nbytes()
        known = self._blocks.get(key)
        if known is None:
            if not nbytes:
                return
            self._numbers += 1
            number, reference = self._numbers, weakref.ref(storage, lambda _: self._died(key))
            if self._sites is not None:
                self.births[number] = self._sites.here(3)
        elif nbytes == known.nbytes:
            return
        else:
            # Resized: another block that takes the place of the one before.
            number, reference = known.number, known.storage
        self._blocks[key] = _Block(number, nbytes, reference)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        self._tell(f"{_ALLOCATED}{number}:{self._rounded(nbytes)}:{dtype}:{shape}")

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.births.pop(block.number, None)
        self._tell(f"{_FREED}{block.number}:{self._rounded(block.nbytes)}")

    def _tell(self, event: str) -> None:
        if self._recording:
            self._told += 1
            with span(event):
                pass

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func is not torch.ops.prim.device.default:
            # Operators made of others come in one piece, unlike where autograd has taken them apart.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        try:
            # What runs below autograd calls torch's functions, too, and the step does not.
            with DisableTorchFunction():
                result = func(*args, **kwargs)
        except DataDependentOutputException:
            if self._memory.assumed is None or func is not torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - its name
                raise
            return _as_scalar(self._memory.assumed, args[0].dtype)
        self._memory.saw(result)
        return result


def _as_scalar(value: float, dtype: torch.dtype) -> complex:
    if dtype is torch.bool:
        return bool(value)
    return complex(value) if dtype.is_complex else float(value) if dtype.is_floating_point else int(value)


def _told_by(time_ns: int, name: str) -> Iterator[Token]:
    """The tokens that a span of this name stands for."""
    if name.startswith(_ALLOCATED):
        number, nbytes, dtype, shape = name.removeprefix(_ALLOCATED).split(":")
        yield AllocationEvent(time_ns, int(number), int(nbytes))
        yield Seen(int(number), dtype, tuple(int(size) for size in shape.split(",") if size))
    elif name.startswith(_FREED):
        number, nbytes = name.removeprefix(_FREED).split(":")
        yield AllocationEvent(time_ns, int(number), -int(nbytes))
