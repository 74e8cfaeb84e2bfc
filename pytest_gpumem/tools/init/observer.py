"""A pytest plugin that observes which tests run a model, for ``gpumem init``. It is loaded by ``-p`` with this module's name.

Each observation is appended at once as a line of JSON to the file in `VARIABLE`, so a crash loses no earlier observation.
Several processes may append to the same file, for example workers of pytest-xdist. `project_tests.read_tests` reads the lines.

torch is never imported by this plugin. If the project imports torch, the plugin watches modules, backward passes and
optimizers from then on, and lets this package's devices count the bytes in each test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.emulating.emulated_process.before_torch import TorchFinder
from pytest_gpumem.plugin.config.options import is_measured
from pytest_gpumem.plugin.config.selection import can_be_marked, without_group

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from pytest_gpumem.measuring.devices.contract import Device, Window

VARIABLE = "GPUMEM_INIT_OBSERVATIONS"
"""Environment variable with the path of the file to which observations are appended."""
_FOREIGN = ("site-packages", "dist-packages")
"""Folders with installed packages, which are not a project's own files even if they are below its root directory."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # A conftest.py may import torch and ask for a GPU.
    _observe(early_config)


def pytest_configure(config: pytest.Config) -> None:
    # A worker of pytest-xdist imports this plugin only after the first conftest.py files.
    _observe(config)


