"""The GPUs that can be emulated, and the words for them: ``h100``, ``h100x8``, ``24GB``."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from pytest_gpumem.units import parse_size
from pytest_gpumem.values.option_words import EMULATED, nearest_device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "h100"
MOST_DEVICES = 64
"""The limit in ``native/emulated.h``."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as CUDA describes it; the sources of its numbers are in ``gpus.toml``."""

    word: str
    name: str
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_per_block: int
    shared_per_block_optin: int
    shared_per_multiprocessor: int
    l2_bytes: int
    bus_bits: int
    sm_khz: int
    memory_khz: int
    total_bytes: int
    count: int = 1


def emulated_gpu(word: str) -> Gpu:
    """Return the GPU that ``emulated:`` and a word names.

    Args:
        word: ``"emulated:h100"``, with ``x8`` for eight of them; a size for an H100 with so much memory.

    Raises:
        ValueError: There is no such GPU. The message is a sentence that names the nearest.
    """
    text = word.removeprefix(EMULATED).lower()
    several = re.fullmatch(r"(.+?)x([0-9]+)", text)
    name, count = (several[1], int(several[2])) if several and text not in _table() else (text, 1)
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"{word!r}: from 1 to {MOST_DEVICES} GPUs can be emulated, not {count}")
    gpu = _table().get(name) or _with_memory(name)
    if gpu is None:
        known = [EMULATED + one for one in _table()]
        raise ValueError(
            f"{word!r} is no GPU that can be emulated; {nearest_device(EMULATED + name, known)} There are "
            f"{', '.join(_table())}, each with x2 and so on for several, and sizes: 24GB is an H100 with so much memory"
        )
    return replace(gpu, count=count)


def known_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the table, in its order."""
    return tuple(_table().values())


def _with_memory(size: str) -> Gpu | None:
    try:
        total = parse_size(size)
    except ValueError:
        return None
    gpu = _table()[DEFAULT]
    return replace(gpu, word=size, title=f"H100 with {size.upper()}", total_bytes=total)


@cache
def _table() -> Mapping[str, Gpu]:
    text = (files(__package__) / "gpus.toml").read_text(encoding="utf-8")
    gpus = {}
    for word, entry in tomllib.loads(text).items():
        entry.pop("sources", None)
        gpus[word] = Gpu(word=word, **{**entry, "capability": tuple(entry["capability"])})
    return gpus
