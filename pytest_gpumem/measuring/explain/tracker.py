"""Put marks for modules, lines and optimizers into a recording while a step runs, and take ownership snapshots.

`Device.recorded` records the device's events, and the marks among the events. A mark is a profiler span, whose name contains
the mark's index. Calls from Python are intercepted above autograd, with a `TorchFunctionMode`. Operators are not intercepted,
because a dispatch mode would make autograd choose other formulas with other memory.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.facts.values.events import TensorRecord
from pytest_gpumem.measuring.devices.profiled import MARK_PREFIX
from pytest_gpumem.measuring.explain.owners import TensorOwners
from pytest_gpumem.measuring.explain.trace import Label, Mark
from pytest_gpumem.torch_support.private_api.autograd import engine_run_within
from pytest_gpumem.torch_support.private_api.dispatch import function_mode, outside_torch_function
from pytest_gpumem.torch_support.private_api.profiler import span
from pytest_gpumem.torch_support.static_access import contents_of, dense_bytes, dtype_and_shape, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.measuring.explain.sites import Site, Sites

Level = Literal["calls", "modules", "phases"]
"""The level of detail: each torch function call, each module call, or only phases."""

_ZERO = ("zero_", "_foreach_zero_")
# Functions that read a tensor's properties and allocate nothing. They get no marks, because a step calls them thousands of
# times.
_IDLE = frozenset({"__get__", "size", "dim", "stride", "numel", "data_ptr", "is_floating_point", "untyped_storage"})


class Tracker:
    """Adds marks and ownership snapshots to a recording.

    Args:
        device: The recorded device.
        sites: Finds the lines of calls.
        level: The level of detail.
        creation_sites: As in `TensorOwners`.
        snapshots: If False, no tensors are read. Then only `module` and the marks are available.
    """

    def __init__(
        self,
        device: torch.device,
        sites: Sites,
        level: Level = "calls",
        creation_sites: Mapping[int, Site] | None = None,
        *,
        snapshots: bool = True,
    ) -> None:
        self.marks: list[Mark] = []
        self.snapshots: dict[int, tuple[Label, ...]] = {}
        self.results: dict[int, tuple[TensorRecord, ...]] = {}
        """The tensors returned by each call, by the index of its mark."""
        self.failed_in = -1
        """The index of the mark around the call in which the first exception was raised; -1 for none."""
        self._device = device
        self._sites = sites
        self._level = level
        self._takes_snapshots = snapshots
        self.owners = TensorOwners(device, creation_sites or {})
        self._busy = False
        self._thread = threading.get_ident()
        self._modules: list[tuple[int, str, Any, int]] = []
        """The running modules, outermost first: id, path, span, and the calling frame's id."""
        self._optimizing: list[Any] = []

    @property
    def module(self) -> str:
        """Return the innermost running module's path; empty if no module runs."""
        return self._modules[-1][1] if self._modules else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark modules, optimizers and calls within the context.

        Level ``modules`` leaves out the calls, and level ``phases`` leaves out all three.
        """
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        with ExitStack() as stack:
            if self._level != "phases":
                for handle in (
                    register_module_forward_pre_hook(self._module_begins),
                    register_module_forward_hook(self._module_ends, always_call=True),
                    register_optimizer_step_pre_hook(self._optimizer_begins),
                    register_optimizer_step_post_hook(self._optimizer_ends),
                ):
                    stack.callback(handle.remove)
            if self._level == "calls":
                stack.enter_context(engine_run_within(lambda _: function_mode(self.call)))
                stack.enter_context(function_mode(self.call))
            try:
                yield
            finally:
                for _, _, started, _ in reversed(self._modules):
                    started.__exit__(None, None, None)
                self._modules.clear()
                self._end_optimizing()

    @contextmanager
    def mark(self, mark: Mark) -> Iterator[None]:
        """Mark a span in the recording."""
        number = len(self.marks)
        started = self._begin(mark)
        try:
            yield
        except Exception:
            if self.failed_in < 0:
                self.failed_in = number
            raise
        finally:
            started.__exit__(None, None, None)

    def snapshot(self) -> None:
        """Take an ownership snapshot: parameters, buffers, gradients, optimizer state and inputs."""
        if not self._takes_snapshots:
            return
        was_busy, self._busy = self._busy, True
        try:
            number = len(self.marks)
            with outside_torch_function():
                self.snapshots[number] = tuple(self.owners.labels())
            self._begin(Mark("snapshot")).__exit__(None, None, None)
        finally:
            self._busy = was_busy

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function within a mark."""
        name = getattr(func, "__name__", "")
        if self._busy or name in _IDLE or self._is_another_thread():
            return func(*args, **kwargs)
        # Three frames up: `call`, `FunctionMode.__torch_function__`, and the caller.
        site = self._sites.caller_site(3)
        module_frame = self._modules[-1][3] if self._modules else 0
        function, caller, caller_function = self._sites.function(name, 3, module_frame)
        if self._modules and function == "forward":
            function = ""  # the module's mark already shows the grad mode in forward
        if self._modules and caller_function == "forward":
            caller_function = ""
        number = len(self.marks)
        mark = Mark(
            "call",
            self.module,
            *site,
            _autograd_records(),
            function,
            caller,
            caller_function,
            self._casts(args, kwargs),
        )
        with self.mark(mark):
            result = func(*args, **kwargs)
            returned = tuple(self._seen(result))
            if returned:
                self.results[number] = returned
        if name in _ZERO:
            self.owners.zeroed(args, site.user)
        elif name == "backward":
            self.snapshot()
        return result

    def _casts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Return the sizes in bytes of the weight copies that autocast may make and cache in a call with these arguments.

        For example, 1 MiB for a float32[1024, 512] under bfloat16. autocast caches copies of float32 leaves with a gradient, so
        a weight used twice is cast once. If another argument's copy has the same size, this size is left out, because the two
        copies look alike.
        """
        import torch

        device_type = self._device.type
        if not torch.is_autocast_enabled(device_type) or not torch.is_autocast_cache_enabled():
            return frozenset()
        item_bytes = torch.get_autocast_dtype(device_type).itemsize
        cached: set[int] = set()
        uncached: set[int] = set()
        with outside_torch_function():
            for value in (*args, *kwargs.values()):
                if type(value) in (torch.Tensor, torch.nn.Parameter) and value.dtype is torch.float32:
                    sizes = cached if value.is_leaf and value.requires_grad else uncached
                    sizes.add(value.numel() * item_bytes)
        return frozenset(cached - uncached)

    def _begin(self, mark: Mark) -> AbstractContextManager[object]:
        started = span(f"{MARK_PREFIX}{len(self.marks)}")
        self.marks.append(mark)
        started.__enter__()
        return started

    def _module_begins(self, module: torch.nn.Module, _args: object) -> None:
        if self._is_another_thread():
            return
        if not self._modules:
            self.owners.model(module)
        path = self.owners.path_of(module)
        if path is None:
            path = self._modules[-1][1] if self._modules else type(module).__name__
        if len(self._modules) == 0:
            self.snapshot()
        caller_function = self._sites.around(2, self._modules[-1][3] if self._modules else 0)
        if self._modules and caller_function == "forward":
            caller_function = ""
        mark = Mark(
            "module", path, *self._sites.caller_site(2), grad=_autograd_records(), caller_function=caller_function
        )
        calling_frame = sys._getframe(1)  # noqa: SLF001 - as in `Sites.caller_site`
        self._modules.append((id(module), path, self._begin(mark), id(calling_frame)))

    def _module_ends(self, module: torch.nn.Module, _args: object, _result: object) -> None:
        if self._is_another_thread():
            return
        while self._modules:
            module_id, _, started, _ = self._modules.pop()
            started.__exit__(None, None, None)
            if module_id == id(module):
                return

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_another_thread():
            return
        self._end_optimizing()
        self.owners.optimizer(optimizer, self._sites.caller_site().user)
        self.snapshot()
        self._optimizing.append(self._begin(Mark("optimizer")))

    def _optimizer_ends(self, *_: object) -> None:
        if self._is_another_thread():
            return
        self._end_optimizing()
        self.snapshot()

    def _end_optimizing(self) -> None:
        while self._optimizing:
            self._optimizing.pop().__exit__(None, None, None)

    def _is_another_thread(self) -> bool:
        """Return whether this is another Python thread. Spans belong to a single thread, so other threads' calls get no marks.

        Autograd's threads are not Python threads, and run while the thread that called backward waits. So they get marks.
        """
        if threading.get_ident() == self._thread:
            return False
        return any(thread.ident == threading.get_ident() for thread in threading.enumerate())

    def _seen(self, result: object) -> Iterator[TensorRecord]:
        import torch

        for value in contents_of(result) if is_a(result, tuple, list) else (result,):
            if is_a(value, torch.Tensor):
                for address, nbytes in self.owners.blocks_of(value):
                    if nbytes == dense_bytes(value):
                        yield TensorRecord(address, *dtype_and_shape(value))


def _autograd_records() -> bool:
    import torch

    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
