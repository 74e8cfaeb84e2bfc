"""Collect facts from files, from NVML, and from separate processes with torch.

The only files written are the compiled stand-ins for CUDA's libraries, in the user's cache.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.base import command_name
from pytest_gpumem.emulating.emulation.torch_build import missing_for_compiling
from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.measuring.devices.nvml import NvmlGpu
from pytest_gpumem.tools.doctor.facts import DeviceFacts, ProbeResult, StoredFacts, TorchFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.base.command_name import OtherCommand
    from pytest_gpumem.reporting.reports.stored import StoredBaseline

_PATIENCE = 180.0
"""Seconds after which the probe is stopped. The first probe of an emulated GPU compiles the stand-ins."""
_RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
"""Python code for running a module as ``-m`` does, but without the current folder on the path.

The reason is that a stranger may have put a ``torch.py`` into the current folder.
"""


def releases() -> dict[str, str]:
    """Return the releases of Python, pytest and this plugin."""
    return {"Python": platform.python_version(), "pytest": pytest.__version__, "pytest-gpumem": __version__}


def driver() -> str:
    """Return the driver release from NVML, or ``unknown`` with NVML's error."""
    return NvmlGpu("").driver_version()


def compiling(environment: Mapping[str, str]) -> str | None:
    """Return a sentence about missing requirements for torch.compile on an emulated GPU, or ``None``."""
    return missing_for_compiling(environment)


def other_command() -> OtherCommand | None:
    """Return the first command ``gpumem`` on the path, if it belongs to another package."""
    return command_name.other_command()


def probe(words: Sequence[str], environment: Mapping[str, str]) -> ProbeResult:
    """Import torch and open devices in a new process, and return its report.

    If the process aborts or takes longer than 180 s, the result names this as the trouble with torch and each device.

    Args:
        words: Words for ``--gpumem-device``: built-in devices, or a single emulated GPU.
        environment: The environment variables for the new process, which runs the same Python as this process.

    Example:
        ``probe(["cuda", "cpu"], os.environ).devices`` has two `DeviceFacts`.
    """
    command = [sys.executable, "-c", _RUN_MODULE, "pytest_gpumem.tools.doctor.probe", *words]
    try:
        process = subprocess.run(
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
        return _failure(words, f"the process that checks it did not end within {_PATIENCE:g} s")
    last_line = process.stdout.strip().rpartition("\n")[2]
    if process.returncode == 0 and last_line.startswith("{"):
        result = from_plain(ProbeResult, json.loads(last_line))
        return result if result.torch.trouble is None else _with_release(result)
    error = next((line for line in reversed(process.stderr.splitlines()) if line.strip()), "it printed no error")
    return _failure(words, f"its process ended with status {process.returncode}: {error.strip()}")


def _with_release(result: ProbeResult) -> ProbeResult:
    """Add the release of torch from its installed files, if torch cannot be imported."""
    try:
        release = version("torch")
    except PackageNotFoundError:
        return result
    return ProbeResult(TorchFacts(release, result.torch.cuda, result.torch.trouble), result.devices)


def _failure(words: Sequence[str], trouble: str) -> ProbeResult:
    torch = TorchFacts(trouble=trouble)
    return _with_release(ProbeResult(torch, tuple(DeviceFacts(word, trouble=trouble) for word in words)))


def stored_facts(baselines: Iterable[StoredBaseline]) -> tuple[StoredFacts, ...]:
    """Count the baselines from each environment, sorted by slug.

    For example, three baselines recorded on the CPU, two with torch 2.12 and one with torch 2.13, are two `StoredFacts`.
    """
    by_environment: dict[str, StoredFacts] = {}
    for baseline in baselines:
        environment, metrics = baseline.entry.environment, frozenset(baseline.entry.metrics)
        key = f"{environment.slug} {sorted(environment.details.items())}"
        previous = by_environment.get(key, StoredFacts(environment, 0))
        by_environment[key] = StoredFacts(
            environment,
            previous.baselines + 1,
            previous.metrics | metrics,
            previous.has_times or baseline.entry.runs is not None,
        )
    return tuple(by_environment[key] for key in sorted(by_environment))
