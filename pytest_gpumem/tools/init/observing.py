"""Run a project's tests once with the plugin `observer`, show the progress, and return what is known about the tests."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import StopSignal
from pytest_gpumem.base.processes import recorded_signals, run, signal_name
from pytest_gpumem.base.units import counted, format_bytes, format_seconds
from pytest_gpumem.tools.console.project import QUIET
from pytest_gpumem.tools.console.streams import InputError, WholeLines
from pytest_gpumem.tools.init import observer
from pytest_gpumem.tools.init.project_tests import read_tests
from pytest_gpumem.tools.init.proposal import MARK_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.tools.init.project_tests import ProjectTests

# `--maxfail` and `--continue-on-collection-errors` undo the project's own `-x`, because every test should be seen.
_OPTIONS = ("-p", observer.__name__, "--maxfail=0", "--continue-on-collection-errors", *QUIET)
_RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_END = 15
"""Number of lines to show from the end of pytest's output if pytest could not run."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The tests after they ran once, and the reason for an early end."""

    tests: ProjectTests
    why_ended: str = ""
    """A sentence with the reason why the tests ended early; empty if all tests ran."""
    interrupted: bool = False
    """True if the user interrupted the tests by Ctrl-C."""


def observe(
    folder: Path, environment: Mapping[str, str], options: Sequence[str] = (), seconds: float | None = None
) -> ObservedRun:
    """Run the tests in a folder once, and show the progress on standard error.

    Args:
        folder: The folder in which pytest starts.
        environment: The environment variables for pytest.
        options: Further options for pytest.
        seconds: The time limit; ``None`` for no limit.

    Raises:
        InputError: pytest could not run any test. The message has the end of its output.
        StopSignal: This process received a signal other than Ctrl-C.
    """
    with TemporaryDirectory(prefix="gpumem-init-") as name, recorded_signals() as stop:
        lines, output = Path(name) / "observations.jsonl", Path(name) / "output.txt"
        progress = _Progress(lines, seconds)
        lines.touch()
        why_ended, interrupted = "", False
        try:
            status = run(
                # With its own cache, the session does not change which tests failed last for the user.
                [sys.executable, "-m", "pytest", *_OPTIONS, "-o", f"cache_dir={Path(name) / 'cache'}", *options],
                folder=folder,
                environment={**environment, observer.VARIABLE: str(lines)},
                output=output,
                stop=stop,
                tick=progress.show,
            )
        except _TimeIsUp:
            why_ended = f"the time limit of {format_seconds(progress.limit)} is over"
        except StopSignal as stopped:
            if stopped.signum != signal.SIGINT:
                raise
            why_ended, interrupted = "you interrupted the tests", True
        else:
            why_ended = "" if status in _RAN else _how_it_ended(status)
        finally:
            progress.clear()
        tests = read_tests(lines.read_text(encoding="utf-8").splitlines(keepends=True))
        if not why_ended and not tests.session_ended:
            why_ended = "a test ended pytest"  # by `os._exit`, with an exit status that pytest has as well
        if why_ended and not interrupted and not tests.tests:
            text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
            end = [line for line in text.splitlines() if line.strip()][-_END:]
            raise InputError(f"no test was run, because {why_ended}. The end of pytest's output:", *end)
    crashed = "" if interrupted or not tests.crashed else f" during {' and '.join(tests.crashed)}"
    not_run = len(tests.with_outcome("not run"))
    if not why_ended and crashed:
        why_ended = "a process ended"  # a worker of pytest-xdist, whose session goes on without it
    if why_ended:
        why_ended = f"{why_ended}{crashed}, so {counted(not_run, 'test has', 'tests have')} no result"
    return ObservedRun(tests, why_ended, interrupted)


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"{signal_name(-status)} ended pytest"
    return f"pytest ended with exit status {status}"


_MOST_NAMES = 10


def summary(observed: ObservedRun) -> list[str]:
    """Return the result as lines: the counts, the reason for an early end, and the tests that are not proposed."""
    tests = observed.tests
    models = [test for test in tests.tests if test.runs_model and not test.is_measured]
    measured = sum(test.is_measured for test in tests.tests)
    lines = [f"test functions that run a model: {len(models)} of {len(tests.tests)}"]
    if tests.proposed:
        largest = max(test.nbytes or 0 for test in tests.proposed)
        seconds = sum(test.seconds for test in tests.proposed)
        lines[0] += f" ({format_seconds(seconds)} together, each at most about {format_bytes(largest)})"
    if measured:
        lines[0] += f"; measured already: {measured}"
    if observed.why_ended:
        lines.append(f"{observed.why_ended}; the proposal is from the other tests")
    for path, why in tests.not_collected:
        lines.append(f"{path} could not be collected, so its tests were not run: {why}")
    left_out = {
        "they ran a model and failed, or were expected to fail": [
            test for test in tests.with_outcome("failed") if test.runs_model
        ],
        "they failed before they could run a model": [
            test for test in tests.with_outcome("failed") if not test.runs_model
        ],
        "they were skipped, so nobody saw whether they run models": tests.with_outcome("skipped"),
        "they run models without allocating memory": [
            test for test in models if test.outcome == "passed" and test.nbytes == 0
        ],
        f"`{MARK_KEY}` can name only test functions and doctests": [test for test in models if not test.can_be_marked],
    }
    for why, group in left_out.items():
        if group:
            lines.append(f"not proposed, because {why} ({len(group)}):")
            lines += [f"  {test.nodeid}" for test in group[:_MOST_NAMES]]
            lines += [f"  and {len(group) - _MOST_NAMES} more"] if len(group) > _MOST_NAMES else []
    return lines


class _TimeIsUp(Exception):
    """Raised while the tests run, to end them."""


class _Progress:
    """A line on the terminal with the number of tests so far."""

    def __init__(self, lines: Path, seconds: float | None) -> None:
        self.limit = float("inf") if seconds is None else seconds
        self._lines = lines
        self._line = WholeLines()
        self._began = time.monotonic()
        self._read = 0
        self._collected: set[str] = set()
        self._ended: dict[str, bool] = {}
        """The tests that have ended. The value is True if the test ran a model."""
        self._running = ""

    def show(self) -> None:
        """Show the progress. Raises `_TimeIsUp` after the time limit."""
        elapsed = time.monotonic() - self._began
        if elapsed > self.limit:
            raise _TimeIsUp
        with self._lines.open("rb") as file:
            file.seek(self._read)
            new_bytes = file.read()
        for line in new_bytes[: new_bytes.rfind(b"\n") + 1].splitlines(keepends=True):
            self._read += len(line)
            self._add(json.loads(line))
        minutes, seconds = divmod(int(elapsed), 60)
        tests = f"{len(self._ended)} of {len(self._collected)} tests, {sum(self._ended.values())} with a model"
        text = f"{tests}{self._running}" if self._collected else "pytest collects the tests"
        self._line.show(f"{minutes}:{seconds:02} {text}")

    def _add(self, observation: Mapping[str, Any]) -> None:
        if observation["kind"] == "collected":
            self._collected.update(item["id"] for item in observation["items"] if not item["measured"])
        elif observation["kind"] == "began":
            self._running = f", now {observation['id']}"
        elif observation["kind"] == "ended":
            self._running = ""
            self._ended[observation["id"]] = bool(observation["ran"])

    def clear(self) -> None:
        """Remove the line from the terminal."""
        self._line.show("")
