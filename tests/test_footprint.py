"""What the plugin leaves alone in a run that measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_gpumem.measuring.jobs.run import reporting_to

WATCH = """
import sys


def test_nothing_heavy_was_loaded():
    heavy = {"torch", "pynvml", "rich", "obstore", "filelock", "numpy", "tomli_w"}
    assert not heavy & set(sys.modules)
    assert "pytest_gpumem.plugin.runtest.hooks" not in sys.modules
"""
MODULES = 14
"""The most modules of this package that a run may load which measures nothing. It loads five, and eight folders' own modules."""


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> None:
    """Hide none: these tests are about what a run keeps."""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "worker"])
def test_a_run_without_measured_tests_loads_neither_torch_nor_anything_for_measuring(project, workers):
    (project.path / "test_it.py").write_text(WATCH)
    result = project.run("-p", "no:anyio", *workers, device=None, new=True, timed=True)
    result.assert_outcomes(passed=1)
    assert not any("gpumem:" in line for line in result.outlines)


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "worker"])
def test_a_run_without_measured_tests_loads_few_modules_of_the_package(project, workers):
    (project.path / "test_it.py").write_text(
        f"""
import sys


def test_few_modules_were_loaded():
    loaded = sorted(name for name in sys.modules if name.startswith("pytest_gpumem"))
    assert len(loaded) <= {MODULES}, loaded
"""
    )
    project.run("-p", "no:anyio", *workers, device=None, new=True, timed=True).assert_outcomes(passed=1)


def test_a_gate_without_measured_tests_loads_no_torch_either(project):
    (project.path / "test_it.py").write_text(
        WATCH.replace('    assert "pytest_gpumem.plugin.runtest.hooks"', '    assert "measuring"')
    )
    project.run("-p", "no:anyio", "--gpumem-baseline", device=None, new=True).assert_outcomes(passed=1)


def test_settings_without_measured_tests_and_unselected_models_load_nothing(project):
    models = "[[tool.gpumem.models]]\nmodel = 'hf-tiny:org/name'\nconfig = ['fp32', 'amp-bf16']\n"
    project.settings(f"[tool.gpumem]\nmark = ['models/**']\n\n{models}")
    (project.path / "test_it.py").write_text(WATCH)
    result = project.run("-p", "no:anyio", "-k", "nothing_heavy", device=None, new=True, timed=True)
    result.assert_outcomes(passed=1, deselected=2)


def test_the_marker_is_registered(project):
    project.write("@pytest.mark.gpumem(device='cpu')\ndef test_it(): ...\n")
    project.run("--strict-markers").assert_outcomes(passed=1)
    project.run("--markers").stdout.fnmatch_lines(["@pytest.mark.gpumem(max_gb=..., *"])


def test_a_measured_test_keeps_the_number_of_threads_and_the_state_of_the_collector(project):
    project.write(
        """
import gc


def test_before():
    torch.set_num_threads(2)


@pytest.mark.gpumem
def test_measured():
    assert torch.get_num_threads() == 1
    assert not gc.isenabled()


def test_after():
    assert torch.get_num_threads() == 2
    assert gc.isenabled()
"""
    )
    project.run(separate=True).assert_outcomes(passed=3)


def test_a_tests_own_garbage_collection_sees_objects_older_than_measured_tests(project):
    project.write(
        """
import gc
import weakref


class Node:
    def __init__(self):
        self.itself = self


NODES = [Node(), Node()]


@pytest.mark.gpumem
def test_measured():
    torch.ones(10)


def test_collects():
    node = weakref.ref(NODES.pop())
    torch.ones(10)
    gc.collect()
    assert node() is None
    assert any(one is globals() for one in gc.get_objects())


@pytest.mark.gpumem
def test_collects_and_is_measured():
    test_collects()
"""
    )
    project.run(separate=True).assert_outcomes(passed=3)


def test_the_heap_is_as_it_was_when_the_session_ends(project):
    (project.path / "conftest.py").write_text(
        """
import gc


def pytest_configure(config):
    config.add_cleanup(lambda: print(f"frozen: {gc.get_freeze_count() > 1000}, callbacks: {len(gc.callbacks)}"))
"""
    )
    project.write("import gc\n\n\n@pytest.mark.gpumem\ndef test_it():\n    assert gc.get_freeze_count() > 10_000\n")
    result = project.run("-p", "no:warnings", separate=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["frozen: False, callbacks: 0"])


def modules_of_a_child(code, **variables):
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    environment = {**os.environ, **variables}
    return set(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split())


def test_a_reporting_process_without_torch_loads_a_few_small_modules(tmp_path):
    loaded = modules_of_a_child("", **reporting_to(tmp_path, {})) - modules_of_a_child("", PYTHONPATH="")
    assert "sitecustomize" in loaded
    assert not loaded & {"contextlib", "pathlib", "re", "typing", "importlib.abc", "tempfile"}
    assert not [name for name in loaded if name.startswith("pytest_gpumem")]


def test_a_reporting_process_without_cuda_does_not_load_the_recorder(tmp_path):
    loaded = modules_of_a_child("import torch", **reporting_to(tmp_path, {}))
    folder = "pytest_gpumem.emulating.emulated_process"
    assert f"{folder}.marks" in loaded
    assert loaded.isdisjoint({f"{folder}.usage", f"{folder}.usage_recorder", "pytest_gpumem.base.shown_command"})


def test_a_recorder_without_an_emulated_gpu_loads_no_emulation():
    recorder = "pytest_gpumem.emulating.emulated_process.usage_recorder"
    loaded = modules_of_a_child(f"import {recorder}")
    assert recorder in loaded
    assert not [name for name in loaded if name.startswith("pytest_gpumem.emulating.host_values")]
    assert "pytest_gpumem.emulating.emulation.load" not in loaded