def _observe(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path and not config.pluginmanager.has_plugin(VARIABLE):
        config.pluginmanager.register(_Observer(config, Path(path)), VARIABLE)


class _Observer:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._root = config.rootpath
        self._file = path.open("ab", buffering=0)
        self._ran: set[str] = set()
        """The kinds of work seen since the set is cleared: ``"module"``, ``"backward"``, ``"optimizer"``."""
        self._fixtures: dict[pytest.FixtureDef[Any], frozenset[str]] = {}
        """The kinds of work in the set-up of each fixture, because later tests may use the fixture without its set-up."""
        self._asked: set[str] = set()
        self._memory: _Memory | None = None
        self._outcomes: list[str] = []
        self._began = 0.0
        self._watching = ExitStack()
        self._ended: dict[str, Any] = {}
        if "torch" in sys.modules:
            self._watch_torch()
        else:
            sys.meta_path.insert(0, _AfterTorch(self._watch_torch))

    def _write(self, kind: str, **values: object) -> None:
        # A single call appends the whole line, also if other processes write to the same file.
        self._file.write(f"{json.dumps({'kind': kind, **values})}\n".encode())

    # Torch

    def _watch_torch(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from pytest_gpumem.torch_support.private_api.allocator import observe_use_of_cuda
        from pytest_gpumem.torch_support.private_api.autograd import engine_run_within

        # The compiler traces this hook, so the hook only adds to a set that is never replaced.
        ran = self._ran

        def module_begins(_module: object, _args: object) -> None:
            ran.add("module")

        def optimizer_begins(*_: object) -> None:
            ran.add("optimizer")

        def backward_begins(_roots: object) -> AbstractContextManager[object]:
            ran.add("backward")
            return nullcontext()

        register_module_forward_pre_hook(module_begins)
        register_optimizer_step_pre_hook(optimizer_begins)
        self._watching.enter_context(engine_run_within(backward_begins))
        observe_use_of_cuda(self._asked_for_gpu)
        self._memory = _Memory()

    def _asked_for_gpu(self, file: str) -> None:
        if file in self._asked:
            return
        self._asked.add(file)
        path = Path(file)
        if path.is_relative_to(self._root) and not set(path.parts) & set(_FOREIGN):
            self._write("asked for a GPU", file=path.relative_to(self._root).as_posix())

    # Collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            self._write("not collected", id=report.nodeid, why=lines[-1].removeprefix("E").strip() if lines else "")

    # This wrapper surrounds all others, so all plugins have added their markers and have deselected tests.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        result = yield
        self._write("collected", items=[_described(item) for item in items])
        items[:] = [item for item in items if not is_measured(item)]
        return result

    # Tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._write("began", id=without_group(item))
        self._ran.clear()
        self._outcomes.clear()
        if self._memory is not None:
            self._memory.begin()
        self._began = time.perf_counter()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        earlier = frozenset(self._ran)
        self._ran.clear()
        try:
            return (yield)
        finally:
            self._fixtures[fixturedef] = frozenset(self._ran)
            self._ran |= earlier

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        nbytes = None if self._memory is None else self._memory.end()
        ran = set(self._ran)
        if any(self._fixtures.values()):
            from pytest_gpumem.plugin.runtest.ownership import fixtures_used

            # pytest keeps fixtures from `getfixturevalue()` in a private mapping, which exists while the test runs.
            requested = getattr(getattr(item, "_request", None), "_fixture_defs", {}).values()
            used = [*fixtures_used(item, self._fixtures), *requested]
            ran.update(*(self._fixtures.get(fixturedef, frozenset()) for fixturedef in used))
        if ran and not self._ran:
            nbytes = None  # an earlier test's set-up allocated the bytes of the shared fixture
        self._ended = {"ran": sorted(ran), "seconds": time.perf_counter() - self._began, "bytes": nbytes}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # A test that is expected to fail counts as failed, because it has no measurement.
        self._outcomes.append("failed" if hasattr(report, "wasxfail") and report.skipped else report.outcome)
        if call.when == "teardown":
            outcome = next((name for name in ("failed", "skipped") if name in self._outcomes), "passed")
            self._write("ended", id=without_group(item), outcome=outcome, torch=_has_torch(), **self._ended)
        return report

    def pytest_sessionfinish(self) -> None:
        self._write("ended session", torch=_has_torch())

    def pytest_unconfigure(self) -> None:
        self._watching.close()


def _described(item: pytest.Item) -> dict[str, object]:
    nodeid = without_group(item)
    parameters = f"[{item.callspec.id}]" if hasattr(item, "callspec") else ""
    return {
        "id": nodeid,
        "function": nodeid.removesuffix(parameters),
        "parametrized": bool(parameters),
        "measured": is_measured(item),
        "markable": can_be_marked(item),
    }


def _has_torch() -> bool:
    return "torch" in sys.modules


class _Memory:
    """The bytes that a test allocates on each device of this machine, counted by the devices themselves."""

    def __init__(self) -> None:
        self._devices: list[Device] | None = None
        self._windows: list[tuple[Device, Window, int]] = []

    def begin(self) -> None:
        """Begin to count. If the last test ended without `end`, its counting ends."""
        self.end()
        if self._devices is None:
            self._devices = _devices()
        for device in self._devices:
            # A device that cannot count must not fail the project's test.
            with suppress(Exception), ExitStack() as undo:
                device.open()
                undo.callback(device.close)
                self._windows.append((device, device.open_window(), device.live()))
                undo.pop_all()

    def end(self) -> dict[str, int]:
        """Stop counting, and return the peak on each device. A device whose counting was disturbed is left out."""
        peaks: dict[str, int] = {}
        for device, window, live in self._windows:
            # A test with a profiler of its own disturbs the counting.
            with suppress(Exception), closing(device):
                peaks[device.name] = device.close_window(window).allocated - live
        self._windows.clear()
        return peaks


def _devices() -> list[Device]:
    """Return the devices on which this process can count bytes."""
    from pytest_gpumem.measuring.devices.registry import BUILT_IN, Devices

    devices = Devices(BUILT_IN)
    usable: list[Device] = []
    for name in BUILT_IN:
        with suppress(Exception):
            device = devices.get(name)
            device.lock = None  # a bound does not need a quiet machine, so other processes need not wait
            device.open()
            device.close()
            usable.append(device)
    return usable


class _AfterTorch(TorchFinder):
    """Calls a function right after torch was imported."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def after_import(self) -> None:
        sys.meta_path.remove(self)
        self._call()
