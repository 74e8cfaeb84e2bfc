"""``gpumem init``: settings, a workflow and first baselines for a repository that has tests, proposed and then written."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, cast

import click
import pytest

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.ab.compare_variants import SIGNALLED
from pytest_gpumem.baselines.location import is_url
from pytest_gpumem.cli.project import check_pyproject, read_config
from pytest_gpumem.cli.streams import INTERRUPTED, InputError, input_errors, read_report, write_lines
from pytest_gpumem.config.settings import DEFAULT_STORE, settings_of
from pytest_gpumem.devices.registry import BUILT_IN
from pytest_gpumem.doctor import looking
from pytest_gpumem.git import USUAL_BRANCH, GitError, default_branch
from pytest_gpumem.init.addopts import addopts_of, ignored_by
from pytest_gpumem.init.found_tests import Names, find_tests
from pytest_gpumem.init.installing import REQUIREMENTS_FILES
from pytest_gpumem.init.patterns import patterns_of
from pytest_gpumem.init.proposal import (
    ATTRIBUTES,
    GATE_REQUIREMENTS,
    MARK_KEY,
    SETTINGS,
    WORKFLOW,
    Here,
    Project,
    ProposalError,
    counts,
    proposal,
    with_patterns,
)
from pytest_gpumem.init.sources import sources_of
from pytest_gpumem.init.workflow import DEVICES, PLACEHOLDER, RUNNERS, account
from pytest_gpumem.processes import Stopped, noted_signals, run
from pytest_gpumem.units import counted
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.init.found_tests import FoundTests
    from pytest_gpumem.init.proposal import Edit, Proposal
    from pytest_gpumem.init.sources import Sources
    from pytest_gpumem.init.workflow import Runner

_SKIPPED = frozenset({"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"})
_LARGEST = 2**20
"""Bytes of a source file that is read: larger ones are data."""
_NONE = (
    "nothing is proposed: no test was found that runs a model. Mark those that do with @pytest.mark.gpumem, name them in "
    f"[tool.gpumem] {MARK_KEY}, or measure a step with the gpumem fixture; then run gpumem init again"
)
_END = 25
"""Lines that are shown of a session that recorded baselines."""
_SUMMARY = ("gpumem:", "gpumem store:")
"""Beginnings of the lines that are shown of it, wherever they are."""
_PROGRESS = re.compile(r"\[ *[0-9]+(%|/[0-9]+)\]$")
"""The end of a line of pytest's progress, as each of its styles has it."""


@click.command()
@click.option("--yes", is_flag=True, help="Write the files and record the baselines without asking.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    help="The machine that the workflow runs on; if not given, one that baselines can be recorded for here.",
)
def init(*, yes: bool, dry_run: bool, runner: str | None) -> None:
    """Set a repository up: settings, a workflow for GitHub, and first baselines.

    Finds the tests that run models by reading their source, never by running it. Proposes `[tool.gpumem]` in pyproject.toml,
    .github/workflows/gpumem.yml with the requirements that it installs, and a line of .gitattributes. Shows the changes,
    asks, and writes; then asks to record the first baselines. Existing files and sections are not changed.

    \b
    Examples:
      gpumem init --dry-run
      gpumem init --yes --runner emulated

    Exit status: 0 when all is set up, shown or declined, 1 when no test runs a model, or the first baselines could not be
    recorded, 2 for wrong usage, or a file that cannot be read or written, 130 when interrupted.
    """
    if yes and dry_run:
        raise click.UsageError("--yes writes, and --dry-run does not: give one of them")
    environment = dict(os.environ)
    check_pyproject()
    place = _place()
    sources = sources_of(_texts(place.root))
    found = find_tests(sources, place.names)
    write_lines([f"{place.root / place.tests}: {counts(found)}", *_not_read(sources, place.names), *_not_known(found)])
    if not any(one.runs_model or one.is_measured for one in found.tests):
        write_lines([_NONE])
        sys.exit(1)
    project = _project(place)
    with input_errors(ProposalError):
        proposed = proposal(project, found, _here(environment), cast("Runner | None", runner))
    _show(proposed)
    if dry_run:
        return
    try:
        if proposed.edits and (yes or _asked(f"Write {counted(len(proposed.edits), 'file')}?")):
            _write(place.root, proposed.edits)
        elif proposed.edits:
            write_lines(["nothing was written"])
            return
        else:
            write_lines(["there is nothing to write"])
        store = project.store and place.root / project.store
        if store and any(store.rglob("*.toml")):
            write_lines(
                [f"{project.store} has baselines; `python -m pytest --gpumem-update=new` adds those that are missing"]
            )
        else:
            _record(place, proposed, found, environment, yes=yes)
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except Stopped as stopped:
        more = "`python -m pytest --gpumem-update=new` records the baselines that are missing"
        click.echo(f"\ninterrupted: {more}", err=True)
        sys.exit(SIGNALLED + stopped.signum)


