"""Functions of NVIDIA's libraries that packages installed beside torch take, bitsandbytes say: the stand-ins have them, too."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.emulation.elf import read_needs
from pytest_gpumem.emulation.errors import NotElf
from pytest_gpumem.emulation.libraries import library_of
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Needs = dict[str, list[tuple[str, str | None]]]
"""Functions with the version nodes that they are taken from, by soname."""
_DEPTH = 2
"""Folders below a package in which its libraries are looked for."""
_NOT_THEIRS = ("torch", "nvidia", "triton")


def needed_beside(packages: Path, cache: Path) -> Needs:
    """Return the functions that libraries in ``packages`` need of NVIDIA's, beside torch's own libraries.

    What was found is kept in ``cache`` for as long as the same packages are installed: reading libraries takes half a second.
    """
    installed = sorted(path.name for path in packages.glob("*.dist-info"))
    known = cache / f"beside-{hashlib.sha256(repr((str(packages), installed)).encode()).hexdigest()[:16]}.json"
    # A file with something else in it is written anew.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        plain = json.loads(known.read_text(encoding="utf-8"))
        return {
            soname: [(str(name), None if version is None else str(version)) for name, version in needed]
            for soname, needed in plain.items()
        }
    found = _read(packages)
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(known, json.dumps(found))
    return found


def _read(packages: Path) -> Needs:
    found: dict[str, set[tuple[str, str | None]]] = {}
    for package in sorted(packages.iterdir()):
        if package.name in _NOT_THEIRS or package.name.endswith(".dist-info") or not package.is_dir():
            continue
        for path in _libraries_in(package, _DEPTH):
            with suppress(NotElf, OSError):
                for symbol in read_needs(path).symbols:
                    if symbol.library is not None and library_of(symbol.library) is not None:
                        found.setdefault(symbol.library, set()).add((symbol.name, symbol.version))
    return {soname: sorted(needed, key=repr) for soname, needed in sorted(found.items())}


def _libraries_in(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from _libraries_in(folder / entry.name, depth - 1)
            elif entry.name.endswith(".so") or ".so." in entry.name:
                yield folder / entry.name
