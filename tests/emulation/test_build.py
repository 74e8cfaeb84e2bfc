"""The stand-ins are compiled once for a torch, and what hinders that is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.emulating.emulation.build import stand_ins
from pytest_gpumem.emulating.emulation.neighbours import needed_beside
from pytest_gpumem.emulating.emulation.torch_build import installed_torch
from tests.emulation.conftest import calling, compile_library, compile_runtime

REPOSITORY = Path(__file__).parents[2]
# Loads what was compiled as `load` does, and calls it through ctypes: torch is not there.
CALLS = """
import ctypes
import sys
from pytest_gpumem.emulating.emulation.build import stand_ins
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import _configuration
from pytest_gpumem.emulating.emulation.torch_build import installed_torch

libraries = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in stand_ins(installed_torch())]
cuda = libraries[0]
cuda.gpumem_configure(ctypes.byref(_configuration(emulated_gpu({word!r}))))
"""


def run(torch, source: str, word: str = "emulated:h100") -> subprocess.CompletedProcess[str]:
    """Run Python that has the stand-ins of this torch as ``cuda``."""
    path = os.pathsep.join([str(torch.site), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-c", CALLS.format(word=word) + source],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": str(torch.site.parent / "cache"),
            "CC": str(torch.compiler),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_they_are_compiled_once_and_then_taken_from_the_cache(fake_torch, monkeypatch):
    first = stand_ins(installed_torch())
    assert first[0].name == "libcudart.so.13"
    assert {path.name for path in first} == {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"}
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert stand_ins(installed_torch()) == first
    assert not list(first[0].parent.parent.glob(".draft-*"))


def test_another_release_of_torch_has_its_own(fake_torch):
    first = stand_ins(installed_torch())
    fake_torch.says("2.14.0+cu130", "13.0")
    assert stand_ins(installed_torch())[0].parent != first[0].parent


def test_what_nobody_wrote_fails_with_its_name_and_once(compiled_torch):
    done = run(compiled_torch, "print(cuda.cudaUnheardOf(), cuda.cudaUnheardOf())")
    assert done.stdout == "801 801\n", done.stderr
    assert done.stderr == "pytest-gpumem: the emulated GPU lacks cudaUnheardOf of libcudart\n"


def test_a_function_of_the_driver_that_nobody_wrote_is_named_once_when_it_is_called(compiled_torch):
    """torch asks for some by name, which it does not call, and takes it for an error where there is none."""
    source = """
function, status = ctypes.c_void_p(), ctypes.c_int(9)
for name in (b"cuNeverCalled", b"cuUnheardOf", b"cuOther", b"cuUnheardOf"):
    said = cuda.cudaGetDriverEntryPointByVersion(name, ctypes.byref(function), 13000, 0, ctypes.byref(status))
    called = None if name == b"cuNeverCalled" else ctypes.CFUNCTYPE(ctypes.c_int)(function.value)()
    print(said, status.value, called)
"""
    done = run(compiled_torch, source)
    assert done.stdout == "0 0 None\n0 0 801\n0 0 801\n0 0 801\n"
    lacks = "pytest-gpumem: the emulated GPU lacks"
    assert done.stderr == f"{lacks} cuUnheardOf of libcuda\n{lacks} cuOther of libcuda\n"


def test_the_driver_has_what_the_installed_triton_calls(fake_torch, monkeypatch):
    """It compiles its C sources when it is first used, and its library is not loaded if the driver lacks one function."""
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    before = stand_ins(installed_torch())[0].parent
    triton = fake_torch.site / "triton"
    (triton / "backends" / "nvidia").mkdir(parents=True)
    (triton / "__init__.py").touch()
    driver = "static int launch() { return cuLaunchUnheardOf(1) + cuStreamIsCapturing(0, 0); }\n"
    (triton / "backends" / "nvidia" / "driver.c").write_text(driver)
    done = run(fake_torch, "print(libraries[1]._name.rpartition('/')[2], libraries[1].cuLaunchUnheardOf())")
    assert done.stdout == "libcuda.so.1 801\n", done.stderr
    assert done.stderr == "pytest-gpumem: the emulated GPU lacks cuLaunchUnheardOf of libcuda\n"
    assert stand_ins(installed_torch())[0].parent != before, "another Triton has its own"


def test_memory_is_given_until_the_gpu_has_no_more_and_is_not_touched(compiled_torch):
    source = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
at, taken = ctypes.c_void_p(), 0
while cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(10**9)) == 0:
    taken += 1
print(taken, cuda.cudaGetLastError(), resident() - before < 2**20)
print(cuda.cudaFree(at), cuda.cudaFree(ctypes.c_void_p(4096)))
"""
    done = run(compiled_torch, source, "emulated:24GB")
    # 24 GB less the context of 545 MB, in pages of 2 MiB.
    assert done.stdout == "23 2 True\n0 1\n", done.stderr


