"""Puts marks into a recording while a step runs: which module, which line, which optimizer, and what blocks are.

Nothing here looks at what the device does; a source (`Device.recorded`) does, and finds the marks among its events. A mark
is a span of its name. Operators are not intercepted: a dispatch mode would make autograd choose other
formulas, and so other memory. What Python calls is, above autograd, with a `TorchFunctionMode`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.devices.event_tree import MARK_PREFIX
from pytest_gpumem.devices.events import Seen
from pytest_gpumem.devices.torch_internals import engine_run_within, span
from pytest_gpumem.explain.trace import Label, Mark, tensor_text
from pytest_gpumem.reach import reachable_tensors, storages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from pytest_gpumem.explain.sites import Site, Sites

    BlocksOf = Callable[[torch.Tensor], Iterable[tuple[int, int]]]

Level = Literal["calls", "modules", "phases"]
"""How closely a step is watched: each call of a torch function, each of a module, or only its phases."""

_BORN_EARLY = ("parameter", "buffer")
_ZERO = ("zero_", "_foreach_zero_")
# What reads a tensor's properties and allocates nothing; a step calls these thousands of times.
_IDLE = frozenset({"__get__", "size", "dim", "stride", "numel", "data_ptr", "is_floating_point", "untyped_storage"})


class Tracker:
    """Marks and looks of one recording. ``births`` are the lines that allocated what was there before, by address.

    ``blocks_of`` gives address and bytes of each block of a tensor; by default those of its storages on ``device``.
    """

    def __init__(
        self,
        device: torch.device,
        sites: Sites,
        level: Level = "calls",
        births: Mapping[int, Site] | None = None,
        blocks_of: BlocksOf | None = None,
    ) -> None:
        self.marks: list[Mark] = []
        self.looks: dict[int, tuple[Label, ...]] = {}
        self.results: dict[int, tuple[Seen, ...]] = {}
        """The tensors that each call returned, by the index of its mark."""
        self.failed_in = -1
        """The innermost call that an exception came out of first; -1 for none."""
        self._device = device
        self._sites = sites
        self._level = level
        self._births = births or {}
        self._blocks_of = blocks_of or self._blocks_on_device
        self._busy = False
        self._modules: list[tuple[int, str, Any]] = []
        self._paths: dict[int, str] = {}
        self._roots: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._optimizing: list[Any] = []
        self._inputs: list[object] = []
        self._stepped: dict[int, str] = {}
        """The line that calls each optimizer's step: it is there that its state is made."""
        self._zeroed: dict[int, str] = {}
        """The line that fills a gradient with zeros, and so keeps it: by address."""

    def know(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: object = None,
    ) -> None:
        """Tell what there is; models and optimizers that run meanwhile are found by themselves."""
        if model is not None:
            self._know_root(model)
        if optimizer is not None:
            self._optimizers.append(optimizer)
        if inputs is not None:
            self._inputs.append(inputs)

    def know_value(self, value: object, depth: int = 2) -> None:
        """Know the models and optimizers that a value is, or holds in containers."""
        import torch

        if isinstance(value, torch.nn.Module):
            self.know(model=value)
        elif isinstance(value, torch.optim.Optimizer):
            self.know(optimizer=value)
        elif depth and isinstance(value, dict):
            for held in list(dict.values(value)):
                self.know_value(held, depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            for held in list(value):
                self.know_value(held, depth - 1)

    def forget(self) -> None:
        """Let go of the models, optimizers and inputs that are known; marks and looks stay."""
        self._roots.clear()
        self._optimizers.clear()
        self._inputs.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, modules, optimizers and calls are marked, as closely as the level says."""
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
                stack.enter_context(engine_run_within(lambda: _calls_marked(self)))
                stack.enter_context(_calls_marked(self))
            try:
                yield
            finally:
                for _, _, started in reversed(self._modules):
                    started.__exit__(None, None, None)
                self._modules.clear()
                self._end_optimizing()

    @contextmanager
    def mark(self, mark: Mark) -> Iterator[None]:
        """A span of the recording."""
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

    def look(self) -> None:
        """Label what can be found now: parameters, buffers, gradients, optimizer state and inputs."""
        was_busy, self._busy = self._busy, True
        try:
            number = len(self.marks)
            self.looks[number] = tuple(self._labels())
            self._begin(Mark("look")).__exit__(None, None, None)
        finally:
            self._busy = was_busy

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function within a mark."""
        name = getattr(func, "__name__", "")
        if self._busy or name in _IDLE:
            return func(*args, **kwargs)
        # Above: this, __torch_function__.
        site = self._sites.here(3)
        number = len(self.marks)
        with self.mark(Mark("call", self._modules[-1][1] if self._modules else "", *site)):
            result = func(*args, **kwargs)
            returned = tuple(self._seen(result))
            if returned:
                self.results[number] = returned
        if name in _ZERO:
            self._note_zeroed(args, site)
        elif name == "backward":
            self.look()
        return result

    def _begin(self, mark: Mark) -> AbstractContextManager[object]:
        started = span(f"{MARK_PREFIX}{len(self.marks)}")
        self.marks.append(mark)
        started.__enter__()
        return started

    def _module_begins(self, module: torch.nn.Module, _args: object) -> None:
        if not self._modules and id(module) not in self._paths:
            self._know_root(module)
        path = self._paths.get(id(module))
        if path is None:
            path = self._modules[-1][1] if self._modules else type(module).__name__
        if len(self._modules) == 0:
            self.look()
        self._modules.append((id(module), path, self._begin(Mark("module", path, *self._sites.here(2)))))

    def _module_ends(self, module: torch.nn.Module, _args: object, _result: object) -> None:
        while self._modules:
            known, _, started = self._modules.pop()
            started.__exit__(None, None, None)
            if known == id(module):
                return

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._end_optimizing()
        self._stepped[id(optimizer)] = self._sites.here().user
        self.look()
        self._optimizing.append(self._begin(Mark("optimizer")))

    def _optimizer_ends(self, *_: object) -> None:
        self._end_optimizing()
        self.look()

    def _end_optimizing(self) -> None:
        while self._optimizing:
            self._optimizing.pop().__exit__(None, None, None)

    def _know_root(self, module: torch.nn.Module) -> None:
        if any(module is root for root in self._roots):
            return
        self._roots.append(module)
        for path, child in module.named_modules():
            self._paths.setdefault(id(child), path or type(module).__name__)

    def _labels(self) -> Iterator[Label]:
        owners: dict[int, str] = {}
        for root in self._roots:
            name = type(root).__name__
            for path, parameter in root.named_parameters():
                owner = path.rpartition(".")[0] or name
                owners[id(parameter)] = owner
                yield from self._label("parameter", owner, [parameter.detach()])
                if parameter.is_leaf and parameter.grad is not None:
                    yield from self._label("gradient", owner, [parameter.grad])
            for path, buffer in root.named_buffers():
                yield from self._label("buffer", path.rpartition(".")[0] or name, [buffer])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owner = owners.get(id(parameter), "")
                    yield from self._label("parameter", owner, [parameter.detach()])
                    if parameter.is_leaf and parameter.grad is not None:
                        yield from self._label("gradient", owner, [parameter.grad])
                    yield from self._label(
                        "optimizer state",
                        owner,
                        reachable_tensors([optimizer.state.get(parameter)]),
                        self._stepped.get(id(optimizer), ""),
                    )
        yield from self._label("input", "", reachable_tensors(self._inputs))

    def _seen(self, result: object) -> Iterator[Seen]:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, _tensor_type()) and _is_dense(value):
                for address, nbytes in self._blocks_of(value):
                    if nbytes == value.nbytes:
                        yield Seen(address, str(value.dtype).removeprefix("torch."), tuple(value.shape))

    def _note_zeroed(self, args: object, site: Site) -> None:
        for tensor in reachable_tensors([args]):
            for address, _ in self._blocks_of(tensor):
                self._zeroed[address] = site.user

    def _line(self, category: str, address: int, maker: str) -> str:
        """Where a block that was there before comes from. Later blocks may lie where something else was born."""
        if category in _BORN_EARLY and address in self._births:
            return self._births[address].user
        return self._zeroed.get(address, "") if category == "gradient" else maker

    def _label(self, category: str, module: str, tensors: Iterable[torch.Tensor], maker: str = "") -> Iterator[Label]:
        for tensor in tensors:
            blocks = list(self._blocks_of(tensor))
            text = tensor_text(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for address, nbytes in blocks:
                whole = len(blocks) == 1 and _is_dense(tensor) and nbytes == tensor.nbytes
                yield Label(address, category, module, text if whole else "", self._line(category, address, maker))

    def _blocks_on_device(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        for storage in storages_of([tensor], self._device):
            yield storage.data_ptr(), storage.nbytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided


def _tensor_type() -> type[torch.Tensor]:
    import torch

    return torch.Tensor


@cache
def _calls() -> Any:
    """Made once: a class is a reference cycle, and would be among the garbage that is told."""
    from torch.overrides import TorchFunctionMode

    class Calls(TorchFunctionMode):
        def __init__(self, tracker: Tracker) -> None:
            self._tracker = tracker
            super().__init__()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._tracker.call(func, args, kwargs or {})

    return Calls


def _calls_marked(tracker: Tracker) -> Any:
    return _calls()(tracker)
