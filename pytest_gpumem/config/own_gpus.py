"""``[tool.gpumem.gpus.NAME]``: the user's own GPUs for emulation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.keys import GPU_KEYS
from pytest_gpumem.devices.cuda import cuda_slug
from pytest_gpumem.emulation import gpus
from pytest_gpumem.emulation.load import CONTEXT_BYTES
from pytest_gpumem.units import format_bytes, nearest, parse_size
from pytest_gpumem.values.option_words import EMULATED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.emulation.gpus import Gpu

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-.][a-z0-9]+)*")
_MOST_MEMORY = 2**43
_MOST = 2**31 - 1
"""The largest C ``int``. CUDA has the size of the L2 in an ``int``."""
_MOST_SMS = 4096
_MOST_NAME = 200
"""Bytes. CUDA has 256 bytes for a name, including "(emulated)"."""


def own_gpus(table: Mapping[str, Any], where: str) -> dict[str, Gpu]:
    """Return the GPUs that a ``gpus`` table defines, by name.

    Args:
        table: The table from TOML.
        where: The file and the table, for messages.

    Raises:
        SettingsError: The table has a mistake.
    """
    found: dict[str, Gpu] = {}
    for name, entry in table.items():
        of = f"{where}.{name}"
        _check_name(name, found, of)
        if not isinstance(entry, dict):
            raise SettingsError(f"{of} is {entry!r}, expected a table: [tool.gpumem.gpus.{name}]")
        found[name] = _gpu(name, entry, of)
        for other in gpus.known_gpus(found):
            if other.word != name and cuda_slug(other.title) == cuda_slug(name):
                raise SettingsError(f"{of}: its baselines would lie with those of {other.word}; choose another name")
    return found


def _check_name(name: str, found: Mapping[str, Gpu], of: str) -> None:
    if not _NAME.fullmatch(name) or gpus.MIG in name or name == gpus.EVERY:
        raise SettingsError(
            f"{of}: {name!r} is no name of a GPU; write small letters, digits, - and ., beginning with a letter: my-card"
        )
    try:
        there = gpus.emulated_gpu(name, found)
    except ValueError:
        return
    raise SettingsError(f"{of}: {EMULATED}{name} is {there.title} already, whose figures stay; choose another name")


def _gpu(name: str, entry: Mapping[str, Any], of: str) -> Gpu:
    for key in entry:
        if key not in GPU_KEYS:
            raise SettingsError(f"{of}: unknown key {key!r}; {nearest(key, list(GPU_KEYS))}")
    base = _base(entry, of)
    figures: dict[str, Any] = {}
    if "memory" in entry:
        figures["total_bytes"] = _size(entry["memory"], f"{of}.memory", CONTEXT_BYTES + 1, _MOST_MEMORY)
    if "l2" in entry:
        figures["l2_bytes"] = _size(entry["l2"], f"{of}.l2", 1, _MOST)
    if "sms" in entry:
        figures["multiprocessors"] = _sms(entry["sms"], f"{of}.sms")
    return replace(base, word=name, title=name, name=_text(entry.get("name", name), f"{of}.name"), **figures)


def _base(entry: Mapping[str, Any], of: str) -> Gpu:
    """Return the GPU for missing figures: the entry's ``like``, or the first card with the entry's compute capability."""
    if "like" not in entry:
        for key, example in (("memory", "48GB"), ("capability", "8.9")):
            if key not in entry:
                raise SettingsError(
                    f'{of} needs {key}; write {key} = "{example}", or like = "l40s" for all of an L40S\'s'
                )
        return gpus.of_capability(_capability(entry["capability"], f"{of}.capability"))
    like = _text(entry["like"], f"{of}.like")
    try:
        base = gpus.emulated_gpu(like)
    except ValueError as error:
        raise SettingsError(f"{of}.like: {error}") from None
    if base.count > 1:
        raise SettingsError(f"{of}.like is {like!r}, expected one GPU; {EMULATED}NAMEx{base.count} is so many of it")
    if "capability" not in entry:
        return base
    return gpus.with_capability(base, _capability(entry["capability"], f"{of}.capability"))


def _capability(value: object, of: str) -> tuple[int, int]:
    known = gpus.known_capabilities()
    text = "" if isinstance(value, bool) else str(value)
    number = re.fullmatch(r"([0-9]{1,3})\.([0-9])", text, re.ASCII)
    found = (int(number[1]), int(number[2])) if number else None
    if found not in known:
        names = ", ".join(f"{major}.{minor}" for major, minor in known)
        raise SettingsError(f"{of} is {value!r}, expected a compute capability of which the limits are known: {names}")
    return found


def _size(value: object, of: str, least: int, most: int) -> int:
    if not isinstance(value, str):
        raise SettingsError(f"{of} is {value!r}, expected a string: '48GB'")
    try:
        size = parse_size(value)
    except ValueError as error:
        raise SettingsError(f"{of}: {error}") from None
    if not least <= size <= most:
        raise SettingsError(f"{of} is {value!r}, expected {format_bytes(least)} to {format_bytes(most)}")
    return size


def _sms(value: object, of: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_SMS:
        raise SettingsError(f"{of} is {value!r}, expected a whole number from 1 to {_MOST_SMS}")
    return value


def _text(value: object, of: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= _MOST_NAME:
        raise SettingsError(f"{of} is {value!r}, expected a string of 1 to {_MOST_NAME} bytes")
    return value
