"""Runs of a bisection on the disk, so that the next start goes on where it was ended."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.ab.runs import Run, run_of
from pytest_gpumem.requirements.environments import packages_here
from pytest_gpumem.user_cache import cache_root
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.ab.runs import Taken


def journals_folder() -> Path:
    """Return the folder of the user's cache that journals are kept in."""
    return cache_root() / "bisections"


@dataclass(frozen=True)
class Journal:
    """The runs of one bisection in its folder, by the candidate's name."""

    folder: Path

    @classmethod
    def of(cls, told: Sequence[Any]) -> Journal:
        """Return the journal of the bisection that is all that is ``told`` of it, and of the packages that are installed."""
        text = json.dumps([packages_here(), *told])
        return cls(journals_folder() / hashlib.sha256(text.encode()).hexdigest()[:16])

    def runs(self) -> dict[str, Run]:
        """Return what was run; a file that was not written whole is as if it were not there."""
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                plain = json.loads(path.read_text(encoding="utf-8"))
                found[plain["name"]] = run_of(plain["lines"], plain["status"])
            except (OSError, ValueError, KeyError, TypeError, RunFailed):
                continue
        return found

    def add(self, name: str, taken: Taken) -> None:
        """Keep the run of a candidate."""
        file = hashlib.sha256(name.encode()).hexdigest()[:16]
        text = json.dumps({"name": name, "status": taken.status, "lines": taken.lines})
        write_whole(self.folder / f"{file}.json", text)

    def remove(self) -> None:
        """Forget all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
