"""Recipes of docs/development: each has a patch here, which its test applies to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests import preloaded
from tests.support.processes import hide_what_is_loaded

ROOT = Path(__file__).parents[2]
_RUN = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "pytest_gpumem"]:
    del sys.modules[name]
kind, what, *sys.argv[1:] = sys.argv[1:]
if kind == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(what, {"__name__": "__main__"})
"""
"""As `python` runs ``-m module`` or ``-c code``, in a process that has loaded torch, and the package from elsewhere."""
REDO = """
To redo the patch {name}.patch in a clone without other changes:

    git apply --3way --index tests/recipes/{name}.patch     # or make the edits by hand, as docs/development/{name}.md says
    git diff HEAD -U1 -- pytest_gpumem > /tmp/{name}.patch  # once conflicts are resolved and new files are staged
    git restore --source=HEAD --staged --worktree pytest_gpumem
    mv /tmp/{name}.patch tests/recipes/{name}.patch
"""


def patch_of(name: str) -> Path:
    """Return the patch of a recipe. ``name`` is that of its page, for example ``"add-a-metric"``."""
    return Path(__file__).with_name(f"{name}.patch")


def files_of(name: str) -> set[str]:
    """Return the files that the patch of a recipe changes or adds."""
    return set(re.findall(r"^\+\+\+ b/(.+)$", patch_of(name).read_text(encoding="utf-8"), flags=re.MULTILINE))


def copy_of_the_package(folder: Path, name: str) -> Package:
    """Copy the package into ``folder``, and apply the patch of the recipe ``name`` to the copy.

    The copy has the compiled files, too: Python ignores those of a file that the patch changes.

    Raises:
        ValueError: The patch does not apply. The message has what git says, and how to redo the patch.
    """
    shutil.copytree(ROOT / "pytest_gpumem", folder / "pytest_gpumem")
    apply_patch(folder, name)
    return Package(folder)


def apply_patch(folder: Path, name: str) -> None:
    """Apply the patch of the recipe ``name`` to the files in ``folder``, by `git apply`, which needs no repository."""
    # Within a repository, git would count paths from its root, and skip those outside of ``folder``.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", patch_of(name)], cwd=folder, env=outside, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{name}.patch no longer applies to the package:\n{done.stderr}{REDO.format(name=name)}")


@dataclass(frozen=True)
class Package:
    """A copy of the package, in ``folder``, and processes that have it."""

    folder: Path

    def pytest(self, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest in ``project``, on the CPU."""
        return self.run(project, "-m", "pytest", "-p", "no:cacheprovider", "--gpumem-device=cpu", *arguments)

    def run(self, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``-m module`` or ``-c code`` in ``project``."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        return preloaded.run("-c", _RUN, *arguments, cwd=project, env=environment, before=hide_what_is_loaded)


def write_tests(project: Path, code: str) -> None:
    """Write a file of tests, ``test_steps.py``, and an empty configuration into ``project``."""
    project.mkdir(parents=True, exist_ok=True)
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "test_steps.py").write_text(dedent(code))
