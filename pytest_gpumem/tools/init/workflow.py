"""Adapt the GitHub workflows from docs/ci.md to a project."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution, metadata
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pytest_gpumem import __version__
from pytest_gpumem.base.git import USUAL_BRANCH

if TYPE_CHECKING:
    from collections.abc import Sequence

Runner = Literal["emulated", "self-hosted", "cpu"]
RUNNERS: tuple[Runner, ...] = get_args(Runner)
DEVICES: dict[Runner, str] = {"emulated": "emulated:h100", "self-hosted": "cuda", "cpu": "cpu"}
"""The device on which the gate measures, for each kind of runner."""
UNTIMED = "--no-gpumem-time"
"""The option to switch times off. A workflow has this option if the speed of its runners varies too much."""
REQUIREMENTS = "requirements.txt"
"""The requirements file in the workflows in docs/ci.md."""
_PLUGIN = "pytest-gpumem"
PLACEHOLDER = "owner".upper()
"""The placeholder in this package's sources for the GitHub account with pytest-gpumem's repository.

The word is spelt in lower case, so replacing the placeholder in all sources does not change this constant.
"""
_REPOSITORY = re.compile(rf"https://github\.com/([^/\s]+)/{_PLUGIN}$")
_USED = re.compile(rf"(?<=uses: )[^/\s]+(/{_PLUGIN}(?:/\w+)?)@(\S+)")
_PYTHON = re.compile(r'(?<=python-version: ")[^"]*')
_ARGUMENTS = re.compile(r'(?<=arguments: )(?:"([^"]*)"|([^,}]*))')
_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""Characters allowed in JSON strings, but forbidden in YAML or read as a line end."""
_BEHIND = re.compile(r"(^|\s)(#|--).*|\s\\$")
"""The text after the requirement in a line: a comment, pip options, or a backslash."""


def template(name: Runner | Literal["comment"]) -> str:
    """Return the text of a workflow as in docs/ci.md."""
    return (files(__package__) / "workflows" / f"{name}.yml").read_text(encoding="utf-8")


def account() -> str:
    """Return the GitHub account with pytest-gpumem's repository, or `PLACEHOLDER` if the package's metadata does not name the
    account.
    """
    try:
        urls = metadata(_PLUGIN).get_all("Project-URL") or ()
    except PackageNotFoundError:
        return PLACEHOLDER
    return next((match[1] for url in urls if (match := _REPOSITORY.search(url))), PLACEHOLDER)


def commit() -> str | None:
    """Return the commit of the installed pytest-gpumem, or ``None`` if pip did not install the package from its repository."""
    try:
        plain = json.loads(distribution(_PLUGIN).read_text("direct_url.json") or "null")
        is_ours = _REPOSITORY.search(plain["url"].removesuffix(".git")) is not None
        installed = str(plain["vcs_info"]["commit_id"])
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return installed if is_ours and re.fullmatch(r"[0-9a-f]{40}", installed) else None


def comment_workflow(account: str = PLACEHOLDER, commit: str | None = None) -> str:
    """Return the workflow for posting a gate's report as a comment. The arguments are as in `workflow`."""
    return _with_account(template("comment"), account, commit)


def _with_account(text: str, account: str, commit: str | None) -> str:
    """Return a workflow with the account's actions. If ``commit`` is known, actions are pinned: ``@0123abc # v0.1.0``."""

    def used(match: re.Match[str]) -> str:
        return f"{account}{match[1]}@{match[2] if commit is None else f'{commit} # {match[2]}'}"

    return _USED.sub(used, text)


def installs_from_nowhere(text: str | None) -> bool:
    """Return whether a workflow or requirements file contains `PLACEHOLDER` instead of a GitHub account."""
    return re.search(rf"(?:github\.com/|uses: ){PLACEHOLDER}/", text or "") is not None


