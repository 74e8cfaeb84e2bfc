"""Session of pytest whose progress is shown as it comes, and of the rest the end."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pytest_gpumem.cli.streams import read_report, write_lines
from pytest_gpumem.processes import noted_signals, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.gate.verdict import TestVerdict

_END = 25
"""Lines that are shown of a session that recorded baselines."""
_SUMMARY = ("gpumem:", "gpumem store:")
"""Beginnings of the lines that are shown of it, wherever they are."""
_PROGRESS = re.compile(r"\[ *[0-9]+(%|/[0-9]+)\]$")
"""The end of a line of pytest's progress, as each of its styles has it."""


def run_shown(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, Sequence[TestVerdict]]:
    """Run a session of pytest, show its progress and the end of what it said, and return its exit status and its verdicts.

    Args:
        command: The arguments of Python.
        folder: The folder that it is run in.
        environment: Its environment.

    Raises:
        Stopped: A signal asked for the end.
    """
    with TemporaryDirectory(prefix="gpumem-init-") as name, noted_signals() as stop:
        report = Path(name) / "report.json"
        said = _Said(Path(name) / "output.txt")
        status = run(
            [sys.executable, *command, f"--gpumem-report={report}"],
            folder=folder,
            environment=environment,
            output=said.output,
            stop=stop,
            tick=said.show_progress,
        )
        said.show_end()
        if status < 0:
            write_lines(["", f"{_name_of(-status)} ended the session, which recorded nothing"])
        results = read_report(report).results if report.exists() else ()
    return status, [one.verdict for one in results]


class _Said:
    """The output of a session, in a file."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._read = 0
        self._lines: list[str] = []
        """Those to be shown at the end: what came before the first test is not, once there was one."""
        self._began = False

    def show_progress(self, *, ended: bool = False) -> None:
        """Show the lines of progress that have come; ``ended`` tells that the last line is whole."""
        with self.output.open("rb") as file:
            file.seek(self._read)
            found = file.read()
        if not ended:
            found = found[: found.rfind(b"\n") + 1]
        self._read += len(found)
        lines = found.decode("utf-8", errors="replace").splitlines()
        for line in lines:
            if not _PROGRESS.search(line):
                self._lines.append(line)
                continue
            write_lines([line])
            if not self._began:
                self._began = True
                self._lines.clear()

    def show_end(self) -> None:
        """Show the rest: the last lines, and those of its summary before. Of each failed test pytest has one behind that."""
        self.show_progress(ended=True)
        earlier, last = self._lines[:-_END], self._lines[-_END:]
        write_lines([*(line for line in earlier if line.startswith(_SUMMARY)), *last])


def _name_of(number: int) -> str:
    """Return the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
