"""A device of another package works from end to end: with the members that must be written, and no others but a few.

It stands in for an XPU: its tensors are the host's, counted as `torch.xpu` counts its own (`tests/host_as_accelerator.py`).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import pytest_gpumem
from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.measuring.devices.contract import Device, Peak
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN

CONFTEST = """
from pytest_gpumem.measuring.devices.contract import Device, Peak
from pytest_gpumem.facts.measurement import Environment
from tests.host_as_accelerator import install


class XpuDevice(Device):
    name = "xpu"
    torch_device = torch.device("cpu")

    def environment(self):
        return Environment(slug="host-1550", device=torch.cpu.get_device_name(), details={"torch": torch.__version__})

    def live(self):
        return torch.cpu.memory_allocated()

    def peak(self):
        return Peak(torch.cpu.max_memory_allocated())

    def reset_peak(self):
        torch.cpu.reset_peak_memory_stats()

    def random_devices(self):
        return (0,)


def pytest_configure(config):
    config.add_cleanup(install(torch.cpu).close)


def pytest_gpumem_devices(config):
    return {"xpu": XpuDevice}
"""
STEP = """
def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def loss(output, _):
    return (output * torch.ones(COLUMNS)).square().mean()


def test_it(gpumem):
    measured = gpumem.train_step(model, torch.randn(32, 64), loss=loss, config="optimizer=sgd")
    print("PEAK", measured.peak_allocated)
"""


@pytest.fixture
def xpu(project):
    """Runs pytest in the project on the device of its conftest.py."""
    project.write(CONFTEST, "conftest.py")
    return lambda *arguments, **more: project.run(*arguments, device="xpu", **more)


def step(columns):
    return STEP.replace("COLUMNS", str(columns))


def test_a_training_step_is_gated_by_a_baseline_of_its_own(project, xpu):
    project.write(step(256))
    assert xpu("--gpumem-update=new").ret == 0
    assert list(project.stored()) == ["host-1550/test_it.py.toml"]
    xpu("--gpumem-baseline").stdout.fnmatch_lines(["gpumem: 1 gated"])
    project.write(step(512))
    failed = xpu("--gpumem-baseline")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["Memory regressed: peak *", "  what grew *", "*test_it.py:11*"])


def test_a_step_needs_the_bytes_of_the_cpu_and_is_explained_to_the_byte(project, xpu):
    project.write(
        step(256)
        + """

def test_explained(gpumem):
    measured = gpumem.train_step(model, torch.randn(32, 64), loss=loss, config="optimizer=sgd", explain=True)
    composition = measured.composition
    assert composition.notes == ()
    assert sum(row.nbytes for row in composition.rows) == measured.peak_allocated
    assert {"parameter", "activation"} <= {row.category for row in composition.rows}
"""
    )
    explained = xpu("-s")
    explained.assert_outcomes(passed=2)
    (there,) = [line for line in explained.outlines if "PEAK" in line]
    (here,) = [line for line in project.run("-s").outlines if "PEAK" in line]
    assert there == here


def test_its_random_numbers_are_given_back(project, xpu):
    project.write(
        step(256)
        + """

def noisy(output, _):
    return (output * torch.cpu.rand(1)).square().mean()


@pytest.mark.parametrize("run", ["train_step", "assert_same_gradients"])
def test_random(gpumem, run):
    before = torch.cpu.get_rng_state(0)
    if run == "train_step":
        gpumem.train_step(model, torch.randn(32, 64), loss=noisy)
    else:
        gpumem.assert_same_gradients(model, torch.randn(32, 64), "fp32", "accumulate=1", loss=noisy)
    assert torch.equal(torch.cpu.get_rng_state(0), before)
    torch.cpu.rand(1)
    assert not torch.equal(torch.cpu.get_rng_state(0), before)
"""
    )
    xpu().assert_outcomes(passed=3)


def test_a_peak_that_the_test_resets_itself_is_not_lost(project, xpu):
    project.write(
        "@pytest.mark.gpumem(max_memory='1MB')\ndef test_it():\n    torch.ones(10**6)\n    torch.cpu.reset_peak_memory_stats()\n"
    )
    xpu().assert_outcomes(failed=1)


def test_what_it_does_not_have_is_refused_and_not_made_up(project, xpu):
    project.write(
        step(8)
        + """

def test_tf32(gpumem):
    gpumem.train_step(model, torch.randn(32, 64), loss=loss, config="tf32")


def test_times(gpumem):
    assert "step_time" not in gpumem.train_step(model, torch.randn(32, 64), loss=loss).metrics