def test_an_event_is_done_when_the_host_has_waited_for_it(compiled_torch):
    source = """
stream, other, event, later = (ctypes.c_void_p() for _ in range(4))
cuda.cudaStreamCreate(ctypes.byref(stream))
cuda.cudaStreamCreate(ctypes.byref(other))
cuda.cudaEventCreate(ctypes.byref(event))
cuda.cudaEventCreate(ctypes.byref(later))
said = [cuda.cudaEventQuery(event)]
cuda.cudaEventRecord(event, stream)
said.append(cuda.cudaEventQuery(event))
cuda.cudaStreamSynchronize(other)
said.append(cuda.cudaEventQuery(event))
cuda.cudaStreamWaitEvent(other, event, 0)
cuda.cudaEventRecord(later, other)
cuda.cudaStreamSynchronize(other)
said += [cuda.cudaEventQuery(event), cuda.cudaEventQuery(later)]
cuda.cudaEventRecord(event, stream)
cuda.cudaDeviceSynchronize()
said.append(cuda.cudaEventQuery(event))
print(said)
"""
    assert run(compiled_torch, source).stdout == "[0, 600, 600, 0, 0, 0]\n"


def test_an_event_is_done_when_the_host_has_asked_for_nothing_else_for_long(compiled_torch):
    """A loop that waits so must end; allocations, which also ask, are beside events that are recorded."""
    source = """
stream, event, other = (ctypes.c_void_p() for _ in range(3))
cuda.cudaStreamCreate(ctypes.byref(stream))
cuda.cudaEventCreate(ctypes.byref(event))
cuda.cudaEventCreate(ctypes.byref(other))
cuda.cudaEventRecord(event, stream)
said = {cuda.cudaEventQuery(event) for _ in range(90_000)}
cuda.cudaEventRecord(other, stream)
said |= {cuda.cudaEventQuery(event) for _ in range(90_000)}
print(sorted(said), sorted({cuda.cudaEventQuery(event) for _ in range(20_000)}))
"""
    assert run(compiled_torch, source).stdout == "[600] [0, 600]\n"


def test_two_that_compile_at_once_get_the_same(fake_torch):
    path = os.pathsep.join([str(fake_torch.site), str(REPOSITORY)])
    source = CALLS.format(word="emulated:h100") + "print(cuda._name)"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [one.communicate()[0] for one in both]
    assert said[0] == said[1] != ""
    assert [one.returncode for one in both] == [0, 0]
    assert len([path for path in Path(said[0].strip()).parents[1].iterdir() if path.is_dir()]) == 1


def test_a_machine_without_a_compiler_is_told_how_to_get_one(fake_torch, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EmulationError, match=r"no C compiler was found.*apt-get install gcc"):
        stand_ins(installed_torch())


def test_a_compiler_that_fails_or_cannot_be_run_is_named(fake_torch, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(EmulationError, match=r"/bin/false failed on the emulated GPU's libcudart\.so\.13"):
        stand_ins(installed_torch())
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(EmulationError, match="/nowhere/cc cannot be run: No such file"):
        stand_ins(installed_torch())


def test_a_compiler_of_several_words_is_run_as_make_runs_it(fake_torch, monkeypatch, tmp_path):
    words = tmp_path / "words"
    launcher = tmp_path / "my ccache"
    launcher.write_text(f'#!/bin/sh\necho "$1 $2" >>{words}\nexec "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    monkeypatch.setenv("CC", f"'{launcher}' {fake_torch.compiler} -m64")
    assert stand_ins(installed_torch())
    # Three libraries, and the program that plans convolutions.
    assert words.read_text(encoding="utf-8").splitlines() == [f"{fake_torch.compiler} -m64"] * 4


def test_an_empty_variable_names_no_compiler(fake_torch, monkeypatch):
    monkeypatch.setenv("CC", " ")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EmulationError, match="no C compiler was found"):
        stand_ins(installed_torch())


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("gcc '-DA", r"the variable CC is \"gcc '-DA\", which is not quoted as for a shell \(No closing quotation\)"),
        (
            "ccache-of-nobody gcc",
            "the C compiler ccache-of-nobody gcc cannot be run: No such file .*; install ccache-of-nobody",
        ),
        ("env false --version", r"the C compiler env false --version failed on the emulated GPU's libcudart\.so\.13"),
    ],
)
def test_a_compiler_of_several_words_that_cannot_be_used_is_told(fake_torch, monkeypatch, variable, said):
    monkeypatch.setenv("CC", variable)
    with pytest.raises(EmulationError, match=said):
        stand_ins(installed_torch())
    assert not list((fake_torch.site.parent / "cache").rglob(".draft-*"))


