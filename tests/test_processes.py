"""Commands that run in a group of their own, signals that are noted, and progress."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from pytest_gpumem.base import processes
from pytest_gpumem.base.errors import StopSignal
from pytest_gpumem.base.processes import Stop, recorded_signals
from pytest_gpumem.tools.ab.compare_variants import Progress
from tests.ab.values import BASE, measured, measurement, run
from tests.support.processes import wait_until_ended

# Tells its own number and its child's; neither ends by itself soon, and the child not when it is asked to.
FAMILY = """
import os, signal, subprocess, sys, time
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_DFL)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def start(tmp_path, command, stop=None, tick=lambda: None):
    return processes.run(
        command,
        folder=tmp_path,
        environment=dict(os.environ),
        output=tmp_path / "log",
        stop=stop or Stop(),
        tick=tick,
    )


def test_a_command_gives_its_exit_status_and_adds_what_it_prints(tmp_path):
    (tmp_path / "log").write_text("before\n")
    assert start(tmp_path, "echo out; echo err >&2; exit 3") == 3
    assert (tmp_path / "log").read_text() == "before\nout\nerr\n"


def test_standard_error_is_kept_apart_where_it_has_a_file(tmp_path):
    log, errors = tmp_path / "log", tmp_path / "errors"
    command = "echo out; echo err >&2"
    processes.run(command, folder=tmp_path, environment=dict(os.environ), output=log, errors=errors, stop=Stop())
    assert (log.read_text(), errors.read_text()) == ("out\n", "err\n")


def test_a_command_that_a_signal_ends_gives_its_number(tmp_path):
    assert start(tmp_path, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == -9


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are looked up in /proc")
def test_when_the_end_is_asked_for_the_command_and_its_children_are_ended(tmp_path):
    stop = Stop()

    def ask_twice_when_started():
        if (tmp_path / "log").read_text():
            stop.record(signal.SIGINT)
            stop.record(signal.SIGTERM)

    with pytest.raises(StopSignal) as stopped:
        start(tmp_path, [sys.executable, "-c", FAMILY], stop, ask_twice_when_started)
    assert stopped.value.signum == signal.SIGINT
    pids = [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(pids) == 2
    wait_until_ended(pids)


KEEPS = """
import time
print("began", flush=True)
try:
    time.sleep(300)
except KeyboardInterrupt:
    print("kept", flush=True)
"""


def test_ctrl_c_is_that_of_the_command_too_which_keeps_what_it_has(tmp_path):
    stop = Stop()

    def interrupt_when_started():
        if (tmp_path / "log").read_text():
            stop.record(signal.SIGINT)

    with pytest.raises(StopSignal):
        start(tmp_path, [sys.executable, "-c", KEEPS], stop, interrupt_when_started)
    assert (tmp_path / "log").read_text().split() == ["began", "kept"]


def test_nothing_is_started_once_the_end_was_asked_for(tmp_path):
    stop = Stop()
    stop.record(signal.SIGTERM)
    with pytest.raises(StopSignal):
        start(tmp_path, "touch started", stop)
    assert not (tmp_path / "started").exists()


def test_signals_are_noted_and_interrupt_nothing_and_then_mean_what_they_meant():
    earlier = signal.getsignal(signal.SIGINT)
    with recorded_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        with pytest.raises(StopSignal):
            stop.check()
    assert signal.getsignal(signal.SIGINT) is earlier


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_signal_that_is_ignored_stays_so_as_under_nohup():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recorded_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signum is None
    finally:
        signal.signal(signal.SIGHUP, earlier)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress_on(stream):
    progress = Progress(stream, 16)
    progress.begin(3, "base", BASE)
    progress.tick()
    progress.end(run("base", measured("test_a", measurement())))
    return re.sub(r"[\d.]+ s", "S", stream.getvalue())


def test_progress_is_a_line_a_run_where_nobody_watches():
    text = progress_on(io.StringIO())
    assert text == "3/16 base 1f3c9ab  S, 1 measured\n"


def test_progress_is_live_on_a_terminal_and_leaves_the_same_lines():
    text = progress_on(Terminal())
    assert text.startswith("\r\x1b[K3/16 base 1f3c9ab  S ...")
    assert text.endswith("\r\x1b[K3/16 base 1f3c9ab  S, 1 measured\n")
