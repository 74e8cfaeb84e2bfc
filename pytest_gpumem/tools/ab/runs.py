"""Run pytest in a worktree with the worktree's code, and read the measured figures."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest

from pytest_gpumem.base.errors import RunFailed
from pytest_gpumem.base.git import plain_environment
from pytest_gpumem.base.processes import run
from pytest_gpumem.reporting.reports.results import PROPERTY, Results
from pytest_gpumem.tools.ab import collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.tools.ab.variants import ProvisionedVariant
    from pytest_gpumem.tools.checkout import Checkout


Key = tuple[str, str]
"""A test's file, and the test's id within the file: ``("tests/test_net.py", "test_forward")``."""


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one pytest run. ``tests`` contains the verdict for each measured test.

    ``root`` is the path from the checkout to pytest's root directory.
    """

    tests: Mapping[Key, TestVerdict]
    root: str
    imported: frozenset[str] = frozenset()
    """The top-level modules that pytest's processes had imported when they ended."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """The exception message of each failed test, by the test's id."""

    @property
    def measured(self) -> int:
        """The number of tests for which the run measured figures."""
        return sum(not verdict.unmeasured and bool(verdict.verdicts) for verdict in self.tests.values())


class RunRecord(NamedTuple):
    """The lines that the collector wrote during a run, and pytest's exit status."""

    lines: tuple[str, ...]
    status: int


def run_of(lines: Iterable[str], status: int) -> Run:
    """Parse the lines that `Collector` wrote during a run.

    Args:
        lines: The lines, each with a JSON object.
        status: pytest's exit status. A negative number means that a signal ended pytest: -9 for SIGKILL.

    Raises:
        RunFailed: pytest ended before all tests had run, the tests imported code from another revision, or the figures
            come from an incompatible version of pytest-gpumem.
    """
    reports, end = _read(lines)
    if end is None or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RunFailed(_why_it_ended(status))
    outside_modules: Mapping[str, str] = end["outside_modules"]
    if outside_modules:
        raise RunFailed(_outside_code(outside_modules))
    results = Results()
    try:
        for report in reports:
            results.add(cast("pytest.TestReport", report))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFailed(
            f"the tests used another version of pytest-gpumem, whose figures cannot be read by this version: {error!r}"
        ) from None
    verdicts = [result.verdict for result in results.all()]
    tests = {(verdict.file, verdict.test): verdict for verdict in verdicts}
    errors = {report.nodeid: report.why for report in reports if report.why}
    return Run(tests, end["root"], frozenset(end["imported"]), errors)


def _read(lines: Iterable[str]) -> tuple[list[SimpleNamespace], dict[str, Any] | None]:
    """Return the reports on tests, and the collector's last line, which is ``None`` if the session did not end."""
    reports: list[SimpleNamespace] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            # The process was killed while it wrote this line.
            break
        if "status" in line:
            return reports, line
        report = SimpleNamespace(
            nodeid=line["nodeid"],
            when=line["when"],
            outcome=line["outcome"],
            why=line["why"],
            user_properties=[(PROPERTY, line["verdict"])],
        )
        if line["xfail"]:
            report.wasxfail = ""
        reports.append(report)
    return reports, None


_ENDS = {
    pytest.ExitCode.INTERRUPTED: "pytest could not collect the tests, or was interrupted",
    pytest.ExitCode.INTERNAL_ERROR: "pytest had an internal error",
    pytest.ExitCode.USAGE_ERROR: "pytest did not understand its arguments or settings",
    pytest.ExitCode.NO_TESTS_COLLECTED: "pytest collected no tests",
}


def _why_it_ended(status: int) -> str:
    if status < 0:
        return f"pytest was ended by signal {-status}"
    end = _ENDS.get(cast("pytest.ExitCode", status))
    return (
        f"{end} (exit status {status})"
        if end
        else f"pytest ended with exit status {status} before the end of the session"
    )


def _outside_code(outside_modules: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name} from {file}" for name, file in list(outside_modules.items())[:3])
    more = f" and {len(outside_modules) - 3} more" if len(outside_modules) > 3 else ""
    return (
        f"the tests did not run this revision's code, because they imported {shown}{more}. "
        "An editable installation always imports from the folder in which it was installed. So install each revision before "
        "its runs (--setup 'pip install -e .'), uninstall the project, or set PYTHONPATH to a path relative to the run's "
        "folder"
    )


ABOUT_BASELINES = ("--gpumem-baseline", "--gpumem-update", "--gpumem-store", "--gpumem-strict")
_WITH_VALUE = ("--gpumem-update", "--gpumem-store")
PLUGIN = "gpumem_ab_collector"
SETUP_NOTE = (
    "--setup ran in worktrees, which are removed now: if --setup installed packages from a worktree, install them again"
)
"""The last line that a command prints if ``--setup`` ran in worktrees."""
MOST_LINES = 25
"""The maximum number of log lines to show from a failed run."""


def reason_to_refuse(arguments: Sequence[str], checkout: Path) -> str | None:
    """Return the reason why pytest cannot run with ``arguments`` in a worktree, or ``None`` if pytest can."""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option in ABOUT_BASELINES:
            return f"leave out {option}: this command neither reads nor writes baselines"
        path = Path(value or argument)
        if path.is_absolute() and path.resolve().is_relative_to(checkout):
            return f"{argument} is a path into the checkout, but revisions run in other folders: use a relative path"
    return None


