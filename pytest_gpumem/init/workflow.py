"""The workflow that gates a project on GitHub: the texts of docs/ci.md, for a repository of another shape."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, get_args

Runner = Literal["emulated", "self-hosted", "cpu"]
RUNNERS: tuple[Runner, ...] = get_args(Runner)
DEVICES: dict[Runner, str] = {"emulated": "emulated:h100", "self-hosted": "cuda", "cpu": "cpu"}
"""The device that each measures on."""
REQUIREMENTS = "requirements.txt"
"""The file that the texts install from."""
_LINE = "pytest-gpumem[report] @ git+https://github.com/OWNER/pytest-gpumem"


def template(runner: Runner) -> str:
    """Return the workflow as docs/ci.md has it."""
    return (files(__package__) / "workflows" / f"{runner}.yml").read_text(encoding="utf-8")


def workflow(runner: Runner, requirements: str, folder: str) -> str:
    """Return the workflow for a project.

    Args:
        runner: The kind of machine that it runs on.
        requirements: The file to install from, as a path from the project's folder.
        folder: The project's folder in the repository, ``"."`` for its top.
    """
    text = template(runner)
    if requirements != REQUIREMENTS:
        text = text.replace(REQUIREMENTS, requirements)
    if folder == ".":
        return text
    for what, instead in (
        (f"cache-dependency-path: {requirements}", f"cache-dependency-path: {folder}/{requirements}"),
        ("\n      - run: ", f"\n      - working-directory: {folder}\n        run: "),
        ("with: {install: ", f"with: {{working-directory: {folder}, install: "),
    ):
        text = text.replace(what, instead)
    return text


@dataclass(frozen=True, slots=True)
class Installation:
    """The sources that a project is installed from."""

    requirements: str | None
    """The text of its requirements.txt."""
    is_package: bool
    extra: str | None
    """The extra with what its tests need."""
    torch: str | None
    """The release of torch that is installed here, without its build."""


def has_all(requirements: str | None) -> bool:
    """Return whether a requirements.txt has what the workflow asks of it: a pinned torch, and the plugin."""
    lines = (requirements or "").splitlines()
    return any(line.startswith("torch==") for line in lines) and any("pytest-gpumem" in line for line in lines)


def requirements_of(installation: Installation) -> str:
    """Return the text of a file of requirements for the gate."""
    lines = ["# What the gate installs. Figures are of a release of torch: change it together with the baselines."]
    lines += [f"torch=={installation.torch}" if installation.torch else "torch", "pytest", _LINE]
    if installation.requirements is not None:
        lines.append(f"-r {REQUIREMENTS}")
    if installation.is_package:
        lines.append(f"-e .[{installation.extra}]" if installation.extra else "-e .")
    return "".join(f"{line}\n" for line in lines)
