"""Record the first baselines of a repository, run the gate once, and exclude tests with random figures from the gate."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.processes import recorded_signals, run
from pytest_gpumem.tools.console.streams import write_lines
from pytest_gpumem.tools.init.edits import write_edits
from pytest_gpumem.tools.init.patterns import patterns_of
from pytest_gpumem.tools.init.proposal import MARK_KEY, SETTINGS, with_patterns
from pytest_gpumem.tools.init.shown_session import run_shown
from pytest_gpumem.tools.init.workflow import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.tools.init.project_tests import ProjectTests
    from pytest_gpumem.tools.init.proposal import Proposal


@dataclass(frozen=True)
class FirstBaselines:
    """Records the first baselines of a repository for which ``gpumem init`` has just written the settings.

    The setting ``mark`` lists patterns for the tests to measure.

    Example: In a repository with 12 tests, a test fails because it needs a network. This test is removed from ``mark``, and
        the other 11 tests get baselines. Then the gate runs on the same code, and a test with random batch sizes fails. It is
        also removed from ``mark``, and its baselines are removed from the store. The gate passes with the other 10 tests.

    Args:
        root: The root directory of pytest.
        tests: The folder whose tests are set up, as a path from the root directory.
        proposed: The proposal, whose files are already written.
        collected: The tests that were seen to run models, among all tests.
        environment: The environment variables for pytest sessions.
    """

    root: Path
    tests: str
    proposed: Proposal
    collected: ProjectTests
    environment: Mapping[str, str]

    def record(self, agreed: Callable[[str], bool]) -> None:
        """Record the baselines, run the gate once, and print the user's next steps.

        The end of each pytest session's output is shown.

        Args:
            agreed: Asks the user a question, and returns True if the answer is yes.

        Raises:
            StopSignal: This process received a signal, for example SIGTERM.
            SystemExit: Not every test could be recorded. The exit status is 1.
        """
        failed = False
        gates: list[list[str]] = []
        missing: list[str] = []
        verdicts: list[TestVerdict] = []
        for options in self.proposed.record_with:
            command = _recording(*options)
            typed = f"python {' '.join(command)}"
            if not agreed(f"Record the first baselines: {typed}?"):
                missing.append(typed)
                continue
            write_lines(["", f"$ {typed}"])
            status, of_session = run_shown(command, self.root / self.tests, self.environment)
            verdicts += of_session
            gates.append(["-m", "pytest", "--gpumem-baseline", *options])
            failed = failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not of_session
        # A test that fails by itself may need a network or missing weights. If it has no measurement, it cannot be gated.
        functions = {_function(verdict) for verdict in verdicts if verdict.failed_by_itself}
        functions -= {_function(verdict) for verdict in verdicts if verdict.verdicts}
        if not self._leave_out(functions):
            functions = set()
        else:
            why = "they failed by themselves (see above) and have no baseline"
            write_lines(["", f"left out of {MARK_KEY}, because {why}; add them when they pass:"])
            write_lines([f"  {function}" for function in sorted(functions)])
        if failed or any(verdict.failed_by_itself and _function(verdict) not in functions for verdict in verdicts):
            write_lines(
                [
                    "",
                    (
                        f"not every test could be recorded (see above): fix these tests or remove them from {MARK_KEY}, and "
                        "run init again"
                    ),
                ]
            )
            sys.exit(1)
        differing = self._gate_once(gates, verdicts)
        if differing:
            self._leave_out_differing(differing, functions)
        self._say_what_is_next(missing)

    def _say_what_is_next(self, missing: list[str]) -> None:
        """Print the user's next steps: commands to record the ``missing`` baselines, and a commit of the files."""
        if self.proposed.record_elsewhere is not None:
            device = self.proposed.record_elsewhere
            typed = f"python {' '.join(_recording(f'--gpumem-device={device}'))}"
            missing = [*missing, f"{typed} (on a machine that has {device})"]
        if missing:
            write_lines(["", "the gate needs baselines that are not recorded yet. First run:"])
            write_lines([f"  {command}" for command in missing])
        baselines = " and the recorded baselines" if missing else ""
        if not self.proposed.installs_from_nowhere:
            step = f"commit the written files{baselines}; `pytest --gpumem-baseline` is the gate"
        else:
            files = " and ".join(map(os.path.normpath, self.proposed.installs_from_nowhere))
            step = (
                f"replace {PLACEHOLDER} in {files}, and commit the written files{baselines}; until then "
                "`pytest --gpumem-baseline` gates on this machine, but the workflow cannot install this plugin"
            )
        write_lines([f"then {step}"] if missing else ["", step])

    def _gate_once(self, commands: Sequence[Sequence[str]], verdicts: Sequence[TestVerdict]) -> set[str]:
        """Run the gate on unchanged code, right after the baselines were recorded, and return the failing test functions.

        Their figures must be random, because the code is the same.

        Args:
            commands: The arguments for Python, once for each session.
            verdicts: The verdicts in the sessions that recorded the baselines. Tests that failed there are not returned.
        """
        failed_before = {verdict.nodeid for verdict in verdicts if verdict.failure is not None}
        differing: set[str] = set()
        for command in commands:
            write_lines(["", f"$ python {' '.join(command)}"])
            _, of_session = run_shown(command, self.root / self.tests, self.environment)
            differing |= {
                _function(verdict)
                for verdict in of_session
                if verdict.failure is not None and verdict.nodeid not in failed_before
            }
        return differing

    def _leave_out_differing(self, differing: AbstractSet[str], left_out: AbstractSet[str]) -> None:
        """Remove tests with random figures from the patterns in ``mark``, and remove their baselines from the store.

        Args:
            differing: The test functions with random figures.
            left_out: The test functions already removed from the patterns.
        """
        why = "they failed on the code that recorded their baselines (see above), so their figures are random"
        if self._leave_out(differing | left_out):
            write_lines(
                [
                    "",
                    f"left out of {MARK_KEY}, because {why}; add them when their figures repeat, for example with a seed:",
                ]
            )
            write_lines([f"  {function}" for function in sorted(differing)])
            self._prune(sorted(differing))
        else:
            write_lines(
                [
                    "",
                    f"the gate fails until you remove these tests from {MARK_KEY} or set a seed in them, because {why}:",
                ]
            )
            write_lines([f"  {function}" for function in sorted(differing)])

    def _prune(self, functions: Sequence[str]) -> None:
        """Remove the baselines of test functions from the store. If this fails, print a command for the user to run later.

        Raises `StopSignal`.
        """
        with TemporaryDirectory(prefix="gpumem-init-") as folder, recorded_signals() as stop:
            output = Path(folder) / "output.txt"
            command = ["-m", "pytest_gpumem.tools.main", "prune", *functions]
            status = run(
                [sys.executable, *command], folder=self.root, environment=self.environment, output=output, stop=stop
            )
            if status != 0:
                errors = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                typed = f"{command_name()} prune {' '.join(map(shlex.quote, functions))}"
                write_lines(["", *errors, f"their baselines are still in the store; when this is fixed, run: {typed}"])

    def _leave_out(self, functions: AbstractSet[str]) -> bool:
        """Remove test functions from the patterns in ``mark``, which ``gpumem init`` has just written.

        Returns:
            True if the patterns were changed. False if ``functions`` is empty, this command did not write the settings, or no
            test that runs a model would remain.
        """
        remaining = [
            replace(test, runs_model=False) if test.nodeid in functions else test for test in self.collected.tests
        ]
        edit = next((edit for edit in self.proposed.edits if edit.path == SETTINGS), None)
        if not functions or edit is None or not patterns_of(remaining):
            return False
        write_edits(self.root, [with_patterns(edit, patterns_of(self.collected.tests), patterns_of(remaining))])
        return True


def _function(verdict: TestVerdict) -> str:
    """Return the id of a test's function: ``"test_a.py::test_b"`` for the test ``"test_a.py::test_b[1]"``."""
    return f"{verdict.file}::{verdict.test.partition('[')[0]}"


def _recording(*options: str) -> list[str]:
    """Return Python's arguments for a session with these pytest options. The session records missing baselines."""
    return ["-m", "pytest", "--gpumem-update=new", *options]
