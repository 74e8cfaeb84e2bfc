"""Read the tables ``[tool.gpumem.gpus.NAME]``, in which users define their own cards for emulation.

For example, ``like = "l40s"`` and ``memory = "44GB"`` define an L40S with 44,000,000,000 bytes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.base.units import format_bytes, nearest, parse_size
from pytest_gpumem.emulating.emulation import gpus
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.measuring.devices.cuda import cuda_slug
from pytest_gpumem.plugin.config.keys import GPU_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.emulating.emulation.gpus import Gpu

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-.][a-z0-9]+)*")
_MOST_MEMORY = 2**43
_MOST = 2**31 - 1
"""The largest L2 cache, because CUDA stores the L2 size in a C ``int``."""
_MOST_SMS = 4096
_MOST_NAME = 200
"""The maximum length of a name, in bytes. CUDA stores names in 256 bytes, including "(emulated)"."""


def own_gpus(table: Mapping[str, Any], where: str) -> dict[str, Gpu]:
    """Return the cards from the table ``[tool.gpumem.gpus]``, by name.

    Args:
        table: The table from TOML.
        where: The file and the table, for messages.

    Raises:
        SettingsError: The table has a mistake.
    """
    defined: dict[str, Gpu] = {}
    for name, entry in table.items():
        place = f"{where}.{name}"
        _check_name(name, defined, place)
        if not isinstance(entry, dict):
            raise SettingsError(f"{place} is {entry!r}, expected a table: [tool.gpumem.gpus.{name}]")
        defined[name] = _gpu(name, entry, place)
        for other in gpus.known_gpus(defined):
            if other.word != name and cuda_slug(other.title) == cuda_slug(name):
                raise SettingsError(
                    f"{place}: its baselines would be in the same folder as the baselines of {other.word}; choose another name"
                )
    return defined


def _check_name(name: str, defined: Mapping[str, Gpu], place: str) -> None:
    if not _NAME.fullmatch(name) or gpus.MIG in name or name == gpus.EVERY:
        raise SettingsError(
            f"{place}: {name!r} cannot be the name of a GPU; write small letters, digits, - and ., beginning with a letter: "
            "my-card"
        )
    try:
        existing = gpus.emulated_gpu(name, defined)
    except ValueError:
        return
    raise SettingsError(f"{place}: {EMULATED}{name} already means {existing.title}; choose another name")


def _gpu(name: str, entry: Mapping[str, Any], place: str) -> Gpu:
    for key in entry:
        if key not in GPU_KEYS:
            raise SettingsError(f"{place}: unknown key {key!r}; {nearest(key, list(GPU_KEYS))}")
    base = _base(entry, place)
    figures: dict[str, Any] = {}
    if "memory" in entry:
        figures["total_bytes"] = _size(entry["memory"], f"{place}.memory", CONTEXT_BYTES + 1, _MOST_MEMORY)
    if "l2" in entry:
        figures["l2_bytes"] = _size(entry["l2"], f"{place}.l2", 1, _MOST)
    if "sms" in entry:
        figures["multiprocessors"] = _sms(entry["sms"], f"{place}.sms")
    return replace(base, word=name, title=name, name=_text(entry.get("name", name), f"{place}.name"), **figures)


def _base(entry: Mapping[str, Any], place: str) -> Gpu:
    """Return the card whose figures fill the gaps in an entry: the card in the key ``like``, or else the first card with
    the entry's capability.
    """
    if "like" not in entry:
        for key, example in (("memory", "48GB"), ("capability", "8.9")):
            if key not in entry:
                raise SettingsError(
                    f'{place} needs {key}; write {key} = "{example}", or like = "l40s" for all figures of an L40S'
                )
        return gpus.of_capability(_capability(entry["capability"], f"{place}.capability"))
    like = _text(entry["like"], f"{place}.like")
    try:
        base = gpus.emulated_gpu(like)
    except ValueError as error:
        raise SettingsError(f"{place}.like: {error}") from None
    if base.count > 1:
        raise SettingsError(
            f"{place}.like is {like!r}, expected a single GPU; {EMULATED}NAMEx{base.count} emulates {base.count} such GPUs"
        )
    if "capability" not in entry:
        return base
    return gpus.with_capability(base, _capability(entry["capability"], f"{place}.capability"))


def _capability(value: object, place: str) -> tuple[int, int]:
    known_capabilities = gpus.known_capabilities()
    text = "" if isinstance(value, bool) else str(value)
    number = re.fullmatch(r"([0-9]{1,3})\.([0-9])", text, re.ASCII)
    capability = (int(number[1]), int(number[2])) if number else None
    if capability not in known_capabilities:
        names = ", ".join(f"{major}.{minor}" for major, minor in known_capabilities)
        raise SettingsError(f"{place} is {value!r}, expected a compute capability with known limits: {names}")
    return capability


def _size(value: object, place: str, least: int, most: int) -> int:
    if not isinstance(value, str):
        raise SettingsError(f"{place} is {value!r}, expected a string: '48GB'")
    try:
        size = parse_size(value)
    except ValueError as error:
        raise SettingsError(f"{place}: {error}") from None
    if not least <= size <= most:
        raise SettingsError(f"{place} is {value!r}, expected {format_bytes(least)} to {format_bytes(most)}")
    return size


def _sms(value: object, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_SMS:
        raise SettingsError(f"{place} is {value!r}, expected a whole number from 1 to {_MOST_SMS}")
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= _MOST_NAME:
        raise SettingsError(f"{place} is {value!r}, expected a string of 1 to {_MOST_NAME} bytes")
    return value
