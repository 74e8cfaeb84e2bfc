"""What an ELF file takes from others, read from its tables."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import NotElf
from pytest_gpumem.emulating.emulation.elf import read_needs


def test_libraries_and_symbols_are_told_with_the_version_that_they_have_to_have(fake_torch):
    needs = read_needs(fake_torch.package / "lib" / "libtorch_cuda.so")
    assert "libcudart.so.13" in needs.libraries
    taken = {symbol.name: (symbol.library, symbol.version) for symbol in needs.symbols}
    assert taken["cudaUnheardOf"] == ("libcudart.so.13", "libcudart.so.13")
    assert taken["cudaMalloc"] == ("libcudart.so.13", "libcudart.so.13")
    assert "use" not in taken


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_such_file_is_refused_with_its_name(tmp_path, content):
    file = tmp_path / "libtorch_cuda.so"
    file.write_bytes(content)
    with pytest.raises(NotElf, match=r"libtorch_cuda\.so is "):
        read_needs(file)


def test_a_file_that_is_cut_short_is_refused(fake_torch, tmp_path):
    whole = (fake_torch.package / "lib" / "libtorch_cuda.so").read_bytes()
    cut = tmp_path / "cut.so"
    refused = 0
    for length in range(6, len(whole), max(1, len(whole) // 200)):
        cut.write_bytes(whole[:length])
        try:
            read_needs(cut)
        except NotElf:
            refused += 1
    assert refused >= 190
