"""Run pytest in a new process, and show only its progress lines while it runs and the end of its output."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pytest_gpumem.base.processes import recorded_signals, run, signal_name
from pytest_gpumem.tools.console.streams import read_report, write_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.judging.gate.verdict import TestVerdict

_END = 25
"""Number of lines from the end of the output to show when the session ends."""
_SUMMARY = ("gpumem:", "gpumem store:")
"""Prefixes of pytest-gpumem's summary lines. They are shown even if they are not among the last lines."""
_PROGRESS = re.compile(r"\[ *[0-9]+(%|/[0-9]+)\]$")
"""The end of a progress line in pytest's styles: ``[ 50%]`` or ``[ 6/12]``."""


def run_shown(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, Sequence[TestVerdict]]:
    """Run a pytest session, and show its progress and the end of its output.

    Args:
        command: The arguments for Python, for example ``["-m", "pytest", "--gpumem-update=new"]``.
        folder: The working folder of the session.
        environment: The environment variables of the session.

    Returns:
        The session's exit status, and its verdicts on measured tests. There are no verdicts if the session wrote no report.

    Raises:
        StopSignal: This process received a signal, for example SIGTERM.
    """
    with TemporaryDirectory(prefix="gpumem-init-") as name, recorded_signals() as stop:
        report = Path(name) / "report.json"
        shown = _ShownOutput(Path(name) / "output.txt")
        status = run(
            [sys.executable, *command, f"--gpumem-report={report}"],
            folder=folder,
            environment=environment,
            output=shown.output,
            stop=stop,
            tick=shown.show_progress,
        )
        shown.show_end()
        if status < 0:
            write_lines(["", f"{signal_name(-status)} ended the session, so no baselines were recorded"])
        results = read_report(report).results if report.exists() else ()
    return status, [result.verdict for result in results]


class _ShownOutput:
    """Shows new lines of a session's output file while the session writes the file."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._read = 0
        self._lines: list[str] = []
        """All lines except progress lines. Lines before the first progress line, such as pytest's header, are dropped."""
        self._began = False

    def show_progress(self, *, ended: bool = False) -> None:
        """Show the new progress lines in the output file.

        Args:
            ended: True if the session has ended, so the last line is complete even without a line break.
        """
        with self.output.open("rb") as file:
            file.seek(self._read)
            new_bytes = file.read()
        if not ended:
            new_bytes = new_bytes[: new_bytes.rfind(b"\n") + 1]
        self._read += len(new_bytes)
        lines = new_bytes.decode("utf-8", errors="replace").splitlines()
        for line in lines:
            if not _PROGRESS.search(line):
                self._lines.append(line)
                continue
            write_lines([line])
            if not self._began:
                self._began = True
                self._lines.clear()

    def show_end(self) -> None:
        """Show the last 25 lines of the output, and the summary lines before them.

        pytest prints a line for each failed test after the summary. With many failed tests, the summary is not in the last 25.
        """
        self.show_progress(ended=True)
        earlier, last = self._lines[:-_END], self._lines[-_END:]
        write_lines([*(line for line in earlier if line.startswith(_SUMMARY)), *last])
