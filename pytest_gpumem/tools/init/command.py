"""``gpumem init``: proposes and writes settings and workflows for a repository with tests, and records its first baselines."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import GitError, ProposalError, StopSignal
from pytest_gpumem.base.git import USUAL_BRANCH, default_branch
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
"""Maximum bytes of a Python file. A larger file is not read, because it is assumed to contain data, not tests."""
_NONE = (
    (
        "nothing is proposed, because no test was found that runs a model. Mark the tests to measure with @pytest.mark.gpumem, "
        f"name them in [tool.gpumem] {MARK_KEY}, or measure a step with the gpumem fixture as in the test below. Then run "
        f"{command_name()} init again."
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
    help="Propose a workflow that measures on `emulated` (an emulated GPU, on GitHub's runners), `self-hosted` (the GPU of "
    "your own runner) or `cpu` (the CPU of GitHub's runners). Default: chosen so this machine can record the baselines, if "
    "possible.",
)
def init(*, yes: bool, dry_run: bool, runner: str | None) -> None:
    """Set up a repository: settings, a workflow and first baselines.

    The command finds the tests that run models. It reads the source code of all tests, and does not run any code.

    \b
    Then it proposes to write:
      pyproject.toml                        settings in `[tool.gpumem]`
      .github/workflows/gpumem.yml          a workflow that runs the gate
      .github/workflows/gpumem-comment.yml  a workflow that comments on pull requests
      requirements-gpumem.txt               the packages that the gate needs
      .gitattributes                        a line for the files with baselines

    It shows the changes as a diff, asks, and writes them. Text that is already in these files stays unchanged.

    After another question, it runs the tests to record their first baselines, and runs them again under the gate. A test
    that fails the gate on the same code has random figures, so its baseline is removed and the settings leave it out.

    \b
    Examples:
      gpumem init --dry-run
      gpumem init --yes --runner emulated

    Exit status: 0 if everything is set up, or after --dry-run or a `no` to a question, 1 if no test runs a model, or not
    every test could be recorded, 2 for wrong usage, an invalid `pyproject.toml`, a file that cannot be read or written, or if a
    question has no terminal, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    ## `--runner`

    If this option is not given, the command uses the first of these rules that applies:

    1. `cpu`, if no test that runs a model moves the model to a GPU.
    2. `self-hosted`, if this machine has a GPU.
    3. `emulated`, if this machine [can emulate a GPU](../guide/no-gpu.md#an-emulated-gpu).
    4. `cpu` in all other cases.

    ## Proposed files

    - `pyproject.toml`: a table `[tool.gpumem]` with `device`, and with `mark` for tests that run models. The command appends
      the table, so the rest of the file stays the same byte for byte.
    - `.github/workflows/gpumem.yml`, at the top of the repository: the workflow from [From nothing to a
      gate](../ci.md#from-nothing-to-a-gate), [with a real GPU](../runner.md#a-real-gpu-confirms-it) or [without any
      GPU](../ci.md#without-any-gpu). It uses the Python version of this environment.
    - `.github/workflows/gpumem-comment.yml`: the workflow that [comments on pull requests](../github.md#the-comment),
      in a job that runs no tests. GitHub starts this workflow only after it has been merged into the default branch. It is
      not proposed if `gpumem.yml` already exists.
    - `requirements-gpumem.txt`: the packages that the workflow installs.
    - `.gitattributes`: `text eol=lf` for the store, so git never changes the line ends of baselines. The command adds no rule
      that hides baselines in diffs, or that merges two versions of a baseline.

    Rules:

    - `device` is `cpu` if no test that runs a model puts anything on a GPU. Otherwise, it is `cuda` on a machine with a GPU,
      and `auto` on a machine without a GPU. If torch can be imported only [on an emulated
      GPU](../guide/no-gpu.md#an-emulated-gpu), it is `emulated:h100`.
    - `mark` has as few patterns as possible. If all tests in a folder, a file or a class run models, the pattern names the
      folder, file or class. Otherwise, patterns name single tests.
    - `requirements-gpumem.txt` lists the installed version of torch, pytest, this plugin and the project's requirements. The
      requirements come from files (`requirements.txt`, `requirements-dev.txt`, `tests/requirements.txt`, ...), from the
      dependency group `test` or `dev`, and from the project itself: the project with its extra `test` or `dev` if pip can
      install the project, otherwise its dependencies. If an extra asks for another version of torch, the packages of the
      extra are listed without torch.
    - `requirements-gpumem.txt` is not proposed if `requirements.txt` already lists this plugin and pins torch (a single line
      `torch==` without a marker), or if the version of torch is not known.
    - Workflows name every action by its commit. The plugin's own action is named by the commit that pip installed from git, or
      else by the tag of the installed release.
    - The plugin's GitHub account comes from the metadata of the installed package. If the metadata contains a placeholder
      instead of an account, the command names the files in which you must replace the placeholder.
    - The command checks all files before it writes the first. If a file cannot be written, the command restores the files that
      it has already written.

    ## Which tests run models

    A test runs a model if its body does one of these things:

    - It calls `.backward()`, an optimizer's `.step()`, a trainer's `.fit()` or `.train()`, `.generate()` or `.forward()`.
    - It calls a module that it made, got as a parameter, got from `parametrize`, or loaded with `from_pretrained`.
    - It trains an object that was made with a module class (`Classifier(Net).fit`).
    - It uses a model from transformers, diffusers, timm or `torchvision.models`.

    A test also runs a model if code that the test uses does one of these things: its fixtures, `autouse` fixtures in its
    file or in a `conftest.py`, the set-up functions of its class or module (`setUpClass`, `setup_module`), and functions of
    the project that it calls.

    - Annotations show that a parameter or a method's result is a module. The command follows imports between the project's
      modules, `usefixtures`, and base classes of test classes into other files.
    - The command does not find models if they are made in other ways. Give their tests the marker.
    - The command finds test files, classes and functions by pytest's settings (`testpaths`, `norecursedirs`, `python_files`,
      ...). It leaves out files that `collect_ignore` in a `conftest.py` or `--ignore` in `addopts` excludes. Methods `test*`
      of each `unittest.TestCase` are tests, too. If the current folder is below the root directory, only its tests are set up.
    - Tests with the marker or the fixture `gpumem` are measured already, so `mark` does not name them.
    - The command names test files that cannot be parsed. It also names test files that a `conftest.py` ignores under a
      condition, and sets up their tests.

    ## The first baselines

    - Baselines are recorded on the device in the settings. If the workflow uses another device, baselines are also recorded on
      this other device. If this machine does not have the device, the output says which command to run on a machine with the
      device.
    - Baselines have no step times if the workflow does not time steps. Nothing is recorded if the store already has baselines.
    - If a test fails by itself, for example because it needs a network, the command removes it from `mark` and names it. The
      same happens to a test that fails the gate on the same code. If `[tool.gpumem]` existed before, the command only names
      these tests.
    - After Ctrl-C at a question, the command does not do what the question asks. After Ctrl-C while tests run, the baselines of
      finished tests are kept if pytest ends within 3 seconds.
    """
    if yes and dry_run:
        raise click.UsageError("--yes and --dry-run exclude each other: leave out one of them")
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
    """Yield a warning for each test file or conftest.py with a syntax error."""
    for path, why in sources.not_parsed.items():
        if names.has_file(path) or PurePosixPath(path).name == "conftest.py":
            yield (
                f"{path} cannot be parsed ({why}), so its tests are not found. Correct this file and run {command_name()} init "
                "again, or mark its tests with @pytest.mark.gpumem"
            )


def _perhaps_ignored(found_tests: ProjectTests) -> Iterator[str]:
    """Yield a warning for each test file in a conditional ``collect_ignore`` of a conftest.py."""
    for path in found_tests.perhaps_ignored:
        yield (
            f"a conftest.py ignores {path} under a condition that is known only when pytest runs, so the tests in {path} are "
            f"set up. If pytest never collects these tests, remove them from {MARK_KEY}"
        )


class _Place(NamedTuple):
    """The project around the current folder, with the folders and the name patterns by which its tests are found."""

    root: Path
    """pytest's root directory."""
    names: Names
    """The patterns by which pytest collects files, classes and functions."""
    top: Path | None
    """The top folder of the git repository, or ``None`` if the project is in no repository."""
    tests: str
    """The current folder as a path from the root directory, for example ``"tests"``. Only its tests are set up."""


def _place() -> _Place:
    def read(config: pytest.Config) -> tuple[Path, Names, str]:
        names = Names(*map(config.getini, ("python_files", "python_classes", "python_functions")))
        # Check the existing settings here, because init does not correct them, and every later session would fail.
        settings_of(config)
        root = config.rootpath
        tests = Path.cwd().relative_to(root).as_posix() if Path.cwd().is_relative_to(root) else "."
        # If pytest starts in a folder below the root directory, it ignores testpaths and collects only that folder.
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
    """Return the text of each Python file in the project, by the file's path from the root directory.

    Files in virtual environments, build folders and hidden folders are skipped.
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
    """Return the text of a file with unchanged line ends, or ``None`` if the file does not exist. Raises `InputError`."""
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
    """Return the workflow's path with the suffix ``.yml`` or ``.yaml`` that exists; ``None`` if neither file exists."""
    return next((path for path in (workflow, f"{workflow[:-3]}yaml") if (top / path).exists()), None)


def _is_inside(store: str) -> bool:
    """Return whether the setting ``store`` names a folder below the root directory, and not a URL or another folder."""
    return not (is_url(store) or Path(store).is_absolute() or store.startswith(("~", "..")))


def _this_machine(environment: Mapping[str, str]) -> Machine:
    """Return the usable devices and the installed versions on this machine. torch is imported only in separate processes."""
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
            "the command cannot ask a question without a terminal, so nothing was written: add --yes to write the files, or "
            "--dry-run to see them"
        )
    return click.confirm(question, default=True)
