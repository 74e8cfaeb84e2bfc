"""Propose the files with which a project sets up the gate, or the lines to add to existing files.

The functions are pure. They never change an existing settings section or workflow. Instead, a note says what the user can add.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import ProposalError
from pytest_gpumem.base.git import USUAL_BRANCH
from pytest_gpumem.base.toml import read_toml
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.values.option_words import DEFAULT_DEVICE, EMULATED
from pytest_gpumem.plugin.config.settings import matches_test
from pytest_gpumem.tools.init.installing import Sources, lines_of, unfit_of
from pytest_gpumem.tools.init.patterns import patterns_of
from pytest_gpumem.tools.init.workflow import (
    DEVICES,
    PLACEHOLDER,
    REQUIREMENTS,
    UNTIMED,
    Runner,
    comment_workflow,
    gate_lines,
    has_all,
    installs_from_nowhere,
    template,
    workflow,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.tools.init.project_tests import ProjectTests

MARK_KEY = "mark"
"""The key of ``[tool.gpumem]`` with patterns for the tests to measure."""
SETTINGS, ATTRIBUTES, WORKFLOW, COMMENT_WORKFLOW, GATE_REQUIREMENTS = (
    "pyproject.toml",
    ".gitattributes",
    ".github/workflows/gpumem.yml",
    ".github/workflows/gpumem-comment.yml",
    "requirements-gpumem.txt",
)
_NO_END = "\\ No newline at end of file"
_PINNED = "# The gate's packages. Figures depend on the version of torch: change it together with the baselines."


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices on this machine, and the installed releases of torch, Python and pytest-gpumem."""

    has_gpu: bool = False
    can_emulate: bool = False
    has_cpu: bool = True
    """False if the installed torch works only with an emulated GPU."""
    torch: str | None = None
    """The torch release without its build tag, such as ``"2.13.0"`` for ``2.13.0+cu128``."""
    python: str | None = None
    """The Python version with which baselines are recorded, such as ``"3.13"``."""
    account: str = PLACEHOLDER
    """The GitHub account with pytest-gpumem's repository."""
    commit: str | None = None
    """The commit of the installed pytest-gpumem, if known."""

    def can_measure(self, device: str) -> bool:
        """Return whether this machine can measure on a device. Devices from plugins are assumed to work."""
        if device.startswith(EMULATED):
            return self.can_emulate
        return {"cuda": self.has_gpu, "cpu": self.has_cpu}.get(device, True)


