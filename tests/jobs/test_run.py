"""A command is run to its end, and its processes with torch are seen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.base.errors import JobError
from pytest_gpumem.emulating.emulated_process.marks import SEEN
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.jobs.figures import killed_text
from pytest_gpumem.measuring.jobs.run import FinishedJob, failure, reporting_to, run_job
from tests.jobs.mapped import maps_torch
from tests.support.processes import wait_until_ended

TORCH = "import torch"
FORK = "import torch, os; pid = os.fork(); pid and os.waitpid(pid, 0)"


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def job(command, tmp_path, timeout=60.0, **variables):
    return run_job(command, {**os.environ, **variables}, tmp_path, timeout)


def test_a_command_has_its_status_and_both_outputs(tmp_path):
    code = "import sys, os; print(os.environ['MINE'], os.getcwd()); print('error', file=sys.stderr); sys.exit(3)"
    done = job(python("-c", code), tmp_path, MINE="1")
    assert (done.status, done.output, done.errors) == (3, f"1 {tmp_path.resolve()}\n", "error\n")
    assert (done.usages, done.unseen) == ((), ())


RANK = """
import errno
import os
if os.environ["RANK"] == "1":
    raise ValueError("the rank's own error")
"""


def test_a_failed_rank_shows_its_own_error(tmp_path):
    (tmp_path / "train.py").write_text(RANK, encoding="utf-8")
    command = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    lines = failure(command, job(command, tmp_path)).splitlines()
    assert "ValueError: the rank's own error" in lines
    assert "failed (exitcode: 1) local_rank: 1" in lines[-1]


def test_a_failure_ends_with_the_last_lines_of_the_output(tmp_path):
    command = python("-c", "print(*range(100), sep='\\n'); raise SystemExit(4)")
    message = failure(command, job(command, tmp_path))
    first, *rest = message.splitlines()
    assert first.endswith("` ended with exit status 4:")
    assert rest == [str(number) for number in range(80, 100)]
    killed = python("-c", "import os; os.kill(os.getpid(), 9)")
    assert failure(killed, job(killed, tmp_path)).endswith("was ended by signal 9, without output")


KILLED_RANKS = [
    ProcessUsage(
        rank, None, (DeviceUsage(0, peak, peak, 0),), process=ProcessIdentity(rank, rank, ("python", "t.py"), rank=rank)
    )
    for rank, peak in ((1, 5_000_000), (2, 0))
]


def test_a_failure_names_killed_processes_with_their_peaks_until_then():
    ended = FinishedJob(1, "output\n", "", tuple(KILLED_RANKS), ())
    assert failure(["torchrun", "t.py"], ended) == (
        "`torchrun t.py` ended with exit status 1. t.py rank 1 was killed before it could report its memory. Its peak was at "
        "least 5.00 MB, and may have been larger. t.py rank 2 was killed before it could report its memory, so its peak is not "
        "known:\noutput"
    )


DAEMON = """
import errno
import os
from pathlib import Path

from pytest_gpumem.emulating.emulated_process.usage import ProcessIdentity, ProcessUsage, write_usage

reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    identity = ProcessIdentity(os.getpid(), started, ("python", "daemon.py"))
    write_usage(Path(os.environ["GPUMEM_USAGE"]), "1-1", ProcessUsage(1, None, process=identity))
    for descriptor in range(3):
        os.close(descriptor)
    os.write(writing, b"written")
    os.execvp("sleep", ["sleep", "100"])
os.read(reading, 7)
"""


def test_a_daemon_that_reports_is_told_to_run_and_not_to_be_killed(tmp_path):
    done = job(python("-c", DAEMON), tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert "python daemon.py" in done.alive
    (usage,) = done.usages
    os.kill(usage.process.pid, 9)
    assert "killed" not in failure(["serve"], done)


BEGIN = f"{TORCH}, ctypes, os, signal, sys, time; libc = ctypes.CDLL(None); allocate = lambda: torch.ones(5); "
STATUSES = {
    "allocate()": 0,
    "allocate(); sys.exit(3)": 3,
    "allocate(); sys.exit(260)": 4,
    "allocate(); raise ValueError": 1,
    "allocate(); os._exit(status=4)": 4,
    "allocate(); os.kill(os.getpid(), 15); time.sleep(60)": -15,
    "allocate(); os.kill(os.getpid(), 2); time.sleep(60)": -2,
    "allocate(); libc.exit(3)": 3,
    "libc.on_exit(libc.abort, None); allocate()": None,
    "allocate(); os.execlp('sh', 'sh', '-c', 'exit 7')": None,
    "allocate(); os.abort()": None,
}
"""The exit status of a process by its code. If another program replaces it or a crash ends it, the status is unknown."""


@pytest.mark.skipif(sys.platform != "linux", reason="other processes are counted on Linux")
def test_each_process_has_its_exit_status(tmp_path):
    code = "import subprocess, sys; [each.wait() for each in [subprocess.Popen([sys.executable, '-c', end]) for end in {}]]"
    programs = [f"{BEGIN}{end}" for end in STATUSES]
    done = job(python("-c", code.format(programs)), tmp_path, **CpuDevice().variables_of_processes())
    statuses = {usage.process.command[-1].removeprefix(BEGIN): usage.status for usage in done.usages}
    assert statuses == STATUSES
    by_c = next(usage for usage in done.usages if "libc.exit" in usage.process.command[-1])
    assert killed_text(by_c).startswith("ended with status 3 by `exit` in C code, before it could report its memory")


@pytest.mark.skipif(sys.platform != "linux", reason="other processes are counted on Linux")
def test_a_fork_has_its_own_exit_status(tmp_path):
    code = f"""
{TORCH}, os, sys
kept = torch.ones(5)
if not (pid := os.fork()):
    sys.exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) + 1)
