"""First baselines of a repository: recorded, gated at once, and tests that cannot be gated left out."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.cli.edits import write_edits
from pytest_gpumem.cli.shown_session import run_shown
from pytest_gpumem.cli.streams import write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.init.patterns import patterns_of
from pytest_gpumem.init.proposal import MARK_KEY, SETTINGS, with_patterns
from pytest_gpumem.init.workflow import PLACEHOLDER
from pytest_gpumem.processes import noted_signals, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.init.found_tests import FoundTests
    from pytest_gpumem.init.proposal import Proposal


@dataclass(frozen=True)
class FirstBaselines:
    """Baselines of a repository whose settings were just written.

    Args:
        root: The root directory of pytest.
        tests: The folder whose tests are set up, from there.
        proposed: What was written.
        found: The tests that were found.
        environment: The environment of sessions.
    """

    root: Path
    tests: str
    proposed: Proposal
    found: FoundTests
    environment: Mapping[str, str]

    def record(self, agreed: Callable[[str], bool]) -> None:
        """Record baselines and gate them at once, and show the end of what the sessions said; then say what is to be done next.

        Args:
            agreed: Asks a question, and returns whether the answer is yes.

        Raises:
            Stopped: A signal asked for the end.
        """
        failed = False
        gates: list[list[str]] = []
        missing: list[str] = []
        verdicts: list[TestVerdict] = []
        for options in self.proposed.record_with:
            command = _recording(*options)
            said = f"python {' '.join(command)}"
            if not agreed(f"Record the first baselines: {said}?"):
                missing.append(said)
                continue
            write_lines(["", f"$ {said}"])
            status, of_session = run_shown(command, self.root / self.tests, self.environment)
            verdicts += of_session
            gates.append(["-m", "pytest", "--gpumem-baseline", *options])
            failed = failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not of_session
        # They may need a network, or weights that are not here: nothing of them can be gated.
        functions = {_function(one) for one in verdicts if one.failed_by_itself}
        functions -= {_function(one) for one in verdicts if one.verdicts}
        if not self._leave_out(functions):
            functions = set()
        else:
            why = "they failed by themselves (see above) and have no baseline"
            write_lines(["", f"left out of {MARK_KEY}, because {why}; add them when they pass:"])
            write_lines([f"  {one}" for one in sorted(functions)])
        if failed or any(one.failed_by_itself and _function(one) not in functions for one in verdicts):
            write_lines(
                [
                    "",
                    f"not every test could be recorded (see above): fix it or remove it from {MARK_KEY}, and run init again",
                ]
            )
            sys.exit(1)
        differing = self._gate_once(gates, verdicts)
        if differing:
            self._leave_out_differing(differing, functions)
        self._say_what_is_next(missing)

    def _say_what_is_next(self, missing: list[str]) -> None:
        """Say which commands record the ``missing`` baselines, and what to commit."""
        if self.proposed.record_elsewhere is not None:
            said = f"python {' '.join(_recording(f'--gpumem-device={self.proposed.record_elsewhere}'))}"
            missing = [*missing, f"{said} (on a machine that has {self.proposed.record_elsewhere})"]
        if missing:
            write_lines(["", "the gate needs baselines that are not recorded yet; first run:"])
            write_lines([f"  {said}" for said in missing])
        done = " and the recorded baselines" if missing else ""
        if not self.proposed.installs_from_nowhere:
            said = f"commit the written files{done}; `pytest --gpumem-baseline` is the gate"
        else:
            files = " and ".join(map(os.path.normpath, self.proposed.installs_from_nowhere))
            said = (
                f"replace {PLACEHOLDER} in {files}, and commit the written files{done}; until then "
                "`pytest --gpumem-baseline` gates here, but the workflow cannot install it"
            )
        write_lines([f"then {said}"] if missing else ["", said])

    def _gate_once(self, commands: Sequence[Sequence[str]], verdicts: Sequence[TestVerdict]) -> set[str]:
        """Gate what was just recorded; return the test functions that fail on the same code: their figures depend on chance."""
        failed_before = {one.nodeid for one in verdicts if one.failure is not None}
        found: set[str] = set()
        for command in commands:
            write_lines(["", f"$ python {' '.join(command)}"])
            _, of_session = run_shown(command, self.root / self.tests, self.environment)
            found |= {
                _function(one) for one in of_session if one.failure is not None and one.nodeid not in failed_before
            }
        return found

    def _leave_out_differing(self, differing: AbstractSet[str], left_out: AbstractSet[str]) -> None:
        """Take tests whose figures depend on chance out of the patterns, beside those ``left_out`` before, and of the store."""
        why = "they failed on the code that recorded them (see above), so their figures depend on chance"
        if self._leave_out(differing | left_out):
            write_lines(["", f"left out of {MARK_KEY}, because {why}; add them when they repeat (with a seed):"])
            write_lines([f"  {one}" for one in sorted(differing)])
            self._prune(sorted(differing))
        else:
            write_lines(
                ["", f"the gate fails until you remove these tests from {MARK_KEY} or set a seed, because {why}:"]
            )
            write_lines([f"  {one}" for one in sorted(differing)])

    def _prune(self, functions: Sequence[str]) -> None:
        """Take the baselines of test functions out of the store, or say how that is done. Raises `Stopped`."""
        with TemporaryDirectory(prefix="gpumem-init-") as folder, noted_signals() as stop:
            output = Path(folder) / "output.txt"
            command = ["-m", "pytest_gpumem.cli.main", "prune", *functions]
            status = run(
                [sys.executable, *command], folder=self.root, environment=self.environment, output=output, stop=stop
            )
            if status != 0:
                said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                typed = f"{command_name()} prune {' '.join(map(shlex.quote, functions))}"
                write_lines(["", *said, f"their baselines are still in the store; when this is fixed, run: {typed}"])

    def _leave_out(self, functions: AbstractSet[str]) -> bool:
        """Take test functions out of the patterns that were written; return whether there are some, and others are left."""
        kept = [replace(one, runs_model=False) if one.nodeid in functions else one for one in self.found.tests]
        edit = next((one for one in self.proposed.edits if one.path == SETTINGS), None)
        if not functions or edit is None or not patterns_of(kept):
            return False
        write_edits(self.root, [with_patterns(edit, patterns_of(self.found.tests), patterns_of(kept))])
        return True


def _function(verdict: TestVerdict) -> str:
    """Return the node id of a test function, without the parameters of one of its items."""
    return f"{verdict.file}::{verdict.test.partition('[')[0]}"


def _recording(*options: str) -> list[str]:
    """Return the arguments of Python that record baselines with options of pytest."""
    return ["-m", "pytest", "--gpumem-update=new", *options]
