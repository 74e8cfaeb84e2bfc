"""Record reads by ``tolist`` in TorchScript code. TorchScript reads the memory without an operator or a Python method."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulating.host_values.host_operators import tensors_among
from pytest_gpumem.torch_support.private_api.compiler import around_scripts, lists_of_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.emulating.host_values.mode import HostValues


def follow_scripts(mode: HostValues, is_unknown: Callable[[Any], bool]) -> None:
    """From now on, record a read for each ``tolist`` in a TorchScript function with unknown tensors.

    A function has unknown tensors if an argument is an unknown host tensor, or if it copies an unknown tensor to the host.
    """

    @contextmanager
    def noting(script: Any, args: tuple[Any, ...]) -> Iterator[None]:
        earlier_reads = mode.notes.values_read
        takes_unknown = any(not tensor.is_cuda and is_unknown(tensor) for tensor in tensors_among(args))
        yield
        if not takes_unknown and mode.notes.values_read == earlier_reads:
            return
        for kind in lists_of_script(script):
            if "float" in kind:
                mode.reads.of_float()
            else:
                mode.reads.invalid("a value is read")

    around_scripts(noting)
