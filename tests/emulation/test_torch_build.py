"""The torch that is installed, told from its files, and what is wrong with it."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulation.torch_build import EmulationError, installed_torch


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
    monkeypatch.setattr("pytest_gpumem.emulation.torch_build.requires", lambda name: ["sympy>=1.13.3", required])
    torch = installed_torch()
    assert (torch.cudnn, torch.cudnn_wheel) == (release, wheel)


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", None), ("2.13.0", None)])
def test_a_build_without_cuda_is_refused(fake_torch, version, cuda):
    fake_torch.says(version, cuda)
    with pytest.raises(EmulationError, match="has no CUDA: a GPU is emulated beneath the CUDA build of torch"):
        installed_torch()


def test_one_that_says_cuda_and_lacks_its_library_is_refused(fake_torch):
    (fake_torch.package / "lib" / "libtorch_cuda.so").unlink()
    with pytest.raises(EmulationError, match="has no CUDA"):
        installed_torch()


def test_one_that_is_too_old_is_refused(fake_torch):
    fake_torch.says("2.5.1+cu124", "12.4")
    with pytest.raises(EmulationError, match=r"torch 2\.5\.1\+cu124 is too old to be emulated: 2\.6 or newer"):
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
