"""Compile the C file that counts and records torch's allocations in other processes, and cache the library.

On the CPU, the library counts all memory. On a GPU, it counts the bytes that processes have at the same time, and records the
nodes in autograd's graph.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from importlib.resources import files
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import CacheError, EmulationError
from pytest_gpumem.base.user_cache import cache_root, check_private_folder, make_private_folder
from pytest_gpumem.emulating.emulation.compiler import SHARED_OPTIONS, fill, find_compiler, run_compiler

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE = "allocation_counter.c"
_NAME = "allocation_counter.so"
_PRODUCT = "the counter of allocations"
_OPTIONS = (*SHARED_OPTIONS, "-fexceptions")
"""C++ exceptions of torch pass through the library."""


@functools.cache
def counter_library() -> Path | str:
    """Return the library's path. If it is not in the cache, it is compiled, which takes half a second.

    Returns:
        The path, or the reason why other processes cannot count their allocations here: a clause.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        return (
            "other processes count their allocations only on Linux on x86-64 and aarch64, and this is "
            f"{sys.platform} on {machine}"
        )
    source = (files(__package__) / "native" / _SOURCE).read_text(encoding="utf-8")
    key = hashlib.sha256(f"{machine} {_OPTIONS} {source}".encode()).hexdigest()[:16]
    try:
        cache = cache_root() / "counter"
        make_private_folder(cache)
        folder = cache / key
        if not folder.is_dir():
            compiler = find_compiler("other processes need a compiler once to count their allocations")
            fill(folder, _PRODUCT, lambda draft: _compile(compiler, source, draft))
        check_private_folder(folder)
    except CacheError as error:
        return f"{_PRODUCT} cannot be cached: {error}"
    except EmulationError as error:
        return str(error).replace("\n", " ")
    return folder / _NAME


def _compile(compiler: tuple[str, ...], source: str, draft: Path) -> None:
    file = draft / _SOURCE
    file.write_text(source, encoding="utf-8")
    command = [*compiler, *_OPTIONS, "-o", str(draft / _NAME), str(file), "-lpthread"]
    run_compiler(compiler, command, _PRODUCT)
