"""``gpumem init``: settings, a workflow and first baselines for a repository that has tests, proposed and then written."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.baselines.location import is_url
from pytest_gpumem.cli.edits import check_edits, write_edits
from pytest_gpumem.cli.first_baselines import FirstBaselines
from pytest_gpumem.cli.project import check_pyproject, read_config
from pytest_gpumem.cli.streams import INTERRUPTED, InputError, input_errors, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.config.options import DEFAULT_STORE
from pytest_gpumem.config.settings import settings_of
from pytest_gpumem.devices.registry import BUILT_IN
from pytest_gpumem.doctor import looking
from pytest_gpumem.git import USUAL_BRANCH, GitError, default_branch
from pytest_gpumem.init.addopts import addopts_of, ignored_by
from pytest_gpumem.init.found_tests import Names, find_tests
from pytest_gpumem.init.installing import REQUIREMENTS_FILES
from pytest_gpumem.init.proposal import (
    ATTRIBUTES,
    COMMENT_WORKFLOW,
    GATE_REQUIREMENTS,
    MARK_KEY,
    SETTINGS,
    WORKFLOW,
    Here,
    Project,
    ProposalError,
    counts,
    proposal,
)
from pytest_gpumem.init.sources import sources_of
from pytest_gpumem.init.workflow import DEVICES, RUNNERS, account, commit
from pytest_gpumem.processes import Stopped
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

    from pytest_gpumem.init.found_tests import FoundTests
    from pytest_gpumem.init.proposal import Proposal
    from pytest_gpumem.init.sources import Sources
    from pytest_gpumem.init.workflow import Runner

_SKIPPED = frozenset({"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"})
_LARGEST = 2**20
"""Bytes of a source file that is read: larger ones are data."""
_NONE = (
    (
        "nothing is proposed: no test was found that runs a model. Mark those that do with @pytest.mark.gpumem, name them in "
        f"[tool.gpumem] {MARK_KEY}, or measure a step with the gpumem fixture; then run {command_name()} init again. "
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
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    help="The machine that the workflow runs on; if not given, one that baselines can be recorded for here.",
)
def init(*, yes: bool, dry_run: bool, runner: str | None) -> None:
    """Set a repository up: settings, a workflow for GitHub, and first baselines.

    Finds the tests that run models by reading their source, never by running it. Proposes `[tool.gpumem]` in pyproject.toml,
    .github/workflows/gpumem.yml with the requirements that it installs, gpumem-comment.yml beside it, which comments on pull
    requests, and a line of .gitattributes. Shows the changes, asks, and writes; then asks to record the first baselines.
    Existing files and sections are not changed.

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
        write_lines(_NONE)
        sys.exit(1)
    project = _project(place)
    with input_errors(ProposalError):
        proposed = proposal(project, found, _here(environment), cast("Runner | None", runner))
    check_edits(place.root, proposed.edits)
    _show(proposed)
    if dry_run:
        return
    try:
        if proposed.edits and (yes or _asked(f"Write {counted(len(proposed.edits), 'file')}?")):
            write_edits(place.root, proposed.edits)
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
            first = FirstBaselines(place.root, place.tests, proposed, found, environment)
            first.record(lambda question: yes or _asked(question))
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except Stopped as stopped:
        more = "`python -m pytest --gpumem-update=new` records the baselines that are missing"
        click.echo(f"\ninterrupted: {more}", err=True)
        sys.exit(stopped.exit_status)


def _not_read(sources: Sources, names: Names) -> Iterator[str]:
    """Yield a sentence for each file of tests that cannot be parsed."""
    for path, why in sources.not_parsed.items():
        if names.has_file(path) or PurePosixPath(path).name == "conftest.py":
            yield (
                f"{path} cannot be parsed ({why}): what is in it is not seen. Correct it and run {command_name()} init again, "
                "or mark its tests"
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
    workflow, comment_workflow = (_there(top, path) for path in (WORKFLOW, COMMENT_WORKFLOW))
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
        folders=sorted(one.name for one in root.iterdir() if one.is_dir()),
        tests=place.tests,
        store=store.rstrip("/") if isinstance(store, str) and _is_inside(store) else None,
        in_git=place.top is not None,
        branch=USUAL_BRANCH if place.top is None else default_branch(place.top),
        folder=root.relative_to(top).as_posix() if root.is_relative_to(top) else ".",
    )


def _there(top: Path, workflow: str) -> str | None:
    """Return the path of a workflow that is there, with either suffix."""
    return next((path for path in (workflow, f"{workflow[:-3]}yaml") if (top / path).exists()), None)


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
        commit=commit(),
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
