"""Read peaks before measured code resets the process's peak statistics.

Test suites of model libraries often call ``torch.cuda.reset_peak_memory_stats()``. A process has only one peak per device, so a
call during a measured test would hide everything before it.

For example, a step peaks at 40 MB, resets the statistics, and then peaks at 10 MB. `Device.pop_peak` still returns 40 MB.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import peak_resets, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def before_each_reset(read_peak: Callable[[], object], device_type: str) -> Iterator[None]:
    """Call ``read_peak`` before each torch function that resets a device type's peak statistics.

    A suite may hold a reference to the public function, for example in a table of backends. The public function calls a private
    function, and this context replaces both.
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