def _not_read(sources: Sources, names: Names) -> Iterator[str]:
    """Yield a sentence for each file of tests that cannot be parsed."""
    for path, why in sources.not_parsed.items():
        if names.has_file(path) or PurePosixPath(path).name == "conftest.py":
            yield (
                f"{path} cannot be parsed ({why}): what is in it is not seen. Correct it and run gpumem init again, or mark "
                "its tests"
            )


def _not_known(found: FoundTests) -> Iterator[str]:
    """Yield a sentence for each file that pytest may not collect."""
    for path in found.perhaps_ignored:
        yield (
            f"{path} is ignored by a conftest.py under a condition, which only running it would tell: its tests are counted. "
            f"Where they are never collected, take them out of {MARK_KEY}"
        )


class _Place(NamedTuple):
    """The project around this folder: pytest's root directory, what it collects, and where its repository begins."""

    root: Path
    names: Names
    top: Path | None
    tests: str
    """The folder whose tests are set up, from the root directory: this one."""


def _place() -> _Place:
    def read(config: pytest.Config) -> tuple[Path, Names, str]:
        names = Names(*map(config.getini, ("python_files", "python_classes", "python_functions")))
        # What is there has to be right: it is left alone, and every session would end at it.
        settings_of(config)
        root = config.rootpath
        tests = Path.cwd().relative_to(root).as_posix() if Path.cwd().is_relative_to(root) else "."
        # As pytest does: in a folder below the root directory, it collects what is there.
        folders = config.getini("testpaths") if tests == "." else [tests]
        words = addopts_of(config.inipath.name, _text(config.inipath) or "") if config.inipath is not None else ()
        more = {"not_entered": config.getini("norecursedirs"), "ignored": ignored_by(words, tests)}
        return root, replace(names, folders=folders, **more), tests

    root, names, tests = read_config(read)
    try:
        top = Checkout.around(root).top
    except GitError:
        top = None
    return _Place(root, names, top, tests)


def _texts(root: Path) -> dict[str, str]:
    """Return the text of each Python file, by path from the root; not of virtual environments, builds and hidden folders."""
    return {path.relative_to(root).as_posix(): text for path in _files(root) if (text := _text(path)) is not None}


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = here / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= _LARGEST:
                yield path


def _text(path: Path) -> str | None:
    """Return a file as it is, line ends included; ``None`` where there is none. Raises `InputError`."""
    try:
        return path.read_bytes().decode("utf-8", "strict" if path.name == SETTINGS else "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}); nothing was written") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; nothing was written") from None


def _project(place: _Place) -> Project:
    root, top = place.root, place.top or place.root
    settings = _text(root / SETTINGS)
    store = (Project(settings=settings).settings_table or {}).get("store", DEFAULT_STORE)
    workflow = next((one for one in (WORKFLOW, f"{WORKFLOW[:-3]}yaml") if (top / one).exists()), None)
    return Project(
        settings=settings,
        attributes=_text(root / ATTRIBUTES),
        requirements={name: text for name in REQUIREMENTS_FILES if (text := _text(root / name)) is not None},
        gate_requirements=_text(root / GATE_REQUIREMENTS),
        workflow=workflow,
        workflow_text=None if workflow is None else _text(top / workflow),
        setup_cfg=_text(root / "setup.cfg"),
        has_setup_py=(root / "setup.py").exists(),
        folders=sorted(one.name for one in root.iterdir() if one.is_dir()),
        tests=place.tests,
        store=store.rstrip("/") if isinstance(store, str) and _is_inside(store) else None,
        in_git=place.top is not None,
        branch=USUAL_BRANCH if place.top is None else default_branch(place.top),
        folder=root.relative_to(top).as_posix() if root.is_relative_to(top) else ".",
    )


def _is_inside(store: str) -> bool:
    """Return whether a store is a folder below the root directory."""
    return not (is_url(store) or Path(store).is_absolute() or store.startswith(("~", "..")))


