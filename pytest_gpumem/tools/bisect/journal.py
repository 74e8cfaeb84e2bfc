"""Store a bisection's runs on disk, so an interrupted bisection does not repeat these runs at its next start."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.base.errors import RunFailed
from pytest_gpumem.base.requirements.environments import packages_here
from pytest_gpumem.base.user_cache import cache_root
from pytest_gpumem.tools.ab.runs import Run, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.tools.ab.runs import RunRecord


def journals_folder() -> Path:
    """Return the folder in the user's cache that contains all journals."""
    return cache_root() / "bisections"


@dataclass(frozen=True)
class Journal:
    """A folder with a bisection's runs. Each candidate has its own file."""

    folder: Path

    @classmethod
    def of(cls, identity: Sequence[Any]) -> Journal:
        """Return a bisection's journal.

        Args:
            identity: Values that identify the bisection, such as the pytest arguments and the candidates' names. The
                installed packages are added to these values, so a bisection starts anew after an installation.
        """
        text = json.dumps([packages_here(), *identity])
        return cls(journals_folder() / hashlib.sha256(text.encode()).hexdigest()[:16])

    def runs(self) -> dict[str, Run]:
        """Return the stored runs, by the candidate's name. Incomplete files are ignored."""
        runs = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                plain = json.loads(path.read_text(encoding="utf-8"))
                runs[plain["name"]] = run_of(plain["lines"], plain["status"])
            except (OSError, ValueError, KeyError, TypeError, RunFailed):
                continue
        return runs

    def add(self, name: str, record: RunRecord) -> None:
        """Store the run for the candidate called ``name``."""
        file = hashlib.sha256(name.encode()).hexdigest()[:16]
        text = json.dumps({"name": name, "status": record.status, "lines": record.lines})
        write_atomically(self.folder / f"{file}.json", text)

    def remove(self) -> None:
        """Delete the journal's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
