"""Lists that TorchScript makes of tensors: ``tolist`` reads memory there, and no operator or method of Python shows it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.host_values.host_operators import tensors_among
from pytest_gpumem.torch_support.private_api import around_scripts, lists_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.host_values.mode import HostValues


def follow_scripts(mode: HostValues, is_unknown: Callable[[Any], bool]) -> None:
    """Note lists that scripts make while they copy unknown tensors to the host, or are given such tensors of the host."""

    @contextmanager
    def noting(script: Any, given: tuple[Any, ...]) -> Iterator[None]:
        before = mode.values_read
        are_given = any(not tensor.is_cuda and is_unknown(tensor) for tensor in tensors_among(given))
        yield
        if not are_given and mode.values_read == before:
            return
        for kind in lists_of_script(script):
            if "float" in kind:
                mode.reads.of_float()
            else:
                mode.reads.invalid("a value is read")

    around_scripts(noting)
