"""Several workers and the GPUs of one machine: who gets which."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.measuring.devices.sharing import (
    give_worker_its_gpu,
    gpu_of_worker,
    installed_gpus,
    visible_gpus,
)

unhurried = settings(deadline=None)


@pytest.mark.parametrize(
    ("chosen", "installed", "visible"),
    [
        (None, 3, ["0", "1", "2"]),
        ("", 3, []),
        ("NoDevFiles", 3, ["NoDevFiles"]),
        (" 2 , 0 ", 3, ["2", "0"]),
        ("0,-1,1", 3, ["0"]),
        ("0,,1", 3, ["0"]),
        ("GPU-8f2c,GPU-11aa", 3, ["GPU-8f2c", "GPU-11aa"]),
    ],
)
def test_the_visible_gpus_are_those_that_the_driver_would_show(chosen, installed, visible):
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environ, installed) == visible


@pytest.mark.parametrize(
    ("visible", "worker", "gpu"),
    [
        (["0", "1"], "gw1", "1"),
        (["0", "1", "2"], "gw11", "2"),
        (["GPU-8f2c", "GPU-11aa"], "gw1", "GPU-11aa"),
    ],
)
def test_workers_get_the_visible_gpus_in_turn(visible, worker, gpu):
    assert gpu_of_worker(visible, worker) == gpu


@pytest.mark.parametrize(("visible", "worker"), [([], "gw0"), (["3"], "gw5"), (["0", "1"], "master")])
def test_where_there_is_no_choice_none_is_made(visible, worker):
    assert gpu_of_worker(visible, worker) is None


@unhurried
@given(st.integers(2, 16), st.integers(1, 64))
def test_workers_are_spread_evenly(gpus, workers):
    visible = [str(index) for index in range(gpus)]
    given_gpus = [gpu_of_worker(visible, f"gw{number}") for number in range(workers)]
    shares = [given_gpus.count(gpu) for gpu in visible]
    assert sum(shares) == workers
    assert max(shares) - min(shares) <= 1


def test_the_installed_gpus_are_those_that_the_driver_lists(tmp_path, monkeypatch):
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("pytest_gpumem.measuring.devices.sharing._DRIVER_GPUS", tmp_path)
    assert installed_gpus() == 2


def test_without_a_driver_no_gpu_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.measuring.devices.sharing._DRIVER_GPUS", tmp_path / "missing")
    assert installed_gpus() == 0


@pytest.mark.parametrize(
    ("chosen", "installed", "after"),
    [(None, 2, "1"), ("3,5", 8, "5"), ("3", 8, "3"), ("", 8, ""), (None, 1, None)],
)
def test_a_worker_sees_only_its_own_gpu_from_then_on(monkeypatch, chosen, installed, after):
    import os

    monkeypatch.setattr("pytest_gpumem.measuring.devices.sharing.installed_gpus", lambda: installed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen or "")
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    give_worker_its_gpu("gw1")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after