def workflow(
    runner: Runner,
    requirements: str,
    folder: str,
    tests: str = ".",
    *,
    branch: str = USUAL_BRANCH,
    account: str = PLACEHOLDER,
    commit: str | None = None,
    python: str | None = None,
) -> str:
    """Return the gate's workflow for a project.

    Args:
        runner: The kind of machine on which the workflow runs.
        requirements: The requirements file, as a path from the project's folder.
        folder: The project's folder in the repository, or ``"."`` for the top.
        tests: The folder with the tests, as a path from the project's folder. For ``"."``, the workflow names no folder, and
            pytest finds the tests.
        branch: The base branch for pull requests.
        account: The GitHub account with pytest-gpumem's repository.
        commit: The commit to which the action is pinned. ``None`` keeps the release's tag.
        python: The Python version to install, such as ``"3.13"``. ``None`` keeps the version in docs/ci.md.
    """
    text = _with_account(template(runner), account, commit)
    if python is not None:
        text = _PYTHON.sub(python, text)
    if requirements != REQUIREMENTS:
        text = text.replace(REQUIREMENTS, requirements)
    # Insert a mark for each value first, and replace the marks at the end. Otherwise, an edit could change the name of a folder
    # inserted by an earlier edit.
    values = {"branch": scalar(re.sub(r"^!|[*+?\[\]]", r"\\\g<0>", branch))}
    if branch != USUAL_BRANCH:
        text = text.replace(f"branches: [{USUAL_BRANCH}]", f"branches: [{_mark('branch')}]")
    if tests != ".":
        options = "".join(part or "" for groups in _ARGUMENTS.findall(text) for part in groups)
        word = f"./{tests}" if tests.startswith("-") else tests
        values["arguments"] = scalar(f"{shlex.quote(word)} {options}", is_evaluated=True)
        text = _ARGUMENTS.sub(_mark("arguments"), text)
    if folder != ".":
        values["folder"] = scalar(folder, is_evaluated=True)
        # cache-dependency-path is a glob pattern.
        pattern = re.sub(r"[*?\[]", r"[\g<0>]", f"./{folder}" if folder[0] in "!#~" else folder)
        values["cached"] = scalar(f"{pattern}/{requirements}", is_evaluated=True)
        for old, new in (
            (f"cache-dependency-path: {requirements}", f"cache-dependency-path: {_mark('cached')}"),
            ("\n      - run: ", f"\n      - working-directory: {_mark('folder')}\n        run: "),
            ("with: {install: ", f"with: {{working-directory: {_mark('folder')}, install: "),
        ):
            text = text.replace(old, new)
    return re.sub(_mark(r"(\w+)"), lambda match: values[match[1]], text)


def _mark(name: str) -> str:
    return f"\0{name}\0"


def scalar(text: str, *, is_evaluated: bool = False) -> str:
    """Return a text as a YAML scalar, such as ``"packages/a, b"`` with its quotes.

    Args:
        text: Any text, such as a folder's name.
        is_evaluated: Whether GitHub evaluates expressions in the scalar. If so, ``${{`` is escaped.
    """
    if is_evaluated:
        text = text.replace("${{", "${{ '${{' }}")
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))


def has_all(requirements: str | None) -> bool:
    """Return whether a requirements.txt contains a pinned torch and pytest-gpumem, which the workflow needs."""
    lines = (requirements or "").split("\n")
    torches = [line for line in lines if line.startswith("torch==")]
    packages = (requirement(line) for line in lines)
    has_plugin = any(package is not None and canonicalize_name(package.name) == _PLUGIN for package in packages)
    return len(torches) == 1 and _is_pinned(torches[0]) and has_plugin


def requirement(line: str) -> Requirement | None:
    """Return the requirement in a line, or ``None`` if the line is a comment, an option or a bare URL."""
    try:
        return Requirement(_BEHIND.sub("", line.strip()))
    except InvalidRequirement:
        return None


def _is_pinned(line: str) -> bool:
    """Return whether a requirement line pins a release on all machines.

    A line with spaces does not count as pinned, because the workflow passes the line to a shell.
    """
    package = requirement(line)
    if package is None or package.marker is not None or line.split() != [line]:
        return False
    return [specifier.operator for specifier in package.specifier] == ["=="] and not line.endswith(".*")


def gate_lines(release: str | None, project: Sequence[str], account: str = PLACEHOLDER) -> list[str]:
    """Return the lines in the gate's requirements file: torch, pytest, pytest-gpumem, and then the lines in ``project``."""
    plugin = f"{_PLUGIN} @ git+https://github.com/{account}/{_PLUGIN}@v{__version__}"
    return list(dict.fromkeys((f"torch=={release or 'RELEASE'}", "pytest", plugin, *project)))
