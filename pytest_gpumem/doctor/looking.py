"""Collecting of facts: from files, NVML, and processes that import torch. Nothing is written but the stand-ins' cache."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem import __version__, command_name
from pytest_gpumem.devices.nvml import NvmlGpu
from pytest_gpumem.doctor.facts import DeviceFacts, Looked, StoredFacts, TorchFacts
from pytest_gpumem.emulation.torch_build import what_compiling_lacks
from pytest_gpumem.reports.formats import FORMATS
from pytest_gpumem.values.plain import from_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.command_name import OtherCommand
    from pytest_gpumem.reports.stored import StoredBaseline

_PATIENCE = 180.0
"""Seconds after which a process that looks is given up; compiling the stand-ins takes some."""
_RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
"""Runs a module as ``-m`` does, but not from the current folder, in which a stranger may have put a ``torch.py``."""


def releases() -> dict[str, str]:
    """Return the releases of Python, pytest and this plugin."""
    return {"Python": platform.python_version(), "pytest": pytest.__version__, "pytest-gpumem": __version__}


def driver() -> str:
    """Return NVML's release of the driver; ``unknown``, with what NVML says, where there is none."""
    return NvmlGpu("").driver_version()


def compiling(environment: Mapping[str, str]) -> str | None:
    """Return what torch.compile lacks on an emulated GPU, as a sentence."""
    return what_compiling_lacks(environment)


def reports() -> tuple[str, ...]:
    """Return a sentence for each format of reports that cannot be written here."""
    return tuple(lacking for one in FORMATS if (lacking := one.lacking()) is not None)


def other_command() -> OtherCommand | None:
    """Return the command ``gpumem`` that is first on the path, if it belongs to another package."""
    return command_name.other_command()


def look(words: Sequence[str], environment: Mapping[str, str]) -> Looked:
    """Return what a new process with this environment sees of devices, and of its torch.

    Args:
        words: Those built in, or one that is emulated.
        environment: The variables of the process; its Python finds the modules that this one does.
    """
    command = [sys.executable, "-c", _RUN_MODULE, "pytest_gpumem.doctor.probe", *words]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _nothing(words, f"a process that looked for it did not end within {_PATIENCE:g} s")
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and said.startswith("{"):
        found = from_plain(Looked, json.loads(said))
        return found if found.torch.trouble is None else _with_release(found)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
    return _nothing(words, f"its process ended with status {done.returncode}: {last.strip()}")


def _with_release(found: Looked) -> Looked:
    """Return it with the release of the torch that cannot be imported, where one is installed."""
    try:
        release = version("torch")
    except PackageNotFoundError:
        return found
    return Looked(TorchFacts(release, found.torch.cuda, found.torch.trouble), found.devices)


def _nothing(words: Sequence[str], trouble: str) -> Looked:
    torch = TorchFacts(trouble=trouble)
    return _with_release(Looked(torch, tuple(DeviceFacts(word, trouble=trouble) for word in words)))


def stored(baselines: Iterable[StoredBaseline]) -> tuple[StoredFacts, ...]:
    """Return the baselines of each environment, those of a slug together, sorted."""
    found: dict[str, StoredFacts] = {}
    for one in baselines:
        environment, metrics = one.entry.environment, frozenset(one.entry.metrics)
        key = f"{environment.slug} {sorted(environment.details.items())}"
        before = found.get(key, StoredFacts(environment, 0))
        found[key] = StoredFacts(
            environment,
            before.baselines + 1,
            before.metrics | metrics,
            before.has_times or one.entry.runs is not None,
        )
    return tuple(found[key] for key in sorted(found))
