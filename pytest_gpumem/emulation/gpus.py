"""The GPUs that can be emulated, and the words for them.

``--gpumem-device=emulated:CARD`` measures on an emulated GPU. It needs an environment that
[emulated GPU](../concepts/emulated-gpu.md) describes. ``CARD`` is one of these words:

| Word | GPU |
|---|---|
| `h100` | a [card of the table](#cards) |
| `h100x8`, `24GBx2` | several of a card in one process, at most 64 |
| `24GB`, `80GiB` | an H100 with this size of memory |
| `h100-80gb-mig-1g.10gb` | a [MIG slice](#mig-slices). A process sees one slice, so there is no `x2` |
| `our-l40s` | a [card of your own](#cards-of-your-own) |
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_gpumem.toml import read_toml
from pytest_gpumem.units import nearest, parse_size
from pytest_gpumem.values.option_words import EMULATED, nearest_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

DEFAULT = "h100"
EVERY = "all"
"""Stands for every GPU of the table, where a command takes several."""
MOST_DEVICES = 64
"""The limit in ``native/emulated.h``."""
MIG = "-mig-"
"""Stands between a card and the profile of a slice of it."""


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

    @property
    def device(self) -> str:
        """The word of the device: ``"emulated:h100x8"``."""
        return f"{EMULATED}{self.word}" + (f"x{self.count}" if self.count > 1 else "")


NONE_OF_ONES_OWN: Mapping[str, Gpu] = MappingProxyType({})


def emulated_gpu(word: str, own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> Gpu:
    """Return the GPU that ``emulated:`` and a word names.

    Args:
        word: ``"emulated:h100"``, with ``x8`` for eight of them; a size for an H100 with so much memory.
        own: GPUs by name beside those of the table.

    Raises:
        ValueError: There is no such GPU. The message is a sentence that names the nearest.
    """
    text = word.removeprefix(EMULATED).lower()
    gpu = _one(text, own)
    if gpu is not None:
        return gpu
    several = re.fullmatch(r"(.+?)x([0-9]+)", text)
    gpu = _one(several[1], own) if several else None
    if several is None or gpu is None:
        raise ValueError(_unknown(word, several[1] if several and MIG in text else text, own))
    count = int(several[2])
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"{word!r}: from 1 to {MOST_DEVICES} GPUs can be emulated, not {count}")
    if MIG in gpu.word and count > 1:
        raise ValueError(f"{word!r}: a process sees one MIG slice at most; leave x{count} out")
    return replace(gpu, count=count)


def nearest_device_or_emulated(word: str, valid: Iterable[str], own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> str:
    """Return a clause that names the device nearest to a word: of ``l4`` the emulated one, else one of ``valid``."""
    try:
        return f"did you mean {emulated_gpu(EMULATED + word, own).device!r}?"
    except ValueError:
        return nearest_device(word, [*valid, f"{EMULATED}{DEFAULT}"])


def known_gpus(own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> tuple[Gpu, ...]:
    """Return all GPUs of the table, in its order, without slices; then one's own."""
    return (*_table().values(), *own.values())


def known_slices() -> tuple[Gpu, ...]:
    """Return all MIG slices of the cards of the table, in its order."""
    return tuple(part for word in _table() for part in _slices_of(word))


