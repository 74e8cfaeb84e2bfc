"""``gpumem init``: proposes and writes settings, a workflow and first baselines for a repository that has tests."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.git import USUAL_BRANCH, GitError, default_branch
from pytest_gpumem.base.processes import StopSignal
from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.baselines.location import is_url
from pytest_gpumem.measuring.devices.registry import BUILT_IN
from pytest_gpumem.plugin.config.options import DEFAULT_STORE
from pytest_gpumem.plugin.config.settings import settings_of
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.console.project import check_pyproject, read_config
from pytest_gpumem.tools.console.streams import INTERRUPTED, InputError, input_errors, write_lines
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.init.addopts import addopts_of, ignored_by
from pytest_gpumem.tools.init.edits import check_edits, write_edits
from pytest_gpumem.tools.init.first_baselines import FirstBaselines
from pytest_gpumem.tools.init.installing import REQUIREMENTS_FILES
from pytest_gpumem.tools.init.project_tests import Names, find_tests
from pytest_gpumem.tools.init.proposal import (
    ATTRIBUTES,
    COMMENT_WORKFLOW,
    GATE_REQUIREMENTS,
    MARK_KEY,
    SETTINGS,
    WORKFLOW,
    Machine,
    Project,
    ProposalError,
    counts,
    proposal,
)
from pytest_gpumem.tools.init.sources import sources_of
from pytest_gpumem.tools.init.workflow import DEVICES, RUNNERS, account, commit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

    from pytest_gpumem.tools.init.project_tests import ProjectTests
    from pytest_gpumem.tools.init.proposal import Proposal
    from pytest_gpumem.tools.init.sources import Sources
    from pytest_gpumem.tools.init.workflow import Runner

_SKIPPED = frozenset({"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"})
_LARGEST = 2**20
"""Maximum bytes of a source file. Larger files are assumed to be data."""
_NONE = (
    (
        "nothing is proposed, because no test was found that runs a model. Mark such tests with @pytest.mark.gpumem, name them "
        f"in [tool.gpumem] {MARK_KEY}, or measure a step with the gpumem fixture; then run {command_name()} init again. "
        "For example:"
    ),
    "",
    "    def test_forward(gpumem):",
    "        model = torch.nn.Linear(512, 512).to(gpumem.device)",
    '        with gpumem.track("forward"):',
    "            model(torch.ones(64, 512, device=gpumem.device))",
)


@click.command()
@click.option("--yes", is_flag=True, help="Write the files and record the baselines without asking.")
@click.option("--dry-run", is_flag=True, help="Show the proposed files as a diff, and write nothing.")
@click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    help="Propose a workflow for this machine: `emulated` (an emulated GPU on GitHub's runners), `self-hosted` (a runner "
    "with a GPU) or `cpu` (GitHub's runners, models on the CPU). Default: a machine whose baselines can be recorded here.",
)
def init(*, yes: bool, dry_run: bool, runner: str | None) -> None:
    """Set up a repository: settings, a workflow and first baselines.

    The command finds the tests that run models by reading their source, never by running it. It proposes
    `[tool.gpumem]` in `pyproject.toml`, a workflow in `.github/workflows/gpumem.yml` with its
    `requirements-gpumem.txt`, the workflow `gpumem-comment.yml`, which comments on pull requests, and a line in
    `.gitattributes`. It shows the changes as a diff, asks, and writes. Existing files and sections are not changed.

    Then it asks to record the first baselines, shows the end of that session, and runs the gate once on the same code.
    Tests that fail there have figures that depend on chance, so their baselines are removed and the settings leave them
    out.

    \b
    Examples:
      gpumem init --dry-run
      gpumem init --yes --runner emulated

    Exit status: 0 if everything is set up, shown or declined, 1 if no test runs a model, so nothing was written, or
    if not every test could be recorded, 2 for wrong usage, an invalid `pyproject.toml`, a file that cannot be read or
    written, or a question without a terminal, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    ## `--runner`

    Without this option, the command takes the first line with a true condition:

    1. `cpu`, if no test that runs a model puts it on a GPU.
    2. `self-hosted`, if this machine has a GPU.
    3. `emulated`, if this machine [can emulate a GPU](../guide/no-gpu.md#an-emulated-gpu).
    4. `cpu`.

    ## Proposed files

    - `pyproject.toml`: `[tool.gpumem]` with `device`, and with `mark` for tests that run models. It is appended, and
      the rest of the file stays the same byte for byte.
    - `.github/workflows/gpumem.yml`: the workflow of [From nothing to a gate](../ci.md#from-nothing-to-a-gate), [with a
      real GPU](../runner.md#a-real-gpu-confirms-it) or [without any GPU](../ci.md#without-any-gpu), with the Python
      version of this environment, at the top of the repository.
    - `.github/workflows/gpumem-comment.yml`: the workflow that [comments on pull requests](../github.md#the-comment),
      in a job that runs no tests. GitHub starts it once it is on the default branch. It is not proposed if `gpumem.yml`
      exists.
    - `requirements-gpumem.txt`: the packages of the workflow, see below.
    - `.gitattributes`: `text eol=lf` for the store, so no checkout changes its line ends. No rule hides baselines in
      diffs or merges two versions of a baseline.

    Rules:

    - `device` is `cpu` if no test that runs a model puts anything on a GPU. Otherwise it is `cuda` on a machine with a
      GPU and `auto` on a machine without one. It is `emulated:h100` if torch can only be imported [on an emulated
      GPU](../guide/no-gpu.md#an-emulated-gpu).
    - `mark` has as few patterns as possible: a folder, a file or a class, if all of its tests run models, else single
      tests.
    - `requirements-gpumem.txt` has the installed version of torch, pytest, the plugin and the project's requirements:
      files (`requirements.txt`, `requirements-dev.txt`, `tests/requirements.txt`, ...), the dependency group `test` or
      `dev`, and the project with its extra `test` or `dev` if pip can install it, else its dependencies. If an extra
      asks for another version of torch, its lines are listed without torch.
    - `requirements-gpumem.txt` is not proposed if `requirements.txt` has the plugin and a pinned torch (one line
      `torch==` without a marker), or if the version of torch is not known.
    - Workflows name every action by commit. For the plugin's own action this is the commit that pip installed from git,
      or else the tag of the installed release.
    - The GitHub account of the plugin comes from the installed package's metadata. If the metadata has a placeholder,
      the command names the files in which to replace it.
    - All files are checked before the first is written, and restored if a later one cannot be written.

    ## Which tests run models

    - A test runs a model if its body does one of these things: calls `.backward()`, an optimizer's `.step()`, a
      trainer's `.fit()` or `.train()`, `.generate()` or `.forward()`; calls a module that it made, was given, has from
      `parametrize` or loaded with `from_pretrained`; trains an object made from a class of modules
      (`Classifier(Net).fit`); uses a model from transformers, diffusers, timm or `torchvision.models`.
    - The same holds for code that the test uses: its fixtures, `autouse` fixtures of its file and of each
      `conftest.py`, the set-up functions of its class or module (`setUpClass`, `setup_module`), and the project's
      functions that it calls.
    - Annotations also say that a parameter or a method's result is a module. Imports between the project's modules,
      `usefixtures` and base classes of test classes are followed into other files.
    - Models made in other ways are not found. Give their tests the marker.
    - Test files, classes and functions are those of pytest's settings (`testpaths`, `norecursedirs`, `python_files`,
      ...), without `collect_ignore` in a `conftest.py` and `--ignore` in `addopts`, and with the methods `test*` of
      each `unittest.TestCase`. In a folder below the root directory, they are the tests of that folder.
    - Tests with the marker or the fixture are measured as they are.
    - Test files that cannot be parsed are named. So are files that a `conftest.py` ignores under a condition; their
      tests count.

    ## The first baselines

    - They are recorded for the device of the settings, and for the workflow's device if it is another one that this
      machine can measure. Otherwise the command prints the command for a machine that has the device.
    - They have no step times if the workflow takes none. They are not recorded if the store has baselines.
    - Tests that failed by themselves, for example without a network, are left out of `mark` and named. So are tests
      that fail the gate on the same code. If `[tool.gpumem]` existed before, they are only named.
    - After Ctrl-C at a question, the files or baselines in question are not written. After Ctrl-C while
      tests run, the baselines of finished tests are kept if pytest ends within 3 seconds.
    """
    if yes and dry_run:
        raise click.UsageError("--yes and --dry-run exclude each other: add one of them")
    environment = dict(os.environ)
    check_pyproject()
    place = _place()
    sources = sources_of(_texts(place.root))
    found_tests = find_tests(sources, place.names)
    write_lines(
        [
            f"{place.root / place.tests}: {counts(found_tests)}",
            *_unparsed_files(sources, place.names),
            *_perhaps_ignored(found_tests),
        ]
    )
    if not any(test.runs_model or test.is_measured for test in found_tests.tests):
        write_lines(_NONE)
        sys.exit(1)
    project = _project(place)
    with input_errors(ProposalError):
        proposed = proposal(project, found_tests, _this_machine(environment), cast("Runner | None", runner))
    check_edits(place.root, proposed.edits)
    _show(proposed)
    if dry_run:
        return
    try:
        if proposed.edits and (yes or _ask(f"Write {counted(len(proposed.edits), 'file')}?")):
            write_edits(place.root, proposed.edits)
        elif proposed.edits:
            write_lines(["nothing was written"])
            return
        else:
            write_lines(["there is nothing to write"])
        store = project.store and place.root / project.store
        if store and any(store.rglob("*.toml")):
            write_lines(
                [f"{project.store} has baselines; `python -m pytest --gpumem-update=new` adds the missing baselines"]
            )
        else:
            first = FirstBaselines(place.root, place.tests, proposed, found_tests, environment)
            first.record(lambda question: yes or _ask(question))
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except StopSignal as stopped:
        hint = "`python -m pytest --gpumem-update=new` records the missing baselines"
        click.echo(f"\ninterrupted: {hint}", err=True)
        sys.exit(stopped.exit_status)


def _unparsed_files(sources: Sources, names: Names) -> Iterator[str]:
    """Yield a sentence for each test file or conftest.py that cannot be parsed."""
    for path, why in sources.not_parsed.items():
        if names.has_file(path) or PurePosixPath(path).name == "conftest.py":
            yield (
                f"{path} cannot be parsed ({why}), so its tests are not found. Correct it and run {command_name()} init again, "
                "or mark its tests"
            )


def _perhaps_ignored(found_tests: ProjectTests) -> Iterator[str]:
    """Yield a sentence for each file that pytest may not collect."""
    for path in found_tests.perhaps_ignored:
        yield (
            f"a conftest.py ignores {path} under a condition that is only known when it runs, so its tests are counted. If "
            f"pytest never collects them, remove them from {MARK_KEY}"
        )


class _Place(NamedTuple):
    """The project around the current folder: its root directory, test names, repository and tests."""

    root: Path
    """pytest's root directory."""
    names: Names
    """The patterns by which pytest collects files, classes and functions."""
    top: Path | None
    """The top of the git repository, or ``None`` outside a repository."""
    tests: str
    """The current folder, whose tests are set up, as a path from the root directory."""


def _place() -> _Place:
    def read(config: pytest.Config) -> tuple[Path, Names, str]:
        names = Names(*map(config.getini, ("python_files", "python_classes", "python_functions")))
        # init leaves existing settings unchanged, and wrong settings would end every session.
        settings_of(config)
        root = config.rootpath
        tests = Path.cwd().relative_to(root).as_posix() if Path.cwd().is_relative_to(root) else "."
        # In a folder below the root directory, pytest ignores testpaths and collects that folder.
        folders = config.getini("testpaths") if tests == "." else [tests]
        addopts = addopts_of(config.inipath.name, _text(config.inipath) or "") if config.inipath is not None else ()
        excluded = {"not_entered": config.getini("norecursedirs"), "ignored": ignored_by(addopts, tests)}
        return root, replace(names, folders=folders, **excluded), tests

    root, names, tests = read_config(read)
    try:
        top = Checkout.around(root).top
    except GitError:
        top = None
    return _Place(root, names, top, tests)


def _texts(root: Path) -> dict[str, str]:
    """Return the text of each Python file by its path from the root.

    Virtual environments, builds and hidden folders are left out.
    """
    return {path.relative_to(root).as_posix(): text for path in _files(root) if (text := _text(path)) is not None}


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        parent = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.startswith(".") and not (parent / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = parent / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= _LARGEST:
                yield path


def _text(path: Path) -> str | None:
    """Return the text of a file with its line ends, or ``None`` if the file does not exist. Raises `InputError`."""
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
    workflow, comment_workflow = (_existing(top, path) for path in (WORKFLOW, COMMENT_WORKFLOW))
    return Project(
        settings=settings,
        attributes=_text(root / ATTRIBUTES),
        requirements={name: text for name in REQUIREMENTS_FILES if (text := _text(root / name)) is not None},
        gate_requirements=_text(root / GATE_REQUIREMENTS),
        workflow=workflow,
        workflow_text=None if workflow is None else _text(top / workflow),
        comment_workflow=comment_workflow,
        comment_workflow_text=None if comment_workflow is None else _text(top / comment_workflow),
        setup_cfg=_text(root / "setup.cfg"),
        has_setup_py=(root / "setup.py").exists(),
        folders=sorted(path.name for path in root.iterdir() if path.is_dir()),
        tests=place.tests,
        store=store.rstrip("/") if isinstance(store, str) and _is_inside(store) else None,
        in_git=place.top is not None,
        branch=USUAL_BRANCH if place.top is None else default_branch(place.top),
        folder=root.relative_to(top).as_posix() if root.is_relative_to(top) else ".",
    )


def _existing(top: Path, workflow: str) -> str | None:
    """Return an existing workflow's path, with the suffix ``.yml`` or ``.yaml``; ``None`` if neither file exists."""
    return next((path for path in (workflow, f"{workflow[:-3]}yaml") if (top / path).exists()), None)


def _is_inside(store: str) -> bool:
    """Return whether a store is a folder below the root directory."""
    return not (is_url(store) or Path(store).is_absolute() or store.startswith(("~", "..")))


def _this_machine(environment: Mapping[str, str]) -> Machine:
    """Return the devices and versions on this machine. torch is imported in separate processes."""
    plain = collecting.probe(list(BUILT_IN), environment)
    emulated = collecting.probe([DEVICES["emulated"]], environment)
    usable = {device.word for device in (*plain.devices, *emulated.devices) if device.trouble is None}
    release = plain.torch.release or emulated.torch.release
    return Machine(
        has_gpu="cuda" in usable,
        can_emulate=DEVICES["emulated"] in usable,
        has_cpu="cpu" in usable,
        torch=None if release is None else release.partition("+")[0],
        python=".".join(platform.python_version_tuple()[:2]),
        account=account(),
        commit=commit(),
    )


def _show(proposed: Proposal) -> None:
    for edit in proposed.edits:
        write_lines(["", *edit.diff()])
    write_lines(["", *proposed.notes] if proposed.notes else [""])


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(question: str) -> bool:
    if not _has_terminal():
        raise InputError(
            "there is no terminal for the question, so nothing was written: add --yes to write the files, or --dry-run to see "
            "them"
        )
    return click.confirm(question, default=True)
