"""A git repository with a store in it, made of handwritten entries: for tests of commands that read the store's history."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.judging.baselines.format import render
from pytest_gpumem.judging.baselines.store import path_of
from pytest_gpumem.judging.gate.baseline import Baseline, Key

if TYPE_CHECKING:
    from pathlib import Path

H100 = Environment("h100", "NVIDIA H100", {"torch": "2.11.0"})
MB = 10**6


def entry(peak: int = 10 * MB, *, device: Environment = H100, workload: Workload | None = None, **changes) -> Baseline:
    """A baseline with this peak; ``metrics`` are added to it."""
    metrics = {"peak_allocated": peak, **changes.pop("metrics", {})}
    return Baseline(workload or Workload("call"), device, metrics, "2026-11-02", "abc1234", **changes)


class Repository:
    """A project in a git repository of its own, with a store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        (path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str, author: str = "Ada") -> str:
        settings = {"user.name": author, "user.email": "ada@example.org", "commit.gpgsign": "false"}
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = ["git", *given, *arguments]
        return subprocess.run(command, cwd=self.path, check=True, capture_output=True, text=True).stdout

    def store(self, entries: dict[str, Baseline], file: str = "a.py", slug: str = "h100") -> None:
        """Make these the baselines of a test file: entries by ``test``, or by ``test (name)``."""
        path = self.path / "gpumem-baselines" / path_of(slug, file)
        if not entries:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render({_key(file, said): one for said, one in entries.items()}), encoding="utf-8")

    def commit(
        self, message: str, entries: dict[str, Baseline] | None = None, *, author: str = "Ada", **where: str
    ) -> str:
        """Commit the store as it is, after these entries were put in; the commit's name."""
        if entries is not None:
            self.store(entries, **where)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message, author=author)
        return self.git("rev-parse", "HEAD").strip()


def _key(file: str, said: str) -> Key:
    test, bracket, name = said.partition(" (")
    return Key(file, test, name.rstrip(")") if bracket else "call")
