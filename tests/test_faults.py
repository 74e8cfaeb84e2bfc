"""Faults lose nothing and blame the right test."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from tests import preloaded

GOOD = "@pytest.mark.gpumem\ndef test_{name}():\n    torch.ones(1_000_000)\n\n\n"


@pytest.mark.parametrize(
    "error", ["torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')", "RuntimeError('broken')"]
)
@pytest.mark.parametrize("step", ["gpumem.measure(step)", "step()"])
def test_an_error_in_a_measured_step_fails_that_test_alone_and_frees_its_tensors(project, error, step):
    fixture = "gpumem" if "gpumem" in step else ""
    project.write(
        f"""
import gc, weakref

SEEN = []
OUT_OF_MEMORY = {"OutOfMemory" in error}


@pytest.mark.gpumem
def test_broken({fixture}):
    big = torch.ones(1_000_000)
    SEEN.append(weakref.ref(big))

    def step():
        mine = torch.ones(1_000_000)
        SEEN.append(weakref.ref(mine))
        raise {error}

    {step}


@pytest.mark.gpumem
def test_next():
    gc.collect()
    # An out-of-memory error is provoked once more, to tell what was there.
    assert len(SEEN) > 2 if OUT_OF_MEMORY else len(SEEN) == 2
    assert [reference() for reference in SEEN] == [None] * len(SEEN)
    torch.ones(1_000_000)
"""
    )
    result = project.run("--gpumem-update=all", "--junitxml=report.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["gpumem: 1 recorded, new; 1 failed by itself"])
    (text,) = project.stored().values()
    assert "test_next" in text
    assert "test_broken" not in text
    assert "peak_allocated = 4000000\n" in text


def test_what_was_measured_before_a_failure_is_in_the_report(project):
    project.write(
        "def test_it(gpumem):\n    m = gpumem.measure(lambda: torch.ones(1_000_000))\n    assert m.peak_allocated < 1e6\n"
    )
    result = project.run()
    result.stdout.fnmatch_lines(["*gpumem*", "metric *measurement *now", "peak allocated *measure *4.00 MB"])
    result.stdout.no_fnmatch_line("*gpumem values*")  # which a device tells that does not compute them


def test_the_debugger_still_sees_the_locals_of_a_failed_test(project):
    project.write("@pytest.mark.gpumem\ndef test_it():\n    big = torch.ones(3)\n    assert False\n")
    project.write(
        "import pdb\n\n\nclass Typed(pdb.Pdb):\n    def cmdloop(self):\n        self.onecmd('p big')\n", "typed.py"
    )
    result = project.run("--pdb", "--pdbcls=typed:Typed", "-s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["tensor(?1., 1., 1.?)"])


def test_an_error_in_set_up_is_accounted_for(project):
    project.write(
        "@pytest.fixture\ndef broken():\n    raise RuntimeError\n\n\n@pytest.mark.gpumem\ndef test_it(broken): ...\n\n\n"
        + GOOD.format(name="good")
    )
    result = project.run("--gpumem-update=all")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["gpumem: 1 recorded, new; 1 failed by itself"])


# The controller must have been told of the first test before it is interrupted.
TELLS = """
import pathlib

import pytest


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Controller())


