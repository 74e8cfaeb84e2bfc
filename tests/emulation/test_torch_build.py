"""The torch that is installed, told from its files, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import stat
import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.emulating.emulation import torch_build
from pytest_gpumem.emulating.emulation.torch_build import installed_torch


def test_a_cuda_build_is_told_with_its_cuda(fake_torch):
    torch = installed_torch()
    assert (torch.version, torch.cuda) == ("2.13.0+cu130", (13, 0))
    assert torch.libraries == fake_torch.package / "lib"


@pytest.mark.parametrize(
    ("required", "release", "wheel"),
    [
        ('nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"', (9, 20, 0), "nvidia-cudnn-cu13==9.20.0.48"),
        ('nvidia-cudnn-cu12 (==9.5.1.17) ; platform_system == "Linux"', (9, 5, 1), "nvidia-cudnn-cu12==9.5.1.17"),
        ("filelock", (9, 1, 0), "nvidia-cudnn-cu12==9.1.0.70"),
    ],
)
def test_the_cudnn_that_it_requires_is_told(fake_torch, monkeypatch, required, release, wheel):
    monkeypatch.setattr(
        "pytest_gpumem.emulating.emulation.torch_build.requires", lambda name: ["sympy>=1.13.3", required]
    )
    torch = installed_torch()
    assert (torch.cudnn, torch.cudnn_wheel) == (release, wheel)


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [
        ("2.13.0+cpu", None, "has no CUDA: an emulated GPU needs the CUDA build of torch"),
        ("2.5.1+cu124", "12.4", r"torch 2\.5\.1\+cu124 is too old to be emulated: 2\.6 or newer"),
    ],
)
def test_a_build_without_cuda_or_of_an_old_release_is_refused(fake_torch, version, cuda, said):
    fake_torch.says(version, cuda)
    with pytest.raises(EmulationError, match=said):
        installed_torch()


def test_one_that_says_cuda_and_lacks_its_library_is_refused(fake_torch):
    (fake_torch.package / "lib" / "libtorch_cuda.so").unlink()
    with pytest.raises(EmulationError, match="has no CUDA"):
        installed_torch()


def test_one_that_says_nothing_is_refused(fake_torch):
    (fake_torch.package / "version.py").write_text("", encoding="utf-8")
    with pytest.raises(EmulationError, match="does not say which release it is"):
        installed_torch()
    (fake_torch.package / "version.py").unlink()
    with pytest.raises(EmulationError, match="does not say which release it is"):
        installed_torch()


def test_none_at_all_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmulationError, match="torch is not installed"):
        installed_torch()


# What torch.compile needs on an emulated GPU


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that lacks nothing."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    return monkeypatch


def test_a_machine_that_has_all_lacks_nothing(complete):
    assert torch_build.missing_for_compiling({}) is None


@pytest.mark.parametrize(
    ("required", "release"),
    [
        ('triton==3.7.1; platform_system == "Linux"', "==3.7.1"),
        ("triton (==3.7.1) ; whatever", "==3.7.1"),
        ('triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"', "~=3.9.0"),
    ],
)
def test_triton_is_asked_for_in_the_release_that_torch_requires(complete, required, release):
    complete.setattr("pytest_gpumem.emulating.emulation.torch_build.requires", lambda name: ["sympy", required])
    complete.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build.missing_for_compiling({}) == (
        f"torch.compile also needs Triton on an emulated GPU, and Triton is not installed: pip install --no-deps triton{release}"
    )


def test_a_compiler_is_asked_for_unless_one_is_named(complete):
    complete.setattr(torch_build.shutil, "which", lambda name: None)
    assert "apt-get install gcc" in str(torch_build.missing_for_compiling({}))
    assert torch_build.missing_for_compiling({"CC": "/opt/cc"}) is None


def test_a_compiler_of_several_words_is_told_as_triton_runs_it_as_one_program(complete):
    complete.setattr(torch_build.shutil, "which", lambda name: name if name == "/opt/my gcc" else None)
    assert torch_build.missing_for_compiling({"CC": "/opt/my gcc"}) is None
    assert "CC is 'ccache gcc': set CC to the name of one program" in str(
        torch_build.missing_for_compiling({"CC": "ccache gcc"})
    )


def test_pythons_headers_are_asked_for(complete, tmp_path):
    (tmp_path / "Python.h").unlink()
    assert "apt-get install python3-dev" in str(torch_build.missing_for_compiling({}))


def test_what_is_compiled_has_a_cache_of_its_own_unless_a_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUMEM_CACHE", str(tmp_path / "cache"))
    driver = Path("/cache/libcuda.so.1")
    wanted = torch_build.compiler_variables(driver, {})
    assert wanted["TRITON_LIBCUDA_PATH"] == "/cache"
    assert wanted["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "torchinductor")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert torch_build.compiler_variables(driver, {"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {
        "TRITON_LIBCUDA_PATH": "/cache"
    }


def test_kernels_are_kept_in_no_folder_that_others_can_write_to(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUMEM_CACHE", str(tmp_path))
    (tmp_path / "planted").mkdir()  # an empty folder is closed, and used
    tmp_path.chmod(0o777)
    with pytest.raises(
        EmulationError, match=r"compiled kernels cannot be cached: .*other users can write to the folder"
    ):
        torch_build.compiler_variables(Path("/cache/libcuda.so.1"), {})