@dataclass(frozen=True, slots=True)
class Project:
    """The files in a project. The text of a missing file is ``None``."""

    settings: str | None = None
    attributes: str | None = None
    requirements: Mapping[str, str] = field(default_factory=dict)
    """Texts of requirements files, by path."""
    gate_requirements: str | None = None
    workflow: str | None = None
    """The existing workflow's path."""
    workflow_text: str | None = None
    comment_workflow: str | None = None
    """The existing comment workflow's path."""
    comment_workflow_text: str | None = None
    setup_cfg: str | None = None
    has_setup_py: bool = False
    folders: Sequence[str] = ()
    """The folders beside pyproject.toml."""
    tests: str = "."
    """The folder with the gated tests, as a path from the project's folder."""
    store: str | None = "gpumem-baselines"
    """The store's path from the project's folder, or ``None`` if the store is outside this folder."""
    in_git: bool = True
    branch: str = USUAL_BRANCH
    """The base branch for pull requests."""
    folder: str = "."
    """The project's path in the repository."""

    @property
    def to_top(self) -> str:
        """The path from the project's folder to the repository's top folder, such as ``"../../"`` for ``"packages/a"``."""
        return "" if self.folder == "." else "../" * len(self.folder.split("/"))

    @property
    def parsed_settings(self) -> dict[str, Any]:
        """The parsed pyproject.toml. Raises `ProposalError` if the text is not TOML."""
        try:
            parsed: dict[str, Any] = read_toml(self.settings or "")
        except ValueError as error:
            raise ProposalError(f"{SETTINGS} cannot be parsed: {error}; nothing was written") from None
        return parsed

    @property
    def settings_table(self) -> dict[str, Any] | None:
        """The table ``[tool.gpumem]``, or ``None`` if missing. Raises `ProposalError` as `parsed_settings` does."""
        tools = self.parsed_settings.get("tool")
        table = tools.get("gpumem") if isinstance(tools, dict) else None
        return table if isinstance(table, dict) else None


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to a file. ``path`` is relative to the project's folder. ``before`` is the old text, or ``None`` for a new
    file.
    """

    path: str
    before: str | None
    after: str

    def diff(self) -> list[str]:
        """Return the change as lines of a unified diff."""
        old, new = _lines(self.before or ""), _lines(self.after)
        name = "/dev/null" if self.before is None else f"a/{self.path}"
        changes = difflib.unified_diff(old, new, name, f"b/{self.path}", lineterm="")
        return [part for line in changes for part in line.split("\n")]


def _lines(text: str) -> list[str]:
    """Split a text into lines as git does. Only LF ends a line. If the last line has no LF, git's remark about this is
    added.
    """
    *lines, last = text.split("\n")
    return [*lines, f"{last}\n{_NO_END}"] if last else lines


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposed edits, notes for the user, and the pytest options for each run to record the first baselines."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...]
    record_with: tuple[tuple[str, ...], ...]
    record_elsewhere: str | None = None
    """The device in the workflow, if this machine does not have this device. Its baselines are recorded elsewhere."""
    installs_from_nowhere: tuple[str, ...] = ()
    """The paths of files with `PLACEHOLDER` as the GitHub account. pip cannot install pytest-gpumem from this account."""


def chosen_runner(tests: ProjectTests, machine: Machine) -> tuple[Runner, str]:
    """Return a kind of runner for whose device this machine can record baselines, and the reason for the choice as a clause."""
    if not tests.on_gpu and machine.has_cpu:
        return "cpu", "nothing is measured on a GPU"
    if machine.has_gpu:
        return "self-hosted", "this machine has a GPU"
    if machine.can_emulate:
        return "emulated", "this machine has no GPU and can emulate one"
    return "cpu", f"this machine has no GPU and cannot emulate one (see `{command_name()} doctor`)"


def proposal(project: Project, tests: ProjectTests, machine: Machine, runner: Runner | None) -> Proposal:
    """Return the edits and notes for a project's set-up.

    Args:
        project: The project's files.
        tests: The project's tests.
        machine: This machine's devices and releases.
        runner: The kind of machine for the gate, or ``None`` to choose by `chosen_runner`.

    Raises:
        ProposalError: pyproject.toml is not valid TOML, or no section can be added to it.
    """
    device, why_device = _device(tests, machine)
    table = project.settings_table
    edits: list[Edit] = []
    notes: list[str] = []
    if table is None:
        edits.append(_settings(project, device, why_device, tests))
    else:
        notes.append(f"{SETTINGS} has [tool.gpumem], which is not changed{_lacking(table, tests)}")
        device = str(table.get("device", DEFAULT_DEVICE))
        tests = replace(tests, on_gpu=device != "cpu")
    chosen, why_runner = (runner, "you chose it") if runner is not None else chosen_runner(tests, machine)
    notes += _attributes(project, edits)
    notes += _workflow(project, chosen, why_runner, machine, edits)
    gated = DEVICES[chosen]
    measured_device = {"auto": "cuda" if machine.has_gpu else "cpu"}.get(device, device)
    # Do not record times if the workflow does not compare times, because timing takes most of a run.
    gate_options = (UNTIMED,) if UNTIMED in template(chosen) else ()
    record = [gate_options if gated == measured_device else ()] if machine.can_measure(measured_device) else []
    elsewhere = None
    if gated != measured_device and machine.can_measure(gated):
        record.append((f"--gpumem-device={gated}", *gate_options))
    elif not machine.can_measure(gated):
        elsewhere = gated
        notes.append(
            f"the workflow gates on {gated}, which this machine does not have: record the baselines on a machine that has it, "
            f"with `python -m pytest --gpumem-update=new --gpumem-device={gated}`"
        )
    paths_with_placeholder = tuple(_installing_from_nowhere(project, edits))
    if paths_with_placeholder:
        notes.append(
            f"{PLACEHOLDER} stands for the GitHub account of pytest-gpumem, which this package does not know: replace it in "
            f"{' and '.join(paths_with_placeholder)}, or the workflow cannot install the gate"
        )
    return Proposal(tuple(edits), tuple(notes), tuple(record), elsewhere, paths_with_placeholder)


def _installing_from_nowhere(project: Project, edits: Sequence[Edit]) -> Iterator[str]:
    current_texts = {
        GATE_REQUIREMENTS: project.gate_requirements,
        f"{project.to_top}{project.workflow or WORKFLOW}": project.workflow_text,
        f"{project.to_top}{project.comment_workflow or COMMENT_WORKFLOW}": project.comment_workflow_text,
    }
    for path, text in {**current_texts, **{edit.path: edit.after for edit in edits}}.items():
        if installs_from_nowhere(text):
            yield path


def _lacking(table: Mapping[str, Any], tests: ProjectTests) -> str:
    """Return the end of a note: the patterns to add to an existing ``[tool.gpumem]``. Empty if no pattern is missing."""
    mark_value = table.get(MARK_KEY)
    patterns = [str(pattern) for pattern in mark_value] if isinstance(mark_value, list) else []
    unnamed = [
        test
        for test in tests.tests
        if test.is_proposed and not any(_names(pattern, test.nodeid) for pattern in patterns)
    ]
    if not unnamed:
        return ""
    missing = patterns_of([test if test in unnamed else replace(test, runs_model=False) for test in tests.tests])
    unnamed_tests = counted(len(unnamed), "test that runs models", "tests that run models")
    return f"; it does not name {unnamed_tests}. To measure them, add to its {MARK_KEY}: {_array(missing, '')}"


def _names(pattern: str, nodeid: str) -> bool:
    """Return whether a pattern matches a test function, or the items of a parametrized test function."""
    return matches_test(pattern, nodeid) or matches_test(pattern, f"{nodeid}[]")


def _device(tests: ProjectTests, machine: Machine) -> tuple[str, str]:
    if not machine.has_cpu and machine.can_emulate:
        return "emulated:h100", "The installed torch can only be loaded for an emulated GPU."
    if not tests.on_gpu:
        return "cpu", "No test uses a GPU, so there is nothing to measure on a GPU."
    if machine.has_gpu:
        return (
            "cuda",
            "The project was set up on a machine with a GPU. Without a GPU, a test session fails with a message.",
        )
    return (
        "auto",
        "This means the GPU if the machine has a GPU, and the CPU otherwise. Each device has its own baselines.",
    )


def _settings(project: Project, device: str, why: str, tests: ProjectTests) -> Edit:
    text = project.settings
    newline = "\r\n" if "\r\n" in (text or "") else "\n"
    lines = ["[tool.gpumem]", f"# {why}", f"device = {json.dumps(device)}"]
    if patterns := patterns_of(tests.tests):
        lines += ["# These tests run models. They are measured as if they had @pytest.mark.gpumem."]
        lines += f"{MARK_KEY} = {_array(patterns, chr(10))}".split("\n")
    elif not tests.were_run:
        lines += [
            "# Name the tests that run models. They are measured as if they had @pytest.mark.gpumem. For example:"
        ]
        lines += [f"# {MARK_KEY} = {_array(('tests/test_model.py', 'tests/test_train.py::test_step*'), '')}"]
    gap = ("" if text.endswith("\n") else newline) + newline if text else ""
    after = (text or "") + gap + "".join(f"{line}{newline}" for line in lines)
    try:
        read_toml(after)
    except ValueError:
        # `tool = {...}` is an inline table, to which TOML allows no further section.
        raise ProposalError(
            f"`tool` in {SETTINGS} is an inline table, to which no section can be added; write [tool.gpumem] by hand: "
            f"{'; '.join(line for line in lines if not line.startswith('#'))}; nothing was written"
        ) from None
    return Edit(SETTINGS, text, after)


def with_patterns(edit: Edit, old_patterns: Sequence[str], new_patterns: Sequence[str]) -> Edit:
    """Return a further edit of pyproject.toml that replaces the patterns written by an earlier edit."""
    newline = "\r\n" if "\r\n" in edit.after else "\n"
    old, new = (_array(patterns, newline) for patterns in (old_patterns, new_patterns))
    head, _, tail = edit.after.rpartition(old)
    return Edit(edit.path, edit.after, f"{head}{new}{tail}")


def _array(patterns: Sequence[str], line_break: str) -> str:
    texts = [json.dumps(pattern, ensure_ascii=False) for pattern in patterns]
    if not line_break:
        return f"[{', '.join(texts)}]"
    return "[" + "".join(f"{line_break}    {text}," for text in texts) + f"{line_break}]"


def _attributes(project: Project, edits: list[Edit]) -> Iterator[str]:
    """Propose a rule for .gitattributes with which git does not convert line ends in the store's files.

    The rule does not hide baselines in diffs, because changes to baselines are reviewed.
    """
    if project.store is None:
        return
    if not project.in_git:
        yield f"this is not a git repository: commit and review the baselines in {project.store}/ together with the code"
        return
    text = project.attributes
    if any(_covers_store(line, project.store) for line in (text or "").splitlines()):
        yield f"{ATTRIBUTES} has a rule for {project.store}, so it is not changed"
        return
    gap = "" if not text or text.endswith("\n") else "\n"
    edits.append(Edit(ATTRIBUTES, text, f"{text or ''}{gap}{_pattern_below(project.store)} text eol=lf\n"))


def _pattern_below(folder: str) -> str:
    """Return the .gitattributes pattern for all files below a folder, quoted if git requires quotes."""
    pattern = f"/{_literal_pattern(folder)}/**"
    return json.dumps(pattern, ensure_ascii=False) if re.search(r'[\s"\\]', pattern) else pattern


def _literal_pattern(folder: str) -> str:
    """Escape a folder's name, so git does not treat brackets and stars in the name as wildcards."""
    return re.sub(r"[*?\[\]\\]", r"\\\g<0>", folder)