def _here(environment: Mapping[str, str]) -> Here:
    """Return what can be measured on here. torch is imported in processes of their own."""
    plain = looking.look(list(BUILT_IN), environment)
    emulated = looking.look([DEVICES["emulated"]], environment)
    able = {one.word for one in (*plain.devices, *emulated.devices) if one.trouble is None}
    release = plain.torch.release or emulated.torch.release
    return Here(
        has_gpu="cuda" in able,
        can_emulate=DEVICES["emulated"] in able,
        has_cpu="cpu" in able,
        torch=None if release is None else release.partition("+")[0],
        python=".".join(platform.python_version_tuple()[:2]),
        account=account(),
    )


def _show(proposed: Proposal) -> None:
    for edit in proposed.edits:
        write_lines(["", *edit.diff()])
    write_lines(["", *proposed.notes] if proposed.notes else [""])


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _asked(question: str) -> bool:
    if not _has_terminal():
        raise InputError(
            "there is no terminal to ask at: add --yes to write, or --dry-run only to look; nothing was written"
        )
    return click.confirm(question, default=True)


def _write(root: Path, edits: Sequence[Edit]) -> None:
    """Write all files, or none: each is checked before the first is written. Raises `InputError`."""
    for edit in edits:
        _check_writable(root / edit.path)
    written: list[Edit] = []
    try:
        for edit in edits:
            written.append(edit)
            write_whole(root / edit.path, edit.after, errors="surrogateescape")
    except OSError as error:
        for edit in written:
            _put_back(root / edit.path, edit.before)
        raise InputError(
            f"{edits[len(written) - 1].path} cannot be written: {error.strerror}; nothing was written"
        ) from None
    write_lines([f"wrote {os.path.normpath(edit.path)}" for edit in edits])


def _check_writable(path: Path) -> None:
    there = next(one for one in (path, *path.parents) if one.exists())
    what = "a file" if path == there else "a folder"
    if path != there and not there.is_dir():
        raise InputError(f"{path} cannot be written: {there} is a file, expected a folder; nothing was written")
    # A file is replaced, for which its folder is written to.
    for one in {there, path.parent if path == there else there}:
        if not os.access(one, os.W_OK):
            raise InputError(
                f"{path} cannot be written: {one} is {what} that you may not write to; nothing was written"
            )


def _put_back(path: Path, before: str | None) -> None:
    try:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, before, errors="surrogateescape")
    except OSError as error:
        click.echo(f"{path} could not be put back: {error.strerror}", err=True)


def _record(place: _Place, proposed: Proposal, found: FoundTests, environment: Mapping[str, str], *, yes: bool) -> None:
    """Record baselines and gate them at once, and show the end of what the sessions said; then say what is to be done next."""
    failed = False
    gates: list[list[str]] = []
    missing: list[str] = []
    verdicts: list[TestVerdict] = []
    for options in proposed.record_with:
        command = _recording(*options)
        said = f"python {' '.join(command)}"
        if not yes and not _asked(f"Record the first baselines: {said}?"):
            missing.append(said)
            continue
        write_lines(["", f"$ {said}"])
        status, of_session = _run(place, command, environment)
        verdicts += of_session
        gates.append(["-m", "pytest", "--gpumem-baseline", *options])
        failed = failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not of_session
    # They may need a network, or weights that are not here: nothing of them can be gated.
    functions = {_function(one) for one in verdicts if one.failed_by_itself}
    functions -= {_function(one) for one in verdicts if one.verdicts}
    if not _leave_out(place, proposed, found, functions):
        functions = set()
    else:
        why = "they failed by themselves (see above) and have no baseline"
        write_lines(["", f"left out of {MARK_KEY}, as {why}; once they pass, add them:"])
        write_lines([f"  {one}" for one in sorted(functions)])
    if failed or any(one.failed_by_itself and _function(one) not in functions for one in verdicts):
        write_lines(
            [
                "",
                f"not every test could be recorded (see above): fix it, or take it out of {MARK_KEY}, and run it again",
            ]
        )
        sys.exit(1)
    differing = _gate_once(place, gates, verdicts, environment)
    if differing:
        _leave_out_differing(place, proposed, found, differing, functions, environment)
    if proposed.record_elsewhere is not None:
        said = f"python {' '.join(_recording(f'--gpumem-device={proposed.record_elsewhere}'))}"
        missing.append(f"{said} (on a machine that has {proposed.record_elsewhere})")
    if missing:
        write_lines(["", "the gate needs baselines that are not recorded yet; run first:"])
        write_lines([f"  {said}" for said in missing])
    done = " and recorded" if missing else ""
    if not proposed.installs_from_nowhere:
        said = f"commit what was written{done}; `pytest --gpumem-baseline` is the gate"
    else:
        files = " and ".join(map(os.path.normpath, proposed.installs_from_nowhere))
        said = (
            f"replace {PLACEHOLDER} in {files}, and commit what was written{done}: before that `pytest --gpumem-baseline` "
            "gates here, and the workflow cannot install it"
        )
    write_lines([f"then {said}"] if missing else ["", said])


