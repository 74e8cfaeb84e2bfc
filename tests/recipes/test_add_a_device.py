"""The recipe docs/development/add-a-device.md: its device gates tests. Here the tensors of the XPU are the host's."""

from __future__ import annotations

import shutil

import pytest

from tests.recipes.recipes import ROOT, copy_of_the_package, write_tests

THERE, HERE = 'torch.device("xpu", torch.xpu.current_device())', 'torch.device("cpu")'
NO_XPU = "import sys; from pytest_gpumem.measuring.devices.registry import BUILT_IN; BUILT_IN['xpu']()"
CONFTEST = """
import torch
from host_as_accelerator import install


def pytest_configure(config):
    torch.xpu.is_available = lambda: True
    config.add_cleanup(install(torch.cpu, torch.xpu).close)
"""
TESTS = """
import pytest
import torch


@pytest.mark.gpumem(max_memory="5MB")
def test_marked():
    torch.ones({count})


def test_step(gpumem):
    before = torch.xpu.get_rng_state(0)
    measured = gpumem.train_step(
        lambda: torch.nn.Linear(64, 64), torch.randn(32, 64), loss=lambda out, _: (out * torch.xpu.rand(1)).sum()
    )
    assert measured.step_time > 0
    assert torch.equal(before, torch.xpu.get_rng_state(0))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    package = copy_of_the_package(tmp_path_factory.mktemp("package"), "add-a-device")
    device = package.folder / "pytest_gpumem/measuring/devices/xpu.py"
    code = device.read_text()
    assert code.count(THERE) == 1
    device.write_text(code.replace(THERE, HERE))
    return package


def test_a_device_that_was_added_by_the_recipe_gates(package, tmp_path):
    shutil.copy(ROOT / "tests" / "host_as_accelerator.py", tmp_path)
    for count, outcome in ((1_000_000, "2 passed"), (2_000_000, "1 failed, 1 passed")):
        write_tests(tmp_path, TESTS.format(count=count))
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "pyproject.toml").write_text('[tool.gpumem]\ntime_budget = "50 ms"\n')
        mode = "--gpumem-update=new" if count == 1_000_000 else "--gpumem-baseline"
        done = package.pytest(tmp_path, "--gpumem-device=xpu", mode)
        assert outcome in done.stdout, done.stdout + done.stderr
    assert "GPU memory over budget: peak 8.00 MB, budget 5.00 MB" in done.stdout
    assert [path.name for path in (tmp_path / "gpumem-baselines").iterdir() if path.is_dir()] == ["host-1550"]


def test_without_the_hardware_it_says_so(package, tmp_path):
    done = package.run(tmp_path, "-c", NO_XPU)
    assert "DeviceUnavailable: no XPU: torch " in done.stderr
