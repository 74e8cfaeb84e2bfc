"""One run of pytest in a worktree, with the worktree's code, and what it measured."""

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

from pytest_gpumem.ab import collector
from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.git import plain_environment
from pytest_gpumem.processes import run
from pytest_gpumem.reports.results import PROPERTY, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.ab.checkout import Checkout
    from pytest_gpumem.ab.variants import ProvisionedVariant
    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.processes import Stop


Key = tuple[str, str]
"""A test: its file and its id in it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The measured tests of one run of a revision. ``root`` is pytest's root directory, from the folder of the checkout."""

    tests: Mapping[Key, TestVerdict]
    root: str
    imported: frozenset[str] = frozenset()
    """The first names of the modules that its processes had loaded when they ended."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """The message of the exception that failed a test, by the test's id."""

    @property
    def measured(self) -> int:
        """The number of tests with figures."""
        return sum(not verdict.unmeasured and bool(verdict.verdicts) for verdict in self.tests.values())


class Taken(NamedTuple):
    """The lines that the collector wrote of a run, and pytest's exit status."""

    lines: tuple[str, ...]
    status: int


def run_of(lines: Iterable[str], status: int) -> Run:
    """Return the run that the collector wrote as ``lines``.

    Args:
        lines: What the collector wrote.
        status: pytest's exit status; a negative number is the signal that ended it.

    Raises:
        RunFailed: It ended before its tests had run, or imported code of another revision.
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
            f"its pytest-gpumem is of another version, whose figures this one cannot read: {error!r}"
        ) from None
    verdicts = [result.verdict for result in results.all()]
    tests = {(verdict.file, verdict.test): verdict for verdict in verdicts}
    errors = {report.nodeid: report.why for report in reports if report.why}
    return Run(tests, end["root"], frozenset(end["imported"]), errors)


def _read(lines: Iterable[str]) -> tuple[list[SimpleNamespace], dict[str, Any] | None]:
    """Return the reports of tests, and the line of the session's end if there is one."""
    reports: list[SimpleNamespace] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            # Cut off when the process was killed.
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
    return f"{end} (exit status {status})" if end else f"pytest ended with exit status {status} before its end"


def _outside_code(outside_modules: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name} from {file}" for name, file in list(outside_modules.items())[:3])
    more = f" and {len(outside_modules) - 3} more" if len(outside_modules) > 3 else ""
    return (
        f"it did not run the code of its revision: it imported {shown}{more}. "
        "A project that is installed in editable mode is imported from there: install each revision before its runs "
        "(--setup 'pip install -e .'), uninstall it, or let PYTHONPATH lead to the code by a path relative to the "
        "folder of the run"
    )


ABOUT_BASELINES = ("--gpumem-baseline", "--gpumem-update", "--gpumem-store", "--gpumem-strict")
_WITH_VALUE = ("--gpumem-update", "--gpumem-store")
PLUGIN = "gpumem_ab_collector"
AFTER_SETUP = "--setup ran in worktrees that are gone now: what it installed may have to be installed again"
"""The last line where ``--setup`` ran in worktrees."""
MOST_LINES = 25
"""Number of last lines that are shown of a run that failed."""


def refused(arguments: Sequence[str], checkout: Path) -> str | None:
    """Return why pytest cannot be run with ``arguments`` here, as a sentence; ``None`` when it can."""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option in ABOUT_BASELINES:
            return f"{option} is about baselines, and none is read or written here: leave it out"
        path = Path(value or argument)
        if path.is_absolute() and path.resolve().is_relative_to(checkout):
            return f"{argument} leads into the checkout, where only one of the revisions is: write the path relative to here"
    return None


