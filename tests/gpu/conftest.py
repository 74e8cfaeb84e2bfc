"""Tests that need a GPU: skipped where there is none, and what they measured is kept where there is one."""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.measuring.devices.registry import make_cuda
from tests.gpu.figures import Figures
from tests.gpu.gpt2 import GIBIBYTE, NEEDED
from tests.gpu.project import REPOSITORY, GpuProject
from tests.support.processes import own_objects_out_of_sight

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.devices.contract import Device

HERE = Path(__file__).parent
RESULTS = REPOSITORY / "benchmarks" / "results"
FIGURES: pytest.StashKey[Figures] = pytest.StashKey()


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> Iterator[None]:
    """Hide none on a real GPU: here tests are measured as a user's are."""
    with nullcontext() if current_emulation() is None else own_objects_out_of_sight():
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hardware(reason): what an emulated GPU does not have, as a clause")


def pytest_itemcollected(item: pytest.Item) -> None:
    # torch itself warns once when a backward pass is the first to use cuBLAS on its thread.
    item.add_marker(pytest.mark.filterwarnings("default:Attempting to run cuBLAS"))


# A wrapper, and registered before the plugin's own, so that this is the reason and not that of who touches the device;
# but inside of pytest's, which expect to be torn down only when they were set up.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    if not has_cuda():
        pytest.skip("needs a CUDA device")
    hardware = item.get_closest_marker("hardware")
    if hardware is not None and current_emulation() is not None:
        pytest.skip(f"needs a real GPU: {hardware.args[0]}")
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_gpumem_measurement(item: pytest.Item, measurement: Measurement) -> None:
    if HERE in item.path.parents and "cuda" in measurement.environment.details and current_emulation() is None:
        figures_of(item.config).add(item.nodeid, measurement.name, measurement.metrics)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        figures_of(item.config).forget(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    figures = figures_of(session.config)
    if figures.tests and not hasattr(session.config, "workerinput"):
        figures.write(RESULTS, make_cuda().environment())


def figures_of(config: pytest.Config) -> Figures:
    return config.stash.setdefault(FIGURES, Figures())


@functools.cache
def has_cuda() -> bool:
    with warnings.catch_warnings():
        # A missing driver is told by a warning.
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


@pytest.fixture
def device() -> Iterator[Device]:
    """The cuda device, open and at rest. Not for tests that are measured: theirs is open already."""
    device = make_cuda()
    device.open()
    device.quiesce()
    yield device
    device.close()


@pytest.fixture
def room_for_gpt2() -> Iterator[None]:
    """For tests with `tests.gpu.gpt2`."""
    pytest.importorskip("transformers", reason="needs transformers: these are tests against its GPT-2")
    if torch.cuda.get_device_properties().total_memory < NEEDED:
        pytest.skip(f"needs a GPU with {NEEDED // GIBIBYTE} GiB")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def gpu_project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> GpuProject:
    # What this process caches is lent to the others.
    torch.cuda.empty_cache()
    return GpuProject(pytester, monkeypatch)


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, float]], None]:
    """Keep figures that a test took in other processes: ``keep("alone", {"call.peak_allocated": 4096})``."""
    figures = figures_of(request.config)
    return lambda name, metrics: figures.add(request.node.nodeid, name, metrics)
