"""The files that set a project up, proposed from what is there. Pure; a file or section that is there is left alone."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.command_name import command_name
from pytest_gpumem.config.settings import matches_test
from pytest_gpumem.git import USUAL_BRANCH
from pytest_gpumem.init.installing import Sources, lines_of, unfit_of
from pytest_gpumem.init.patterns import patterns_of
from pytest_gpumem.init.workflow import (
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
from pytest_gpumem.toml import read_toml
from pytest_gpumem.units import agreeing, counted
from pytest_gpumem.values.option_words import DEFAULT_DEVICE, EMULATED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.init.found_tests import FoundTests

MARK_KEY = "mark"
"""The key of ``[tool.gpumem]`` with patterns of the tests to measure."""
SETTINGS, ATTRIBUTES, WORKFLOW, COMMENT_WORKFLOW, GATE_REQUIREMENTS = (
    "pyproject.toml",
    ".gitattributes",
    ".github/workflows/gpumem.yml",
    ".github/workflows/gpumem-comment.yml",
    "requirements-gpumem.txt",
)
_NO_END = "\\ No newline at end of file"
_PINNED = "# The gate's packages. Figures depend on the version of torch: change it together with the baselines."


class ProposalError(Exception):
    """Error of a file that nothing can be added to; the message names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class Here:
    """The devices that this machine can measure on, and what is installed on it."""

    has_gpu: bool = False
    can_emulate: bool = False
    has_cpu: bool = True
    """False where torch is only there for an emulated GPU."""
    torch: str | None = None
    """The release of torch, without its build."""
    python: str | None = None
    """The release of Python that records the baselines, ``"3.13"``."""
    account: str = PLACEHOLDER
    """The account on GitHub that this package is from."""
    commit: str | None = None
    """The commit that this package is from, if it is known."""

    def can_measure(self, device: str) -> bool:
        """Return whether a device can be measured on, as far as is known: True of one that a plugin adds."""
        if device.startswith(EMULATED):
            return self.can_emulate
        return {"cuda": self.has_gpu, "cpu": self.has_cpu}.get(device, True)


@dataclass(frozen=True, slots=True)
class Project:
    """The files of a project; texts are ``None`` where there is none. ``folder`` is the project's path in its repository."""

    settings: str | None = None
    attributes: str | None = None
    requirements: Mapping[str, str] = field(default_factory=dict)
    """The texts of its files of requirements, by path."""
    gate_requirements: str | None = None
    workflow: str | None = None
    """The path of the workflow that is there."""
    workflow_text: str | None = None
    comment_workflow: str | None = None
    """The path of the workflow that comments, if it is there."""
    comment_workflow_text: str | None = None
    setup_cfg: str | None = None
    has_setup_py: bool = False
    folders: Sequence[str] = ()
    """The folders at its top."""
    tests: str = "."
    """The folder whose tests are gated, from the project's folder."""
    store: str | None = "gpumem-baselines"
    """The store's path from the project's folder; ``None`` where it lies elsewhere."""
    in_git: bool = True
    branch: str = USUAL_BRANCH
    """The branch that its changes go to."""
    folder: str = "."

    @property
    def to_top(self) -> str:
        """The start of a path from the project's folder to a file at the repository's top: ``""`` or ``"../../"``, say."""
        return "" if self.folder == "." else "../" * len(self.folder.split("/"))

    @property
    def parsed_settings(self) -> dict[str, Any]:
        """The content of pyproject.toml. Raises `ProposalError` for what is no TOML."""
        try:
            parsed: dict[str, Any] = read_toml(self.settings or "")
        except ValueError as error:
            raise ProposalError(f"{SETTINGS} cannot be parsed: {error}; nothing was written") from None
        return parsed

    @property
    def settings_table(self) -> dict[str, Any] | None:
        """``[tool.gpumem]``; ``None`` where there is none. Raises `ProposalError`."""
        tools = self.parsed_settings.get("tool")
        table = tools.get("gpumem") if isinstance(tools, dict) else None
        return table if isinstance(table, dict) else None