class Controller:
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            pathlib.Path("told").touch()
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "worker"])
def test_ctrl_c_keeps_what_was_measured(project, workers):
    project.write(
        GOOD.format(name="first")
        + "def test_endless():\n    import os, pathlib, time\n"
        + "    pathlib.Path('pid').write_text(str(os.getpid()))\n    pathlib.Path('pid').rename('running')\n    time.sleep(600)\n"
    )
    (project.path / "conftest.py").write_text(TELLS)
    arguments = ("-m", "pytest", "-p", "no:randomly", "--gpumem-device=cpu", "--gpumem-update=new", *workers)
    process = preloaded.start(*arguments, cwd=project.path)
    while not (project.path / "running").exists() or not (project.path / "told").exists():
        assert process.poll() is None
        time.sleep(0.05)
    for pid in {int((project.path / "running").read_text()), process.pid}:  # a terminal tells both
        os.kill(pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "gpumem store: 1 baseline written (new)" in output
    (text,) = project.stored().values()
    assert "tests.test_first.call" in text


def test_a_killed_worker_loses_only_the_test_that_it_was_running(project):
    project.write(
        GOOD.format(name="first")
        + "@pytest.mark.gpumem\ndef test_killed():\n    import os\n    os.kill(os.getpid(), 9)\n\n\n"
        + GOOD.format(name="last")
    )
    result = project.run("--gpumem-update=new", "--gpumem-report=report.json", "-n", "1", separate=True)
    result.assert_outcomes(passed=2, failed=1)
    report = json.loads((project.path / "report.json").read_text(encoding="utf-8"))
    assert (report["not_run"], report["passed"]) == ([["test_it.py", "test_killed"]], False)
    result.stdout.fnmatch_lines(["gpumem: 2 recorded, new; 1 did not finish"])
    (text,) = project.stored().values()
    assert "tests.test_first.call" in text
    assert "tests.test_last.call" in text
    assert text.count("composition = ") == 2
    assert "tests.test_killed" not in text


def test_a_store_that_cannot_be_written_ends_red_and_keeps_the_old_text(project):
    project.write(GOOD.format(name="it"))
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(GOOD.format(name="it").replace("1_000_000", "2_000_000"), "test_it.py")
    (project.path / "conftest.py").write_text(
        "import os\n\n\ndef full(*names, **folders):\n    raise OSError(28, 'No space left on device')\n\n\nos.replace = full\n"
    )
    result = project.run("--gpumem-update=all", separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["gpumem: baselines were not written: *test_it.py.toml: cannot be written: *No space left*"]
    )
    assert "accepted" not in result.stdout.str()
    assert project.stored() == before
    assert not list(project.store.rglob(".*.toml.*"))


FULL_DISK = """
import os

original = os.replace


def full(draft, target, **folders):
    if "test_b" in str(target) and str(target).endswith(".toml"):
        raise OSError(28, "No space left on device")
    return original(draft, target, **folders)


os.replace = full
"""


@pytest.mark.parametrize(
    ("mode", "accounting"),
    [("new", "1 recorded, new; 2 not recorded, new"), ("all", "3 gated, 1 accepted, 2 regressed")],
)
def test_on_a_full_disk_the_accounting_says_what_was_written(project, mode, accounting):
    for name in "abc":
        project.write(GOOD.format(name=name), f"test_{name}.py")
    if mode == "all":
        project.run("--gpumem-update=new")
        for name in "abc":
            project.write(GOOD.format(name=name).replace("1_000_000", "2_000_000"), f"test_{name}.py")
    (project.path / "conftest.py").write_text(FULL_DISK, encoding="utf-8")
    result = project.run(f"--gpumem-update={mode}", "--gpumem-report=report.json", separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            f"gpumem store: 1 baseline written ({mode}), the others were not",
            "gpumem: baselines were not written: *test_b.py.toml: cannot be written: *No space left*",
            f"gpumem: {accounting}",
        ]
    )
    report = json.loads((project.path / "report.json").read_text(encoding="utf-8"))
    assert [result["unwritten"] for result in report["results"]] == [False, True, True]
    (text,) = (text for path, text in project.stored().items() if "test_a" in path)
    assert f"peak_allocated = {4_000_000 if mode == 'new' else 8_000_000}\n" in text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.parametrize("name", ["cpu-x86_64/test_it.py.toml", ".gitignore"])
def test_a_file_of_the_store_that_is_no_regular_file_is_an_error(project, monkeypatch, kind, name):
    project.write(GOOD.format(name="it"))
    path = project.store / name
    path.parent.mkdir(parents=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server, monkeypatch.context() as patch:
            patch.chdir(path.parent)  # the address of a socket is a short path
            server.bind(path.name)
    result = project.run("--gpumem-update=new")
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if name == ".gitignore" else pytest.ExitCode.USAGE_ERROR)
    lines = [*result.outlines, *result.errlines]
    what = "a symbolic link, which is not followed" if kind == "device" else "not a regular file"
    assert any(f"{path.name} is {what}; remove it" in line and str(project.store) in line for line in lines)


@pytest.mark.parametrize(
    ("raised", "accounting"),
    [
        ("pytest.skip('not here')", "gpumem: 1 gated, 1 unmeasured (it was skipped)"),
        ("pytest.fail('not ready')", "gpumem: 1 gated, 1 failed by itself"),
    ],
)
def test_what_a_hook_of_somebody_elses_ends_before_ours_is_accounted_for(project, raised, accounting):
    project.write(
        f"""
@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    if item.name == "test_b":
        {raised}
    return (yield)
""",
        "conftest.py",
    )
    project.write(f"{GOOD.format(name='a')}{GOOD.format(name='b')}".replace("gpumem\n", "gpumem(max_gb=1)\n"))
    project.run("-q").stdout.fnmatch_lines([accounting])


def test_maxfail_keeps_what_was_measured(project):
    project.write(GOOD.format(name="first") + "def test_wrong():\n    assert False\n\n\n" + GOOD.format(name="never"))
    result = project.run("--gpumem-update=new", "-x")
    result.stdout.fnmatch_lines(["gpumem: 1 recorded, new; 1 did not finish"])
    (text,) = project.stored().values()
    assert "tests.test_first.call" in text
    assert "tests.test_never" not in text
