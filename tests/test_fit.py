"""``gpumem fit`` as a command; what it runs is made up here, and real in tests/emulated."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from pytest_gpumem.base.errors import StopSignal
from pytest_gpumem.base.processes import Stop
from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS, STEPS, USAGE
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, InvalidReport, OutOfMemory, ProcessUsage
from pytest_gpumem.emulating.emulation import load
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu, known_gpus
from pytest_gpumem.tools.console.jobs import A_RUN, most_jobs
from pytest_gpumem.tools.fit import run
from pytest_gpumem.tools.fit.outcome import ProgramRun
from pytest_gpumem.tools.fit.run import run_on, with_expandable_segments
from pytest_gpumem.tools.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 10**9
OUT_OF_MEMORY = ProgramRun(1, "", (ProcessUsage(0, 1, (), 1, OutOfMemory(0, GB, 0, 0, "t.py:1 f")),))


def fitting(reserved: int) -> ProgramRun:
    return ProgramRun(0, "", (ProcessUsage(0, 1, (DeviceUsage(0, reserved, reserved, 0),)),))


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """What was run, and by word what comes of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    called: list[tuple] = []
    comes: dict[str, ProgramRun | BaseException | Callable[[Stop], ProgramRun]] = {}

    def run_one(gpu, command, environment, stop, steps):
        expandable = "expandable_segments:True" in environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        called.append((gpu.device.removeprefix("emulated:") + ("+" if expandable else ""), tuple(command), steps))
        one = comes.get(called[-1][0], fitting(GB))
        if isinstance(one, BaseException):
            raise one
        return one(stop) if callable(one) else one

    for name in run.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(load, "stand_ins", lambda torch: ())
    monkeypatch.setattr(load, "installed_torch", lambda: None)
    monkeypatch.setattr("pytest_gpumem.tools.fit.forks.run_on", run_one)
    return called, comes


def fit(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fit", *arguments])


def test_all_gpus_are_tried_the_usual_one_first(ran):
    called, _ = ran
    result = fit("train.py")
    assert result.exit_code == 0, result.output
    words = [word for word, _, _ in called]
    assert words[0] == "h100"
    assert sorted(words) == sorted(gpu.word for gpu in known_gpus())


@pytest.mark.parametrize(
    ("given", "run_as"),
    [
        (("train.py", "--gpu", "9"), (sys.executable, "train.py", "--gpu", "9")),
        (("-m", "my.train", "--json"), (sys.executable, "-m", "my.train", "--json")),
        (("--", "python", "train.py"), ("python", "train.py")),
        (("torchrun", "--nproc", "2"), ("torchrun", "--nproc", "2")),
    ],
)
def test_a_file_or_a_module_is_run_with_this_python_and_keeps_its_arguments(ran, given, run_as):
    called, _ = ran
    assert fit("--device", "l4", "--steps", "3", *given).exit_code == 0
    assert called == [("l4", run_as, 3)]


def test_what_runs_out_is_run_again_with_expandable_segments_and_what_fits_is_not(ran):
    called, comes = ran
    comes["l4"] = OUT_OF_MEMORY
    result = fit("--device", "l4", "--device", "a100", "train.py")
    assert [word for word, _, _ in called] == ["l4", "l4+", "a100"]
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        "needs 1.00 GB reserved (emulated): fits A100 80GB; not L4; with expandable segments 1.00 GB: fits L4"
    )
    assert "[1/2] L4 (emulated) with expandable segments ... fits, 1.00 GB reserved" in result.stderr


def test_who_says_whether_segments_are_expandable_is_not_asked_again(ran, monkeypatch):
    called, comes = ran
    comes["l4"] = OUT_OF_MEMORY
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert fit("--device", "l4", "train.py").exit_code == 1
    assert [word for word, _, _ in called] == ["l4"]


def test_a_program_that_fails_on_the_usual_gpu_is_tried_on_no_other(ran):
    called, comes = ran
    comes["h100"] = ProgramRun(3, "ValueError: no data", ())
    result = fit("train.py")
    assert (result.exit_code, len(called)) == (2, 1)
    assert "H100 80GB: failed by itself (exit status 3)\n  ValueError: no data\n" in result.stdout
    called.clear()
    result = fit("--device", "h100", "--device", "l4", "train.py")
    assert (result.exit_code, len(called)) == (2, 2)


def test_a_program_without_gpu_memory_is_an_error(ran):
    called, comes = ran
    comes["h100"] = ProgramRun(0, "", ())
    result = fit("train.py")
    assert (result.exit_code, len(called), result.stdout) == (2, 1, "")
    assert "Error: the program uses no GPU memory" in result.stderr