@dataclass(frozen=True, slots=True)
class Edit:
    """A file to write: ``before`` is its text now, ``None`` where there is none. ``path`` is from the project's folder."""

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
    """Return the lines of a text as git has them, of which only LF is an end; one without says so."""
    *lines, last = text.split("\n")
    return [*lines, f"{last}\n{_NO_END}"] if last else lines


@dataclass(frozen=True, slots=True)
class Proposal:
    """The edits, what to say of them, and pytest's options for each run that records first baselines."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...]
    record_with: tuple[tuple[str, ...], ...]
    record_elsewhere: str | None = None
    """The workflow's device, where it cannot be measured here."""
    installs_from_nowhere: tuple[str, ...] = ()
    """The paths of the files that name the placeholder of an account, from which nothing can be installed."""


def chosen_runner(found: FoundTests, here: Here) -> tuple[Runner, str]:
    """Return the runner that can be gated with baselines from here, and why it is that one, as a clause."""
    if not found.on_gpu and here.has_cpu:
        return "cpu", "no test that runs a model puts it on a GPU"
    if here.has_gpu:
        return "self-hosted", "this machine has a GPU"
    if here.can_emulate:
        return "emulated", "this machine has no GPU and can emulate one"
    return "cpu", f"this machine has no GPU and cannot emulate one (see `{command_name()} doctor`)"


def proposal(project: Project, found: FoundTests, here: Here, runner: Runner | None) -> Proposal:
    """Return what is proposed.

    Args:
        project: What is there.
        found: The tests.
        here: What can be measured on.
        runner: The kind of machine that gates, where it was said.

    Raises:
        ProposalError: pyproject.toml cannot be added to.
    """
    device, why_device = _device(found, here)
    chosen, why_runner = (runner, "you chose it") if runner is not None else chosen_runner(found, here)
    table = project.settings_table
    edits: list[Edit] = []
    notes: list[str] = []
    patterns = patterns_of(found.tests)
    if table is None:
        edits.append(_settings(project, device, why_device, patterns))
    else:
        notes.append(f"{SETTINGS} has [tool.gpumem], which is not changed{_lacking(table, found)}")
        device = str(table.get("device", DEFAULT_DEVICE))
    notes += _attributes(project, edits)
    notes += _workflow(project, chosen, why_runner, here, edits)
    gated = DEVICES[chosen]
    taken = {"auto": "cuda" if here.has_gpu else "cpu"}.get(device, device)
    # Times take most of a recording, and are of no use to a workflow that takes none.
    of_gate = (UNTIMED,) if UNTIMED in template(chosen) else ()
    record = [of_gate if gated == taken else ()] if here.can_measure(taken) else []
    elsewhere = None
    if gated != taken and here.can_measure(gated):
        record.append((f"--gpumem-device={gated}", *of_gate))
    elif not here.can_measure(gated):
        elsewhere = gated
        notes.append(
            f"the workflow gates on {gated}, which this machine does not have: record the baselines on a machine that has it, "
            f"with `python -m pytest --gpumem-update=new --gpumem-device={gated}`"
        )
    nowhere = tuple(_installing_from_nowhere(project, edits))
    if nowhere:
        notes.append(
            f"{PLACEHOLDER} stands for the GitHub account of pytest-gpumem, which this package does not know: replace it in "
            f"{' and '.join(nowhere)}, or the workflow cannot install the gate"
        )
    return Proposal(tuple(edits), tuple(notes), tuple(record), elsewhere, nowhere)


def _installing_from_nowhere(project: Project, edits: Sequence[Edit]) -> Iterator[str]:
    there = {
        GATE_REQUIREMENTS: project.gate_requirements,
        f"{project.to_top}{project.workflow or WORKFLOW}": project.workflow_text,
        f"{project.to_top}{project.comment_workflow or COMMENT_WORKFLOW}": project.comment_workflow_text,
    }
    for path, text in {**there, **{edit.path: edit.after for edit in edits}}.items():
        if installs_from_nowhere(text):
            yield path


