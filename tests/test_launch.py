"""``gpumem.launch`` where it cannot measure, and wrong calls of it."""

from __future__ import annotations

import pytest

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