def test_after_ctrl_c_what_was_found_is_told(ran):
    _, comes = ran
    comes["l4"] = StopSignal(signal.SIGINT)
    result = fit("--device", "h100", "--device", "l4", "train.py")
    assert result.exit_code == 130
    assert "interrupted: 1 of 2 GPUs was tried" in result.stderr
    assert result.stdout.splitlines()[-1] == "needs 1.00 GB reserved (emulated): fits H100 80GB"
    comes["h100"] = StopSignal(signal.SIGINT)
    result = fit("--device", "h100", "train.py")
    assert (result.exit_code, result.stdout) == (130, "")


FOUR = ("--device", "h100", "--device", "l4", "--device", "t4", "--device", "a100")


def test_after_the_first_so_many_run_at_a_time_as_jobs_says(ran):
    called, comes = ran
    together = threading.Barrier(3)

    def beside_the_others(_stop: Stop) -> ProgramRun:
        together.wait(60)
        return fitting(GB)

    comes |= dict.fromkeys(("l4", "t4", "a100"), beside_the_others)
    result = fit("--jobs", "3", *FOUR, "train.py")
    assert result.exit_code == 0, result.output
    assert called[0][0] == "h100"
    assert sorted(result.stderr.split("\n")) == sorted(
        [
            "",
            "",
            "[1/4] H100 80GB (emulated) ... fits, 1.00 GB reserved",
            "[2/4] L4 (emulated) ... fits, 1.00 GB reserved",
            "[3/4] T4 (emulated) ... fits, 1.00 GB reserved",
            "[4/4] A100 80GB (emulated) ... fits, 1.00 GB reserved",
        ]
    )
    comes |= dict.fromkeys(comes, fitting(GB))
    assert fit(*FOUR, "train.py").stdout == result.stdout


def test_a_log_gets_whole_lines_although_the_program_writes_in_between(ran):
    _, comes = ran

    def noisy(_stop: Stop) -> ProgramRun:
        sys.stderr.write("UserWarning: slow\n")
        return fitting(GB)

    comes["l4"] = noisy
    told = fit("--device", "l4", "train.py").stderr.splitlines()
    assert told[:2] == ["UserWarning: slow", "[1/1] L4 (emulated) ... fits, 1.00 GB reserved"]


def test_nothing_is_begun_after_ctrl_c(ran):
    called, comes = ran

    def interrupted(_stop: Stop) -> ProgramRun:
        signal.raise_signal(signal.SIGINT)
        raise StopSignal(signal.SIGINT)

    comes["h100"] = interrupted
    result = fit(*FOUR, "train.py")
    assert result.exit_code == 130
    assert [word for word, _, _ in called] == ["h100"]

    def runs_out_when_it_is_asked_to_end(stop: Stop) -> ProgramRun:
        os.kill(os.getpid(), signal.SIGTERM)
        while stop.signum is None:
            time.sleep(0.01)
        return OUT_OF_MEMORY

    comes |= {"h100": fitting(GB), "l4": runs_out_when_it_is_asked_to_end}
    called.clear()
    result = fit(*FOUR, "train.py")
    assert result.exit_code == 128 + signal.SIGTERM
    assert [word for word, _, _ in called] == ["h100", "l4"]
    assert "t4" not in result.stderr.lower()


def test_an_error_of_one_ends_the_others(ran):
    called, comes = ran
    begun = threading.Event()
    ended_by: set[int | None] = set()

    def fails(_stop: Stop) -> ProgramRun:
        begun.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def runs_until_it_is_ended(stop: Stop) -> ProgramRun:
        begun.set()
        until = time.monotonic() + 60
        while stop.signum is None and time.monotonic() < until:
            time.sleep(0.01)
        ended_by.add(stop.signum)
        raise StopSignal(signal.SIGTERM)

    comes |= {"l4": fails, "t4": runs_until_it_is_ended, "a100": runs_until_it_is_ended}
    result = fit("--jobs", "2", *FOUR, "--device", "a10", "train.py")
    assert result.exit_code == 2
    assert f"Error: {sys.executable}: No space left on device" in result.stderr
    assert ended_by == {signal.SIGTERM}
    assert "a10" not in [word for word, _, _ in called]


def test_what_runs_beside_is_told_in_the_order_of_the_gpus_whichever_ended_first(ran):
    _, comes = ran
    later = threading.Event()

    def last(_stop: Stop) -> ProgramRun:
        later.wait(60)
        return OUT_OF_MEMORY

    def first(_stop: Stop) -> ProgramRun:
        later.set()
        return fitting(GB)

    comes |= {"l4": last, "t4": first, "a100": first}
    plain = json.loads(fit("--jobs", "2", "--format", "json", *FOUR, "train.py").stdout)
    assert [(gpu["gpu"], gpu["outcome"]) for gpu in plain["gpus"]] == [
        ("h100", "fits"),
        ("l4", "out of memory"),
        ("t4", "fits"),
        ("a100", "fits"),
    ]


