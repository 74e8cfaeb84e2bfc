"""``gpumem run``: an ordinary script, measured, gated and explained as a test is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pytest_gpumem.base.errors import ScriptFailed
from pytest_gpumem.tools.run.script import run_script

SCRIPT = """
import sys
import torch
from helpers import net


def main():
    assert __name__ == "__main__"
    print("arguments", sys.argv[1:])
    model = net(96 if "wide" in sys.argv else 64)
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for step in range(10**6):
        x = torch.ones(256, model[0].in_features)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "leak" in sys.argv:
            history.append(model(x))
        if "fails" in sys.argv and step == 5:
            raise KeyError("no such file")
        if "leaves" in sys.argv and step == 5:
            sys.exit(1)
        if "ends" in sys.argv and step == 5:
            sys.exit()


if __name__ == "__main__":
    try:
        main()
    finally:
        print("cleaned up")
"""
HELPERS = """
import torch


def net(width):
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width)
    )
"""
ADDOPTS = "-n 2 -m slow --lf --ff --nf --cache-clear --sw --sw-skip --randomly-seed=1"
"""What a project says for its tests, with options of pytest-xdist and pytest-randomly."""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


@pytest.fixture
def script(project):
    folder = project.path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "helpers.py").write_text(HELPERS, encoding="utf-8")
    project.settings(f'[tool.pytest.ini_options]\naddopts = "{ADDOPTS}"\nfilterwarnings = ["error"]\n[tool.gpumem]\n')

    def run(*arguments: str, device: str | None = "cpu"):
        given = ["--no-gpumem-time", *([] if device is None else [f"--gpumem-device={device}"])]
        return project.gpumem("run", "scripts/train.py", *given, *arguments)

    return run


def test_a_script_is_gated_against_its_baseline(script, project):
    recorded = script("--gpumem-update=new", "--", "--lr", "0.1")
    assert recorded.returncode == 0, recorded.stdout
    assert "arguments ['--lr', '0.1']" in recorded.stdout
    assert "cleaned up" in recorded.stdout
    assert list(project.stored()) == ["cpu-x86_64/scripts/train.py.toml"]
    assert "Using --randomly-seed" not in recorded.stdout
    assert not (project.path / ".pytest_cache").exists()

    again = script("--gpumem-baseline", "--gpumem-report=report.json")
    assert (again.returncode, "gpumem: 1 gated" in again.stdout) == (0, True), again.stdout
    (reported,) = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["results"]
    assert (reported["verdict"]["file"], reported["verdict"]["test"]) == ("scripts/train.py", "run")

    leak = script("--gpumem-baseline", "--", "leak")
    assert leak.returncode == 1
    kept = 4 * 256 * (64 + 256 + 64)
    assert f"growth per step {kept / 1000:.2f} kB, baseline 0 B" in leak.stdout
    assert "kept by each step" in leak.stdout
    kept_at = f"scripts/train.py:{line_of('history.append')}"
    assert kept_at in leak.stdout.partition("kept by each step")[2].partition("what grew")[0]
    assert "accept:   gpumem run scripts/train.py --gpumem-update=all --gpumem-device=cpu -- leak" in leak.stdout

    wide = script("--gpumem-baseline", "--", "wide")
    assert wide.returncode == 1
    assert "was float32[256, 64], now float32[384, 96]" in wide.stdout.partition("what grew")[2]
    assert "parameters 74.21 k, were 33.09 k" in wide.stdout


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fails", ["KeyError: 'no such file'", 'scripts/train.py", line {line}, in main']),
        ("leaves", ["train.py ended with sys.exit(1)"]),
    ],
)
def test_a_script_that_fails_is_blamed_and_what_was_measured_is_shown(script, word, said):
    result = script(word)
    assert result.returncode == 1
    for one in said:
        assert one.format(line=line_of("raise KeyError")) in result.stdout
    assert "pytest_gpumem/" not in result.stdout.partition("FAILURES")[2]
    assert "peak allocated" in result.stdout


def test_a_script_that_ends_before_is_measured_as_far_as_it_goes(script):
    result = script("--as", "short", "ends")
    assert result.returncode == 0, result.stdout
    assert "scripts/train.py::short: the loop ended after 6 of 20 steps" in result.stdout


def test_a_script_without_steps_fails_and_says_what_was_expected(project):
    (project.path / "idle.py").write_text("print('done')\n", encoding="utf-8")
    result = project.gpumem("run", "idle.py", "--gpumem-device=cpu", "--gpumem-report=report.json")
    assert result.returncode == 1
    reason = "no step was seen: a step ends with optimizer.step() of a torch optimizer"
    assert f"idle.py: {reason}" in result.stdout
    (reported,) = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["results"]
    assert reported["verdict"]["unmeasured"].startswith(reason)


STARTS = """
import subprocess, sys
import torch

subprocess.run([sys.executable, "-c", "import torch; torch.ones(2500)"], check=True)
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = torch.optim.SGD([weight])
for _ in range(1000 if "steps" in sys.argv else 0):
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts other processes' memory on the CPU")
@pytest.mark.parametrize(("words", "name"), [(["steps"], "loop"), ([], "script")], ids=["steps", "no step"])
def test_a_process_that_a_script_starts_on_the_cpu_is_measured(project, words, name):
    (project.path / "train.py").write_text(STARTS, encoding="utf-8")
    options = ("--gpumem-device=cpu", "--no-gpumem-time", "--gpumem-report=report.json")
    result = project.gpumem("run", "train.py", *options, "--", *words)
    assert result.returncode == 0, result.stdout
    results = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["results"]
    measured = [part["measurement"] for result in results for part in result["verdict"]["verdicts"]]
    peaks = {part["name"]: part["metrics"]["peak_allocated"] for part in measured}
    assert peaks[f"{name}: python -c"] == 10_000, peaks
    assert peaks[f"{name}: all processes"] == 10_000 + peaks.get(name, 4_000)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows other processes' commands")
