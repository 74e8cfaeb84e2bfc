"""The GPUs available for emulation, and their names.

``--gpumem-device=emulated:CARD`` measures on an emulated GPU. [Emulated GPU](../concepts/emulated-gpu.md) describes the
required environment. ``CARD`` is one of these words:

| Word | GPU |
|---|---|
| `h100` | a [card from the table](#cards) |
| `h100x8`, `24GBx2` | several cards in a process, at most 64 |
| `24GB`, `80GiB` | an H100 with this size of memory |
| `h100-80gb-mig-1g.10gb` | a [MIG slice](#mig-slices). A process sees a single slice, so there is no `x2` |
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

from pytest_gpumem.base.toml import read_toml
from pytest_gpumem.base.units import nearest, parse_size
from pytest_gpumem.facts.values.option_words import EMULATED, nearest_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

DEFAULT = "h100"
EVERY = "all"
"""The word for all GPUs in the table. Commands such as ``gpumem fit`` accept it."""
MOST_DEVICES = 64
"""The maximum number of emulated GPUs in a process, as in ``native/emulated.h``."""
MIG = "-mig-"
"""The text between a card's name and a MIG profile's name, as in ``a100-80gb-mig-3g.40gb``."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to emulate, with its properties as CUDA reports them. ``gpus.toml`` has the source of each figure."""

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
        """This GPU as a value for ``--gpumem-device``: ``"emulated:h100x8"``."""
        return f"{EMULATED}{self.word}" + (f"x{self.count}" if self.count > 1 else "")


NONE_OF_ONES_OWN: Mapping[str, Gpu] = MappingProxyType({})


def emulated_gpu(word: str, own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> Gpu:
    """Return the GPU for a name such as ``"emulated:h100"``.

    Args:
        word: ``"emulated:h100"`` or ``"h100"``, ``"h100x8"`` for eight GPUs, or ``"24GB"`` for an H100 with 24 GB.
        own: The project's own GPUs by name, in addition to the GPUs in the table.

    Raises:
        ValueError: There is no GPU with this name. The message suggests the most similar name.
    """
    text = word.removeprefix(EMULATED).lower()
    gpu = _named(text, own)
    if gpu is not None:
        return gpu
    several = re.fullmatch(r"(.+?)x([0-9]+)", text)
    gpu = _named(several[1], own) if several else None
    if several is None or gpu is None:
        raise ValueError(_unknown(word, several[1] if several and MIG in text else text, own))
    count = int(several[2])
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"{word!r}: from 1 to {MOST_DEVICES} GPUs can be emulated, not {count}")
    if MIG in gpu.word and count > 1:
        raise ValueError(f"{word!r}: a process sees at most one MIG slice; remove x{count}")
    return replace(gpu, count=count)


