"""``gpumem.launch`` where it cannot measure, and wrong calls of it."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import JobError
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.figures import job_figures
from pytest_gpumem.measuring.jobs.run import FinishedJob
from pytest_gpumem.plugin.runtest.launching import check_job

TEST = """
def test_it(gpumem):
    gpumem.launch({command})
"""


def test_a_cpu_skips_a_launched_job_and_strict_mode_fails_it(project):
    project.write(TEST.format(command='["python", "-c", "1"]'))
    result = project.run("-rs")
    result.stdout.fnmatch_lines(
        ["*SKIPPED*gpumem.launch measures the GPU memory of other processes, and this is a CPU*"]
    )
    strict = project.run("--gpumem-strict")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines(["*gpumem.launch measures the GPU memory of other processes, and this is a CPU*"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ('"python train.py --lr 1"', "needs a list of words, got a text; write *python', 'train.py', '--lr', '1'*"),
        ("[]", "needs a list with a program and its arguments, got *"),
        ('["python", 1]', "needs a list with a program and its arguments, got *'python', 1*"),
        ("None", "needs a list with a program and its arguments, got None"),
        ('["python"], timeout="5"', "needs a number of seconds above 0 as timeout, got '5'"),
        ('["python"], timeout=0', "needs a number of seconds above 0 as timeout, got 0"),
        ('["python"], rank=2', "*launch() got an unexpected keyword argument 'rank'*"),
    ],
)
def test_a_wrong_command_is_answered_with_the_right_one(project, command, message):
    project.write(TEST.format(command=command))
    result = project.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*TypeError: *{message}"])


ONE = DeviceUsage(0, 4_000_000, 8_000_000, 0)


def job(*usages: ProcessUsage, **more: object) -> FinishedJob:
    return FinishedJob(**{"status": 0, "output": "", "errors": "", "usages": usages, "unseen": (), **more})


def usage(rank: int | None = None, ended: int | None = 2, devices: tuple[DeviceUsage, ...] = (ONE,), **more: object):
    identity = ProcessIdentity(1, command=("python", "train.py"), rank=rank)
    return ProcessUsage(began=1, **{"ended": ended, "devices": devices, "process": identity, **more})


@pytest.mark.parametrize(
    ("finished", "ranks", "message"),
    [
        pytest.param(
            job(usage(), unseen=("python -I x.py",)), None, "does not report its memory: python -I x.py", id="unseen"
        ),
        pytest.param(
            job(usage(), alive=("python y.py",)), None, "its process still runs, .*: python y.py", id="left running"
        ),
        pytest.param(
            job(usage(), usage(ended=None)), None, "train.py was killed .* at least 4.00 MB, and may", id="killed"
        ),
        pytest.param(
            job(usage(), usage(ended=None, devices=())), None, "killed .*, so its peak is not known", id="at once"
        ),
        pytest.param(
            job(usage(without_statistics=True)), None, "allocator by one without statistics", id="no statistics"
        ),
        pytest.param(job(), None, "no process of `run it` reserved memory on a GPU", id="no GPU"),
        pytest.param(
            job(usage(devices=())), None, "no process of `run it` reserved memory on a GPU", id="nothing reserved"
        ),
        pytest.param(
            job(usage(0)), 2, "ranks=2, but no process with RANK=1 in its environment used a GPU", id="a rank"
        ),
        pytest.param(job(usage()), 2, "no process with RANK=0 or RANK=1 in its environment", id="no ranks"),
        pytest.param(job(usage(0), usage(1), usage(2)), 2, "ranks=2, but 3 ranks used a GPU", id="too many ranks"),
    ],
)
def test_a_job_whose_figures_cannot_be_trusted_is_refused_with_the_reason(finished, ranks, message):
    with pytest.raises(JobError, match=message):
        check_job(["run", "it"], finished, job_figures(finished.usages), ranks)


def test_a_job_whose_processes_all_reported_is_accepted():
    finished = job(usage(0), usage(1))
    check_job(["run", "it"], finished, job_figures(finished.usages), 2)