@pytest.mark.parametrize(("words", "status"), [(["steps"], 0), ([], 1)], ids=["steps", "no step"])
def test_without_a_compiler_a_process_of_a_script_on_the_cpu_is_not_counted(project, monkeypatch, words, status):
    monkeypatch.setenv("GPUMEM_CACHE", str(project.path / "cache"))
    monkeypatch.setenv("CC", "/no/cc")
    (project.path / "train.py").write_text(STARTS, encoding="utf-8")
    result = project.gpumem("run", "train.py", "--gpumem-device=cpu", "--no-gpumem-time", "--", *words)
    assert result.returncode == status, result.stdout
    note = "not counted: `{} -c 'import torch; torch.ones(2500)'` loads torch, and the C compiler /no/cc cannot be run"
    assert note.format(sys.executable).replace("'", "") in result.stdout.replace("'", "")


def test_without_the_device_a_script_is_not_run_and_the_command_fails(script):
    result = script(device="cuda")
    assert result.returncode == 1
    assert "no CUDA device" in result.stdout
    assert "arguments" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "'missing.py' does not exist"),
        (["scripts/train.py", "--steps", "2"], "2 is not in the range x>=4"),
        (["scripts/train.py", "--as", "a::b"], "'a::b' would be part of a test's id"),
        (["scripts/train.py", "--gpumem-update=some"], "'some' is not one of"),
        (
            ["scripts/train.py", "--gpumem-basline"],
            "no such option: --gpumem-basline; did you mean '--gpumem-baseline'?",
        ),
        (["scripts/train.py", "--gpumem-device=tpu"], "tpu"),
    ],
)
def test_wrong_usage_is_an_error(script, project, words, said):
    result = project.gpumem("run", *words)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr + result.stdout


def test_torch_is_not_loaded_before_a_gpu_can_be_emulated():
    code = "import sys, pytest_gpumem.tools.run.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ENDS = """
import os, sys
import torch

word = sys.argv[1]


def train():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(10**6):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            end()


def end():
    if word == "os._exit":
        os._exit(0)
    if word == "posix":
        import posix
        posix._exit(0)
    if word == "raises":
        raise KeyError
    if word == "thread":
        import threading
        threading.Thread(target=os._exit, args=(0,)).start()
        threading.Event().wait()
    if word == "exec":
        os.execlp("true", "true")
    if word == "harmless":
        if os.fork() == 0:
            sys.exit(0)
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        assert child.exitcode == 0
        try:
            os.execv("/nowhere", ["nothing"])
        except FileNotFoundError:
            sys.argv.clear()
    if word == "atexit":
        import atexit
        atexit.register(os._exit, 0)
        raise KeyError


try:
    train()
finally:
    if word == "finally":
        os._exit(0)
"""


@pytest.fixture
def ending(project):
    (project.path / "train.py").write_text(ENDS, encoding="utf-8")

    def run(word, *options):
        return project.gpumem("run", "train.py", "--gpumem-device=cpu", "--no-gpumem-time", *options, "--", word)

    return run


def test_a_script_that_ends_its_process_within_the_window_is_red_and_told(ending, project):
    assert ending("clean", "--gpumem-update=new").returncode == 0
    for options in ([], ["--gpumem-baseline"], ["--gpumem-strict"]):
        result = ending("os._exit", *options, "--gpumem-report=report.json")
        assert result.returncode == 1, options
        assert "gpumem: 0 gated, 1 did not finish" in result.stdout
        assert "gpumem: os._exit(0) in train.py::run (call) ended the process before the session's end" in result.stdout
        assert json.loads((project.path / "report.json").read_text(encoding="utf-8"))["passed"] is False


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("thread", "gpumem: os._exit(0) in train.py::run (call) ended the process"),
        ("finally", "gpumem: os._exit(0) in train.py::run (call) ended the process"),
        ("posix", "gpumem: os._exit(0) in train.py::run (call) ended the process"),
        ("exec", "os.execv would replace this process with another program, which is not measured"),
        ("atexit", "KeyError"),
    ],
)
def test_no_other_way_to_end_the_process_of_a_script_makes_it_green(ending, word, said):
    result = ending(word)
    assert result.returncode == 1
    assert said in result.stdout


@pytest.mark.parametrize(("word", "status"), [("clean", 0), ("raises", 1)])
def test_what_a_conftest_left_for_the_end_of_the_process_does_not_change_the_status(ending, project, word, status):
    project.write("import atexit\nimport os\n\natexit.register(os._exit, 0)\n", "conftest.py")
    assert ending(word).returncode == status


def test_a_script_may_fork_children_that_end_and_do_with_sys_argv_as_it_likes(ending):
    result = ending("harmless")
    assert (result.returncode, result.stdout.count("gpumem: 0 gated, 1 recorded")) == (0, 1), result.stdout


FORKS = """
import os, sys
child = os.fork()
if not child:
    {end}
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("end", "status"), [("raise KeyError", 1), ("sys.exit('why')", 1), ("sys.exit(3)", 3)])
def test_a_process_that_a_script_forks_ends_with_the_status_of_its_own_end(tmp_path, end, status):
    script = tmp_path / "forks.py"
    script.write_text(FORKS.format(end=end), encoding="utf-8")
    with pytest.raises(ScriptFailed, match=rf"forks\.py ended with sys\.exit\({status}\)"):
        run_script(script, [])
