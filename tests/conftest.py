"""What every test of the suite may use: a project in a temporary folder, run on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing.util
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

import pytest_gpumem.plugin
from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process.before_torch import COUNTER, LIBRARY, LIVE, USAGE
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.torch_support import garbage_collector
from pytest_gpumem.torch_support.private_api.native_frames import naming_native_frames
from tests import preloaded
from tests.support.processes import (
    LEFT_OUT,
    THE_SUITES,
    are_out_of_sight,
    hide_what_is_loaded,
    own_objects_out_of_sight,
)

# Figures in the pages come from a CPU with AVX512_BF16. oneDNN takes other workspaces for AMX. It reads this at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

pytest_plugins = ["pytester", "tests.chance"]


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker of pytest-xdist a temporary folder of its own, and with it locks on devices of its own.

    With common ones, whoever times a step would wait for the other workers' tests to end, up to a minute. What torch
    compiles stays common.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what it runs in the background so, and every process of the suite would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Else torch.compile compiles and loads a library for each instruction set first, to see whether the compiler has it.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if hasattr(config, "workerinput"):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor_gpumem_suite")))
        multiprocessing.util.get_temp_dir()  # removed at the end, when the suite's own is gone
        folder = tempfile.TemporaryDirectory(prefix="gpumem-suite-")
        config.add_cleanup(folder.cleanup)
        tempfile.tempdir = os.environ["TMPDIR"] = folder.name
    preloaded.begin_with(os.environ)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load torch and the package whole, with what torch only loads when first used.

    A run within this process forgets every module that it was the first to import, and torch cannot be imported twice.
    """
    if session.config.getoption("dist", default="no") != "no" and not hasattr(session.config, "workerinput"):
        return  # pytest-xdist's controller runs no test, and its workers wait for it
    import torch

    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
        if not module.name.startswith("pytest_gpumem.tools.console") or importlib.util.find_spec("click") is not None:
            importlib.import_module(module.name)
    for name in (
        "torch._inductor.config",
        "anyio",
        "anyio.pytest_plugin",
        "filelock",
        "rich.console",
        "rich.table",
        "tomli_w",
    ):
        # On a machine with a GPU, `make gpu` runs with what is there.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter])
    device = CpuDevice()
    device.open()
    parameter.sum().backward()
    optimizer.step()
    device.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the forkserver before the suite's own session measures, which would call it a process that does not report."""
    measured = [
        item for item in items if "gpumem" in getattr(item, "fixturenames", ()) or item.get_closest_marker("gpumem")
    ]
    if measured and len(measured) < len(items):
        preloaded.begin()


@pytest.fixture(autouse=True, scope="session")
def _no_job_of_a_ci() -> Iterator[None]:
    """Runs within a test are no jobs of the CI that runs the suite.

    Under GitHub Actions they would annotate it, and write its summary; where ``CI`` is set, pytest cuts no line short.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "GPUMEM_CACHE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _not_reporting_to_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's processes not report to the suite, which measures some of its tests itself."""
    for name in (USAGE, LIVE, COUNTER, LIBRARY, *naming_native_frames({})):
        monkeypatch.delenv(name, raising=False)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTUP) in paths and EMULATED not in os.environ:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path != str(STARTUP)))


@pytest.fixture(autouse=True)
def _no_device_left_open() -> Iterator[None]:
    """Name the test that leaves a device open: imports behind it would keep nothing alive, in whichever test they are."""
    before = _hooks_of_open_devices()
    yield
    left = _hooks_of_open_devices()[: -len(before) or None]
    for hook in left:
        sys.meta_path.remove(hook)
    assert not left, "a device was opened and not closed"


def _hooks_of_open_devices() -> list[Any]:
    return [hook for hook in sys.meta_path if type(hook).__module__ == garbage_collector.__name__]


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> Iterator[None]:
    """Hide what the suite has loaded from collections. Files whose tests are about all objects have one that does nothing."""
    with own_objects_out_of_sight():
        yield


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """The CPU as while a test is measured: open."""
    device = CpuDevice()
    device.open()
    yield device
    device.close()