def _covers_store(line: str, store: str) -> bool:
    """Return whether a .gitattributes line applies to all files, or to all baselines, in a store. A line for only some
    baselines does not count.
    """
    match = re.match(r'\s*(?:("(?:[^"\\]|\\.)*")|([^\s#"]\S*))', line)
    if match is None:
        return False
    try:
        pattern = match[2] or json.loads(match[1])
    except ValueError:  # git quotes a name that is not in UTF-8 with octal escapes, which JSON does not have
        return False
    folders = "|".join(map(re.escape, (store, _literal_pattern(store))))
    return re.fullmatch(rf"/?(?:{folders})/(\*\*?/)?\*\*?(\.toml)?", pattern) is not None


def _workflow(project: Project, runner: Runner, why: str, machine: Machine, edits: list[Edit]) -> Iterator[str]:
    up = project.to_top
    if project.workflow is not None:
        yield f"{up}{project.workflow} exists and is not changed; check that it runs `python -m pytest --gpumem-baseline`"
        return
    requirements = REQUIREMENTS
    if not has_all(project.requirements.get(REQUIREMENTS)):
        requirements = GATE_REQUIREMENTS
        sources = Sources(
            project.parsed_settings, project.setup_cfg, project.has_setup_py, project.folders, project.requirements
        )
        lines = gate_lines(machine.torch, list(lines_of(sources, machine.torch)), machine.account)
        if project.gate_requirements is not None:
            yield f"{GATE_REQUIREMENTS} exists and is not changed; the workflow installs from it"
        elif machine.torch is not None:
            edits.append(Edit(GATE_REQUIREMENTS, None, "".join(f"{line}\n" for line in (_PINNED, *lines))))
            for path, line in unfit_of(sources, machine.torch):
                yield (
                    f"{path} requires {line!r}, but torch {machine.torch} is installed, and pip installs only one version. "
                    f"Install the required version and run {command_name()} init again, or let {path} allow {machine.torch}"
                )
        else:
            yield (
                f"{GATE_REQUIREMENTS} is not proposed, because the version of torch to pin is not known here. The workflow "
                f"installs from this file, so write it with these lines: {', '.join(lines)}"
            )
    text = workflow(
        runner,
        requirements,
        project.folder,
        project.tests,
        branch=project.branch,
        account=machine.account,
        commit=machine.commit,
        python=machine.python,
    )
    edits.append(Edit(f"{up}{WORKFLOW}", None, text))
    yield f"the workflow is for --runner={runner}, because {why}"
    if project.comment_workflow is not None:
        yield f"{up}{project.comment_workflow} exists and is not changed; check that it names the gate's workflow"
        return
    edits.append(Edit(f"{up}{COMMENT_WORKFLOW}", None, comment_workflow(machine.account, machine.commit)))
    yield (
        f"{up}{COMMENT_WORKFLOW} comments on pull requests in a separate job, because a job that runs tests should not have "
        f"a token with write access; GitHub starts it once it is on {project.branch}"
    )
