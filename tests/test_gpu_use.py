"""Sessions whose device says who else holds a GPU: failures show this memory, and passing tests do not.

The device counts the CPU's tensors, and its other processes are made up.
"""

from __future__ import annotations

import json

import pytest

from tests.pages import follows, output

CONFTEST = """
from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse
from pytest_gpumem.measuring.devices.cpu import CpuDevice


class HeldDevice(CpuDevice):
    reads = 0

    def gpu_use(self):
        HeldDevice.reads += 1
        processes = GpuProcess(4712, 24 * 10**9, "python"), GpuProcess(811, 5 * 10**9, "ollama")
        return GpuUse("cuda:0", processes, beside_torch=543_259_520 + HeldDevice.reads * 10**6)


def pytest_gpumem_devices(config):
    return {"held": HeldDevice}


def pytest_terminal_summary(terminalreporter):
    terminalreporter.line(f"NVML was read {HeldDevice.reads} times")
"""
TESTS = """
@pytest.fixture
def full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.gpumem(max_memory="LIMIT")
def test_over():
    torch.ones(10_000)


@pytest.mark.gpumem
def test_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.gpumem
def test_out_of_memory_in_set_up(full):
    pass


@pytest.mark.gpumem
def test_cublas():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.gpumem
def test_wrong():
    torch.ones(10)
    raise RuntimeError("wrong")
"""
OTHERS = "other processes on cuda:0 when the test began: python (pid 4712) 24.00 GB, ollama (pid 811) 5.00 GB"


SECTION = output("docs/guide/fits.md", "----------------------- Captured gpumem GPU memory call")


@pytest.fixture
def session(project):
    """Runs a test in the project on the device from its conftest.py."""

    def run(test, *arguments, limit="1 GB"):
        project.write(CONFTEST, "conftest.py")
        project.write(TESTS.replace("LIMIT", limit))
        return project.run("-k", test, *arguments, device="held")

    return run


def test_a_test_over_its_budget_names_the_other_processes(session):
    result = session("test_over", limit="10 kB")
    result.stdout.fnmatch_lines(
        [
            "*over budget: *",
            f"  note: {OTHERS.replace('[', '?')}",
            "  note: beside torch: 545.26 MB on cuda:0 (CUDA context, libraries)",
        ]
    )


def test_a_regression_names_the_other_processes_and_its_baseline_does_not(session, project):
    assert session("test_over", "--gpumem-update=new").ret == 0
    assert "4712" not in json.dumps(project.stored())
    project.write(TESTS.replace("LIMIT", "1 GB").replace("10_000", "50_000"))
    result = project.run("-k", "test_over", "--gpumem-baseline", device="held")
    result.stdout.fnmatch_lines(["Memory regressed: *", f"  note: {OTHERS}", "  accept: *"])


@pytest.mark.parametrize("test", ["test_out_of_memory", "test_out_of_memory_in_set_up", "test_cublas"])
def test_a_test_that_ran_out_of_memory_has_a_section_with_the_other_processes(session, test):
    result = session(f"{test} and not {test}_in", "--gpumem-explain=never")
    when = "setup" if "set_up" in test else "call"
    result.stdout.fnmatch_lines(
        [f"* Captured gpumem GPU memory {when} *", OTHERS, "beside torch: 545.26 MB on cuda:0 *"]
    )


def test_the_section_is_the_guides(session):
    result = session("test_out_of_memory and not test_out_of_memory_in", "--gpumem-explain=never")
    assert follows(SECTION, result.outlines)


def test_another_error_has_no_section_about_the_gpu(session):
    result = session("test_wrong")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*gpumem GPU memory*")


def test_a_passing_test_has_the_processes_in_its_json_only(session, project):
    result = session("test_over", "--junitxml=report.xml", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*4712*")
    (use,) = project.verdicts()["test_over"]["gpu_uses"]
    assert use == {
        "device": "cuda:0",
        "processes": [
            {"pid": 4712, "nbytes": 24 * 10**9, "program": "python"},
            {"pid": 811, "nbytes": 5 * 10**9, "program": "ollama"},
        ],
        "may_include_own": False,
        "beside_torch": 545_259_520,
    }


def test_nvml_is_read_once_when_a_test_begins_and_once_when_it_ends(session):
    session("test_over").stdout.fnmatch_lines(["NVML was read 2 times"])