def test_what_ended_before_ctrl_c_is_told_also_of_several_at_a_time(ran):
    _, comes = ran
    others_ended = threading.Event()

    def first_of_two(_stop: Stop) -> ProgramRun:
        others_ended.wait(60)
        raise StopSignal(signal.SIGINT)

    def second_of_two(_stop: Stop) -> ProgramRun:
        others_ended.set()
        raise StopSignal(signal.SIGINT)

    comes |= {"l4": first_of_two, "a10": second_of_two}
    result = fit("--jobs", "2", *FOUR, "--device", "a10", "train.py")
    assert result.exit_code == 130
    assert "interrupted: 3 of 5 GPUs were tried" in result.stderr
    assert result.stdout.splitlines()[-1] == "needs 1.00 GB reserved (emulated): fits T4, H100 80GB, A100 80GB"


def test_no_more_run_at_a_time_than_there_is_memory_for(ran, monkeypatch):
    _, comes = ran
    at_work = threading.Lock()

    def alone(_stop: Stop) -> ProgramRun:
        assert at_work.acquire(blocking=False)
        time.sleep(0.01)
        at_work.release()
        return fitting(GB)

    comes |= dict.fromkeys(("l4", "t4", "a100"), alone)
    monkeypatch.setattr("pytest_gpumem.tools.fit.command.most_jobs", lambda jobs: most_jobs(jobs, lambda: A_RUN))
    result = fit("--jobs", "5", *FOUR, "train.py")
    assert result.exit_code == 0, result.output
    assert "free memory is enough for 1 run at a time" in result.stderr


def test_programs_get_json_alone_on_standard_output(ran):
    _, comes = ran
    comes["l4"] = OUT_OF_MEMORY
    result = fit("--device", "l4", "--format", "json", "train.py")
    plain = json.loads(result.stdout)
    assert (plain["exit_status"], result.exit_code) == (1, 1)
    assert plain["command"] == [sys.executable, "train.py"]
    assert [gpu["gpu"] for gpu in plain["gpus"]] == ["l4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument"),
        (("--gpus", "l4", "train.py"), "no such option: --gpus"),
        (("--device", "l5", "train.py"), "did you mean 'l4'?"),
        (("--steps", "0", "train.py"), "0 is not in the range"),
    ],
)
def test_wrong_usage_is_told(ran, arguments, said):
    called, _ = ran
    result = fit(*arguments)
    assert (result.exit_code, called) == (2, [])
    assert said in result.stderr


def test_a_program_that_there_is_not_is_named(ran):
    _, comes = ran
    comes["l4"] = FileNotFoundError(2, "No such file or directory")
    result = fit("--device", "l4", "--", "/nowhere/python")
    assert result.exit_code == 2
    assert "Error: /nowhere/python: No such file or directory" in result.stderr


def test_a_file_that_there_is_not_is_told_once_and_run_nowhere(ran):
    called, _ = ran
    result = fit("gone.py", "--batch", "8")
    assert (result.exit_code, result.stderr, called) == (2, "Error: there is no file gone.py\n", [])


def test_a_gpu_that_cannot_be_emulated_here_is_told(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    result = fit("train.py")
    assert result.exit_code == 2
    assert "a GPU can be emulated on Linux on x86-64 only" in result.stderr


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"},
            {
                "PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True",
                "PYTORCH_ALLOC_CONF": "b:2,expandable_segments:True",
            },
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:False"}, None),
    ],
)
def test_expandable_segments_are_added_to_what_is_set(given, added):
    assert with_expandable_segments(given) == added


SHOW = f"""
import os, sys
print("out"); print(sorted(os.environ[name] for name in ("{USAGE}", "{STEPS}")), file=sys.stderr)
print(os.environ["GPUMEM_EMULATED"], os.environ.get("{PEAKS}"), sys.stdin.read() == "", file=sys.stderr)
sys.exit(3)
"""


def test_the_program_finds_the_gpu_and_a_folder_to_leave_its_usage_in():
    done = run_on(emulated_gpu("l4"), [sys.executable, "-c", SHOW], {**os.environ, PEAKS: "1"}, Stop(), steps=2)
    folder, told = done.output.splitlines()
    assert (done.status, done.processes) == (3, ())
    assert folder.endswith(", '2']") or folder.startswith("['2', ")
    assert told == "emulated:l4 None True"


def test_what_a_program_says_on_standard_output_is_kept_where_it_says_nothing_else():
    assert run_on(emulated_gpu("l4"), [sys.executable, "-c", "print('lost')"], os.environ, Stop()).output == "lost"
    with pytest.raises(FileNotFoundError):
        run_on(emulated_gpu("l4"), ["/nowhere/python"], os.environ, Stop())


def test_a_process_with_another_release_is_named_with_the_remedy(ran):
    _, comes = ran
    told = "`python train.py` runs pytest-gpumem 0.0.1, and this session 0.1.0. Install the same release in both"
    comes["h100"] = InvalidReport(told)
    result = fit(*FOUR, "train.py")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"{told}\n")
    assert "Traceback" not in result.stderr
