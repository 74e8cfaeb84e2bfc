"""The workflow that gates a project on GitHub: the texts of docs/ci.md, for a repository of another shape."""

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
from pytest_gpumem.git import USUAL_BRANCH

if TYPE_CHECKING:
    from collections.abc import Sequence

Runner = Literal["emulated", "self-hosted", "cpu"]
RUNNERS: tuple[Runner, ...] = get_args(Runner)
DEVICES: dict[Runner, str] = {"emulated": "emulated:h100", "self-hosted": "cuda", "cpu": "cpu"}
"""The device that each measures on."""
UNTIMED = "--no-gpumem-time"
"""The option of a workflow whose runners are too different for times."""
REQUIREMENTS = "requirements.txt"
"""The file that the texts install from."""
_PLUGIN = "pytest-gpumem"
PLACEHOLDER = "owner".upper()
"""The word for the account in this package's sources until it has one. Spelt so that replacing it there leaves it here."""
_REPOSITORY = re.compile(rf"https://github\.com/([^/\s]+)/{_PLUGIN}$")
_USED = re.compile(rf"(?<=uses: )[^/\s]+(/{_PLUGIN}(?:/\w+)?)@(\S+)")
_PYTHON = re.compile(r'(?<=python-version: ")[^"]*')
_ARGUMENTS = re.compile(r'(?<=arguments: )(?:"([^"]*)"|([^,}]*))')
_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""Characters that JSON allows in a string, and that YAML does not or takes for the end of a line."""
_BEHIND = re.compile(r"(^|\s)(#|--).*|\s\\$")
"""A comment, options of pip, or the mark of a line that goes on."""


def template(name: Runner | Literal["comment"]) -> str:
    """Return the workflow as docs/ci.md has it."""
    return (files(__package__) / "workflows" / f"{name}.yml").read_text(encoding="utf-8")


def account() -> str:
    """Return the account on GitHub that the installed package says it is from; `PLACEHOLDER` where it does not."""
    try:
        urls = metadata(_PLUGIN).get_all("Project-URL") or ()
    except PackageNotFoundError:
        return PLACEHOLDER
    return next((found[1] for url in urls if (found := _REPOSITORY.search(url))), PLACEHOLDER)


def commit() -> str | None:
    """Return the package's commit; ``None`` if pip did not install the package from its repository."""
    try:
        plain = json.loads(distribution(_PLUGIN).read_text("direct_url.json") or "null")
        is_ours = _REPOSITORY.search(plain["url"].removesuffix(".git")) is not None
        installed = str(plain["vcs_info"]["commit_id"])
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return installed if is_ours and re.fullmatch(r"[0-9a-f]{40}", installed) else None


def comment_workflow(account: str = PLACEHOLDER, commit: str | None = None) -> str:
    """Return the workflow that comments with a gate's reports. The arguments are those for `workflow`."""
    return _of(template("comment"), account, commit)


def _of(text: str, account: str, commit: str | None) -> str:
    """Return a workflow with this account's actions, pinned to ``commit`` if there is one: ``@0123abc # v0.1.0``."""

    def used(match: re.Match[str]) -> str:
        return f"{account}{match[1]}@{match[2] if commit is None else f'{commit} # {match[2]}'}"

    return _USED.sub(used, text)


def installs_from_nowhere(text: str | None) -> bool:
    """Return whether a workflow or a file of requirements names the placeholder of the account."""
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
    """Return the workflow for a project.

    Args:
        runner: The kind of machine that it runs on.
        requirements: The file to install from, as a path from the project's folder.
        folder: The project's folder in the repository, ``"."`` for its top.
        tests: The folder whose tests it runs, as a path from the project's folder, ``"."`` for what pytest takes.
        branch: The branch that the project's changes go to.
        account: The account on GitHub that this package is from.
        commit: This package's commit, to pin its action to; ``None`` for the release's tag.
        python: The release of Python that it installs, ``"3.13"``; ``None`` for that of docs/ci.md.
    """
    text = _of(template(runner), account, commit)
    if python is not None:
        text = _PYTHON.sub(python, text)
    if requirements != REQUIREMENTS:
        text = text.replace(REQUIREMENTS, requirements)
    # Marks stand for the texts until all changes are made: a folder may be called like a part of the workflow.
    filled = {"branch": scalar(re.sub(r"^!|[*+?\[\]]", r"\\\g<0>", branch))}
    if branch != USUAL_BRANCH:
        text = text.replace(f"branches: [{USUAL_BRANCH}]", f"branches: [{_mark('branch')}]")
    if tests != ".":
        options = "".join(part or "" for found in _ARGUMENTS.findall(text) for part in found)
        word = f"./{tests}" if tests.startswith("-") else tests
        filled["arguments"] = scalar(f"{shlex.quote(word)} {options}", is_evaluated=True)
        text = _ARGUMENTS.sub(_mark("arguments"), text)
    if folder != ".":
        filled["folder"] = scalar(folder, is_evaluated=True)
        # The action for Python takes patterns of files.
        pattern = re.sub(r"[*?\[]", r"[\g<0>]", f"./{folder}" if folder[0] in "!#~" else folder)
        filled["cached"] = scalar(f"{pattern}/{requirements}", is_evaluated=True)
        for what, instead in (
            (f"cache-dependency-path: {requirements}", f"cache-dependency-path: {_mark('cached')}"),
            ("\n      - run: ", f"\n      - working-directory: {_mark('folder')}\n        run: "),
            ("with: {install: ", f"with: {{working-directory: {_mark('folder')}, install: "),
        ):
            text = text.replace(what, instead)
    return re.sub(_mark(r"(\w+)"), lambda found: filled[found[1]], text)


def _mark(name: str) -> str:
    return f"\0{name}\0"


def scalar(text: str, *, is_evaluated: bool = False) -> str:
    """Return a text as a scalar for YAML, ``"packages/a, b"``.

    Args:
        text: Any text, such as the name of a folder.
        is_evaluated: True if GitHub evaluates expressions there. Then ``${{`` stays text.
    """
    if is_evaluated:
        text = text.replace("${{", "${{ '${{' }}")
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False))


def has_all(requirements: str | None) -> bool:
    """Return whether a requirements.txt has what the workflow asks of it: a pinned torch, and the plugin."""
    lines = (requirements or "").split("\n")
    torches = [line for line in lines if line.startswith("torch==")]
    read = (requirement(line) for line in lines)
    has_plugin = any(one is not None and canonicalize_name(one.name) == _PLUGIN for one in read)
    return len(torches) == 1 and _is_pinned(torches[0]) and has_plugin


def requirement(line: str) -> Requirement | None:
    """Return what a line of a requirements.txt asks for; ``None`` of a comment, an option or a URL alone."""
    try:
        return Requirement(_BEHIND.sub("", line.strip()))
    except InvalidRequirement:
        return None


def _is_pinned(line: str) -> bool:
    """Return whether a line is one release for every machine, and one word: the workflow gives it to a shell."""
    read = requirement(line)
    if read is None or read.marker is not None or line.split() != [line]:
        return False
    return [one.operator for one in read.specifier] == ["=="] and not line.endswith(".*")


def gate_lines(release: str | None, project: Sequence[str], account: str = PLACEHOLDER) -> list[str]:
    """Return the lines of a file of requirements for the gate: those of the ``project`` come last."""
    plugin = f"{_PLUGIN}[report] @ git+https://github.com/{account}/{_PLUGIN}@v{__version__}"
    return list(dict.fromkeys((f"torch=={release or 'RELEASE'}", "pytest", plugin, *project)))