"""
    done = job(python("-c", code), tmp_path, **CpuDevice().variables_of_processes())
    assert (done.status, [usage.status for usage in done.usages]) == (4, [4])


@pytest.mark.parametrize(
    ("program", "content", "mode", "reason"),
    [
        ("no-such-program", None, 0, "No such file or directory, because no folder in PATH has this program"),
        ("/", None, 0, "Permission denied, because it is a folder"),
        ("./none", None, 0, "No such file or directory"),
        ("./script", "", 0o600, "Permission denied. Make the file executable, or start it by its interpreter"),
        ("./script", "x", 0o700, "Exec format error. A script needs a first line such as #!/bin/sh"),
        (
            "./script",
            "#!/no/such\n",
            0o700,
            "No such file or directory, because the interpreter in its first line does not exist",
        ),
    ],
)
def test_a_command_that_cannot_be_started_is_named_with_the_reason(tmp_path, program, content, mode, reason):
    if content is not None:
        (tmp_path / program).write_text(content, encoding="utf-8")
        (tmp_path / program).chmod(mode)
    with pytest.raises(JobError) as raised:
        job([program], tmp_path)
    assert str(raised.value) == f"`{program}` cannot be started: {reason}"


@pytest.mark.parametrize("program", ["n" * 5000, f"./{'n' * 5000}"])
def test_a_program_with_a_too_long_name_is_refused_without_another_reason(tmp_path, program):
    with pytest.raises(JobError, match=r"cannot be started: File name too long$"):
        job([program], tmp_path)


def test_a_working_directory_that_cannot_be_entered_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", tmp_path)  # as subprocess does

    monkeypatch.setattr("pytest_gpumem.measuring.jobs.run.run", refuse)
    with pytest.raises(JobError) as raised:
        job(["./script"], tmp_path)
    reason = f"Permission denied, because this user may not enter cwd={str(tmp_path)!r}"
    assert str(raised.value) == f"`./script` cannot be started: {reason}"


def test_after_its_time_a_command_is_ended_with_its_children(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(JobError, match=r"did not end within timeout=2 seconds, and was ended:\n(\d+)") as raised:
        job(python("-c", code), tmp_path, timeout=2)
    wait_until_ended([int(str(raised.value).splitlines()[-1])])


def test_a_timeout_of_more_seconds_than_a_clock_counts_is_no_limit(tmp_path):
    assert job(python("-c", "print(1)"), tmp_path, timeout=10**400).status == 0


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        pytest.param("pass", 0, id="without torch"),
        pytest.param(TORCH, 1, id="torch"),
        pytest.param(FORK, 2, id="a fork after it"),
    ],
)
def test_a_process_that_imports_torch_is_seen(tmp_path, code, seen):
    folder = tmp_path / "usage"
    folder.mkdir()
    environment = {**os.environ, "GPUMEM_EMULATED": ""}
    subprocess.run(
        python("-c", code), env={**environment, **reporting_to(folder, environment)}, check=True, timeout=120
    )
    assert len(list(folder.glob(f"*{SEEN}"))) == seen


def test_a_programs_own_sitecustomize_runs_as_well(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("MINE = 'mine'\nprint(MINE)\n", encoding="utf-8")
    done = job(python("-c", "import sitecustomize; print(sitecustomize.MINE)"), tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.output, done.errors) == ("mine\nmine\n", "")


def test_a_watcher_sees_the_pid_of_the_command_and_of_its_child_while_they_run(tmp_path):
    seen = []
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(0.7)"
    code = (
        f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    done = run_job(python("-c", code), os.environ, tmp_path, watch=seen.append)
    assert set(map(int, done.output.split())) in seen


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(JobError, match=r"cannot be started: cwd='.*none' is not a folder"):
        run_job(python("-c", "1"), os.environ, tmp_path / "none")
    with pytest.raises(JobError, match=r"cannot be started: cwd='.*nnn' is not a folder"):
        run_job(python("-c", "1"), os.environ, tmp_path / ("n" * 5000))


def test_another_child_of_this_process_is_not_of_the_job(tmp_path):
    """A fixture's server with torch runs beside the job."""
    code = maps_torch("print(1, flush=True); input()")
    with subprocess.Popen(python("-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()
        done = job(python("-c", "import time; time.sleep(1)"), tmp_path)
        own = job(python("-c", code.replace("input()", "import time; time.sleep(1)")), tmp_path)
        server.communicate("end")
    assert done.unseen == ()
    assert len(own.unseen) == 1


def test_nothing_is_left_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    job(python("-c", "pass"), Path.cwd())
    assert list(tmp_path.iterdir()) == []
