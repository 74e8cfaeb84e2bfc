"""Where a GPU is not emulated, and what is said then."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS, QUIET
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.emulating.emulation import load
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.tools.main import main


def test_where_torch_has_been_imported_who_did_it_is_named(project):
    project.write("def test_it(): ...\n")
    as_loaded = "import sys, types\ntorch = sys.modules['torch'] = types.ModuleType('torch')\n"
    (project.path / "early.py").write_text(as_loaded, encoding="utf-8")
    result = project.run("-p", "early", device="emulated:h100", new=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --gpumem-device=emulated:h100: torch was imported before the GPU could be emulated, by early. Import torch later*"
        ]
    )


def test_a_driver_of_a_real_gpu_refuses(monkeypatch, tmp_path):
    sign = tmp_path / "nvidiactl"
    sign.write_text("", encoding="utf-8")
    monkeypatch.setattr(load, "_SIGNS_OF_A_DRIVER", (sign,))
    with pytest.raises(EmulationError, match=r"has a GPU's driver \(.*nvidiactl\).*--gpumem-device=cuda"):
        load.load(emulated_gpu("h100"))


def test_another_platform_refuses(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EmulationError, match="on Linux on x86-64 only, and this is darwin on"):
        load.load(emulated_gpu("h100"))


@pytest.fixture
def _nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(load, "stand_ins", lambda torch: ())
    monkeypatch.setattr(load, "installed_torch", lambda: None)


@pytest.fixture
def executed(_nothing_is_compiled, monkeypatch):
    """What this process would have been replaced by: programs, their commands and environments."""
    called = []
    monkeypatch.setattr(os, "execvpe", lambda *given: called.append(given))
    return called


def emulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["emulate", *arguments])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("emulated:h10", "did you mean 'emulated:h100'?"),
        ("h100x99", "from 1 to 64 GPUs can be emulated, not 99"),
    ],
)
def test_a_gpu_that_there_is_not_is_an_error(word, said):
    result = emulate(word, "--", "true")
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.parametrize(
    ("place", "word", "said"),
    [
        ("option", "emulated:h10", "*did you mean 'emulated:h100'?*"),
        ("settings", "emulated:h100x99", "*from 1 to 64 GPUs*"),
    ],
)
def test_a_gpu_that_there_is_not_is_a_usage_error(project, place, word, said):
    project.write("def test_it(): ...\n")
    if place == "settings":
        project.settings(f'[tool.gpumem]\ndevice = "{word}"\n')
    result = project.run(device=word if place == "option" else None, new=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    named = f"--gpumem-device={word}" if place == "option" else f"pyproject.toml: [[]tool.gpumem[]]: device = '{word}'"
    result.stderr.fnmatch_lines([f"ERROR: {named}: {said}"])


def test_a_torch_without_cuda_is_an_error(project):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA: tests/emulated runs on it")
    project.write("def test_it(): ...\n")
    result = project.run(device="emulated:h100", new=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --gpumem-device=emulated:h100: torch * has no CUDA: an emulated GPU needs the CUDA build*"]
    )
    result = emulate("h100", "--", "true")
    assert result.exit_code == 1
    assert re.search(r"Error: torch \S+ has no CUDA: an emulated GPU needs the CUDA build", result.output)


@pytest.fixture
def without_libraries(project):
    """A project that finds a CUDA build of torch whose libraries are not installed."""
    torch = project.path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "lib" / "libtorch_cuda.so").touch()
    (torch / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n", encoding="utf-8")
    error = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    (torch / "__init__.py").write_text(f"raise ImportError({error!r})\n", encoding="utf-8")
    return project


LACKS_LIBRARIES = (
    "torch cannot load libcudnn.so.9, one of NVIDIA's libraries, which an emulated GPU replaces: add {}, or start the program "
    "with `*gpumem emulate h100 -- COMMAND`"
)


@pytest.mark.skipif(any(sign.exists() for sign in load._SIGNS_OF_A_DRIVER), reason="a GPU's driver is installed")
@pytest.mark.parametrize(
    ("files", "workers"),
    [
        ({"test_it.py": "import torch\n"}, []),
        ({"test_it.py": "import torch\n"}, ["-n1"]),
        ({"test_it.py": "def test_it():\n    import torch\n"}, []),
        ({"test_it.py": "def test_it(gpumem):\n    gpumem.measure(print)\n"}, []),
        ({"test_it.py": "def test_it(): ...\n", "conftest.py": "import torch\n"}, []),
    ],
    ids=["file", "worker", "test", "fixture", "conftest"],
)
def test_a_torch_without_its_libraries_is_red_with_a_hint_at_emulation(without_libraries, files, workers):
    for name, text in files.items():
        (without_libraries.path / name).write_text(text, encoding="utf-8")
    result = without_libraries.run("-p", "no:anyio", *workers, device=None, new=True)
    assert result.ret != 0
    lines = result.stderr if "conftest.py" in files else result.stdout
    lines.fnmatch_lines([f"gpumem: {LACKS_LIBRARIES.format('--gpumem-device=emulated:h100')}"])


def test_another_failure_has_no_such_hint(without_libraries):
    text = "def test_it():\n    raise ImportError('libother.so.1: cannot open shared object file: No such file')\n"
    (without_libraries.path / "test_it.py").write_text(text, encoding="utf-8")
    result = without_libraries.run("-p", "no:anyio", device=None, new=True)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("gpumem: torch cannot load*")


@pytest.mark.skipif(any(sign.exists() for sign in load._SIGNS_OF_A_DRIVER), reason="a GPU's driver is installed")
def test_a_command_that_imports_such_a_torch_ends_with_the_hint(without_libraries):
    command = [sys.executable, "-m", "pytest_gpumem", "advise", "hf:gpt2", "--fits=8GB"]
    environment = {**os.environ, "PYTHONPATH": f"{without_libraries.path}{os.pathsep}{Path(load.__file__).parents[3]}"}
    done = subprocess.run(
        command, cwd=without_libraries.path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert fnmatch.fnmatchcase(done.stderr, f"Error: {LACKS_LIBRARIES.format('--device=emulated:h100')}\n")


@pytest.mark.parametrize("arguments", [(), ("h100",), ("h100", "--")])
@pytest.mark.usefixtures("_nothing_is_compiled")
def test_without_a_command_it_is_wrong_usage(arguments):
    assert emulate(*arguments).exit_code == 2


def test_the_command_takes_this_process_with_what_its_pythons_need(executed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    emulate("l4", "--", "python", "train.py", "--batch", "8")
    ((program, command, environment),) = executed
    assert (program, command) == ("python", ("python", "train.py", "--batch", "8"))
    assert environment["GPUMEM_EMULATED"] == "emulated:l4"
    assert environment[PEAKS]
    assert environment["PYTHONPATH"] == f"{STARTUP}{os.pathsep}mine"


def test_it_can_be_quiet(executed, monkeypatch):
    monkeypatch.delenv(PEAKS, raising=False)
    emulate("--quiet", "l4", "--", "python", "-q")
    ((_, command, environment),) = executed
    assert (command, environment[PEAKS]) == (("python", "-q"), QUIET)


@pytest.mark.usefixtures("_nothing_is_compiled")
def test_a_command_that_there_is_not_is_named():
    result = emulate("l4", "--", "/nowhere/python")
    assert (result.exit_code, result.output) == (1, "Error: /nowhere/python: No such file or directory\n")


def test_a_session_without_the_word_loads_nothing_of_it(project):
    project.write(
        "def test_it(gpumem):\n    import sys\n    gpumem.measure(lambda: torch.ones(10))\n"
        "    assert 'pytest_gpumem.emulating.host_values.scope' not in sys.modules\n"
    )
    project.run(new=True).assert_outcomes(passed=1)


def test_the_sitecustomize_that_it_hides_is_run_as_well(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "print('ours')"],
        env={"PYTHONPATH": f"{STARTUP}:{tmp_path}", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "theirs\nours\n"
    assert Path(STARTUP, "sitecustomize.py").exists()