def without_baselines(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return pytest's arguments without those about baselines, and the store that they name."""
    kept: list[str] = []
    store = None
    left = iter(arguments)
    for argument in left:
        option, sign, value = argument.partition("=")
        if option not in ABOUT_BASELINES:
            kept.append(argument)
        elif option in _WITH_VALUE:
            value = value if sign else next(left, "")
            store = value if option == "--gpumem-store" else store
    return kept, store


def python_path(worktree: Path, checkout: Checkout, current: Sequence[str], inherited: str | None) -> str:
    """Return ``PYTHONPATH`` for a worktree: its own code first, then the ``inherited`` PYTHONPATH.

    ``current`` is the path of this interpreter. Its entries in the checkout, such as a ``lib`` that an editable install added,
    are replaced by those of the worktree.
    """
    here = worktree / checkout.folder
    own = [here, here / "src", worktree, worktree / "src"]
    own += [moved for entry in current if (moved := _moved(entry, worktree, checkout)) is not None]
    others = [
        entry for entry in (inherited or "").split(os.pathsep) if entry and _moved(entry, worktree, checkout) is None
    ]
    paths = [str(path) for path in own if path.is_dir()]
    return os.pathsep.join(dict.fromkeys([*paths, *others]))


def _moved(entry: str, worktree: Path, checkout: Checkout) -> Path | None:
    """Return where a path of the checkout is in the worktree; ``None`` for other paths, and for an environment in it."""
    path = Path(entry).resolve()
    if not Path(entry).is_absolute() or not path.is_relative_to(checkout.top):
        return None
    prefix = Path(sys.prefix).resolve()
    if prefix.is_relative_to(checkout.top) and path.is_relative_to(prefix):
        return None
    return worktree / path.relative_to(checkout.top)


@dataclass(frozen=True)
class Runner:
    """Runs pytest in checkouts, one run after another, each in a process of its own."""

    checkout: Checkout
    arguments: Sequence[str]
    setup: str | None
    folder: Path
    """The folder of the files that runs write."""
    stop: Stop
    others: Sequence[Path]
    """Folders in which the repository is checked out, also those that are run."""
    only: Sequence[str] = ()
    """The ids of the tests that run, of those that the arguments select; all where there are none."""
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    """Numbers of runs, which name their folders; runs in threads of their own share it."""

    def take(
        self, variant: ProvisionedVariant, tick: Callable[[], None] = lambda: None, *, explained: bool = False
    ) -> tuple[Taken, Run]:
        """Run a variant once, and return what it wrote and what that says. Raises `RunFailed` and `Stopped`.

        ``explained`` says whether each step is.
        """
        worktree = variant.top
        here = worktree / self.checkout.folder
        if not here.is_dir():
            raise RunFailed(f"it has no folder {self.checkout.folder.as_posix()}")
        own = self.folder / f"run-{next(self._numbers)}"
        (own / "plugin").mkdir(parents=True)
        shutil.copyfile(collector.__file__, own / "plugin" / f"{PLUGIN}.py")
        lines, log = own / "lines.jsonl", own / "log.txt"
        if self.setup is not None:
            status = run(
                self.setup, folder=here, environment=plain_environment(), output=log, stop=self.stop, tick=tick
            )
            if status:
                raise RunFailed(f"--setup ended with exit status {status}{_last_lines(log, worktree)}")
        # Only now: --setup may have made the folders that it is to look in.
        environment = self._environment(worktree, own / "plugin", lines)
        # Its own folder for what pytest keeps between runs: --last-failed must not make one run differ from the next.
        kept = ["-o", f"cache_dir={own / 'cache'}", f"--gpumem-store={own / 'store'}"]
        kept += ["--gpumem-explain=always"] if explained else []
        command = [str(variant.python), "-m", "pytest", "-p", PLUGIN, *kept, *self.arguments]
        status = run(command, folder=here, environment=environment, output=log, stop=self.stop, tick=tick)
        taken = Taken(tuple(lines.read_text(encoding="utf-8").splitlines()) if lines.exists() else (), status)
        try:
            return taken, run_of(taken.lines, status)
        except RunFailed as failure:
            raise RunFailed(f"{failure}{_last_lines(log, worktree)}") from None

    def _environment(self, worktree: Path, plugin: Path, lines: Path) -> dict[str, str]:
        environment = plain_environment()
        # A job's summary is for the comparison, not for each of its runs.
        environment.pop("GITHUB_STEP_SUMMARY", None)
        path = python_path(worktree, self.checkout, sys.path, environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{plugin}"
        others = [str(one) for one in self.others if one != worktree]
        told = {"file": str(lines), "home": str(worktree), "others": others, "only": list(self.only)}
        environment[collector.VARIABLE] = json.dumps(told)
        return environment


def _last_lines(log: Path, worktree: Path) -> str:
    """Return the last lines of a log, with paths in the worktree as relative ones, since it is gone when they are read."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.replace(f"{worktree}{os.sep}", "").rstrip().splitlines()
    return "".join(f"\n  {line}" for line in ["", *lines[-MOST_LINES:]]) if lines else ""