def _lacking(table: Mapping[str, Any], found: FoundTests) -> str:
    """Return what a ``[tool.gpumem]`` that is there lacks, as the end of a sentence that says what to write."""
    there = table.get(MARK_KEY)
    named = [str(one) for one in there] if isinstance(there, list) else []
    unnamed = [
        one
        for one in found.tests
        if one.runs_model and not one.is_measured and not any(_names(each, one.nodeid) for each in named)
    ]
    if not unnamed:
        return ""
    missing = patterns_of([one if one in unnamed else replace(one, runs_model=False) for one in found.tests])
    what = counted(len(unnamed), "test that runs models", "tests that run models")
    return f"; it does not name {what}. To measure them, add to its {MARK_KEY}: {_array(missing, '')}"


def _names(pattern: str, nodeid: str) -> bool:
    """Return whether a pattern names a test function, or what may be an item of it."""
    return matches_test(pattern, nodeid) or matches_test(pattern, f"{nodeid}[]")


def _device(found: FoundTests, here: Here) -> tuple[str, str]:
    if not here.has_cpu and here.can_emulate:
        return "emulated:h100", "The installed torch can only be loaded for an emulated GPU."
    if not found.on_gpu:
        return "cpu", "No test that runs a model puts it on a GPU, so another device would measure nothing."
    if here.has_gpu:
        return (
            "cuda",
            "The project was set up on a machine with a GPU. On a machine without one, a session fails and says so.",
        )
    return "auto", "The GPU if there is one, else the CPU. Each device has its own baselines."


def _settings(project: Project, device: str, why: str, patterns: Sequence[str]) -> Edit:
    before = project.settings
    newline = "\r\n" if "\r\n" in (before or "") else "\n"
    lines = ["[tool.gpumem]", f"# {why}", f"device = {json.dumps(device)}"]
    if patterns:
        lines += ["# Tests that run models: measured as if they had @pytest.mark.gpumem."]
        lines += f"{MARK_KEY} = {_array(patterns, chr(10))}".split("\n")
    gap = ("" if before.endswith("\n") else newline) + newline if before else ""
    after = (before or "") + gap + "".join(f"{line}{newline}" for line in lines)
    try:
        read_toml(after)
    except ValueError:
        # tool = {...} is closed where it stands.
        raise ProposalError(
            f"`tool` in {SETTINGS} is an inline table, to which no section can be added; write [tool.gpumem] by hand: "
            f"{'; '.join(line for line in lines if not line.startswith('#'))}; nothing was written"
        ) from None
    return Edit(SETTINGS, before, after)


def with_patterns(edit: Edit, written: Sequence[str], instead: Sequence[str]) -> Edit:
    """Return an edit of pyproject.toml that was made with some patterns, from there on to one with others."""
    newline = "\r\n" if "\r\n" in edit.after else "\n"
    old, new = (_array(patterns, newline) for patterns in (written, instead))
    head, _, tail = edit.after.rpartition(old)
    return Edit(edit.path, edit.after, f"{head}{new}{tail}")


def _array(patterns: Sequence[str], between: str) -> str:
    texts = [json.dumps(one, ensure_ascii=False) for one in patterns]
    if not between:
        return f"[{', '.join(texts)}]"
    return "[" + "".join(f"{between}    {one}," for one in texts) + f"{between}]"


