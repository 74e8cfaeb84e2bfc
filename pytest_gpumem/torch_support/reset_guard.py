"""Read a device's peak before measured code resets torch's peak statistics.

Test suites of model libraries often call ``torch.cuda.reset_peak_memory_stats()``. torch has only one peak for each device, so
after such a call in a measured test, the test's earlier peak would be lost.

For example, a step allocates 40 MB, frees them, resets the statistics, and then allocates 10 MB. `Device.pop_peak` still
returns 40 MB.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.allocator import peak_resets
from pytest_gpumem.torch_support.private_api.attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def before_each_reset(read_peak: Callable[[], object], device_type: str) -> Iterator[None]:
    """Within the context, call ``read_peak`` before any torch function resets the peak statistics of a device type.

    The context replaces torch's public function and the private function called by it, because other code may have stored a
    reference to the original public function.
    """
    with ExitStack() as stack:
        for module_name, name in peak_resets(device_type):
            module = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                stack.enter_context(replaced(module, name, _reading_first(original, read_peak)))
        yield


def _reading_first(original: Callable[..., Any], read_peak: Callable[[], object]) -> Callable[..., Any]:
    @wraps(original)
    def reset(*args: Any, **kwargs: Any) -> Any:
        read_peak()
        return original(*args, **kwargs)

    return reset