def nearest_device_or_emulated(word: str, valid: Iterable[str], own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> str:
    """Return a suggestion for an invalid device name: ``did you mean 'emulated:l4'?`` for ``l4``.

    If no GPU is called ``word``, suggest the most similar name in ``valid``.
    """
    try:
        return f"did you mean {emulated_gpu(EMULATED + word, own).device!r}?"
    except ValueError:
        return nearest_device(word, [*valid, f"{EMULATED}{DEFAULT}"])


def known_gpus(own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> tuple[Gpu, ...]:
    """Return all GPUs in the table, followed by the project's own GPUs. MIG slices are not included."""
    return (*_table().values(), *own.values())


def known_slices() -> tuple[Gpu, ...]:
    """Return all MIG slices of all GPUs in the table."""
    return tuple(part for word in _table() for part in _slices_of(word))


def known_words(own: Mapping[str, Gpu] = NONE_OF_ONES_OWN) -> tuple[str, ...]:
    """Return all names for the GPUs in the table and the project's own GPUs. MIG slices and sizes are not included."""
    return (*_table(), *_aliases(), *own)


def known_capabilities() -> tuple[tuple[int, int], ...]:
    """Return all compute capabilities in the table."""
    return tuple(_limits())


def of_capability(capability: tuple[int, int]) -> Gpu:
    """Return the table's first GPU with a compute capability. If there is none, return the default GPU with this capability."""
    first = next((gpu for gpu in _table().values() if gpu.capability == capability), None)
    return first or with_capability(_table()[DEFAULT], capability)


def with_capability(gpu: Gpu, capability: tuple[int, int]) -> Gpu:
    """Return a copy of the GPU with another compute capability, and with this capability's limits."""
    limits: dict[str, Any] = dict(_limits()[capability])
    return replace(gpu, capability=capability, **limits)


def described(gpu: Gpu) -> str:
    """Return a GPU's properties as text for child processes, which may not find the project that defines the GPU."""
    return json.dumps(asdict(replace(gpu, count=1)))


def from_description(text: str | None) -> Mapping[str, Gpu]:
    """Parse a text from `described`, and return the GPU by its name.

    The mapping is empty if the GPU's name is valid without a project, or if ``text`` is invalid.
    """
    try:
        plain = json.loads(text or "")
        gpu = Gpu(**{**plain, "capability": tuple(plain["capability"])})
    except (ValueError, TypeError, KeyError):
        return NONE_OF_ONES_OWN
    return {gpu.word: gpu} if _named(gpu.word, NONE_OF_ONES_OWN) is None else NONE_OF_ONES_OWN


def _named(name: str, own: Mapping[str, Gpu]) -> Gpu | None:
    """Return the GPU or MIG slice with a name; ``None`` if there is none."""
    return _table().get(_aliases().get(name, name)) or _slices().get(name) or own.get(name) or _with_memory(name)


def _unknown(word: str, name: str, own: Mapping[str, Gpu]) -> str:
    """Return the error message for an unknown GPU name."""
    card, is_slice, profile = name.partition(MIG)
    profiles = [slice_word.partition(MIG)[2] for slice_word in _slices() if slice_word.startswith(f"{card}{MIG}")]
    if profiles:
        title = _table()[_aliases().get(card, card)].title
        return f"{word!r}: {title} has no MIG profile {profile!r}; {nearest(profile, profiles)}"
    if is_slice:
        return (
            f"{word!r} is not a MIG slice; there are slices of {', '.join(_divided())}, like {EMULATED}{_MIG_EXAMPLE}"
        )
    # Suggest names with the prefix that the user typed: --gpumem-device=emulated:l4, but `gpumem emulate l4`.
    prefix = EMULATED if word.startswith(EMULATED) else ""
    valid_words = [prefix + valid_word for valid_word in known_words(own)]
    own_names = f", and from [tool.gpumem.gpus] {', '.join(own)}" if own else ""
    return (
        f"{word!r} is no GPU that can be emulated; {nearest_device(prefix + name, valid_words)} There are "
        f"{', '.join(_table())}{own_names}; each of them with a count such as x2; MIG slices like {_MIG_EXAMPLE}; and "
        "sizes like 24GB, an H100 with 24 GB"
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
    tables: dict[str, Any] = read_toml((files(__package__) / "gpus.toml").read_text(encoding="utf-8"))
    return tables


@cache
def _limits() -> Mapping[tuple[int, int], Mapping[str, int]]:
    """Return, for each compute capability, the fields of `Gpu` whose values are the same for all GPUs with this capability."""
    limits_by_capability = {}
    for text, limits in _read()["capability"].items():
        if text != "sources":
            major, minor = map(int, text.split("."))
            limits_by_capability[major, minor] = limits
    return limits_by_capability


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
    """Return a mapping from each further name of a GPU in the table to its main name."""
    return {also: word for word, entry in _read()["gpu"].items() for also in entry.get("also", ())}


@cache
def _slices() -> Mapping[str, Gpu]:
    """Return a mapping from each name of a MIG slice to the slice. A slice may have two names."""
    return {name: part for word in _read()["gpu"] for part in _slices_of(word) for name in _words_of(word, part)}


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


def _words_of(word: str, part: Gpu) -> Iterable[str]:
    profile = part.word.partition(MIG)[2]
    return dict.fromkeys((part.word, f"{word}{MIG}{profile}"))


def _divided() -> list[str]:
    return [word for word, entry in _read()["gpu"].items() if "mig" in entry]
