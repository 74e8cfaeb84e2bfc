"""Where the real cuDNN is looked for, and what is said where it cannot be used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.emulating.emulation.cudnn import WHY_RECURRENT, Cudnn, installed_cudnn
from pytest_gpumem.emulating.emulation.torch_build import TorchBuild

if TYPE_CHECKING:
    from pathlib import Path


def torch_in(site: Path, cuda: tuple[int, int] = (13, 0), cudnn: tuple[int, int, int] = (9, 20, 0)) -> TorchBuild:
    return TorchBuild("2.13.0", cuda, cudnn, "nvidia-cudnn-cu13==9.20.0.48", site / "torch" / "lib")


def install(site: Path, *files: str) -> Path:
    for file in files:
        path = site / "nvidia" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return site / "nvidia" / files[0]


@pytest.fixture(autouse=True)
def _nothing_else_is_installed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.parametrize(
    ("cuda", "cublaslt"), [((13, 0), "cu13/lib/libcublasLt.so.13"), ((12, 8), "cublas/lib/libcublasLt.so.12")]
)
def test_it_is_found_beside_torch_or_on_the_path(tmp_path, monkeypatch, cuda, cublaslt):
    beside, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    assert installed_cudnn(torch_in(beside, cuda)) is None
    monkeypatch.setattr(sys, "path", ["", str(elsewhere)])
    there = install(elsewhere, "cudnn/lib/libcudnn.so.9", cublaslt)
    assert installed_cudnn(torch_in(beside, cuda)) == there
    here = install(beside, "cudnn/lib/libcudnn.so.9", cublaslt)
    assert installed_cudnn(torch_in(beside, cuda)) == here


def test_one_without_cublaslt_would_end_the_process_and_is_none(tmp_path):
    install(tmp_path, "cudnn/lib/libcudnn.so.9", "cu13/lib/libcublas.so.13")
    assert installed_cudnn(torch_in(tmp_path)) is None


@dataclass
class StandIn:
    """As the stand-in of libcudnn."""

    planned_by: int = 0
    convolutions: int = 1
    recurrent: int = 0
    used: bytes | None = None

    def gpumem_use_cudnn(self, path: bytes) -> None:
        self.used = path

    def gpumem_convolutions(self) -> int:
        return self.convolutions

    def gpumem_recurrent(self) -> int:
        return self.recurrent

    def gpumem_tell_most_kept(self, most) -> None:
        most._obj.value = 3_000_000

    def gpumem_cudnn_release(self) -> int:
        return self.planned_by

    def gpumem_tell_unplanned(self, tell) -> None:
        self.unplanned = tell


def test_the_release_that_plans_is_told_as_people_write_it(tmp_path):
    library = install(tmp_path, "cudnn/lib/libcudnn.so.9", "cu13/lib/libcublasLt.so.13")
    stand_in = StandIn(planned_by=91903)
    cudnn = Cudnn(stand_in, torch_in(tmp_path))
    assert stand_in.used == str(library).encode()
    assert (cudnn.release(), cudnn.lacking()) == ("9.19.3", None)


def test_nothing_is_lacking_where_there_are_no_convolutions(tmp_path):
    assert Cudnn(StandIn(convolutions=0), torch_in(tmp_path)).lacking() is None


def test_what_recurrent_layers_take_is_not_known_whatever_is_installed(tmp_path, monkeypatch):
    install(tmp_path, "cudnn/lib/libcudnn.so.9", "cu13/lib/libcublasLt.so.13")
    said = f"{WHY_RECURRENT}; one run of a layer keeps at most 3.00 MB"
    assert Cudnn(StandIn(planned_by=91903, recurrent=1), torch_in(tmp_path)).lacking() == said
    stand_in = StandIn(recurrent=1)
    cudnn = Cudnn(stand_in, torch_in(tmp_path))
    run_unplanned(stand_in, 0, 12_000_000, monkeypatch)
    both = cudnn.lacking()
    assert both is not None
    assert both.startswith(ZERO)
    assert both.endswith(f"; {said}")


ZERO = "workspaces of convolutions count as 0 bytes, because "
AT_MOST = "; a peak is too low by at most 12.00 MB"


def run_unplanned(stand_in: StandIn, live: int, most: int, monkeypatch) -> None:
    """Run a convolution as the stand-in does, with ``live`` bytes and a workspace of at most ``most``."""
    statistics = {name: {"all": {"current": live}} for name in ("requested_bytes", "allocated_bytes", "active_bytes")}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics)
    stand_in.unplanned(most)


def test_a_peak_lacks_what_a_convolution_reaches_above_it_with_its_workspace(tmp_path, monkeypatch):
    stand_in = StandIn()
    cudnn = Cudnn(stand_in, torch_in(tmp_path))
    run_unplanned(stand_in, 100, 50, monkeypatch)
    run_unplanned(stand_in, 20, 90, monkeypatch)
    assert (cudnn.reaching(0, "requested_bytes"), cudnn.reaching(1, "requested_bytes")) == (150, 0)
    assert cudnn.lacking({0: 150}) is None
    told = cudnn.lacking({0: 149, 1: 10})
    assert told is not None
    assert told.endswith("; a peak is too low by at most 1 B")
    cudnn.forget_reaching(0)
    assert cudnn.lacking({0: 100}) is None


def test_where_none_is_installed_it_says_how_to_install_the_one_that_torch_requires(tmp_path, monkeypatch):
    stand_in = StandIn()
    cudnn = Cudnn(stand_in, torch_in(tmp_path))
    run_unplanned(stand_in, 0, 12_000_000, monkeypatch)
    assert cudnn.release() == "none"
    assert cudnn.lacking() == ZERO + "no cuDNN is installed (pip install nvidia-cudnn-cu13==9.20.0.48)" + AT_MOST


def test_one_that_is_too_old_is_not_tried(tmp_path, monkeypatch):
    install(tmp_path, "cudnn/lib/libcudnn.so.9", "cu13/lib/libcublasLt.so.13")
    stand_in = StandIn()
    cudnn = Cudnn(stand_in, torch_in(tmp_path, cudnn=(9, 7, 1)))
    assert stand_in.used is None
    run_unplanned(stand_in, 0, 12_000_000, monkeypatch)
    assert (
        cudnn.lacking()
        == ZERO + "torch 2.13.0 has cuDNN 9.7.1, and only cuDNN 9.8 or newer plans without a GPU" + AT_MOST
    )


def test_one_that_fails_is_named(tmp_path, monkeypatch):
    library = install(tmp_path, "cudnn/lib/libcudnn.so.9", "cu13/lib/libcublasLt.so.13")
    stand_in = StandIn()
    cudnn = Cudnn(stand_in, torch_in(tmp_path))
    run_unplanned(stand_in, 0, 12_000_000, monkeypatch)
    assert cudnn.lacking() == ZERO + f"the cuDNN in {library} cannot be used" + AT_MOST