def known_words(own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> tuple[str, ...]:
    """Return all words for GPUs of the table, then one's own; neither slices nor sizes."""
    return (*_table(), *_aliases(), *own)


def known_capabilities() -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities of which the limits are known."""
    return tuple(_limits())


def of_capability(capability: tuple[int, int]) -> Gpu:
    """Return the table's first GPU of a compute capability that is known; else the default one with its limits."""
    first = next((one for one in _table().values() if one.capability == capability), None)
    return first or with_capability(_table()[DEFAULT], capability)


def with_capability(gpu: Gpu, capability: tuple[int, int]) -> Gpu:
    """Return the GPU with the limits of a compute capability that is known."""
    limits: dict[str, Any] = dict(_limits()[capability])
    return replace(gpu, capability=capability, **limits)


def described(gpu: Gpu) -> str:
    """Return a GPU as text, for the processes that this one starts: they need not find where it is defined."""
    return json.dumps(asdict(replace(gpu, count=1)))


def from_description(text: str | None) -> Mapping[str, Gpu]:
    """Return the GPU that `described` wrote, by its name; nothing for one that its word says, and for another text."""
    try:
        plain = json.loads(text or "")
        gpu = Gpu(**{**plain, "capability": tuple(plain["capability"])})
    except (ValueError, TypeError, KeyError):
        return NONE_OF_ONES_OWN
    return {gpu.word: gpu} if _one(gpu.word, NONE_OF_ONES_OWN) is None else NONE_OF_ONES_OWN


def _one(name: str, own: Mapping[str, Gpu]) -> Gpu | None:
    """Return the GPU, or the slice of one, that is called ``name``."""
    return _table().get(_aliases().get(name, name)) or _slices().get(name) or own.get(name) or _with_memory(name)


def _unknown(word: str, name: str, own: Mapping[str, Gpu]) -> str:
    """Return the message for a word that names no GPU."""
    card, is_slice, profile = name.partition(MIG)
    profiles = [one.partition(MIG)[2] for one in _slices() if one.startswith(f"{card}{MIG}")]
    if profiles:
        title = _table()[_aliases().get(card, card)].title
        return f"{word!r}: {title} has no MIG profile {profile!r}; {nearest(profile, profiles)}"
    if is_slice:
        return f"{word!r} is no MIG slice; there are slices of {', '.join(_divided())}, like {EMULATED}{_MIG_EXAMPLE}"
    # In the form that was typed: `gpumem emulate l4`, --gpumem-device=emulated:l4.
    prefix = EMULATED if word.startswith(EMULATED) else ""
    known = [prefix + one for one in known_words(own)]
    theirs = f", of [tool.gpumem.gpus] {', '.join(own)}" if own else ""
    return (
        f"{word!r} is no GPU that can be emulated; {nearest_device(prefix + name, known)} There are "
        f"{', '.join(_table())}{theirs}, each with x2 and so on for several, MIG slices like {_MIG_EXAMPLE}, and "
        "sizes: 24GB is an H100 with so much memory"
    )


_MIG_EXAMPLE = "a100-80gb-mig-3g.40gb"


def _with_memory(size: str) -> Gpu | None:
    try:
        total = parse_size(size)
    except ValueError:
        return None
    gpu = _table()[DEFAULT]
    return replace(gpu, word=size, title=f"H100 with {size.upper()}", total_bytes=total)


@cache
def _read() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, Any] = read_toml((files(__package__) / "gpus.toml").read_text(encoding="utf-8"))
    return found


@cache
def _limits() -> Mapping[tuple[int, int], Mapping[str, int]]:
    """Return by compute capability the fields that are alike for its GPUs."""
    found = {}
    for text, limits in _read()["capability"].items():
        if text != "sources":
            major, minor = map(int, text.split("."))
            found[major, minor] = limits
    return found


@cache
def _table() -> Mapping[str, Gpu]:
    gpus = {}
    for word, entry in _read()["gpu"].items():
        major, minor = map(int, entry["capability"].split("."))
        figures = {field.name: entry[field.name] for field in fields(Gpu) if field.name in entry}
        gpus[word] = Gpu(**{**figures, "word": word, "capability": (major, minor), **_limits()[major, minor]})
    return gpus


@cache
def _aliases() -> Mapping[str, str]:
    """Return the further words for GPUs of the table, and the words that they stand for."""
    return {also: word for word, entry in _read()["gpu"].items() for also in entry.get("also", ())}


@cache
def _slices() -> Mapping[str, Gpu]:
    """Return the MIG slices by each of the words for them."""
    return {name: one for word in _read()["gpu"] for one in _slices_of(word) for name in _words_of(word, one)}


def _slices_of(word: str) -> Iterator[Gpu]:
    entry, card = _read()["gpu"][word], _table()[word]
    names_memory = next(iter(entry.get("also", ())), word)
    for profile, row in entry.get("mig", {}).items():
        yield replace(
            card,
            word=f"{names_memory}{MIG}{profile}",
            name=f"{card.name} MIG {profile}",
            title=f"{card.title} MIG {profile}",
            multiprocessors=row["multiprocessors"],
            total_bytes=row["total_bytes"],
            l2_bytes=int(card.l2_bytes * Fraction(row["l2"])),
            bus_bits=int(card.bus_bits * Fraction(row["memory"])),
        )


def _words_of(word: str, one: Gpu) -> Iterable[str]:
    profile = one.word.partition(MIG)[2]
    return dict.fromkeys((one.word, f"{word}{MIG}{profile}"))


def _divided() -> list[str]:
    return [word for word, entry in _read()["gpu"].items() if "mig" in entry]
