"""``gpumem init``: proposes and writes settings and workflows for a repository with tests, and records its first baselines."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import GitError, ProposalError, StopSignal
from pytest_gpumem.base.git import USUAL_BRANCH, default_branch
from pytest_gpumem.base.units import counted, parse_seconds
from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.baselines.location import is_url
from pytest_gpumem.measuring.devices.registry import BUILT_IN
from pytest_gpumem.plugin.config.options import DEFAULT_STORE
from pytest_gpumem.plugin.config.settings import settings_of
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.console.project import check_pyproject, read_config
from pytest_gpumem.tools.console.streams import INTERRUPTED, InputError, WholeLines, input_errors, parsed, write_lines
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.init.edits import check_edits, write_edits
from pytest_gpumem.tools.init.first_baselines import FirstBaselines
from pytest_gpumem.tools.init.installing import REQUIREMENTS_FILES
from pytest_gpumem.tools.init.observing import ObservedRun, observe, summary
from pytest_gpumem.tools.init.project_tests import NOT_RUN
from pytest_gpumem.tools.init.proposal import (
    ATTRIBUTES,
    COMMENT_WORKFLOW,
    GATE_REQUIREMENTS,
    MARK_KEY,
    SETTINGS,
    WORKFLOW,
    Machine,
    Project,
    proposal,
)
from pytest_gpumem.tools.init.workflow import DEVICES, RUNNERS, account, commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pytest

    from pytest_gpumem.tools.init.proposal import Proposal
    from pytest_gpumem.tools.init.workflow import Runner

_QUESTION = (
    "This command runs your tests once, to see which tests run a model: `python -m pytest` in {folder}. Ctrl-C ends the tests "
    "and keeps the results so far. Run the tests?"
)
_NEXT = (
    f"the tests were not run. Name the tests to measure in {MARK_KEY}, and record their baselines with:",
    "  python -m pytest --gpumem-update=new",
    "then commit the written files and the recorded baselines; `pytest --gpumem-baseline` is the gate",
)
_NONE = (
    (
        f"Mark the tests to measure with @pytest.mark.gpumem, name them in [tool.gpumem] {MARK_KEY}, or measure a step with "
        f"the gpumem fixture as in the test below. Then run {command_name()} init again."
    ),
    "",
    "    def test_forward(gpumem):",
    "        model = torch.nn.Linear(512, 512).to(gpumem.device)",
    '        with gpumem.track("forward"):',
    "            model(torch.ones(64, 512, device=gpumem.device))",
)


@click.command()
@click.option("--yes", is_flag=True, help="Run the tests, write the files and record the baselines without asking.")
@click.option("--dry-run", is_flag=True, help="Show the proposed files as a diff, and write nothing.")
@click.option(
    "--no-run",
    is_flag=True,
    help=f"Do not run the tests. In the settings, a comment with an example then stands in place of `{MARK_KEY}`.",
)
@click.option(
    "--time-limit",
    metavar="DURATION",
    callback=parsed(parse_seconds),
    help='End the tests after this time, for example "10 min", and propose from the results so far.',
)
@click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    help="Propose a workflow that measures on `emulated` (an emulated GPU, on GitHub's runners), `self-hosted` (the GPU of "
    "your own runner) or `cpu` (the CPU of GitHub's runners). Default: chosen so this machine can record the baselines, if "
    "possible.",
)
def init(*, yes: bool, dry_run: bool, no_run: bool, time_limit: float | None, runner: str | None) -> None:
    """Set up a repository: settings, a workflow and first baselines.

    The command first asks whether it may run the project's tests once, with `python -m pytest`. While they run, it observes
    which tests run a model.

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
      gpumem init
      gpumem init --no-run --dry-run
      gpumem init --yes --runner emulated --time-limit "20 min"

    Exit status: 0 if everything is set up, or after --dry-run or a `no` to a question, 1 if no test runs a model, or not
    every test could be recorded, 2 for wrong usage, an invalid `pyproject.toml`, a file that cannot be read or written, if
    pytest cannot run, or if a question has no terminal, 130 after Ctrl-C at a question, 143 after SIGTERM.
    \f
    ## `--runner`

    If this option is not given, the command uses the first of these rules that applies:

    1. `cpu`, if no test uses a GPU.
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

    - `device` is `cpu` if no test uses a GPU. Otherwise, it is `cuda` on a machine with a GPU, and `auto` on a machine without
      a GPU. If torch can be imported only [on an emulated
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

    A test runs a model if one of these things happens in the test, or in the set-up of a fixture, class or module that the
    test uses:

    - A `torch.nn.Module` is called.
    - A backward pass runs.
    - An optimizer steps.

    The form of the test does not matter. For example, it may be a doctest, a coroutine, a method of a `unittest.TestCase` or
    a property test, get its model from `parametrize`, or call a helper function in another file.

    - `mark` names a test if it runs a model, passes, and allocates memory. If a test has parameters, a single passing item
      is enough.
    - The command lists tests that run a model and fail. It also lists skipped tests, because it has not seen their models.
      Patterns never match these tests.
    - Tests with the marker or the fixture `gpumem` are measured already. They do not run, and `mark` does not name them.
    - A test uses a GPU if it allocates memory on a GPU. Without a GPU, it is enough if the test's file, another file in the
      same folder, or a `conftest.py` above asks for a GPU, for example by `torch.cuda.is_available()`.

    ## While the tests run

    - The tests run with the project's own settings, for example with `-n 4` in `addopts`. A single failure does not end the
      run, even with `-x`. If the current folder is below the root directory, only its tests run and are set up.
    - torch is not imported if no test imports torch.
    - After Ctrl-C, `--time-limit` or a crash, the command proposes from the tests that have ended, and says how many did not
      run. After Ctrl-C, `--yes` no longer answers, so the command asks before it writes.
    - With `--no-run`, or a `no` to the question, no test runs. `mark` is then a comment with an example, and no baselines
      are recorded.

    ## The first baselines

    - Baselines are recorded on the device in the settings. If the workflow uses another device, baselines are also recorded on
      this other device. If this machine does not have the device, the output says which command to run on a machine with the
      device.
    - Baselines have no step times if the workflow does not time steps. Nothing is recorded if the store already has baselines.
    - If a test fails by itself, for example because it needs a network, the command removes it from `mark` and names it. The
      same happens to a test that fails the gate on the same code. If `[tool.gpumem]` existed before, the command only names
      these tests.
    - After Ctrl-C at a question, the command does not do what the question asks. After Ctrl-C while baselines are recorded, the
      baselines of finished tests are kept if pytest ends within 3 seconds.
    """
    environment = dict(os.environ)
    check_pyproject()
    place = _place()
    with _exit_if_interrupted():
        runs_tests = not no_run and (yes or _ask(_QUESTION.format(folder=place.root / place.tests)))
        machine = _this_machine(environment)
        project = _project(place)
        observed = ObservedRun(NOT_RUN)
        # Files that cannot be read or written end the command here, before the tests run.
        proposed = _checked_proposal(place, project, observed, machine, runner)
        if runs_tests:
            observed = _observe(place, project, machine, environment, time_limit)
            proposed = _checked_proposal(place, project, observed, machine, runner)
        _show(proposed)
        if not dry_run:
            # After Ctrl-C, --yes no longer answers, because the user may want to end the command.
            answers_yes = yes and not observed.interrupted
            _set_up(place, project, proposed, observed, environment, lambda question: answers_yes or _ask(question))


@contextmanager
def _exit_if_interrupted() -> Iterator[None]:
    """After Ctrl-C at a question, or a signal while tests run, exit with a shell's exit status for the signal."""
    try:
        yield
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except StopSignal as stopped:
        click.echo("\ninterrupted", err=True)
        sys.exit(stopped.exit_status)


def _checked_proposal(
    place: _Place, project: Project, observed: ObservedRun, machine: Machine, runner: str | None
) -> Proposal:
    """Return the proposal, whose files can be written. Raises `InputError`."""
    with input_errors(ProposalError):
        proposed = proposal(project, observed.tests, machine, cast("Runner | None", runner))
    check_edits(place.root, proposed.edits)
    return proposed


def _observe(
    place: _Place, project: Project, machine: Machine, environment: Mapping[str, str], seconds: float | None
) -> ObservedRun:
    """Run the tests once, and print the result. If there is no test to measure, say so and exit."""
    if not machine.has_cpu and machine.can_emulate:
        environment = {**environment, **environment_for(emulated_gpu(DEVICES["emulated"], {}), environment)}
    # With an emulated device in the settings, the plugin would deselect all tests that are not measured yet.
    is_emulated = str((project.settings_table or {}).get("device")).startswith(EMULATED)
    options = ["--gpumem-device=cuda"] if is_emulated else []
    observed = observe(place.root / place.tests, environment, options, seconds)
    write_lines([f"{place.root / place.tests}:", *summary(observed)])
    tests = observed.tests
    if not tests.proposed and not any(test.is_measured for test in tests.tests):
        if any(test.runs_model for test in tests.tests):
            why = "no test that runs a model can be measured (see above)"
        else:
            is_known = tests.imports_torch or tests.not_collected or observed.why_ended
            why = "no test was seen to run a model" if is_known else "no test imports torch"
        write_lines([f"nothing is proposed, because {why}. {_NONE[0]}", *_NONE[1:]])
        sys.exit(INTERRUPTED if observed.interrupted else 1)
    return observed


def _set_up(
    place: _Place,
    project: Project,
    proposed: Proposal,
    observed: ObservedRun,
    environment: Mapping[str, str],
    agreed: Callable[[str], bool],
) -> None:
    """Write the proposed files and record the first baselines, if the user agrees to each."""
    if observed.interrupted and not _has_terminal():
        write_lines(
            ["nothing was written, because the tests were interrupted, and there is no terminal for a question"]
        )
        sys.exit(INTERRUPTED)
    if proposed.edits and not agreed(f"Write {counted(len(proposed.edits), 'file')}?"):
        write_lines(["nothing was written"])
        return
    if proposed.edits:
        write_edits(place.root, proposed.edits)
    else:
        write_lines(["there is nothing to write"])
    store = project.store and place.root / project.store
    if store and any(store.rglob("*.toml")):
        write_lines(
            [f"{project.store} has baselines; `python -m pytest --gpumem-update=new` adds the missing baselines"]
        )
    elif observed.tests.were_run:
        try:
            FirstBaselines(place.root, place.tests, proposed, observed.tests, environment).record(agreed)
        except StopSignal:
            click.echo("\n`python -m pytest --gpumem-update=new` records the missing baselines", err=True)
            raise
    else:
        write_lines(_NEXT)


class _Place(NamedTuple):
    """The project around the current folder, and the folder whose tests are set up."""

    root: Path
    """pytest's root directory."""
    top: Path | None
    """The top folder of the git repository, or ``None`` if the project is in no repository."""
    tests: str
    """The current folder as a path from the root directory, for example ``"tests"``. Only its tests are set up."""


def _place() -> _Place:
    def read(config: pytest.Config) -> tuple[Path, str]:
        # Check the existing settings here, because init does not correct them, and every later session would fail.
        settings_of(config)
        root = config.rootpath
        return root, Path.cwd().relative_to(root).as_posix() if Path.cwd().is_relative_to(root) else "."

    root, tests = read_config(read)
    try:
        top = Checkout.around(root).top
    except GitError:
        top = None
    return _Place(root, top, tests)


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
    line = WholeLines()
    line.show("looking for torch and GPUs on this machine")
    plain = collecting.probe(list(BUILT_IN), environment)
    emulated = collecting.probe([DEVICES["emulated"]], environment)
    usable = {device.word for device in (*plain.devices, *emulated.devices) if device.trouble is None}
    release = plain.torch.release or emulated.torch.release
    line.show("")
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
            "the command cannot ask a question without a terminal, so nothing was written: add --yes to run the tests, write "
            "the files and record baselines, --yes --dry-run to run the tests and see the files, or --no-run --dry-run to see "
            "the files without running the tests"
        )
    return click.confirm(question, default=True)