def test_a_cache_that_cannot_be_written_to_is_named(fake_torch, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        EmulationError, match=r"cannot be cached: the cache .* is not used: Not a directory; set GPUMEM_CACHE to"
    ):
        stand_ins(installed_torch())
    assert (tmp_path / "file").read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("where", ["cache", "libraries"])
def test_libraries_that_others_may_have_planted_are_not_loaded(fake_torch, monkeypatch, tmp_path, where):
    folder = stand_ins(installed_torch())[0].parent
    (tmp_path / "cache" / "pytest-gpumem" if where == "cache" else folder).chmod(0o777)
    with pytest.raises(
        EmulationError, match=r"cannot be cached: .* is not used: other users can write to the folder; "
    ):
        stand_ins(installed_torch())


def test_a_torch_that_cannot_be_read_is_named(fake_torch):
    (fake_torch.package / "lib" / "libtorch_cuda.so").write_bytes(b"\x7fELF\x02\x01")
    with pytest.raises(EmulationError, match=r"torch 2\.13\.0\+cu130 cannot be read"):
        stand_ins(installed_torch())


def test_a_torch_that_needs_no_cuda_runtime_is_not_known(fake_torch):
    compile_library(fake_torch.package / "lib" / "libtorch_cuda.so", "int nothing;\n")
    with pytest.raises(EmulationError, match="does not need libcudart: this build of torch is not known"):
        stand_ins(installed_torch())


def test_what_other_packages_need_of_these_libraries_is_there_as_well(fake_torch, tmp_path):
    folder = fake_torch.site / "bits" / "lib"
    for soname, place in (("libcudart.so.13", tmp_path / "b"), ("libcudart.so.12", tmp_path / "a")):
        compile_runtime(place / soname, "cudaTheirs")
        compile_library(folder / f"libbits-{soname}.so", calling("cudaTheirs"), place / soname)
    without = stand_ins(installed_torch())
    # What is installed is read once for the same packages.
    (fake_torch.site / "bits-1.0.dist-info").mkdir()
    built = stand_ins(installed_torch())
    assert built[0].parent == without[0].parent
    bits = f"bits = ctypes.CDLL({str(folder / 'libbits-libcudart.so.13.so')!r})\n"
    done = run(fake_torch, bits + "print(bits.use())")
    assert (done.stdout, done.stderr) == ("801\n", "pytest-gpumem: the emulated GPU lacks cudaTheirs of libcudart\n")
    assert {path.name for path in built} == {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"}


def test_a_package_that_is_installed_later_is_looked_at(fake_torch, tmp_path):
    first = needed_beside(fake_torch.site, tmp_path / "kept")
    assert first == {}
    package = fake_torch.site / "late"
    package.mkdir()
    shutil.copy(fake_torch.package / "lib" / "libtorch_cuda.so", package / "_C.so")
    (package / "broken.so").write_text("no library", encoding="utf-8")
    assert needed_beside(fake_torch.site, tmp_path / "kept") == {}
    (fake_torch.site / "late-1.0.dist-info").mkdir()
    names = {name for name, _ in needed_beside(fake_torch.site, tmp_path / "kept")["libcudart.so.13"]}
    assert names == {"cudaMalloc", "cudaFree", "cudaEventQuery", "cudaUnheardOf"}
    (kept,) = (path for path in (tmp_path / "kept").iterdir() if "cudaMalloc" in path.read_text(encoding="utf-8"))
    kept.write_text("{", encoding="utf-8")
    assert {name for name, _ in needed_beside(fake_torch.site, tmp_path / "kept")["libcudart.so.13"]} == names
