"""Find functions in NVIDIA's libraries needed by installed packages other than torch, for example bitsandbytes.

The stand-ins export these functions as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.base.errors import NotElf
from pytest_gpumem.emulating.emulation.elf import read_needs
from pytest_gpumem.emulating.emulation.libraries import LIBRARIES, library_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Needs = dict[str, list[tuple[str, str | None]]]
"""Soname -> needed functions, each with its version node: ``{"libcudart.so.13": [("cudaMalloc", "libcudart.so.13")]}``.

If a package's library does not name the other library, the key has no version: ``{"libcublas": [("cublasHgemm", None)]}``. For
example, vLLM's libraries rely on torch to load cuBLAS.
"""
_DEPTH = 2
"""The depth to which a package's folders are searched for shared libraries."""
_NOT_THEIRS = ("torch", "nvidia", "triton")


def needed_beside(packages: Path, cache: Path) -> Needs:
    """Return the functions in NVIDIA's libraries needed by packages other than torch.

    The result is cached until a package is installed or removed, because reading all packages takes half a second.

    Args:
        packages: The folder of installed packages.
        cache: The folder for the cached result.
    """
    installed = sorted(path.name for path in packages.glob("*.dist-info"))
    cached = (
        cache / f"beside-{hashlib.sha256(repr((str(packages), installed, LIBRARIES)).encode()).hexdigest()[:16]}.json"
    )
    # If the cached file is missing or invalid, the packages are read again.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        plain = json.loads(cached.read_text(encoding="utf-8"))
        return {
            soname: [(str(name), None if version is None else str(version)) for name, version in needed]
            for soname, needed in plain.items()
        }
    needs = _read(packages)
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, json.dumps(needs))
    return needs


def _read(packages: Path) -> Needs:
    needs: dict[str, set[tuple[str, str | None]]] = {}
    for package in sorted(packages.iterdir()):
        if package.name in _NOT_THEIRS or package.name.endswith(".dist-info") or not package.is_dir():
            continue
        for path in _libraries_in(package, _DEPTH):
            with suppress(NotElf, OSError):
                for symbol in read_needs(path).symbols:
                    if symbol.library is None:
                        stems = [library.stem for library in LIBRARIES if library.symbols.match(symbol.name)]
                    else:
                        stems = [symbol.library] if library_of(symbol.library) is not None else []
                    for stem in stems:
                        needs.setdefault(stem, set()).add((symbol.name, symbol.version))
    return {soname: sorted(needed, key=repr) for soname, needed in sorted(needs.items())}


def _libraries_in(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from _libraries_in(folder / entry.name, depth - 1)
            elif entry.name.endswith(".so") or ".so." in entry.name:
                yield folder / entry.name