"""
    )
    result = xpu("-rs", timed=True)
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * gpumem: the xpu device does not switch TF32 on"])


def test_advise_takes_it_where_it_can_be_had(project):
    project.write(CONFTEST + "\n\ninstall(torch.cpu)\n", "conftest.py")
    project.write(step(64) + "\ndef make():\n    return model(), torch.randn(32, 64), loss\n", "models.py")
    done = project.gpumem("advise", "models:make", "--fits", "1GB", "--device", "xpu")
    assert done.returncode == 0, done.stderr
    assert "recommended: fp32: " in done.stdout
    unknown = project.gpumem("advise", "models:make", "--fits", "1GB", "--device", "xpv")
    assert unknown.returncode == 2
    assert "--device xpv: no such device; did you mean 'xpu'?" in unknown.stderr


def test_advise_says_why_pytest_cannot_tell_devices(project):
    project.write("raise RuntimeError('planted')\n", "conftest.py")
    project.write("def make(): ...\n", "models.py")
    done = project.gpumem("advise", "models:make", "--fits", "1GB", "--device", "xpu")
    assert done.returncode == 2
    assert "pytest cannot be started here:" in done.stderr
    assert "planted" in done.stderr


# The base class


class Fewest(Device):
    """What must be written, over a counter that the test sets."""

    name = "fewest"
    torch_device = torch.device("xpu", 1)
    now = highest = 0

    def environment(self):
        return Environment("fewest", "Fewest")

    def live(self):
        return self.now

    def peak(self):
        return Peak(self.highest)

    def reset_peak(self):
        self.highest = self.now

    def hold(self, nbytes):
        self.now += nbytes
        self.highest = max(self.highest, self.now)


@pytest.fixture
def fewest():
    device = Fewest()
    device.open()
    yield device
    device.close()


def test_no_more_must_be_written():
    assert Device.__abstractmethods__ == {"torch_device", "environment", "live", "peak", "reset_peak"}


def test_a_device_is_open_once_and_closed_as_often_as_anybody_likes(fewest):
    with pytest.raises(RuntimeError, match="the fewest device is already open"):
        fewest.open()
    fewest.close()
    fewest.close()
    with pytest.raises(RuntimeError, match="the fewest device is not open"), fewest.exclusive():
        pass


def test_random_numbers_are_asked_of_the_module_of_the_devices_type(fewest, monkeypatch):
    states = {1: torch.arange(3, dtype=torch.uint8)}
    monkeypatch.setattr("torch.xpu.get_rng_state", states.get)
    monkeypatch.setattr("torch.xpu.set_rng_state", lambda state, index: states.__setitem__(index, state))
    assert fewest.random_state(1).tolist() == [0, 1, 2]
    fewest.set_random_state(torch.zeros(3, dtype=torch.uint8), 1)
    assert states[1].tolist() == [0, 0, 0]


def test_times_are_taken_when_the_device_is_done(fewest, monkeypatch):
    did = []
    monkeypatch.setattr(fewest, "synchronize", lambda: did.append("waited"))
    laps = fewest.laps([lambda: did.append("a"), lambda: did.append("b")])
    assert did == ["waited", "a", "waited", "b", "waited"]
    assert len(laps) == 2
    assert min(laps) >= 0


# Who may ask which device it is

# What the words of options mean on a machine is what these are about.
OF_WORDS = ("tools/doctor", "tools/init")
MAY_ASK = ("measuring/devices", "emulating", "torch_support")
NAMES = {*BUILT_IN, AUTO, "xpu", "mps", "mtia", "hpu"} - {AUTO}
ASKING_METHODS = {"startswith", "endswith"}


def questions_in(source: str) -> list[int]:
    """Lines that compare with the name of a device, or use what only CUDA has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            asked = any(_names_a_device(part) for part in ast.walk(node))
        elif isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and node.func.attr in ASKING_METHODS
            asked = method and any(_names_a_device(part) for part in ast.walk(node))
        elif isinstance(node, ast.Attribute):
            asked = node.attr in ("is_cuda", "is_cpu", "is_xpu") or (
                isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in NAMES
            )
        else:
            asked = False
        if asked:
            found.append(node.lineno)
    return found


def _names_a_device(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.rstrip("-:") in NAMES


@pytest.mark.parametrize(
    "question",
    [
        "device.type == 'cuda'",
        "slug.startswith('cpu-')",
        "tensor.is_cuda",
        "torch.cuda.synchronize()",
        "match device.type:\n    case 'cuda': ...",
    ],
)
def test_a_question_is_found(question):
    assert questions_in(question)


def test_nobody_else_asks_which_device_it_is():
    package = Path(pytest_gpumem.__file__).parent
    rooms = [package / room for room in (*MAY_ASK, *OF_WORDS)]
    files = [path for path in package.rglob("*.py") if not any(path.is_relative_to(room) for room in rooms)]
    assert len(files) > 100
    assert {
        f"{path.relative_to(package)}:{line}": path.read_text().splitlines()[line - 1]
        for path in files
        for line in questions_in(path.read_text())
    } == {}
