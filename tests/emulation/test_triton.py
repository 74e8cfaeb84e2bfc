"""What torch.compile needs on an emulated GPU."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem.emulation import torch_build


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that lacks nothing."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    return monkeypatch


def test_a_machine_that_has_all_lacks_nothing(complete):
    assert torch_build.what_compiling_lacks({}) is None


@pytest.mark.parametrize("required", ['triton==3.7.1; platform_system == "Linux"', "triton (==3.7.1) ; whatever"])
def test_triton_is_asked_for_in_the_release_that_torch_requires(complete, required):
    complete.setattr("pytest_gpumem.emulation.torch_build.requires", lambda name: ["sympy", required])
    complete.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build.what_compiling_lacks({}) == (
        "torch.compile needs Triton on an emulated GPU, too, and there is none: pip install --no-deps triton==3.7.1"
    )


def test_a_compiler_is_asked_for_unless_one_is_named(complete):
    complete.setattr(torch_build.shutil, "which", lambda name: None)
    lacking = torch_build.what_compiling_lacks({})
    assert lacking is not None
    assert "apt-get install gcc" in lacking
    assert torch_build.what_compiling_lacks({"CC": "/opt/cc"}) is None


def test_pythons_headers_are_asked_for(complete, tmp_path):
    (tmp_path / "Python.h").unlink()
    lacking = torch_build.what_compiling_lacks({})
    assert lacking is not None
    assert "apt-get install python3-dev" in lacking


def test_what_is_compiled_is_kept_apart_from_what_real_gpus_chose_unless_a_place_is_named():
    driver = Path("/cache/libcuda.so.1")
    wanted = torch_build.compiler_variables(driver, {})
    assert wanted["TRITON_LIBCUDA_PATH"] == "/cache"
    assert wanted["TORCHINDUCTOR_CACHE_DIR"].endswith("_emulated")
    assert torch_build.compiler_variables(driver, {"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {
        "TRITON_LIBCUDA_PATH": "/cache"
    }
