"""Reset guard: reads peaks before measured code resets the process's peak statistics itself.

Test suites of model libraries call ``torch.cuda.reset_peak_memory_stats()`` freely. There is one peak a process, so such a
call in the middle of a measured test would hide everything before it.
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
def before_each_reset(see: Callable[[], object], device_type: str) -> Iterator[None]:
    """Call ``see`` before any of torch's functions that reset the peak statistics of this type of device does so.

    A suite that kept a reference to the public function (in a table of backends) calls the private one, which is replaced, too.
    """
    with ExitStack() as stack:
        for module_name, name in peak_resets(device_type):
            module = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                stack.enter_context(replaced(module, name, _seen_first(original, see)))
        yield


def _seen_first(original: Callable[..., Any], see: Callable[[], object]) -> Callable[..., Any]:
    @wraps(original)
    def reset(*args: Any, **kwargs: Any) -> Any:
        see()
        return original(*args, **kwargs)

    return reset
