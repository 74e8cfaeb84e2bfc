"""Read which libraries and symbols a shared library (an ELF file) needs.

Only 64-bit little-endian files are supported, the format on Linux on x86-64 and arm64. The program ``readelf`` is not used,
because it is not installed on every machine. The constants' names and values come from the ELF specification in the System V
ABI, and for symbol versions from the Linux Standard Base.

Example: ``libtorch_cuda.so`` needs the library ``libcudart.so.13``. From this library it needs the symbol ``cudaMalloc`` with
the version node ``libcudart.so.13``.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.errors import NotElf

if TYPE_CHECKING:
    from pathlib import Path

_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED = 1
_UNDEFINED_SECTION = 0
_SYMBOL = struct.Struct("<IBBHQQ")
_HIDDEN_BIT = 0x8000


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function or variable needed from another library."""

    name: str
    library: str | None
    """Soname of the library that must define the symbol; ``None`` if the file names no version node for the symbol."""
    version: str | None
    """Version node under which the library must define the symbol; ``None`` if the file names none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The libraries and symbols needed by an ELF file."""

    libraries: tuple[str, ...]
    """Sonames of the needed libraries, in the order in which the loader loads them."""
    symbols: tuple[Symbol, ...]


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


def read_needs(path: Path) -> Needs:
    """Return the libraries and symbols needed by the ELF file at ``path``.

    Raises:
        NotElf: The file is not a valid ELF file.
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            raise NotElf(f"{path} is empty") from None
    with data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise NotElf(f"{path} is not a 64-bit little-endian ELF file")
        try:
            return _needs(data)
        except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise NotElf(f"{path} is truncated or damaged: {error}") from None


def _needs(data: mmap.mmap) -> Needs:
    sections = _sections(data)
    of_kind = {section.kind: section for section in sections}
    dynamic, symbols = of_kind[_SHT_DYNAMIC], of_kind[_SHT_DYNSYM]
    names = sections[dynamic.link]
    libraries = tuple(
        _text(data, names, value)
        for tag, value in struct.iter_unpack("<QQ", data[dynamic.offset : dynamic.offset + dynamic.size])
        if tag == _DT_NEEDED
    )
    versions = _versions(data, sections, of_kind.get(_SHT_GNU_VERNEED))
    numbers = of_kind.get(_SHT_GNU_VERSYM)
    undefined = []
    entries = _SYMBOL.iter_unpack(data[symbols.offset : symbols.offset + symbols.size])
    for index, (name, _, _, section, _, _) in enumerate(entries):
        if section != _UNDEFINED_SECTION or not name:
            continue
        number = struct.unpack_from("<H", data, numbers.offset + 2 * index)[0] if numbers is not None else 0
        library, version = versions.get(number & ~_HIDDEN_BIT, (None, None))
        undefined.append(Symbol(_text(data, sections[symbols.link], name), library, version))
    return Needs(libraries, tuple(undefined))


def _sections(data: mmap.mmap) -> list[_Section]:
    (at,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    entry = struct.Struct("<4xI16xQQI")
    return [_Section(*entry.unpack_from(data, at + index * entry_size)) for index in range(count)]


def _versions(
    data: mmap.mmap, sections: list[_Section], needed: _Section | None
) -> dict[int, tuple[str | None, str | None]]:
    """Return the library and the version node for each version number in the file."""
    versions: dict[int, tuple[str | None, str | None]] = {}
    if needed is None:
        return versions
    names = sections[needed.link]
    at = needed.offset
    while True:
        _, count, file, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(count):
            _, _, number, name, after = struct.unpack_from("<IHHII", data, entry)
            versions[number] = (_text(data, names, file), _text(data, names, name))
            entry += after
        if not following:
            return versions
        at += following


def _text(data: mmap.mmap, table: _Section, at: int) -> str:
    start = table.offset + at
    return data[start : data.find(b"\0", start)].decode()
