"""Sessions of pytest that measure on the CPU, in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import preloaded
from tests.support.processes import hide_what_is_loaded

_REPOSITORY = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class CpuSessions:
    """Runs sessions in ``folder``. Variables of their environment are keywords."""

    folder: Path

    def pytest(
        self, *arguments: str, new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a session with torch loaded, or in a ``new`` interpreter."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
        paths = os.pathsep.join(filter(None, [_REPOSITORY, os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": paths, "DEVICE": "cpu", **{name: str(value) for name, value in variables.items()}}
        environment = {**inherited, **own}
        words = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--gpumem-device=cpu", *arguments)
        if new:
            command = [sys.executable, *words]
            return subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=timeout
            )
        return preloaded.run(*words, cwd=self.folder, env=environment, before=hide_what_is_loaded, timeout=timeout)
