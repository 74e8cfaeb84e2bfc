"""Find a command that runs pip for an interpreter, even if pip is not installed there (as in environments made by uv)."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FIND_WHEEL = """
import importlib.util
if importlib.util.find_spec("pip") is None:
    import ensurepip, pathlib, sysconfig
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR"), pathlib.Path(ensurepip.__file__).parent / "_bundled"]
    print(*[wheel for folder in folders if folder for wheel in pathlib.Path(folder).glob("pip-*.whl")][:1])
"""
"""A script. If pip is not installed, it prints the path to the pip wheel in Python's ``ensurepip``."""


def pip_command(python: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the first words of a pip command for ``python``. If pip is not installed, they run ``ensurepip``'s wheel."""
    command = [str(python), "-c", _FIND_WHEEL]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheel = answer.stdout.strip()
    pip = [f"{wheel}/pip"] if wheel else ["-m", "pip"]
    return [str(python), *pip, "--disable-pip-version-check", "--no-input"]
