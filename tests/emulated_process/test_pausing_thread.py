"""A thread that pauses for forks goes on, whoever forks and whatever happened in the thread."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from pytest_gpumem.emulating.emulated_process.pausing_thread import PausingThread


def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


class Forking:
    """An object in a cycle. It forks when it is collected, as an object does whose `__del__` starts a process."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        fork()


class Thread(PausingThread):
    """Calls a function at each run."""

    def __init__(self, call):
        super().__init__("test")
        self.call = call
        self.ran = threading.Semaphore(0)

    def run(self):
        try:
            self.call()
        finally:
            self.ran.release()
        self.is_over.wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_collects_an_object_which_forks_goes_on():
    kept = [Forking()]

    def collect():
        kept.clear()
        gc.collect()

    thread = Thread(collect)
    thread.begin()
    try:
        assert thread.ran.acquire(timeout=30)
        assert thread.ran.acquire(timeout=30), "the fork ends the first run, and a second one follows"
        assert thread.is_running
    finally:
        thread.end()
    assert not thread.is_running


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_raised_starts_again_after_a_fork():
    errors = [ZeroDivisionError()]

    def raise_once():
        if errors:
            raise errors.pop()

    thread = Thread(raise_once)
    thread.begin()
    try:
        assert thread.ran.acquire(timeout=30)
        for running in threading.enumerate():
            if running.name == "test":
                running.join(30)
        fork()
        assert thread.ran.acquire(timeout=30)
    finally:
        thread.end()