def _run(place: _Place, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, Sequence[TestVerdict]]:
    """Run the tests, show their progress and the end of what the session said, and return its exit status and its verdicts.

    Raises `Stopped`.
    """
    with TemporaryDirectory(prefix="gpumem-init-") as folder, noted_signals() as stop:
        report = Path(folder) / "report.json"
        said = _Said(Path(folder) / "output.txt")
        status = run(
            [sys.executable, *command, f"--gpumem-report={report}"],
            folder=place.root / place.tests,
            environment=environment,
            output=said.output,
            stop=stop,
            tick=said.show_progress,
        )
        said.show_end()
        if status < 0:
            write_lines(["", f"the session was ended by {_name_of(-status)}, and recorded nothing"])
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


def _gate_once(
    place: _Place,
    commands: Sequence[Sequence[str]],
    verdicts: Sequence[TestVerdict],
    environment: Mapping[str, str],
) -> set[str]:
    """Gate what was just recorded; return the test functions that fail on the same code, as their figures depend on chance."""
    failed_before = {one.nodeid for one in verdicts if one.failure is not None}
    found: set[str] = set()
    for command in commands:
        write_lines(["", f"$ python {' '.join(command)}"])
        _, of_session = _run(place, command, environment)
        found |= {_function(one) for one in of_session if one.failure is not None and one.nodeid not in failed_before}
    return found


def _leave_out_differing(
    place: _Place,
    proposed: Proposal,
    found: FoundTests,
    differing: AbstractSet[str],
    left_out: AbstractSet[str],
    environment: Mapping[str, str],
) -> None:
    """Take tests whose figures depend on chance out of the patterns and the store, beside those that were left out before."""
    why = "they failed on the code that they were recorded on (see above), so that their figures depend on chance"
    if _leave_out(place, proposed, found, differing | left_out):
        write_lines(["", f"left out of {MARK_KEY}, as {why}; once they repeat (by a seed), add them:"])
        write_lines([f"  {one}" for one in sorted(differing)])
        _prune(place, sorted(differing), environment)
    else:
        write_lines(["", f"the gate is red until these are taken out of {MARK_KEY}, or repeat (by a seed), as {why}:"])
        write_lines([f"  {one}" for one in sorted(differing)])


def _prune(place: _Place, functions: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take the baselines of test functions out of the store, or say how that is done. Raises `Stopped`."""
    with TemporaryDirectory(prefix="gpumem-init-") as folder, noted_signals() as stop:
        output = Path(folder) / "output.txt"
        command = ["-m", "pytest_gpumem.cli.main", "prune", *functions]
        status = run([sys.executable, *command], folder=place.root, environment=environment, output=output, stop=stop)
        if status != 0:
            said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            typed = f"gpumem prune {' '.join(map(shlex.quote, functions))}"
            write_lines(["", *said, f"their baselines are still in the store; once that is mended: {typed}"])


def _leave_out(place: _Place, proposed: Proposal, found: FoundTests, functions: AbstractSet[str]) -> bool:
    """Take test functions out of the patterns that were written; return whether there are some, and others are left."""
    kept = [replace(one, runs_model=False) if one.nodeid in functions else one for one in found.tests]
    edit = next((one for one in proposed.edits if one.path == SETTINGS), None)
    if not functions or edit is None or not patterns_of(kept):
        return False
    _write(place.root, [with_patterns(edit, patterns_of(found.tests), patterns_of(kept))])
    return True


def _function(verdict: TestVerdict) -> str:
    """Return the node id of a test function, without the parameters of one of its items."""
    return f"{verdict.file}::{verdict.test.partition('[')[0]}"


def _recording(*options: str) -> list[str]:
    """Return the arguments of Python that record baselines with options of pytest."""
    return ["-m", "pytest", "--gpumem-update=new", *options]