def without_baseline_options(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return pytest's arguments without options about baselines, and the value after ``--gpumem-store``.

    Example: ``["-x", "--gpumem-store=s3://bucket"]`` becomes ``["-x"]`` and ``"s3://bucket"``.
    """
    plain: list[str] = []
    store = None
    remaining = iter(arguments)
    for argument in remaining:
        option, sign, value = argument.partition("=")
        if option not in ABOUT_BASELINES:
            plain.append(argument)
        elif option in _WITH_VALUE:
            value = value if sign else next(remaining, "")
            store = value if option == "--gpumem-store" else store
    return plain, store


def python_path(worktree: Path, checkout: Checkout, current: Sequence[str], inherited: str | None) -> str:
    """Return ``PYTHONPATH`` for a worktree: the worktree's code first, then the inherited entries.

    Args:
        worktree: The worktree's root folder.
        checkout: The user's checkout.
        current: This interpreter's ``sys.path``. An entry in the user's checkout, such as ``lib`` from an editable
            installation, is replaced by the same folder in the worktree.
        inherited: This process's ``PYTHONPATH``.
    """
    folder = worktree / checkout.folder
    own = [folder, folder / "src", worktree, worktree / "src"]
    own += [moved for entry in current if (moved := _moved(entry, worktree, checkout)) is not None]
    outside = [
        entry for entry in (inherited or "").split(os.pathsep) if entry and _moved(entry, worktree, checkout) is None
    ]
    paths = [str(path) for path in own if path.is_dir()]
    return os.pathsep.join(dict.fromkeys([*paths, *outside]))


def _moved(entry: str, worktree: Path, checkout: Checkout) -> Path | None:
    """Translate a path in the user's checkout into the same path in the worktree.

    Return ``None`` for a path outside the checkout, or in a virtual environment inside the checkout.
    """
    path = Path(entry).resolve()
    if not Path(entry).is_absolute() or not path.is_relative_to(checkout.top):
        return None
    prefix = Path(sys.prefix).resolve()
    if prefix.is_relative_to(checkout.top) and path.is_relative_to(prefix):
        return None
    return worktree / path.relative_to(checkout.top)


@dataclass(frozen=True)
class Runner:
    """Runs pytest in checkouts. Each run is a new process."""

    checkout: Checkout
    arguments: Sequence[str]
    setup: str | None
    folder: Path
    """The folder for files that the runs write."""
    stop: Stop
    checkouts: Sequence[Path]
    """All folders with a checkout of the repository, including the worktrees."""
    only: Sequence[str] = ()
    """The ids of the tests to run, among the tests that ``arguments`` select. If empty, all these tests run."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    """Counts the runs in all threads, to name the runs' folders."""

    def take(
        self, variant: ProvisionedVariant, tick: Callable[[], None] = lambda: None, *, explained: bool = False
    ) -> tuple[RunRecord, Run]:
        """Run pytest once on a variant.

        Args:
            variant: The variant.
            tick: A function that is called repeatedly during the run.
            explained: True to explain every step's peak.

        Returns:
            The collector's lines with pytest's exit status, and the results parsed from these lines.

        Raises:
            RunFailed: The run has no results to compare. The message ends with the last lines of pytest's output.
            StopSignal: A signal such as Ctrl-C has come.
        """
        worktree = variant.top
        current = worktree / self.checkout.folder
        if not current.is_dir():
            raise RunFailed(f"this revision has no folder {self.checkout.folder.as_posix()}")
        own = self.folder / f"run-{next(self._numbers)}"
        (own / "plugin").mkdir(parents=True)
        shutil.copyfile(collector.__file__, own / "plugin" / f"{PLUGIN}.py")
        lines, log = own / "lines.jsonl", own / "log.txt"
        if self.setup is not None:
            status = run(
                self.setup, folder=current, environment=plain_environment(), output=log, stop=self.stop, tick=tick
            )
            if status:
                raise RunFailed(f"--setup ended with exit status {status}{_last_lines(log, worktree)}")
        # Compute PYTHONPATH after --setup, which may create folders that belong on it.
        environment = self._environment(worktree, own / "plugin", lines)
        # Each run has its own pytest cache. Otherwise --last-failed would select other tests in the next run.
        options = ["-o", f"cache_dir={own / 'cache'}", f"--gpumem-store={own / 'store'}"]
        options += ["--gpumem-explain=always"] if explained else []
        command = [str(variant.python), "-m", "pytest", "-p", PLUGIN, *options, *self.arguments]
        status = run(command, folder=current, environment=environment, output=log, stop=self.stop, tick=tick)
        record = RunRecord(tuple(lines.read_text(encoding="utf-8").splitlines()) if lines.exists() else (), status)
        try:
            return record, run_of(record.lines, status)
        except RunFailed as failure:
            raise RunFailed(f"{failure}{_last_lines(log, worktree)}") from None

    def _environment(self, worktree: Path, plugin: Path, lines: Path) -> dict[str, str]:
        environment = plain_environment()
        # Only the comparison writes into the GitHub job's summary. The runs cannot, because they do not get this variable.
        environment.pop("GITHUB_STEP_SUMMARY", None)
        path = python_path(worktree, self.checkout, sys.path, environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{plugin}"
        other_checkouts = [str(folder) for folder in self.checkouts if folder != worktree]
        arguments = {"file": str(lines), "home": str(worktree), "others": other_checkouts, "only": list(self.only)}
        environment[collector.VARIABLE] = json.dumps(arguments)
        return environment


def _last_lines(log: Path, worktree: Path) -> str:
    """Return a log's last lines. Paths into the worktree become relative, because the worktree will be removed."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.replace(f"{worktree}{os.sep}", "").rstrip().splitlines()
    return "".join(f"\n  {line}" for line in ["", *lines[-MOST_LINES:]]) if lines else ""