class Project:
    """A project with tests, in a folder of its own, and the plugin to run them."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        self.path: Path = pytester.path
        self.plugins: list[str] = []
        """Modules of other plugins that its tests need. Only a run without autoload gets them by ``-p``, as pytest refuses a
        plugin that it has loaded under the name of its entry point."""

    def write(self, source: str, name: str = "test_it.py") -> None:
        """Write a file; ``torch`` and ``pytest`` are imported."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import pytest\nimport torch\n\n\n{source}", encoding="utf-8")

    def settings(self, text: str) -> None:
        (self.path / "pyproject.toml").write_text(text, encoding="utf-8")

    def run(
        self, *args: str, device: str | None = "cpu", separate: bool = False, new: bool = False, timed: bool = False
    ) -> pytest.RunResult:
        """Run pytest: in this process, or in a ``separate`` one that begins with torch loaded, or in a ``new`` interpreter.

        Steps are ``timed`` only where a test says so: what the suite's machine does meanwhile would be in every verdict.
        """
        self._drop_bytecode()
        is_alone = not new and not any(one.startswith("-n") for one in args)
        command = [*LEFT_OUT, *(f"-p{name}" for name in self.plugins if is_alone), *args]
        if not timed:
            command.append("--no-gpumem-time")
        if device is not None:
            command.append(f"--gpumem-device={device}")
        if new:
            return self._pytester.runpytest_subprocess(*command)
        if separate:
            variables = preloaded.ALONE if is_alone else {}
            return preloaded.run_pytest(self.path, *command, env={**os.environ, **variables}, before=_hiding())
        with own_objects_out_of_sight():
            if not is_alone:
                return self._pytester.runpytest_inprocess(*command)
            return self._pytester.runpytest_inprocess(
                "--disable-plugin-autoload", *command, plugins=[pytest_gpumem.plugin]
            )

    def gpumem(self, *args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command, in the project's folder if not in another."""
        self._drop_bytecode()
        environment = {"PYTEST_ADDOPTS": " ".join(THE_SUITES), **os.environ}
        command = ("-m", "pytest_gpumem.tools.main", *args)
        return preloaded.run(*command, cwd=folder or self.path, env=environment, before=_hiding())

    def figures(self, *args: str, separate: bool = False) -> dict[str, dict[str, int]]:
        """Bytes of every measurement, by test: ``{"test_a": {"call.peak_allocated": 4096}}``."""
        self.run(*args, "--junitxml=report.xml", separate=separate)
        return figures_of(self.path / "report.xml")

    def verdicts(self) -> dict[str, Any]:
        """The verdicts of the last run with ``--junitxml=report.xml``, by test."""
        return verdicts_of(self.path / "report.xml")

    def _drop_bytecode(self) -> None:
        """Delete bytecode: of two texts of one length that a file has within a second, Python would run the first one's."""
        for folder in [*self.path.rglob("__pycache__")]:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def store(self) -> Path:
        return self.path / "gpumem-baselines"

    def stored(self) -> dict[str, str]:
        """The text of every file of the store, by path."""
        return {
            path.relative_to(self.store).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(self.store.rglob("*.toml"))
        }


def _hiding() -> Callable[[], None] | None:
    """Return what a separate process begins with: it hides what is loaded where this one does."""
    return hide_what_is_loaded if are_out_of_sight() else None


def figures_of(report: Path) -> dict[str, dict[str, int]]:
    """The bytes and counts in a JUnit report, by test."""
    found: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for entry in case.iter("property"):
            name = str(entry.get("name"))
            if name.startswith("gpumem.") and METRICS[name.rpartition(".")[2]].unit in WHOLE:
                found.setdefault(str(case.get("name")), {})[name.removeprefix("gpumem.")] = int(str(entry.get("value")))
    return found


def verdicts_of(report: Path) -> dict[str, Any]:
    """The verdicts in a JUnit report, by test."""
    return {
        str(case.get("name")): json.loads(str(entry.get("value")))
        for case in ElementTree.parse(report).iter("testcase")
        for entry in case.iter("property")
        if entry.get("name") == "gpumem"
    }


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)
