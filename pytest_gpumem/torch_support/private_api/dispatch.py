"""Function modes and dispatch modes, and operators outside or beneath them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.torch_support.private_api.compiler import never_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.utils.flop_counter import FlopCounterMode


def run_kernel(operator: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel without the active dispatch modes.

    The modes still intercept the operators that the kernel calls. For example,
    ``run_kernel(torch.ops.aten.add.Tensor, "CPU", (x, y), {})`` adds two tensors on the CPU.

    Args:
        operator: An operator overload, such as ``torch.ops.aten.add.Tensor``.
        key: The kernel's dispatch key, for example ``"CPU"``, ``"CUDA"``, ``"SparseCUDA"`` or ``"SparseCsrCUDA"``.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.

    Returns:
        The operator's result.
    """
    from torch._C import DispatchKey, DispatchKeySet

    return operator.redispatch(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def is_higher_order(operator: object) -> bool:
    """Return whether an operator takes functions as arguments, like `torch.cond` and ``flex_attention``."""
    from torch._ops import HigherOrderOperator

    return isinstance(operator, HigherOrderOperator)


def flop_counter(custom_mapping: Mapping[Any, Callable[..., int]]) -> FlopCounterMode:
    """Return torch's FLOP counter, but changed so its first call does not import the compiler.

    ``custom_mapping`` contains formulas for further operators, by operator.
    """
    from torch.utils import flop_counter as counters

    mode = getattr(counters, "_FlopCounterMode", None)
    function = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if function is not None and not hasattr(function, "__dynamo_disable"):
        function.__dynamo_disable = never_compiled(function)
    return counters.FlopCounterMode(display=False, custom_mapping={**custom_mapping})


def watched_operators(
    called: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any],
) -> AbstractContextManager[object]:
    """Return a context in which every operator below autograd calls ``called`` instead.

    Enter this context before `flop_counter`, because the counter keeps torch.compile from compiling ``called``. The context
    uses `TorchDispatchMode`, which torch's documentation recommends although its module is private.

    Args:
        called: A function with the parameters ``(operator, args, kwargs, run)``. ``run()`` runs the operator. The program gets
            ``called``'s result as the operator's result. For example, ``lambda operator, args, kwargs, run: run()`` changes
            nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise torch would add a wrapper, which imports the compiler

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            return called(func, args, kwargs, lambda: func(*args, **kwargs))

    mode: AbstractContextManager[object] = Watch()  # type: ignore[no-untyped-call]
    return mode


def function_mode(call: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[object]:
    """Return a mode that calls ``call(func, args, kwargs)`` instead of each torch function."""
    mode: AbstractContextManager[object] = _function_mode_class()(call)
    return mode


@cache
def _function_mode_class() -> Any:
    """Return the mode's class, which is made only once: a class is a reference cycle and would appear in reported garbage."""
    from torch.overrides import TorchFunctionMode

    class FunctionMode(TorchFunctionMode):
        def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
            self._call = call
            super().__init__()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._call(func, args, kwargs or {})

    return FunctionMode


def outside_torch_function() -> AbstractContextManager[object]:
    """Return a context in which torch does not call ``__torch_function__``, neither on modes nor on tensor subclasses."""
    import torch

    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())


def takes_numbers_for_tensors(name: str) -> bool:
    """Return whether an operator accepts Python numbers for tensor arguments, as in ``torch.ops.aten.mul(tensor, 2)``."""
    import torch

    return bool(torch._C._should_allow_numbers_as_tensors(name))


@contextmanager
def beneath_modes() -> Iterator[None]:
    """Disable all function modes, dispatch modes and tensor subclasses for torch calls within the context."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def current_dispatch_mode() -> object | None:
    """Return the innermost active dispatch mode in this thread; ``None`` if no dispatch mode is active."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode: object | None = _get_current_dispatch_mode()
    return mode
