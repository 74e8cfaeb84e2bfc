"""Names from the files of packages become C code, a linker's script and paths: only if they are what they should be."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.emulation.build import stand_ins
from pytest_gpumem.emulating.emulation.libraries import BY_STEM, library_of, stubs, version_script
from pytest_gpumem.emulating.emulation.neighbours import needed_beside
from pytest_gpumem.emulating.emulation.torch_build import installed_torch
from tests.emulation.conftest import calling, compile_library, compile_runtime

NOT_NAMES = [
    "f(void){return 0;} __attribute__((constructor)) void cudaEvil",
    'cuda"); system("id',
    "cuda\nEvil",
    "cudaEvil\n",
    "cuda Evil",
    "cuda-Evil",
    "cudaÉvil",
    "cuda٣",
    "3cuda",
    "",
]


@pytest.mark.parametrize("name", NOT_NAMES)
@pytest.mark.parametrize("stem", ["libcudart", "libcublas", "libcupti"])
def test_only_identifiers_become_c_code(stem, name):
    library = BY_STEM[stem]
    assert stubs(library, {name}) == stubs(library, set())
    assert "cudaMalloc" in stubs(library, {name, "cudaMalloc"})


@pytest.mark.parametrize("node", [*NOT_NAMES, "A { global: x; }; B", "A; /* */", "*"])
def test_only_version_nodes_become_a_linkers_script(node):
    assert version_script({node}) == version_script(()) == "{ global: *; };\n"
    assert version_script({node, "libcudart.so.13"}) == "libcudart.so.13 { global: *; };\n"


@pytest.mark.parametrize(
    "soname",
    [
        "libcudart.so.13/../../evil",
        "libcudart.so.13,-plugin,evil.so",
        "libcudart.so.13\n",
        "libcudart.so.",
        "libcudart.so.٣",
        "libcudart.something",
        "libcudart",
        "../libcudart.so.13",
    ],
)
def test_only_sonames_name_a_library(soname):
    assert library_of(soname) is None
    assert library_of("libcudart.so.13") is library_of("libcudart.so") is BY_STEM["libcudart"]


def test_code_in_the_name_of_a_symbol_is_not_compiled(fake_torch, tmp_path):
    evil = "cudaX(void) {return 0;} int cudaEvil"
    harmless = "cuda".ljust(len(evil), "x")
    compile_runtime(tmp_path / "libcudart.so.13", harmless)
    library = fake_torch.site / "bits" / "libbits.so"
    compile_library(library, calling(harmless), tmp_path / "libcudart.so.13")
    library.write_bytes(library.read_bytes().replace(harmless.encode(), evil.encode()))
    (needed,) = needed_beside(fake_torch.site, tmp_path / "kept").values()
    assert [name for name, _ in needed] == [evil]
    assert b"cudaEvil" not in stand_ins(installed_torch())[0].read_bytes()


def test_a_function_is_found_although_its_library_is_not_named(fake_torch, tmp_path):
    compile_library(fake_torch.site / "served" / "libserved.so", calling("cudaUnnamed", "unrelated"))
    assert needed_beside(fake_torch.site, tmp_path / "kept") == {"libcudart": [("cudaUnnamed", None)]}
    assert b"cudaUnnamed" in stand_ins(installed_torch())[0].read_bytes()


@pytest.mark.parametrize("text", ["[]", "1", '{"libcudart.so.13": 1}', '{"libcudart.so.13": [1]}', "null"])
def test_a_file_of_the_cache_with_something_else_in_it_is_written_anew(fake_torch, tmp_path, text):
    first = needed_beside(fake_torch.site, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text(text, encoding="utf-8")
    assert needed_beside(fake_torch.site, tmp_path / "kept") == first
    assert kept.read_text(encoding="utf-8") == "{}"