def _attributes(project: Project, edits: list[Edit]) -> Iterator[str]:
    """Propose that a checkout leaves the store's lines ends alone; they are reviewed, so no rule hides them in a diff."""
    if project.store is None:
        return
    if not project.in_git:
        yield f"this is not a git repository: commit and review the baselines in {project.store}/ together with the code"
        return
    before = project.attributes
    if any(_is_of_store(line, project.store) for line in (before or "").splitlines()):
        yield f"{ATTRIBUTES} has a rule for {project.store}, so it is not changed"
        return
    gap = "" if not before or before.endswith("\n") else "\n"
    edits.append(Edit(ATTRIBUTES, before, f"{before or ''}{gap}{_pattern_below(project.store)} text eol=lf\n"))


def _pattern_below(folder: str) -> str:
    """Return the pattern in a .gitattributes for all files below a folder, quoted if git could not read it otherwise."""
    pattern = f"/{_no_pattern(folder)}/**"
    return json.dumps(pattern, ensure_ascii=False) if re.search(r'[\s"\\]', pattern) else pattern


def _no_pattern(folder: str) -> str:
    """Return a pattern for git that matches one folder, although its name contains brackets or stars."""
    return re.sub(r"[*?\[\]\\]", r"\\\g<0>", folder)


def _is_of_store(line: str, store: str) -> bool:
    """Return whether a line of a .gitattributes is of all files of a store, or all entries: not of a part of it."""
    match = re.match(r'\s*(?:("(?:[^"\\]|\\.)*")|([^\s#"]\S*))', line)
    if match is None:
        return False
    try:
        pattern = match[2] or json.loads(match[1])
    except ValueError:  # octal digits, in names that are not in UTF-8
        return False
    of_store = "|".join(map(re.escape, (store, _no_pattern(store))))
    return re.fullmatch(rf"/?(?:{of_store})/(\*\*?/)?\*\*?(\.toml)?", pattern) is not None


def _workflow(project: Project, runner: Runner, why: str, here: Here, edits: list[Edit]) -> Iterator[str]:
    up = project.to_top
    if project.workflow is not None:
        yield f"{up}{project.workflow} exists and is not changed; it gates if it runs `python -m pytest --gpumem-baseline`"
        return
    requirements = REQUIREMENTS
    if not has_all(project.requirements.get(REQUIREMENTS)):
        requirements = GATE_REQUIREMENTS
        sources = Sources(
            project.parsed_settings, project.setup_cfg, project.has_setup_py, project.folders, project.requirements
        )
        lines = gate_lines(here.torch, list(lines_of(sources, here.torch)), here.account)
        if project.gate_requirements is not None:
            yield f"{GATE_REQUIREMENTS} exists and is not changed; the workflow installs from it"
        elif here.torch is not None:
            edits.append(Edit(GATE_REQUIREMENTS, None, "".join(f"{line}\n" for line in (_PINNED, *lines))))
            for path, line in unfit_of(sources, here.torch):
                yield (
                    f"{path} requires {line!r}, but torch {here.torch} is installed, and pip installs only one version. "
                    f"Install the required version and run {command_name()} init again, or let {path} allow {here.torch}"
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
        account=here.account,
        commit=here.commit,
        python=here.python,
    )
    edits.append(Edit(f"{up}{WORKFLOW}", None, text))
    yield f"the workflow is for --runner={runner}, because {why}"
    if project.comment_workflow is not None:
        yield f"{up}{project.comment_workflow} exists and is not changed; it comments if it names the gate's workflow"
        return
    edits.append(Edit(f"{up}{COMMENT_WORKFLOW}", None, comment_workflow(here.account, here.commit)))
    yield (
        f"{up}{COMMENT_WORKFLOW} comments on pull requests in a separate job, because a job that runs tests should not have "
        f"a token with write access; GitHub starts it once it is on {project.branch}"
    )


def counts(found: FoundTests) -> str:
    """Return how many tests there are, as a clause."""
    running = sum(one.runs_model and not one.is_measured for one in found.tests)
    measured = sum(one.is_measured for one in found.tests)
    run, are = agreeing(running, "runs", "run"), agreeing(measured, "is", "are")
    return f"{running} of {counted(len(found.tests), 'test')} {run} models, and {measured} {are} measured already"
